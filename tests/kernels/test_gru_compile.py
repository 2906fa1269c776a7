"""The compiled recurrence: no spill, weights on chip, one wait a piece of columns, in a layout that its PTX can load."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest

from tests.support import gru_compiling
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import (
    GruVariant,
    default_variant,
    kept,
    past,
    rejection,
    row_variant,
    shared_bytes,
    widths,
)

if TYPE_CHECKING:
    import concurrent.futures

    from tests.support.gru_compiling import Found

pytestmark = pytest.mark.compiler

SHARED_SLACK = 8192  # bytes by which the formula may be off
MAX_CONVERTS = 6  # of layouts in the loop where columns are split; sums across warps took 60 instead


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled launch."""

    spec: GruSpec
    variant: GruVariant
    batch: int = 16
    architecture: str = "sm_90"

    def __str__(self) -> str:
        s, v = self.spec, self.variant
        shape = f"{s.layout}{s.directions}{s.layers}-{s.dtype}-{s.hidden}"
        tile = f"{v.form}{v.block_hidden}x{v.block_batch}x{v.num_warps}-{v.exchange}-{v.prefetch}"
        return f"{self.architecture}-{shape}-{self.batch}-{v.strategy}-{tile}"

    @property
    def size(self) -> GruSize:
        return GruSize(self.batch, 8)


def waiting(form: str = "split", units: int = 16, rows: int = 16, warps: int = 4, exchange: str = "spin") -> GruVariant:
    return GruVariant("persistent", form, units, rows, exchange, num_warps=warps)


def bf16(hidden: int, layout: str = "dense", directions: int = 1, layers: int = 1) -> GruSpec:
    return GruSpec("bfloat16", hidden, layout, directions, layers)


SPINNING = [
    Case(bf16(512), waiting()),
    Case(bf16(512), dataclasses.replace(waiting(exchange="probe"), prefetch="late")),
    Case(bf16(1024), waiting(warps=8)),
    Case(bf16(2048), waiting(rows=8, warps=8)),
    Case(bf16(256), waiting("tile", 32, 64, 8), batch=512),
    Case(GruSpec("float32", 256, layers=6), waiting(units=32, rows=8), batch=10),
    Case(bf16(600), waiting()),
    Case(bf16(200, "packed", directions=2), waiting(units=8, rows=8)),
    Case(GruSpec("float32", 384, "thd"), waiting(rows=8)),
    Case(bf16(1536), waiting("staged", rows=32, warps=8), batch=32),
    Case(GruSpec("float16", 2048, "packed"), waiting("staged", warps=8)),
    Case(bf16(1024), waiting(rows=8, warps=8), batch=1),
    Case(GruSpec("float32", 320, layers=2), waiting(rows=8), batch=1),
    Case(bf16(512), waiting(), architecture="sm_100"),
    Case(GruSpec("float32", 256), waiting(), architecture="sm_80"),
]
IN_TURN = [Case(bf16(768), GruVariant("persistent", "split", 16, 16, "spin", num_warps=4, turns=2), batch=65)]
SPLIT = [case for case in SPINNING if case.variant.splits_columns]
HOPPER = [case for case in SPINNING if case.architecture == "sm_90"]
OTHERS = [
    Case(bf16(128), waiting(rows=8, exchange="counter")),
    Case(bf16(512), waiting(exchange="poll"), architecture="sm_80"),
    Case(bf16(256, "thd", layers=2), waiting(exchange="counter"), architecture="sm_80"),
    Case(bf16(256), waiting(exchange="counter"), architecture="gfx942"),
    Case(bf16(1536, directions=2), waiting("staged", rows=32, warps=8, exchange="counter"), batch=32),
    Case(bf16(60), GruVariant("persistent", block_hidden=64)),
]
DEFAULTS = [  # for each, one launch per step and one launch of all steps
    Case(spec, default_variant(spec), architecture=architecture)
    for architecture, spec in (
        ("sm_90", bf16(512, "packed")),
        ("sm_80", bf16(512, "thd", directions=2)),
        ("sm_90", bf16(256, layers=2)),
        ("sm_80", bf16(256, "packed", layers=3)),
    )
]


