"""A row's variant on another card: it stays as it is if legal there; else its family makes it legal if it can."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

import pytest

from generator.storage.record import WINNERS
from generator.workload import WORKLOADS
from tuned.families.architecture import SHARED_KIB
from tuned.families.choices import choices
from tuned.families.family import brought
from tuned.families.registry import FAMILIES
from tuned.lookup.portfolio import rows_for
from tuned.lookup.record import load_record

CAPABILITIES = sorted({*SHARED_KIB, 70, 75})
AS_IT_IS = ("gru", "linear_cat", "rope")  # tiles of a step shrink before Hopper, where they are legal but spill
ANY_SPEC = ("gru", "gru_cell", "linear_cat")  # tiles of RoPE are made as large as they were for the other spec


@functools.cache  # reading a record takes a quarter of a second
def rows(family: str) -> list[Any]:
    return [w for w in load_record(WINNERS / "nvidia_h200.json") if w.family == family]


@functools.cache
def drawn(family: str, count: int) -> list[Any]:
    work, draw = WORKLOADS[family], random.Random(5)
    assert work.any_shape is not None
    return [work.any_shape(draw) for _ in range(count)]


@pytest.mark.thinned_on_gpu(every=6)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_keeps_a_variant_that_its_card_can_run(name: str, capability: int) -> None:
    family, kept = FAMILIES[name], 0
    for row in (*rows(name), *rows_for(name, capability)):
        if family.rejection(row.spec, row.size, row.variant, capability) is None:
            found = brought(family, row.variant, row.spec, row.spec, capability)
            assert family.rejection(row.spec, None, found, capability) is None, row
            assert found == row.variant or name not in AS_IT_IS, row
            kept += 1
    assert kept


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("name", ["gru_cell", "linear_cat"])
def test_every_row_of_steps_and_linears_fits_with_fewer_stages(name: str, capability: int) -> None:
    for row in rows(name):
        found = brought(FAMILIES[name], row.variant, row.spec, row.spec, capability)
        assert FAMILIES[name].rejection(row.spec, row.size, found, capability) is None, row
        assert found.num_stages >= min(2, row.variant.num_stages)


@pytest.mark.thinned_on_gpu(every=6)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ANY_SPEC)
def test_another_spec_keeps_a_variant_that_the_card_can_run(name: str, capability: int) -> None:
    family, kept = FAMILIES[name], 0
    tuned = {row.variant: row.spec for row in rows(name)}
    for problem, (variant, spec) in itertools.product(drawn(name, 100), tuned.items()):
        if family.rejection(problem.spec, None, variant, capability) is None:
            found = brought(family, variant, spec, problem.spec, capability)
            assert family.rejection(problem.spec, None, found, capability) is None, (problem.spec, variant)
            assert found == variant or name not in AS_IT_IS, (problem.spec, variant)
            kept += 1
    assert kept > 10


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_gru_that_fits_with_fewer_units_gets_them(capability: int) -> None:
    family, units, fewer = FAMILIES["gru"], choices(FAMILIES["gru"].variant_type)["block_hidden"], 0
    tuned = {row.variant: row.spec for row in rows("gru")}
    for problem, (variant, spec) in itertools.product(drawn("gru", 100), tuned.items()):
        found = brought(family, variant, spec, problem.spec, capability)
        less = [dataclasses.replace(found, block_hidden=n) for n in units if n <= variant.block_hidden]
        legal = [v for v in less if family.rejection(problem.spec, None, v, capability) is None]
        assert found in legal or not legal, (problem.spec, variant)
        fewer += found.block_hidden < variant.block_hidden and found in legal
    assert fewer > 10


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_default_is_legal_on_a_card_that_has_room_for_any_step_a_launch(capability: int) -> None:
    family, knobs, large = FAMILIES["gru"], choices(FAMILIES["gru"].variant_type), 0
    steps = [
        family.variant_type("steps", block_hidden=n, block_batch=m)
        for n, m in itertools.product(knobs["block_hidden"], knobs["block_batch"])
    ]
    for spec, size in ((problem.spec, problem.size) for problem in drawn("gru", 300)):
        found = family.fit(family.default_variant(spec, size), spec, capability)
        if spec.stacked or family.rejection(spec, size, found, capability) is None:
            large += found.strategy == "steps" and spec.hidden * spec.item > 3000
            continue
        assert not [v for v in steps if family.rejection(spec, size, v, capability) is None], (spec, size)
    assert large > 2 or capability in (0, 70, 75, 86, 89, 120, 121)
