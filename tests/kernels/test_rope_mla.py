"""Kernels of MLA, interpreted: key and value from kv, the transpose, and queries whose pairs are put apart."""

from __future__ import annotations

import dataclasses
import itertools
import random
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.rope.texts import mla_specs
from generator.measuring.check import WrongResultError, check, inputs_of, probe
from generator.rendering.structures import load
from generator.workload import WORKLOADS
from tests.support import pairwise
from tests.support.far import far
from tests.support.run import INTERPRETED
from tuned.calls.rope.arguments import Given, Settings, prepare
from tuned.families.rope.eager import rotate
from tuned.families.rope.launches import RopeCall, kernel_name, launches
from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, LAYOUTS, POSITIONS, RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant, rejection

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_rope_mla.py has these on a GPU"),
]
SIZE = RopeSize(2, 5)
# A call either makes a key and a value, or takes their gradients, or rotates a query whose pairs are put apart.
WAYS = [
    *({"direction": d, "value": True, "style": s} for d in ("forward", "backward") for s in ("half", "interleaved")),
    *({"direction": d, "value": True, "deinterleaves": True} for d in ("forward", "backward")),
    *({"direction": d, "deinterleaves": True, "inplace": i} for d, i in (("forward", False), ("forward", True), ("backward", False))),
]  # fmt: skip
TEXTS = [way | {"angles": angles} for way, angles in itertools.product(WAYS, ANGLES)]
OTHERS: dict[str, Any] = {
    "layout": LAYOUTS,
    "dtype": ("float32", "bfloat16", "float16"),
    "shape": ((4, 8, 8, 8), (3, 12, 4, 20), (1, 5, 6, 3), (5, 16, 2, 8)),  # heads; features kept, rotated, of the value
    "positions": (*POSITIONS[:-1], "axes"),
    "angle_entries": ANGLE_ENTRIES,
    "conjugate": (False, True),
}
ROWS = pairwise.covering(pairwise.product(OTHERS, lambda _: True))
COUNT = max(len(ROWS), len(TEXTS) + 13)  # half of the texts get a second row


def spec_of(index: int) -> RopeSpec:
    row = TEXTS[index % len(TEXTS)] | ROWS[index % len(ROWS)]
    heads, kept, rotary, value = row.pop("shape")
    if row["positions"] == "axes":
        row["sections"] = (rotary // 4, rotary // 2 - rotary // 4)
    if row.pop("value", False):
        row["value_dim"] = value
    else:
        row["key_heads"] = index % 3  # heads of a second tensor, rotated in the same launch
    return RopeSpec(heads=heads, head_dim=kept + rotary, rotary_dim=rotary, rotated="last", **row)


CASES = [spec_of(index) for index in range(COUNT)]


def variant_of(spec: RopeSpec, seed: int) -> RopeVariant:
    """A legal variant, drawn at random; one with small tiles if no draw is legal."""
    tiles = itertools.product((1, 2, 4), (1, 2, 4), ("heads", "tokens"), (1, 2))
    variants = [RopeVariant(t, h, order=order, num_warps=w) for t, h, order, w in tiles]
    legal = [one for one in variants if rejection(spec, SIZE, one) is None]
    return random.Random(seed).choice(legal) if legal else dataclasses.replace(default_variant(spec, SIZE), pdl=False)


def run(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> None:
    (launch,) = launches(spec, variant, call)
    with np.errstate(all="ignore"):
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants)


def test_the_cases_reach_every_text() -> None:
    reached = {kernel_name(spec, RopeVariant()) for spec in CASES}
    assert reached == {kernel_name(spec, RopeVariant()) for spec in mla_specs()}


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_wrong_is_seen(direction: str) -> None:
    """The bound is strict enough: with k_pe of another token, or gradients a thousandth too large, the check fails."""
    spec = RopeSpec("bshd", "float32", 3, 12, 8, rotated="last", angles="cos_sin", value_dim=4, direction=direction)
    work = WORKLOADS["rope"]
    call = probe(work.inputs(spec, SIZE, "cpu", 0))
    wanted, bound = work.reference(spec, call)
    wrong = dataclasses.replace(call, x=call.x.roll(8) if direction == "forward" else call.x * 1.001)
    run(spec, RopeVariant(1, 2, num_warps=1), wrong)
    with pytest.raises(WrongResultError):
        check(call.out, wanted, bound, {})


def test_each_run_sums_the_heads_in_one_order() -> None:
    spec = RopeSpec("thd", "float32", 37, 12, 8, rotated="last", angles="cos_sin", value_dim=4, direction="backward")
    found = []
    for _ in range(2):
        call = WORKLOADS["rope"].inputs(spec, SIZE, "cpu", 1)
        run(spec, RopeVariant(2, 4, num_warps=1), call)
        found.append(call.out.clone())
    assert torch.equal(*found)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no memory without pages: tests/gpu has one such call")
@pytest.mark.parametrize("axis", [1, 2, 3], ids=["tokens", "heads", "features"])
@pytest.mark.parametrize("what", ["x", "key"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_lies_gigabytes_apart_is_found(direction: str, what: str, axis: int) -> None:
    """Elements of kv and k_pe, and of the gradients of key and value."""
    torch.manual_seed(0)
    shapes = ((3, 10), (1, 4)) if direction == "forward" else ((3, 10), (3, 4))
    x, key = (torch.randn(1, 3, *shape) for shape in shapes)
    angles = {"cos": torch.rand(3, 2), "sin": torch.rand(3, 2)}
    settings = Settings(k_dim=6, direction=direction)
    wanted = rotate(*attrgetter("eager_spec", "call")(prepare(Given(x, key, **angles), settings, make_out=lambda t: t)))
    given = Given(far(x, axis) if what == "x" else x, far(key, axis) if what == "key" else key, **angles)
    made = prepare(given, settings, make_out=torch.empty_like)
    assert made.spec is not None
    run(made.spec, RopeVariant(2, 2, num_warps=1), made.call)
    torch.testing.assert_close((made.call.out, made.call.key_out), wanted, rtol=1e-6, atol=1e-6)
