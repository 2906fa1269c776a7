"""Records: the winners measured on one device, and whether they count here.

Reading one checks every field, and never runs anything from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuned.families.choices import undeclared
from tuned.families.registry import FAMILIES
from tuned.lookup.place import TUNE

SCHEMA = 1
# The timing method of generator.measuring.bench, part of a measurement's key. Change it when that method changes.
METHOD = "cuda-graph-rotating-2xL2-median/3"  # 3: in place, inputs are made new before each replay
# The environment that a row must give, besides the digests of its kernels: field -> type.
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


MOST_CAPABILITY = 999  # 120 is 12.0
MOST = 2**63 - 1  # the largest integer allowed in a record
TEXT_CHARACTERS = 2000  # longest message and line of text: a record may hold values of any length
PLAIN = {"str": str, "bool": bool, "None": type(None)}
KEPT = "str, bool, int, finite float, None and tuple[int, ...]"
SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = SHOWN.maxlong = 80
SHOWN.maxlist = SHOWN.maxdict = SHOWN.maxtuple = 20


class RecordError(ValueError):
    """A record is malformed, truncated, foreign or from a newer version; the message says which, where and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]} ...")


@dataclasses.dataclass(frozen=True)
class Winner:
    """The best variant measured for one problem, with its environment and baselines. Times in microseconds."""

    name: str
    family: str
    spec: Any
    size: Any
    variant: Any
    digests: dict[str, str]  # kernel -> digest of the source that was measured
    median_us: float
    spread_us: float
    error: float  # worst error divided by the tolerance: at most 1
    default_us: float  # the default variant, in the same run
    copy_us: float  # out.copy_(x), in the same run
    floor_us: float  # copy_us, scaled to the bytes that must move
    eager_us: float  # eager PyTorch, in the same run
    bytes_moved: int
    trials: int  # variants measured for this problem
    environment: dict[str, Any]


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested deeper than Python can read, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested deeper than Python can read") from None


def shown(value: Any) -> str:
    """A value of a record, shortened for a message."""
    try:
        return SHOWN.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"<{type(value).__name__}>"


