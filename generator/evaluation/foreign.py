"""Landscapes of others' kernels: Kernel Tuner's cache of a space that it measured whole, on which searches are replayed."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuned.families.choices import one_of

from ..problem import Problem
from ..searching.pool import Pool
from ..searching.space import Space
from ..storage.landscape import Landscape, LandscapeError

FAILED_MS = 1e20  # earlier versions of Kernel Tuner write this as the time of a failed variant
CAPABILITY = 90  # without meaning here: nothing is compiled


@dataclasses.dataclass(frozen=True)
class Foreign(Landscape):
    """A landscape of no family, with its space and the GPU time that measuring it took."""

    space: Space
    gpu_s: dict[Any, float]  # of all timed launches of a variant together, without warming and compiling


def load_foreign(path: Path, name: str | None = None) -> Foreign:
    """Read a cache file of Kernel Tuner, gzipped or not. Parameters with one value are no knobs; numbers are ordered.

    A foreign space has no default. The search begins with the variant that ran and whose knobs are nearest to the
    middle of their choices.

    Raises:
        LandscapeError: the file is no such cache.
    """
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        return _foreign(content, name or _bare(path.name))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise LandscapeError(
            f"{path} cannot be read as a cache file of Kernel Tuner, which is JSON with tune_params and cache: {what}"
        ) from error


def load_folder(folder: Path) -> list[Foreign]:
    """Every cache file of a folder and of the folders in it, by name; copies in the format T4, NAME_T4.json, are skipped.

    Raises:
        LandscapeError: there are no such files, or one of them is no cache of Kernel Tuner.
    """
    endings = (".json", ".json.gz")
    twice = tuple(f"_T4{ending}" for ending in endings)
    paths = sorted(p for p in folder.rglob("*") if p.name.endswith(endings) and not p.name.endswith(twice))
    if not paths:
        raise LandscapeError(f"there are no .json and .json.gz files in {folder}: --foreign names a folder of them")
    return [load_foreign(path, _bare(path.relative_to(folder).as_posix())) for path in paths]


def _bare(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".json")


def _foreign(content: Any, name: str) -> Foreign:
    rows = list(content["cache"].values())
    found = {knob: _ranked({row[knob] for row in rows}) for knob in content["tune_params"]}
    knobs = {knob: values for knob, values in found.items() if len(values) > 1}
    places = {knob: {value: i for i, value in enumerate(values)} for knob, values in knobs.items()}
    rows.sort(key=lambda row: [places[knob][row[knob]] for knob in knobs])
    if not knobs:
        raise ValueError("no parameter has two values")

    fields = [(knob, Any, one_of(*values, default=values[0])) for knob, values in knobs.items()]
    # A foreign variant is as simple as any other.
    kind = dataclasses.make_dataclass("ForeignVariant", fields, frozen=True, namespace={"simplicity": 0})
    times: dict[Any, float] = {}
    failed: dict[Any, str] = {}
    gpu_s: dict[Any, float] = {}
    for row in rows:
        variant, ms = kind(**{knob: row[knob] for knob in knobs}), row["time"]
        if isinstance(ms, str) or ms >= FAILED_MS:
            failed[variant] = str(ms)
        elif not 0 < ms < math.inf:
            raise ValueError(f"a time must be positive, got {ms}")
        else:
            times[variant] = 1e3 * ms
            gpu_s[variant] = sum(row.get("times", [ms])) / 1e3
    if len(times) + len(failed) < len(rows):
        raise ValueError("two rows have the same parameters")
    if not times:
        raise ValueError("no row of it has a time")

    def from_middle(variant: Any) -> float:
        return sum(abs(places[k][getattr(variant, k)] / (len(values) - 1) - 0.5) for k, values in knobs.items())

    pool = Pool(math.prod(map(len, knobs.values())), tuple(kind(**{k: row[k] for k in knobs}) for row in rows), {})
    space = Space(kind, pool, min(times, key=from_middle), lambda _: (), lambda _: {})
    return Foreign(
        problem=Problem(name, "foreign", None, None),
        environment={"device": content.get("device_name", ""), "capability": CAPABILITY, "multiprocessors": None},
        digests={},
        copy_us=0.0,
        floor_us=0.0,
        times=times,
        failed=failed,
        registers={},
        space=space,
        gpu_s=gpu_s,
    )


def _ranked(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values of a parameter, sorted."""
    kinds = collections.Counter("text" if isinstance(v, str) else "number" for v in values)
    if len(kinds) > 1:
        raise ValueError(f"a parameter has numbers and texts among its values: {list(values)}")
    return tuple(sorted(values))
