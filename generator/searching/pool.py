"""The legal pool of a problem (the declared variants that no rule rejects), and its seeds: winners of similar problems."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from tuned.families.choices import choices
from tuned.lookup.record import Winner
from tuned.lookup.table import ships

from ..places import LANDSCAPES, OWN
from ..problem import Problem
from ..rendering.structures import fresh
from ..storage.landscape import LandscapeError, load_landscapes
from ..workload import WORKLOADS


@dataclasses.dataclass(frozen=True)
class Pool:
    """The variants worth trying, and why the others are not."""

    declared: int  # size of the product of all choices
    variants: tuple[Any, ...]  # legal, in order of declaration
    rejected: dict[str, int]  # first words of a rule's sentence -> how many tiles it excluded


@functools.lru_cache(maxsize=32)
def legal_pool(problem: Problem, capability: int, multiprocessors: int | None = None) -> Pool:
    """Every legal variant of a problem on a compute capability (90 is 9.0) with so many multiprocessors, if known.

    The whole product of the choices has hundreds of thousands of variants, so there are two steps: first the knobs that
    a tile's size depends on, with the others at their defaults, then all the others for each tile that is legal.
    """
    family = WORKLOADS[problem.family].family
    declared = choices(family.variant_type)
    core = {name: declared[name] for name in family.core_knobs}
    rest = {name: values for name, values in declared.items() if name not in core}
    reasons: collections.Counter[str] = collections.Counter()
    here = capability, multiprocessors
    looked_at = _made_to_be_looked_at(family.variant_type)
    variants = []
    for tile in itertools.product(*core.values()):
        reason = family.rejection(problem.spec, problem.size, looked_at(zip(core, tile)), *here)  # noqa: B905 - strict takes time
        if reason is not None:
            reasons[reason] += 1
            continue
        chosen = dict(zip(core, tile, strict=True))
        others = (dict(zip(rest, values, strict=True)) for values in itertools.product(*rest.values()))
        made = (family.variant_type(**chosen, **other) for other in others)
        variants += [v for v in made if family.rejection(problem.spec, problem.size, v, *here) is None]
    if OWN:  # no kernel can be added to an installed package
        variants = [v for v in variants if ships(family, problem.spec, v)]
    rejected: collections.Counter[str] = collections.Counter()
    for reason, tiles in reasons.items():
        rejected[reason.split(":")[0].split(" with ")[0]] += tiles
    return Pool(math.prod(map(len, declared.values())), tuple(variants), dict(rejected.most_common()))


def _made_to_be_looked_at(variant_type: Any) -> Callable[[Iterable[tuple[str, Any]]], Any]:
    """A function that makes a variant of some knobs, with the others at their defaults, only for a rule to look at.

    A frozen dataclass's constructor takes longer than most rules, so it is skipped: unset fields are read from the
    class, which has each field's default, unless it has slots.
    """
    if hasattr(variant_type, "__slots__") or hasattr(variant_type, "__post_init__"):
        return lambda chosen: variant_type(**dict(chosen))

    def made(chosen: Iterable[tuple[str, Any]]) -> Any:
        variant = object.__new__(variant_type)
        vars(variant).update(chosen)
        return variant

    return made


MAX_SEEDS = 8
MEASURED_WHOLE = 3  # of these, the best variants of a landscape of this very problem, if one was recorded


def same_problem(one: Problem | Winner, other: Problem | Winner) -> bool:
    """Whether both are the same problem, or winners of the same problem, whatever their names."""
    return (one.family, one.spec, one.size) == (other.family, other.spec, other.size)


def incumbent_of(problem: Problem, winners: Iterable[Winner]) -> Any:
    """The variant that the record names for this very problem; None if there is none or its kernels changed since."""
    return next((w.variant for w in winners if same_problem(w, problem) and fresh(w.digests)), None)


def seeds_for(
    problem: Problem, winners: Iterable[Winner], capability: int, multiprocessors: int | None = None
) -> list[Any]:
    """Winners' variants that are legal here, nearest spec first, then nearest size; at most MAX_SEEDS.

    The last few are the best of a landscape of this problem, if there is one.
    """
    family = WORKLOADS[problem.family].family

    def legal(variant: Any) -> bool:
        return family.rejection(problem.spec, problem.size, variant, capability, multiprocessors) is None

    def unlike(winner: Winner) -> tuple[float, float, str]:
        octaves = abs(math.log2(max(winner.size.tokens, 1) / max(problem.size.tokens, 1)))
        return family.distance(winner.spec, problem.spec), octaves, winner.name

    ranked = sorted((w for w in winners if w.family == problem.family and legal(w.variant)), key=unlike)
    # Each device with landscapes of the problem adds some; at least half of the seeds are winners of neighbours.
    whole = list(dict.fromkeys(v for v in _leaders().get(problem, ()) if legal(v)))[: MAX_SEEDS // 2]
    near = list(dict.fromkeys(winner.variant for winner in ranked))[: MAX_SEEDS - len(whole)]
    return list(dict.fromkeys([*near, *whole]))


@functools.cache
def _leaders() -> dict[Problem, list[Any]]:
    """Problem -> the best variants of its landscapes, on any device. They are hints: an unreadable landscape is skipped."""
    found: dict[Problem, list[Any]] = {}
    for folder in sorted(LANDSCAPES.glob("*/")):
        with contextlib.suppress(LandscapeError):
            for one in load_landscapes(folder.name):
                best = sorted(one.times, key=one.times.__getitem__)
                found.setdefault(one.problem, []).extend(best[:MEASURED_WHOLE])
    return found
