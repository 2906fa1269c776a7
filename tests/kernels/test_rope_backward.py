"""Backward kernels against autograd of the formula in float64: the transpose, also where a pair has two angles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import pairwise
from tests.support.rope_case import RopeCase, assert_close, build, canonical, wanted
from tests.support.run import to_numpy
from tuned.families.rope.launches import kernel_name
from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, LAYOUTS, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant

if TYPE_CHECKING:
    import numpy as np

pytestmark = pytest.mark.interpreter

SCHEDULES = (
    RopeVariant(block_tokens=4, block_heads=4),
    RopeVariant(block_tokens=2, block_heads=2, order="tokens"),
)
CHOICES = ("layout", "rotary_dim", "style", "angles", "angle_entries")
SPECS = [
    RopeSpec(dtype="float32", heads=3, head_dim=16, direction="backward", **dict(zip(CHOICES, values, strict=True)))
    for values in itertools.product(LAYOUTS, (16, 10), STYLES, ANGLES, ANGLE_ENTRIES)
]
# Each text with each other choice, and every two choices together.
CASES = pairwise.covering(
    {"text": kernel_name(spec, variant), "order": variant.order, **{n: getattr(spec, n) for n in CHOICES}}
    for spec, variant in itertools.product(SPECS, SCHEDULES)
)


def formula(spec: RopeSpec, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + exchanged * sin, as models write it; x [seq, batch, heads, head_dim], cos and sin [seq, batch, entries]."""
    if spec.angle_entries == "pair":
        cos, sin = (
            torch.repeat_interleave(a, 2, -1) if spec.style == "interleaved" else torch.cat((a, a), -1)
            for a in (cos, sin)
        )
    cos, sin = cos[:, :, None], sin[:, :, None]
    turning, tail = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
    if spec.style == "interleaved":
        exchanged = torch.stack((-turning[..., 1::2], turning[..., 0::2]), -1).flatten(-2)
    else:
        low, high = turning.chunk(2, -1)
        exchanged = torch.cat((-high, low), -1)
    return torch.cat((turning * cos + exchanged * sin, tail), -1)


def gradient(spec: RopeSpec, cos: np.ndarray, sin: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Autograd's gradient of the formula; the formula is linear, so it needs no x."""
    x = torch.zeros(grad.shape, dtype=torch.float64, requires_grad=True)
    formula(spec, x, torch.from_numpy(cos), torch.from_numpy(sin)).backward(torch.from_numpy(grad))
    return x.grad.numpy()


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_the_backward_kernel_is_what_autograd_makes_of_the_formula(case: dict[str, Any]) -> None:
    spec = RopeSpec(dtype="float32", heads=3, head_dim=16, direction="backward", **{n: case[n] for n in CHOICES})
    variant = next(one for one in SCHEDULES if one.order == case["order"])
    packed = (0, 7) if spec.packed else None  # one sequence, so that the formula's positions are right
    built = build(RopeCase(spec, seq=7, batch=1 if packed else 2, cu_seqlens=packed))
    built.run(variant)
    _, bound = wanted(built)
    got = to_numpy(canonical(built.call.out, spec.layout))
    assert_close(got, gradient(spec, built.cos, built.sin, built.x_before), bound)


@pytest.mark.parametrize("spec", SPECS[::4], ids=lambda s: kernel_name(s, RopeVariant()))
def test_backward_after_forward_gives_back_x_where_a_pair_shares_its_angle(spec: RopeSpec) -> None:
    forward = dataclasses.replace(spec, direction="forward", angle_entries="pair")
    packed = (0, 3, 7) if spec.packed else None
    built = build(RopeCase(forward, seq=7, batch=1 if packed else 2, cu_seqlens=packed))
    built.run(SCHEDULES[0])
    _, bound = wanted(built)
    back = build(
        RopeCase(dataclasses.replace(forward, direction="backward"), seq=7, batch=built.call.batch, cu_seqlens=packed)
    )
    back.call.x.copy_(built.call.out)
    back.run(SCHEDULES[0])
    # Two roundings, the first of them then rotated: at most twice the bound of a pair, in each feature.
    assert_close(to_numpy(canonical(back.call.out, spec.layout)), built.x_before, 4 * bound)


@pytest.mark.parametrize("style", STYLES)
def test_a_pair_with_two_angles_is_transposed_not_turned_back(style: str) -> None:
    spec = RopeSpec("bshd", "float32", 3, 8, 8, style=style, angle_entries="feature", direction="backward")
    built = build(RopeCase(spec, seq=5))
    built.run(SCHEDULES[0])
    got, (_, bound) = to_numpy(canonical(built.call.out, "bshd")), wanted(built)
    turned_back = gradient(spec, built.cos, built.sin, built.x_before)
    assert_close(got, turned_back, bound)
    forward_of_minus = formula(
        spec, torch.from_numpy(built.x_before), torch.from_numpy(built.cos), torch.from_numpy(-built.sin)
    ).numpy()
    # Otherwise the case would not distinguish the transpose from the rotation by minus the angle.
    assert abs(got - forward_of_minus).max() > 0.1
