"""The sine and cosine that kernels compute, over the whole range of float32."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import torch

from generator.rendering.structures import load
from tests.support import compiling
from tests.support.run import DEVICE

pytestmark = pytest.mark.interpreter

COUNT = 2**18
BOUND = (
    2.1 * 2.0**-24
)  # what the docstring promises, absolute; 2.04 was the most of 2^26 values, without fused multiply-add
WIDTH = 64


def sincos(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine by the table kernel, as float64."""
    cos, sin = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    rows = x.numel() // WIDTH
    with np.errstate(all="ignore"):
        load("rope_table")[(-(-x.numel() // 2**15),)](
            x.view(rows, WIDTH), cos, sin, rows, WIDTH, 1, WIDTH=WIDTH, BLOCK=2**15, PDL=False, num_warps=8
        )
    return cos.double().cpu().numpy(), sin.double().cpu().numpy()


def assert_close(x: torch.Tensor) -> None:
    cos, sin = sincos(x)
    exact = x.double().cpu().numpy()
    assert np.abs(cos - np.cos(exact)).max() <= BOUND
    assert np.abs(sin - np.sin(exact)).max() <= BOUND


def test_every_magnitude_is_right() -> None:
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (COUNT,), generator=draw).to(torch.int32)
    x = bits.view(torch.float32)
    assert_close(torch.where(torch.isfinite(x), x, 0.0).to(DEVICE))


@pytest.mark.parametrize("largest", [1.0, 1e3, 1.2e5, 1e9])
def test_angles_of_positions_are_right(largest: float) -> None:
    draw = torch.Generator().manual_seed(1)
    assert_close(((torch.rand(COUNT, generator=draw) * 2 - 1) * largest).to(DEVICE))


def test_multiples_of_a_quarter_turn_are_right_on_both_sides() -> None:
    near = (torch.arange(COUNT // 4, dtype=torch.float64) * (torch.pi / 2)).float()
    sides = [torch.nextafter(near, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    assert_close(torch.cat((near, *sides, -near)).to(DEVICE))


def test_what_has_no_sine_is_nan() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]).repeat(WIDTH).to(DEVICE)
    cos, sin = sincos(x)
    assert np.isnan(cos.reshape(-1, 4)[:, :3]).all()
    assert np.isnan(sin.reshape(-1, 4)[:, :3]).all()
    assert (cos.reshape(-1, 4)[:, 3] == 1).all()
    assert (sin.reshape(-1, 4)[:, 3] == 0).all()


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("entries", ["feature", "pair"])
def test_no_kernel_adds_two_halves_of_a_word_at_once(
    compiler: concurrent.futures.Executor, style: str, entries: str
) -> None:
    # ptxas 12.8, in Triton 3.6 and 3.7, loses the constant of some such additions, which LLVM makes for a tile of two
    # angles a thread: its cosines were wrong. Only kernels compiled by Triton 3.6 had such additions.
    found = []
    for dtype, knobs in (
        ("float32", {"block_tokens": 4, "block_heads": 2, "num_warps": 2, "pdl": True}),
        ("bfloat16", {"block_tokens": 2, "block_heads": 8, "num_warps": 4}),
    ):
        arguments = {
            "layout": "bshd", "dtype": dtype, "heads": 2, "head_dim": 96, "rotary_dim": 48, "style": style,
            "angles": "freqs", "angle_entries": entries, "inplace": False,
        }  # fmt: skip
        for strides in ((192, 3072, 96, 1), (192, 3072, 1, 2)):
            found += compiler.submit(compiling.packed_halves, arguments, knobs, strides).result()
    assert found == []
