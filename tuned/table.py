"""What is known of which GPU: the shipped dispatch tables, and records from TUNED_TABLES in front of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import tuned.kernels
import tuned.tables
from tuned.choices import undeclared
from tuned.family import FAMILIES
from tuned.record import RecordError, load_record


@dataclasses.dataclass(frozen=True)
class Row:
    """One winner, as dispatch uses it."""

    spec: Any
    size: Any
    variant: Any
    fresh: bool  # the kernels that ship are those that were measured
    median_us: float
    source: str  # the table or record that it stands in


@dataclasses.dataclass(frozen=True)
class Table:
    """The winners of one device."""

    device: str
    properties: dict[str, Any]  # capability, multiprocessors, ... of the device that was measured; may be empty
    rows: dict[str, tuple[Row, ...]]  # family -> rows


def _fresh(digests: dict[str, str]) -> bool:
    return all(tuned.kernels.DIGESTS.get(name) == digest for name, digest in digests.items())


def _ships(family: Any, spec: Any, variant: Any) -> bool:
    return all(name in tuned.kernels.DIGESTS for name in family.kernel_names(spec, variant))


def _shipped(device: str) -> Table:
    module = importlib.import_module(f"tuned.tables.{device}")
    rows: dict[str, list[Row]] = {name: [] for name in FAMILIES}
    for name, spec, size, variant, digests, median_us in module.ROWS:
        family = FAMILIES[name]
        built = family.spec_type(**spec), family.size_type(**size), family.variant_type(**variant)
        if undeclared(built[2]) is None and _ships(family, built[0], built[2]):
            rows[name].append(Row(*built, _fresh(digests), median_us, f"tuned.tables.{device}"))
    return Table(device, module.DEVICE, {name: tuple(found) for name, found in rows.items()})


def _recorded(path: Path) -> Table:
    rows: dict[str, list[Row]] = {name: [] for name in FAMILIES}
    properties: dict[str, Any] = {}
    for w in load_record(path):
        # A record names kernels; only those that ship can be launched.
        if _ships(FAMILIES[w.family], w.spec, w.variant):
            rows[w.family].append(Row(w.spec, w.size, w.variant, _fresh(w.digests), w.median_us, str(path)))
        properties = w.environment
    return Table(path.stem, properties, {name: tuple(found) for name, found in rows.items()})


@functools.cache
def tables() -> dict[str, Table]:
    """Device -> table. A record in TUNED_TABLES replaces the shipped table of its device.

    A record that cannot be read is skipped with one warning: a model must not stop for it.
    """
    found = {m.name: _shipped(m.name) for m in pkgutil.iter_modules(tuned.tables.__path__)}
    folder = os.environ.get("TUNED_TABLES")
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        try:
            found[path.stem] = _recorded(path)
        except RecordError as error:  # noqa: PERF203 - a folder has a handful of records
            warnings.warn(f"TUNED_TABLES: {error}; this record is not used", RuntimeWarning, stacklevel=2)
    return found
