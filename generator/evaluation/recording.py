"""Record landscapes: measure every legal variant of a problem, on a GPU."""

from __future__ import annotations

import collections
import concurrent.futures
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tuned.families.registry import FAMILIES

from ..failures import LOADED, LOST_WORKER, times_to_be_a_fact
from ..problem import Problem
from ..processes.compiler import compile_variant, hopeless
from ..processes.compiler import compiled as result_of
from ..processes.worker import TrialFailedError, Worker, WorkerLostError
from ..rendering.structures import digests
from ..searching.pool import legal_pool
from ..storage.landscape import Landscape, save

AHEAD = 96  # variants compiled before they are measured: the pool of processes never waits
AGAIN = 16  # the best by a first timing are timed again together: the least of a thousand noisy times is too low


def record(
    problem: Problem,
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    *,
    deadline: float = math.inf,
) -> Landscape | None:
    """Measure every legal variant of a problem; None if ``deadline`` (time.monotonic) came first."""
    family = FAMILIES[problem.family]
    variants = legal_pool(problem, environment["capability"], environment["multiprocessors"]).variants
    architecture = f"sm_{environment['capability']}"
    baselines = worker.stage(problem)
    times: dict[Any, float] = {}
    failed: dict[Any, str] = {}
    registers: dict[Any, int] = {}
    names: set[str] = set()
    waiting: collections.deque[tuple[Any, Any]] = collections.deque()
    following = iter(variants)

    def submit() -> None:
        variant = next(following, None)
        if variant is not None:
            waiting.append((variant, compiler.submit(compile_variant, problem, variant, architecture)))

    for _ in range(AHEAD):
        submit()

    def attempt(variant: Any, future: Any) -> None:
        needs = result_of(future)
        names.update(family.kernel_names(problem.spec, variant))
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

    while waiting:
        if time.monotonic() > deadline:
            return None
        variant, future = waiting.popleft()
        submit()
        attempt(variant, future)
    for tries in range(1, LOADED):  # what may have failed by a busy machine: generator.failures
        for variant in [v for v, why in failed.items() if tries < times_to_be_a_fact(why)]:
            if time.monotonic() > deadline:
                return None
            attempt(variant, compiler.submit(compile_variant, problem, variant, architecture))
    best = sorted(times, key=times.__getitem__)[:AGAIN]
    times |= {v: t.median_us for v, t in zip(best, worker.compare(best), strict=True)}
    texts = {name: digests()[name] for name in sorted(names)}
    return Landscape(problem, environment, texts, baselines.copy_us, baselines.floor_us, times, failed, registers)


def record_all(  # noqa: PLR0913 - the parts are independent of each other
    problems: Iterable[Problem],
    worker: Worker,
    compiler: concurrent.futures.Executor,
    environment: dict[str, Any],
    folder: Path,
    *,
    deadline: float = math.inf,
) -> Iterator[tuple[Problem, Path | None, float]]:
    """Record and save landscapes, one after the other; yields (problem, file or None when out of time, seconds)."""
    for problem in problems:
        start = time.monotonic()
        landscape = record(problem, worker, compiler, environment, deadline=deadline)
        path = None if landscape is None else save(landscape, folder / environment["device"])
        yield problem, path, time.monotonic() - start
