"""What a row was measured with, against what is here: a hard mismatch and the row does not count, a soft one and it is worth tuning again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Field of what was measured -> how a person calls it.
HARD = {"device_name": "the device", "multiprocessors": "multiprocessors", "method": "the timing method"}
SOFT = {"triton": "Triton", "torch": "torch", "driver": "the driver"}
UNKNOWN = (None, "", "unknown")


def differences(measured: Mapping[str, Any], here: Mapping[str, Any], fields: Mapping[str, str]) -> list[str]:
    """A phrase for each of ``fields`` that both sides know and that is not the same."""
    return [
        f"{what} was {measured[name]}, here it is {here[name]}"
        for name, what in fields.items()
        if measured.get(name) not in UNKNOWN and here.get(name) not in UNKNOWN and measured[name] != here[name]
    ]


def changed_sources(digests: Mapping[str, str], kernels: Mapping[str, str]) -> list[str]:
    """The phrase for kernels whose text is not the one that was measured, if there are any.

    Args:
        digests: kernel -> digest of the text that was measured.
        kernels: the same, of the texts that there are now.
    """
    changed = sorted(name for name, digest in digests.items() if kernels.get(name) != digest)
    return [f"the source of {', '.join(changed)} changed since it was measured"] if changed else []
