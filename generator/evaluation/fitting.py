"""Fit the models of tuned.lookup.model to samples, and report the regret of their picks on problems that were left out."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tuned.lookup.model import Weights, weighted, won
from tuned.lookup.table import tables

from ..problem import Problem
from ..storage.samples import Samples, load_all
from ..workload import WORKLOADS

FIGURES = 4  # significant digits of a weight: so few are the same on every machine
OVER = 6.0  # how much worse it is to predict too long a time for PyTorch's operator: then a kernel is chosen that loses
ROUNDS = 60  # of fitting, each with weights from the errors of the round before
PARTS = 11  # of the hidden sizes; one part is left out at a time
LEAST_CHOICE = 4  # measured kernels that a problem must have for a regret


def least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The least-squares solution without a negative weight: the active sets of Lawson and Hanson (1974), chapter 23."""
    count = rows.shape[1]
    q, rows = np.linalg.qr(rows)  # reduces ten thousand rows to a square matrix once: a fit solves it tens of times
    wanted = q.T @ wanted
    inside = np.zeros(count, bool)
    found = np.zeros(count)
    slack = 1e-10 * np.abs(rows.T @ wanted).max()
    for _ in range(3 * count):
        slope = np.where(inside, -np.inf, rows.T @ (wanted - rows @ found))
        if slope.max() <= slack:
            break
        inside[slope.argmax()] = True
        while True:
            tried = np.zeros(count)
            tried[inside] = np.linalg.lstsq(rows[:, inside], wanted, rcond=None)[0]
            out = inside & (tried <= 0)
            if not out.any():
                break
            found = found + (found[out] / (found[out] - tried[out])).min() * (tried - found)
            inside &= found > 1e-15 * max(found.max(), 1e-300)
        found = tried
    return found


def _fitted(amounts: Sequence[dict[str, float]], us: Sequence[float], trust: Sequence[float], over: float) -> Weights:
    """Weights of amounts that minimise relative errors; ``trust`` says how much each row counts."""
    names = sorted({name for row in amounts for name in row})
    times, weight = np.array(us), np.array(trust)
    rows = np.array([[row.get(name, 0.0) for name in names] for row in amounts]) / times[:, None]
    scale = np.abs(rows).max(0)
    scale[scale == 0] = 1.0
    each = weight
    for _ in range(ROUNDS if over > 1 else 1):
        found = least_squares(rows / scale * each[:, None], each)
        each = weight * np.where(rows / scale @ found > 1, np.sqrt(over), 1.0)
    return {n: float(f"{x:.{FIGURES}g}") for n, x in zip(names, found / scale, strict=True) if x > 0}


@functools.cache  # the same for each part that is left out
def _amounts(family: str, spec: Any, size: Any, variant: Any) -> dict[str, float]:
    model = WORKLOADS[family].family.model
    assert model is not None, f"{family} has no model"
    return model.kernels(spec, size, variant)


def fit(of: Sequence[Samples]) -> dict[str, Weights]:
    """Model -> its weights, from all samples of a family, on every device."""
    return fit_kernels(of) | _fit_replaced(of)


def fit_kernels(of: Sequence[Samples], left_out: Callable[[Problem], bool] = lambda _: False) -> dict[str, Weights]:
    """The models of the kernels that this package launches, fitted without the problems that are left out."""
    model = WORKLOADS[of[0].family].family.model
    assert model is not None, f"{of[0].family} has no model"
    amounts: list[dict[str, float]] = []
    us: list[float] = []
    trust: list[float] = []
    for problem, times in itertools.chain.from_iterable(samples.times.items() for samples in of):
        ours = {v: t for v, t in times.items() if model.covers(v)}
        if left_out(problem) or not ours:
            continue
        best = min(ours.values())
        amounts += [_amounts(of[0].family, problem.spec, problem.size, v) for v in ours]
        us += ours.values()
        trust += [best / t for t in ours.values()]  # the pick is made among variants near the best: these count most
    found = {"kernels": _fitted(amounts, us, trust, 1.0)}
    by_step = [
        (amounts, times[variant])
        for problem, times in itertools.chain.from_iterable(samples.times.items() for samples in of)
        if not left_out(problem)
        for variant, amounts in filter(None, [model.steps(problem.spec, problem.size)])
        if variant in times
    ]
    if by_step:
        found["steps"] = _fitted([row for row, _ in by_step], [t for _, t in by_step], [1.0] * len(by_step), 1.0)
    return found


