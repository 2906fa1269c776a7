"""Kernels of a rotation with a norm, interpreted: every text and setting, and weights' gradients, against float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.rope.reference import inputs
from generator.families.rope.texts import norm_specs
from generator.measuring.check import WrongResultError, check, inputs_of, probe
from generator.rendering.structures import load
from generator.workload import WORKLOADS
from tests.support import pairwise
from tests.support.run import INTERPRETED
from tuned.families.rope import launches as rope_launches
from tuned.families.rope import variant as rope_variant
from tuned.families.rope.eager import rotate
from tuned.families.rope.launches import RopeCall, kernel_name, launches
from tuned.families.rope.spec import (
    ANGLE_ENTRIES,
    ANGLES,
    LAYOUTS,
    POSITIONS,
    ROTATED,
    ROUNDINGS,
    STYLES,
    RopeSize,
    RopeSpec,
)
from tuned.families.rope.variant import RopeVariant, default_variant, rejection

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_rope_norm.py has these on a GPU"),
]
SIZE = RopeSize(2, 5)
TEXTS = [
    {"direction": direction, "inplace": inplace, "style": style, "angles": angles}
    for (direction, inplace), style, angles in itertools.product(
        (("forward", False), ("forward", True), ("backward", False)), STYLES, ANGLES
    )
]
OTHERS: dict[str, Any] = {
    "norm": ("head", "all"),
    "layout": LAYOUTS,
    "dtype": ("float32", "bfloat16", "float16"),
    "rotated": ROTATED,
    "shape": ((3, 2, 8, 8), (5, 0, 12, 4), (2, 1, 20, 20), (1, 1, 16, 8), (4, 3, 6, 2)),
    "positions": (*POSITIONS[:-1], "axes", "axes in turn"),
    "angle_entries": ANGLE_ENTRIES,
    "rounding": ROUNDINGS,
    "zero_centered": (False, True),
    "conjugate": (False, True),
}
# Every two values of the other axes that can meet, over the texts in turn; each text occurs twice.
ROWS = pairwise.covering(pairwise.product(OTHERS, lambda _: True))
COUNT = max(len(ROWS), 2 * len(TEXTS))


def spec_of(index: int) -> RopeSpec:
    row = TEXTS[index % len(TEXTS)] | ROWS[index % len(ROWS)]
    heads, key_heads, head_dim, rotary = row.pop("shape")
    pairs = rotary // 2
    if row["positions"] == "axes in turn":
        row |= {"positions": "axes", "sections": (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)}
        row["sections_interleaved"] = True
    elif row["positions"] == "axes":
        row["sections"] = (pairs // 2, pairs - pairs // 2)
    if rotary == head_dim or (row["style"] == "interleaved" and row["rotated"] == "proportional"):
        row["rotated"] = "first" if rotary == head_dim else "last"
    return RopeSpec(heads=heads, key_heads=key_heads, head_dim=head_dim, rotary_dim=rotary, **row)


CASES = [spec_of(index) for index in range(COUNT)]


def variant_of(spec: RopeSpec, seed: int) -> RopeVariant:
    """A legal variant, drawn at random; one with small tiles if no draw is legal."""
    rng = random.Random(seed)
    tiles = [RopeVariant(t, h, num_warps=w) for t in (1, 2, 4) for h in (1, 2, 4, 8) for w in (1, 2, 4)]
    legal = [one for one in tiles if rejection(spec, SIZE, one) is None]
    return rng.choice(legal) if legal else dataclasses.replace(default_variant(spec, SIZE), pdl=False)


def run(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> None:
    for launch in launches(spec, variant, call):
        with np.errstate(all="ignore"):
            load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants)


def test_the_cases_reach_every_text() -> None:
    assert {kernel_name(spec, RopeVariant()) for spec in CASES} == {
        kernel_name(spec, RopeVariant()) for spec in norm_specs()
    }


@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_text_and_setting_is_right(index: int) -> None:
    spec = CASES[index]
    work = WORKLOADS["rope"]
    call = probe(work.inputs(spec, SIZE, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
    run(spec, variant_of(spec, index), call)
    # The interpreter drops the low bits of a bfloat16 store where a GPU rounds: twice the error of one rounding.
    check(call.out, wanted, 2 * bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})


IN_CHUNKS = [dataclasses.replace(spec, norm="all") for spec in CASES]


@pytest.mark.parametrize("index", range(len(IN_CHUNKS)))
def test_heads_in_chunks_are_right(index: int) -> None:
    """Chunks of the query, of the key, of both, and with empty rows."""
    spec, work = IN_CHUNKS[index], WORKLOADS["rope"]
    call = probe(work.inputs(spec, SIZE, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
    chunk = 2 if spec.all_heads > 2 else 1
    run(spec, RopeVariant(1 + index % 2, 8, num_warps=4, chunk_heads=chunk), call)
    check(call.out, wanted, 2 * bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})


def test_chunks_reach_every_text() -> None:
    assert {kernel_name(spec, RopeVariant()) for spec in IN_CHUNKS} == {
        kernel_name(spec, RopeVariant()) for spec in norm_specs()
    }


HELD = [("head", False, 8), ("all", True, 8), ("head", True, 12), ("all", False, 16)]


def test_every_number_of_resident_warps_is_tested() -> None:
    assert {warps for _, _, warps in HELD} == set(rope_variant.RESIDENT) - {0}


@pytest.mark.parametrize(("norm", "inplace", "resident"), HELD)
def test_programs_that_take_tile_after_tile_are_right(
    norm: str, inplace: bool, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs take the tiles of all batch entries; the last tile of an entry has fewer tokens than the others."""
    monkeypatch.setattr(rope_variant, "MULTIPROCESSORS", 3)
    spec = RopeSpec("bshd", "float32", 3, 8, 4, angles="cos_sin", key_heads=2, norm=norm, inplace=inplace)
    size, work = RopeSize(2, 19), WORKLOADS["rope"]
    variant = RopeVariant(2, 8, num_warps=4, resident=resident)
    assert rope_variant.stages(spec, variant) > 1
    assert rope_variant.programs(spec, variant, size.seq, size.batch) == 3 * resident // 4
    assert rope_variant.programs(spec, dataclasses.replace(variant, resident=0), size.seq, size.batch) == 20
    call = probe(inputs(spec, size, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    run(spec, variant, call)
    check(call.out, wanted, bound, {})


def test_a_tile_too_large_to_wait_has_a_program_of_its_own() -> None:
    """A row of another call may have such a variant."""
    spec = RopeSpec("bshd", "float32", 128, 128, 128, angles="cos_sin", key_heads=128, norm="all")
    few, each = RopeVariant(1, 8, num_warps=8, resident=8), RopeVariant(1, 8, num_warps=8)
    assert rope_variant.stages(spec, few) == 1
    assert rope_variant.programs(spec, few, 4096, 1) == rope_variant.programs(spec, each, 4096, 1) == 4096


def test_a_norm_that_is_not_taken_is_seen() -> None:
    """The bound is strict enough: with another eps or another weight the check fails."""
    spec = RopeSpec("bshd", "float32", 3, 8, 8, angles="cos_sin", key_heads=2, norm="head")
    call = probe(inputs(spec, SIZE, "cpu", 0))
    work = WORKLOADS["rope"]
    wanted, bound = work.reference(spec, call)
    for change in ({"eps": 1e-3}, {"weight": call.weight * 1.001}):
        run(spec, RopeVariant(1, 2, num_warps=1), dataclasses.replace(call, **change))
        with pytest.raises(WrongResultError):
            check(call.out, wanted, bound, {})


@pytest.mark.parametrize(("norm", "chunk_heads"), [("head", 0), ("all", 0), ("all", 2)])
@pytest.mark.parametrize("key_heads", [0, 2])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("most", [1, 3, 99])
def test_the_weights_gradients_are_sums_over_all_tokens(
    norm: str, chunk_heads: int, key_heads: int, rotary: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs take many tiles, some tiles or one each; their parts are added in one turn or in several."""
    monkeypatch.setattr(rope_variant, "MULTIPROCESSORS", most)
    monkeypatch.setattr(rope_variant, "LEAST_RESIDENT", 1)
    monkeypatch.setattr(rope_launches, "PARTS_AT_ONCE", 4)
    monkeypatch.setattr(rope_launches, "COLUMNS_AT_ONCE", 8)
    spec = RopeSpec(
        "bshd", "float32", 3, 8, rotary, angles="cos_sin", key_heads=key_heads, norm=norm, direction="backward"
    )
    call = inputs(spec, SIZE, "cpu", 1)
    for tensor in (call.weight_grad, call.key_weight_grad, call.partials):
        if tensor is not None:
            tensor.fill_(torch.nan)
    run(spec, dataclasses.replace(variant_of(spec, 3), chunk_heads=chunk_heads), call)
    rows = SIZE.tokens * spec.heads
    split = (lambda t: (t[:rows], t[rows:])) if key_heads else lambda t: (t.view(-1, 8), None)
    shapes = [(2, 5, 3, 8), (2, 5, key_heads, 8)]
    given, grads = (
        [None if t is None else t.double().view(s) for t, s in zip(split(whole), shapes, strict=True)]
        for whole in (call.given, call.x)
    )
    leaves = [None if t is None else t.double().requires_grad_() for t in (call.weight, call.key_weight)]
    forward = dataclasses.replace(spec, direction="forward")
    named = {"x": given[0], "key": given[1], "weight": leaves[0], "key_weight": leaves[1]}
    out = rotate(forward, dataclasses.replace(call, **named))
    present = [t for t in leaves if t is not None]
    wanted = torch.autograd.grad([t for t in out if t is not None], present, [t for t in grads if t is not None])
    found = [t for t in (call.weight_grad, call.key_weight_grad) if t is not None]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_each_run_adds_the_parts_in_one_order() -> None:
    spec = RopeSpec("bshd", "float32", 3, 8, 8, angles="cos_sin", key_heads=2, norm="head", direction="backward")
    bits = []
    for _ in range(2):
        call = inputs(spec, SIZE, "cpu", 1)
        run(spec, RopeVariant(1, 2, num_warps=1), call)
        bits.append((call.weight_grad.clone(), call.key_weight_grad.clone()))
    assert all(map(torch.equal, *bits))


@pytest.mark.parametrize(("norm", "chunk_heads"), [("head", 0), ("all", 0), ("all", 2)])
def test_an_eps_of_0_leaves_the_weights_gradients_finite(norm: str, chunk_heads: int) -> None:
    """Tiles contain places without a token or head: their 1 / sqrt(0 + 0) must not enter a sum."""
    spec = RopeSpec("bshd", "float32", 3, 8, 8, angles="cos_sin", key_heads=2, norm=norm, direction="backward")
    whole = dataclasses.replace(default_variant(spec, SIZE), pdl=False, chunk_heads=chunk_heads)
    found = []
    for eps in (0.0, 1e-12):
        call = dataclasses.replace(inputs(spec, SIZE, "cpu", 1), eps=eps)
        run(spec, whole, call)
        found.append((call.out, call.weight_grad, call.key_weight_grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_each_rounding_has_bits_of_its_own(inplace: bool, rotary: int) -> None:
    """The bits are those of PyTorch's operators, as in models' code; the norm may differ in a last bit here and there."""
    found = {}
    for rounding in ROUNDINGS:
        spec = RopeSpec(
            "bshd", "float16", 3, 8, rotary, angles="cos_sin", key_heads=2, norm="head", rounding=rounding,
            inplace=inplace,
        )  # fmt: skip
        call = inputs(spec, RopeSize(2, 40), "cpu", 0)
        given = call.x.clone()
        run(spec, RopeVariant(8, 8, num_warps=4), call)
        found[rounding] = call.out.clone(), rotate(spec, _parted(spec, dataclasses.replace(call, x=given)))
    for rounding, (ours, parts) in found.items():
        wanted = torch.cat([t.reshape(-1, 8) for t in parts])
        unlike = {name: _unlike(ours, other) for name, (other, _) in found.items() if name != rounding}
        assert _unlike(ours, wanted) < 0.1 * min(unlike.values()), unlike


def _unlike(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.reshape(-1) != b.reshape(-1)).double().mean())


def _parted(spec: RopeSpec, call: RopeCall) -> RopeCall:
    """The query and the key of a call, whose rows lie in one tensor, as separate tensors."""
    rows = call.batch * call.seq * spec.heads
    x, key = (
        t.view(call.batch, call.seq, n, spec.head_dim)
        for t, n in ((call.x[:rows], spec.heads), (call.x[rows:], spec.key_heads))
    )
    return dataclasses.replace(call, x=x, key=key)
