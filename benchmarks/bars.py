"""The bars that judge the committed results: which rows, which ratio, how small it must be."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gru_peers import IN_A_GRAPH
from benchmarks.plan import COMPLETE, REQUIRED

OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure that no row of a kind may exceed or, for a speed-up, fall below."""

    name: str
    ratio: str  # the key of the row
    limit: float | None  # None: there is a moonshot only
    moonshot: float | None
    row_bar: str | tuple[str, ...] | None  # judges rows with this bar, or one of these; None: all rows of the suite
    suite: str = "rope"
    sign: str = "<="  # of OPERATORS, between the figure and its goal

    def applies(self, row: dict[str, Any]) -> bool:
        """Whether the row is judged by this bar."""
        if row["suite"] != self.suite or row.get(self.ratio) is None:
            return False
        names = (self.row_bar,) if isinstance(self.row_bar, str) else self.row_bar
        return names is None or row["bar"] in names

    def met(self, row: dict[str, Any], goal: float) -> bool:
        """Whether the row reaches a goal."""
        return OPERATORS[self.sign](row[self.ratio], goal)


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

TO_512 = ("small, H to 512", "small, H 512, B 16 to 64")
TO_2048 = ("cell", "cell, H 2048")


def _faster(
    name: str, rows: str | tuple[str, ...], called: tuple[float, float], graph: tuple[float, float]
) -> list[Bar]:
    """Two bars, each with its limit and moonshot: nn.GRU as users call it over ours, and nn.GRU in a CUDA graph."""
    return [
        Bar(f"{name}: nn.GRU / ours", "speedup", *called, rows, "gru", sign=">="),
        Bar(f"{name}: nn.GRU in a CUDA graph / ours", "speedup_over_graph", *graph, rows, "gru", sign=">="),
    ]


GRU_BARS = (
    *_faster("B H to 16,384, H to 512", TO_512, (3.5, 6.0), (2.0, 3.0)),
    *_faster("B H to 16,384, H 1024", "small, H 1024", (3.5, 5.0), (2.0, 3.0)),
    *_faster("512,128,256 and 256,128,512", "medium", (2.5, 4.0), (1.5, 2.5)),
    *_faster("512,64,1024 and 128,8,2048", "large", (2.0, 3.5), (1.3, 2.5)),
    *_faster("128,1024,256", "wide", (1.5, 2.5), (1.0, 1.7)),
    Bar("every sequence: nn.GRU in a CUDA graph / ours", "speedup_over_graph", 1.0, None, None, "gru", sign=">="),
    Bar("KernelBench 39, microseconds", "ours", 3500.0, 1500.0, "KernelBench 39", "gru"),
    Bar("H 512, B 16 to 64, microseconds a step", "us_per_step", 2.4, 1.6, (TO_512[1], "H 512, B 64"), "gru"),
    Bar("every sequence: error / nn.GRU's", "error_over_peer", 1.1, 1.0, None, "gru"),
    Bar("cell to H 1024, cold: nn.GRUCell / ours", "speedup", 2.0, None, "cell", "gru_cell", sign=">="),
    Bar("cell of H 2048, cold: nn.GRUCell / ours", "speedup", 1.5, None, "cell, H 2048", "gru_cell", sign=">="),
    Bar("cell, cold / (1.1 floors + 1.5 us)", "ours_over_goal", None, 1.0, TO_2048, "gru_cell"),
    Bar("cell, host microseconds", "ours_host", 12.0, 7.0, TO_2048, "gru_cell"),
    Bar("segments, cold / best of cat and the rest", "ours_over_best_peer", 1.0, 0.7, "segments", "gru_cell"),
    Bar("segments, host / best of cat and the rest", "host_over_best_peer", 1.0, 0.7, "segments", "gru_cell"),
    Bar("every step: error / the peers'", "error_over_peer", 1.1, 1.0, None, "gru_cell"),
)
QK, THD, PREFILL, DECODE, HOST = "rope-qk", "rope-thd", "rope-prefill", "rope-decode", "rope-calls-host"
CALL_BARS = (
    Bar("query and key, large / floor", "ours_over_floor", 1.03, None, "large", QK),
    Bar("query and key, large: best peer", "ours_over_best_peer", 1.00, None, "large", QK),
    Bar("query and key, small / copy", "ours_over_copy", 1.15, None, "small", QK),
    Bar("query and key, small: best peer", "ours_over_best_peer", 1.00, None, "small", QK, sign="<"),
    Bar("ragged sequences / floor", "ours_over_floor", 1.08, None, "ragged", THD),
    Bar("prefill from 4096 tokens / floor", "ours_over_floor", 1.06, None, "prefill", PREFILL),
    Bar("decode: best peer", "ours_over_best_peer", 1.00, None, "decode", DECODE, sign="<"),
    Bar("host, out of place, microseconds", "ours", 7.0, 5.5, "out of place", HOST),
    Bar("host, in place, microseconds", "ours", 6.0, 4.5, "in place", HOST),
    Bar("host, query and key in place, microseconds", "ours", 7.5, 5.5, "query and key in place", HOST),
    Bar("host, with autograd, microseconds", "ours", 20.0, 12.0, "with autograd", HOST),
    # The same for hosts slower or faster than the host that the microseconds were set on, where torch.add took 5.0.
    Bar("host, out of place / torch.add", "ours_over_add", 1.4, 1.1, "out of place", HOST),
    Bar("host, in place / torch.add", "ours_over_add", 1.2, 0.9, "in place", HOST),
    Bar("host, query and key in place / torch.add", "ours_over_add", 1.5, 1.1, "query and key in place", HOST),
    Bar("host, with autograd / torch.add", "ours_over_add", 4.0, 2.4, "with autograd", HOST),
)
BELOW_US = 10.0
CALL_MEANS = {  # complete calls -> our microseconds are below this; least geometric mean of best peer / ours; its moonshot
    f"under {BELOW_US:.0f} us": (BELOW_US, 1.25, 1.5),
    "of any size": (math.inf, 1.15, 1.3),
}
GEOMETRIC_MEAN_MOONSHOT = 0.80  # of ours / best peer, over the rows with all required peers


