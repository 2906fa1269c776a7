"""What landscapes prove on any machine about the search, two tunings and the estimate; and that a landscape is kept whole."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import statistics
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from generator import commands, places
from generator.disk import put_between
from generator.estimating import model
from generator.evaluation import evidence, replay
from generator.evaluation.recording import record, record_all
from generator.searching.pool import legal_pool
from generator.searching.search import Outcome
from generator.selection import problem_named
from generator.storage.landscape import Landscape, LandscapeError, load, load_landscapes, save
from generator.workload import default_variant
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker, TrialFailedError, WorkerLostError
from tuned.families.rope.variant import RopeVariant

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

DEVICE = "nvidia_h200"
LANDSCAPES = load_landscapes(DEVICE)
AGAIN = LANDSCAPES[::2]  # these are searched a second time, and once with hints


@pytest.fixture(scope="module")
def cold() -> list[replay.Replay]:
    """The search without hints, on every landscape."""
    return [replay.searched(one, 0, noise=replay.NOISE) for one in LANDSCAPES]


@pytest.fixture(scope="module")
def again() -> list[replay.Replay]:
    """The search without hints and with another seed, on half of the landscapes."""
    return [replay.searched(one, 1, noise=replay.NOISE) for one in AGAIN]


# --- the search ---------------------------------------------------------------------------------------------------------


def test_the_landscapes_are_of_all_kinds_and_whole() -> None:
    assert len(LANDSCAPES) >= 12
    specs = [one.problem.spec for one in LANDSCAPES]
    assert {s.layout for s in specs} == {"bshd", "sbhd", "thd"}
    assert {s.direction for s in specs} == {"forward", "backward"}
    assert {s.inplace for s in specs} == {True, False}
    assert any(s.rotary_dim < s.head_dim for s in specs)
    assert {one.problem.size.seq for one in LANDSCAPES} >= {1, 131072}
    for one in LANDSCAPES:
        pool = set(legal_pool(one.problem, one.environment["capability"]).variants)
        assert pool == set(one.times) | set(one.failed), one.problem.name
    assert sum(path.stat().st_size for path in places.LANDSCAPES.rglob("*.gz")) < 5 * 2**20


def test_the_search_comes_within_1_percent_of_the_best_after_15_percent_of_the_pool(
    cold: list[replay.Replay], again: list[replay.Replay]
) -> None:
    for run, one in zip(cold + again, LANDSCAPES + AGAIN, strict=True):
        assert len(run.regrets) <= max(60, round(0.15 * (len(one.times) + len(one.failed))))
    assert statistics.median(run.regrets[-1] for run in cold + again) <= 0.01
    assert max(run.regrets[-1] for run in cold + again) <= 0.03


def test_what_the_search_names_is_as_good(cold: list[replay.Replay], again: list[replay.Replay]) -> None:
    assert statistics.median(run.regret for run in cold + again) <= 0.01
    assert max(run.regret for run in cold + again) <= 0.03


def test_two_tunings_of_one_problem_end_within_1_5_percent_of_each_other(
    cold: list[replay.Replay], again: list[replay.Replay]
) -> None:
    for first, second in zip(cold[::2], again, strict=True):
        assert first.problem == second.problem
        assert abs((1 + first.regret) / (1 + second.regret) - 1) <= 0.015, first.problem


def test_the_search_is_better_than_random_search_and_seeds_make_it_better_still(cold: list[replay.Replay]) -> None:
    random = [replay.at_random(one, seed) for one in LANDSCAPES for seed in range(2)]
    warm = [replay.searched(one, 0, noise=replay.NOISE, warm=LANDSCAPES) for one in AGAIN]
    # Both begin with the default, which leaves little to find even for random search. The search nearly always finds it.
    ends = {name: replay.summary(runs) for name, runs in (("cold", cold), ("random", random))}
    assert ends["cold"]["95th"] < ends["random"]["95th"] / 3
    assert ends["cold"]["worst"] < ends["random"]["worst"]
    assert statistics.median(r.after(15) for r in warm) <= 0.005 < statistics.median(r.after(15) for r in cold) <= 0.01


@pytest.mark.parametrize(("kind", "evaluations"), [("TPESampler", 40), ("GPSampler", 10)])
def test_samplers_as_they_come_waste_proposals(kind: str, evaluations: int) -> None:
    if kind == "GPSampler":
        pytest.importorskip("scipy")
    import optuna  # noqa: PLC0415

    one = next(x for x in LANDSCAPES if x.problem.name == "llama3_8b_decode_64x1")
    run = replay.plain(one, getattr(optuna.samplers, kind)(seed=0), evaluations)
    assert run.wasted > len(run.regrets) / 4
    assert list(run.regrets) == sorted(run.regrets, reverse=True)


def test_a_sampler_over_the_pool_wastes_no_proposal() -> None:
    import optuna  # noqa: PLC0415

    for one in LANDSCAPES[::7]:
        first, again = (replay.pooled(one, optuna.samplers.TPESampler(seed=1), 1) for _ in range(2))
        assert (first.regrets, first.variant) == (again.regrets, again.variant)
        assert len(first.regrets) == replay.evaluations(one)
        assert first.wasted == 0
        assert first.regrets[0] == one.regret(default_variant(one.problem)) == replay.at_random(one, 2).regrets[0]
        assert list(first.regrets) == sorted(first.regrets, reverse=True)


def test_a_replay_measures_what_a_search_measures_and_counts_it_once() -> None:
    one = LANDSCAPES[0]
    run = replay.searched(one, 0)
    assert len(run.regrets) == replay.evaluations(one)
    assert run.regret == one.regret(run.variant)
    assert replay.searched(one, 0) == dataclasses.replace(run, seconds=pytest.approx(0, abs=60))


def test_the_table_of_the_readme_is_what_replay_gives(tmp_path: Path) -> None:
    few = LANDSCAPES[:2]
    found = evidence.searches(few, 1, plain=False)
    assert list(found) == [
        "tune.py, seeded by other problems",
        "tune.py",
        "the default, then random, none twice",
        "Optuna TPE over the pool",
    ]
    lines = evidence.search_markdown(found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- replay:begin -->\nold\n<!-- replay:end -->\nafter\n")
    put_between(page, "replay", "\n".join(lines))
    assert page.read_text().splitlines() == ["before", "<!-- replay:begin -->", *lines, "<!-- replay:end -->", "after"]
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must have the marks"):
        put_between(page, "replay", "x")
    assert page.read_text() == "no marks"


# --- the estimate -------------------------------------------------------------------------------------------------------


def test_the_estimate_is_near_the_best_on_problems_that_it_has_not_seen() -> None:
    found = evidence.guesses(LANDSCAPES)
    assert statistics.median(g.first for g in found) <= 0.10
    assert statistics.median(g.best_of_five for g in found) <= 0.03


def test_a_familys_only_landscape_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evidence, "fitted", lambda _family, without: None if without == "alone" else model.fitted("rope")
    )
    alone = dataclasses.replace(LANDSCAPES[0], problem=dataclasses.replace(LANDSCAPES[0].problem, name="alone"))
    assert evidence.guesses([alone]) == []
    assert [guess.problem for guess in evidence.guesses([alone, LANDSCAPES[1]])] == [LANDSCAPES[1].problem.name]


def test_a_replay_of_one_landscape_has_no_table_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.storage.landscape.load_landscapes", lambda _: LANDSCAPES[:1])
    monkeypatch.setattr(evidence, "fitted", lambda *_: None)
    monkeypatch.setattr(evidence, "searches", lambda *_, **__: {})
    monkeypatch.setattr(evidence, "agreements", lambda *_: [0.0])
    console = Console(record=True, width=400)
    assert commands.replay(DEVICE, 1, None, console, plain=False) == 0
    assert "no table of the estimate: " in console.export_text()


def test_a_problem_that_is_left_out_is_not_in_the_model() -> None:
    one = LANDSCAPES[0].problem.name
    every, others = model._all_equations("rope"), model.fitted("rope", one)
    assert set(every) == {x.problem.name for x in LANDSCAPES}
    assert others is not None
    kept = {name: sides for name, sides in every.items() if name != one}
    right = sum(sides[1] for sides in kept.values())
    left = sum(sides[0] for sides in kept.values()) + np.diag([1e-9, *[model.RIDGE * len(kept)] * (len(right) - 1)])
    assert np.allclose(left @ others.weights, right, atol=1e-6)
    assert not np.allclose(others.weights, model.fitted("rope").weights, atol=1e-3)


# --- files --------------------------------------------------------------------------------------------------------------

SMALL = problem_named("gru_cell_dreamer_200_16")
OTHER = problem_named("gru_cell_512_1")


def cost(problem: Any, variant: Any) -> float:
    del problem
    if variant.num_warps == 8:
        raise TrialFailedError("WrongResultError: no")
    if variant.block_hidden == 1024:
        raise WorkerLostError("illegal memory access")
    return 5 + variant.block_batch + variant.num_warps / 8


def recorded() -> tuple[Landscape, FakeWorker]:
    worker = FakeWorker(cost)
    worker.start()
    found = record(SMALL, worker, FakeCompiler(), ENVIRONMENT)  # type: ignore[arg-type]
    assert found is not None
    return found, worker


def test_a_landscape_has_every_legal_variant_and_comes_back_from_its_file(tmp_path: Path) -> None:
    found, worker = recorded()
    pool = legal_pool(SMALL, 90).variants
    assert set(found.times) | set(found.failed) == set(pool)
    assert {v.num_warps for v in found.times} == {2, 4}
    assert all(reason.startswith("lost") == (v.num_warps != 8) for v, reason in found.failed.items())
    assert worker.starts == 1 + sum(reason.startswith("lost") for reason in found.failed.values())
    path = save(found, tmp_path)
    again = load(path)
    assert again.problem == SMALL
    assert again.failed == found.failed
    assert again.registers == found.registers
    assert again.times == pytest.approx(found.times, abs=1e-4)
    assert again.fresh
    first = path.read_bytes()
    assert save(again, tmp_path).read_bytes() == first, "the same landscape, the same bytes"


def test_a_slash_in_the_name_of_a_problem_is_no_folder(tmp_path: Path) -> None:
    """A user's family may call its problems so; each variant was measured before the file could not be written."""
    found = recorded()[0]
    path = save(dataclasses.replace(found, problem=dataclasses.replace(found.problem, name="../8 x 4/half")), tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert load(path).problem.name == "../8 x 4/half"


def test_a_landscape_of_variants_that_are_no_more_leaves_them_out(tmp_path: Path) -> None:
    path = save(recorded()[0], tmp_path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["knobs"]["num_warps"] = [2, 4, 16]
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    again = load(path)
    assert again.times
    assert not again.failed.keys() & {v for v in again.failed if v.num_warps == 16}
    assert {v.num_warps for v in (*again.times, *again.failed)} == {2, 4}


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"not gzip",
        gzip.compress(b"{"),
        gzip.compress(b'{"format": "other"}'),
        gzip.compress(b"[]"),
        gzip.compress(b"{}")[:10] + b"\xff" * 20,
    ],
    ids=["empty", "not gzip", "torn", "foreign", "a list", "damaged"],
)
def test_a_file_that_is_no_landscape_says_so(tmp_path: Path, bytes_: bytes) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(bytes_)
    with pytest.raises(LandscapeError, match=r"x\.json\.gz"):
        load(path)


