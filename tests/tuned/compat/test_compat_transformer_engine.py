"""TransformerEngine's call against its definition: layouts, starts, packed sequences, context parallel, gradients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.compat_formula import REQUIRED, assert_agree, randn, rotated_by_feature, signature
from tuned.compat.transformer_engine import apply_rotary_pos_emb
from tuned.dispatch import rope

if TYPE_CHECKING:
    from collections.abc import Sequence

S, B, H, D = 8, 3, 2, 8
ROWS = 24
CU_SEQLENS = (0, 4, 4, 12, 20)  # lengths 4, 0, 8, 8: each divisible by 2 * cp_size with two ranks


def freqs_of(rotary: int = D) -> torch.Tensor:
    """Random freqs: the two entries of a pair differ, which is allowed with one entry for each feature."""
    return 3 * randn(ROWS, 1, 1, rotary, seed=5)


def positions_of(length: int, start: int = 0, cp_size: int = 1, cp_rank: int = 0) -> list[int]:
    """The positions of one sequence on a rank: a chunk from the front, and one equally far from the end."""
    chunk = length // (2 * cp_size)
    if cp_size == 1:
        return [start + i for i in range(length)]
    chunks = cp_rank, 2 * cp_size - 1 - cp_rank
    return [start + c * chunk + i for c in chunks for i in range(chunk)]


def formula(
    t: torch.Tensor, freqs: torch.Tensor, positions: Sequence[Sequence[int]], layout: str, *, interleaved: bool
) -> torch.Tensor:
    """``positions`` holds the positions of each sequence's tokens."""
    angles = freqs[torch.tensor(positions), 0, 0].double()  # [b, s, rotary]
    if layout == "sbhd":
        angles = angles.transpose(0, 1)
    elif layout == "thd":
        angles = angles[0]
    return rotated_by_feature(t, angles.cos(), angles.sin(), interleaved=interleaved)


def test_the_signature_is_theirs():
    # NVIDIA/TransformerEngine d0067d0d, transformer_engine/pytorch/attention/rope.py
    assert signature(apply_rotary_pos_emb) == (
        ("t", REQUIRED),
        ("freqs", REQUIRED),
        ("tensor_format", "sbhd"),
        ("start_positions", None),
        ("interleaved", False),
        ("fused", False),
        ("cu_seqlens", None),
        ("cp_size", 1),
        ("cp_rank", 0),
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [D, 6])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("ranks", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("starts", [None, (3, 0, 7)])
def test_batches(layout, ranks, rotary, interleaved, fused, starts):
    cp_size, cp_rank = ranks
    freqs = freqs_of(rotary)
    start_positions = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    positions = [positions_of(S * cp_size, start, cp_size, cp_rank) for start in starts or (0,) * B]
    assert_agree(
        lambda t: apply_rotary_pos_emb(t, freqs, layout, start_positions, interleaved, fused, None, cp_size, cp_rank),
        lambda t: formula(t, freqs, positions, layout, interleaved=interleaved),
        randn(*((S, B) if layout == "sbhd" else (B, S)), H, D),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ranks", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("starts", [None, (3, 1, 0, 7)])
def test_packed_sequences(ranks, interleaved, starts):
    cp_size, cp_rank = ranks
    freqs = freqs_of()
    lengths = [end - begin for begin, end in itertools.pairwise(CU_SEQLENS)]
    positions = [
        p
        for length, start in zip(lengths, starts or (0,) * len(lengths), strict=True)
        for p in positions_of(length, start, cp_size, cp_rank)
    ]
    assert_agree(
        lambda t: apply_rotary_pos_emb(
            t,
            freqs,
            tensor_format="thd",
            start_positions=None if starts is None else torch.tensor(starts, dtype=torch.int32),
            interleaved=interleaved,
            fused=True,
            cu_seqlens=torch.tensor(CU_SEQLENS, dtype=torch.int32),
            cp_size=cp_size,
            cp_rank=cp_rank,
        ),
        lambda t: formula(t, freqs, [positions], "thd", interleaved=interleaved),
        randn(CU_SEQLENS[-1] // cp_size, H, D),
    )


def test_bfloat16_with_float32_angles():
    assert_agree(
        lambda t: apply_rotary_pos_emb(t, freqs_of(6)),
        lambda t: formula(t, freqs_of(6), [range(S)] * B, "sbhd", interleaved=False),
        randn(S, B, H, D, dtype=torch.bfloat16),
    )


def test_low_precision_freqs_are_taken_in_float32():
    low = freqs_of().bfloat16()
    t = randn(S, B, H, D)
    assert torch.equal(apply_rotary_pos_emb(t, low), apply_rotary_pos_emb(t, low.float()))


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 3)])
def test_the_result_is_contiguous_whatever_lies_in_memory(axes, monkeypatch):
    def as_kernels_leave_it(t, *args, **kwargs):
        return torch.empty_like(t).copy_(rope(t, *args, **kwargs))

    monkeypatch.setattr("tuned.compat.transformer_engine.rope", as_kernels_leave_it)
    t = randn(S, B, H, D).transpose(*axes).contiguous().transpose(*axes)
    before = t.clone()
    out = apply_rotary_pos_emb(t, freqs_of())
    assert out.is_contiguous()
    assert torch.equal(out, apply_rotary_pos_emb(before, freqs_of()))
    assert torch.equal(t, before), "out of place"


def test_cu_seqlens_are_not_read_without_packing():
    t, freqs = randn(S, B, H, D), freqs_of()
    ignored = apply_rotary_pos_emb(t, freqs, cu_seqlens=torch.tensor((0, 99), dtype=torch.int32))
    assert torch.equal(ignored, apply_rotary_pos_emb(t, freqs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_format": "bhsd"}, "tensor_format must be one of"),
        ({"tensor_format": "thd"}, "cu_seqlens"),
        ({"freqs": freqs_of()[: S - 1]}, "too short"),
        ({"cp_size": 4, "cp_rank": 0}, "too short"),
        ({"cp_size": 2, "cp_rank": 2}, "cp_rank"),
        ({"start_positions": torch.tensor((0, 0, ROWS), dtype=torch.int32)}, str(ROWS)),
        ({"start_positions": torch.zeros(B + 1, dtype=torch.int32)}, "offset"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    thd = arguments.get("tensor_format") == "thd"
    given = {"t": randn(S, H, D) if thd else randn(S, B, H, D), "freqs": freqs_of(), **arguments}
    with pytest.raises(ValueError, match=message):
        apply_rotary_pos_emb(**given)
