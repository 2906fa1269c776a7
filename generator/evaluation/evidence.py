"""Tables of what landscapes prove: the search against other strategies, two tunings against each other, the estimate."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import optuna
from rich.table import Table

from ..estimating.model import fitted
from ..estimating.offline import order
from ..estimating.targets import target_named
from ..figures import figures, turned
from ..measuring.compile import Resources
from ..storage.landscape import Landscape
from ..workload import WORKLOADS, default_variant
from .replay import SHARE, agreement, evaluations, strategies, summary

FIRST = 5  # picks of the estimate
# Head of a column -> the figure's name in generator.evaluation.replay.summary.
COLUMNS = {
    "after 15": "median at 15",
    "after 30": "median at 30",
    "after 60": "median at 60",
    "found, median": "median",
    "found, 95th": "95th",
    "found, worst": "worst",
    "named, median": "median winner",
    "named, worst": "worst winner",
}


@dataclasses.dataclass(frozen=True)
class Guess:
    """How good the estimate is on one problem that it has not seen: regrets, 0.01 is 1 percent slower than the best."""

    problem: str
    first: float  # of its first pick
    best_of_five: float
    default: float  # of the default variant, which needs no estimate


def searches(
    landscapes: Sequence[Landscape], seeds: int, *, plain: bool, tell: Callable[[str], None] = lambda _: None
) -> dict[str, tuple[int, dict[str, float]]]:
    """Strategy -> (its number of searches, their generator.evaluation.replay.summary); ``seeds`` searches a landscape."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = {}
    for name, strategy in strategies(landscapes).items():
        if strategy.plain and not plain:
            continue
        tell(name)
        count = 1 if strategy.plain else seeds
        replays = [strategy.run(one, seed) for one in landscapes[:: strategy.every] for seed in range(count)]
        found[name] = len(replays), summary(replays)
    return found


def _cells(count: int, found: dict[str, float]) -> list[str]:
    wasted, each = f"{100 * found['wasted']:.0f}%", f"{found['ms a proposal']:.1f}"
    return [str(count), *(f"{100 * found[c]:.2f}" for c in COLUMNS.values()), wasted, each]


def search_table(landscapes: Sequence[Landscape], found: dict[str, tuple[int, dict[str, float]]]) -> Table:
    """The figures, one column for each strategy."""
    least, most = min(map(evaluations, landscapes)), max(map(evaluations, landscapes))
    table = turned(
        f"Percent slower than the best of all variants,\nafter {least} to {most} evaluations, {SHARE:.0%} of a pool",
        "strategy",
        ("searches", *COLUMNS, "wasted", "ms each"),
        [(name, _cells(count, cells)) for name, (count, cells) in found.items()],
    )
    table.caption = (
        "found: the best variant that was measured; named: what the search ends with, the simpler inside the noise; "
        "wasted: proposals that were not legal or seen before"
    )
    return table


def search_markdown(found: dict[str, tuple[int, dict[str, float]]]) -> str:
    """The same figures as Markdown, for a README."""
    heads = ("strategy", "searches", *COLUMNS, "wasted proposals", "ms a proposal")
    rows = [heads, ("---", *["---:"] * (len(heads) - 1))]
    rows += [(name, *_cells(count, cells)) for name, (count, cells) in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def agreements(landscapes: Sequence[Landscape], pairs: int) -> list[float]:
    """How far apart two independent tunings of each landscape end, by its own times."""
    return [agreement(one, (2 * i, 2 * i + 1)) for one in landscapes for i in range(pairs)]


def guesses(landscapes: Sequence[Landscape]) -> list[Guess]:
    """The estimate on each landscape, by a model that has not seen it; without a family's only landscape, which has no such model."""
    found = []
    for one in landscapes:
        problem = one.problem
        model = fitted(problem.family, problem.name)
        if model is None:
            continue
        rows = [
            (v, WORKLOADS[problem.family].work(problem, v)[0], Resources(one.registers[v], 0, 0, "")) for v in one.times
        ]
        excess = model.excess(problem, target_named(one.environment["device"]), rows)
        ranked = sorted(zip(excess, one.times, strict=True), key=lambda entry: order(1 + entry[0], entry[1]))
        regrets = [one.regret(variant) for _, variant in ranked[:FIRST]]
        found.append(Guess(problem.name, regrets[0], min(regrets), one.regret(default_variant(problem))))
    return found


def guess_table(found: Sequence[Guess]) -> Table:
    """One row for each problem, then the median and the worst."""
    title = "The estimate on problems that it has not seen: percent slower than the best"
    table = figures(title, "problem", "its first pick", f"best of its first {FIRST}", "the default")
    columns = [[getattr(g, name) for g in found] for name in ("first", "best_of_five", "default")]
    for guess, *values in zip(found, *columns, strict=True):
        table.add_row(guess.problem, *(f"{100 * v:.1f}" for v in values))
    table.add_section()
    table.add_row("median", *(f"{100 * statistics.median(c):.1f}" for c in columns))
    table.add_row("worst", *(f"{100 * max(c):.1f}" for c in columns))
    return table
