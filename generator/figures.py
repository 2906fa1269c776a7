"""Tables of figures for a terminal of 80 columns, and a progress bar over steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


def figures(title: str, first: Column | str, *heads: Column | str, min_width: int | None = None) -> Table:
    """A table with a column of names, where long names are folded, and columns of figures."""
    names = Column(first, overflow="fold") if isinstance(first, str) else first
    columns = (Column(h, justify="right", no_wrap=True) if isinstance(h, str) else h for h in heads)
    return Table(
        names,
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        min_width=min_width,
    )


def turned(title: str, corner: str, measures: Sequence[str], found: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """A table of few names and many measures, with a row for each measure; names in the head may take several lines."""
    heads = (Column(name, justify="right", min_width=max(map(len, name.split()))) for name, _ in found)
    table = figures(title, Column(corner, no_wrap=True), *heads)
    table.padding = (0, 1, 0, 0)
    for index, measure in enumerate(measures):
        table.add_row(measure, *(cells[index] for _, cells in found))
    return table


@contextlib.contextmanager
def steps(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of ``total`` steps; a progress bar is drawn where there is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
