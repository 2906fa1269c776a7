"""The dispatch tables: those that the package ships, and the records in TUNED_TABLES, which come first."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tuned.tables
from tuned.families.choices import undeclared
from tuned.families.family import BUILT_IN, Family
from tuned.families.registry import FAMILIES
from tuned.lookup.caller import outside
from tuned.lookup.place import TUNE, expanded, own_records
from tuned.lookup.record import HARD, METHOD, RecordError, changed_sources, differences, load_record


@dataclasses.dataclass(frozen=True)
class Row:
    """One winner, as dispatch uses it."""

    spec: Any
    size: Any
    variant: Any
    stale: str | None  # why it does not count on any GPU (changed kernels, another timing method), or None
    median_us: float
    source: str  # the table or record that it comes from
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)  # device and versions of the measurement
    eager_us: float = 0.0  # eager PyTorch, in a CUDA graph too; 0 if not known


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The winners of one device. A table is equal to itself alone, so caches can have it in their keys."""

    device: str
    properties: dict[str, Any]  # capability, multiprocessors, ... of the measured device; may be empty
    rows: dict[str, tuple[Row, ...]]  # family -> rows


def digests_of(family: Family) -> Mapping[str, str]:
    """Kernel -> digest, of a family's kernels; empty if nothing was rendered for the family yet."""
    name = f"{family.home}.kernels"
    try:
        return importlib.import_module(name).DIGESTS  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return {}


def ships(family: Family, spec: Any, variant: Any) -> bool:
    """Whether the family's home has all kernels that a variant launches."""
    digests = digests_of(family)
    return all(name in digests for name in family.kernel_names(spec, variant))


def _shipped(device: str, families: Mapping[str, Family] = FAMILIES, home: str = BUILT_IN) -> Table:
    """The generated table of a device, of the families of one home.

    Raises:
        RecordError: the module is truncated, or not what this version renders from a record.
    """
    try:
        return _imported(device, families, home)
    except Exception as error:
        folder = home if home == BUILT_IN else sys.modules[home].__path__[0]
        raise RecordError(
            f"{folder}/tables/{device}.py cannot be used ({type(error).__name__}: {error}): restore it from version control, "
            "or write it again with python tune.py --render"
        ) from error


def _imported(device: str, families: Mapping[str, Family], home: str) -> Table:
    module = importlib.import_module(f"{home}.tables.{device}")
    winners = []
    for name, spec, size, variant, digests, median_us, eager_us, index in module.ROWS:
        family = families[name]
        built = family.spec_type(**spec), family.size_type(**size), family.variant_type(**variant)
        winners.append((name, *built, digests, median_us, eager_us, module.MEASURED[index]))
    return _table(device, module.DEVICE, f"{home}.tables.{device}", winners, families)


def _recorded(path: Path) -> Table:
    winners = load_record(path)
    # All rows of a record are of one device.
    if winners and (device := winners[0].environment["device"]) != path.stem:
        raise RecordError(
            f"{path.name} must have the name of its device, {device!r}, by which a record is found: rename it to {device}.json"
        )
    properties = winners[-1].environment if winners else {}
    rows = ((w.family, w.spec, w.size, w.variant, w.digests, w.median_us, w.eager_us, w.environment) for w in winners)
    return _table(path.stem, properties, str(path), rows)


def before(first: Table, other: Table | None) -> Table:
    """A table with the rows of another behind its own, except those whose spec and size it has itself."""
    if other is None:
        return first
    rows = {}
    for family, own in first.rows.items():
        measured = {(row.spec, row.size) for row in own}
        rest = [row for row in other.rows.get(family, ()) if (row.spec, row.size) not in measured]
        rows[family] = (*own, *rest)
    return dataclasses.replace(first, rows=rows)


def _table(
    device: str,
    properties: dict[str, Any],
    source: str,
    winners: Iterable[tuple[Any, ...]],
    families: Mapping[str, Family] = FAMILIES,
) -> Table:
    """The table of winners: family, spec, size, variant, digests, median_us, eager_us, environment."""
    rows: dict[str, list[Row]] = {name: [] for name in families}
    for name, spec, size, variant, digests, median_us, eager_us, measured in winners:
        # A record may name kernels that the package does not ship, which cannot be launched.
        family = families[name]
        if undeclared(variant) is None and ships(family, spec, variant):
            changed = changed_sources(digests, digests_of(family))
            stale = "; ".join([*changed, *differences(measured, {"method": METHOD}, HARD)]) or None
            rows[name].append(Row(spec, size, variant, stale, median_us, source, measured, eager_us))
    return Table(device, properties, {name: tuple(own) for name, own in rows.items()})


def folder_of_records(name: str | Path) -> list[Path]:
    """The records in a folder.

    Raises:
        RecordError: it is not a folder, or cannot be read.
    """
    try:
        return sorted(path for path in Path(name).iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise RecordError(
            f"a folder of records must be a readable folder, got {str(name)!r} ({error}): name the folder that "
            f"{TUNE} --out wrote, or none"
        ) from error


@functools.cache
def tables() -> dict[str, Table]:
    """Device -> table. A user's own record comes before the shipped table of its device; one in TUNED_TABLES replaces both.

    A table or record that cannot be read is skipped with a warning: a model must not stop because of it.
    """
    return _collected(_unused)


def _unused(error: RecordError) -> None:
    warnings.warn(f"{error}; it is not used", RuntimeWarning, stacklevel=outside())


@functools.cache
def tables_of(family: Family) -> dict[str, Table]:
    """``tables`` of a family from outside: the tables in its home, none if it was never tuned."""
    try:
        package = importlib.import_module(f"{family.home}.tables")
    except ModuleNotFoundError as error:
        if error.name != f"{family.home}.tables":
            raise
        return {}
    found: dict[str, Table] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name[0] == "_":
            continue
        try:
            found[module.name] = _shipped(module.name, {family.name: family}, family.home)
        except RecordError as error:
            _unused(error)
    return found


def tables_or_error() -> dict[str, Table]:
    """``tables``, for tools that report on them.

    Raises:
        RecordError: a table or record cannot be read.
    """

    def refuse(error: RecordError) -> None:
        raise error

    return _collected(refuse)


def _collected(trouble: Callable[[RecordError], None]) -> dict[str, Table]:
    found: dict[str, Table] = {}
    if FAMILIES.outside is not None:  # a family from outside has tables of its own
        return found

    def put(device: str, load: Callable[[Any], Table], source: Any) -> None:
        try:
            found[device] = load(source)
        except RecordError as error:
            trouble(error)

    for module in pkgutil.iter_modules(tuned.tables.__path__):
        if module.name[0] != "_":
            put(module.name, _shipped, module.name)
    # Not Path.is_dir(), which raises where a home may not be entered, as in a container whose user is not the owner of HOME.
    if (own := own_records()) is not None and os.path.isdir(own):  # noqa: PTH112
        try:
            paths = folder_of_records(own)
        except RecordError as error:
            trouble(error)
        else:
            for path in paths:
                put(path.stem, lambda path: before(_recorded(path), found.get(path.stem)), path)
    if folder := os.environ.get("TUNED_TABLES"):
        try:
            paths = folder_of_records(expanded(folder))
        except RecordError as error:
            trouble(RecordError(f"TUNED_TABLES: {error}"))
        else:
            for path in paths:
                put(path.stem, _recorded, path)
    return found
