"""The sine and cosine that kernels take, over the whole of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from generator.rendering.modules import load
from tests.run import DEVICE

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
