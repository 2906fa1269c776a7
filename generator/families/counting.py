"""What one launch does, as families count it for the estimate; nothing is run or compiled for it."""

from __future__ import annotations

import dataclasses


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
