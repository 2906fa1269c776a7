"""What to try first on a problem: the variants that won on problems like it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from generator.structures import structures
from generator.workload import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from generator.problem import Problem
    from tuned.record import Winner

MAX_SEEDS = 8
# Specs that may not stand in for each other in a model (another layout, backward) still hint: after all that may.
FOREIGN = 100.0


def is_fresh(winner: Winner) -> bool:
    """Whether the kernels that a winner was measured with are those that the templates give now."""
    kernels = structures()
    return all(name in kernels and kernels[name].digest == digest for name, digest in winner.digests.items())


def same_problem(winner: Winner, problem: Problem) -> bool:
    """Whether a winner is of this problem, whatever either is called."""
    return (winner.family, winner.spec, winner.size) == (problem.family, problem.spec, problem.size)


def incumbent_of(problem: Problem, winners: Iterable[Winner]) -> Any:
    """The variant that the record names for this very problem, if its kernels are as they were measured; or None."""
    return next((w.variant for w in winners if same_problem(w, problem) and is_fresh(w)), None)


def seeds_for(problem: Problem, winners: Iterable[Winner], capability: int) -> list[Any]:
    """Winners' variants that are legal here, nearest spec first, then nearest size; at most MAX_SEEDS."""
    family = WORKLOADS[problem.family].family
    ranked = []
    for winner in winners:
        if winner.family != problem.family:
            continue
        if family.rejection(problem.spec, problem.size, winner.variant, capability) is not None:
            continue
        distance = 0.0 if winner.spec == problem.spec else family.distance(problem.spec, winner.spec)
        octaves = abs(math.log2(max(winner.size.tokens, 1) / max(problem.size.tokens, 1)))
        ranked.append((FOREIGN if distance is None else distance, octaves, winner.name, winner.variant))
    ranked.sort(key=lambda entry: entry[:3])
    return list(dict.fromkeys(variant for *_, variant in ranked))[:MAX_SEEDS]