def _fit_replaced(of: Sequence[Samples]) -> dict[str, Weights]:
    """The models of PyTorch's operators, and of the product of the input."""
    model = WORKLOADS[of[0].family].family.model
    assert model is not None, f"{of[0].family} has no model"
    found: dict[str, Weights] = {}
    kinds: dict[str, list[tuple[dict[str, float], float]]] = {}
    replaced = [one for samples in of for one in samples.replaced]
    for one in replaced:
        kind, row = model.library(one.spec, one.size)
        kinds.setdefault(kind, []).append((row, one.us))
    for kind, rows in sorted(kinds.items()):
        found[kind] = _fitted([row for row, _ in rows], [t for _, t in rows], [1.0] * len(rows), OVER)
    alone = [r for r in replaced if r.projection_us and r.spec.item == 2]  # noqa: PLR2004 - without IEEE float32
    products = [model.projection(r.spec, r.size) for r in alone]
    found["projection"] = _fitted(products, [r.projection_us for r in alone], [1.0] * len(alone), 1.0)
    return found


@functools.cache
def models() -> dict[str, dict[str, Weights]]:
    """Family -> its models, fitted to all samples."""
    found: dict[str, list[Samples]] = {}
    for samples in load_all():
        found.setdefault(samples.family, []).append(samples)
    return {family: fit(of) for family, of in found.items()}


def same_part(one: Problem, other: Any) -> bool:
    """Whether two problems are in the same part: each part has an eleventh of the hidden sizes."""
    return bool(one.spec.hidden // 4 % PARTS == other.spec.hidden // 4 % PARTS)


def regrets(
    samples: Samples, left_out: Callable[[Problem, Any], bool], others: Sequence[Samples] = ()
) -> dict[str, float]:
    """Problem -> how much slower than its best variant the pick is, without the rows and samples that ``left_out`` names.

    ``others``: samples of other devices, to which the model is fitted too. Problems with few measured kernels offer
    little to choose from: they are skipped.
    """
    model = WORKLOADS[samples.family].family.model
    assert model is not None, f"{samples.family} has no model"
    table, found = tables().get(samples.environment["device"]), dict[str, float]()
    rows_of_all = () if table is None else table.rows[samples.family]
    known: dict[frozenset[Problem], dict[str, Weights]] = {}
    for problem, times in samples.times.items():
        steps = model.steps(problem.spec, problem.size)
        measured = {v: t for v, t in times.items() if model.covers(v) or (steps is not None and v == steps[0])}
        if len(measured) < LEAST_CHOICE:
            continue
        without = frozenset(p for one in (samples, *others) for p in one.times if left_out(problem, p))
        if without not in known:
            known[without] = fit_kernels((samples, *others), without.__contains__)
        rows = [(row.spec, row.size, row.variant) for row in rows_of_all if not left_out(problem, row)]
        pick = best_of(samples, problem, measured, known[without], rows)
        found[problem.name] = measured[pick] / min(times.values()) - 1
    return found


def best_of(
    of: Samples, problem: Problem, variants: Iterable[Any], weights: dict[str, Weights], rows: Iterable[Any]
) -> Any:
    """The variant, of these, that tuned.lookup picks with these rows, in a CUDA graph on the GPU of these samples."""
    family = WORKLOADS[of.family].family
    model = family.model
    assert model is not None, f"{of.family} has no model"
    near = won(family, problem.spec, problem.size, rows, of.environment["capability"])
    steps = model.steps(problem.spec, problem.size)

    def thought_us(variant: Any) -> float:
        if steps is not None and variant == steps[0] and not model.covers(variant):
            return weighted(steps[1], weights["steps"])
        amounts = _amounts(of.family, problem.spec, problem.size, variant)
        return weighted(amounts, weights["kernels"]) * model.handicap(variant, near)

    return min(variants, key=thought_us)


def summary(found: dict[str, float]) -> str:
    """Median, mean, the bound that nine in ten stay below, and the worst, as a phrase."""
    if not found:
        return f"nothing is known: no problem has {LEAST_CHOICE} kernels measured"
    regrets, (worst, name) = sorted(found.values()), max((regret, name) for name, regret in found.items())
    median, mean, most = statistics.median(regrets), statistics.mean(regrets), regrets[int(0.9 * len(regrets))]
    return (
        f"median {100 * median:.2f} %, mean {100 * mean:.2f} %, nine in ten at most {100 * most:.1f} %, worst {100 * worst:.1f} % "
        f"({name}), of {len(found)} problems"
    )