@pytest.mark.parametrize(("part", "values"), [("spec", {"none": 1}), ("size", {}), ("family", "none")])
def test_a_landscape_of_a_family_that_has_changed_says_so(tmp_path: Path, part: str, values: Any) -> None:
    """Such as one of a user's family whose Spec got a field."""
    path = save(recorded()[0], tmp_path)
    content = json.loads(gzip.decompress(path.read_bytes())) | {part: values}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(
        LandscapeError,
        match=r"\.json\.gz is of another (spec or size|family): record it again, .*landscape, or delete it",
    ):
        load(path)


def test_a_landscape_tries_what_may_pass_again() -> None:
    variants = legal_pool(SMALL, 90).variants
    left = {variants[3]: 1, variants[5]: 10**6}

    def cost(_problem: Any, variant: Any) -> float:
        if left.get(variant):
            left[variant] -= 1
            raise WorkerLostError("no answer in 30 s: it hung, and was killed")
        return 5.0

    worker = FakeWorker(cost)
    worker.start()
    measured = record(SMALL, worker, FakeCompiler(), ENVIRONMENT)  # type: ignore[arg-type]
    assert set(measured.times) == set(variants) - {variants[5]}
    assert measured.failed == {variants[5]: "lost the worker: no answer in 30 s: it hung, and was killed"}
    assert worker.measured.count(variants[5]) == 3


