"""Declare a knob where its field is: its choices, and the default that it has if nothing was tuned."""

from __future__ import annotations

import dataclasses
from typing import Any


def one_of(*choices: Any, default: Any, older: bool = False) -> Any:
    """A dataclass field that takes one of ``choices``, and ``default`` if nothing is known.

    ``older``: some records are older than the knob, and their kernels did what its default does.

    Raises:
        ValueError: if the default is not among the choices.
    """
    if default not in choices:
        raise ValueError(f"the default must be one of {choices}, got {default!r}")
    return dataclasses.field(default=default, metadata={"choices": choices, "older": older})


def choices(variant_type: type) -> dict[str, tuple[Any, ...]]:
    """Knob name -> declared choices, in the order of declaration."""
    return {f.name: f.metadata["choices"] for f in dataclasses.fields(variant_type)}


def undeclared(variant: Any) -> str | None:
    """A sentence that names the value of ``variant`` that is not a declared choice, or None."""
    for name, allowed in choices(type(variant)).items():
        value = getattr(variant, name)
        # True == 1 in Python, but a numeric knob must not take a bool, nor the reverse.
        if not any(value == c and type(value) is type(c) for c in allowed):
            return f"{name} must be one of {allowed}, got {value!r}"
    return None
