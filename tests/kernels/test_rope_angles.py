"""Kernels of the gradient of angles, interpreted: every text and setting against float64, and sums in a fixed order."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.rope.reference import _tensors
from generator.families.rope.texts import angle_gradient_specs
from generator.measuring.check import check, inputs_of, probe
from generator.rendering.structures import load
from generator.workload import WORKLOADS
from tests.support import pairwise
from tests.support.run import INTERPRETED
from tuned.families.rope.eager import rotate, spread
from tuned.families.rope.launches import RopeCall, kernel_name, launches, token_angles
from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, LAYOUTS, POSITIONS, ROTATED, STYLES, RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant, rejection

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_rope_angles.py has these on a GPU"),
]
SIZE = RopeSize(2, 5)
TEXTS = [{"style": style, "angles": angles} for style, angles in itertools.product(STYLES, ANGLES)]
OTHERS: dict[str, Any] = {
    "layout": LAYOUTS,
    "dtype": ("float32", "bfloat16", "float16"),
    "rotated": (*ROTATED, "put apart"),
    "shape": (
        (3, 2, 8, 8),
        (5, 0, 12, 4),
        (2, 1, 20, 20),
        (4, -2, 16, 8),
        (4, 3, 6, 2),
    ),  # negative: this many heads are copied
    "positions": (*POSITIONS[:-1], "axes", "ranks"),
    "angle_entries": ANGLE_ENTRIES,
    "conjugate": (False, True),
    "scaled": (False, True),
    "angles_per_batch": (False, True),
}
# Every two values of the other axes that can meet, over the texts in turn.
ROWS = pairwise.covering(pairwise.sample(OTHERS, lambda _: True, 4000))


def spec_of(index: int) -> RopeSpec:
    row = TEXTS[index % len(TEXTS)] | ROWS[index]
    heads, key_heads, head_dim, rotary = row.pop("shape")
    copied, key_heads = max(0, -key_heads), max(0, key_heads)
    if row["positions"] == "axes":
        row["sections"] = (rotary // 4, rotary // 2 - rotary // 4)
    if row["positions"] == "ranks":
        row |= {"positions": "order", "context_parallel": True}
    if row["rotated"] == "put apart":
        row["rotated"] = "last"
        row["deinterleaves"] = row["style"] == "half" and not copied
    if rotary == head_dim or (row["style"] == "interleaved" and row["rotated"] == "proportional"):
        row["rotated"] = "first" if rotary == head_dim else "last"
    if row["layout"] == "thd" or row["angles"] == "inv_freq":
        row["angles_per_batch"] = False
    return RopeSpec(
        heads=heads, head_dim=head_dim, rotary_dim=rotary, key_heads=key_heads, copied_heads=copied,
        direction="backward", angle_gradient=True, **row,
    )  # fmt: skip


CASES = [spec_of(index) for index in range(len(ROWS))]


def variant_of(spec: RopeSpec, seed: int) -> RopeVariant:
    """A legal variant, drawn at random; one with small tiles if no draw is legal."""
    tiles = [RopeVariant(t, h, num_warps=w) for t in (1, 2, 4) for h in (1, 2, 4) for w in (1, 2)]
    legal = [one for one in tiles if rejection(spec, SIZE, one) is None]
    return random.Random(seed).choice(legal) if legal else dataclasses.replace(default_variant(spec, SIZE), pdl=False)


def run(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> None:
    (launch,) = launches(spec, variant, call)
    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants)


def in_float64(spec: RopeSpec, call: RopeCall) -> list[torch.Tensor]:
    """The gradients of the angles, by autograd through the rotation of the forward's input."""
    leaves = [t.detach().clone().requires_grad_() for t in (call.cos, call.sin) if t is not None]
    given, grads = (_whole(spec, call, t.double()) for t in (call.given, call.x))
    named = {"cos": leaves[0], "sin": leaves[1] if len(leaves) > 1 else None}
    named |= {"x": given[0], "key": given[1] if spec.key_heads else None}
    forward = dataclasses.replace(spec, direction="forward", angle_gradient=False)
    out = [t for t in rotate(forward, dataclasses.replace(call, **named)) if t is not None]
    return list(torch.autograd.grad(out, leaves, grads))


