"""A short list of variants that serves all measured problems well: a quick run measures only these on a new GPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, TypeVar

from tuned.lookup.portfolio import ANY, architecture_of, variants_for
from tuned.lookup.record import Winner

from ..places import LANDSCAPES
from ..problem import Problem
from ..storage.landscape import Landscape, load_landscapes
from ..workload import WORKLOADS, default_variant
from .regret import Score

M = TypeVar("M", Landscape, Winner)
LEAST, MOST = 5, 15  # variants a portfolio
ENOUGH = 0.01  # worst regret at which no more variants are added: two variants this near are the same in the noise
NEAR = 0.05  # only a variant within this of some problem's best can be worth a place


def cover(landscapes: list[Landscape], least: int = LEAST, most: int = MOST) -> list[Any]:
    """Variants among which, or in its default, each problem has one near its best of all; the most useful come first.

    The choice is greedy: each variant lowers the worst regret of any problem as far as one variant can, then the mean.
    """
    left = [one.regret(default_variant(one.problem)) for one in landscapes]
    costs = [{v: us / best - 1 for v, us in one.times.items()} for one in landscapes for best in (one.best_us,)]
    good = dict.fromkeys(v for cost in costs for v, regret in cost.items() if regret <= NEAR)
    known = {variant: [cost.get(variant, math.inf) for cost in costs] for variant in good}
    chosen: list[Any] = []
    while known and len(chosen) < most and (len(chosen) < least or max(left) > ENOUGH):
        after = {variant: list(map(min, left, regrets)) for variant, regrets in known.items()}
        best = min(after, key=lambda v: (round(max(after[v]), 4), round(sum(after[v]), 4), v.simplicity))
        left = after[best]
        del known[best]
        chosen.append(best)
    return chosen


def of_winners(winners: Iterable[Winner], most: int = MOST) -> list[Any]:
    """The winning variants, those that won most problems first, for a family without landscapes."""
    counts = collections.Counter(w.variant for w in winners)
    return sorted(counts, key=lambda v: (-counts[v], v.simplicity))[:most]


def of_best(one: Landscape, variants: Iterable[Any]) -> float:
    """Regret on a problem of the best among the variants and the default, as if only these had been measured."""
    return min(one.regret(variant) for variant in (default_variant(one.problem), *variants))


def left_out(landscapes: list[Landscape]) -> Score:
    """For each problem, the regret of a portfolio that was chosen without it."""
    return Score(
        "portfolio",
        {
            held.problem.name: of_best(held, cover([one for one in landscapes if one is not held]))
            for held in landscapes
        },
    )


@dataclasses.dataclass(frozen=True)
class Portfolio:
    """The variants of one family on one architecture, and which of them is the best on each measured problem."""

    variants: tuple[Any, ...]
    best: tuple[tuple[Any, Any, int], ...]  # (spec, size, index of the best variant)


def _of_landscapes(landscapes: list[Landscape]) -> Portfolio:
    variants = cover(landscapes)
    best = []
    for one in landscapes:
        measured = [i for i, v in enumerate(variants) if v in one.times]
        if measured:
            best.append((one.problem.spec, one.problem.size, min(measured, key=lambda i: one.times[variants[i]])))
    return Portfolio(tuple(variants), tuple(best))


def _of_rows(rows: list[Winner]) -> Portfolio:
    variants = of_winners(rows)
    best = ((w.spec, w.size, variants.index(w.variant)) for w in rows if w.variant in variants)
    return Portfolio(tuple(variants), tuple(best))


def _by_kind(found: Iterable[tuple[str, M]]) -> dict[tuple[str, str], list[M]]:
    """(architecture, family) -> what was measured of the family there; under ANY, what was measured anywhere."""
    grouped = collections.defaultdict(list)
    for family, one in found:
        for architecture in (architecture_of(one.environment["capability"]), ANY):
            grouped[architecture, family].append(one)
    return grouped


@functools.cache
def _measured_whole() -> dict[tuple[str, str], Portfolio]:
    """(architecture, family) -> portfolio, from every device's landscapes."""
    devices = sorted(p.name for p in LANDSCAPES.glob("*") if p.is_dir())
    landscapes = _by_kind((one.problem.family, one) for device in devices for one in load_landscapes(device))
    return {key: _of_landscapes(found) for key, found in landscapes.items()}


def portfolios(winners: Iterable[Winner]) -> dict[tuple[str, str], Portfolio]:
    """(architecture, family) -> portfolio: from landscapes where a family has them, else from the winners of records."""
    rows = _by_kind((winner.family, winner) for winner in winners)
    found = {key: _of_rows(measured) for key, measured in rows.items()} | _measured_whole()
    # An architecture whose portfolio equals that of ANY needs none of its own.
    return {key: p for key, p in sorted(found.items()) if key[0] == ANY or p != found[ANY, key[1]]}


def candidates(problem: Problem, capability: int, multiprocessors: int | None = None) -> list[Any]:
    """The variants that a quick run measures of a problem: the default and the architecture's portfolio, if legal."""
    family = WORKLOADS[problem.family].family
    tried = (default_variant(problem, capability), *variants_for(problem.family, capability))
    listed = dict.fromkeys(family.fit(v, problem.spec, capability) for v in tried)
    here = capability, multiprocessors
    return [v for v in listed if family.rejection(problem.spec, problem.size, v, *here) is None]
