"""Tune problems on one GPU, keeping each winner as soon as it is known."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, InMemoryStorage

from tuned.lookup.record import Winner

from ..measuring.stage import bytes_needed
from ..problem import Problem
from ..processes.compiler import compile_variant
from ..processes.worker import TrialFailedError, Worker, WorkerGoneError, WorkerLostError
from ..rendering.structures import fresh
from ..storage.journal import KEY, Journal
from ..storage.record import QUICK, read_record, save_winner
from .claims import STALE_SECONDS, Claims
from .queues import Shared, TakenOverError, scope_of
from .search import Outcome, Progress, opening, tune
from .seeds import incumbent_of, same_problem, seeds_for
from .stopwatch import Stopwatch

# What to measure of a problem on a compute capability with so many multiprocessors, in place of a search.
Candidates = Callable[[Problem, int, int], list[Any]]
LEAST_SHARE_S = 10.0  # of a budget, for one problem: less, and starting the compilers leaves the first with one trial
RENDER_SECONDS = 30.0  # at least, between two renderings of the committed files, which take about a second
RESERVE = 0.9  # share of the free memory that a problem may take: the allocator's blocks are not exact


@dataclasses.dataclass
class Run:
    """What a run has done so far; filled while it goes, so that an interrupt loses none of it."""

    problems: list[Problem]
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    others: dict[str, Winner] = dataclasses.field(default_factory=dict)  # found by tuners that share the problems
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # problem -> why
    record: Path | None = None
    interrupted: bool = False
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)  # of all GPUs together

    @property
    def winners(self) -> list[Winner]:
        """The winners of this run, in the order of its problems."""
        found = {name: outcome.winner for name, outcome in self.outcomes.items()} | self.others
        return [found[p.name] for p in self.problems if p.name in found]


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a run works with; tests put in their own."""

    worker: Worker
    compiler: concurrent.futures.Executor
    journal: Journal
    environment: dict[str, Any]


def nothing(*_: object) -> None:
    """What follows a winner where nothing is generated from the record."""


@dataclasses.dataclass(frozen=True)
class Orders:
    """What every tuner of a host is told."""

    problems: list[Problem]
    trials: int
    end: float = math.inf  # time.monotonic(), which is one clock for all processes of a host
    folder: Path | None = None  # of the record, if it is not the package's
    candidates: Candidates | None = None  # measure these, and search nothing
    stale_s: float = STALE_SECONDS
    write_table: Callable[[str], object] = nothing  # of a device, after each winner
    render: Callable[[], object] = nothing  # whatever the record names, now and then and at the end

    def queue(self, storage: BaseStorage | None, environment: dict[str, Any], owner: str) -> Shared:
        """The problems as one of the tuners that share them through a storage sees them; without one it is alone."""

        def detail(problem: Problem) -> str:
            if self.candidates is None:
                return "search"
            chosen = self.candidates(problem, environment["capability"], environment["multiprocessors"])
            return hashlib.sha256(repr(chosen).encode()).hexdigest()[:12]

        claims = Claims(storage or InMemoryStorage(), scope_of(environment, self.trials), owner, stale_s=self.stale_s)
        return Shared(self.problems, claims, detail=detail)


def tune_all(  # noqa: PLR0913 - the parts are independent of each other
    run: Run,
    tools: Tools,
    orders: Orders,
    *,
    queue: Shared | None = None,
    report: Callable[[int, Progress], None] = nothing,
    done: Callable[[Problem, Outcome | str], None] = nothing,
) -> None:
    """Tune every problem of ``run``; a winner goes into the record, and the table, before the next problem starts.

    The time that is left is divided evenly over the problems that are left, at least LEAST_SHARE_S each. ``queue`` says
    which problem is next, by default the next one of ``orders``. KeyboardInterrupt ends it early, with what was done kept.
    """
    known = read_record(tools.environment["device"], orders.folder)
    queue = queue or orders.queue(None, tools.environment, "")
    renderer = Renderer(orders.render, run.stopwatch)

    def keep(winner: Winner) -> None:
        nonlocal known
        known = [w for w in known if not same_problem(w, winner)] + [winner]
        with run.stopwatch.time("record"):
            run.record = save_winner(winner, orders.folder)
            orders.write_table(winner.environment["device"])
        renderer.due()

    def hear() -> None:
        for winner in queue.news():
            run.others[winner.name] = winner
            if not any(_as_good(w, winner) for w in known):
                keep(winner)

    def wait_for(what: str) -> None:
        hear()
        report(queue.done, Progress(note=f"waiting for {what}"))

    gone: str | None = None
    try:
        with queue:
            while (
                gone is None
                and time.monotonic() < orders.end
                and (problem := queue.take(orders.end, wait_for)) is not None
            ):
                hear()
                left_s = orders.end - time.monotonic()
                deadline = time.monotonic() + max(left_s * queue.share, min(left_s, LEAST_SHARE_S))
                try:
                    outcome = _tuned(problem, queue, known, tools, orders, run.stopwatch, deadline, report)
                except WorkerGoneError as error:  # what is left is for other GPUs, or for another day
                    outcome = gone = f"the GPU is lost: {error}"
                # What was cut short, or failed by what may pass, is kept, and is not the end of it for a later run or another tuner.
                passing = not isinstance(outcome, str) and outcome.passing > 0
                counts = queue.end(outcome, complete=time.monotonic() < deadline and not passing)
                if isinstance(outcome, str):
                    run.skipped[problem.name] = outcome
                elif counts:
                    run.outcomes[problem.name] = outcome
                    keep(outcome.winner)
                done(problem, outcome)
            for name, reason in queue.left().items():
                run.skipped[name] = gone or reason
            hear()
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        renderer.now()
    run.skipped = {name: reason for name, reason in run.skipped.items() if name not in run.others}


