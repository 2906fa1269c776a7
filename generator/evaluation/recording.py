"""Record landscapes: measure every legal variant of a problem, on a GPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tuned.families.registry import FAMILIES

from ..failures import LOADED, LOST_WORKER, times_to_be_a_fact
from ..problem import Problem
from ..processes.compiler import compile_variant, compiled, hopeless
from ..processes.worker import TrialFailedError, Worker, WorkerLostError
from ..rendering.structures import current
from ..searching.pool import legal_pool
from ..storage.landscape import Landscape, save

AGAIN = 16  # so many best variants are timed again together: the least of a thousand noisy times is too low


def record(
    problem: Problem,
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
) -> Landscape:
    """Measure every legal variant of a problem."""
    family = FAMILIES[problem.family]
    variants = legal_pool(problem, environment["capability"], environment["multiprocessors"]).variants
    baselines = worker.stage(problem)
    times: dict[Any, float] = {}
    failed: dict[Any, str] = {}
    registers: dict[Any, int] = {}

    def submit(variant: Any) -> concurrent.futures.Future[Any]:
        return compiler.submit(compile_variant, problem, variant, f"sm_{environment['capability']}")

    def attempt(variant: Any, future: concurrent.futures.Future[Any]) -> None:
        needs = compiled(future)
        if not isinstance(needs, str):
            registers[variant] = max((need.registers for need in needs), default=0)
        reason = hopeless(needs, environment["capability"])
        if reason is None:
            try:
                times[variant] = worker.measure(variant).timing.median_us
            except TrialFailedError as error:
                reason = str(error)
            except WorkerLostError as error:
                reason = f"{LOST_WORKER}{error}"
                worker.start()
                worker.stage(problem)
        failed.pop(variant, None)
        if reason is not None:
            failed[variant] = reason

    for variant, future in [(variant, submit(variant)) for variant in variants]:  # compilers go ahead of the GPU
        attempt(variant, future)
    for tries in range(1, LOADED):  # try failures again that a busy machine may have caused: generator.failures
        for variant in [v for v, why in failed.items() if tries < times_to_be_a_fact(why)]:
            attempt(variant, submit(variant))
    _time_again(problem, worker, times, failed)
    names = {name for variant in variants for name in family.kernel_names(problem.spec, variant)}
    texts = current(sorted(names))
    return Landscape(problem, environment, texts, baselines.copy_us, baselines.floor_us, times, failed, registers)


def _time_again(problem: Problem, worker: Worker, times: dict[Any, float], failed: dict[Any, str]) -> None:
    """Time the best together; if one of them breaks that, time each alone. One that fails alone has no time any more.

    If all fail, that says nothing of any of them, and their times stay: each was right when it was measured.
    """
    best = sorted(times, key=times.__getitem__)[:AGAIN]
    if _compare(problem, worker, best, times) is None:
        return
    wrong = {v: why for v in best if (why := _compare(problem, worker, [v], times))}
    if len(wrong) < len(best):
        failed |= wrong
        for variant in wrong:
            del times[variant]


def _compare(problem: Problem, worker: Worker, variants: list[Any], times: dict[Any, float]) -> str | None:
    """Put the times of variants that are timed together into ``times``; or say why one failed, nothing if the worker was lost."""
    try:
        times |= {v: c.timing.median_us for v, c in zip(variants, worker.compare(variants), strict=True)}
    except TrialFailedError as error:
        return str(error)
    except WorkerLostError:
        with contextlib.suppress(WorkerLostError):  # if no other starts, what was measured is kept all the same
            worker.start()
            worker.stage(problem)
        return ""
    return None


def record_all(
    problems: Iterable[Problem],
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    folder: Path,
) -> Iterator[tuple[Problem, Path | None, float]]:
    """Record and save landscapes, one after the other; yields (problem, file, seconds), with None for the file if no variant ran."""
    for problem in problems:
        start = time.monotonic()
        found = record(problem, worker, compiler, environment)
        path = save(found, folder / environment["device"]) if found.times else None  # without a time there is no best
        yield problem, path, time.monotonic() - start