def geometric_mean(values: Sequence[float]) -> tuple[float, int] | None:
    """The geometric mean of ratios and their number, or None without ratios."""
    return (statistics.geometric_mean(values), len(values)) if values else None


def best_peer_mean(rows: Sequence[dict[str, Any]]) -> tuple[float, int] | None:
    """The geometric mean of ours / best peer over the rows that have all required peers, and their number."""
    known = (row for row in rows if row["suite"] == "rope" and all(peer in row["peers"] for peer in REQUIRED))
    return geometric_mean([row["ours_over_best_peer"] for row in known])


def call_mean(rows: Sequence[dict[str, Any]], below_us: float) -> tuple[float, int] | None:
    """The geometric mean of best peer / ours over the complete calls that take less than ``below_us``, and their number."""
    complete = (row for row in rows if row["suite"] in COMPLETE and row["kind"] == "device" and row["ours"] < below_us)
    return geometric_mean([1 / row["ours_over_best_peer"] for row in complete if row["best_peer"]])


def _call_means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The two means of the complete calls, judged."""
    lines = []
    for name, (below_us, limit, moonshot) in CALL_MEANS.items():
        mean = call_mean(rows, below_us)
        if mean is not None:
            state = "met" if mean[0] >= limit else "MISSED"
            shot = "met" if mean[0] >= moonshot else "not met"
            lines.append(
                f"complete calls {name}, geometric mean of best peer / ours over {mean[1]} rows"
                f" >= {limit:.2f}: {state}, {mean[0]:.3f} (moonshot {moonshot:.2f}: {shot})"
            )
    return lines


def where(row: dict[str, Any]) -> str:
    """The row in a few words."""
    named = f"{row['problem']} ({row['name']})" if row.get("name") else row["problem"]
    if "angles" not in row:
        return f"{named} {row['layout']} {row['dtype']}"
    place = ", in place" if row["inplace"] else ""
    return f"{named} {row['layout']} {row.get('measured', row['direction'])}{place}, {row['angles']}"


def verdicts(rows: Sequence[dict[str, Any]]) -> list[tuple[Bar, list[dict[str, Any]]]]:
    """Every bar with its rows, the worst first."""
    return [
        (bar, sorted(filter(bar.applies, rows), key=lambda row: row[bar.ratio], reverse=bar.sign != ">="))
        for bar in (*BARS, *CALL_BARS, *GRU_BARS)
    ]


def _judgement(bar: Bar, judged: Sequence[dict[str, Any]]) -> list[str]:
    """A bar with its worst row, its moonshot, and the rows that miss it."""
    if not judged:
        return [f"{bar.name}: no row"]
    figures = [row[bar.ratio] for row in judged]
    worst = f"worst {figures[0]:.3f} ({where(judged[0])})"
    median = f"median {figures[len(figures) // 2]:.3f}"
    lines, missed = [f"{bar.name}: no bar; {worst}"], []
    if bar.limit is not None:
        missed = [row for row in judged if not bar.met(row, bar.limit)]
        state = f"met, by all {len(judged)}" if not missed else f"MISSED by {len(missed)} of {len(judged)}"
        lines = [f"{bar.name} {bar.sign} {bar.limit:.2f}: {state}; {worst}"]
    if bar.moonshot is not None:
        shot = sum(bar.met(row, bar.moonshot) for row in judged)
        lines.append(f"    moonshot {bar.moonshot:.2f}: {shot} of {len(judged)}; {median}")
    for row in missed:
        peer = f"; {row['best_peer']}" if bar.ratio == "ours_over_best_peer" else ""
        lines.append(f"    {row[bar.ratio]:.3f} ({row[bar.ratio] / (bar.limit or 1) - 1:+.1%})  {where(row)}{peer}")
    return lines


def report(results: dict[str, Any]) -> str:
    """Every bar: its worst row, how many rows miss it, and by how far."""
    rows = results["rows"]
    lines = [line for bar, judged in verdicts(rows) for line in _judgement(bar, judged)]
    mean = best_peer_mean(rows)
    if mean is not None:
        state = "met" if mean[0] <= GEOMETRIC_MEAN_MOONSHOT else "not met"
        lines.append(
            f"geometric mean of ours / best peer over {mean[1]} rows with {', '.join(REQUIRED)}: {mean[0]:.3f}"
            f" (moonshot {GEOMETRIC_MEAN_MOONSHOT:.2f}: {state})"
        )
    lines += _call_means(rows)
    required = {"rope": REQUIRED, "gru": (IN_A_GRAPH,)}
    absent = [(row, peer) for row in rows for peer in required.get(row["suite"], ()) if peer in row["missing"]]
    lines += sorted({f"required peer absent, {peer}: {row['missing'][peer]}" for row, peer in absent})
    lines += [
        f"no CUDA graph of ours, {where(row)}: {row['ours_in_a_graph']}"
        for row in rows
        if isinstance(row.get("ours_in_a_graph"), str)
    ]
    lines += [f"no kernel served {where(row)}: {row['why']}" for row in rows if row.get("rule") == "eager"]
    lines += [f"skipped row {key}: {text}" for key, text in results.get("skipped", {}).items()]
    return "\n".join(lines)
