"""Tune problems on one GPU, keeping each winner as soon as it is known."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from generator.keeping.journal import KEY
from generator.keeping.record import QUICK, read_record, save_winner
from generator.measuring.stage import bytes_needed
from generator.processes.compiler import compile_variant
from generator.processes.worker import TrialFailedError, Worker, WorkerGoneError, WorkerLostError
from generator.rendering.committed import render_all
from generator.searching.queues import InOrder, Shared, TakenOverError
from generator.searching.search import Progress, opening, tune
from generator.searching.seeds import incumbent_of, is_fresh, same_problem, seeds_for
from generator.searching.stopwatch import Stopwatch

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable
    from pathlib import Path

    from generator.keeping.journal import Journal
    from generator.problem import Problem
    from generator.searching.search import Outcome
    from tuned.lookup.record import Winner

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


@dataclasses.dataclass(frozen=True)
class _How:
    """What is the same for every problem of a run."""

    tools: Tools
    trials: int
    candidates: Candidates | None
    stopwatch: Stopwatch


def tune_all(  # noqa: PLR0913 - the parts are independent of each other
    run: Run,
    tools: Tools,
    *,
    trials: int,
    candidates: Candidates | None = None,
    budget_s: float = math.inf,
    folder: Path | None = None,
    queue: InOrder | Shared | None = None,
    renders: bool = True,
    report: Callable[[int, Progress], None] = lambda _index, _progress: None,
    done: Callable[[Problem, Outcome | str], None] = lambda _problem, _result: None,
) -> None:
    """Tune every problem of ``run``; a winner goes into the record, and the table, before the next problem starts.

    What is left of ``budget_s`` is divided evenly over the problems that are left, at least LEAST_SHARE_S each. ``folder`` keeps the record
    elsewhere; then no table of the package is written. With ``candidates`` these are measured and nothing is searched.
    ``queue`` says which problem is next, by default the next one. With ``renders`` the kernels that the record names are committed, now and then and at the end. KeyboardInterrupt ends it
    early, with what was done kept.
    """
    known = read_record(tools.environment["device"], folder)
    end = time.monotonic() + budget_s
    queue = InOrder(run.problems) if queue is None else queue
    how = _How(tools, trials, candidates, run.stopwatch)
    kernels = Renderer(render_all if renders and folder is None else lambda: None, run.stopwatch)

    def keep(winner: Winner) -> None:
        nonlocal known
        known = [w for w in known if not same_problem(w, winner)] + [winner]
        with run.stopwatch.time("record"):
            run.record = save_winner(winner, folder)
        kernels.due()

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
            while gone is None and time.monotonic() < end and (problem := queue.take(end, wait_for)) is not None:
                hear()
                left_s = end - time.monotonic()
                deadline = time.monotonic() + max(left_s * queue.share, min(left_s, LEAST_SHARE_S))
                try:
                    outcome = _try_one(problem, queue, known, how, deadline, report)
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
        kernels.now()
    run.skipped = {name: reason for name, reason in run.skipped.items() if name not in run.others}


def _as_good(known: Winner, other: Winner) -> bool:
    """Whether a row of the record need not give way to another tuner's winner of the same problem."""
    alike = all(known.environment[k] == other.environment[k] for k in KEY)
    return same_problem(known, other) and alike and is_fresh(known) and known.median_us <= other.median_us


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


def _try_one(  # noqa: PLR0913 - the parts are independent of each other
    problem: Problem,
    queue: InOrder | Shared,
    known: list[Winner],
    how: _How,
    deadline: float,
    report: Callable[[int, Progress], None],
) -> Outcome | str:
    """The outcome, or why there is none."""

    def watch(progress: Progress) -> None:
        queue.check()
        report(queue.done, progress)

    try:
        reason = _no_room(problem, how.tools.worker)
        if reason is not None:
            return reason
        return _tune_one(problem, queue.following(), known, how, deadline, watch)
    except TrialFailedError as error:
        return f"it could not be staged: {error}"
    except WorkerGoneError:
        raise
    except WorkerLostError as error:
        return f"the GPU did not measure it: {error}"
    except TakenOverError as error:
        return str(error)


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


def _tune_one(  # noqa: PLR0913 - the parts are independent of each other
    problem: Problem,
    following: Problem | None,
    known: list[Winner],
    how: _How,
    deadline: float,
    report: Callable[[Progress], None],
) -> Outcome:
    tools = how.tools
    ahead = following is None

    def watch(progress: Progress) -> None:
        # The compiler's processes are idle towards the end of a problem, and of a quick one from the start: give them
        # what the next one begins with.
        nonlocal ahead
        if not ahead and following is not None and (how.candidates or progress.trial >= progress.trials * 0.6):
            ahead = True
            _compile_ahead(following, known, how)
        report(progress)

    here = tools.environment["capability"], tools.environment["multiprocessors"]
    outcome = tune(
        problem,
        tools.worker,
        tools.compiler,
        tools.journal,
        tools.environment,
        trials=how.trials,
        seeds=seeds_for(problem, known, *here),
        incumbent=incumbent_of(problem, known),
        candidates=None if how.candidates is None else how.candidates(problem, *here),
        deadline=deadline,
        stopwatch=how.stopwatch,
        report=watch,
    )
    return outcome if how.candidates is None else _marked_quick(outcome, known)


def _marked_quick(outcome: Outcome, known: list[Winner]) -> Outcome:
    """The outcome, its winner marked as found among a few candidates, unless the problem has a row of a whole search."""
    winner = outcome.winner
    if any(same_problem(w, winner) and is_fresh(w) and w.environment.get("search") != QUICK for w in known):
        return outcome
    return dataclasses.replace(
        outcome, winner=dataclasses.replace(winner, environment={**winner.environment, "search": QUICK})
    )


def _compile_ahead(problem: Problem, known: list[Winner], how: _How) -> None:
    capability, processors = how.tools.environment["capability"], how.tools.environment["multiprocessors"]
    if how.candidates is None:
        seeds = seeds_for(problem, known, capability, processors)
        first = opening(problem, capability, seeds, incumbent_of(problem, known), processors)
    else:
        first = how.candidates(problem, capability, processors)
    for variant in first:
        how.tools.compiler.submit(compile_variant, problem, variant, f"sm_{capability}")
