"""Variants on a real GPU: every choice of every knob, including those that the interpreter cannot run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.processes.compiler import compile_variant, hopeless
from generator.searching.pool import legal_pool
from generator.selection import problem_named
from generator.workload import WORKLOADS, default_problems
from tests.support import pairwise
from tests.support.rope_case import RopeCase, assert_right
from tests.support.rope_variants import spec_for
from tuned.families.choices import choices
from tuned.families.rope.variant import RopeVariant, rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from generator.problem import Problem

# A decode call of a default model, whose pool is run completely: 99 variants, and as many again where PDL exists.
WHOLE = problem_named("llama3_8b_decode_64x1")
SHARES = 8  # shares of the check, for as many processes as there are
SAMPLE = 4  # variants, evenly spaced, of every other default problem's pool
LARGEST = 2**24  # elements of x: larger problems have the same variants, and their check takes longer
SAMPLED = [
    problem
    for family in ("rope", "gru_cell", "linear_cat")
    for problem in default_problems(family)
    if problem.size.tokens * getattr(problem.spec, "heads", 1) * getattr(problem.spec, "head_dim", 1) <= LARGEST
]


def numbers() -> list[dict[str, Any]]:
    """Variants that together have every legal pair of choices on sm_90."""
    rows = pairwise.product(
        choices(RopeVariant), lambda knobs: rejection(spec_for(knobs), None, RopeVariant(**knobs), 90) is None
    )
    return pairwise.covering(rows)


def knobs_id(knobs: dict[str, Any]) -> str:
    """All values, in the order of declaration."""
    return "-".join(f"{value}" or "none" for value in knobs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("knobs", numbers(), ids=knobs_id)
def test_every_choice_of_a_knob_is_right_on_the_gpu(knobs: dict[str, Any], dtype: str) -> None:
    spec, variant = dataclasses.replace(spec_for(knobs), dtype=dtype), RopeVariant(**knobs)
    if reason := rejection(spec, None, variant, capability()):
        pytest.skip(reason)
    assert_right(RopeCase(spec, seq=4 * knobs["block_tokens"] + 1, batch=2), variant)


def check_variants(problem: Problem, variants: Sequence[Any]) -> list[str]:
    """What is wrong with variants of a problem, which are staged, compiled and checked as tuning does it."""
    from triton.runtime import driver  # noqa: PLC0415 - needs a GPU

    from generator.measuring.stage import Stage, WrongResultError  # noqa: PLC0415

    wrong = []
    stage = Stage(problem, driver.active.get_current_target())
    try:
        for variant in variants:
            if hopeless(compile_variant(problem, variant, f"sm_{capability()}"), capability()):
                continue
            try:
                stage.check(variant)
            except WrongResultError as error:
                wrong.append(f"{variant}: {error}")
    finally:
        stage.close()
    return wrong


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "empties"),
    [("llama3_8b_served_1x1", True), ("llama3_8b_decode_64x1", False), ("llama3_8b_inplace_decode_64x1", False)],
)
def test_finalists_are_timed_and_right_on_other_memory_and_behind_a_foreign_kernel(name: str, empties: bool) -> None:
    from triton.runtime import driver  # noqa: PLC0415 - needs a GPU

    from generator.measuring.stage import ALLOCATIONS, Stage, dependent  # noqa: PLC0415

    problem = problem_named(name)
    variants = legal_pool(problem, capability()).variants
    some = [next(v for v in variants if not dependent(v)), *[v for v in variants if dependent(v)][:1]]
    stage = Stage(problem, driver.active.get_current_target())
    try:
        assert stage.empties >= empties, "whatever the size of the L2"
        assert stage.baselines().eager_us > 0
        assert all(stage.measure(variant).error <= 1 for variant in some)
        for one in stage.compare(some):
            assert len(one.rounds) == ALLOCATIONS
            assert min(min(rounds) for rounds in one.rounds) > 0
            assert len(one.behind) == (ALLOCATIONS if len(some) > 1 else 0)
        assert all(stage.measure(variant).error <= 1 for variant in some), "as before"
    finally:
        stage.close()


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(SHARES))
def test_every_legal_variant_of_a_decode_problem_is_right(share: int) -> None:
    variants = legal_pool(WHOLE, capability()).variants
    assert len(variants) > 50, "a handful would tell nothing"
    assert check_variants(WHOLE, variants[share::SHARES]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("problem", SAMPLED, ids=lambda p: p.name)
def test_a_sample_of_every_pool_is_right(problem: Problem) -> None:
    variants = legal_pool(problem, capability()).variants
    assert check_variants(problem, variants[:: max(1, len(variants) // SAMPLE)]) == []


# The form that a winner is compared with is timed in a graph: it must not use the host's memory, or another stream.
CAPTURED = {
    dataclasses.replace(p.spec, heads=1, key_heads=min(1, p.spec.key_heads), copied_heads=0): p
    for p in default_problems("rope")
}


@pytest.mark.gpu_sample
@pytest.mark.parametrize("problem", CAPTURED.values(), ids=lambda p: p.name)
def test_the_eager_form_of_every_kind_of_rotation_can_be_captured(problem: Problem) -> None:
    size = dataclasses.replace(problem.size, batch=2, seq=7)
    work = WORKLOADS["rope"]
    eager = work.eager(problem.spec, work.inputs(problem.spec, size, "cuda", 0))
    eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()
    graph.replay()
    torch.cuda.synchronize()
