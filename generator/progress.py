"""The progress bar of a run: problem, trial, best so far, time left."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from generator.search import Progress


def time_left(elapsed_s: float, done: float, total: int, budget_s: float = math.inf) -> str:
    """What is left of a run at its pace so far, or of its budget: "3:20"; "?" until there is a pace."""
    left_s = budget_s - elapsed_s
    if done > 0:
        left_s = min(left_s, elapsed_s / done * (total - done))
    if math.isinf(left_s):
        return "?"
    minutes, rest = divmod(max(0, round(left_s)), 60)
    return f"{minutes}:{rest:02}"


@contextlib.contextmanager
def bar(console: Console, total: int, budget_s: float = math.inf) -> Iterator[Callable[[int, Progress], None]]:
    """``report(index, progress)`` of a run over ``total`` problems; draws only where there is a terminal."""
    columns = (
        TextColumn("{task.fields[place]} {task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("best {task.fields[best]}  {task.fields[failed]}left {task.fields[left]}  {task.fields[note]}"),
    )
    start = time.monotonic()
    with Bar(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None, place="", best="-", failed="", left="?", note="")

        def report(index: int, progress: Progress) -> None:
            done = index + progress.trial / max(progress.trials, 1)
            shown.update(
                task,
                description=progress.problem,
                completed=progress.trial,
                total=progress.trials,
                place=f"{index + 1}/{total}",
                best="-" if math.isinf(progress.best_us) else f"{progress.best_us:.2f} us",
                failed=f"{progress.failed} failed  " if progress.failed else "",
                left=time_left(time.monotonic() - start, min(done, total), total, budget_s),
                note=progress.note,
            )

        yield report
