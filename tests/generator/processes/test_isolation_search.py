"""A search over a landscape full of broken variants, in real processes: failures have the right reasons, a right variant wins."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from generator.failures import times_to_be_a_fact
from generator.processes import forkserver
from generator.processes.compiler import CompilerPool
from generator.processes.forkserver import Child
from generator.processes.worker import Worker, WorkerGoneError, WorkerLostError
from generator.rendering.structures import structures
from generator.searching import search as search_module
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.searching.search import FINALISTS, choose
from generator.storage.backends import open_storage
from generator.storage.journal import Journal
from generator.workload import WORKLOADS
from tests.broken import compiling
from tests.broken.server import COPY, DEEDS, INPLACE, WARM, cost, ranked
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.processes import only_the_hung_are_out_of_time
from tests.support.reasons import REASONS
from tuned.lookup.record import load_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

SERVER = "tests.broken.server:"
REASONS_OF_COMPILERS = (
    "does not compile: the compiler was lost: no answer in 20 s: it hung, and was killed",
    r"does not compile: the compiler was lost: the process died \(killed by SIGABRT\); it printed last: LLVM ERROR: out of",
    "does not compile: CompilationError: at 1:1",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Child, "now", only_the_hung_are_out_of_time)
    monkeypatch.setattr(forkserver, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(forkserver, "PRELOAD", WARM)
    monkeypatch.setattr(forkserver, "LATER", ())  # these imports would take each server a second


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerPool]:
    monkeypatch.setattr(search_module, "compile_variant", compiling.compile_variant)
    with CompilerPool(2) as pool:
        yield pool


def journal(folder: Path) -> Journal:
    return Journal(open_storage(None, "test_gpu", folder / "trials.log"))


def digests(problem: Any) -> Any:
    names = WORKLOADS[problem.family].family.kernel_names
    return lambda variant: {n: structures()[n].digest for n in names(problem.spec, variant)}


@pytest.mark.parametrize("problem", [COPY, INPLACE], ids=lambda problem: problem.name)
def test_everything_at_once(
    tmp_path: Path,
    compilers: CompilerPool,
    problem: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_module, "MOST_AGAIN", 99)
    worker = Worker(0, SERVER + "BrokenServer")
    worker.start()
    run = Run([problem])
    tools = Tools(worker, compilers, journal(tmp_path), ENVIRONMENT)
    tune_all(run, tools, Orders(run.problems, 72, folder=tmp_path / "out"))
    worker.stop()

    variants = ranked(problem)
    count = len(DEEDS) + len(REASONS_OF_COMPILERS)
    broken, right = variants[:count], variants[count:]
    facts, failures = journal(tmp_path).recalled(problem, ENVIRONMENT, digests(problem))
    assert not run.skipped
    outcome = run.outcomes[problem.name]
    known = {v: outcome.failed.get(str(dataclasses.asdict(v)), facts.get(v)) for v in variants}
    assert None not in known.values(), "every variant has a result"
    for variant in broken:
        needed = times_to_be_a_fact(known[variant])
        assert failures[variant] >= min(needed, 2), "what may pass was tried again"
        assert (variant in facts) == (failures[variant] >= needed), "and is no fact before it came that often"
    assert outcome.passing == len(variants) - len(facts) > 0
    for variant, (reason, lost) in zip(broken, (REASONS[deed] for deed in DEEDS), strict=False):
        said = known[variant]
        assert isinstance(said, str)
        assert re.search(reason.replace("^", ""), said), said
        assert said.startswith("lost the worker: ") == lost
    for variant, reason in zip(broken[len(DEEDS) :], REASONS_OF_COMPILERS, strict=True):
        assert re.match(reason, str(known[variant])), known[variant]
    assert [known[v][0] for v in right] == [cost(v) for v in right], "every other result stands"

    assert outcome.failed == {str(dataclasses.asdict(v)): known[v] for v in broken}
    default = WORKLOADS[problem.family].family.default_variant(problem.spec, problem.size)
    assert outcome.winner.variant == choose({v: cost(v) for v in (*right[:FINALISTS], default) if v in right}, None)
    assert load_record(tmp_path / "out" / "test_gpu.json") == [outcome.winner]
    assert worker.starts > 1 + sum(lost for _, lost in REASONS.values()), (
        "each of them, and again in a process of its own"
    )
    assert capfd.readouterr() == ("", "")


def test_a_gpu_that_is_gone_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    worker = Worker(0, SERVER + "NeverStarts", pause_seconds=0.0)
    worker.start()
    run = Run([COPY, INPLACE])
    tune_all(
        run,
        Tools(worker, FakeCompiler(), journal(tmp_path), ENVIRONMENT),
        Orders(run.problems, 72, folder=tmp_path / "out"),
    )
    assert not run.outcomes
    assert list(run.skipped) == [COPY.name, INPLACE.name]
    assert all("No CUDA GPUs are available" in reason for reason in run.skipped.values())
    assert worker.starts <= 4


def test_a_problem_that_kills_every_worker_is_skipped_and_the_next_one_measured(tmp_path: Path) -> None:
    worker = Worker(0, SERVER + "DiesStaging", pause_seconds=0.0)
    worker.start()
    run = Run([COPY, INPLACE])
    tune_all(
        run,
        Tools(worker, FakeCompiler(), journal(tmp_path), ENVIRONMENT),
        Orders(run.problems, 72, folder=tmp_path / "out"),
    )
    worker.stop()
    assert "killed by SIGSEGV" in run.skipped[COPY.name]
    assert list(run.outcomes) == [INPLACE.name]


def test_a_finalist_that_cannot_be_timed_again_does_not_win_and_stops_nothing(tmp_path: Path) -> None:
    worker = Worker(0, SERVER + "BreaksComparing")
    worker.start()
    run = Run([COPY])
    tune_all(
        run,
        Tools(worker, FakeCompiler(), journal(tmp_path), ENVIRONMENT),
        Orders(run.problems, 72, folder=tmp_path / "out"),
    )
    worker.stop()
    _, *right = ranked(COPY)
    default = WORKLOADS[COPY.family].family.default_variant(COPY.spec, COPY.size)
    assert run.outcomes[COPY.name].winner.variant == choose({v: cost(v) for v in (*right[:FINALISTS], default)}, None)


def test_what_the_last_worker_was_lost_by_is_kept(tmp_path: Path) -> None:
    class Worker(FakeWorker):
        def start(self) -> None:
            if self.starts:
                raise WorkerGoneError("the GPU has fallen off the bus")
            super().start()

    def break_it(_problem: Any, _variant: Any) -> float:
        raise WorkerLostError("illegal memory access")

    worker = Worker(break_it)
    worker.start()
    run = Run([COPY, INPLACE])
    tools = Tools(worker, FakeCompiler(), journal(tmp_path), ENVIRONMENT)  # type: ignore[arg-type]
    tune_all(run, tools, Orders(run.problems, 72, folder=tmp_path / "out"))
    assert run.skipped == dict.fromkeys((COPY.name, INPLACE.name), "the GPU is lost: the GPU has fallen off the bus")
    known = journal(tmp_path).remembered(COPY, ENVIRONMENT, digests(COPY))
    assert not known, "it was not reproduced"
    _, failures = journal(tmp_path).recalled(COPY, ENVIRONMENT, digests(COPY))
    assert list(failures.values()) == [1]
