"""What the choice of a variant needs to know of GPU architectures; 90 is compute capability 9.0, 0 is AMD."""

from __future__ import annotations

PDL_CAPABILITY = 90  # griddepcontrol: PTX ISA, sm_90 and up
# Shared memory a program may have, in bytes: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DESKTOP_SHARED_BYTES = 99 * 1024  # of compute capability 12
OTHER_SHARED_BYTES = 64 * 1024  # AMD's CDNA 3, and what is not known
LEAST_SHARED = (0, 120)  # capabilities with the least shared memory: a variant that fits these two fits all


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that a program may have on a compute capability."""
    if capability >= 120:  # noqa: PLR2004 - 12.0
        return DESKTOP_SHARED_BYTES
    return SHARED_BYTES.get(capability, SHARED_BYTES[100] if capability > 90 else OTHER_SHARED_BYTES)  # noqa: PLR2004