def _whole(spec: RopeSpec, call: RopeCall, x: torch.Tensor) -> list[torch.Tensor]:
    return [x] if x.ndim > 2 else _tensors(spec, call, x)


def of_tables(spec: RopeSpec, call: RopeCall) -> list[torch.Tensor]:
    """The gradients of the angles, made from the kernel's results."""
    of_tokens = call.angle_grad.view(token_angles(spec, call.seq, call.batch))
    return [t for t in spread(spec, call, list(of_tokens)) if t is not None]


def test_the_cases_reach_every_text() -> None:
    names = {kernel_name(spec, RopeVariant()) for spec in CASES}
    assert names == {kernel_name(spec, RopeVariant()) for spec in angle_gradient_specs()}


@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_text_and_setting_is_right(index: int) -> None:
    spec = CASES[index]
    work = WORKLOADS["rope"]
    call = probe(work.inputs(spec, SIZE, "cpu", index))
    call.angle_grad.fill_(torch.nan)
    wanted, bound = work.reference(spec, call)
    before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
    run(spec, variant_of(spec, index), call)
    # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
    check(call.out, wanted, 2 * bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})
    for ours, theirs in zip(of_tables(spec, call), in_float64(spec, call), strict=True):
        rounding = {"rtol": 1e-5, "atol": 1e-5 * float(theirs.abs().max() + 1)}
        if theirs.dtype.itemsize == 2:
            rounding["rtol"] = 2.0**-7
        torch.testing.assert_close(ours, theirs, **rounding)


def test_tokens_of_no_sequence_add_nothing() -> None:
    """Whatever their memory holds: the padding of a batch may be NaN."""
    spec = RopeSpec("thd", "float32", 3, 8, 8, angles="freqs", key_heads=2, direction="backward", angle_gradient=True)
    found = []
    for stands in (0.0, torch.nan):
        call = WORKLOADS["rope"].inputs(spec, SIZE, "cpu", 0)
        call.cu_seqlens.copy_(torch.tensor([1, 4, 8]))
        for t in (call.x, call.given):
            for part in _tensors(spec, call, t):
                part[[0, 8, 9]] = stands
        run(spec, RopeVariant(2, 2, num_warps=1), call)
        found.append(call.angle_grad.clone())
    assert torch.equal(*found)
    assert not found[0][..., [0, 8, 9], :].any()


def test_copied_heads_add_nothing() -> None:
    """For example the values of a packed qkv, whose gradients may be infinite."""
    spec = RopeSpec(
        "bshd", "float32", 5, 8, 8, angles="cos_sin", copied_heads=2, direction="backward", angle_gradient=True
    )
    found = []
    for stands in (0.0, torch.inf):
        call = WORKLOADS["rope"].inputs(spec, SIZE, "cpu", 0)
        call.x[..., 3:, :] = stands
        run(spec, RopeVariant(1, 4, num_warps=1), call)
        assert torch.equal(call.out[..., 3:, :], call.x[..., 3:, :])
        found.append(call.angle_grad.clone())
    assert torch.equal(*found)


def test_each_run_sums_the_heads_in_one_order() -> None:
    spec = RopeSpec("bshd", "float32", 37, 8, 8, angles="cos_sin", direction="backward", angle_gradient=True)
    found = []
    for _ in range(2):
        call = WORKLOADS["rope"].inputs(spec, SIZE, "cpu", 1)
        run(spec, RopeVariant(2, 4, num_warps=1), call)
        found.append(call.angle_grad.clone())
    assert torch.equal(*found)
