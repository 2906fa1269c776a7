"""The results of a benchmark run as JSON: rows, their ratios, and the environment that they were measured in."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton

from generator.disk import folder_lock, write_whole
from tuned.lookup.record import device_slug

DIGITS = 4  # of a ratio; times keep 3, a nanosecond
NO_RIVAL = "torch.add"  # shows the cost of any call; neither RoPE nor a GRU


C = TypeVar("C", bound=Any)


@dataclasses.dataclass(frozen=True)
class Row(Generic[C]):
    """One measurement of this project beside its peers.

    The record reads ``words`` of a call, which tell it from any other, and ``facts``: at least problem, layout, dtype,
    direction and sizes. If the call's floor is a copy, it also reads ``moved_bytes`` and ``copy_bytes``.
    """

    suite: str
    call: C
    bar: str | None  # which bars of benchmarks.bars judge the row, besides the bars that judge every row
    peers: tuple[str, ...] = ()
    name: str = ""  # the model that makes the call, or where its sizes come from
    kind: str = "device"

    @property
    def key(self) -> str:
        """A name in words, unique over all plans."""
        return ", ".join((self.suite, *self.call.words, self.kind))


def version(package: str, distribution: str) -> str | None:
    """The version of an installed package, given its import name; None if it is not installed."""
    try:
        module: Any = importlib.import_module(package)
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))
    except ImportError:
        return None


def environment(packages: Mapping[str, str]) -> dict[str, Any]:
    """The facts that times depend on; ``packages``: import name of a peer -> distribution."""
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
        "peers": {p: found for p, distribution in packages.items() if (found := version(p, distribution))},
    }


def quotient(a: float | str | None, b: float | str | None) -> float | None:
    """The ratio, or None unless both are times."""
    return round(a / b, DIGITS) if isinstance(a, float | int) and isinstance(b, float | int) else None


def common(row: Row[Any], *, ours_us: float, ours_spread_us: float, found: dict[str, float | str]) -> dict[str, Any]:
    """The fields of rows of every suite; ``found`` has each peer's microseconds, or the reason why there are none."""
    times = {name: value for name, value in found.items() if not isinstance(value, str)}
    best = min(times.keys() - {NO_RIVAL}, key=times.__getitem__, default=None)
    return {
        "suite": row.suite,
        "name": row.name,
        **row.call.facts,
        "kind": row.kind,
        "unit": "us",
        "ours": round(ours_us, 3),
        "floor": None,
        "peers": times,
        "missing": {name: value for name, value in found.items() if isinstance(value, str)},
        "bar": row.bar,
        "ours_spread": round(ours_spread_us, 3),
        "best_peer": best,
        "ours_over_best_peer": quotient(ours_us, times[best]) if best else None,
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
    """A results file that is valid after every row. Commands that measure other suites may write it at the same time."""

    path: Path
    environment: dict[str, Any]
    rows: dict[str, dict[str, Any]]  # by the row's key
    skipped: dict[str, str]  # a row's key to the reason
    anew: frozenset[str] = frozenset()  # suites that are measured again: their rows in the file do not count
    own: set[str] = dataclasses.field(default_factory=set)  # keys added or skipped here, which replace the file's
    others: tuple[str, ...] = ()  # how the environment of the file's rows differs, which then do not count

    @classmethod
    def open(cls, folder: Path, suites: Collection[str], packages: Mapping[str, str]) -> Results:
        """The file of this device; suites that are not measured again stay if the environment is the same."""
        here = environment(packages)
        results = cls(folder / f"{device_slug(here['device'])}.json", here, {}, {}, frozenset(suites))
        results._read()
        return results

    def _read(self) -> None:
        """Take the rows from the file that still count and are not replaced here."""
        before: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        kept = before.get("environment", self.environment)
        names = sorted(n for n in kept.keys() | self.environment.keys() if kept.get(n) != self.environment.get(n))
        if names:
            self.others = tuple(f"{name} was {kept.get(name)}, is {self.environment.get(name)}" for name in names)
            return
        if not before:
            return
        rows = {row["key"]: row for row in before["rows"] if self._counts(row["key"], row["suite"])}
        skipped = {k: why for k, why in before["skipped"].items() if self._counts(k, k.split(", ")[0])}
        self.rows = rows | {key: row for key, row in self.rows.items() if key in self.own}
        self.skipped = skipped | {key: why for key, why in self.skipped.items() if key in self.own}

    def _counts(self, key: str, suite: str) -> bool:
        return suite not in self.anew and key not in self.own

    def add(self, row: Row[Any], measured: dict[str, Any]) -> None:
        """Keep a row, and save."""
        self.own.add(row.key)
        self.skipped.pop(row.key, None)
        self.rows[row.key] = measured | {"key": row.key}
        self.save()

    def skip(self, row: Row[Any], reason: str) -> None:
        """Keep the reason why a row is not there, and save."""
        self.own.add(row.key)
        self.rows.pop(row.key, None)
        self.skipped[row.key] = reason
        self.save()

    def save(self) -> None:
        """Write the whole file, or nothing."""
        with folder_lock(self.path.parent):
            self._read()
            content = {"environment": self.environment, "rows": list(self.rows.values()), "skipped": self.skipped}
            write_whole(self.path, (json.dumps(content, indent=1) + "\n").encode())
