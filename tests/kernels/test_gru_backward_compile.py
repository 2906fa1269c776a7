"""The compiled gradient of a recurrence: no spill, weights on chip, one wait a piece of a message, one layout."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from tests.support import gru_compiling
from tests.support.gru_gradient_cases import GRADIENTS, ONE
from tests.support.gru_order import Case
from tuned.families.gru.spec import GruSpec
from tuned.families.gru_backward.launches import exchange
from tuned.families.gru_backward.variant import default_variant, pieces, rejection, shared_bytes

if TYPE_CHECKING:
    import concurrent.futures

    from tests.support.gru_compiling import Found

pytestmark = pytest.mark.compiler

SHARED_SLACK = 8192  # bytes that the formula may count in excess
MAX_CONVERTS = {
    "spin": 1,
    "probe": 1,
    "poll": 1,
    "counter": 4,
}  # conversions of layouts in the loop; with sums across warps it took 60
TERMS = 8  # in a step: three parts of the gates, three of the state, the state itself, the output's gradient
RESULTS = 5  # four gradients of a token, and the gradient of h_0

DEFAULTS = [
    Case(spec, ONE, default_variant(spec), architecture, "gru_backward")
    for architecture, spec in (
        ("sm_90", GruSpec("bfloat16", 512)),
        ("sm_80", GruSpec("bfloat16", 512, "thd", directions=2)),
        ("sm_100", GruSpec("float32", 256, "packed")),
    )
]
CASES = [*GRADIENTS, *DEFAULTS]
SPINNING = [case for case in GRADIENTS if exchange(case.spec, case.variant) in ("spin", "probe")]


@functools.cache
def compiled(compiler: concurrent.futures.Executor, case: Case) -> Found:
    return compiler.submit(
        gru_compiling.found, case.spec, case.size, case.variant, case.architecture, case.family
    ).result()


def widths(case: Case) -> list[int]:
    return [width for width in pieces(case.spec, case.variant.splits) if width]


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_spills_and_all_programs_are_launched_together(
    compiler: concurrent.futures.Executor, case: Case
) -> None:
    assert rejection(case.spec, case.size, case.variant, int(case.architecture.removeprefix("sm_"))) is None
    found = compiled(compiler, case)
    assert 0 < found.registers <= 255
    assert found.spill_bytes == 0
    assert found.cooperative


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_loads_its_terms_and_a_message_and_no_weight(compiler: concurrent.futures.Executor, case: Case) -> None:
    """Results are stored once. With tiles in turn, a step also loads what the tile keeps, and the gradient of h_n."""
    found, variant = compiled(compiler, case), case.variant
    terms = [f"{variant.block_hidden}x{variant.block_batch}"] * (TERMS + (2 if variant.in_turn else 0))
    looks = 2 if exchange(case.spec, variant) == "poll" else 1  # first once, then again until the value is there
    message = [f"{variant.block_batch}x{width}" for width in widths(case)] * looks
    assert [shape for shape in found.loads if "x" in shape] == sorted(terms + message)
    assert found.stores == RESULTS + variant.in_turn


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_memory_is_what_the_rule_counts(compiler: concurrent.futures.Executor, case: Case) -> None:
    left = shared_bytes(case.spec, case.variant) - compiled(compiler, case).shared_bytes
    assert 0 <= left <= SHARED_SLACK


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_over_the_warps_take_few_conversions(compiler: concurrent.futures.Executor, case: Case) -> None:
    assert 0 < compiled(compiler, case).converts <= MAX_CONVERTS[case.variant.exchange]


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPINNING, ids=str)
def test_a_thread_waits_for_neighbours_of_a_row_in_one_loop_a_piece(
    compiler: concurrent.futures.Executor, case: Case
) -> None:
    found = compiled(compiler, case)
    assert len(found.waits) == len(widths(case))
    loops = 0
    for width, run in zip(widths(case), found.waits, strict=True):
        each = case.variant.block_batch * width // (32 * case.variant.num_warps)
        load = min(each, 16 // case.spec.item)
        assert run[:load] == tuple(range(load)), f"a thread holds neighbours {run}, and the PTX loads {load}"
        loops += max(1, each // (8 * load))
    assert found.asm == loops


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPINNING, ids=str)
def test_of_one_row_each_load_is_left_out_by_itself(compiler: concurrent.futures.Executor, case: Case) -> None:
    loads = 0
    for width in widths(case):
        each = case.variant.block_batch * width // (32 * case.variant.num_warps)
        loads += each // min(each, 16 // case.spec.item)
    assert compiled(compiler, case).guarded == (loads if case.size.batch == 1 else 0)