def _as_good(known: Winner, other: Winner) -> bool:
    """Whether a row of the record need not give way to another tuner's winner of the same problem."""
    alike = all(known.environment[k] == other.environment[k] for k in KEY)
    return same_problem(known, other) and alike and fresh(known.digests) and known.median_us <= other.median_us


class Renderer:
    """Renders what has changed, not more often than every RENDER_SECONDS, and at the end."""

    def __init__(self, render: Callable[[], Any], stopwatch: Stopwatch) -> None:
        self._render, self._stopwatch = render, stopwatch
        self._last = -math.inf
        self._changed = False

    def due(self) -> None:
        """Something changed: render, unless that was done a moment ago."""
        self._changed = True
        if time.monotonic() - self._last >= RENDER_SECONDS:
            self.now()

    def now(self) -> None:
        """Render if something changed since the last time."""
        if self._changed:
            self._changed = False
            with self._stopwatch.time("render"):
                self._render()
            self._last = time.monotonic()


def _tuned(  # noqa: PLR0913 - the parts are independent of each other
    problem: Problem,
    queue: Shared,
    known: list[Winner],
    tools: Tools,
    orders: Orders,
    stopwatch: Stopwatch,
    deadline: float,
    report: Callable[[int, Progress], None],
) -> Outcome | str:
    """The outcome, or why there is none."""
    here = tools.environment["capability"], tools.environment["multiprocessors"]
    following: Problem | None = None  # what is still to be compiled ahead

    def watch(progress: Progress) -> None:
        nonlocal following
        queue.check()
        # The compiler's processes are idle towards the end of a problem, and of a quick one from the start: give them
        # what the next one begins with.
        if following is not None and (orders.candidates or progress.trial >= progress.trials * 0.6):
            ahead, following = following, None
            for variant in _first_of(ahead, known, orders, *here):
                tools.compiler.submit(compile_variant, ahead, variant, f"sm_{here[0]}")
        report(queue.done, progress)

    try:
        reason = _no_room(problem, tools.worker)
        if reason is not None:
            return reason
        following = queue.following()
        outcome = tune(
            problem,
            tools.worker,
            tools.compiler,
            tools.journal,
            tools.environment,
            trials=orders.trials,
            seeds=seeds_for(problem, known, *here),
            incumbent=incumbent_of(problem, known),
            candidates=None if orders.candidates is None else orders.candidates(problem, *here),
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
    except TakenOverError as error:
        return str(error)
    return outcome if orders.candidates is None else _marked_quick(outcome, known)


def _first_of(
    problem: Problem, known: list[Winner], orders: Orders, capability: int, multiprocessors: int
) -> list[Any]:
    """The variants that tuning a problem begins with."""
    if orders.candidates is not None:
        return orders.candidates(problem, capability, multiprocessors)
    seeds = seeds_for(problem, known, capability, multiprocessors)
    return opening(problem, capability, seeds, incumbent_of(problem, known), multiprocessors)


def _no_room(problem: Problem, worker: Worker) -> str | None:
    try:
        free = worker.free_bytes()
    except WorkerLostError:
        worker.start()
        free = worker.free_bytes()
    needed = bytes_needed(problem)
    if needed > RESERVE * free:
        return f"it needs {needed / 2**30:.1f} GiB of GPU memory, and {free / 2**30:.1f} GiB are free"
    return None


def _marked_quick(outcome: Outcome, known: list[Winner]) -> Outcome:
    """The outcome, its winner marked as found among a few candidates, unless the problem has a row of a whole search."""
    winner = outcome.winner
    if any(same_problem(w, winner) and fresh(w.digests) and w.environment.get("search") != QUICK for w in known):
        return outcome
    return dataclasses.replace(
        outcome, winner=dataclasses.replace(winner, environment={**winner.environment, "search": QUICK})
    )
