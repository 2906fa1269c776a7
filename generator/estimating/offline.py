"""Tuning without a GPU: compile for a target, check in the interpreter, rank by an estimate."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tuned.lookup.record import Winner

from ..disk import write_if_different
from ..measuring.compile import Resources
from ..measuring.interpret import interpreted
from ..places import SHELF, cache_folder
from ..problem import Problem
from ..processes.compiler import CompilerPool, compile_variant, hopeless
from ..processes.compiler import compiled as result_of
from ..searching.pool import Pool, legal_pool, same_problem
from ..workload import WORKLOADS, default_variant
from .estimate import estimates
from .targets import Target

SAMPLE = 40  # variants compiled a problem: 0.3 s each on one core
PICKS = 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The results for one problem on a device that is not here. Times are estimates, in microseconds."""

    problem: Problem
    pool: Pool
    compiled: dict[Any, tuple[Resources, ...]]  # variants of the sample that compiled
    refused: dict[Any, str]  # variants of the sample that the compiler or its report ruled out -> reason
    ranked: list[tuple[float, Any]]  # best first
    measured: Winner | None  # the record's row of this problem

    @property
    def distinct(self) -> int:
        """How many different pieces of machine code the ranked variants compile to."""
        return len({tuple(n.machine_code for n in self.compiled[v]) for _, v in self.ranked})


def sample_of(problem: Problem, pool: Pool, target: Target, count: int, always: Iterable[Any] = ()) -> list[Any]:
    """``count`` variants of a pool: the default, ``always``, the best by the estimate with assumed registers, a spread.

    A pool has thousands of variants that take 0.3 s each to compile, so not all are compiled. Half of the sample are
    the best by the estimate, one variant for each tile and launch shape: otherwise variants that the estimate cannot
    tell apart would fill this half. The other half is evenly spaced over the pool, so that the funnel speaks for the
    whole pool. A count of the pool's size takes all.
    """
    if count >= len(pool.variants):
        return list(pool.variants)
    chosen = dict.fromkeys(v for v in (default_variant(problem, target.capability), *always) if v in set(pool.variants))
    times = estimates(problem, pool.variants, target)
    ranked = sorted(pool.variants, key=lambda v: order(times[v], v))
    core = WORKLOADS[problem.family].family.core_knobs
    tiles: set[Any] = set()
    for variant in ranked:
        if len(chosen) >= count // 2:
            break
        tile = tuple(getattr(variant, name) for name in core)
        if tile not in tiles:
            tiles.add(tile)
            chosen.setdefault(variant)
    left = count - len(chosen)
    spread = [pool.variants[(2 * i + 1) * len(pool.variants) // (2 * left)] for i in range(left)] if left > 0 else []
    return list(dict.fromkeys([*chosen, *spread]))


def order(us: float, variant: Any) -> tuple[int, tuple[int, ...]]:
    """Sort key of an estimate: variants within 2 percent, which the model cannot tell apart, go by simplicity."""
    return round(math.log(us) / math.log(1.02)), variant.simplicity


def estimate_problem(
    problem: Problem,
    pool: Pool,
    target: Target,
    compiled: dict[Any, concurrent.futures.Future[Any]],
    measured: Winner | None,
) -> Estimate:
    """Rank the variants of a problem's sample that compiled."""
    results = {variant: result_of(future) for variant, future in compiled.items()}
    needs = {variant: result for variant, result in results.items() if not isinstance(result, str)}
    reasons = {variant: hopeless(result, target.capability) for variant, result in results.items()}
    refused = {variant: reason for variant, reason in reasons.items() if reason is not None}
    left = [v for v in needs if v not in refused]
    times = estimates(problem, left, target, needs)
    ranked = sorted(((times[v], v) for v in left), key=lambda entry: order(*entry))
    return Estimate(problem, pool, needs, refused, ranked, measured)


def estimate_all(  # noqa: PLR0913 - the parts are independent of each other
    problems: list[Problem],
    target: Target,
    count: int,
    winners: list[Winner],
    budget_s: float = math.inf,
    done: Callable[[Estimate], None] = lambda _: None,
) -> tuple[list[Estimate], list[Problem]]:
    """An Estimate for each problem, and the problems that ``budget_s`` did not reach."""
    end = time.monotonic() + budget_s
    estimates: list[Estimate] = []
    compiler = CompilerPool()
    try:
        for index, problem in enumerate(problems):
            if time.monotonic() > end:
                return estimates, problems[index:]
            measured = next((w for w in winners if same_problem(w, problem)), None)
            pool = legal_pool(problem, target.capability, target.processors)
            sample = sample_of(problem, pool, target, count, [measured.variant] if measured else [])
            futures = {v: compiler.submit(compile_variant, problem, v, target.architecture) for v in sample}
            estimates.append(estimate_problem(problem, pool, target, futures, measured))
            done(estimates[-1])
    finally:
        compiler.shutdown(wait=False, cancel_futures=True)
    return estimates, []


def check_sample(estimates: list[Estimate]) -> dict[tuple[str, Any], str | None]:
    """(problem, variant) -> what is wrong in the interpreter, or None; for the first and the last of each ranking."""
    cases = [
        (e.problem, variant)
        for e in estimates
        if e.ranked
        for variant in dict.fromkeys((e.ranked[0][1], e.ranked[-1][1]))
    ]
    return {(p.name, v): answer for (p, v), answer in zip(cases, interpreted(cases), strict=True)}


def save(estimates: list[Estimate], target: Target) -> Path:
    """Write the picks to the cache, marked as estimated; never to a record, never over a measured row."""
    rows = [
        {
            "estimated": True,
            "problem": e.problem.name,
            "family": e.problem.family,
            "spec": dataclasses.asdict(e.problem.spec),
            "size": dataclasses.asdict(e.problem.size),
            "picks": [{"variant": dataclasses.asdict(v), "estimated_us": round(us, 2)} for us, v in e.ranked[:PICKS]],
        }
        for e in estimates
    ]
    path = cache_folder(*SHELF, "estimates") / f"{target.device}.json"
    content = {"format": "tuned-estimates", "estimated": True, "device": target.device, "rows": rows}
    write_if_different(path, json.dumps(content, indent=1) + "\n")
    return path
