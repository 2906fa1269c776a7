"""Tune problems on one GPU, keeping each winner as soon as it is known."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuned.lookup.record import Winner

from ..disk import disk_trouble
from ..failures import TuningError
from ..measuring.stage import bytes_needed
from ..problem import Problem
from ..processes.compiler import compile_variant
from ..processes.worker import TrialFailedError, Worker, WorkerGoneError, WorkerLostError
from ..rendering.structures import fresh
from ..storage.backends import LOST_STORAGE, StorageError, lost_storage
from ..storage.journal import Journal
from ..storage.record import QUICK, read_record, save_winner
from .pool import incumbent_of, legal_pool, same_problem, seeds_for
from .search import Outcome, Progress, opening, tune
from .stopwatch import Stopwatch

# (problem, compute capability, multiprocessors) -> the variants to measure in place of a search.
Candidates = Callable[[Problem, int, int], list[Any]]
LEAST_SHARE_S = 10.0  # of a budget, for one problem: with less, starting the compilers leaves the first with one trial
RENDER_SECONDS = 120.0  # at least, between two renderings of the committed files: each takes 1 to 2 s; every GPU waits
RESERVE = 0.9  # share of the free memory that a problem may take: the allocator's blocks are not exact
NO_TIME = "the time budget was used up before it"


def trouble(error: BaseException) -> str | None:
    """The sentence for a trouble that a tuner may have with its GPU, its storage or its disk; None if it is a defect."""
    if isinstance(error, TuningError | StorageError | WorkerLostError):
        return str(error)
    if lost_storage(error):
        return LOST_STORAGE
    return disk_trouble(error) if isinstance(error, OSError) else None


@dataclasses.dataclass
class Run:
    """What a run has done so far. It is filled as the run goes, so that an interrupt loses none of it."""

    problems: list[Problem]
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # problem -> why
    record: Path | None = None
    interrupted: bool = False
    gpus: int = 1  # how many measured
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)  # of all GPUs together

    @property
    def winners(self) -> list[Winner]:
        """The winners of this run, in the order of its problems."""
        return [self.outcomes[p.name].winner for p in self.problems if p.name in self.outcomes]

    @property
    def done(self) -> int:
        """How many problems are over."""
        return len(self.outcomes) + len(self.skipped)


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a run works with; tests put in their own."""

    worker: Worker
    compiler: concurrent.futures.Executor
    journal: Journal
    environment: dict[str, Any]


def nothing(*_: object) -> None:
    """Do nothing: the default where nothing is displayed or generated from the record."""


@dataclasses.dataclass(frozen=True)
class Display:
    """The callbacks by which a run tells what it does."""

    started: Callable[[str, dict[str, Any], int], None] = nothing  # a GPU, what it measures with, its compilers
    report: Callable[..., None] = (
        nothing  # how many problems are done, the progress of one, its GPU if there are several
    )
    done: Callable[[Problem, Outcome | str], None] = nothing
    say: Callable[[str], None] = nothing


