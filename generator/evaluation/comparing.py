"""The search compared with other strategies on foreign landscapes: figures with confidence intervals, in tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import optuna
from rich.table import Column, Table

from ..figures import figures as framed
from ..figures import turned
from .foreign import Foreign
from .replay import Replay, Strategy, evaluations, strategies

RESAMPLED = 2000  # times
SLOW = 5  # a slow strategy gets one seed where others get so many
# Names in generator.evaluation.replay.strategies -> names here. A foreign landscape has no default: all strategies
# begin with the same variant instead.
COMPARED = {
    "tune.py": "tune.py",
    "the default, then random, none twice": "random, none twice",
    "Optuna TPE over the pool": "Optuna TPE over the pool",
    "Optuna GP over the pool": "Optuna GP over the pool",
}
HEADS = ("searches", "mean", "more than the first", "median", "95th", "worst", "s of GPU")
Interval = tuple[float, float]  # of 95 percent


@dataclasses.dataclass(frozen=True)
class Figures:
    """How far from the best the searches of one strategy ended (0.01 is 1 percent slower), and the GPU time that they took."""

    searches: int
    mean: float
    mean_between: Interval
    more: float  # the mean less the mean of the first strategy, with which it is compared
    more_between: Interval
    median: float
    median_between: Interval
    p95: float
    worst: float
    gpu_s: float  # a search, on average


def compare(
    landscapes: Sequence[Foreign], seeds: int, *, slow: bool, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[list[Replay]]]:
    """Strategy -> its searches of each landscape."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    known = strategies(landscapes)
    found = {}
    for key, name in COMPARED.items():
        strategy = known.get(key)
        if strategy is None or (strategy.plain and not slow):
            continue
        tell(name)
        found[name] = runs(landscapes, strategy, seeds)
    return found


def runs(landscapes: Sequence[Foreign], strategy: Strategy, seeds: int) -> list[list[Replay]]:
    """The searches of one strategy on each landscape."""
    count = math.ceil(seeds / SLOW) if strategy.plain else seeds
    return [[strategy.run(one, seed) for seed in range(count)] for one in landscapes]


def figures(found: Sequence[Sequence[Replay]], first: Sequence[Sequence[Replay]]) -> Figures:
    """Figures of a strategy's searches of each landscape, beside those of the ``first`` strategy.

    For the intervals, landscapes and the searches of each are drawn again, with replacement, the same landscapes for
    both strategies. So the intervals hold for other landscapes like these and for other seeds.
    """
    ends, others = ([np.array([r.regrets[-1] for r in searches]) for searches in each] for each in (found, first))
    every = np.concatenate(ends)
    random = np.random.default_rng(0)
    means, medians, more = [], [], []
    for _ in range(RESAMPLED):
        drawn = random.integers(0, len(ends), len(ends))
        again, beside = (np.concatenate([random.choice(of[i], len(of[i])) for i in drawn]) for of in (ends, others))
        means.append(again.mean())
        medians.append(np.median(again))
        more.append(again.mean() - beside.mean())
    return Figures(
        len(every),
        float(every.mean()),
        _interval(means),
        float(every.mean() - np.concatenate(others).mean()),
        _interval(more),
        float(np.median(every)),
        _interval(medians),
        sorted(every.tolist())[math.ceil(0.95 * len(every)) - 1],
        float(every.max()),
        statistics.mean(r.gpu_s for searches in found for r in searches),
    )


def _interval(values: list[float]) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975), method="nearest").tolist()
    return low, high


def _cells(found: Figures, *, first: bool) -> list[str]:
    def between(value: float, interval: Interval) -> str:
        return f"{100 * value:.2f} [{100 * interval[0]:.2f}, {100 * interval[1]:.2f}]"

    return [
        str(found.searches),
        between(found.mean, found.mean_between),
        "" if first else between(found.more, found.more_between),
        between(found.median, found.median_between),
        f"{100 * found.p95:.2f}",
        f"{100 * found.worst:.2f}",
        f"{found.gpu_s:.1f}",
    ]


def comparison_table(landscapes: Sequence[Foreign], found: dict[str, list[list[Replay]]]) -> Table:
    """The figures, one column for each strategy."""
    least, most = min(map(evaluations, landscapes)), max(map(evaluations, landscapes))
    trials = str(most) if least == most else f"{least} to {most}"
    table = turned(
        f"Percent slower than the best of all variants,\nafter {trials} evaluations, {len(landscapes)} landscapes",
        "strategy",
        HEADS,
        [(name, [cell.replace(" [", "\n[") for cell in cells]) for name, *cells in _strategy_rows(found)],
    )
    table.caption = (
        "in brackets: 95 percent confidence, landscapes and searches drawn again; all begin with the same variant"
    )
    return table


def _strategy_rows(found: dict[str, list[list[Replay]]]) -> list[list[str]]:
    first = next(iter(found.values()))
    return [[name, *_cells(figures(searches, first), first=searches is first)] for name, searches in found.items()]


def landscape_table(landscapes: Sequence[Foreign], found: dict[str, list[list[Replay]]]) -> Table:
    """One row for each landscape: its size, and the mean of each strategy."""
    heads = ("pool", "the first", *found)
    table = framed("The same, the mean of each", "landscape", *(Column(head, justify="right") for head in heads))
    for cells in _landscape_rows(landscapes, found):
        table.add_row(*cells)
    return table


def _landscape_rows(landscapes: Sequence[Foreign], found: dict[str, list[list[Replay]]]) -> list[list[str]]:
    return [
        [
            one.problem.name,
            str(len(one.space.pool.variants)),
            f"{100 * one.regret(one.space.default):.1f}",
            *(f"{100 * statistics.mean(r.regrets[-1] for r in searches[i]):.2f}" for searches in found.values()),
        ]
        for i, one in enumerate(landscapes)
    ]


def comparison_markdown(landscapes: Sequence[Foreign], found: dict[str, list[list[Replay]]]) -> str:
    """Both tables, for a page."""
    first = [["strategy", *HEADS], *_strategy_rows(found)]
    second = [["landscape", "pool", "the first", *found], *_landscape_rows(landscapes, found)]
    return "\n\n".join(
        "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]))
        for rows in (first, second)
    )
