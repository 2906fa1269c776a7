"""What a search chooses from: the variants of a problem of a family, or of another space that was measured whole."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..problem import Problem
from ..rendering.structures import digests_of
from ..workload import WORKLOADS, default_variant
from .pool import Pool, legal_pool


@dataclasses.dataclass(frozen=True)
class Space:
    """The legal variants of a problem, and everything else that a search asks of its family."""

    variant_type: type  # its fields are the knobs
    pool: Pool
    default: Any  # what a search measures first
    features: Callable[[Any], tuple[int, ...]]  # (variant) -> levels for a model of the time, beside the knobs
    digests: Callable[[Any], dict[str, str]]  # (variant) -> kernel -> digest of its text


def space_of(problem: Problem, capability: int, multiprocessors: int | None = None) -> Space:
    """The space of a problem of a family, on a compute capability (90 is 9.0) with so many multiprocessors, if known."""
    work = WORKLOADS[problem.family]
    return Space(
        work.family.variant_type,
        legal_pool(problem, capability, multiprocessors),
        default_variant(problem, capability),
        work.features,
        functools.partial(digests_of, problem),
    )
