"""The variants that calls get on a card that nobody measured, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.table import Column, Table

from tuned.families.architecture import shared_limit

from ..evaluation.cards import LIBRARY, ONE_LAUNCH, STEPS, Card, by_family, ways
from ..figures import figures


def card_table(card: Card) -> Table:
    """One row a family: the rules that chose its variants, and the compiler's report on their kernels."""
    target, limit = card.target, shared_limit(card.target.capability)
    heads = ("shapes", "kernels", "registers", "shared KiB", "hold")
    title = f"{target.device}: {target.architecture}, {target.processors} processors, {limit // 1024} KiB a program"
    table = figures(title, Column("family", no_wrap=True), Column("chosen by"), *heads)
    for family, asked, kernels in by_family(card):
        rules = Counter(a.choice.rule for a in asked)
        rooms = [room for kernel in kernels for room in kernel.rooms]
        wrong = sum(a.wrong is not None for a in asked) + sum(k.wrong is not None for k in kernels)
        table.add_row(
            family,
            ", ".join(f"{count} {rule}" for rule, count in rules.most_common()),
            str(len(asked)),
            str(len(kernels)),
            str(max((room.need.registers for room in rooms), default=0)),
            f"{max((room.need.shared_bytes for room in rooms), default=0) / 1024:.1f}",
            "all" if not wrong else f"all but {wrong}",
        )
    return table


def card_lines(card: Card) -> Iterator[str]:
    """How many kernels were compiled, how families with a model are served, and what does not hold."""
    waiting = [room for kernel in card.kernels for room in kernel.rooms if room.waits]
    yield (
        f"{len(card.kernels)} of {card.distinct} kernels compiled; in {len(waiting)} of them programs wait for each other, "
        "and all of those run at once"
        if not card.wrong
        else f"{len(card.kernels)} of {card.distinct} kernels compiled; {len(card.wrong)} choices do not hold:"
    )
    yield from (f"    {sentence}" for sentence in card.wrong)
    for (family, dtype), found in ways(card).items():
        counts = ", ".join(f"{found[way]} {way}" for way in (ONE_LAUNCH, LIBRARY, STEPS))
        yield f"    {family} {dtype}: {counts}"
