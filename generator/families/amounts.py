"""Figures that families share: the work of one launch, counted for the estimate, and bounds of roundings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


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
    row_bytes: float = 16.0  # contiguous bytes of a tile
    early: bool = False  # programmatic dependent launch
    chain_us: float = 0.0  # waits of a recurrence's steps, one after the other, the same on any device
    chain_clocks: float = 0.0  # clocks of a processor for all steps of one program


# Unit roundoff: the largest relative change of one rounding to the type.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
TF32_ROUNDOFF = 2.0**-11  # of an operand: 10 bits of fraction


def product_error(spec: Any, sizes: torch.Tensor) -> torch.Tensor:
    """The largest error of float32 sums of products, given the sums of the products' absolute values.

    Any order of at most 2^12 additions stays well within 2^-17 of that sum: a bound for each would be 2^-24 times the
    longest chain, and tensor cores keep a few bits fewer while they add. TF32 rounds both operands first.
    """
    operands = 2 * TF32_ROUNDOFF if spec.precision == "tf32" else 0.0
    return sizes * (2.0**-17 + operands)
