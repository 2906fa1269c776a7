"""Megatron's calls of MLA, compared with its unfused operators, token by token."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from tuned.compat.megatron import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q

SEQ, BATCH, HEADS, KEPT, TURNED, VALUE = 6, 2, 3, 8, 4, 5


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def table(rows: int = 40) -> list[torch.Tensor]:
    """Cosines and sines [rows, 1, 1, entries]; the two entries of a pair differ."""
    return [torch.randn(rows, 1, 1, TURNED, dtype=torch.float64) for _ in range(2)]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours to halves, then t * cos + rotate_half(t) * sin; cos and sin [tokens, 1 or more, entries]."""
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    first, second = halves.chunk(2, -1)
    return halves * cos + torch.cat((-second, first), -1) * sin


def places(bounds: list[int], cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
    """The position of each token of a rank: a sequence has 2 cp_size chunks, and a rank holds two of them."""
    found = []
    for begin, end in itertools.pairwise(bounds):
        chunk = (end - begin) // (2 * cp_size) if cp_size > 1 else end - begin
        parts = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        found += [torch.arange(part * chunk, (part + 1) * chunk) for part in parts]
    return torch.cat(found)


# bounds of whole sequences, ranks, rank
PACKED = [([0, 4, 4, 12], 1, 0), ([0, 8, 24], 2, 1), ([0, 8, 24], 2, 0)]


@pytest.mark.parametrize("packed", [None, *PACKED])
def test_a_query_is_rotated_in_place(packed: Any) -> None:
    cos, sin = table()
    if packed is None:
        leaf = torch.randn(SEQ, BATCH, HEADS, KEPT + TURNED, dtype=torch.float64, requires_grad=True)
        named, rows = {"cp_rank": 1, "cp_size": 2}, torch.arange(SEQ)  # without cu_seqlens ranks have no effect
        own = [t[rows] for t in (cos, sin)]
    else:
        bounds, cp_size, cp_rank = packed
        rows = places(bounds, cp_size, cp_rank)
        leaf = torch.randn(len(rows), HEADS, KEPT + TURNED, dtype=torch.float64, requires_grad=True)
        named = {"cu_seqlens_q": torch.tensor(bounds, dtype=torch.int32), "cp_rank": cp_rank, "cp_size": cp_size}
        own = [t[rows, 0] for t in (cos, sin)]
    q = leaf * 1
    out = fused_apply_mla_rope_for_q(q, cos, sin, KEPT, TURNED, **named)
    assert out is q
    wanted = torch.cat((leaf[..., :KEPT], turned(leaf[..., KEPT:], *own)), -1)
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf, weight) for t in (out, wanted)))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("packed", [None, *PACKED])
def test_a_key_and_a_value_are_made(packed: Any, buffers: bool) -> None:
    cos, sin = table()
    rows = torch.arange(SEQ) if packed is None else places(*packed)
    tokens = (SEQ, BATCH) if packed is None else (len(rows),)
    named: dict[str, Any] = {}
    if packed is not None:
        bounds = torch.tensor(packed[0], dtype=torch.int32)
        named = {"cu_seqlens_kv": bounds, "cp_size": packed[1], "cp_rank": packed[2]}
    kv = torch.randn(*tokens, HEADS, KEPT + VALUE, dtype=torch.float64, requires_grad=True)
    wide = torch.randn(*tokens, 7 + TURNED, dtype=torch.float64, requires_grad=True)
    own = [t[rows] if packed is None else t[rows, 0] for t in (cos, sin)]
    if buffers:
        named["out_key"] = torch.empty(*tokens, HEADS, KEPT + TURNED, dtype=torch.float64)
        named["out_value"] = torch.empty(*tokens, HEADS, VALUE, dtype=torch.float64)
    k_pe = wide[..., None, 7:]
    for _ in range(3 if buffers else 1):  # several steps of training, each in the memory of the step before
        made = fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, TURNED, KEPT, VALUE, **named)
        for out, name in zip(made, ("out_key", "out_value"), strict=True):
            assert not buffers or out.data_ptr() == named[name].data_ptr()
            assert not buffers or not named[name].requires_grad
    shared = turned(k_pe, *own).expand(*tokens, HEADS, TURNED)
    wanted = torch.cat((kv[..., :KEPT], shared), -1), kv[..., KEPT:]
    torch.testing.assert_close(made, wanted)
    weights = [torch.randn_like(t) for t in wanted]
    torch.testing.assert_close(*(torch.autograd.grad(t, (kv, wide), weights) for t in (made, wanted)))


def test_the_signatures_are_megatrons() -> None:
    """The signatures in megatron.core.fusions.fused_mla_yarn_rope_apply."""
    of_q = "t cos sin qk_head_dim emb_dim cu_seqlens_q cp_rank cp_size rotary_interleaved"
    of_kv = (
        "kv k_pos_emb cos sin emb_dim k_dim v_dim cu_seqlens_kv cp_rank cp_size rotary_interleaved out_key out_value"
    )
    assert list(inspect.signature(fused_apply_mla_rope_for_q).parameters) == of_q.split()
    assert list(inspect.signature(fused_apply_mla_rope_for_kv).parameters) == of_kv.split()


def test_a_buffer_that_does_not_fit_is_refused_before_either_is_written() -> None:
    cos, sin = table()
    kv, k_pe = torch.randn(SEQ, BATCH, HEADS, KEPT + VALUE).double(), torch.randn(SEQ, BATCH, 1, TURNED).double()
    key, value = (
        torch.zeros(SEQ, BATCH, HEADS, KEPT + TURNED).double(),
        torch.zeros(SEQ, BATCH, HEADS, VALUE + 1).double(),
    )
    with pytest.raises(ValueError, match="out_value must be"):
        fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, TURNED, KEPT, VALUE, out_key=key, out_value=value)
    assert not key.any()
    value = torch.zeros(1, BATCH, HEADS, VALUE).double().expand(SEQ, -1, -1, -1)
    with pytest.raises(ValueError, match=r"out_value cannot be overwritten: .*pass out_value=None for new memory"):
        fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, TURNED, KEPT, VALUE, out_key=key, out_value=value)
    assert not key.any()
    with torch.no_grad():
        value = torch.empty(SEQ, BATCH, HEADS, VALUE).double()
        made = fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, TURNED, KEPT, VALUE, out_key=key, out_value=value)
    assert made[0] is key
    assert made[1] is value
