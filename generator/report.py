"""Tables for people: what there is to tune, what was measured, what a search space comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from tuned.choices import choices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from generator.problem import Problem
    from tuned.record import Winner


def percent_of_floor(winner: Winner) -> float:
    """How near a winner is to the time in which a copy moves the same bytes: 100 is as fast as that copy."""
    return 100 * winner.floor_us / winner.median_us


def knobs(variant: Any, default: Any) -> str:
    """The knobs in which a variant differs from the default variant of its problem, as words."""
    changed = [n for n in choices(type(variant)) if getattr(variant, n) != getattr(default, n)]
    return " ".join(f"{n}={getattr(variant, n)}" for n in changed) or "the default"


def winners_table(winners: Iterable[Winner], title: str) -> Table:
    """One row a problem: microseconds, bandwidth, percent of the floor, speed-ups."""
    table = Table(title=title, title_justify="left")
    table.add_column("problem", overflow="fold")
    for name in ("us", "GB/s", "% of floor", "x eager", "x default", "trials"):
        table.add_column(name, justify="right", no_wrap=True)
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


def problems_table(problems: Iterable[Problem], winners: Iterable[Winner], device: str) -> Table:
    """What ``--list`` shows: each problem, and the time that the record of ``device`` has for it."""
    times = {(w.family, w.spec, w.size): w.median_us for w in winners}
    table = Table(title="Default problems, most common first", title_justify="left")
    table.add_column("problem", overflow="fold")
    table.add_column("family")
    table.add_column("what", overflow="fold")
    table.add_column("size", no_wrap=True)
    table.add_column(f"{device}, us", justify="right")
    for p in problems:
        known = times.get((p.family, p.spec, p.size))
        size = " ".join(f"{n}={v}" for n, v in vars(p.size).items() if isinstance(v, int))
        table.add_row(p.name, p.family, describe(p.spec), size, "-" if known is None else f"{known:.2f}")
    return table


def describe(spec: Any) -> str:
    """A spec's fields as words: values that speak for themselves, the others with their names."""
    words = []
    for name, value in ((f, getattr(spec, f)) for f in spec.__dataclass_fields__):
        if isinstance(value, bool):
            words += [name] if value else []
        else:
            words.append(value if isinstance(value, str) else f"{name}={value}")
    return " ".join(words)
