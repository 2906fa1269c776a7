"""Record landscapes: measure every legal variant of a problem, on a GPU."""

from __future__ import annotations

import concurrent.futures
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
    best = sorted(times, key=times.__getitem__)[:AGAIN]
    times |= {v: c.timing.median_us for v, c in zip(best, worker.compare(best), strict=True)}
    names = {name for variant in variants for name in family.kernel_names(problem.spec, variant)}
    texts = current(sorted(names))
    return Landscape(problem, environment, texts, baselines.copy_us, baselines.floor_us, times, failed, registers)


def record_all(
    problems: Iterable[Problem],
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    folder: Path,
) -> Iterator[tuple[Problem, Path, float]]:
    """Record and save landscapes, one after the other; yields (problem, file, seconds)."""
    for problem in problems:
        start = time.monotonic()
        path = save(record(problem, worker, compiler, environment), folder / environment["device"])
        yield problem, path, time.monotonic() - start
