"""What a variant does: programs, bytes, sines, threads; what a program takes at a time."""

from __future__ import annotations

from typing import Any

from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant, pieces
from tuned.families.gru.variant import alone as runs_alone
from tuned.families.launch import ceil_div

from ...problem import Problem
from ..counting import Work

# Of the recurrence, measured on an H200: what a time step takes besides the work of a program in it.
STEP_US = {"alone": 0.2, "spin": 1.2, "probe": 1.2, "poll": 1.5, "counter": 1.8, "steps": 2.0, "library": 4.0}
# Bytes a clock of a processor, from shared memory (CUDA C++ Programming Guide) and, by published microbenchmarks, from L2.
SHARED_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 40
# Multiplications a clock of a processor, at about half of what a data sheet says for large tiles.
PRODUCTS_PER_CLOCK = {"float16": 1024, "bfloat16": 1024, "tf32": 512, "ieee": 64}
FLIGHT_BYTES, ROUND_US = 128, 0.6  # a thread waits for eight loads of 16 bytes together, and so long from L2
GATES_PER_CLOCK = 2  # elements of the state: some 60 instructions on 128 lanes


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """All steps of a sequence as one launch.

    What decides is the chain of steps: each waits for the others' states, reads the state of its rows from L2 and its
    weights from where they are, multiplies and computes its gates.
    """
    spec, size = problem.spec, problem.size
    library = variant.strategy == "library"
    persistent = variant.strategy == "persistent"
    alone = persistent and runs_alone(spec, variant)
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


def tile(_spec: GruSpec, variant: GruVariant) -> tuple[int, int]:
    """Rows, and units of each, that a program takes at a time."""
    return variant.block_batch, variant.block_hidden