SILENT = Display()


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a run is to do."""

    problems: list[Problem]
    trials: int
    end: float = math.inf  # time.monotonic()
    folder: Path | None = None  # of the record, if it is not the package's
    candidates: Candidates | None = None  # measure these, and search nothing
    write_table: Callable[[str], object] = nothing  # writes the table of a device, after each winner
    render: Callable[[], object] = nothing  # renders the files that the record names, now and then and at the end


@dataclasses.dataclass(frozen=True)
class Work:
    """One problem to tune, with all that tuning it needs to know."""

    problem: Problem
    following: Problem | None  # the next one: its first variants are compiled when the compilers are idle
    trials: int
    candidates: Candidates | None
    seconds: float
    known: list[Winner]  # the record


class Keeper:
    """Keeps what a run finds: each winner in record and table at once, generated files now and then and at the end."""

    def __init__(self, run: Run, orders: Orders, device: str) -> None:
        self._run, self._orders = run, orders
        self._known = read_record(device, orders.folder)
        self._noted: list[Winner] = []  # noted and not kept yet
        self._rendered = time.monotonic()
        self._changed = False

    def work(self, problem: Problem, following: Problem | None, share: float) -> Work:
        """The work for a problem: it gets a share of the time that is left, and at least LEAST_SHARE_S of it."""
        orders, left_s = self._orders, self._orders.end - time.monotonic()
        seconds = max(left_s * share, min(left_s, LEAST_SHARE_S))
        return Work(problem, following, orders.trials, orders.candidates, seconds, self._known)

    def note(self, problem: Problem, outcome: Outcome | str) -> None:
        """Note the outcome of a problem, or why there is none. The next problems may begin with its winner."""
        if isinstance(outcome, str):
            self._run.skipped[problem.name] = outcome
            return
        self._run.outcomes[problem.name] = outcome
        self._known = [w for w in self._known if not same_problem(w, outcome.winner)] + [outcome.winner]
        self._noted.append(outcome.winner)

    def keep(self) -> None:
        """Keep the winners that were noted."""
        while self._noted:
            winner = self._noted[0]
            with self._run.stopwatch.time("record"):
                self._run.record = save_winner(winner, self._orders.folder)
                self._orders.write_table(winner.environment["device"])
            del self._noted[0]
            self._changed = True
        if time.monotonic() - self._rendered >= RENDER_SECONDS:
            self._render()

    def end(self) -> None:
        """Keep what is not kept yet, and render if something changed since the last time."""
        self.keep()
        self._render()

    def _render(self) -> None:
        if self._changed:
            self._changed = False
            with self._run.stopwatch.time("render"):
                self._orders.render()
            self._rendered = time.monotonic()


def tune_all(run: Run, tools: Tools, orders: Orders, display: Display = SILENT) -> None:
    """Tune every problem of ``orders``; a winner goes into the record, and the table, before the next problem starts.

    The remaining time is divided evenly over the remaining problems, at least LEAST_SHARE_S each. KeyboardInterrupt
    ends the run early; what was done is kept.
    """
    keeper = Keeper(run, orders, tools.environment["device"])
    left, over = list(orders.problems), ""
    try:
        while left:
            problem = left.pop(0)
            if time.monotonic() >= orders.end:
                over = over or NO_TIME
            if over:
                run.skipped[problem.name] = over
                continue
            work = keeper.work(problem, left[0] if left else None, 1 / (1 + len(left)))
            try:
                outcome = tuned(work, tools, run.stopwatch, functools.partial(display.report, run.done))
            except WorkerGoneError as error:  # the remaining problems are skipped
                outcome = over = f"the GPU is lost: {error}"
            keeper.note(problem, outcome)
            keeper.keep()
            display.done(problem, outcome)
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        keeper.end()


def tuned(work: Work, tools: Tools, stopwatch: Stopwatch, report: Callable[[Progress], None]) -> Outcome | str:
    """The outcome of a problem, or why there is none.

    Raises:
        WorkerGoneError: the GPU does not answer any more.
    """
    deadline = time.monotonic() + work.seconds
    problem, following = work.problem, work.following
    here = tools.environment["capability"], tools.environment["multiprocessors"]

    def watch(progress: Progress) -> None:
        nonlocal following
        # The compilers are idle towards the end of a problem, and in a quick run from the start: let them compile the
        # first variants of the next problem.
        if following is not None and (work.candidates or progress.trial >= progress.trials * 0.6):
            ahead, following = following, None
            for variant in _first_of(ahead, work, *here):
                tools.compiler.submit(compile_variant, ahead, variant, f"sm_{here[0]}")
        report(progress)

    try:
        reason = _no_variant(problem, *here) or _no_room(problem, tools.worker)
        if reason is not None:
            return reason
        outcome = tune(
            problem,
            tools.worker,
            tools.compiler,
            tools.journal,
            tools.environment,
            trials=work.trials,
            seeds=seeds_for(problem, work.known, *here),
            incumbent=incumbent_of(problem, work.known),
            candidates=None if work.candidates is None else work.candidates(problem, *here),
            deadline=deadline,
            stopwatch=stopwatch,
            report=watch,
        )
    except TrialFailedError as error:
        return f"it could not be staged: {error}"
    except WorkerGoneError:
        raise
    except WorkerLostError as error:
        return f"the GPU did not measure it: {error}"
    return outcome if work.candidates is None else _marked_quick(outcome, work.known)


def _first_of(problem: Problem, work: Work, capability: int, multiprocessors: int) -> list[Any]:
    """The variants that the tuning of a problem begins with."""
    if work.candidates is not None:
        return work.candidates(problem, capability, multiprocessors)
    seeds = seeds_for(problem, work.known, capability, multiprocessors)
    return opening(problem, capability, seeds, incumbent_of(problem, work.known), multiprocessors)


def _no_variant(problem: Problem, capability: int, multiprocessors: int) -> str | None:
    pool = legal_pool(problem, capability, multiprocessors)
    if pool.variants:
        return None
    why = "; ".join(f"{count} x {reason}" for reason, count in list(pool.rejected.items())[:3])
    return f"no variant of it is legal here: {why}"


def _no_room(problem: Problem, worker: Worker) -> str | None:
    try:
        free = worker.free_bytes()
    except WorkerLostError:
        worker.start()
        free = worker.free_bytes()
    needed = bytes_needed(problem)
    why = f"it needs {needed / 2**30:.1f} GiB of GPU memory, and {free / 2**30:.1f} GiB are free"
    return why if needed > RESERVE * free else None


def _marked_quick(outcome: Outcome, known: list[Winner]) -> Outcome:
    """Mark an outcome's winner as found among a few candidates, unless the problem has a row of a whole search."""
    winner = outcome.winner
    if any(same_problem(w, winner) and fresh(w.digests) and w.environment.get("search") != QUICK for w in known):
        return outcome
    return dataclasses.replace(
        outcome, winner=dataclasses.replace(winner, environment={**winner.environment, "search": QUICK})
    )
