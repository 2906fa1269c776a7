"""Compare what a row was measured with to what is here.

After a hard mismatch the row does not count. After a soft one it counts, and tuning again may find better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Field of a measurement's environment -> its name in messages.
HARD = {"device_name": "the device", "multiprocessors": "multiprocessors", "method": "the timing method"}
SOFT = {"triton": "Triton", "torch": "torch", "driver": "the driver"}
UNKNOWN = (None, "", "unknown")


def differences(measured: Mapping[str, Any], here: Mapping[str, Any], fields: Mapping[str, str]) -> list[str]:
    """A phrase for each of ``fields`` that both sides know and that differs."""
    return [
        f"{what} was {measured[name]}, here it is {here[name]}"
        for name, what in fields.items()
        if measured.get(name) not in UNKNOWN and here.get(name) not in UNKNOWN and measured[name] != here[name]
    ]


def changed_sources(digests: Mapping[str, str], kernels: Mapping[str, str]) -> list[str]:
    """A phrase that names the kernels whose source changed since it was measured; an empty list if none did.

    Args:
        digests: kernel -> digest of the source that was measured.
        kernels: kernel -> digest of its source now.
    """
    changed = sorted(name for name, digest in digests.items() if kernels.get(name) != digest)
    return [f"the source of {', '.join(changed)} changed since it was measured"] if changed else []
