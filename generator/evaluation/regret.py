"""Which rule serves untuned problems best: each rule picks variants for measured problems without seeing their own row."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Column, Table

from tuned.lookup.lookup import nearest
from tuned.lookup.record import Winner
from tuned.lookup.table import Row

from ..figures import figures
from ..problem import Problem
from ..searching.pool import same_problem
from ..searching.search import choose
from ..storage.landscape import Landscape, load_landscapes
from ..workload import WORKLOADS, default_variant

SERVED = "nearest row, tile rescaled"  # what tuned.lookup.lookup does; a test compares it with the others
MEDIAN, WORST = 0.02, 0.10  # bars: how much slower than the best a pick may be


@dataclasses.dataclass(frozen=True)
class Score:
    """What a rule's picks cost."""

    rule: str
    regrets: dict[str, float]  # problem -> how much slower than its best variant, as a fraction

    @property
    def median(self) -> float:
        """The median regret: half of the picks are no worse."""
        return statistics.median(self.regrets.values())

    @property
    def worst(self) -> tuple[float, str]:
        """The worst pick, and its problem."""
        return max((regret, name) for name, regret in self.regrets.items())

    @property
    def text(self) -> str:
        """Median and worst, as a phrase."""
        return f"median {100 * self.median:.2f} %, worst {100 * self.worst[0]:.1f} % ({self.worst[1]})"


def row_of(landscape: Landscape) -> Row:
    """The row that tuning would have left, with the simplest variant within the noise, as generator.searching.search chooses."""
    problem = landscape.problem
    return Row(problem.spec, problem.size, choose(landscape.times, None), None, landscape.best_us, problem.name)


def _best_on_average(held: Landscape, others: list[Landscape]) -> Any:
    """The legal variant with the least mean log time over the others; where it was not legal, the slowest time counts."""
    logs = [{v: math.log(us) for v, us in other.times.items()} for other in others]
    slowest = [max(log.values()) for log in logs]

    def total(variant: Any) -> float:
        return sum(log.get(variant, most) for log, most in zip(logs, slowest, strict=True))

    return min(held.times, key=lambda v: (total(v), v.simplicity))


def _size_then_spec(held: Landscape, others: list[Landscape]) -> Any:
    """The nearest size of the same spec; else the closest spec with the same text; else the default."""
    family = WORKLOADS[held.problem.family].family
    spec, size = held.problem.spec, held.problem.size

    def texts(of: Any) -> tuple[str, ...]:
        return family.kernel_names(of, family.default_variant(of))

    def unlike(row: Row) -> tuple[float, float, str]:
        return family.distance(row.spec, spec), abs(math.log2(row.size.tokens / size.tokens)), row.source

    rows = [row for row in map(row_of, others) if row.variant in held.times and texts(row.spec) == texts(spec)]
    return min(rows, key=unlike).variant if rows else default_variant(held.problem)


def _nearest_row(rescaled: bool, measure: str) -> Callable[[Landscape, list[Landscape]], Any]:  # noqa: FBT001
    def pick(held: Landscape, others: list[Landscape]) -> Any:
        problem, work = held.problem, WORKLOADS[held.problem.family]
        family = work.family
        if not rescaled:
            family = dataclasses.replace(family, adapt=lambda variant, *_: variant, fit=lambda variant, *_: variant)
        rows = [row_of(other) for other in others]
        size = problem.size
        if measure == "bytes":
            # The lookup compares tokens: give it bytes in their place.
            size = _Amount(problem.size, work.bytes_moved(problem.spec, problem.size))
            rows = [dataclasses.replace(r, size=_Amount(r.size, work.bytes_moved(r.spec, r.size))) for r in rows]
            family = dataclasses.replace(
                family, rejection=lambda spec, size, *rest: work.family.rejection(spec, size.size, *rest)
            )
        return _served(family, held, size, rows)

    return pick


def _served(family: Any, held: Landscape, size: Any, rows: list[Row]) -> Any:
    """The variant that a family's lookup gives a problem if it has only these rows."""
    found = nearest(family, held.problem.spec, size, rows, *_gpu(held))
    return default_variant(held.problem) if found is None else found[2]


