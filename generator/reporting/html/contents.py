"""The contents of the page, computed from the record, the histories and the benchmark results; nothing is drawn here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tuned.lookup.record import Winner

from ...rendering.structures import fresh
from ...workload import WORKLOADS, default_variant
from ..history import History
from ..report import knobs, percent_of_floor
from .charts import Chart, line_chart, scatter, strips

DIRECTIONS = ("forward", "backward")
LINES = {
    "this project": "ours",
    "copy floor": "floor",
    "flash-attention": "a",
    "TransformerEngine": "b",
    "torch.jit.script": "c",
    "eager PyTorch": "d",
}  # the lines of a sweep -> their kind in the style sheet
GROUP_KINDS = ("ours", "a", "b", "d", "c")  # kinds in the style sheet, for groups of calls in order
REASON = 240  # characters of a failure's reason that are shown


@dataclasses.dataclass(frozen=True)
class Row:
    """One winner, as the table shows it."""

    winner: Winner
    percent: float
    gigabytes: float
    over_default: float | None
    over_eager: float
    knobs: str
    fresh: bool


@dataclasses.dataclass(frozen=True)
class Failure:
    """Variants that failed for one kind of reason."""

    kind: str  # the reason without its numbers
    count: int
    problems: int
    example: str  # a problem and a variant
    reason: str  # of the example, whole


@dataclasses.dataclass(frozen=True)
class Peer:
    """How many times as fast as one peer this project is, call by call."""

    name: str
    ratios: list[tuple[float, str]]  # (peer's time / ours, call)
    mean: float  # geometric

    @property
    def slower(self) -> int:
        """Calls in which the peer is the faster one."""
        return sum(r < 1 for r, _ in self.ratios)


def winner_rows(winners: Iterable[Winner]) -> list[Row]:
    """The winners in the order of the default problems' families, then by name."""
    return [
        Row(
            w,
            percent_of_floor(w),
            w.bytes_moved / w.median_us / 1e3,
            w.default_us / w.median_us if w.default_us else None,
            w.eager_us / w.median_us,
            knobs(w.variant, default_variant(w)),
            fresh(w.digests),
        )
        for w in sorted(winners, key=lambda w: (list(WORKLOADS).index(w.family), w.name))
    ]


def floor_chart(rows: Sequence[Row]) -> Chart | None:
    """Percent of the floor against bytes moved, a point for each problem."""
    if not rows:
        return None
    groups: dict[str, list[tuple[float, float, str]]] = collections.defaultdict(list)
    for row in rows:
        w = row.winner
        title = f"{w.name}: {row.percent:.1f}% of the floor, {w.median_us:.2f} us"
        work = WORKLOADS[w.family]
        groups[work.group(w.spec) if work.group else work.groups[0]].append((w.bytes_moved, row.percent, title))
    every = dict.fromkeys(group for work in WORKLOADS.values() for group in work.groups)
    kinds = dict(zip(every, itertools.cycle(GROUP_KINDS), strict=False))
    median = statistics.median(r.percent for r in rows)
    return scatter(
        "Percent of the floor against the bytes that a call must move",
        f"{len(rows)} winners; the median is at {median:.1f} percent of the floor, the lowest at {min(r.percent for r in rows):.1f}.",
        ("bytes that must move", "% of the floor"),
        [(kind, name, groups[name]) for name, kind in kinds.items() if name in groups],
        [80, 90, 100, 110, 120, 130, 140, 150],
        100,
    )


def sweep_charts(results: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, list[Chart]]]:
    """Time against sequence length: (shape, source, [forward, backward]) for each shape that was swept.

    Of several results, given by preference, a shape is taken from the one with the most points.
    """
    found: dict[tuple[int, ...], tuple[str, list[dict[str, Any]]]] = {}
    for source, content in results:
        shapes = collections.defaultdict(list)
        for row in content["rows"]:
            if row["suite"] == "rope-sweep":
                shapes[tuple(row["sizes"][k] for k in ("batch", "heads", "head_dim"))].append(row)
        for shape, rows in shapes.items():
            if shape not in found or len(rows) > len(found[shape][1]):
                found[shape] = source, rows
    out = []
    for (batch, heads, width), (source, rows) in sorted(found.items()):
        title = f"batch {batch}, {heads} heads, head dimension {width}"
        times = [t for row in rows for t in (row["ours"], row["floor"], *row["peers"].values())]
        low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        ticks = [10.0**n for n in range(low, high + 1)]
        charts = [c for d in DIRECTIONS if (c := _sweep([r for r in rows if r["direction"] == d], d, title, ticks))]
        out.append((title, source, charts))
    return out


