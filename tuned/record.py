"""The record of what was measured on one device: read it, check every field of it, never run anything from it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from tuned.choices import undeclared
from tuned.family import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1
# How times are taken today (generator.measuring.bench): part of a measurement's key. Change it when the way of timing changes.
METHOD = "cuda-graph-rotating-2xL2-median/3"  # 3: in place, inputs are made new before each replay
# What a row must say that it was measured with, besides the digests of its kernels.
MEASURED = {
    "device": str,
    "device_name": str,
    "capability": int,
    "multiprocessors": int,
    "driver": str,
    "torch": str,
    "triton": str,
    "method": str,
}


class RecordError(ValueError):
    """A record is malformed, truncated, foreign or from a newer version; the message says which, where and what to do."""


@dataclasses.dataclass(frozen=True)
class Winner:
    """The best variant measured for one problem, with what it was measured with and against. Times in microseconds."""

    name: str
    family: str
    spec: Any
    size: Any
    variant: Any
    digests: dict[str, str]  # kernel -> digest of the text that was measured
    median_us: float
    spread_us: float
    error: float  # worst error over what rounding allows: at most 1
    default_us: float  # the default variant, in the same run
    copy_us: float  # out.copy_(x), in the same run
    floor_us: float  # that, scaled to the bytes that must move
    eager_us: float  # eager PyTorch, in the same run
    bytes_moved: int
    trials: int  # variants measured for this problem
    environment: dict[str, Any]


def winner_to_json(winner: Winner) -> dict[str, Any]:
    """Plain JSON values; the inverse of winner_from_json."""
    return dataclasses.asdict(winner)


def build(kind: type, values: Any, where: str, *, may_lack: bool = False) -> Any:
    """A frozen dataclass (spec, size or variant) from plain JSON values, every field checked.

    ``may_lack``: fields that have a default may be missing. A spec of a record that is older than a field means what
    it had then; a variant that lacks one is torn.

    Raises:
        RecordError: a field is missing, unknown, of another type or refused by the class; ``where`` begins the message.
    """
    fields = dataclasses.fields(kind)
    names = {f.name for f in fields}
    needed = {f.name for f in fields if not may_lack or f.default is dataclasses.MISSING}
    if not isinstance(values, dict) or not needed <= set(values) <= names:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise RecordError(f"{where} must have the fields {sorted(names)}, got {found}")
    for field in fields:
        if field.name not in values:
            continue
        wanted = {"str": str, "int": int, "bool": bool}.get(str(field.type))
        if wanted is not None and type(values[field.name]) is not wanted:
            raise RecordError(f"{where}.{field.name} must be {field.type}, got {values[field.name]!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: {error}") from error


def winner_from_json(values: Any, where: str) -> Winner:
    """A Winner with every field checked.

    Raises:
        RecordError: a field is missing, unknown, of another type or not allowed by the family's space.
    """
    names = {f.name for f in dataclasses.fields(Winner)}
    if not isinstance(values, dict) or set(values) != names:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise RecordError(f"{where} must have the fields {sorted(names)}, got {found}")
    family = FAMILIES.get(values["family"]) if isinstance(values["family"], str) else None
    if family is None:
        raise RecordError(f"{where}.family must be one of {sorted(FAMILIES)}, got {values['family']!r}")
    spec = build(family.spec_type, values["spec"], f"{where}.spec", may_lack=True)
    size = build(family.size_type, values["size"], f"{where}.size")
    variant = build(family.variant_type, values["variant"], f"{where}.variant")
    reason = undeclared(variant) or family.rejection(spec, size, variant)
    if reason is not None:
        raise RecordError(f"{where}.variant is not in the space: {reason}")
    kernels = set(family.kernel_names(spec, variant))
    if not isinstance(values["digests"], dict) or set(values["digests"]) != kernels:
        raise RecordError(f"{where}.digests must name the kernels {sorted(kernels)}, got {values['digests']!r}")
    for name in ("median_us", "spread_us", "error", "default_us", "copy_us", "floor_us", "eager_us"):
        number = values[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise RecordError(f"{where}.{name} must be a number of at least 0, got {number!r}")
    for name in ("bytes_moved", "trials"):
        if type(values[name]) is not int:
            raise RecordError(f"{where}.{name} must be an integer, got {values[name]!r}")
    _check_environment(values["environment"], f"{where}.environment")
    if not isinstance(values["name"], str):
        raise RecordError(f"{where}.name must be a string, got {values['name']!r}")
    return Winner(**{**values, "spec": spec, "size": size, "variant": variant})


def _check_environment(environment: Any, where: str) -> None:
    if not isinstance(environment, dict):
        raise RecordError(f"{where} must be an object with the fields {sorted(MEASURED)}, got {environment!r}")
    for name, kind in MEASURED.items():
        if type(environment.get(name)) is not kind:
            raise RecordError(f"{where}.{name} must be {kind.__name__}, got {environment.get(name)!r}")


def load_record(path: Path) -> list[Winner]:
    """The winners of one record file.

    Raises:
        RecordError: the file is not a record that this version can read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path.name} is not whole JSON ({error}): restore it from version control, or delete it and tune again"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "tuned-winners":
        raise RecordError(f'{path.name} is not a record of winners: "format" must be "tuned-winners"')
    if content.get("schema") != SCHEMA:
        raise RecordError(
            f"{path.name} has schema {content.get('schema')!r}, this version reads {SCHEMA}: "
            "update this package, or tune again with python tune.py"
        )
    if not isinstance(content.get("winners"), list):
        raise RecordError(f'{path.name}: "winners" must be a list')
    winners = [winner_from_json(w, f"{path.name}: winners[{i}]") for i, w in enumerate(content["winners"])]
    foreign = {w.environment["device"] for w in winners} - {content.get("device")}
    if foreign:
        raise RecordError(f"{path.name} is the record of {content.get('device')!r} but has rows of {sorted(foreign)}")
    return winners
