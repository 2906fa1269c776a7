"""The dispatch tables: those that the package ships, and the records in TUNED_TABLES, which come first."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tuned.tables
from tuned.families.choices import undeclared
from tuned.families.family import BUILT_IN, Family
from tuned.families.registry import FAMILIES
from tuned.lookup.mismatch import HARD, changed_sources, differences
from tuned.lookup.record import METHOD, RecordError, load_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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


@dataclasses.dataclass(frozen=True)
class Table:
    """The winners of one device."""

    device: str
    properties: dict[str, Any]  # capability, multiprocessors, ... of the measured device; may be empty
    rows: dict[str, tuple[Row, ...]]  # family -> rows


def digests_of(family: Family) -> Mapping[str, str]:
    """Kernel -> digest of the kernels that a family has; none where nothing was rendered for it yet."""
    name = f"{family.home}.kernels"
    try:
        return importlib.import_module(name).DIGESTS  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return {}


def _stale(kernels: Mapping[str, str], digests: dict[str, str], measured: dict[str, Any]) -> str | None:
    found = [*changed_sources(digests, kernels), *differences(measured, {"method": METHOD}, HARD)]
    return "; ".join(found) or None


def _ships(family: Family, spec: Any, variant: Any) -> bool:
    return all(name in digests_of(family) for name in family.kernel_names(spec, variant))


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
    rows: dict[str, list[Row]] = {name: [] for name in families}
    for name, spec, size, variant, digests, median_us, index in module.ROWS:
        measured = module.MEASURED[index]
        family = families[name]
        built = family.spec_type(**spec), family.size_type(**size), family.variant_type(**variant)
        if undeclared(built[2]) is None and _ships(family, built[0], built[2]):
            stale = _stale(digests_of(family), digests, measured)
            rows[name].append(Row(*built, stale, median_us, f"{home}.tables.{device}", measured))
    return Table(device, module.DEVICE, {name: tuple(found) for name, found in rows.items()})


def _recorded(path: Path) -> Table:
    rows: dict[str, list[Row]] = {name: [] for name in FAMILIES}
    properties: dict[str, Any] = {}
    for w in load_record(path):
        # A record may name kernels that the package does not ship, which cannot be launched.
        family = FAMILIES[w.family]
        if _ships(family, w.spec, w.variant):
            stale = _stale(digests_of(family), w.digests, w.environment)
            rows[w.family].append(Row(w.spec, w.size, w.variant, stale, w.median_us, str(path), w.environment))
        properties = w.environment
    return Table(path.stem, properties, {name: tuple(found) for name, found in rows.items()})


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
            "python tune.py --out wrote, or none"
        ) from error


@functools.cache
def tables() -> dict[str, Table]:
    """Device -> table. A record in TUNED_TABLES replaces the shipped table of its device.

    A table or record that cannot be read is skipped with a warning: a model must not stop because of it.
    """
    return _collected(lambda error: warnings.warn(f"{error}; it is not used", RuntimeWarning, stacklevel=5))


@functools.cache
def tables_of(family: Family) -> dict[str, Table]:
    """``tables`` of a family from outside: those in its home, none where it was never tuned."""
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
            warnings.warn(f"{error}; it is not used", RuntimeWarning, stacklevel=5)
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
    if FAMILIES.outside is not None:  # it has tables of its own
        return found

    def put(device: str, load: Callable[[Any], Table], source: Any) -> None:
        try:
            found[device] = load(source)
        except RecordError as error:
            trouble(error)

    for module in pkgutil.iter_modules(tuned.tables.__path__):
        if module.name[0] != "_":
            put(module.name, _shipped, module.name)
    if folder := os.environ.get("TUNED_TABLES"):
        try:
            paths = folder_of_records(folder)
        except RecordError as error:
            trouble(RecordError(f"TUNED_TABLES: {error}"))
        else:
            for path in paths:
                put(path.stem, _recorded, path)
    return found
