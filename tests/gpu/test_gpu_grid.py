"""The full grid of arguments on a real GPU: 13,824 forward and as many backward cases through the public call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.gpu import calls
from tests.gpu.grid import COMBINATIONS, DIMS, SIZES, U32, VIEWS, Combination, run_combination
from tuned.dispatch import rope, rope_backward

WANTED = 12_600  # forward cases, and backward cases: as many as the largest of the studies ran
SAMPLE = COMBINATIONS[::17]  # 17 is coprime to the length of every axis, so that the sample has each value of each axis


# The grid -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_call_is_right_forward_and_backward(combination: Combination) -> None:
    report = run_combination(combination)
    assert report.wrong == [], "\n".join(report.wrong)
    assert report.forward == report.backward == len(SIZES) * len(VIEWS)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_a_sample_of_calls_is_right_forward_and_backward(combination: Combination) -> None:
    report = run_combination(combination, every=13)
    assert report.wrong == []
    assert report.forward == report.backward > 0


# Complete calls -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(calls.ROWS)), ids=lambda i: f"{i}-{calls.row_id(calls.ROWS[i])}")
def test_every_complete_call_is_right_forward_and_backward(index: int) -> None:
    row = calls.ROWS[index]
    assert calls.refused(row) if calls.too_few(row) else calls.run_row(row) == []


@pytest.mark.gpu_sample
@pytest.mark.parametrize("index", range(0, len(calls.ROWS), 13))
def test_a_sample_of_complete_calls_is_right_forward_and_backward(index: int) -> None:
    row = calls.ROWS[index]
    assert calls.refused(row) if calls.too_few(row) else calls.run_row(row) == []


def test_the_rows_of_complete_calls_hold_every_value() -> None:
    for name, values in {**calls.AXES, "dims": calls.DIMS, "heads": calls.HEADS}.items():
        assert {row[name] for row in calls.ROWS} == set(values), name
    # Tests the harness itself, in eager PyTorch if there is no GPU: it must not call a right result wrong.
    row = next(row for row in calls.ROWS if row["rows"] != "too few" and row["use"] == "forward")
    assert calls.run_row(row) == []


# Tensors too large for the grid -----------------------------------------------------------------------------------------

STUDY = (16, 512, 10, 512)  # the studies' benchmark shape; 84 MB in bfloat16, beyond the L2
REPEATS = 200


def angles(rows: int, pairs: int, first: float = 0.0) -> torch.Tensor:
    """A model's angles, float32 [rows, pairs], from position ``first``."""
    rates = 500_000.0 ** -(torch.arange(pairs, device="cuda", dtype=torch.float64) / pairs)
    return ((first + torch.arange(rows, device="cuda", dtype=torch.float64))[:, None] * rates).float()


def call(layout: str, tokens: int, **rest: Any) -> dict[str, Any]:
    """The arguments of a layout's call besides x and angles; a packed call has a single sequence."""
    arguments = {"tensor_format": layout, "angle_entries": "pair", **rest}
    if layout == "thd":
        arguments["cu_seqlens"] = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    return arguments


