"""The bars that the committed results answer to: which rows, which ratio, how small it must be."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from benchmarks.peers import REQUIRED

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bar:
    """A ratio that no row of a kind may exceed."""

    name: str
    ratio: str  # the key of the row
    limit: float
    moonshot: float
    row_bar: str | None  # rows that say so; None: every row of the suite
    suite: str = "rope"

    def applies(self, row: dict[str, Any]) -> bool:
        """Whether the row is judged by this bar."""
        if row["suite"] != self.suite or row.get(self.ratio) is None:
            return False
        return self.row_bar is None or row["bar"] == self.row_bar


BARS = (
    Bar("out of place / floor", "ours_over_floor", 1.04, 1.01, "out of place"),
    Bar("in place / floor", "ours_over_floor", 1.03, 1.01, "in place"),
    Bar("in place, 64 of 128 / floor", "ours_over_floor", 1.15, 1.08, "in place, 64 of 128"),
    Bar("backward / floor", "ours_over_floor", 1.04, 1.01, "backward"),
    Bar("best peer", "ours_over_best_peer", 1.00, 1.00, None),
    Bar("small, cos and sin / copy", "ours_over_copy", 1.15, 1.05, "small, cos and sin"),
    Bar("small, freqs / copy", "ours_over_copy", 1.30, 1.22, "small, freqs"),
    Bar("untuned / floor", "ours_over_floor", 1.08, 1.03, "untuned", "rope-untuned"),
    Bar("host, forward / eager", "ours_over_eager", 0.15, 0.10, "host, forward", "rope-host"),
    Bar(
        "host, forward with backward / eager",
        "ours_over_eager", 0.30, 0.20, "host, forward with backward", "rope-host",
    ),
)  # fmt: skip
GEOMETRIC_MEAN_MOONSHOT = 0.80  # of ours / best peer, over the rows with all required peers


def best_peer_mean(rows: Sequence[dict[str, Any]]) -> tuple[float, int] | None:
    """The geometric mean of ours / best peer over the rows that have all required peers, and their number."""
    ratios = [
        row["ours_over_best_peer"]
        for row in rows
        if row["suite"] == "rope" and all(peer in row["peers"] for peer in REQUIRED)
    ]
    if not ratios:
        return None
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios)), len(ratios)


def where(row: dict[str, Any]) -> str:
    """The row in a few words."""
    place = ", in place" if row["inplace"] else ""
    return f"{row['problem']} {row['layout']} {row.get('measured', row['direction'])}{place}, {row['angles']}"


def verdicts(rows: Sequence[dict[str, Any]]) -> list[tuple[Bar, list[dict[str, Any]]]]:
    """Every bar with its rows, the worst first."""
    return [(bar, sorted(filter(bar.applies, rows), key=lambda row: -row[bar.ratio])) for bar in BARS]


def report(results: dict[str, Any]) -> str:
    """Every bar: its worst row, how many rows miss it, and by how far."""
    rows = results["rows"]
    lines = []
    for bar, judged in verdicts(rows):
        if not judged:
            lines.append(f"{bar.name}: no row")
            continue
        ratios = [row[bar.ratio] for row in judged]
        missed = [row for row in judged if row[bar.ratio] > bar.limit]
        state = f"met, by all {len(judged)}" if not missed else f"MISSED by {len(missed)} of {len(judged)}"
        shot = sum(ratio <= bar.moonshot for ratio in ratios)
        lines.append(f"{bar.name} <= {bar.limit:.2f}: {state}; worst {ratios[0]:.3f} ({where(judged[0])})")
        lines.append(f"    moonshot {bar.moonshot:.2f}: {shot} of {len(judged)}; median {ratios[len(ratios) // 2]:.3f}")
        lines += [
            f"    {row[bar.ratio]:.3f} ({row[bar.ratio] / bar.limit - 1:+.1%})  {where(row)}"
            + (f"; {row['best_peer']}" if bar.ratio == "ours_over_best_peer" else "")
            for row in missed
        ]
    mean = best_peer_mean(rows)
    if mean is not None:
        state = "met" if mean[0] <= GEOMETRIC_MEAN_MOONSHOT else "not met"
        lines.append(
            f"geometric mean of ours / best peer over {mean[1]} rows with {', '.join(REQUIRED)}: {mean[0]:.3f}"
            f" (moonshot {GEOMETRIC_MEAN_MOONSHOT:.2f}: {state})"
        )
    unexplained = [(row, peer) for row in rows if row["suite"] == "rope" for peer in REQUIRED if peer in row["missing"]]
    reasons = sorted({f"{peer}: {row['missing'][peer]}" for row, peer in unexplained})
    lines += [f"required peer absent, {text}" for text in reasons]
    lines += [f"skipped row {key}: {text}" for key, text in results.get("skipped", {}).items()]
    return "\n".join(lines)