def _gpu(held: Landscape) -> tuple[int, int]:
    """Compute capability and multiprocessors of the GPU that was measured."""
    return held.environment["capability"], held.environment["multiprocessors"]


@dataclasses.dataclass(frozen=True)
class _Amount:
    """A size with another amount in place of its tokens."""

    size: Any
    tokens: int


RULES: dict[str, Callable[[Landscape, list[Landscape]], Any]] = {
    "default variant": lambda held, _others: default_variant(held.problem),
    "best on average": _best_on_average,
    "nearest size, then closest spec of the same text": _size_then_spec,
    "nearest row": _nearest_row(rescaled=False, measure="tokens"),
    "nearest row by bytes, tile rescaled": _nearest_row(rescaled=True, measure="bytes"),
    SERVED: _nearest_row(rescaled=True, measure="tokens"),
}


def same_shape(one: Problem | Winner, other: Problem) -> bool:
    """Whether two problems have the same shape: any layout, direction and style of the same tensor."""
    names = ("dtype", "heads", "head_dim", "rotary_dim", "hidden")
    return one.size == other.size and all(getattr(one.spec, n, None) == getattr(other.spec, n, None) for n in names)


def scores(
    landscapes: Iterable[Landscape],
    left_out: Callable[[Problem, Problem], bool] = same_problem,
    rules: Iterable[str] = tuple(RULES),
) -> list[Score]:
    """The rules' regret on each problem; a rule does not see the problems for which ``left_out`` is true."""
    every = list(landscapes)
    shown = [
        (held, [o for o in every if o.problem.family == held.problem.family and not left_out(o.problem, held.problem)])
        for held in every
    ]
    judged = [(held, others) for held, others in shown if others]
    return [
        Score(rule, {held.problem.name: held.regret(RULES[rule](held, others)) for held, others in judged})
        for rule in rules
        if judged
    ]


def from_record(
    landscapes: Iterable[Landscape],
    winners: list[Winner],
    left_out: Callable[[Winner, Problem], bool] = same_problem,
) -> Score | None:
    """The score of the rule that serves on a record's rows, without the left out ones; None if no rows remain."""
    regrets = {}
    for held in landscapes:
        family = WORKLOADS[held.problem.family].family
        rows = [
            Row(w.spec, w.size, w.variant, None, w.median_us, w.name)
            for w in winners
            if w.family == held.problem.family and not left_out(w, held.problem)
        ]
        if rows:
            regrets[held.problem.name] = held.regret(_served(family, held, held.problem.size, rows))
    return Score(SERVED, regrets) if regrets else None


def best_rule(found: list[Score]) -> Score:
    """The rule with the lowest worst case among those whose median is within its bar; among all, if none is."""
    return min(
        [s for s in found if s.median <= MEDIAN] or found, key=lambda s: (s.worst[0], s.median, s.rule != SERVED)
    )


@functools.cache
def metadata(device: str) -> dict[str, Any]:
    """What a device's table says of the rule that serves calls without a row; nothing if there are no landscapes."""
    measured = load_landscapes(device)
    figures = {
        name: {
            "problems": len(score.regrets),
            "median_percent": round(100 * score.median, 2),
            "worst_percent": round(100 * score.worst[0], 2),
            "worst": score.worst[1],
        }
        for name, left_out in (("problem_left_out", same_problem), ("shape_left_out", same_shape))
        for score in scores(measured, left_out, [SERVED])
    }
    return {"rule": SERVED, **figures} if figures else {}


def regret_table(found: list[Score], title: str) -> Table:
    """The rules and their regrets, best first."""
    table = figures(title, "rule", "median %", "worst %", Column("worst at", overflow="fold"))
    for score in sorted(found, key=lambda s: s.worst[0]):
        worst, name = score.worst
        mark = " (serves)" if score.rule == SERVED else ""
        table.add_row(score.rule + mark, f"{100 * score.median:.2f}", f"{100 * worst:.1f}", name)
    return table