@pytest.mark.gpu
@pytest.mark.parametrize("rotary_dim", [512, 256])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_in_place_is_bitwise_the_same_two_hundred_times(layout: str, *, interleaved: bool, rotary_dim: int) -> None:
    batch, seq, heads, dim = STUDY
    shape = {"sbhd": (seq, batch, heads, dim), "bshd": STUDY, "thd": (batch * seq, heads, dim)}[layout]
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    freqs = angles(batch * seq if layout == "thd" else seq, rotary_dim // 2)
    arguments = call(layout, batch * seq, interleaved=interleaved)
    want = rope(x, freqs, **arguments)
    same = []
    for _ in range(REPEATS):
        again = x.clone()
        rope(again, freqs, inplace=True, **arguments)
        same.append((again == want).all())
    assert not bool(want.isnan().any())
    assert bool(torch.stack(same).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_tensor_of_more_than_2_to_the_31_elements_is_right(layout: str, *, inplace: bool) -> None:
    heads, dim = 32, 128
    tokens = 2**31 // (heads * dim) + 77
    needed = 4 * 2 * tokens * heads * dim  # x, the result, and room for what comparing takes
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    tokens_axis = 1 if layout == "bshd" else 0
    shape = {"sbhd": (tokens, 1, heads, dim), "bshd": (1, tokens, heads, dim), "thd": (tokens, heads, dim)}[layout]
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    freqs = angles(tokens, dim // 2)
    # Computing it slab by slab, none of them large, gives the same bits.
    starts = range(0, tokens, 2**16)
    slabs = [x.narrow(tokens_axis, start, min(2**16, tokens - start)).clone() for start in starts]
    out = rope(x, freqs, inplace=inplace, **call(layout, tokens))
    back = rope_backward(x, freqs, **call(layout, tokens)) if not inplace else None
    for start, slab in zip(starts, slabs, strict=True):
        length = slab.shape[tokens_axis]
        rows, arguments = freqs[start : start + length], call(layout, length)
        assert torch.equal(out.narrow(tokens_axis, start, length), rope(slab, rows, **arguments))
        if back is not None:
            assert torch.equal(back.narrow(tokens_axis, start, length), rope_backward(slab, rows, **arguments))


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_strides_beyond_2_to_the_31_are_followed() -> None:
    # Two tokens lie 2^31 + 2^16 elements apart: only their two rows are ever touched.
    apart = 2**31 + 2**16
    if torch.cuda.mem_get_info()[0] < 3 * 2 * apart:
        pytest.skip("needs 12 GiB of free GPU memory")
    memory = torch.empty(apart + 1024, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((1, 2, 4, 128), (1024, apart, 128, 1)).normal_()
    freqs = angles(2, 64)
    want = rope(x.contiguous(), freqs, angle_entries="pair")
    assert torch.equal(rope(x, freqs, angle_entries="pair"), want)
    rope(x, freqs, angle_entries="pair", inplace=True)
    assert torch.equal(x, want)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("first", [1e5, 1e6, 1e9], ids="from-{:g}".format)
def test_positions_beyond_1e5_are_as_right_as_the_first(first: float, *, interleaved: bool) -> None:
    seq, heads, dim = 257, 4, 128
    x = torch.randn(1, seq, heads, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    freqs = angles(seq, dim // 2, first)
    out = rope(x, freqs, angle_entries="pair", interleaved=interleaved).double()
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = freqs.double()
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    want = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    got = out.unflatten(-1, (-1, 2)) if interleaved else out.unflatten(-1, (2, -1)).transpose(-1, -2)
    bound = 4 * U32 * pairs.abs().sum(-1, keepdim=True)  # explained in tests/support/oracle.py
    assert bool(((got - want).abs() <= bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("seq", "batch", "heads", "dim"), [(64, 1, 16, 64), (128, 1, 16, 128), (32, 1, 8, 256)])
def test_the_studies_random_runs_are_right(seq: int, batch: int, heads: int, dim: int) -> None:
    # Three hundred runs of each of these calls, which once failed at random.
    draw = torch.Generator("cuda").manual_seed(0)
    same = []
    for _ in range(300):
        x = torch.randn(seq, batch, heads, dim, device="cuda", generator=draw)
        freqs = torch.randn(seq, 1, 1, dim, device="cuda", generator=draw)
        cos, sin = freqs.double().cos(), freqs.double().sin()
        low, high = x.double().chunk(2, -1)
        want = x.double() * cos + torch.cat((-high, low), -1) * sin
        size = (low.abs() + high.abs()).repeat(1, 1, 1, 2)
        same.append(((rope(x, freqs, tensor_format="sbhd").double() - want).abs() <= 4 * U32 * size).all())
    assert bool(torch.stack(same).all())


def test_the_grid_names_what_it_holds() -> None:
    assert len({str(combination) for combination in COMBINATIONS}) == len(COMBINATIONS)
    axes = list(zip(*((c.layout, c.style, c.dtype, c.angles, c.entries, c.inplace) for c in COMBINATIONS), strict=True))
    sampled = list(zip(*((c.layout, c.style, c.dtype, c.angles, c.entries, c.inplace) for c in SAMPLE), strict=True))
    assert [set(axis) for axis in sampled] == [set(axis) for axis in axes]
    planned = len(COMBINATIONS) * len(SIZES) * len(VIEWS)
    assert planned >= WANTED
    assert planned == 13_824, "as the first line says"
    for axis in axes:
        met = set(zip(axis, (c.dims() for c in COMBINATIONS), strict=True))
        assert met == set(itertools.product(set(axis), DIMS))
