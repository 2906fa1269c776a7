"""Products of bfloat16 in Triton's interpreter, which multiplies the integers that stand for them (3.5 to 3.7)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def bfloat16_dots() -> Iterator[None]:
    """Inside, an interpreted tl.dot of bfloat16 multiplies what the bits mean; float32 sums, as on a GPU."""
    import triton.language as tl  # noqa: PLC0415 - Triton decides at its import whether it interprets
    from triton.runtime import interpreter  # noqa: PLC0415

    builder = interpreter.interpreter_builder
    as_is = builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return builder.create_fp_ext(operand, tl.float32)

    def create_dot(a: Any, b: Any, *rest: Any) -> Any:
        return as_is(widened(a), widened(b), *rest)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = as_is
