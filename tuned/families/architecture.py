"""What the choice of a variant needs to know of GPU architectures; 90 is compute capability 9.0, 0 is AMD."""

from __future__ import annotations

PDL_CAPABILITY = 90  # griddepcontrol: PTX ISA, sm_90 and up
FLOAT8_CAPABILITY = 89  # cvt to e4m3x2: PTX ISA, sm_89 and up
# KiB of shared memory that a program may have, which is what a thread block may opt in to: CUDA C++ Programming Guide,
# table of technical specifications per compute capability. 0 is AMD's CDNA 3: the LDS of a workgroup, by its ISA guide.
SHARED_KIB = {
    0: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    101: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}
LEAST_SHARED = (0, 120)  # capabilities with the least shared memory: a variant that fits these two fits all


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that a program may have on a compute capability.

    A capability that is not in the table counts as 12.0 if it is later, as 10.0 if it is above 9.0, else as the one with least.
    """
    like = 120 if capability >= 120 else 100 if capability > 90 else 0  # noqa: PLR2004 - 12.0, 9.0
    return 1024 * SHARED_KIB.get(capability, SHARED_KIB[like])