def _sweep(rows: list[dict[str, Any]], direction: str, shape: str, ticks: list[float]) -> Chart | None:
    times = [(r["sizes"]["seq"], {"this project": r["ours"], "copy floor": r["floor"], **r["peers"]}) for r in rows]
    points = {name: sorted((seq, us[name]) for seq, us in times if name in us) for name in LINES}
    lines = [(LINES[name], name, found) for name, found in points.items() if found]
    if not lines:
        return None
    summary = f"RoPE {direction}, {shape}; at the longest sequence of each: " + ", ".join(
        f"{name} {found[-1][1]:.1f} us" for _, name, found in lines
    )
    return line_chart(direction, summary, ("sequence length", "microseconds"), lines, ticks, unit=" us", log=True)


def peers(results: dict[str, Any] | None) -> list[Peer]:
    """Speed-ups over every peer in device time, without sweeps; "the fastest peer" of each call comes first."""
    if results is None:
        return []
    ratios: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    for row in results["rows"]:
        if row["kind"] != "device" or row["suite"] == "rope-sweep" or not row["peers"]:
            continue
        call = f"{row['problem']} {row['layout']} {row['direction']}{', in place' if row['inplace'] else ''}"
        best = min(row["peers"], key=row["peers"].__getitem__)
        ratios["the fastest peer"].append((row["peers"][best] / row["ours"], f"{call}, {best}"))
        for name, us in row["peers"].items():
            ratios[name].append((us / row["ours"], call))
    found = [Peer(name, sorted(r), statistics.geometric_mean(x for x, _ in r)) for name, r in ratios.items()]
    return sorted(found, key=lambda p: (p.name != "the fastest peer", p.mean))


def peers_chart(found: Sequence[Peer]) -> Chart | None:
    """A strip for each peer, with a point for each call."""
    if not found:
        return None
    return strips(
        "Times as fast as each peer",
        "; ".join(f"{p.name}: {p.mean:.2f} in the mean of {len(p.ratios)} calls" for p in found),
        "times as fast as the peer: 1 is equal, to the right this project is faster",
        [(p.name, [(x, f"{call}: {x:.2f}") for x, call in p.ratios], p.mean) for p in found],
    )


def failures(histories: Iterable[History]) -> list[Failure]:
    """The failed variants by kind of reason, the most frequent first."""
    kinds: dict[str, list[tuple[str, Any, str]]] = collections.defaultdict(list)
    for history in histories:
        for variant, reason in history.failed.items():
            kinds[re.sub(r"\d[\d.,]*", "…", reason.splitlines()[0] if reason else "no reason")].append(
                (history.problem.name, variant, reason)
            )
    found = []
    for kind, cases in kinds.items():
        problem, variant, reason = cases[0]
        text = reason if len(reason) <= REASON else f"{reason[:REASON]} …"
        words = " ".join(f"{n}={v}" for n, v in dataclasses.asdict(variant).items())
        found.append(Failure(kind[:REASON], len(cases), len({c[0] for c in cases}), f"{problem}: {words}", text))
    return sorted(found, key=lambda f: (-f.count, f.kind))


def environments(winners: Iterable[Winner]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each fact of the environments, with its values and how many winners have it."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for w in winners:
        for name, value in w.environment.items():
            counts[name][str(value)] += 1
    return [(name, values.most_common()) for name, values in sorted(counts.items())]


def read_results(folder: Path, device: str) -> list[tuple[str, dict[str, Any]]]:
    """The benchmark results of a device as (path, content); empty if there are none."""
    path = folder / f"{device}.json"
    return [(str(path.relative_to(folder.parent.parent)), json.loads(path.read_text()))] if path.exists() else []
