"""Triton's interpreter without two of its faults: products of bfloat16 (3.5 to 3.7), and scalars as bounds of a loop (3.6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def mended_interpreter() -> Iterator[None]:
    """Inside, interpreted kernels compute what they say.

    A tl.dot of bfloat16 multiplies what the bits mean, not the integers that stand for them; float32 sums, as on a GPU. A
    scalar that is an array of one element bounds a loop: NumPy 2.4 does not make an int of it, as Triton 3.6 asks.
    """
    import triton.language as tl  # noqa: PLC0415 - Triton decides at its import whether it interprets
    from triton.runtime import interpreter  # noqa: PLC0415

    builder = interpreter.interpreter_builder
    create_dot_as_is, patch_as_is = builder.create_dot, interpreter._patch_lang_tensor  # noqa: SLF001 - it is mended

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return builder.create_fp_ext(operand, tl.float32)

    def create_dot(a: Any, b: Any, *rest: Any) -> Any:
        return create_dot_as_is(widened(a), widened(b), *rest)

    def patch(tensor: Any, *rest: Any) -> None:
        patch_as_is(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())  # as Triton 3.7 has it

    builder.create_dot, interpreter._patch_lang_tensor = create_dot, patch  # noqa: SLF001
    try:
        yield
    finally:
        builder.create_dot, interpreter._patch_lang_tensor = create_dot_as_is, patch_as_is  # noqa: SLF001
