"""What to try first on a problem: the variants that won on problems like it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from typing import Any

from tuned.lookup.record import Winner

from ..places import LANDSCAPES
from ..problem import Problem
from ..rendering.structures import fresh
from ..storage.landscape import LandscapeError, load_landscapes
from ..workload import WORKLOADS

MAX_SEEDS = 8
MEASURED_WHOLE = 3  # seeds among them that led a landscape of the very problem, where one was recorded


def same_problem(one: Problem | Winner, other: Problem | Winner) -> bool:
    """Whether both are the same problem, or winners of it, whatever either is called."""
    return (one.family, one.spec, one.size) == (other.family, other.spec, other.size)


def incumbent_of(problem: Problem, winners: Iterable[Winner]) -> Any:
    """The variant that the record names for this very problem, if its kernels are as they were measured; or None."""
    return next((w.variant for w in winners if same_problem(w, problem) and fresh(w.digests)), None)


def seeds_for(
    problem: Problem, winners: Iterable[Winner], capability: int, multiprocessors: int | None = None
) -> list[Any]:
    """Winners' variants that are legal here, nearest spec first, then nearest size; at most MAX_SEEDS.

    The last few are the best of a landscape of this problem, if there is one.
    """
    family = WORKLOADS[problem.family].family

    def legal(variant: Any) -> bool:
        return family.rejection(problem.spec, problem.size, variant, capability, multiprocessors) is None

    ranked = []
    for winner in winners:
        if winner.family != problem.family or not legal(winner.variant):
            continue
        distance = family.distance(winner.spec, problem.spec)
        octaves = abs(math.log2(max(winner.size.tokens, 1) / max(problem.size.tokens, 1)))
        ranked.append((distance, octaves, winner.name, winner.variant))
    ranked.sort(key=lambda entry: entry[:3])
    whole = [v for v in _leaders().get(problem, ()) if legal(v)]
    near = list(dict.fromkeys(variant for *_, variant in ranked))[: MAX_SEEDS - len(whole)]
    return list(dict.fromkeys([*near, *whole]))


@functools.cache
def _leaders() -> dict[Problem, list[Any]]:
    """Problem -> the best variants of its landscape. Hints, whatever the device: what cannot be read gives none."""
    found: dict[Problem, list[Any]] = {}
    for folder in sorted(LANDSCAPES.glob("*/")):
        with contextlib.suppress(LandscapeError):
            for one in load_landscapes(folder.name):
                best = sorted(one.times, key=one.times.__getitem__)
                found.setdefault(one.problem, []).extend(best[:MEASURED_WHOLE])
    return found
