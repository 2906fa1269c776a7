"""Count what the launches of a variant do: programs, bytes, sines, threads; nothing is run or compiled for it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from tuned.families.gru.variant import alone as gru_alone
from tuned.families.gru.variant import pieces
from tuned.families.launch import ceil_div
from tuned.families.rope.launches import programs
from tuned.families.rope.spec import ITEM_SIZE
from tuned.families.rope.variant import half_block

if TYPE_CHECKING:
    from generator.estimating.targets import Target
    from generator.measuring.compile import Resources
    from generator.problem import Problem

# Before anything is compiled: 8, 16 and 32 pairs a thread compiled to 32, 60 and 96 registers for sm_90.
BASE_REGISTERS, REGISTERS_PER_PAIR = 16, 2.6


@dataclasses.dataclass(frozen=True)
class Work:
    """What one launch does, counted from spec, size and variant."""

    programs: int
    warps: int
    memory_bytes: float  # all programs, each byte once
    again_bytes: float  # read again, from L2
    in_flight_bytes: float  # a program's loads before it first waits
    elements: float  # all programs, masked lanes too
    sines: float  # all programs
    pairs_per_thread: float
    row_bytes: float = 16.0  # what lies side by side of a tile
    early: bool = False  # programmatic dependent launch
    chain_us: float = 0.0  # what the steps of a recurrence wait for, one after the other, whatever the device
    chain_clocks: float = 0.0  # of a processor, for what one program does in all its steps


def resident(work: Work, target: Target, need: Resources | None) -> int:
    """Programs of a launch that a processor holds at a time; at least 1."""
    threads = target.warp * work.warps
    registers = registers_of(work, need)
    by_registers = target.registers // (max(8, math.ceil(registers / 8) * 8) * threads)
    by_shared = target.shared_bytes // ((need.shared_bytes if need else 0) + 1024)  # 1 KiB a program is the system's
    return max(1, min(target.threads // threads, int(by_registers), by_shared, target.programs))


def registers_of(work: Work, need: Resources | None) -> float:
    """Registers a thread: what the compiler says, or a guess from the pairs of a thread."""
    return need.registers if need else BASE_REGISTERS + REGISTERS_PER_PAIR * work.pairs_per_thread


def rope_work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The one launch of the rotation."""
    spec, size = problem.spec, problem.size
    item, half = ITEM_SIZE[spec.dtype], half_block(spec)
    entries_per_pair = 2 if spec.angle_entries == "feature" else 1
    angle_row = spec.bytes_per_position()
    seq, batch = (size.tokens, 1) if spec.layout == "thd" else (size.seq, size.batch)
    count = programs(spec, variant, seq, batch)
    tile_rows = variant.block_tokens * variant.block_heads
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=size.tokens * spec.bytes_per_token() + spec.angle_rows(size) * angle_row,
            again_bytes=max(0.0, count * variant.block_tokens * angle_row - spec.angle_rows(size) * angle_row),
            in_flight_bytes=tile_rows * spec.rotary_dim * item + variant.block_tokens * angle_row,
            elements=count * tile_rows * variant.head_steps * 2 * half,
            sines=count * variant.block_tokens * half * 2 * entries_per_pair if spec.computes_sincos else 0,
            pairs_per_thread=tile_rows * half / (32 * variant.num_warps),
            row_bytes=half * item,
            early=variant.pdl,
        ),
    )


def gru_cell_work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """A step in one launch; the library's products and the kernel of its gates as one too."""
    spec, size = problem.spec, problem.size
    item, units, rows = ITEM_SIZE[spec.dtype], variant.block_hidden, variant.block_batch
    count = ceil_div(size.batch, rows) * ceil_div(spec.hidden, units)
    width = spec.input_size + spec.hidden
    library = variant.form == "library"
    # Of the library's tiles nothing is known; the gates read and write seven rows of the hidden size besides.
    operands = (rows + 3 * units) * width * item if not library else 0
    gates = 12 * size.batch * spec.hidden * item if library else 0
    stages = 2 if variant.form == "vector" else variant.num_stages
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=spec.weight_bytes() + size.batch * spec.bytes_per_row() + gates,
            again_bytes=max(0.0, count * operands - spec.weight_bytes() - size.batch * width * item),
            in_flight_bytes=min(operands, stages * (rows + 3 * units) * variant.block_k * item)
            or 8 * rows * units * item,
            elements=8 * count * rows * units,
            sines=0.5 * count * rows * units,  # an exponential and a division are about a quarter of a sine
            pairs_per_thread=max(1.0, 4 * rows * units / (32 * variant.num_warps)),
        ),
    )


