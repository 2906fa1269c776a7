"""Devices to compile and estimate for without having them, and how many programs of a launch a processor holds at a time."""

from __future__ import annotations

import dataclasses
import difflib
import math

from ..families.amounts import Work
from ..measuring.compile import Resources

# A guess before anything is compiled: for sm_90, 8, 16 and 32 pairs a thread compiled to 32, 60 and 96 registers.
BASE_REGISTERS, REGISTERS_PER_PAIR = 16, 2.6


@dataclasses.dataclass(frozen=True)
class Target:
    """What the estimate must know about a device, from its maker's documents."""

    device: str  # as tuned.lookup.record.device_slug names it
    architecture: str  # for generator.measuring.compile.target_of
    processors: int  # SMs, or CUs
    bandwidth_gb_s: float  # of memory, as its maker states it
    clock_ghz: float  # boost
    threads: int  # resident on a processor at most
    programs: int  # resident on a processor at most
    registers: int  # 32-bit, a processor
    shared_bytes: int  # a processor
    warp: int = 32

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 for a device without a compute capability."""
        return int(self.architecture.removeprefix("sm_")) if self.architecture.startswith("sm_") else 0


class UnknownTargetError(ValueError):
    """No such device is known; the message lists the known ones."""


# Processors, bandwidth, clock: the makers' data sheets (NVIDIA H200, H100 SXM, A100 80 GB SXM, B200; NVIDIA Ada, Ampere
# GA102 and Blackwell white papers; AMD MI300X data sheet). Threads, programs, registers, shared memory: CUDA C++
# Programming Guide, technical specifications per compute capability; AMD CDNA 3 ISA guide.
LIMITS = {  # architecture -> threads, programs, registers, shared bytes, threads of a warp
    "sm_80": (2048, 32, 65536, 167_936),
    "sm_86": (1536, 16, 65536, 102_400),
    "sm_89": (1536, 24, 65536, 102_400),
    "sm_90": (2048, 32, 65536, 233_472),
    "sm_100": (2048, 32, 65536, 233_472),
    "sm_120": (1536, 24, 65536, 102_400),
    "gfx942": (2048, 32, 131_072, 65_536, 64),
}
TARGETS = {
    device: Target(device, architecture, processors, bandwidth_gb_s, clock_ghz, *LIMITS[architecture])
    for device, architecture, processors, bandwidth_gb_s, clock_ghz in (
        ("nvidia_h200", "sm_90", 132, 4800, 1.98),
        ("nvidia_h100_80gb_hbm3", "sm_90", 132, 3350, 1.98),
        ("nvidia_a100_sxm4_80gb", "sm_80", 108, 2039, 1.41),
        ("nvidia_b200", "sm_100", 148, 8000, 1.96),
        ("nvidia_geforce_rtx_3090", "sm_86", 82, 936, 1.70),
        ("nvidia_geforce_rtx_4090", "sm_89", 128, 1008, 2.52),
        ("nvidia_geforce_rtx_5090", "sm_120", 170, 1792, 2.41),
        ("amd_instinct_mi300x", "gfx942", 304, 5300, 2.10),
    )
}


def target_named(name: str) -> Target:
    """A known device by its name, or by a part that only one name has ("h100", "rtx_4090").

    Raises:
        UnknownTargetError: no device matches, or several do.
    """
    wanted = name.lower().replace(" ", "_").replace("-", "_")
    if wanted in TARGETS:
        return TARGETS[wanted]
    found = [t for device, t in TARGETS.items() if wanted and wanted in device]
    if len(found) == 1:
        return found[0]
    close = difflib.get_close_matches(wanted, TARGETS, n=2, cutoff=0.4)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise UnknownTargetError(f"no single target {name!r}.{hint} There are: {', '.join(TARGETS)}")


def resident(work: Work, target: Target, need: Resources | None) -> int:
    """Programs of a launch that a processor holds at a time; at least 1."""
    threads = target.warp * work.warps
    registers = registers_of(work, need)
    by_registers = target.registers // (max(8, math.ceil(registers / 8) * 8) * threads)
    by_shared = target.shared_bytes // ((need.shared_bytes if need else 0) + 1024)  # the system takes 1 KiB a program
    return max(1, min(target.threads // threads, int(by_registers), by_shared, target.programs))


def registers_of(work: Work, need: Resources | None) -> float:
    """Registers a thread: the compiler's count, or a guess from the pairs a thread."""
    return need.registers if need else BASE_REGISTERS + REGISTERS_PER_PAIR * work.pairs_per_thread
