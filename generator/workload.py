"""A family as tuning sees it: a record of functions beside tuned.families.family.Family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import generator.families.gru
import generator.families.gru_cell
import generator.families.linear_cat
import generator.families.rope
from generator.problem import Problem
from tuned.families.family import Family
from tuned.families.registry import FAMILIES

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Workload:
    """How to make, check, time and count the calls of one family."""

    family: Family
    inputs: Callable[..., Any]  # (spec, size, device, seed) -> call
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (spec, call) -> result, bound, float64 both
    eager: Callable[..., Callable[[], Any]]  # (spec, call) -> the baseline, ready to run
    bytes_moved: Callable[..., int]  # (spec, size) -> what must move
    tensor_bytes: Callable[..., int]  # (spec, size) -> one set of inputs and outputs
    features: Callable[[Any], tuple[int, ...]]  # (variant) -> levels for a model of the time
    tile: Callable[[Any, Any], tuple[int, int]]  # (spec, variant) -> rows and features that a program takes at a time
    problems: Callable[[], Iterator[Problem]]  # the default ones, most common first


def _workload(name: str, module: Any) -> Workload:
    names = [f.name for f in dataclasses.fields(Workload) if f.name != "family"]
    return Workload(family=FAMILIES[name], **{n: getattr(module, n) for n in names})


WORKLOADS = {
    "rope": _workload("rope", generator.families.rope),
    "gru_cell": _workload("gru_cell", generator.families.gru_cell),
    "linear_cat": _workload("linear_cat", generator.families.linear_cat),
    "gru": _workload("gru", generator.families.gru),
}


def default_problems(family: str | None = None) -> list[Problem]:
    """Every default problem, or those of one family."""
    return [p for name, w in WORKLOADS.items() if family in (None, name) for p in w.problems()]