class Breaking(FakeWorker):
    """Its comparisons fail where one of ``broken`` is compared, or all with the worker if ``lost``."""

    broken: frozenset[Any] | set[Any] = frozenset()
    lost = False

    def compare(self, variants: list[Any]) -> Any:
        if self.lost:
            self.alive = False
        if self.broken & set(variants):
            raise TrialFailedError("WrongResultError: after it was timed")
        return super().compare(variants)


def all_recorded(worker: FakeWorker, folder: Path, *problems: Any) -> dict[str, Path | None]:
    worker.start()
    found = record_all(problems or (SMALL, OTHER), worker, FakeCompiler(), ENVIRONMENT, folder)  # type: ignore[arg-type]
    return {problem.name: path for problem, path, _ in found}


def test_a_comparison_that_fails_loses_nothing_but_the_variant_that_breaks_it(tmp_path: Path) -> None:
    pool = legal_pool(SMALL, 90).variants
    costs = {v: 5.0 + number for number, v in enumerate(pool)}
    worker = Breaking(lambda _, v: costs.get(v, 9.0))
    worker.broken = {pool[2]}
    paths = all_recorded(worker, tmp_path)
    assert list(paths) == [SMALL.name, OTHER.name], "the next problem has its turn"
    found = load(paths[SMALL.name])  # type: ignore[arg-type]
    assert found.failed == {pool[2]: "WrongResultError: after it was timed"}
    assert found.times == {v: us for v, us in costs.items() if v != pool[2]}
    # If no variant can be timed again, that is no fault of one of them.
    worker.broken = set(pool)
    found = load(all_recorded(worker, tmp_path, SMALL)[SMALL.name])  # type: ignore[arg-type]
    assert found.times == costs
    assert not found.failed


