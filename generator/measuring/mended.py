"""Triton's interpreter without four of its faults.

Wrong products of bfloat16 (3.5 to 3.7), wrong casts to float8 (3.5 to 3.7), scalars that cannot bound a loop (3.6), and
a quarter of the time spent on searching for what to patch, at each call of a function inside a kernel (3.5 to 3.7).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from .quick import quick_interpreter


@contextlib.contextmanager
def patched_once() -> Iterator[None]:
    """Inside the block, triton.language is patched once for each launch, and not again where a kernel calls a function."""
    import triton.language as tl  # noqa: PLC0415 - Triton decides at its import whether it interprets
    from triton.runtime import interpreter  # noqa: PLC0415

    patch_as_is = interpreter._patch_lang  # noqa: SLF001 - it is mended
    if getattr(patch_as_is, "once", False):
        yield
        return
    patched: set[str] = set()  # names of modules, while a launch runs
    known: dict[Any, set[str]] = {}
    changes: dict[Any, list[tuple[Any, str, Any, Any]]] = {}  # what was changed: owner, name, before, after

    def patch(function: Any) -> Any:
        found = known.get(function)
        if found is None:
            values = function.__globals__.values()
            found = {module.__name__ for module in (tl, tl.core) if any(value is module for value in values)}
            known[function] = found
        if found and found <= patched:
            return None  # Triton uses only the scope that patching for the kernel itself returns
        outermost = not patched
        scope = again(found) if outermost else None
        if scope is None:
            scope = patch_as_is(function)
            if outermost and hasattr(scope, "_changes"):
                first = {(id(owner), name): (owner, name, before) for owner, name, before in reversed(scope._changes)}  # noqa: SLF001 - nothing else tells
                changes[of(found)] = [(*change, getattr(*change[:2])) for change in first.values()]
        patched.update(found)

        def restore() -> None:
            scope.restore()
            patched.clear()

        return types.SimpleNamespace(restore=restore) if outermost else scope

    def of(found: set[str]) -> Any:
        return frozenset(found), interpreter._patch_lang_tensor  # noqa: SLF001 - which may be mended

    def again(found: set[str]) -> Any:
        """Make the changes of an earlier launch; None if there were none, or if now others would be made.

        Triton searches all of triton.language for what to change, which takes a millisecond.
        """
        done = changes.get(of(found))
        if done is None or any(getattr(owner, name, before) is not before for owner, name, before, _ in done):
            return None
        scope = interpreter._LangPatchScope()  # noqa: SLF001 - as Triton does
        for owner, name, _, after in done:
            scope.set_attr(owner, name, after)
        return scope

    patch.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch  # noqa: SLF001
    try:
        yield
    finally:
        interpreter._patch_lang = patch_as_is  # noqa: SLF001


@contextlib.contextmanager
def mended_interpreter() -> Iterator[None]:
    """Inside the block, interpreted kernels compute what they say.

    A tl.dot of bfloat16 multiplies the values, not the integers that hold their bits; it sums in float32, as on a GPU.
    A scalar that is an array of one element may bound a loop: Triton 3.6 relies on an int() of it that NumPy 2.4
    refuses. A cast of float32 to float8e4nv rounds to the nearest, as GPUs and PyTorch do, and a NaN stays a NaN.
    """
    import numpy as np  # noqa: PLC0415 - Triton's interpreter needs it
    import torch  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415 - Triton decides at its import whether it interprets
    from triton.runtime import interpreter  # noqa: PLC0415

    builder = interpreter.interpreter_builder
    create_dot_as_is, patch_as_is = builder.create_dot, interpreter._patch_lang_tensor  # noqa: SLF001 - it is mended
    cast_as_is = builder.create_fp_to_fp

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return builder.create_fp_ext(operand, tl.float32)

    def create_dot(a: Any, b: Any, *rest: Any) -> Any:
        return create_dot_as_is(widened(a), widened(b), *rest)

    def cast(source: Any, to: Any, *rest: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.float8e4nv:
            return cast_as_is(source, to, *rest)
        rounded = torch.from_numpy(np.array(source.data)).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), to.scalar)

    def patch(tensor: Any, *rest: Any) -> None:
        patch_as_is(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())  # as Triton 3.7 has it

    builder.create_dot, interpreter._patch_lang_tensor = create_dot, patch  # noqa: SLF001
    builder.create_fp_to_fp = cast
    try:
        with patched_once(), quick_interpreter():
            yield
    finally:
        builder.create_dot, interpreter._patch_lang_tensor = create_dot_as_is, patch_as_is  # noqa: SLF001
        builder.create_fp_to_fp = cast_as_is
