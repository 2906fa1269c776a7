"""The legal pool of a problem: declared choices, minus what a rule rejects."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from typing import Any

from tuned.families.choices import choices

from ..problem import Problem
from ..workload import WORKLOADS


@dataclasses.dataclass(frozen=True)
class Pool:
    """The variants worth trying, and why the others are not."""

    declared: int  # size of the product of all choices
    variants: tuple[Any, ...]  # legal, in order of declaration
    rejected: dict[str, int]  # first words of a rule's sentence -> how many tiles it excluded


@functools.lru_cache(maxsize=32)
def legal_pool(problem: Problem, capability: int, multiprocessors: int | None = None) -> Pool:
    """Every legal variant of a problem on a compute capability (90 is 9.0) and so many multiprocessors, if it is known.

    Two steps, since the whole product has hundreds of thousands: first the knobs that a tile's size depends on, with
    the others at their defaults, then all the others for each tile that is left.
    """
    family = WORKLOADS[problem.family].family
    declared = choices(family.variant_type)
    core = {name: declared[name] for name in family.core_knobs}
    rest = {name: values for name, values in declared.items() if name not in core}
    rejected: collections.Counter[str] = collections.Counter()
    here = capability, multiprocessors
    variants = []
    for tile in itertools.product(*core.values()):
        chosen = dict(zip(core, tile, strict=True))
        reason = family.rejection(problem.spec, problem.size, family.variant_type(**chosen), *here)
        if reason is not None:
            rejected[reason.split(":")[0].split(" with ")[0]] += 1
            continue
        others = (dict(zip(rest, values, strict=True)) for values in itertools.product(*rest.values()))
        made = (family.variant_type(**chosen, **other) for other in others)
        variants += [v for v in made if family.rejection(problem.spec, problem.size, v, *here) is None]
    return Pool(math.prod(map(len, declared.values())), tuple(variants), dict(rejected.most_common()))
