"""A family as tuning sees it: a record of functions beside tuned.families.family.Family, found in the folder of the family."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from tuned.families.family import Family
from tuned.families.launch import Step
from tuned.families.outside import described, load
from tuned.families.registry import FAMILIES
from tuned.lookup.record import Winner

from . import families
from .families import outside
from .families.amounts import Work
from .families.text import Shown, Text
from .places import OUTSIDE
from .problem import Problem

# Module of a family's folder -> the names that it must define, and the names that it may define.
PARTS = {
    "problems": (("problems",), ("drawn",)),
    "shapes": ((), ("any_shape",)),
    "reference": (
        ("inputs", "reference", "eager", "bytes_moved", "tile", "work"),
        ("tensor_bytes", "small", "interpreted", "features"),
    ),
    "texts": (("texts", "wrapper"), ("shown_size", "group")),
}


def _few(size: Any, _variant: Any) -> Any:
    return dataclasses.replace(size, batch=min(size.batch, 3))


def _octaves(tile: Callable[[Any, Any], tuple[int, int]], variant: Any) -> tuple[int, ...]:
    elements = math.prod(tile(None, variant))
    return round(math.log2(elements)), round(math.log2(elements / variant.num_warps))


@dataclasses.dataclass(frozen=True)
class Workload:
    """How to make, check, time, count and show the calls of one family."""

    family: Family
    title: str
    groups: tuple[str, ...]  # of calls, in a chart
    representative: tuple[str, ...]  # problems
    inputs: Callable[..., Any]  # (spec, size, device, seed) -> call
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (spec, call) -> result, bound, float64 both
    eager: Callable[..., Callable[[], Any]]  # (spec, call) -> the baseline, ready to run
    bytes_moved: Callable[..., int]  # (spec, size) -> bytes that must move
    tensor_bytes: Callable[..., int]  # (spec, size) -> bytes of one set of inputs and outputs; default: bytes_moved
    features: Callable[
        [Any], tuple[int, ...]
    ]  # (variant) -> levels for a model of the time; default: log2 of the elements of a tile, and of these a warp
    tile: Callable[[Any, Any], tuple[int, int]]  # (spec, variant) -> rows and features that a program takes at a time
    work: Callable[[Problem, Any], tuple[Work, ...]]  # (problem, variant) -> the work of its launches, for the estimate
    problems: Callable[[], Iterator[Problem]]  # the default problems, most common first
    texts: Callable[[], Iterator[Text]]  # every text of its kernels
    wrapper: Callable[[Winner, Shown], str]  # the function of a shown winner
    small: Callable[[Any, Any], Any] = _few  # (size, variant) -> a size for the interpreter
    interpreted: Callable[..., Iterator[Step]] | None = None  # (spec, variant, call) -> steps, if not family.launches
    shown_size: Callable[[Any], Any] | None = None  # (size) -> the size that a shown winner is made for, if another
    group: Callable[[Any], str] | None = None  # (spec) -> one of ``groups``, if there are several
    drawn: Callable[[random.Random], Problem] | None = None  # a problem of any shape, to time the operator it replaces
    any_shape: Callable[[random.Random], Problem] | None = None  # a problem of any shape and spec, for unmeasured cards


def _workload(package: ModuleType) -> Workload:
    answers: dict[str, Any] = {}
    for part, (must, may) in PARTS.items():
        module = importlib.import_module(f"{package.__name__}.{part}")
        answers |= {n: getattr(module, n) for n in must} | {n: getattr(module, n) for n in may if hasattr(module, n)}
    answers.setdefault("tensor_bytes", answers["bytes_moved"])
    answers.setdefault("features", functools.partial(_octaves, answers["tile"]))
    name = package.__name__.rpartition(".")[2]
    return Workload(FAMILIES[name], package.TITLE, package.GROUPS, package.REPRESENTATIVE, **answers)


def _packages() -> list[ModuleType]:
    """The folders of families, in the order of their ranks."""
    found = pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
    return sorted((importlib.import_module(m.name) for m in found if m.ispkg), key=lambda package: package.RANK)


def _outside(name: str) -> Workload:
    """The family from outside that this process tunes: no other family exists in this process."""
    module = load(name)
    family = described(module)
    FAMILIES.only(family)
    found = outside.answers(module, family, (name for must, may in PARTS.values() for name in (*must, *may)))
    return Workload(family, **({"features": functools.partial(_octaves, found["tile"])} | found))


_FOUND = [_outside(OUTSIDE)] if OUTSIDE else map(_workload, _packages())
WORKLOADS = {workload.family.name: workload for workload in _FOUND}


def default_variant(of: Problem | Winner, capability: int = 90) -> Any:
    """The untuned variant of a problem or of a winner's problem, on a card of a compute capability (90 is 9.0)."""
    family = WORKLOADS[of.family].family
    return family.fit(family.default_variant(of.spec, of.size), of.spec, capability)


def default_problems(family: str | None = None) -> list[Problem]:
    """Every default problem, or those of one family."""
    return [p for name in WORKLOADS if family in (None, name) for p in WORKLOADS[name].problems()]
