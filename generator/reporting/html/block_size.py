"""How to choose a block size: the paragraph that answers it, and the charts beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..blocks import WARP, Answer
from ..importance import Spread
from .charts import Chart, Frame, line_chart


def block_charts(answer: Answer) -> list[Chart]:
    """A chart for each measure of the block: the cost of its best variant, in the median problem and in nine of ten."""
    charts = []
    for measure, costs in answer.curves.items():
        shown = {v: c for v, c in costs.items() if c.problems >= answer.problems / 2}
        if len(shown) < 2:  # noqa: PLR2004 - a line has two ends
            continue
        best = _least(answer, measure)
        charts.append(
            line_chart(
                measure,
                f"The best number of {measure} is {best}, which costs {shown[best].ninth:.1f} percent in nine problems of ten.",
                (measure, "% above the best variant"),
                [
                    ("ours", "median", [(v, c.median) for v, c in shown.items()]),
                    ("d", "nine of ten", [(v, c.ninth) for v, c in shown.items()]),
                ],
                [0, 20, 40, 60, 80, 100],
                unit="%",
                log=False,
                frame=Frame(width=350, height=250, left=34.0, right=268.0, bottom=206.0),
            )
        )
    return charts


def block_answer(answer: Answer, untuned: Sequence[float], small: tuple[Answer | None, Answer | None]) -> str:
    """How to choose a block size, in one paragraph of measured sentences.

    ``untuned`` are ratios of the default's time to the winner's; ``small`` are the answers for the calls that fit in L2
    and for the other calls.
    """
    best = answer.rules[0]
    lead = {
        "features a thread": f"Choose it by the thread: {best.value} features a thread, so that a program takes {WARP * best.value} for each of its warps.",
        "features a program": f"Choose it by the whole: {best.value} features a program, whatever the width of a row.",
        "rows a program": f"Choose it by rows: {best.value} a program, whatever their width.",
    }
    measured = f"Over {answer.problems} problems and {answer.trials:,} measured variants"
    sentences = [
        lead[best.measure],
        f"{measured}, the best variant that keeps to it is above the best of all by {_cost(best.cost)}.",
    ]
    others = [f"{r.value} {_words(r.measure, r.value)} ({r.cost.ninth:.1f}%)" for r in answer.rules[1:]]
    if others:
        sentences.append(f"No other measure held fixed does better in nine of ten: {' or '.join(others)}.")
    fits, larger = small
    if fits is not None and larger is not None:
        first, second = _least(fits, best.measure), _least(larger, best.measure)
        calls = f"the {fits.problems} calls that fit in L2", f"the {larger.problems} larger ones"
        sentences.append(
            f"The number is the same for {calls[0]} and for {calls[1]}."
            if first == second
            else f"Taken apart, {calls[0]} want {first} {_words(best.measure, first)}, {calls[1]} {second}."
        )
    if answer.one_row is not None and (best.measure, best.value) != ("rows a program", 1):
        sentences.append(
            f"One row a program, whatever its width, costs {_cost(answer.one_row)}, of the {answer.one_row.problems} where it was tried."
        )
    if len(answer.warps) > 1:
        warps, costs = ", ".join(map(str, answer.warps)), ", ".join(f"{c.median:.1f}%" for c in answer.warps.values())
        sentences.append(f"With the rule kept, the best with {warps} warps costs {costs} in the median.")
    if untuned:
        middle, worst = (100 * (x - 1) for x in (statistics.median(untuned), max(untuned)))
        sentences.append(
            f"The default, which needs no search, is slower than the winner by {middle:.1f}% in the median and {worst:.1f}% in the worst of {len(untuned)}."
        )
    return " ".join(sentences)


def _words(measure: str, value: int) -> str:
    return measure.replace("s a ", " a ") if value == 1 else measure


def _cost(cost: Spread) -> str:
    return (
        f"{cost.median:.1f}% in the median problem, {cost.ninth:.1f}% in nine of ten and {cost.worst:.1f}% in the worst"
    )


def _least(answer: Answer, measure: str) -> int:
    costs = {v: c for v, c in answer.curves[measure].items() if c.problems >= answer.problems / 2}
    return min(costs, key=lambda v: (costs[v].ninth, costs[v].median))
