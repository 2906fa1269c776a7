"""What one rounding may change, and what sums of products may be off by: parts of the bounds of references."""

from __future__ import annotations

from typing import Any

import torch

# Unit roundoff: what one rounding to the type may change, relative.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
TF32_ROUNDOFF = 2.0**-11  # of an operand: 10 bits of fraction


def product_error(spec: Any, sizes: torch.Tensor) -> torch.Tensor:
    """What float32 sums of products may be off by, given the sums of the products' sizes.

    Any order of at most 2^12 additions stays well within 2^-17 of that sum: a bound for each would be 2^-24 times the
    longest chain, and tensor cores keep a few bits fewer while they add. TF32 rounds both operands first.
    """
    operands = 2 * TF32_ROUNDOFF if spec.precision == "tf32" else 0.0
    return sizes * (2.0**-17 + operands)
