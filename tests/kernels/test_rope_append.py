"""Kernels of a rotation that writes key and value to a cache, interpreted: every text and setting against float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from generator.families.rope.texts import append_specs
from generator.measuring.check import check, inputs_of, probe
from generator.measuring.mended import mended_interpreter
from generator.rendering.structures import load
from generator.workload import WORKLOADS
from tests.support import pairwise
from tests.support.run import INTERPRETED
from tuned.families.rope.launches import RopeCall, kernel_name, launches
from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, ROTATED, ROUNDINGS, STYLES, RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant, rejection

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_rope_append.py has these on a GPU"),
]
SIZE = RopeSize(1, 21)  # the 16th token has no slot
TEXTS = [
    {"norm": norm, "style": style, "angles": angles}
    for norm, style, angles in itertools.product(("", "head"), STYLES, ANGLES)
]
OTHERS: dict[str, Any] = {
    "cache": ("same", "float8"),
    "dtype": ("float32", "bfloat16", "float16"),
    "cache_layout": ("NHD", "HND"),
    "key_inplace": (False, True),
    "rotated": ROTATED,
    "shape": ((3, 2, 8, 8), (5, 1, 12, 4), (2, 2, 20, 20), (8, 4, 16, 8)),
    "positions": ("ids", "order", "starts", "axes"),
    "angle_entries": ANGLE_ENTRIES,
    "rounding": ROUNDINGS,
    "conjugate": (False, True),
}
ROWS = pairwise.covering(pairwise.product(OTHERS, lambda _: True))
COUNT = max(len(ROWS), 2 * len(TEXTS))


def spec_of(index: int) -> RopeSpec:
    row = TEXTS[index % len(TEXTS)] | ROWS[index % len(ROWS)]
    heads, key_heads, head_dim, rotary = row.pop("shape")
    if row["positions"] == "axes":
        row["sections"] = (1, rotary // 2 - 1)
    if rotary == head_dim or (row["style"] == "interleaved" and row["rotated"] == "proportional"):
        row["rotated"] = "first" if rotary == head_dim else "last"
    if not row["norm"]:
        row["rounding"] = "once"
    return RopeSpec(
        layout="thd", inplace=True, heads=heads, key_heads=key_heads, head_dim=head_dim, rotary_dim=rotary, **row
    )


CASES = [spec_of(index) for index in range(COUNT)]


def variant_of(spec: RopeSpec, seed: int) -> RopeVariant:
    """A legal variant, drawn at random; one with small tiles if no draw is legal."""
    rng = random.Random(seed)
    tiles = [RopeVariant(t, h, num_warps=w) for t in (1, 2, 4) for h in (2, 4, 8, 16) for w in (1, 2, 4) if t * h > 4]
    legal = [one for one in tiles if rejection(spec, SIZE, one) is None]
    return rng.choice(legal) if legal else dataclasses.replace(default_variant(spec, SIZE), pdl=False)


def run(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> None:
    for launch in launches(spec, variant, call):
        with np.errstate(all="ignore"), mended_interpreter():
            load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants)


def test_the_cases_reach_every_text() -> None:
    assert {kernel_name(spec, RopeVariant()) for spec in CASES} == {
        kernel_name(spec, RopeVariant()) for spec in append_specs()
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
