"""A made-up winner for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from generator.rendering.structures import structures
from generator.selection import problem_named
from generator.workload import WORKLOADS
from tests.support.fakes import ENVIRONMENT
from tuned.lookup.record import Winner


def winner(name: str = "llama3_8b_2x4096", **changes: Any) -> Winner:
    problem = problem_named(name)
    family = WORKLOADS[problem.family].family
    variant = changes.pop("variant", None) or family.default_variant(problem.spec, problem.size)
    made = Winner(
        name=name,
        family=problem.family,
        spec=problem.spec,
        size=problem.size,
        variant=variant,
        digests={n: structures()[n].digest for n in family.kernel_names(problem.spec, variant)},
        median_us=34.5,
        spread_us=0.1,
        error=0.5,
        default_us=36.0,
        copy_us=33.9,
        floor_us=34.2,
        eager_us=473.0,
        bytes_moved=135_266_304,
        trials=72,
        environment=dict(ENVIRONMENT),
    )
    return dataclasses.replace(made, **changes)
