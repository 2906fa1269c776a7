"""Count what the launches of a variant do: programs, bytes, sines, threads; nothing is run or compiled for it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from tuned.launch import ceil_div
from tuned.rope.launches import programs
from tuned.rope.spec import ITEM_SIZE
from tuned.rope.variant import half_block

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
    seq, batch = (size.tokens, 1) if spec.packed else (size.seq, size.batch)
    count = programs(spec, variant, seq, batch)
    tile_rows = variant.block_tokens * variant.block_heads
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=size.tokens * spec.bytes_per_token() + size.seq * angle_row,
            again_bytes=max(0.0, count * variant.block_tokens * angle_row - size.seq * angle_row),
            in_flight_bytes=tile_rows * spec.rotary_dim * item + variant.block_tokens * angle_row,
            elements=count * tile_rows * variant.head_steps * 2 * half,
            sines=count * variant.block_tokens * half * 2 * entries_per_pair if spec.takes_sine else 0,
            pairs_per_thread=tile_rows * half / (32 * variant.num_warps),
            row_bytes=half * item,
            early=variant.pdl,
        ),
    )


def gru_cell_work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The one launch of the gates: seven elements read and one written for each; three exponentials."""
    spec, size = problem.spec, problem.size
    tile = variant.block_batch * variant.block_hidden
    count = ceil_div(size.batch, variant.block_batch) * ceil_div(spec.hidden, variant.block_hidden)
    item = ITEM_SIZE[spec.dtype]
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=size.batch * spec.bytes_per_row(),
            again_bytes=count * 6 * variant.block_hidden * item if spec.bias else 0,
            in_flight_bytes=7 * tile * item,
            elements=8 * count * tile,
            sines=0.5 * count * tile,  # an exponential and a division are about a quarter of a sine
            pairs_per_thread=4 * tile / (32 * variant.num_warps),
        ),
    )


WORK = {"rope": rope_work, "gru_cell": gru_cell_work}
