"""Samples: times of variants, and of PyTorch's operators, on one device; models are fitted to them.

There is one file for each device and family. Landscapes hold every legal variant of a problem, samples only what was
measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tuned.families.registry import FAMILIES

from ..disk import gzipped, unzipped, write_whole
from ..places import PROGRAM, SAMPLES
from ..problem import Problem

SCHEMA = 1


class SamplesError(ValueError):
    """A file holds no samples that this version reads; the message says which and what to do."""


@dataclasses.dataclass(frozen=True)
class Replaced:
    """The time of PyTorch's operator on one problem, in a CUDA graph. Microseconds."""

    spec: Any
    size: Any
    us: float
    projection_us: float  # of the product of the input alone; 0 if it was not measured


@dataclasses.dataclass(frozen=True)
class Samples:
    """What was measured of a family on one device."""

    family: str
    environment: dict[str, Any]
    times: dict[Problem, dict[Any, float]]  # microseconds of variants
    replaced: tuple[Replaced, ...]


def path_of(device: str, family: str, folder: Path = SAMPLES) -> Path:
    """The file of a device and a family."""
    return folder / device / f"{family}.json.gz"


def save(samples: Samples, folder: Path = SAMPLES) -> Path:
    """Write samples; the same samples always give the same bytes."""
    content = {
        "format": "tuned-samples",
        "schema": SCHEMA,
        "family": samples.family,
        "environment": samples.environment,
        "problems": [
            {
                "name": p.name,
                "spec": dataclasses.asdict(p.spec),
                "size": dataclasses.asdict(p.size),
                "times": [[dataclasses.asdict(v), round(us, 3)] for v, us in times.items()],
            }
            for p, times in samples.times.items()
        ],
        "replaced": [dataclasses.asdict(r) for r in samples.replaced],
    }
    path = path_of(samples.environment["device"], samples.family, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    write_whole(path, gzipped(text.encode()))
    return path


def load(path: Path) -> Samples:
    """Read samples; a knob that is newer than them had its default.

    Raises:
        SamplesError: the file holds no samples, or samples of another version.
    """
    try:
        content = unzipped(path, "tuned-samples", SCHEMA)
    except ValueError as error:
        raise SamplesError(str(error)) from error
    if content is None:
        raise SamplesError(f"{path} holds no samples of schema {SCHEMA}: take them again, {PROGRAM} model")
    family = FAMILIES[content["family"]]

    def size_of(values: dict[str, Any]) -> tuple[Any, Any]:
        return family.spec_type(**values["spec"]), family.size_type(**values["size"])

    return Samples(
        content["family"],
        content["environment"],
        {
            Problem(p["name"], content["family"], *size_of(p)): {
                family.variant_type(**knobs): us for knobs, us in p["times"]
            }
            for p in content["problems"]
        },
        tuple(Replaced(*size_of(r), r["us"], r["projection_us"]) for r in content["replaced"]),
    )


def load_all(folder: Path = SAMPLES) -> list[Samples]:
    """Every file of samples, in the order of their names."""
    return [load(path) for path in sorted(folder.glob("*/*.json.gz"))]
