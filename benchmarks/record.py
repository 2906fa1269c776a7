"""The results of a benchmark run as JSON: rows, their ratios, and the environment they were measured in."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import TYPE_CHECKING, Any, Protocol

import torch
import triton

from benchmarks import peers
from tuned.lookup.device import device_slug

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

DIGITS = 4  # of a ratio; times keep 3, a nanosecond


class Timed(Protocol):
    """What the record must know of a row of any suite."""

    @property
    def suite(self) -> str:
        """A run replaces the rows of its suites."""

    @property
    def key(self) -> str:
        """Once in all plans; begins with the suite and a comma."""

    @property
    def bar(self) -> str | None:
        """Which bars judge it, or None."""

    @property
    def kind(self) -> str:
        """What is timed."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the record says of the call: at least problem, layout, dtype, direction and sizes."""


class Moves(Protocol):
    """What the record must know of a call to say what it costs at least."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that must move."""

    @property
    def copy_bytes(self) -> int:
        """Bytes that the copy beside it moves."""


def environment(versions: Callable[[], dict[str, str]] = peers.versions) -> dict[str, Any]:
    """What the numbers depend on."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "peers": versions(),
    }


def common(row: Timed, *, ours_us: float, ours_spread_us: float, found: dict[str, float | str]) -> dict[str, Any]:
    """What the rows of every suite say; ``found`` has a peer's microseconds, or the reason why there are none."""
    times = {name: value for name, value in found.items() if not isinstance(value, str)}
    rivals = {name: us for name, us in times.items() if name != "torch.add"}  # not RoPE: what any call costs
    best = min(rivals, key=rivals.__getitem__, default=None)
    return {
        "suite": row.suite,
        **row.facts,
        "kind": row.kind,
        "unit": "us",
        "ours": round(ours_us, 3),
        "floor": None,
        "peers": times,
        "missing": {name: value for name, value in found.items() if isinstance(value, str)},
        "bar": row.bar,
        "ours_spread": round(ours_spread_us, 3),
        "best_peer": best,
        "ours_over_best_peer": round(ours_us / rivals[best], DIGITS) if best else None,
    }


def device_row(  # noqa: PLR0913 (what was measured)
    row: Timed, call: Moves, *, ours_us: float, ours_spread_us: float, copy_us: float, found: dict[str, float | str]
) -> dict[str, Any]:
    """A device row. The floor is the copy of this row, scaled to the bytes that must move."""
    floor_us = copy_us * call.moved_bytes / call.copy_bytes
    return common(row, ours_us=ours_us, ours_spread_us=ours_spread_us, found=found) | {
        "floor": round(floor_us, 3),
        "copy": round(copy_us, 3),
        "bytes_moved": call.moved_bytes,
        "ours_over_floor": round(ours_us / floor_us, DIGITS),
        "ours_over_copy": round(ours_us / copy_us, DIGITS),
    }


def host_row(
    row: Timed, *, ours_us: float, ours_spread_us: float, found: dict[str, float | str], direction: str = "forward"
) -> dict[str, Any]:
    """A host row: wall time of whole calls. Direction backward means forward with backward."""
    eager = found.get("eager PyTorch")
    ratio = None if eager is None or isinstance(eager, str) else round(ours_us / eager, DIGITS)
    what = "forward" if direction == "forward" else "forward with backward"
    return common(row, ours_us=ours_us, ours_spread_us=ours_spread_us, found=found) | {
        "measured": what,
        "ours_over_eager": ratio,
    }


def verdict(row: dict[str, Any]) -> str:
    """The time of a row and its ratios."""
    ratios = {
        "floor": row.get("ours_over_floor"),
        "copy": row.get("ours_over_copy"),
        "eager": row.get("ours_over_eager"),
        f"best ({row['best_peer']})": row["ours_over_best_peer"],
    }
    shown = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in ratios.items() if ratio is not None)
    served = f", by {row['rule']}" if "rule" in row else ""
    return f"{row['ours']:.2f} us, {shown}{served}"


@dataclasses.dataclass
class Results:
    """A results file that is whole after every row."""

    path: Path
    environment: dict[str, Any]
    rows: dict[str, dict[str, Any]]  # by the row's key
    skipped: dict[str, str]  # a row's key to the reason

    @classmethod
    def open(
        cls, folder: Path, suites: Sequence[str], versions: Callable[[], dict[str, str]] = peers.versions
    ) -> Results:
        """The file of this device; suites that are not measured again stay if the environment is the same."""
        here = environment(versions)
        path = folder / f"{device_slug(here['device'])}.json"
        results = cls(path, here, {}, {})
        if path.exists():
            before = json.loads(path.read_text())
            if before["environment"] == here:
                kept = {row["key"]: row for row in before["rows"] if row["suite"] not in suites}
                results.rows.update(kept)
                reasons = before["skipped"].items()
                results.skipped.update({key: text for key, text in reasons if key.split(", ")[0] not in suites})
        return results

    def add(self, row: Timed, measured: dict[str, Any]) -> None:
        """Keep a row, and save."""
        self.skipped.pop(row.key, None)
        self.rows[row.key] = measured | {"key": row.key}
        self.save()

    def skip(self, row: Timed, reason: str) -> None:
        """Keep the reason why a row is not there, and save."""
        self.rows.pop(row.key, None)
        self.skipped[row.key] = reason
        self.save()

    def save(self) -> None:
        """Write all of it, then move it into place."""
        content = {"environment": self.environment, "rows": list(self.rows.values()), "skipped": self.skipped}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".json.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self.path)
