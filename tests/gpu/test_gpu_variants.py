"""Variants on a real GPU: every choice of every knob, what the interpreter cannot run among them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.processes.compiler import CompilerPool, compile_variant, hopeless
from generator.searching.pool import legal_pool
from generator.selection import problem_named
from generator.workload import default_problems
from tests import pairwise
from tests.rope_case import RopeCase, assert_right
from tests.test_rope_kernels import spec_for
from tuned.choices import choices
from tuned.rope.variant import RopeVariant, rejection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from generator.problem import Problem

# A decode call of a default model, whose pool is run whole: 99 variants, and as many again where there is PDL.
WHOLE = problem_named("llama3_8b_decode_64x1")
SAMPLE = 6  # variants of every other default problem's pool, evenly spaced
LARGEST = 2**24  # elements of x: larger problems have the same variants, and take longer to check


def numbers() -> list[dict[str, Any]]:
    """Variants that hold every legal pair of choices on sm_90."""
    rows = pairwise.product(
        choices(RopeVariant), lambda knobs: rejection(spec_for(knobs), None, RopeVariant(**knobs), 90) is None
    )
    return pairwise.covering(rows)


def knobs_id(knobs: dict[str, Any]) -> str:
    """Every value, in the order of declaration."""
    return "-".join(f"{value}" or "none" for value in knobs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("knobs", numbers(), ids=knobs_id)
def test_every_choice_of_a_knob_is_right_on_the_gpu(knobs: dict[str, Any], dtype: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    spec, variant = dataclasses.replace(spec_for(knobs), dtype=dtype), RopeVariant(**knobs)
    if reason := rejection(spec, None, variant, 10 * major + minor):
        pytest.skip(reason)
    assert_right(RopeCase(spec, seq=4 * knobs["block_tokens"] + 1, batch=2), variant)


@pytest.fixture(scope="module")
def compilers() -> Iterator[CompilerPool]:
    # A few take most of a minute where neighbours compile too; the tests beside have processes of their own.
    with CompilerPool(max(1, len(os.sched_getaffinity(0)) // 2), seconds=300) as pool:
        yield pool


def check_variants(compilers: CompilerPool, problem: Problem, variants: list[Any]) -> list[str]:
    """What is wrong with variants of a problem, staged, compiled and checked as tuning does it."""
    from triton.runtime import driver  # noqa: PLC0415 - needs a GPU

    from generator.measuring.stage import Stage, WrongResultError  # noqa: PLC0415

    major, minor = torch.cuda.get_device_capability()
    wrong = []
    stage = Stage(problem, driver.active.get_current_target())
    try:
        tasks = [(v, compilers.submit(compile_variant, problem, v, f"sm_{major}{minor}")) for v in variants]
        for variant, task in tasks:
            if hopeless(task.result(), 10 * major + minor):
                continue
            try:
                stage.check(variant)
            except WrongResultError as error:
                wrong.append(f"{variant}: {error}")
    finally:
        stage.close()
    return wrong


@pytest.mark.gpu
@pytest.mark.xdist_group("pools")
def test_every_legal_variant_of_a_decode_problem_is_right(compilers: CompilerPool) -> None:
    major, minor = torch.cuda.get_device_capability()
    variants = legal_pool(WHOLE, 10 * major + minor).variants
    assert len(variants) > 50, "a handful would tell nothing"
    assert check_variants(compilers, WHOLE, list(variants)) == []


@pytest.mark.gpu
@pytest.mark.xdist_group("pools")
@pytest.mark.parametrize("family", ["rope", "gru_cell", "linear_cat"])
def test_a_sample_of_every_pool_is_right(compilers: CompilerPool, family: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    wrong = []
    for problem in default_problems(family):
        spec = problem.spec
        if problem.size.tokens * getattr(spec, "heads", 1) * getattr(spec, "head_dim", 1) > LARGEST:
            continue
        variants = legal_pool(problem, 10 * major + minor).variants
        wrong += check_variants(compilers, problem, list(variants[:: max(1, len(variants) // SAMPLE)]))
    assert wrong == []
