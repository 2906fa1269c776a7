"""Tuner processes that share problems, with a fake stopwatch: what each measured is a line in a file."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.problem import Problem
from generator.rendering.structures import structures
from generator.searching.claims import Claims, Heart
from generator.searching.pool import legal_pool
from generator.searching.queues import share_storage
from generator.searching.run import Orders, Run, Tools, tune_all
from generator.searching.seeds import _leaders
from generator.selection import problem_named
from generator.storage.backends import opened_storage
from generator.storage.journal import Journal
from generator.storage.record import read_record
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.processes import BACKSTOP_SECONDS, alive, wait_for
from tuned.families.gru_cell.spec import GruCellSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORK = multiprocessing.get_context("fork")  # torch is imported once, here
MODEL = problem_named("gru_cell_512_64")
PROBLEMS = [
    Problem(f"gru_{i}", "gru_cell", dataclasses.replace(MODEL.spec, hidden=256, inplace=True), GruCellSize(i))
    for i in range(9, 15)  # few variants: 28 each
]


def cost(problem: Problem, variant: Any) -> float:
    """Microseconds, all different and without noise."""
    return 4.0 + variant.num_warps / 8 + variant.block_batch / problem.size.batch + variant.block_hidden / 1e4


@dataclasses.dataclass
class ToldWorker(FakeWorker):
    """Says of each measurement that it starts it, and does then what it was told to."""

    log: Path = Path()
    name: str = ""
    together: Any = None  # a barrier: nobody measures before all of these have something to measure
    dies_at: int = 0  # this measurement is never finished
    hangs_at: int = 0
    waits_at: int = 0  # this measurement is not finished before ``waits_for`` holds
    waits_for: Callable[[], object] = lambda: False
    drops: int = 0  # so many times Ctrl-C does nothing while it waits, as where it falls into a destructor

    def measure(self, variant: Any) -> Any:
        if self.together is not None and not self.measured:
            self.together.wait(BACKSTOP_SECONDS)
        with self.log.open("a") as file:
            file.write(f"{self.name} {self.problem.name} {variant}\n")
        number = len(self.measured) + 1
        if number == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.hangs_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == self.waits_at:
            for _ in range(self.drops):
                with contextlib.suppress(KeyboardInterrupt):
                    wait_for(self.waits_for)
            wait_for(self.waits_for)
        return super().measure(variant)


class Pulse(Heart):
    """Beats all the time, and writes down how often: the clock of tuners that share, whatever the machine does besides."""

    EVERY_S = 0.1

    def __init__(self, claims: Claims, place: Place, name: str) -> None:
        super().__init__(claims)
        self._path, self._count = place.folder / f"{name}.beats", 0
        self._tick()

    def _tick(self) -> None:
        fresh = self._path.with_suffix(".fresh")
        fresh.write_text(f"{os.getpid()} {self._count}")
        fresh.replace(self._path)

    def _run(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            self._beat()
            self._count += 1
            self._tick()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tuners of a test meet."""

    folder: Path
    url: str | None = None

    @property
    def log(self) -> Path:
        return self.folder / "measured.txt"

    def clock(self) -> float:
        """As many seconds as every living tuner has had beats since it came: nobody alive ever seems dead."""
        counts = (map(int, path.read_text().split()) for path in self.folder.glob("*.beats"))
        return float(min((count for pid, count in counts if alive(pid)), default=0))

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
    worker = ToldWorker(cost, log=place.log, name=name, **options)
    worker.start()
    with place.storage() as storage:
        share_storage(storage, "test_gpu")
        yield Tools(worker, FakeCompiler(), Journal(storage), ENVIRONMENT)  # type: ignore[arg-type]


def orders(place: Place) -> Orders:
    """What every tuner of a test is told."""
    return Orders(PROBLEMS, trials=200, folder=place.folder / "out", stale_s=6.0)


def tuner(place: Place, name: str, options: dict[str, Any]) -> None:
    """One tuner, from start to end; its record lies in a folder of its own, as on a host of its own."""
    told = orders(place)
    run = Run(PROBLEMS)
    with tools(place, name, **options) as made:
        queue = told.queue(made.journal.storage, ENVIRONMENT, name)
        queue._poll_s = 0.05
        queue._claims._clock = place.clock
        queue._heart = Pulse(queue._claims, place, name)
        tune_all(run, made, dataclasses.replace(told, folder=place.folder / name), queue=queue)
    assert not run.skipped, run.skipped
    (place.folder / f"{name}.done").write_text(" ".join(run.outcomes))


@functools.cache
def warm() -> None:
    """Have here, before tuners are forked, what each would find for itself: pools, kernels, landscapes."""
    everything()
    structures()
    _leaders()


def start(place: Place, **tuners: dict[str, Any]) -> dict[str, Any]:
    """A process for each tuner, by its name."""
    warm()
    processes = {name: FORK.Process(target=tuner, args=(place, name, options)) for name, options in tuners.items()}
    for process in processes.values():
        process.start()
    return processes


def join(processes: dict[str, Any]) -> dict[str, int | None]:
    """Exit codes; what never ends is killed."""
    for process in processes.values():
        process.join(BACKSTOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
    return {name: process.exitcode for name, process in processes.items()}


def everything() -> set[tuple[str, str]]:
    """(problem, variant) of all that there is to measure."""
    return {(p.name, str(v)) for p in PROBLEMS for v in legal_pool(p, 90).variants}