def test_a_worker_that_is_lost_in_the_comparison_loses_nothing(tmp_path: Path) -> None:
    worker = Breaking(lambda *_: 5.0)
    worker.lost = True
    paths = all_recorded(worker, tmp_path)
    assert [set(load(path).times) for path in paths.values() if path is not None] == [
        set(legal_pool(problem, 90).variants) for problem in (SMALL, OTHER)
    ]


def test_a_landscape_without_a_time_is_neither_saved_nor_read(tmp_path: Path) -> None:
    """It has no best variant, which all that reads landscapes asks for."""

    def fails(problem: Any, _variant: Any) -> float:
        if problem == SMALL:
            raise TrialFailedError("WrongResultError: no")
        return 5.0

    paths = all_recorded(FakeWorker(fails), tmp_path)
    assert paths == {SMALL.name: None, OTHER.name: tmp_path / ENVIRONMENT["device"] / f"{OTHER.name}.json.gz"}
    save(Landscape(SMALL, ENVIRONMENT, {}, 5.0, 6.0, {}, {}, {}), tmp_path / ENVIRONMENT["device"])
    assert [one.problem for one in load_landscapes(ENVIRONMENT["device"], tmp_path)] == [OTHER]


def test_the_command_says_that_no_variant_ran_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Any, _variant: Any) -> float:
        if problem == SMALL:
            raise TrialFailedError("WrongResultError: no")
        return 5.0

    worker = FakeWorker(fails)
    worker.start()
    ready = types.SimpleNamespace(kind="ready", names=("Test GPU",))
    for name, answer in (("gather", ready), ("diagnose", ready), ("choose_gpu", 0)):
        monkeypatch.setattr(commands.gpu, name, lambda *_, answer=answer: answer)
    measuring = contextlib.nullcontext((worker, FakeCompiler(), ENVIRONMENT))
    monkeypatch.setattr(commands, "on_gpu", lambda *_: measuring)
    console = Console(record=True, width=400)
    assert commands.landscape(f"{SMALL.name},{OTHER.name}", "auto", tmp_path, console) == 1
    said = console.export_text()
    assert (
        f"{SMALL.name}: no variant of it ran, so no landscape is saved: python tune.py --problems {SMALL.name}" in said
    )
    assert f"{OTHER.name}.json.gz" in said


def test_variants_of_the_same_code_are_measured_once(tmp_path: Path) -> None:
    from generator.measuring.compile import Resources  # noqa: PLC0415
    from generator.searching.search import tune  # noqa: PLC0415
    from generator.storage.backends import open_storage  # noqa: PLC0415
    from generator.storage.journal import Journal  # noqa: PLC0415

    def report(problem: Any, variant: Any) -> Any:
        del problem
        return (Resources(32, 0, 0, f"{variant.block_hidden}", programs=variant.block_batch),)

    worker = FakeWorker(lambda _, v: float(v.block_hidden + v.block_batch))
    worker.start()
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "journal.log"))
    outcome: Outcome = tune(SMALL, worker, FakeCompiler(report), journal, ENVIRONMENT, trials=99)  # type: ignore[arg-type]
    kinds = {(v.block_hidden, v.block_batch) for v in legal_pool(SMALL, 90).variants}
    assert len(worker.measured) == len(kinds)
    assert outcome.same == outcome.pool - len(kinds)
    assert outcome.measured == outcome.pool


def test_a_rope_variant_keeps_its_place_in_a_file(tmp_path: Path) -> None:
    one = LANDSCAPES[0]
    variant = next(v for v in one.times if v != RopeVariant())
    again = load(save(one, tmp_path))
    assert again.times[variant] == one.times[variant]
    assert again.times == one.times
