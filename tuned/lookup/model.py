"""Pick a variant by a model of its time, for calls that no row was measured for, and compare it with PyTorch's operator.

A model is a weighted sum of amounts. The family computes the amounts (tuned.families.family.Model). The weights are fitted
to measurements, and lie in tuned/tables/_models.py, which `python tune.py model` and `--render` write. Rows help the model:
near a problem that was tuned, only a variant that the model thinks much better replaces the problem's winner.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tuned.families.family import BUILT_IN, Family, brought
from tuned.lookup.caller import outside
from tuned.lookup.table import ships

Weights = Mapping[str, float]


class Pick(NamedTuple):
    """The variant that a model thinks best, with the estimated times in microseconds."""

    variant: Any
    us: float  # of all that a call runs
    library_us: float  # of PyTorch's operator
    wins: bool  # whether the variant leads PyTorch's operator by as much as the model may err


def weighted(amounts: Mapping[str, float], weights: Weights) -> float:
    """The sum of amounts times their weights; an amount without a weight takes no time."""
    return sum(amount * weights.get(name, 0.0) for name, amount in amounts.items())


@functools.cache
def _known() -> dict[str, dict[str, Weights]]:
    """Family -> model -> weights. If the module cannot be used: none, and one warning, since a user's model must not stop."""
    try:
        return dict(importlib.import_module("tuned.tables._models").MODELS)
    except Exception as error:  # noqa: BLE001 - a truncated file, or one of another version, may raise anything
        text = (
            f"tuned/tables/_models.py cannot be used ({type(error).__name__}: {error}): restore it from version control, or "
            "write it again with python tune.py --render; it is not used"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=outside())
        return {}


def weights_of(family: Family) -> dict[str, Weights] | None:
    """Model -> weights of a family; None if it has no models."""
    return _known().get(family.name) if family.model is not None and family.home == BUILT_IN else None


def library_us(family: Family, spec: Any, size: Any) -> float:
    """The estimated time of PyTorch's operator for a call in a CUDA graph, of a family that has models."""
    assert family.model is not None, f"{family.name} has no model"
    return us_of(family, *family.model.library(spec, size))


def beside_us(family: Family, spec: Any, size: Any) -> float:
    """The estimated time of what a call runs beside a variant's kernels. PyTorch's time includes it, a row's does not."""
    assert family.model is not None, f"{family.name} has no model"
    return us_of(family, "projection", family.model.projection(spec, size))


def us_of(family: Family, kind: str, amounts: Mapping[str, float]) -> float:
    """The time of some amounts by one of a family's models."""
    weights = weights_of(family)
    assert weights is not None, f"{family.name} has no model"
    return weighted(amounts, weights[kind])


def won(
    family: Family, spec: Any, size: Any, rows: Iterable[tuple[Any, Any, Any]], capability: int
) -> dict[Any, float]:
    """Variant, brought to a call's spec -> octaves to the nearest of the rows (spec, size, variant) that it won."""
    assert family.model is not None
    found: dict[Any, float] = {}
    for other, other_size, variant in rows:
        here = brought(family, variant, other, spec, capability)
        away = family.model.octaves(spec, size, other, other_size)
        found[here] = min(found.get(here, math.inf), away)
    return found


def pick(family: Family, spec: Any, size: Any, gpu: Any, rows: Iterable[tuple[Any, Any, Any]]) -> Pick | None:
    """The best variant by the model among those that ship and fit a GPU; None if there is none."""
    model, weights = family.model, weights_of(family)
    assert model is not None, f"{family.name} has no model"
    assert weights is not None
    near = won(family, spec, size, rows, gpu.capability)
    found: list[tuple[float, int, float, Any]] = []
    for variant in model.candidates(spec, size, gpu.capability, gpu.multiprocessors):
        if not ships(family, spec, variant):
            continue
        us = weighted(model.kernels(spec, size, variant), weights["kernels"])
        found.append((us * model.handicap(variant, near), len(found), us, variant))
    if not found:
        return None
    _, _, us, variant = min(found, key=lambda one: one[:2])
    us, theirs = us + beside_us(family, spec, size), library_us(family, spec, size)
    return Pick(variant, us, theirs, us <= model.margin(spec, variant) * theirs)
