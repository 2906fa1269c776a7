"""What each way of calling tune.py does; every function returns the exit code."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import TYPE_CHECKING, Any

from generator import gpu
from generator.cache import ROOT
from generator.committed import render_all
from generator.compiler import pool_of_processes
from generator.journal import Journal
from generator.pool import legal_pool
from generator.progress import bar
from generator.record import read_record
from generator.report import knobs, percent_of_floor, problem_lines, winners_table
from generator.run import Run, Tools, tune_all
from generator.selection import SelectionError, select
from generator.targets import target_named
from generator.worker import Worker
from generator.workload import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from generator.problem import Problem
    from generator.search import Outcome

DEFAULT_TARGET = "nvidia_h200"
TRIALS = 96  # a problem: the 94 default problems then take under 6 minutes on one H200
INTERRUPTED = 130  # what a shell gives for Ctrl-C


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of tune.py."""

    gpu: str = "auto"
    target: str | None = None
    family: str | None = None
    problems: str | None = None
    trials: int | None = None
    budget_s: float = math.inf
    out: Path | None = None


def tune(options: Options, console: Console) -> int:
    """Tune on the GPU of this machine; without one, or for a named target, do what is true without."""
    problems = select(options.family, options.problems)
    if options.target is not None:
        return estimate(options, options.target, console)
    facts = gpu.gather()
    answer = gpu.diagnose(facts)
    if answer.kind != "ready":
        say(console, answer.message)
        if options.gpu != "auto":
            return 1
        return estimate(options, DEFAULT_TARGET, console)
    try:
        index = gpu.choose_gpu(facts.names, options.gpu)
    except gpu.NoSuchGpuError as error:
        raise SelectionError(str(error)) from error
    return _measure(options, problems, index, console)


def _measure(options: Options, problems: list[Problem], index: int, console: Console) -> int:
    start = time.monotonic()
    run = Run(problems)
    worker = Worker(index)
    compiler = pool_of_processes()
    environment: dict[str, Any] = {}
    try:
        worker.start()
        environment = worker.environment()
        device = environment["device"]
        say(
            console,
            f"{environment['device_name']} (sm_{environment['capability']}), driver {environment['driver']}, "
            f"torch {environment['torch']}, Triton {environment['triton']}: {len(problems)} problems, "
            f"{os.cpu_count()} processes to compile with",
        )
        tools = Tools(worker, compiler, Journal(device), environment)
        with bar(console, len(problems), options.budget_s) as report:
            tune_all(
                run,
                tools,
                trials=options.trials or TRIALS,
                budget_s=options.budget_s,
                folder=options.out,
                report=report,
                done=lambda problem, result: say(console, _line(problem, result)),
            )
    except KeyboardInterrupt:  # before the first problem
        run.interrupted = True
    finally:
        worker.stop()
        compiler.shutdown(wait=False, cancel_futures=True)
    return _tell(run, options, time.monotonic() - start, console)


def _line(problem: Problem, result: Outcome | str) -> str:
    if isinstance(result, str):
        return f"{problem.name}: skipped: {result}"
    winner = result.winner
    default = WORKLOADS[problem.family].family.default_variant(problem.spec, problem.size)
    failed = f", {len(result.failed)} failed" if result.failed else ""
    return (
        f"{problem.name}: {winner.median_us:.2f} us, {percent_of_floor(winner):.1f}% of the floor, "
        f"{result.measured} of {result.pool} measured ({result.remembered} before{failed}): {knobs(winner.variant, default)}"
    )


def _tell(run: Run, options: Options, elapsed_s: float, console: Console) -> int:
    if run.outcomes:
        console.print(winners_table(run.winners, f"Measured in {elapsed_s / 60:.1f} minutes"))
    for name, reason in run.skipped.items():
        say(console, f"skipped {name}: {reason}")
    if run.record is not None:
        if options.out is None:
            say(console, f"models import it: tuned.dispatch, through tuned/tables/{run.record.stem}.py")
            say(console, f"the record: {run.record.relative_to(ROOT)}")
        else:
            say(console, f"models use it with TUNED_TABLES={options.out}")
            say(console, f"the record: {run.record}")
    if run.interrupted:
        say(
            console,
            f"Interrupted. {len(run.outcomes)} of {len(run.problems)} problems are done and every trial is kept: "
            "the same command goes on from here.",
        )
        return INTERRUPTED
    return 0 if run.outcomes or not run.problems else 1


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def render(console: Console) -> int:
    """Write every generated file again."""
    written, deleted = render_all()
    for name in written:
        say(console, f"wrote tuned/{name}")
    for name in deleted:
        say(console, f"deleted tuned/{name}")
    say(console, f"{len(written)} written, {len(deleted)} deleted; every other generated file is as it should be")
    return 0


def list_problems(options: Options, console: Console) -> int:
    """List the problems, with what the record of the target has."""
    device = options.target or DEFAULT_TARGET
    winners = read_record(device, options.out)
    for line in problem_lines(select(options.family, options.problems), winners, device):
        say(console, line)
    return 0


def dry_run(options: Options, console: Console) -> int:
    """Show how many variants each problem has, and why the others are out; nothing is compiled."""
    capability = 90
    for problem in select(options.family, options.problems):
        pool = legal_pool(problem, capability)
        trials = min(options.trials or TRIALS, len(pool.variants))
        say(console, f"{problem.name}: {pool.declared} declared -> {len(pool.variants)} legal -> {trials} to measure")
        for rule, count in pool.rejected.items():
            say(console, f"    {count:5} tiles: {rule}")
    return 0


def check(options: Options, console: Console) -> int:
    """List what is out of date."""
    from generator.audit import findings  # noqa: PLC0415

    found = list(findings(select(options.family, options.problems), options.target, options.out))
    for finding in found:
        say(console, finding)
    say(console, f"{len(found)} to do" if found else "every row and every generated file is up to date")
    return 1 if found else 0


def estimate(options: Options, target: str, console: Console) -> int:
    """Do what is true without the device; exit code 0 unless a result in the interpreter was wrong."""
    from generator.offline import SAMPLE, run_offline  # noqa: PLC0415

    problems = select(options.family, options.problems, representative=True)
    right = run_offline(
        problems,
        target_named(target),
        options.trials or SAMPLE,
        options.out,
        options.budget_s,
        lambda text: say(console, text),
    )
    return 0 if right else 1


def show(name: str, device: str | None, folder: Path | None) -> str:
    """The winner of a problem as one file."""
    from generator.show import standalone, winner_of  # noqa: PLC0415

    return standalone(winner_of(name, device, folder))