@functools.cache
def compiled(compiler: concurrent.futures.Executor, case: Case) -> Found:
    return compiler.submit(gru_compiling.found, case.spec, case.size, case.variant, case.architecture).result()


def capability_of(case: Case) -> int:
    return int(case.architecture.removeprefix("sm_")) if case.architecture.startswith("sm_") else 0


def state_loads(case: Case) -> list[str]:
    """Shapes of a step's loads of state rows: one for each piece; in a stack also those of the layer below."""
    each = widths(case.spec, case.variant)
    return [f"{case.variant.block_batch}x{width}" for width in each] * (2 if case.spec.stacked else 1)


def gate_loads(case: Case) -> list[str]:
    units, rows = case.variant.block_hidden, case.variant.block_batch
    return [f"{units}x{rows}" if case.variant.splits_columns else f"{rows}x{units}"] * 3


def tiles_of(found: Found) -> list[str]:
    """Shapes of the loads in the loop, without those that find where packed rows start (one number for each row)."""
    return [shape for shape in found.loads if "x" in shape]


@pytest.mark.parametrize("case", [*SPINNING, *OTHERS], ids=str)
def test_the_cases_are_what_tuning_would_try(case: Case) -> None:
    reason = rejection(case.spec, None, case.variant, capability_of(case))
    assert reason is None, reason


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", [*SPINNING, *IN_TURN, *OTHERS, *DEFAULTS], ids=str)
def test_nothing_spills(compiler: concurrent.futures.Executor, case: Case) -> None:
    found = compiled(compiler, case)
    assert 0 < found.registers <= (512 if case.architecture.startswith("gfx") else 255)
    assert found.spill_bytes == 0


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPINNING, ids=str)
def test_a_step_loads_gates_and_state_and_no_weight(compiler: concurrent.futures.Executor, case: Case) -> None:
    found = compiled(compiler, case)
    assert tiles_of(found) == sorted(gate_loads(case) + state_loads(case))
    assert found.stores == 1
    assert found.cooperative


