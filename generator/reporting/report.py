"""Tables for people: the problems, the winners, the stages of a run, and the funnel of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.table import Column, Table

from tuned.families.choices import choices
from tuned.lookup.record import Winner

from ..figures import figures
from ..problem import Problem
from ..searching.search import Outcome
from ..searching.stopwatch import ON_GPU


def percent_of_floor(winner: Winner) -> float:
    """The time of a copy of the same bytes as a percentage of a winner's time: 100 is as fast as that copy."""
    return 100 * winner.floor_us / winner.median_us


def knobs(variant: Any, default: Any) -> str:
    """The knobs in which a variant differs from the default variant of its problem, as words."""
    changed = [n for n in choices(type(variant)) if getattr(variant, n) != getattr(default, n)]
    return " ".join(f"{n}={getattr(variant, n)}" for n in changed) or "the default"


def winners_table(winners: Iterable[Winner], title: str) -> Table:
    """One row a problem: microseconds, bandwidth, percent of the floor, speed-ups."""
    table = figures(
        title, Column("problem", overflow="fold"), "us", "GB/s", "% of floor", "x eager", "x default", "trials"
    )
    for w in winners:
        table.add_row(
            w.name,
            f"{w.median_us:.2f}",
            f"{w.bytes_moved / w.median_us / 1e3:.0f}",
            f"{percent_of_floor(w):.1f}",
            f"{w.eager_us / w.median_us:.1f}",
            f"{w.default_us / w.median_us:.2f}" if w.default_us else "-",
            str(w.trials),
        )
    return table


def stages_table(
    seconds: Mapping[str, float], elapsed_s: float, gpus: int = 1, busy_share: float | None = None
) -> Table:
    """Wall time by stage, the longest first, then the time of no stage; for several GPUs, the sums of their times.

    ``busy_share`` is the GPU's share of the time since the first trial, if it is known.
    """
    whole_s = elapsed_s * gpus
    busy_s = sum(seconds.get(stage, 0.0) for stage in ON_GPU)
    what = f"Wall time of {gpus} GPUs together" if gpus > 1 else "Wall time"
    share = f", {busy_s / whole_s:.0%} of it on the GPU" if whole_s > 0 else ""
    since = "" if busy_share is None else f", {busy_share:.0%} since the first trial"
    title = f"{what}{share}{since}"
    table = figures(title, Column("stage", no_wrap=True), "seconds", "share", min_width=len(title))
    known = sorted(((n, s) for n, s in seconds.items() if s > 0), key=lambda item: -item[1])
    rest_s = whole_s - sum(seconds.values())
    for name, spent_s in [*known, *([("the rest", rest_s)] if rest_s > 0 else [])]:
        table.add_row(name, f"{spent_s:.1f}", f"{spent_s / whole_s:.0%}" if whole_s > 0 else "-")
    return table


def problem_lines(problems: list[Problem], winners: Iterable[Winner], device: str) -> Iterator[str]:
    """The lines of ``--list``: each problem, its time in the record of ``device``, and its family, spec and size."""
    times = {(w.family, w.spec, w.size): f"{w.median_us:.2f} us" for w in winners}
    width = max((len(p.name) for p in problems), default=0)
    yield f"{'problem':{width}}  {'on ' + device:>15}  what"
    for p in problems:
        known = times.get((p.family, p.spec, p.size), "-")
        size = " ".join(f"{n}={v}" for n, v in vars(p.size).items())
        yield f"{p.name:{width}}  {known:>15}  {p.family} {describe(p.spec)} {size}"


def describe(spec: Any) -> str:
    """A spec's fields as words, without defaults: required strings alone, true flags by name, others as name=value."""
    words = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value == field.default:
            continue
        if value is True:
            words.append(field.name)
        elif isinstance(value, str) and field.default is dataclasses.MISSING:
            words.append(value)
        else:
            words.append(f"{field.name}={value}")
    return " ".join(words)


COMPILER = ("does not compile", "spills ", "needs ")  # how generator.processes.compiler.hopeless begins its reasons


@dataclasses.dataclass(frozen=True)
class Funnel:
    """Counts of variants, of one problem or of many."""

    declared: int = 0  # the product of all choices
    legal: int = 0  # no rule rejects them
    tried: int = 0  # proposed by the search, now or in an earlier run
    compiled: int = 0  # without spills and within shared memory
    right: int = 0  # equal to the reference; these were measured

    def __add__(self, other: Funnel) -> Funnel:
        """Both together."""
        return Funnel(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __str__(self) -> str:
        """The steps in order."""
        steps = " -> ".join(f"{n:,} {name}" for name, n in dataclasses.asdict(self).items())
        return f"{steps} and measured"


def funnel_of(outcome: Outcome) -> Funnel:
    """The funnel of one problem."""
    tried = outcome.measured + len(outcome.failed)
    hopeless = sum(reason.startswith(COMPILER) for reason in outcome.failed.values())
    return Funnel(outcome.declared, outcome.pool, tried, tried - hopeless, outcome.measured)
