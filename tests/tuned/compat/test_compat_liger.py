"""Liger's calls against their definition: GQA, cos and sin of the batch or of each sequence, gradients, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.support.compat_formula import REQUIRED, assert_agree, randn, rotated, signature, tables
from tuned.compat.liger import liger_rotary_pos_emb, liger_rotary_pos_emb_vision

B, H, S, D = 2, 4, 5, 8


def doubled(rows: int, batch: int | None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """cos and sin [batch, rows, D] whose halves are equal; [rows, D] without a batch."""
    both = (torch.cat((a, a), -1) for a in tables(rows * (batch or 1), D // 2, dtype=dtype))
    return tuple(a if batch is None else a.view(batch, rows, D) for a in both)


def formula(cos: torch.Tensor, sin: torch.Tensor, seq: int = S):
    def turned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one_a_pair = [a[..., :seq, : D // 2] for a in (cos, sin)]
        return tuple(rotated(x.transpose(1, 2), *one_a_pair).transpose(1, 2) for x in tensors)

    return turned


def test_the_signatures_are_theirs():
    # linkedin/Liger-Kernel ead96b61, src/liger_kernel/transformers/rope.py
    tensors = tuple((name, REQUIRED) for name in ("q", "k", "cos", "sin"))
    assert signature(liger_rotary_pos_emb) == (*tensors, ("position_ids", None), ("unsqueeze_dim", 1))
    assert signature(liger_rotary_pos_emb_vision) == tensors


@pytest.mark.parametrize("batch", [1, B, None], ids=["shared", "each", "two axes"])
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("rows", [S, S + 3])
def test_q_and_k(kv_heads, batch, rows):
    cos, sin = doubled(rows, batch)
    assert_agree(
        lambda q, k: liger_rotary_pos_emb(q, k, cos, sin),
        formula(cos, sin),
        randn(B, H, S, D),
        randn(B, kv_heads, S, D, seed=1),
    )


def test_one_token_of_each_sequence():
    """A decoding step has one row of cos and sin for each sequence, not one for each position."""
    cos, sin = doubled(1, B)
    assert_agree(
        lambda q, k: liger_rotary_pos_emb(q, k, cos, sin),
        formula(cos, sin),
        randn(B, H, 1, D),
        randn(B, 2, 1, D, seed=1),
    )


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_computed_in_float32(table_dtype):
    cos, sin = doubled(S, 1, table_dtype)
    q, k = (randn(B, heads, S, D, seed=heads, dtype=torch.bfloat16) for heads in (H, 1))
    assert_agree(lambda q, k: liger_rotary_pos_emb(q, k, cos, sin), formula(cos, sin), q, k)


@pytest.mark.parametrize("tables", [1, B])
def test_only_the_first_half_of_cos_and_sin_is_read(tables):
    cos, sin = doubled(S, tables)
    q, k = randn(B, H, S, D), randn(B, 1, S, D, seed=1)
    want = liger_rotary_pos_emb(q, k, cos.clone(), sin.clone())
    cos[..., D // 2 :] = sin[..., D // 2 :] = torch.nan
    for got, wanted in zip(liger_rotary_pos_emb(q, k, cos, sin), want, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("physical", ["bhsd", "bshd"])
def test_what_is_given_is_left_alone(physical):
    q, k = (randn(B, heads, S, D, seed=heads) for heads in (H, 2))
    if physical == "bshd":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    before = q.clone(), k.clone()
    got = liger_rotary_pos_emb(q, k, *doubled(S, 1), torch.arange(S)[None], 1)
    for given, kept, out in zip((q, k), before, got, strict=True):
        assert torch.equal(given, kept)
        assert not torch.equal(out, kept)


def test_a_vision_tower():
    cos, sin = doubled(S, None)
    assert_agree(
        lambda q, k: liger_rotary_pos_emb_vision(q, k, cos, sin),
        lambda *tensors: [rotated(x, cos[:, : D // 2], sin[:, : D // 2]) for x in tensors],
        randn(S, H, D),
        randn(S, 2, D, seed=1),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unsqueeze_dim": 2}, "unsqueeze_dim must be 1"),
        ({"cos": doubled(S, 1)[0][..., : D // 2]}, "cos must have head_dim=8 entries per token, got 4"),
        ({"sin": doubled(S, 1)[1][..., : D // 2]}, "sin must have head_dim=8 entries per token, got 4"),
        ({"cos": doubled(S - 1, 1)[0], "sin": doubled(S - 1, 1)[1]}, "too short"),
        ({"cos": doubled(S, B + 1)[0], "sin": doubled(S, B + 1)[1]}, "batch"),
        ({"k": randn(B, H, S + 1, D)}, "k must have the tokens"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    cos, sin = doubled(S, 1)
    given = {"q": randn(B, H, S, D), "k": randn(B, 2, S, D), "cos": cos, "sin": sin, **arguments}
    with pytest.raises(ValueError, match=message):
        liger_rotary_pos_emb(**given)
