"""The live display of a run: problem, stage, trial, best so far, failures, funnel and time left; a line for each GPU."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ..searching.search import Progress

WINDOW = 8  # the pace is that of so many last problems: those measured by an earlier run take no time, the next may
BAR = 24  # characters at most
REFRESHES = 4  # a second


def time_left(elapsed_s: float, done: float, total: int, budget_s: float = math.inf) -> str:
    """The time left of a run at its pace so far, or of its budget if that is less: "3:20"; "?" until there is a pace."""
    left_s = budget_s - elapsed_s
    if done > 0:
        left_s = min(left_s, elapsed_s / done * (total - done))
    if math.isinf(left_s):
        return "?"
    minutes, rest = divmod(max(0, round(left_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclasses.dataclass(frozen=True)
class Part:
    """Words of a line; if the line is too long, the parts of the highest ``rank`` are dropped first."""

    words: str
    rank: int
    style: str = ""


def fit(parts: Sequence[Part], width: int) -> Text:
    """As many parts as fit in ``width`` columns, in their order; parts of rank 0 stay, and are cut if need be."""
    kept = [part for part in parts if part.words]
    while sum(len(p.words) + 2 for p in kept) - 2 > width and any(p.rank for p in kept):
        kept.remove(max(kept, key=lambda p: p.rank))
    line = Text("  ").join(Text(part.words, part.style) for part in kept)
    line.truncate(max(1, width), overflow="ellipsis")
    return line


class Display:
    """The live display of a run; rich redraws it a few times a second."""

    def __init__(self, total: int, budget_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.budget_s, self.clock = total, budget_s, clock
        self.start = clock()
        self.done = 0
        self.lanes: dict[str, Progress] = {}
        self.marks: collections.deque[tuple[float, int]] = collections.deque([(0.0, 0)], maxlen=WINDOW)

    def report(self, index: int, progress: Progress, lane: str = "") -> None:
        """Note that ``index`` problems of the run are done, and that ``lane`` (a GPU) is at ``progress``."""
        if index > self.done:
            self.done = index
            self.marks.append((self.clock() - self.start, index))
        self.lanes[lane] = progress

    def left(self) -> str:
        """Time left, by the pace of the last problems."""
        seconds, done = self.marks[0]
        under_way = sum(p.trial / p.trials for p in self.lanes.values() if p.trials)
        now = min(self.done + under_way, self.total)
        elapsed = self.clock() - self.start - seconds
        return time_left(elapsed, now - done, self.total - done, self.budget_s - seconds)

    def lines(self, width: int) -> Iterator[Text]:
        """The lines for a terminal of so many columns."""
        yield fit(
            [
                Part(f"{min(self.done, self.total)}/{self.total} problems", 0, "bold"),
                Part(_bar(self.done, self.total, min(BAR, width // 4)), 2, "cyan"),
                Part(f"{self.left()} left", 1),
            ],
            width,
        )
        for name, progress in sorted(self.lanes.items()):
            yield fit(_lane(name, progress), width)
        if len(self.lanes) == 1:
            (progress,) = self.lanes.values()
            if progress.funnel:
                right = progress.trial - progress.failed
                yield fit(
                    [Part(f"{progress.funnel}, {progress.trial} tried, {right} right and measured", 0, "dim")], width
                )

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, for rich."""
        yield from self.lines(options.max_width)


def _bar(done: float, total: int, width: int) -> str:
    full = round(width * min(1.0, done / total)) if total else 0
    return "━" * full + "─" * (width - full)


def _lane(name: str, progress: Progress) -> list[Part]:
    best = progress.best_us
    floor_us = progress.floor_us
    return [
        Part(name, 0, "bold"),
        Part(progress.problem, 0),
        Part(progress.note or "measuring", 3, "cyan"),
        Part(f"{progress.trial}/{progress.trials}" if progress.trials else "", 4),
        Part("" if math.isinf(best) else f"best {best:.2f} us", 2),
        Part("" if math.isinf(best) or not floor_us else f"{100 * floor_us / best:.1f}% of the floor", 6),
        Part(f"{progress.failed} failed" if progress.failed else "", 5, "yellow"),
    ]


@contextlib.contextmanager
def bar(console: Console, total: int, budget_s: float = math.inf) -> Iterator[Callable[..., None]]:
    """``report(index, progress, lane="")`` of a run over ``total`` problems; draws only where there is a terminal."""
    display = Display(total, budget_s)
    with Live(display, console=console, transient=True, refresh_per_second=REFRESHES):
        yield display.report
