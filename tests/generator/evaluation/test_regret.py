"""The rule that serves untuned problems is the best of those tried, judged by problems whose own row is hidden from it."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
from typer.testing import CliRunner

import generator.storage.landscape
from generator import command_line
from generator.evaluation import regret
from generator.evaluation.regret import (
    MEDIAN,
    RULES,
    SERVED,
    WORST,
    best_rule,
    from_record,
    metadata,
    same_shape,
    scores,
)
from generator.places import LANDSCAPES
from generator.problem import Problem
from generator.searching.pool import same_problem
from generator.storage.landscape import load_landscapes
from generator.storage.record import read_record
from generator.workload import WORKLOADS, default_problems
from tests.support.made_landscapes import LARGE, SMALL, cell, landscape, made
from tests.support.records import winner
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec

DEVICES = sorted(p.name for p in LANDSCAPES.glob("*") if p.is_dir())
GRU = WORKLOADS["gru_cell"].family


def test_each_rule_is_scored_on_problems_that_it_is_not_shown() -> None:
    found = {s.rule: s for s in scores(made())}
    assert set(found) == set(RULES)
    assert set(found[SERVED].regrets.values()) == {0.0}, "the nearest size has the same best variant"
    assert found["default variant"].worst[0] > 0.2
    # Three landscapes are left, two of them of the other kind: the best on their average is not best here.
    assert found["best on average"].worst[0] > 0.2


def test_leaving_a_shape_out_takes_all_that_share_it() -> None:
    twin = landscape(Problem("twin", "gru_cell", GruCellSpec("bfloat16", 1024, (1024,)), GruCellSize(8)), SMALL)
    assert same_shape(twin.problem, made()[0].problem)
    assert not same_shape(made()[1].problem, made()[0].problem)
    assert not same_shape(cell(8, dtype="float16"), made()[0].problem)
    pair = [twin, made()[0], made()[2]]
    by_problem, by_shape = (
        {s.rule: s for s in scores(pair, left_out)}[SERVED].regrets for left_out in (same_problem, same_shape)
    )
    assert by_problem["twin"] == 0
    assert by_shape["twin"] > 0.2


def test_a_rules_picks_are_what_dispatch_takes_from_the_rows() -> None:
    held, others = made()[0], made()[1:]
    rows = [regret.row_of(other) for other in others]
    found = regret.nearest(GRU, held.problem.spec, held.problem.size, rows, 90)
    assert found is not None
    assert RULES[SERVED](held, others) == found[2]


def test_the_best_rule_has_the_lowest_worst_case_within_the_bar_of_the_median() -> None:
    def score(rule: str, *regrets: float) -> regret.Score:
        return regret.Score(rule, {str(i): r for i, r in enumerate(regrets)})

    steady, sharp = score("steady", 0.05, 0.05, 0.05), score("sharp", 0.0, 0.01, 0.08)
    assert best_rule([steady, sharp]) == sharp, "steady's median is past the bar"
    assert best_rule([score("a", 0.01, 0.03), score("b", 0.0, 0.04)]).rule == "a"
    assert best_rule([steady]) == steady


def test_a_records_rows_are_judged_without_the_problems_own() -> None:
    problem = next(p for p in default_problems("gru_cell") if p.spec.inplace)
    one = landscape(problem, SMALL)
    own = winner(problem.name, variant=SMALL)
    assert from_record([one], [own]) is None
    other = dataclasses.replace(own, size=GruCellSize(problem.size.batch * 2), variant=LARGE)
    found = from_record([one], [own, other])
    assert found is not None
    assert found.regrets[problem.name] == pytest.approx(one.regret(LARGE))


def test_the_command_tells_every_rule_and_whether_the_bars_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator.storage.landscape, "load_landscapes", lambda _: made())
    done = CliRunner().invoke(command_line.app, ["regret", "--device", "a_card"])
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    for part in (
        "4 problems of a_card",
        "(serves)",
        "best on average",
        "(--quick): median",
        "met; the rule that serves",
    ):
        assert part in said
    monkeypatch.setattr(generator.storage.landscape, "load_landscapes", lambda _: [])
    done = CliRunner().invoke(command_line.app, ["regret", "--device", "a_card"])
    assert done.exit_code == 2
    assert "no landscape of a_card" in " ".join(done.output.split())
    monkeypatch.setattr(generator.storage.landscape, "load_landscapes", lambda _: made()[:1])
    done = CliRunner().invoke(command_line.app, ["regret", "--device", "a_card"])
    assert done.exit_code == 2
    assert "no family has two landscapes of a_card: python tune.py landscape" in " ".join(done.output.split())
    monkeypatch.setattr(generator.storage.landscape, "load_landscapes", lambda _: made()[:2])
    done = CliRunner().invoke(command_line.app, ["regret", "--device", "a_card"])
    assert "2 problems of a_card" in " ".join(done.output.split()), "two are enough"


# Measured ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_rule_that_serves_is_the_best_of_those_tried_and_meets_its_bars(device: str) -> None:
    found = scores(load_landscapes(device))
    assert best_rule(found).rule == SERVED
    served = next(s for s in found if s.rule == SERVED)
    assert served.median <= MEDIAN
    # Calls of 128k positions take 137 or 151 us, depending on where their memory lies. For any tile this is luck.
    assert max(regret for name, regret in served.regrets.items() if "128k" not in name) <= WORST, served.worst
    (whole_shapes,) = scores(load_landscapes(device), same_shape, [SERVED])
    assert whole_shapes.median <= 0.03
    assert whole_shapes.worst[0] <= 0.15, whole_shapes.worst


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_keeps_the_figures_of_its_rule(device: str) -> None:
    if not read_record(device):
        pytest.skip(f"no record of {device}")
    kept = importlib.import_module(f"tuned.tables.{device}").RULE
    assert kept == metadata(device)
    assert kept["rule"] == SERVED
    assert kept["problem_left_out"]["problems"] == len(load_landscapes(device))
    assert set(kept) == {"rule", "problem_left_out", "shape_left_out"}


def test_a_device_without_landscapes_has_no_figures() -> None:
    assert metadata("a_card") == {}


@pytest.mark.parametrize("device", DEVICES)
def test_the_committed_winners_are_near_the_best_of_all_variants(device: str) -> None:
    found = from_record(load_landscapes(device), read_record(device), lambda *_: False)
    if found is None:
        pytest.skip(f"no record of {device}")
    assert found.median <= 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_no_committed_winner_is_far_from_the_best_of_its_own_text(device: str) -> None:
    # A variant that was best before the source changed may not be best now.
    fresh = [one for one in load_landscapes(device) if one.fresh]
    found = from_record(fresh, read_record(device), lambda *_: False) if fresh else None
    if found is None:
        pytest.skip(
            f"the kernels of every landscape of {device} changed since; `tune.py --check` says which to record again"
        )
    # Calls of 128k positions take one of two times, depending on where their memory lies: the landscape and the tuning saw
    # different ones.
    assert max(r for name, r in found.regrets.items() if "128k" not in name) <= 0.03
