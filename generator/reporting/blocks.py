"""How to choose a block size: rules that fix one measure of a program's tile, judged by their cost in time."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..problem import Problem
from ..workload import WORKLOADS
from .history import History
from .importance import Spread, spread

LEAST_SHARE = 0.9  # share of the problems that a rule must be able to serve to be judged
WARP = 32  # threads


def rows(problem: Problem, variant: Any) -> int:
    """Rows of the tensor that one program takes at a time."""
    return WORKLOADS[problem.family].tile(problem.spec, variant)[0]


def tile(problem: Problem, variant: Any) -> int:
    """Features that one program takes at a time."""
    return math.prod(WORKLOADS[problem.family].tile(problem.spec, variant))


def per_thread(problem: Problem, variant: Any) -> float:
    """Features that one thread takes at a time."""
    return tile(problem, variant) / (WARP * variant.num_warps)


MEASURES: dict[str, Callable[[Problem, Any], float]] = {
    "features a thread": per_thread,
    "features a program": tile,
    "rows a program": rows,
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Fix one measure of the tile, leave every other knob free."""

    measure: str  # of MEASURES
    value: int  # a power of two
    cost: Spread  # of the best variant that obeys the rule


@dataclasses.dataclass(frozen=True)
class Answer:
    """The best rule of each measure, the best of all first, and the data around them."""

    rules: list[Rule]
    curves: dict[str, dict[int, Spread]]  # measure -> value -> cost
    one_row: Spread | None  # one row a program, whatever its width
    warps: dict[int, Spread]  # at the best rule: number of warps -> cost
    problems: int
    trials: int


def answer(histories: Iterable[History]) -> Answer | None:
    """The answer from the measurements of one family, or None without measurements."""
    found = [h for h in histories if h.times]
    if not found:
        return None
    curves = {name: curve(found, measure) for name, measure in MEASURES.items()}
    least = LEAST_SHARE * len(found)
    judged = (
        [Rule(name, v, cost) for v, cost in costs.items() if cost.problems >= least] for name, costs in curves.items()
    )
    rules = sorted((min(rules, key=_cost) for rules in judged if rules), key=_cost)
    if not rules:
        return None
    measure = MEASURES[rules[0].measure]
    obeying = [dataclasses.replace(h, times=_only(h, measure, rules[0].value)) for h in found]
    warps = curve(obeying, lambda _problem, variant: variant.num_warps, [h.best_us for h in found])
    return Answer(rules, curves, curves["rows a program"].get(1), warps, len(found), sum(len(h.times) for h in found))


def curve(
    histories: Sequence[History], measure: Callable[[Problem, Any], float], best: Sequence[float] | None = None
) -> dict[int, Spread]:
    """Value of a measure, to the nearest power of two -> cost of the best variant with that value."""
    ratios: dict[int, list[float]] = collections.defaultdict(list)
    for history, best_us in zip(histories, best or [h.best_us for h in histories], strict=True):
        least: dict[int, float] = {}
        for variant, us in history.times.items():
            value = _power(measure(history.problem, variant))
            least[value] = min(us, least.get(value, math.inf))
        for value, us in least.items():
            ratios[value].append(us / best_us)
    return {value: spread(ratios[value]) for value in sorted(ratios)}


def _only(history: History, measure: Callable[[Problem, Any], float], value: int) -> dict[Any, float]:
    return {v: us for v, us in history.times.items() if _power(measure(history.problem, v)) == value}


def _power(value: float) -> int:
    return 1 << max(0, round(math.log2(value)))


def _cost(rule: Rule) -> tuple[float, float, float]:
    return rule.cost.ninth, rule.cost.median, rule.cost.worst