def linear_cat_work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The one launch of a linear over segments."""
    spec, size = problem.spec, problem.size
    item, columns, rows = ITEM_SIZE[spec.dtype], variant.block_columns, variant.block_rows
    count = ceil_div(size.batch, rows) * ceil_div(spec.outputs, columns)
    operands = (rows + columns) * spec.input_size * item
    stages = 2 if variant.is_vector else variant.num_stages
    moved = spec.weight_bytes() + size.batch * spec.bytes_per_row()
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=moved,
            again_bytes=max(0.0, count * operands - moved),
            in_flight_bytes=min(operands, stages * (rows + columns) * variant.block_k * item),
            elements=count * rows * columns,
            sines=0.0,
            pairs_per_thread=max(1.0, rows * columns / (32 * variant.num_warps)),
        ),
    )


# Of the recurrence, measured on an H200: what a time step takes besides the work of a program in it.
STEP_US = {"alone": 0.2, "spin": 1.2, "probe": 1.2, "poll": 1.5, "counter": 1.8, "steps": 2.0, "library": 4.0}
# Bytes a clock of a processor, from shared memory (CUDA C++ Programming Guide) and, by published microbenchmarks, from L2.
SHARED_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 40
# Multiplications a clock of a processor, at about half of what a data sheet says for large tiles.
PRODUCTS_PER_CLOCK = {"float16": 1024, "bfloat16": 1024, "tf32": 512, "ieee": 64}
FLIGHT_BYTES, ROUND_US = 128, 0.6  # a thread waits for eight loads of 16 bytes together, and so long from L2
GATES_PER_CLOCK = 2  # elements of the state: some 60 instructions on 128 lanes


def gru_work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """All steps of a sequence as one launch.

    What decides is the chain of steps: each waits for the others' states, reads the state of its rows from L2 and its
    weights from where they are, multiplies and computes its gates.
    """
    spec, size = problem.spec, problem.size
    library = variant.strategy == "library"
    persistent = variant.strategy == "persistent"
    alone = persistent and gru_alone(spec, variant)
    how = "alone" if alone else variant.exchange if persistent else variant.strategy
    # The library's tile is not known: about this much of the weights is read by one processor.
    units, rows = (32, min(64, size.batch)) if library else (variant.block_hidden, variant.block_batch)
    columns = spec.hidden if library else sum(pieces(spec.hidden, variant.splits))
    sets = 2 if spec.stacked else 1
    weights = 3 * units * columns * spec.item * sets
    state = rows * columns * spec.item * sets
    arithmetic = spec.precision if spec.dtype == "float32" else spec.dtype
    clocks = (
        weights / (SHARED_BYTES_PER_CLOCK if persistent else L2_BYTES_PER_CLOCK)
        + state / (SHARED_BYTES_PER_CLOCK if alone else L2_BYTES_PER_CLOCK)
        + 3
        * units
        * max(rows, 16)
        * columns
        * sets
        / (PRODUCTS_PER_CLOCK[arithmetic] * min(1.0, variant.num_warps / 4))
        + units * rows * (1 / GATES_PER_CLOCK + 2 * 4 * variant.splits / SHARED_BYTES_PER_CLOCK)
    )
    rounds = 1 if alone or library else ceil_div(state, FLIGHT_BYTES * 32 * variant.num_warps)
    tiles = ceil_div(spec.hidden, units) * ceil_div(size.batch, rows) * spec.layers * spec.directions
    steps = size.seq + spec.layers - 1
    sets_bytes = spec.layers * spec.directions * 3 * spec.hidden * spec.hidden * spec.item
    return (
        Work(
            programs=tiles,
            warps=variant.num_warps,
            memory_bytes=sets_bytes + 4 * size.seq * size.batch * spec.directions * spec.hidden * spec.item,
            again_bytes=0.0,
            in_flight_bytes=min(state, 16 * 32 * variant.num_warps),
            elements=0.0,
            sines=0.0,
            pairs_per_thread=max(1.0, units * rows / (32 * variant.num_warps)),
            row_bytes=columns * spec.item,
            chain_us=steps * (STEP_US[how] + ROUND_US * (rounds - 1)),
            chain_clocks=steps * clocks,
        ),
    )


WORK = {"rope": rope_work, "gru_cell": gru_cell_work, "linear_cat": linear_cat_work, "gru": gru_work}
