"""How much each knob matters: Optuna's importances, and the cost of each choice with all other knobs at their best."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna

from tuned.families.choices import choices

LEAST_TRIALS = 20  # of a problem: importances explain the fastest tenth, and a single trial is not enough for that


@dataclasses.dataclass(frozen=True)
class Spread:
    """Ratios to the best time over several problems, as percent above the best."""

    problems: int
    median: float
    ninth: float  # nine problems of ten are at most this much above
    worst: float


@dataclasses.dataclass(frozen=True)
class Knob:
    """The effect of one knob over the problems of a family."""

    name: str
    importance: float  # 0 to 1, all knobs of a problem adding up to 1; the mean over problems
    costs: dict[Any, Spread]  # choice -> how far the best variant with this choice is above the best of all


def spread(ratios: Sequence[float]) -> Spread:
    """Ratios (1 is the best) as percent above the best."""
    above = sorted(100 * (r - 1) for r in ratios)
    ninth = above[max(0, -(-9 * len(above) // 10) - 1)]
    return Spread(len(above), statistics.median(above), ninth, above[-1])


def importances(times: Mapping[Any, float]) -> dict[str, float]:
    """How much each knob decides whether a variant is among the fastest tenth, by Optuna's PED-ANOVA; sums to 1.

    Only knobs that took several values count. Empty for fewer than LEAST_TRIALS variants, or when nothing varied.
    """
    if len(times) < LEAST_TRIALS:
        return {}
    knobs = choices(type(next(iter(times))))
    varied = [name for name in knobs if len({getattr(v, name) for v in times}) > 1]
    space: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(knobs[name]) for name in varied
    }
    if not varied:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(params={n: getattr(v, n) for n in varied}, distributions=space, value=us)
            for v, us in times.items()
        ]
    )
    return optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=varied
    )


def knobs_of(landscapes: Iterable[Mapping[Any, float]]) -> list[Knob]:
    """The knobs of one family over its problems (variant -> microseconds each), the most important first."""
    rows = [times for times in landscapes if times]
    if not rows:
        return []
    found = [i for i in map(importances, rows) if i]
    knobs = []
    for name, declared in choices(type(next(iter(rows[0])))).items():
        mean = statistics.fmean(i.get(name, 0.0) for i in found) if found else 0.0
        costs = {}
        for choice in declared:
            ratios = [_best(times, name, choice) / min(times.values()) for times in rows]
            ratios = [r for r in ratios if r < math.inf]  # without problems in which the choice was never tried
            if ratios:
                costs[choice] = spread(ratios)
        knobs.append(Knob(name, mean, costs))
    return sorted(knobs, key=lambda k: -k.importance)


def _best(times: Mapping[Any, float], name: str, choice: Any) -> float:
    return min((us for v, us in times.items() if getattr(v, name) == choice), default=math.inf)
