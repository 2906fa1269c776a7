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
from tuned.mismatch import HARD, differences, other_text
from tuned.record import METHOD, RecordError, load_record


@dataclasses.dataclass(frozen=True)
class Row:
    """One winner, as dispatch uses it."""

    spec: Any
    size: Any
    variant: Any
    stale: str | None  # why it does not count whatever the GPU: other kernels, another way of timing; or None
    median_us: float
    source: str  # the table or record that it stands in
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)  # device and versions that it was measured with


@dataclasses.dataclass(frozen=True)
class Table:
    """The winners of one device."""

    device: str
    properties: dict[str, Any]  # capability, multiprocessors, ... of the device that was measured; may be empty
    rows: dict[str, tuple[Row, ...]]  # family -> rows


def _stale(digests: dict[str, str], measured: dict[str, Any]) -> str | None:
    found = [*other_text(digests, tuned.kernels.DIGESTS), *differences(measured, {"method": METHOD}, HARD)]
    return "; ".join(found) or None


def _ships(family: Any, spec: Any, variant: Any) -> bool:
    return all(name in tuned.kernels.DIGESTS for name in family.kernel_names(spec, variant))


def _shipped(device: str) -> Table:
    module = importlib.import_module(f"tuned.tables.{device}")
    rows: dict[str, list[Row]] = {name: [] for name in FAMILIES}
    for name, spec, size, variant, digests, median_us, index in module.ROWS:
        measured = module.MEASURED[index]
        family = FAMILIES[name]
        built = family.spec_type(**spec), family.size_type(**size), family.variant_type(**variant)
        if undeclared(built[2]) is None and _ships(family, built[0], built[2]):
            rows[name].append(Row(*built, _stale(digests, measured), median_us, f"tuned.tables.{device}", measured))
    return Table(device, module.DEVICE, {name: tuple(found) for name, found in rows.items()})


def _recorded(path: Path) -> Table:
    rows: dict[str, list[Row]] = {name: [] for name in FAMILIES}
    properties: dict[str, Any] = {}
    for w in load_record(path):
        # A record names kernels; only those that ship can be launched.
        if _ships(FAMILIES[w.family], w.spec, w.variant):
            stale = _stale(w.digests, w.environment)
            rows[w.family].append(Row(w.spec, w.size, w.variant, stale, w.median_us, str(path), w.environment))
        properties = w.environment
    return Table(path.stem, properties, {name: tuple(found) for name, found in rows.items()})


@functools.cache
def tables() -> dict[str, Table]:
    """Device -> table. A record in TUNED_TABLES replaces the shipped table of its device.

    A record that cannot be read is skipped with one warning: a model must not stop for it.
    """
    found = {m.name: _shipped(m.name) for m in pkgutil.iter_modules(tuned.tables.__path__) if m.name[0] != "_"}
    folder = os.environ.get("TUNED_TABLES")
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        try:
            found[path.stem] = _recorded(path)
        except RecordError as error:  # noqa: PERF203 - a folder has a handful of records
            warnings.warn(f"TUNED_TABLES: {error}; this record is not used", RuntimeWarning, stacklevel=2)
    return found
