"""The portfolio, a few variants that are good everywhere: how it is chosen, what a quick run measures, how dispatch uses it."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import pytest

import tuned.lookup.lookup
import tuned.lookup.portfolio
from generator.evaluation.portfolio import (
    LEAST,
    MOST,
    candidates,
    cover,
    left_out,
    of_best,
    of_winners,
)
from generator.places import LANDSCAPES
from generator.publishing.files import generated_files, portfolio_source
from generator.storage.landscape import load_landscapes
from generator.storage.record import read_record, save_winner
from generator.workload import WORKLOADS, default_problems
from tests.support.command_line import call, machine  # noqa: F401 - a fixture
from tests.support.fakes import ENVIRONMENT
from tests.support.made_landscapes import LARGE, SMALL, cell, landscape, made
from tests.support.records import winner
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.registry import FAMILIES
from tuned.lookup.lookup import Gpu, choose
from tuned.lookup.portfolio import ANY, architecture_of, rows_for, variants_for

if TYPE_CHECKING:
    from pathlib import Path

DEVICES = sorted(p.name for p in LANDSCAPES.glob("*") if p.is_dir())
ONE = "gru_cell_1024_inplace_64"
GRU = FAMILIES["gru_cell"]


# How it is chosen -----------------------------------------------------------------------------------------------------


def test_a_cover_takes_the_worst_problem_first() -> None:
    landscapes = made()
    chosen = cover(landscapes)
    assert set(cover(landscapes, least=2, most=2)) == {SMALL, LARGE}
    assert set(chosen[:2]) == {SMALL, LARGE}
    assert [of_best(one, chosen) for one in landscapes] == [0.0] * len(landscapes)


def test_a_cover_takes_no_twin_of_what_it_has() -> None:
    first, twin = (dataclasses.replace(SMALL, block_batch=rows) for rows in (8, 4))
    one, other = landscape(cell(8), first), landscape(cell(4096), LARGE)
    one.times[twin] = 1.01 * one.best_us
    assert cover([one, other], least=2, most=2) == [first, LARGE]


def test_winners_serve_where_no_landscape_is_the_most_frequent_first() -> None:
    rows = [winner(ONE, variant=v) for v in (LARGE, SMALL, SMALL)]
    assert of_winners(rows) == [SMALL, LARGE]
    assert of_winners(rows, most=1) == [SMALL]


def test_the_same_records_are_the_same_bytes_and_only_literals() -> None:
    rows = [winner(name) for name in (ONE, "gru_cell_1024_64")]
    text = portfolio_source(rows)
    assert text == portfolio_source(rows)
    names: dict[str, Any] = {}
    exec(text, {"__builtins__": {}}, names)
    assert set(names) - {"__doc__"} == {"VARIANTS", "BEST"}
    assert {(a, f) for a, f, _ in names["VARIANTS"]} >= {(ANY, "gru_cell")}


@pytest.mark.parametrize("device", DEVICES)
def test_a_portfolio_is_short_and_finds_what_is_near_the_best_of_a_problem_that_it_was_not_shown(device: str) -> None:
    landscapes = load_landscapes(device)
    chosen = cover(landscapes)
    assert LEAST <= len(chosen) <= MOST
    assert max(of_best(one, chosen) for one in landscapes) <= 0.02
    score = left_out(landscapes[::3])
    assert score.median <= 0.05, "of a third of the problems, each without itself"


# What ships -----------------------------------------------------------------------------------------------------------


def test_the_portfolio_that_ships_is_what_the_landscapes_and_records_give() -> None:
    module = importlib.import_module("tuned.tables._portfolio")
    names: dict[str, Any] = {}
    exec(generated_files()["tables/_portfolio.py"], names)
    assert (names["VARIANTS"], names["BEST"]) == (module.VARIANTS, module.BEST)
    for family in FAMILIES:
        assert 1 <= len(variants_for(family, 90)) <= MOST
        assert rows_for(family, 90)


def test_architectures_have_names_and_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [architecture_of(c) for c in (80, 89, 90, 100, 120, 0)] == [
        *("sm_8x", "sm_8x", "sm_9x", "sm_10x", "sm_12x", "gfx")
    ]
    known = {(ANY, "gru_cell"): (SMALL,), ("sm_9x", "gru_cell"): (LARGE,)}
    monkeypatch.setattr(tuned.lookup.portfolio, "_known", lambda: (known, {}))
    assert variants_for("gru_cell", 90) == (LARGE,)
    assert variants_for("gru_cell", 120) == (SMALL,)
    assert variants_for("rope", 90) == ()


def test_a_portfolio_is_no_table_of_a_device() -> None:
    tuned.lookup.table.tables.cache_clear()
    assert not [device for device in tuned.lookup.table.tables() if "portfolio" in device]


# In dispatch ----------------------------------------------------------------------------------------------------------


def test_without_any_table_the_portfolio_serves_and_without_that_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.lookup.lookup, "tables", dict)
    here, spec, size = Gpu("a_card", 120, 100), GruCellSpec("bfloat16", 1024, (1024,)), GruCellSize(64)
    choice = choose(GRU, spec, size, here)
    assert choice.rule == "portfolio"
    assert choice.variant in [GRU.fit(v, spec, 120) for v in variants_for("gru_cell", 120)]
    assert "the portfolio of any" in choice.why
    monkeypatch.setattr(tuned.lookup.lookup, "rows_for", lambda *_: ())
    assert choose(GRU, spec, size, here).rule == "default"


# A quick run ----------------------------------------------------------------------------------------------------------


def test_a_quick_run_measures_the_default_and_what_is_legal_of_the_portfolio() -> None:
    for problem in default_problems():
        found = candidates(problem, 90)
        family = WORKLOADS[problem.family].family
        assert found[0] == family.default_variant(problem.spec, problem.size)
        assert len(found) == len(set(found)) <= MOST + 1
        assert all(family.rejection(problem.spec, problem.size, v, 90) is None for v in found)
    rope = next(p for p in default_problems() if p.family == "rope")
    assert any(v.pdl for v in candidates(rope, 90))
    assert not any(v.pdl for v in candidates(rope, 80))
    assert len(candidates(rope, 80)) > LEAST, "what sm_80 lacks is taken off, the rest is kept"


def test_quick_measures_few_and_marks_its_rows_and_a_full_run_replaces_them(machine: Any, tmp_path: Path) -> None:  # noqa: F811
    workers = machine[1]
    out = ("--out", str(tmp_path / "out"), "--problems", ONE)
    assert call("--quick", *out).exit_code == 0
    problem = next(p for p in default_problems() if p.name == ONE)
    assert set(workers[-1].measured) == set(candidates(problem, ENVIRONMENT["capability"]))
    (row,) = read_record("test_gpu", tmp_path / "out")
    assert row.environment["search"] == "quick"
    assert row.trials == len(workers[-1].measured)
    assert call(*out).exit_code == 0
    (row,) = read_record("test_gpu", tmp_path / "out")
    assert "search" not in row.environment
    assert call("--quick", *out).exit_code == 0
    (row,) = read_record("test_gpu", tmp_path / "out")
    assert "search" not in row.environment, "a quick run takes nothing away from a whole search"


def test_a_row_that_does_not_count_any_more_is_replaced_by_a_quick_one(machine: Any, tmp_path: Path) -> None:  # noqa: F811
    assert machine
    made = winner(ONE)
    save_winner(dataclasses.replace(made, digests=dict.fromkeys(made.digests, "0" * 12)), tmp_path / "out")
    assert call("--quick", "--out", str(tmp_path / "out"), "--problems", ONE).exit_code == 0
    (row,) = read_record("test_gpu", tmp_path / "out")
    assert row.environment["search"] == "quick"