@pytest.mark.parametrize(
    "case",
    [
        Case(GruSpec("float32", 1188), waiting("staged", rows=8, warps=8), batch=8),
        Case(GruSpec("float32", 2048, directions=2), waiting("staged", rows=16, warps=8)),
        Case(GruSpec("float32", 1536), waiting("staged", rows=32, warps=8), batch=32),
        Case(GruSpec("float32", 1536, "packed"), waiting("staged", rows=16, warps=8), architecture="sm_100"),
    ],
    ids=str,
)
def test_weights_without_room_in_shared_memory_are_read_once_a_step(
    compiler: concurrent.futures.Executor, case: Case
) -> None:
    spec, variant, each = case.spec, case.variant, widths(case.spec, case.variant)
    assert rejection(spec, case.size, variant, capability_of(case), 132) is None
    found, held = compiled(compiler, case), kept(spec, variant)
    read = [
        f"{variant.splits}x{variant.block_hidden}x{width // variant.splits}" for width in each[held:] for _ in "rzn"
    ]
    assert [shape for shape in tiles_of(found) if shape.count("x") > 1] == read
    assert found.spill_bytes == 0
    assert abs(found.shared_bytes - shared_bytes(spec, variant)) <= SHARED_SLACK


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_however_programs_wait_no_step_loads_a_weight(compiler: concurrent.futures.Executor, case: Case) -> None:
    found = compiled(compiler, case)
    assert set(gate_loads(case)) <= set(tiles_of(found)) <= set(gate_loads(case) + state_loads(case))
    assert found.waits == ()
    assert found.cooperative == (case.spec.hidden != 60)


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPINNING, ids=str)
def test_a_thread_has_neighbours_of_a_row_for_every_load_of_the_wait(
    compiler: concurrent.futures.Executor, case: Case
) -> None:
    found = compiled(compiler, case)
    assert len(found.waits) == len(state_loads(case))
    for shape, run in zip(state_loads(case), found.waits, strict=True):
        rows, width = map(int, shape.split("x"))
        each = rows * width // (32 * case.variant.num_warps)
        load = min(each, 16 // case.spec.item)
        assert len(run) >= load, f"a thread holds {len(run)} neighbours, and the PTX loads {load}"
        assert run[:load] == tuple(range(load))


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPINNING, ids=str)
def test_a_wait_is_one_loop_of_ptx_for_eight_loads(compiler: concurrent.futures.Executor, case: Case) -> None:
    wanted = 0
    for shape in state_loads(case):
        rows, width = map(int, shape.split("x"))
        each = rows * width // (32 * case.variant.num_warps)
        load = min(each, 16 // case.spec.item)
        wanted += max(1, each // (8 * load))
    assert compiled(compiler, case).asm == wanted


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", [*SPINNING, *IN_TURN], ids=str)
def test_of_few_rows_each_load_is_left_out_by_itself(compiler: concurrent.futures.Executor, case: Case) -> None:
    """The tile's other rows are not read: a thread has elements of several rows, so each load is guarded."""
    loads = 0
    for shape in state_loads(case):
        rows, width = map(int, shape.split("x"))
        each = rows * width // (32 * case.variant.num_warps)
        loads += each // min(each, 16 // case.spec.item)
    assert compiled(compiler, case).guarded == (loads if past(case.spec, case.batch, case.variant) == "unread" else 0)


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_sums_over_the_warps_take_few_conversions(compiler: concurrent.futures.Executor, case: Case) -> None:
    assert 0 < compiled(compiler, case).converts <= MAX_CONVERTS


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_shared_memory_is_what_the_rule_counts(compiler: concurrent.futures.Executor, case: Case) -> None:
    assert abs(compiled(compiler, case).shared_bytes - shared_bytes(case.spec, case.variant)) <= SHARED_SLACK


def test_a_layout_is_read_in_the_order_of_its_registers() -> None:
    assert gru_compiling.neighbours("blocked", "sizePerThread = [1, 8], threadsPerWarp = [1, 32], order = [1, 0]") == (
        *range(8),
    )
    assert gru_compiling.neighbours("blocked", "sizePerThread = [8, 1], threadsPerWarp = [32, 1], order = [0, 1]") == (
        0,
    )
    linear = "register = [[0, 1], [0, 2], [8, 0], [0, 4]], lane = [[0, 8]]"
    assert gru_compiling.neighbours("linear", linear) == (0, 1, 2, 3)


# One row a program ------------------------------------------------------------------------------------------------------

ROWS = [
    ("bfloat16", 64, "dense", "sm_90"),
    ("float32", 128, "dense", "sm_90"),
    ("float32", 33, "packed", "sm_90"),
    ("bfloat16", 90, "thd", "sm_90"),
    ("float32", 128, "dense", "sm_80"),
    ("bfloat16", 128, "dense", "sm_100"),
    ("bfloat16", 64, "dense", "gfx942"),
]


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize(("dtype", "hidden", "layout", "architecture"), ROWS)
def test_a_thread_adds_up_its_columns_by_itself(
    compiler: concurrent.futures.Executor, dtype: str, hidden: int, layout: str, architecture: str
) -> None:
    variant = row_variant(hidden)
    assert variant is not None
    found = compiled(compiler, Case(GruSpec(dtype, hidden, layout), variant, architecture=architecture))
    assert found.spill_bytes == 0
    assert found.shuffles == 0, "threads share a sum"
    assert found.converts <= 8, "two steps: the state, and three sums of two halves"
    assert found.shared_bytes <= 2048, "weights are in registers"
    assert found.vectors == 0, "elements of other rows would be taken for neighbours"
    units = str(variant.block_hidden)
    assert tiles_and_numbers(found) == [units] * 6, "a step loads gates alone"
    assert found.stores == 2
    assert not found.cooperative


def tiles_and_numbers(found: Found) -> list[str]:
    """Shapes of the loads in the loop, without loads of a single number."""
    return [shape for shape in found.loads if shape != "1"]
