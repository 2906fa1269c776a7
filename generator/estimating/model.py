"""A model of how much slower than the best a variant is, fitted to landscapes: ridge regression on levels.

All columns are 0 or 1. They are the levels of every knob and of pairs a thread; the products of every two of these;
each level times each kind of call (small, packed, in place, with a tail, with sines); and the levels of waves, programs
a processor, resident threads, registers, bytes in flight and row width, alone and times small. The value is log(time /
best - 1 + WARP), as in the search's model. Each landscape weighs the same. RIDGE was chosen with each problem left out
in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tuned.families.choices import choices

from ..families.amounts import Work
from ..measuring.compile import Resources
from ..problem import Problem
from ..searching.sampler import WARP
from ..storage.landscape import Landscape, load_landscapes
from ..workload import WORKLOADS
from .targets import TARGETS, Target, registers_of, resident

DEVICE = "nvidia_h200"  # the device that landscapes were recorded on
RIDGE = 0.03  # penalty for each landscape
WORST = 1.0  # twice the time of the best: variants slower than that all count as this slow
SMALL_BYTES = 8e6  # a call that moves fewer bytes takes no longer than a launch or two
PAIRS = (0, 1, 2, 3, 4, 5)  # edges of the levels of pairs a thread, in octaves


@dataclasses.dataclass(frozen=True)
class Model:
    """Weights of the columns, fitted."""

    weights: np.ndarray

    def excess(
        self, problem: Problem, target: Target, rows: Sequence[tuple[Any, Work, Resources | None]]
    ) -> np.ndarray:
        """How much slower than the best each (variant, work, resources) is estimated to be, as a fraction."""
        values = _columns(problem, target, rows) @ self.weights
        return np.maximum(np.exp(values) - WARP, 0.0)  # type: ignore[no-any-return]


def _level(value: float, edges: Sequence[float]) -> list[float]:
    place = sum(value >= edge for edge in edges)
    return [float(place == i) for i in range(len(edges) + 1)]


def _on_device(work: Work, target: Target, need: Resources | None) -> list[float]:
    """The levels of a launch's amounts on a device; all edges are in octaves, except those of registers."""
    here = resident(work, target, need)
    alone = work.programs / target.processors
    return [
        *_level(math.log2(alone / here), (-3, -2, -1, 0, 1, 2, 4, 6)),  # waves
        *_level(math.log2(alone), (-2, -1, 0, 1, 2, 3, 5, 7)),  # programs a processor
        *_level(math.log2(here * work.warps * target.warp), (8, 9, 10, 10.8)),  # resident threads
        *_level(registers_of(work, need), (24, 32, 40, 48, 64, 80, 96, 128)),
        *_level(math.log2(min(here, alone) * work.in_flight_bytes), (10, 12, 13, 14, 15, 16, 17)),
        *_level(math.log2(work.row_bytes), (4, 5, 6, 7, 8, 9)),
    ]


def _columns(problem: Problem, target: Target, rows: Sequence[tuple[Any, Work, Resources | None]]) -> np.ndarray:
    """[rows, columns]."""
    spec = problem.spec
    kinds = [getattr(spec, name, False) for name in ("packed", "inplace", "copies_tail", "computes_sincos")]
    small = rows[0][1].memory_bytes < SMALL_BYTES
    knobs = choices(type(rows[0][0])).items()
    levels = [np.array([[getattr(v, name) == value for value in values] for v, *_ in rows]) for name, values in knobs]
    levels.append(np.array([_level(math.log2(work.pairs_per_thread), PAIRS) for _, work, _ in rows]))
    every = np.concatenate(levels, axis=1)
    pairs = [(a[:, :, None] * b[:, None, :]).reshape(len(rows), -1) for a, b in itertools.combinations(levels, 2)]
    kind = [1.0, float(small), *map(float, kinds)]
    place = np.array([_on_device(work, target, need) for _, work, need in rows])
    return np.concatenate(
        [np.ones((len(rows), 1)), *(every * k for k in kind), place, place * float(small), *pairs], axis=1
    )


def normal_equations(landscape: Landscape, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """The two sides of the normal equations of one landscape, measured on ``target``."""
    problem = landscape.problem
    rows = [
        (v, WORKLOADS[problem.family].work(problem, v)[0], Resources(landscape.registers[v], 0, 0, ""))
        for v in landscape.times
    ]
    times = np.array(list(landscape.times.values()))
    x = _columns(problem, target, rows)
    y = np.log(np.minimum(times / times.min() - 1, WORST) + WARP)
    return x.T @ x / len(times), x.T @ y / len(times)


@functools.cache
def _all_equations(family: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Problem -> its normal equations, of every landscape of a family."""
    found = [x for x in load_landscapes(DEVICE) if x.problem.family == family]
    return {x.problem.name: normal_equations(x, TARGETS[DEVICE]) for x in found}


@functools.cache
def fitted(family: str, without: str = "") -> Model | None:
    """The model fitted to all landscapes of a family, or to all except problem ``without``'s; None if there are none."""
    equations = [sides for name, sides in _all_equations(family).items() if name != without]
    if not equations:
        return None
    left, right = (np.sum([sides[i] for sides in equations], axis=0) for i in (0, 1))
    penalty = np.full(len(right), RIDGE * len(equations))
    penalty[0] = 1e-9  # the constant column is not penalised
    return Model(np.linalg.solve(left + np.diag(penalty), right))
