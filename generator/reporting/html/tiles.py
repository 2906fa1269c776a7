"""The few figures at the head of the page, each with what it measures, how many calls it counts and what it compares with."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...workload import WORKLOADS
from .contents import Peer, Row


@dataclasses.dataclass(frozen=True)
class Tile:
    """A figure, its label, and a note on how to read it."""

    value: str
    label: str
    note: str


def read_summary(folder: Path, device: str) -> dict[str, Any] | None:
    """The calls of README's table as they were measured on a device; None if they were not."""
    path = folder / "summary" / f"{device}.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else None


def tiles(rows: Sequence[Row], peers: Sequence[Peer], summary: dict[str, Any] | None) -> list[Tile]:
    """The tiles of README's calls, then those of the record's winners; none if there are no winners."""
    if not rows:
        return []
    return [*_readme(summary or {}), *_floor(rows), *_peers(peers), *_untuned(rows)]


def _readme(calls: dict[str, Any]) -> list[Tile]:
    if not calls:
        return []
    found = []
    for which, how in (("graph", "in a CUDA graph"), ("call", "as calls, with the time of the host")):
        ratios = [row[which] for row in calls.values()]
        slower = sum(ratio < 1 for ratio in ratios)
        note = f"geometric mean of README's {len(ratios)} calls, from {min(ratios):.2f} to {max(ratios):.1f}; slower in {slower}"
        value = f"{statistics.geometric_mean(ratios):.1f}{TIMES}"
        found.append(Tile(value, f"as fast as the best of what each call replaces, {how}", note))
    return found


def _floor(rows: Sequence[Row]) -> list[Tile]:
    first = next(iter(WORKLOADS.values()))
    own = [row for row in rows if row.winner.family == first.family.name]
    # For a recurrence the floor says little, since it waits for its steps; README gives no floor for it either.
    which, counted = (f" {first.title}", own) if own and len(own) < len(rows) else ("", rows)
    lowest = min(counted, key=lambda row: row.percent)
    note = "100% is a copy of the bytes that must move; small calls pass it"
    return [
        Tile(
            _percent(_median([r.percent for r in counted])),
            f"of the floor, the median of {len(counted)}{which} winners",
            note,
        ),
        Tile(_percent(lowest.percent), f"of the floor, the lowest of these {len(counted)}", lowest.winner.name),
    ]


def _peers(peers: Sequence[Peer]) -> list[Tile]:
    if not peers:
        return []
    best = peers[0]
    note = f"geometric mean of the {len(best.ratios)} calls under Peers; a peer is faster in {best.slower}"
    return [Tile(f"{best.mean:.2f}{TIMES}", "as fast as the fastest peer of each call", note)]


def _untuned(rows: Sequence[Row]) -> list[Tile]:
    default = [row.over_default for row in rows if row.over_default is not None]
    found = []
    if default:
        note = f"median of {len(default)} winners; the default needs no tuning"
        found.append(Tile(f"{_median(default):.2f}{TIMES}", "as fast as the untuned default", note))
    eager = [row.over_eager for row in rows]
    note = f"median of {len(eager)} winners, device time alone"
    return [*found, Tile(f"{_median(eager):.1f}{TIMES}", "as fast as eager PyTorch", note)]


TIMES = "\N{MULTIPLICATION SIGN}"
_median: Callable[[Sequence[float]], float] = statistics.median


def _percent(value: float) -> str:
    return f"{value:.1f}%"