def build(kind: type, values: Any, where: str, *, may_lack: bool = False, least: int = -MOST) -> Any:
    """A frozen dataclass (spec, size or variant) from plain JSON values, every field checked.

    ``may_lack``: fields with a default may be missing, as in the spec of a record that is older than the field; the default is
    what such a record meant. Otherwise (in a variant) only knobs declared as newer than some records may be missing.
    ``least``: the smallest integer allowed.

    Raises:
        RecordError: a field is missing, unknown, of the wrong type, or refused by the class; ``where`` begins the message.
    """
    fields, kinds = dataclasses.fields(kind), _kinds(kind)
    names = {f.name for f in fields}
    needed = {f.name for f in fields if f.default is dataclasses.MISSING or not (may_lack or f.metadata.get("older"))}
    if not isinstance(values, dict) or not needed <= set(values) <= names:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise RecordError(f"{where} must have the fields {sorted(names)}, got {found}")
    for field in fields:
        if field.name not in values:
            continue
        found, kind_of_it = values[field.name], kinds[field.name]
        if not any(_is_of(found, one, least) for one in kind_of_it.split(" | ")):
            limits = f" from {least} to {MOST}" if type(found) is int else ""
            raise RecordError(
                f"{where}.{field.name} must be {kind_of_it}{limits}, got {shown(found)}: a record keeps {KEPT}"
            )
    lists = {
        n for n, k in kinds.items() if k.startswith("tuple") and isinstance(values.get(n), list)
    }  # JSON has no tuples
    try:
        return kind(**{name: tuple(value) if name in lists else value for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: {error}") from error


@functools.cache
def _kinds(kind: type) -> dict[str, str]:
    """Field -> its type as it is written, whether its module has ``from __future__ import annotations`` or not."""
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    return {n: t if isinstance(t, str) else t.__name__ if type(t) is type else str(t) for n, t in types.items()}


def _is_of(value: Any, kind: str, least: int) -> bool:
    if kind == "tuple[int, ...]":
        return isinstance(value, list | tuple) and all(_is_whole(n, least) for n in value)
    if kind == "int":
        return _is_whole(value, least)
    if kind == "float":
        return type(value) in (int, float) and math.isfinite(value)
    if kind in PLAIN:
        return type(value) is PLAIN[kind]
    # A field of another type, such as a Literal, takes any value that JSON keeps unchanged: no enum, dtype or list.
    return any(_is_of(value, one, least) for one in ("int", "float", *PLAIN))


def _is_whole(value: Any, least: int = -MOST) -> bool:
    return type(value) is int and least <= value <= MOST


def winner_from_json(values: Any, where: str) -> Winner:
    """A Winner from plain JSON values, as dataclasses.asdict gives them, every field checked.

    Raises:
        RecordError: a field is missing, unknown, of the wrong type, or not in the family's space.
    """
    names = {f.name for f in dataclasses.fields(Winner)}
    if not isinstance(values, dict) or set(values) != names:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise RecordError(f"{where} must have the fields {sorted(names)}, got {found}")
    family = FAMILIES.get(values["family"]) if isinstance(values["family"], str) else None
    if family is None:
        raise RecordError(f"{where}.family must be one of {sorted(FAMILIES)}, got {shown(values['family'])}")
    spec = build(family.spec_type, values["spec"], f"{where}.spec", may_lack=True)
    size = build(family.size_type, values["size"], f"{where}.size", least=1)
    variant = build(family.variant_type, values["variant"], f"{where}.variant")
    _check_environment(values["environment"], f"{where}.environment")
    # The rules are those of the GPU that the row was measured on: others may exclude what is best there.
    reason = undeclared(variant) or family.rejection(spec, size, variant, values["environment"]["capability"])
    if reason is not None:
        raise RecordError(
            f"{where}.variant is not in the space: {reason}. Take the row out and tune its problem again, or delete the file"
        )
    kernels = set(family.kernel_names(spec, variant))
    digests = values["digests"]
    if not isinstance(digests, dict) or set(digests) != kernels or not all(map(_is_line, digests.values())):
        raise RecordError(
            f"{where}.digests must name the kernels {sorted(kernels)}, each with a digest, got {shown(digests)}"
        )
    for name in ("median_us", "spread_us", "error", "default_us", "copy_us", "floor_us", "eager_us"):
        number = values[name]
        if type(number) not in (int, float) or not 0 <= number <= MOST:  # NaN fails too
            raise RecordError(f"{where}.{name} must be a number of at least 0, got {shown(number)}")
    if not values["median_us"]:
        raise RecordError(f"{where}.median_us must be a number above 0: no kernel takes no time")
    for name in ("bytes_moved", "trials"):
        if not _is_whole(values[name], 0):
            raise RecordError(f"{where}.{name} must be an integer of at least 0, got {shown(values[name])}")
    # The name is rendered into a comment of the generated table: text after a line break would be Python.
    if not _is_line(values["name"]):
        raise RecordError(f"{where}.name must be a string of one printable line, got {shown(values['name'])}")
    return Winner(**{**values, "spec": spec, "size": size, "variant": variant})


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_CHARACTERS and value.isprintable()


def _check_environment(environment: Any, where: str) -> None:
    if not isinstance(environment, dict):
        raise RecordError(f"{where} must be an object with the fields {sorted(MEASURED)}, got {shown(environment)}")
    for name, kind in MEASURED.items():
        if type(environment.get(name)) is not kind:
            raise RecordError(f"{where}.{name} must be {kind.__name__}, got {shown(environment.get(name))}")
    for name, least, most in (("multiprocessors", 1, MOST), ("capability", 0, MOST_CAPABILITY)):
        if not least <= environment[name] <= most:
            raise RecordError(f"{where}.{name} must be from {least} to {most}, got {shown(environment[name])}")
    for name, value in environment.items():
        finite = isinstance(value, float) and math.isfinite(value)
        if not (_is_line(value) or _is_whole(value, 0) or finite or value is None or isinstance(value, bool)):
            label = name if _is_line(name) else shown(name)
            raise RecordError(f"{where}.{label} must be a line of text or a number, got {shown(value)}")
    _check_device(environment["device"], f"{where}.device")


def _check_device(device: Any, where: str) -> None:
    # The device names a generated module, and is rendered into its docstring.
    if not isinstance(device, str) or re.fullmatch("[a-z0-9_]{1,200}", device) is None:
        raise RecordError(
            f"{where} must be the file name of a device, of small letters, digits and _, got {shown(device)}"
        )


def load_record(path: Path) -> list[Winner]:
    """The winners of one record file.

    Raises:
        RecordError: the file is not a record, or not one that this version can read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name} cannot be read: {error}") from error
    return winners_of(text, path.name)


def winners_of(text: str, name: str) -> list[Winner]:
    """The winners of the text of a record; ``name`` begins messages.

    Raises:
        RecordError: it is not a record, or not one that this version can read.
    """
    try:
        content = parsed(text)
    except ValueError as error:
        raise RecordError(
            f"{name} is not whole JSON ({error}): restore it from version control, or delete it and tune again"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "tuned-winners":
        raise RecordError(f'{name} is not a record of winners: "format" must be "tuned-winners"')
    if content.get("schema") != SCHEMA:
        raise RecordError(
            f"{name} has schema {shown(content.get('schema'))}, this version reads {SCHEMA}: "
            f"update this package, or tune again with {TUNE}"
        )
    if not isinstance(content.get("winners"), list):
        raise RecordError(f'{name}: "winners" must be a list')
    _check_device(content.get("device"), f'{name}: "device"')
    winners = [winner_from_json(w, f"{name}: winners[{i}]") for i, w in enumerate(content["winners"])]
    foreign = {w.environment["device"] for w in winners} - {content["device"]}
    if foreign:
        raise RecordError(f"{name} is the record of {content['device']!r} but has rows of {sorted(foreign)}")
    return winners


# A row's environment is compared with the one here. After a hard mismatch the row does not count. After a soft one it counts,
# and tuning again may find a better variant.

# Field of a measurement's environment -> its name in messages.
HARD = {"device_name": "the device", "multiprocessors": "multiprocessors", "method": "the timing method"}
SOFT = {"triton": "Triton", "torch": "torch", "driver": "the driver"}
UNKNOWN = (None, "", "unknown")


def differences(measured: Mapping[str, Any], here: Mapping[str, Any], fields: Mapping[str, str]) -> list[str]:
    """A phrase for each of ``fields`` that both sides know and that differs."""
    return [
        f"{what} was {measured[name]}, here it is {here[name]}"
        for name, what in fields.items()
        if measured.get(name) not in UNKNOWN and here.get(name) not in UNKNOWN and measured[name] != here[name]
    ]


def changed_sources(digests: Mapping[str, str], kernels: Mapping[str, str]) -> list[str]:
    """A phrase that names the kernels whose source changed since it was measured; an empty list if none did.

    Args:
        digests: kernel -> digest of the source that was measured.
        kernels: kernel -> digest of its source now.
    """
    changed = sorted(name for name, digest in digests.items() if kernels.get(name) != digest)
    return [f"the source of {', '.join(changed)} changed since it was measured"] if changed else []


def device_slug(name: str) -> str:
    """The name of a device in file names: "NVIDIA H200" -> "nvidia_h200".

    Raises:
        ValueError: the name has no letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise ValueError(f"a device name must have a letter or a digit, got {name!r}")
    return slug
