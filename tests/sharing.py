"""Tuner processes that share problems, with a fake stopwatch: what each measured is a line in a file."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.keeping.journal import Journal
from generator.keeping.record import read_record
from generator.keeping.storage import opened_storage
from generator.problem import Problem
from generator.searching.fleet import Orders
from generator.searching.pool import legal_pool
from generator.searching.queues import share_storage
from generator.searching.run import Run, Tools, tune_all
from generator.selection import problem_named
from tests.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tuned.gru_cell.spec import GruCellSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORK = multiprocessing.get_context("fork")  # torch is imported once, here
MODEL = problem_named("gru_cell_512_64")
PROBLEMS = [
    Problem(f"gru_{i}", "gru_cell", dataclasses.replace(MODEL.spec, hidden=64), GruCellSize(i)) for i in range(1, 9)
]


def cost(problem: Problem, variant: Any) -> float:
    """Microseconds, all different and without noise."""
    return 4.0 + variant.num_warps / 8 + variant.block_batch / problem.size.batch + variant.block_hidden / 1e4


@dataclasses.dataclass
class SlowWorker(FakeWorker):
    """Takes a moment for each measurement, and says first that it starts it."""

    log: Path = Path()
    name: str = ""
    seconds: float = 0.002
    dies_at: int = 0  # this measurement is never finished
    hangs_at: int = 0

    def measure(self, variant: Any) -> Any:
        with self.log.open("a") as file:
            file.write(f"{self.name} {self.problem.name} {variant}\n")
        if len(self.measured) + 1 == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.measured) + 1 == self.hangs_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(self.seconds)
        return super().measure(variant)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tuners of a test meet."""

    folder: Path
    url: str | None = None
    stale_s: float = 4.0  # a busy machine may keep a heart from beating for a second or two

    @property
    def log(self) -> Path:
        return self.folder / "measured.txt"

    def measured(self) -> collections.Counter[tuple[str, str]]:
        """(problem, variant) -> how often it was measured, by anyone."""
        lines = self.log.read_text().splitlines()
        return collections.Counter(tuple(line.split(" ", 2)[1:]) for line in lines)  # type: ignore[misc]

    def by(self) -> collections.Counter[str]:
        """Tuner -> how many measurements."""
        return collections.Counter(line.split()[0] for line in self.log.read_text().splitlines())

    def storage(self) -> Any:
        path = self.folder / "trials" / "test_gpu.log"  # where it lies when TUNED_CACHE is the folder
        path.parent.mkdir(exist_ok=True)
        return opened_storage(self.url, "test_gpu", path)

    def records(self, names: list[str]) -> list[list[Any]]:
        return [read_record("test_gpu", self.folder / name) for name in names]


@contextlib.contextmanager
def tools(place: Place, name: str, **options: Any) -> Iterator[Tools]:
    worker = SlowWorker(cost, log=place.log, name=name, **options)
    worker.start()
    with place.storage() as storage:
        share_storage(storage, "test_gpu")
        yield Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]


def orders(place: Place) -> Orders:
    """What every tuner of a test is told."""
    return Orders(PROBLEMS, trials=200, folder=place.folder / "out", stale_s=place.stale_s)


def tuner(place: Place, name: str, options: dict[str, Any]) -> None:
    """One tuner, from start to end; its record lies in a folder of its own, as on a host of its own."""
    told = orders(place)
    run = Run(PROBLEMS)
    with tools(place, name, **options) as made:
        queue = told.queue(made.journal.storage, ENVIRONMENT, name)
        queue._poll_s = 0.05
        tune_all(run, made, trials=told.trials, folder=place.folder / name, queue=queue, renders=False)
    assert not run.skipped, run.skipped
    (place.folder / f"{name}.done").write_text(" ".join(run.outcomes))


def start(place: Place, **tuners: dict[str, Any]) -> dict[str, Any]:
    """A process for each tuner, by its name."""
    processes = {name: FORK.Process(target=tuner, args=(place, name, options)) for name, options in tuners.items()}
    for process in processes.values():
        process.start()
    return processes


def join(processes: dict[str, Any], seconds: float = 60.0) -> dict[str, int | None]:
    """Exit codes; what has not ended in time is killed."""
    end = time.monotonic() + seconds
    for process in processes.values():
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return {name: process.exitcode for name, process in processes.items()}


def everything() -> set[tuple[str, str]]:
    """(problem, variant) of all that there is to measure."""
    return {(p.name, str(v)) for p in PROBLEMS for v in legal_pool(p, 90).variants}


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it is so; fail if that takes too long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
