"""The legal pool is the same for every kind of variant class: where possible, tiles are checked without its constructor."""

from __future__ import annotations

import dataclasses
import random
import types
from dataclasses import replace
from typing import Any

import pytest

from generator.searching import pool
from generator.workload import WORKLOADS, Problem
from tuned.families.choices import choices, one_of
from tuned.families.rope.spec import RopeSize, RopeSpec


@dataclasses.dataclass(frozen=True)
class Plain:
    block: int = one_of(16, 32, 64, default=32)
    warps: int = one_of(2, 4, default=4)
    order: str = one_of("rows", "columns", default="rows")


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    block: int = one_of(16, 32, 64, default=32)
    warps: int = one_of(2, 4, default=4)
    order: str = one_of("rows", "columns", default="rows")


@dataclasses.dataclass(frozen=True)
class Derived(Plain):
    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", self.block * self.warps)


def rejection(_: Any, __: Any, variant: Any, *___: Any) -> str | None:
    elements = variant.elements if isinstance(variant, Derived) else variant.block * variant.warps
    if elements > 128:
        return f"too many: {elements}"
    return "columns of few" if variant.order == "columns" and elements == 32 else None


@pytest.mark.parametrize("variant_type", [Plain, Slots, Derived])
def test_the_pool_is_the_product_without_what_a_rule_rejects(
    variant_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = types.SimpleNamespace(variant_type=variant_type, core_knobs=("block", "warps"), rejection=rejection)
    monkeypatch.setattr(pool, "WORKLOADS", {"made up": types.SimpleNamespace(family=family)})
    found = pool.legal_pool.__wrapped__(types.SimpleNamespace(family="made up", spec=None, size=None), 90)
    legal = [(16, 2), (16, 4), (32, 2), (32, 4), (64, 2)]
    assert [dataclasses.astuple(v) for v in found.variants] == [
        (block, warps, order)
        for block, warps in legal
        for order in ("rows", "columns")
        if (block * warps, order) != (32, "columns")
    ]
    assert (found.declared, found.rejected) == (12, {"too many": 1})


NARROW = RopeSpec("bshd", "bfloat16", 20, 34, 2)  # whole rows have other sizes than pairs
OF_ALL = RopeSpec("bshd", "bfloat16", 40, 128, 128, angles="cos_sin", key_heads=8, norm="all")
HARD = [
    Problem(spec.direction, "rope", spec, RopeSize(1, 4096))
    for spec in (NARROW, OF_ALL, replace(OF_ALL, direction="backward"))
]
DRAWN = 12_000


@pytest.mark.parametrize("family", sorted(WORKLOADS))
def test_core_knobs_leave_out_no_legal_variant(family: str) -> None:
    """Of variants drawn from all choices, the legal ones are those of the pool."""
    draw, work = random.Random(family), WORKLOADS[family]
    declared, least = choices(work.family.variant_type), 0
    usual = list(work.problems())
    problems = draw.sample(usual, min(4, len(usual))) + [problem for problem in HARD if problem.family == family]
    for problem in problems:
        found = set(pool.legal_pool(problem, 90, 132).variants)
        columns = [draw.choices(values, k=DRAWN) for values in declared.values()]
        for drawn in zip(*columns, strict=True):
            variant = work.family.variant_type(*drawn)
            if work.family.rejection(problem.spec, problem.size, variant, 90, 132) is None:
                least += 1
                assert variant in found, (problem.name, variant)
    assert least, "no legal variant was drawn"
