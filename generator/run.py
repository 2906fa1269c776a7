"""Tune problems one after the other on one GPU, keeping each winner as soon as it is known."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from generator.committed import render_all
from generator.compiler import compile_variant
from generator.record import read_record, save_winner
from generator.search import Progress, tune
from generator.seeds import incumbent_of, same_problem, seeds_for
from generator.stage import bytes_needed
from generator.worker import TrialFailedError, Worker, WorkerLostError
from generator.workload import WORKLOADS

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable
    from pathlib import Path

    from generator.journal import Journal
    from generator.problem import Problem
    from generator.search import Outcome
    from tuned.record import Winner

LEAST_SHARE_S = 10.0  # of a budget, for one problem: less, and starting the compilers leaves the first with one trial
RESERVE = 0.9  # share of the free memory that a problem may take: the allocator's blocks are not exact


@dataclasses.dataclass
class Run:
    """What a run has done so far; filled while it goes, so that an interrupt loses none of it."""

    problems: list[Problem]
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # problem -> why
    record: Path | None = None
    interrupted: bool = False

    @property
    def winners(self) -> list[Winner]:
        """The winners of this run, in order."""
        return [outcome.winner for outcome in self.outcomes.values()]


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a run works with; tests put in their own."""

    worker: Worker
    compiler: concurrent.futures.Executor
    journal: Journal
    environment: dict[str, Any]


def tune_all(  # noqa: PLR0913 - the parts are independent of each other
    run: Run,
    tools: Tools,
    *,
    trials: int,
    budget_s: float = math.inf,
    folder: Path | None = None,
    report: Callable[[int, Progress], None] = lambda _index, _progress: None,
    done: Callable[[Problem, Outcome | str], None] = lambda _problem, _result: None,
) -> None:
    """Tune every problem of ``run``; a winner goes into the record, and the table, before the next problem starts.

    What is left of ``budget_s`` is divided evenly over the problems that are left, at least LEAST_SHARE_S each. ``folder`` keeps the record
    elsewhere; then no table of the package is written. KeyboardInterrupt ends it early, with what was done kept.
    """
    known = read_record(tools.environment["device"], folder)
    end = time.monotonic() + budget_s
    try:
        for index, problem in enumerate(run.problems):
            left_s = end - time.monotonic()
            if left_s <= 0:
                _skip(run, problem, "the time budget was used up before it", done)
                continue
            share_s = max(left_s / (len(run.problems) - index), min(left_s, LEAST_SHARE_S))
            deadline = time.monotonic() + share_s
            following = run.problems[index + 1] if index + 1 < len(run.problems) else None
            reason = _no_room(problem, tools.worker)
            if reason is not None:
                _skip(run, problem, reason, done)
                continue
            outcome = _tune_one(problem, following, known, tools, trials, deadline, lambda p, i=index: report(i, p))  # type: ignore[misc]
            if isinstance(outcome, str):
                _skip(run, problem, outcome, done)
                continue
            known = [w for w in known if not same_problem(w, problem)] + [outcome.winner]
            run.outcomes[problem.name] = outcome
            run.record = save_winner(outcome.winner, folder)
            if folder is None:
                render_all()  # the kernels that the new row names
            done(problem, outcome)
    except KeyboardInterrupt:
        run.interrupted = True


def _skip(run: Run, problem: Problem, reason: str, done: Callable[[Problem, Outcome | str], None]) -> None:
    run.skipped[problem.name] = reason
    done(problem, reason)


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
    tools: Tools,
    trials: int,
    deadline: float,
    report: Callable[[Progress], None],
) -> Outcome | str:
    ahead = following is None

    def watch(progress: Progress) -> None:
        # The compiler's processes are idle towards the end of a problem: give them the start of the next one.
        nonlocal ahead
        if not ahead and following is not None and progress.trial >= progress.trials * 0.7:
            ahead = True
            _compile_ahead(following, known, tools)
        report(progress)

    capability = tools.environment["capability"]
    try:
        return tune(
            problem,
            tools.worker,
            tools.compiler,
            tools.journal,
            tools.environment,
            trials=trials,
            seeds=seeds_for(problem, known, capability),
            incumbent=incumbent_of(problem, known),
            deadline=deadline,
            report=watch,
        )
    except TrialFailedError as error:
        return f"it could not be staged: {error}"
    except WorkerLostError as error:
        tools.worker.start()
        return f"the GPU did not measure it: {error}"


def _compile_ahead(problem: Problem, known: list[Winner], tools: Tools) -> None:
    capability = tools.environment["capability"]
    default = WORKLOADS[problem.family].family.default_variant(problem.spec, problem.size)
    for variant in dict.fromkeys([default, *seeds_for(problem, known, capability)]):
        tools.compiler.submit(compile_variant, problem, variant, f"sm_{capability}")
