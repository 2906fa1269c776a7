"""Landscapes: the time of every legal variant of a problem, measured once, so that searches can be replayed anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tuned.families.choices import choices, undeclared
from tuned.families.registry import FAMILIES

from ..disk import gzipped, unzipped, write_whole
from ..places import LANDSCAPES, PROGRAM
from ..problem import Problem
from ..rendering.structures import fresh

SCHEMA = 1
AGAIN = f"record it again, {PROGRAM} landscape, or delete it"


class LandscapeError(ValueError):
    """A file is no landscape that this version reads; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Landscape:
    """The measurements of one problem: for every legal variant its microseconds, or why it failed."""

    problem: Problem
    environment: dict[str, Any]
    digests: dict[str, str]  # kernel -> digest of the text that was measured
    copy_us: float
    floor_us: float
    times: dict[Any, float]
    failed: dict[Any, str]
    registers: dict[Any, int]

    @property
    def best_us(self) -> float:
        """The least time of all variants."""
        return min(self.times.values())

    def regret(self, variant: Any) -> float:
        """How much slower than the best a variant is, as a fraction; infinite if it failed or is unknown."""
        return self.times.get(variant, math.inf) / self.best_us - 1

    @property
    def fresh(self) -> bool:
        """Whether the templates still give the texts that were measured."""
        return fresh(self.digests)


def save(landscape: Landscape, folder: Path) -> Path:
    """Write a landscape; the same landscape always gives the same bytes."""
    problem = landscape.problem
    declared = choices(FAMILIES[problem.family].variant_type)
    content = {
        "format": "tuned-landscape",
        "schema": SCHEMA,
        "name": problem.name,
        "family": problem.family,
        "spec": dataclasses.asdict(problem.spec),
        "size": dataclasses.asdict(problem.size),
        "environment": landscape.environment,
        "digests": landscape.digests,
        "copy_us": landscape.copy_us,
        "floor_us": landscape.floor_us,
        "knobs": declared,
        # variant number in the product of the knobs -> microseconds
        "times": {_number(v, declared): round(t, 4) for v, t in landscape.times.items()},
        "failed": {_number(v, declared): reason for v, reason in landscape.failed.items()},
        "registers": {_number(v, declared): n for v, n in landscape.registers.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = problem.name.replace("/", "%2F")  # a user's problem may be called so
    path = folder / f"{name}.json.gz"
    write_whole(path, gzipped(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()))
    return path


def load(path: Path) -> Landscape:
    """Read a landscape; variants that the space no longer has are left out.

    Raises:
        LandscapeError: the file is no landscape, or one of another version.
    """
    try:
        content = unzipped(path, "tuned-landscape", SCHEMA)
    except ValueError as error:
        raise LandscapeError(str(error)) from error
    if content is None:
        raise LandscapeError(f"{path.name} is no landscape of schema {SCHEMA}: {AGAIN}")
    family = FAMILIES.get(content["family"])
    if family is None:
        raise LandscapeError(f"{path.name} is of another family: {AGAIN}")
    try:
        spec, size = family.spec_type(**content["spec"]), family.size_type(**content["size"])
    except (TypeError, ValueError) as error:  # one of a user's family, whose fields have changed since
        raise LandscapeError(f"{path.name} is of another spec or size: {AGAIN} ({error})") from error
    problem = Problem(content["name"], content["family"], spec, size)

    # Numbers of variants follow the order of declaration, but the file's keys are sorted. A newer knob had its default.
    knobs, declared = content["knobs"], choices(family.variant_type)
    if set(knobs) <= set(declared):
        knobs = {name: knobs[name] for name in declared if name in knobs}

    parts = [content[name] for name in ("times", "failed", "registers")]
    variants = _variants(list(dict.fromkeys(itertools.chain(*parts))), knobs, family.variant_type)
    named = ({variants[n]: value for n, value in part.items() if n in variants} for part in parts)
    return Landscape(
        problem, content["environment"], content["digests"], content["copy_us"], content["floor_us"], *named
    )


def load_landscapes(device: str, folder: Path = LANDSCAPES) -> list[Landscape]:
    """The landscapes of a device, by name of the problem; without those that have no time of a variant of today's space."""
    found = (load(path) for path in sorted((folder / device).glob("*.json.gz")))
    return [one for one in found if one.times]


def _number(variant: Any, declared: dict[str, Any]) -> int:
    places = [list(values).index(getattr(variant, name)) for name, values in declared.items()]
    return int(np.ravel_multi_index(places, [len(values) for values in declared.values()]))


def _variants(numbers: list[str], declared: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Number -> variant, for the variants that the space still has."""
    newer = {f.name for f in dataclasses.fields(kind) if f.metadata["older"]}  # knobs that had their defaults
    if not set(choices(kind)) - newer <= set(declared) <= set(choices(kind)):
        return {}
    # Only if some value is no choice any more is each variant checked: that takes long for thousands.
    gone = any(undeclared(kind(**{name: value})) for name, values in declared.items() for value in values)
    places = np.unravel_index(np.array(numbers, dtype=np.int64), [len(values) for values in declared.values()])
    found = {}
    for number, row in zip(numbers, np.transpose(places).tolist(), strict=True):
        chosen = zip(declared.items(), row, strict=True)
        variant = kind(**{name: values[place] for (name, values), place in chosen})
        if not (gone and undeclared(variant)):
            found[number] = variant
    return found
