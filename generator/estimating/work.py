"""How much of a launch a processor holds at a time."""

from __future__ import annotations

import math

from ..families.counting import Work
from ..measuring.compile import Resources
from .targets import Target

# Before anything is compiled: 8, 16 and 32 pairs a thread compiled to 32, 60 and 96 registers for sm_90.
BASE_REGISTERS, REGISTERS_PER_PAIR = 16, 2.6


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
