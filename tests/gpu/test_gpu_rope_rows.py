"""Whole rows in place on a GPU: a thread overwrites only what others have read, whatever the warps do."""

from __future__ import annotations

import dataclasses

import pytest

from generator.families.rope.reference import inputs, reference
from tests.support.run import run
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant

pytestmark = pytest.mark.gpu

SPECS = {
    "d18": RopeSpec("bshd", "bfloat16", 16, 18, 18, inplace=True),
    "d34r2": RopeSpec("thd", "bfloat16", 19, 34, 2, inplace=True, key_heads=1, positions="ids"),
    "d20": RopeSpec("sbhd", "float32", 16, 20, 20, angles="cos_sin", inplace=True),
}


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("name", SPECS)
def test_whole_rows_in_place_are_those_out_of_place(name: str, warps: int) -> None:
    spec, size = SPECS[name], RopeSize(4, 4096)
    variant = RopeVariant(8, 16, num_warps=warps, whole_rows=True)
    call = inputs(spec, size, "cuda", 0)
    given = call.x.clone()
    wanted, bound = reference(spec, dataclasses.replace(call, x=given, out=given))
    for _ in range(20):
        call.x.copy_(given)
        run(launches(spec, variant, call))
        assert bool(((call.x.double() - wanted).abs() <= bound).all()), "a thread read what another had overwritten"
