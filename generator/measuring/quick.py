"""Triton's interpreter in less than half the time: it computes the same, and caches what it would compute again.

Most of its time goes into the types of tensors, which it makes anew for each operation, and into checks for integer
overflow, which take a dozen more operations each and whose results are dropped.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from . import shortcuts

KEPT = "_kept"  # attribute with cached results: of a function that is quick already, and of Triton's types


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Inside the block, kernels are interpreted with the same results in less time (Triton 3.5 to 3.9)."""
    import triton.language as tl  # noqa: PLC0415 - Triton decides at its import whether it interprets
    from triton.language.semantic import TritonSemantic  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    if hasattr(interpreter._get_np_dtype, KEPT):  # noqa: SLF001 - it is quick already
        yield
        return
    core: Any = tl.core
    builder = interpreter.InterpreterBuilder
    changes: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (interpreter, "_get_np_dtype", _np_dtype),
        (core, "_unwrap_if_constexpr", lambda as_is: _unwrap(as_is, core)),
        (core.dtype, "__eq__", lambda as_is: _same_dtype(as_is, core)),
        (core.tuple, "__eq__", lambda as_is: _same_tuple(as_is, core)),
        (core.block_type, "__init__", lambda as_is: _block_type(as_is, core)),
        (core.block_type, "__eq__", lambda as_is: lambda a, b: a.__dict__ is b.__dict__ or as_is(a, b)),
        (core.block_type, "with_element_ty", _with_element_ty),
        (core.block_type, "to_ir", lambda as_is: _to_ir(as_is, builder)),
        (core.tensor, "__init__", _tensor),
        (interpreter.FunctionRewriter, "rewrite_ast", _rewritten),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", lambda as_is: _overflow(as_is, builder)),
        *shortcuts.changes(core, interpreter, TritonSemantic),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, change in changes:
            setattr(owner, name, change(getattr(owner, name)))
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _np_dtype(as_is: Any) -> Any:
    kept: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        found = kept.get(dtype.name)
        if found is None:
            found = kept[dtype.name] = as_is(dtype)
        return found

    setattr(np_dtype, KEPT, kept)
    return np_dtype


def _unwrap(as_is: Any, core: Any) -> Any:
    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is int or kind is core.dtype else as_is(value)

    return unwrap


def _same_dtype(as_is: Any, core: Any) -> Any:
    def same(self: Any, other: Any) -> bool:
        if type(self) is type(other) is core.dtype:
            return self.name == other.name
        return as_is(self, other)

    return same


def _same_tuple(as_is: Any, core: Any) -> Any:
    def same(self: Any, other: Any) -> Any:
        values = other.values if type(other) is core.tuple else other
        if type(values) is list and all(type(value) is int for value in values):
            return core.constexpr(self.values == values)
        return as_is(self, other)

    return same


def _block_type(as_is: Any, core: Any) -> Any:
    """Types of one element and shape share one ``__dict__``, so what is cached for one of them is cached for all."""
    kept: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if not all(type(size) is int for size in sizes):
            as_is(self, element_ty, shape)
            return
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in kept:
            as_is(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            kept[key] = self.__dict__
        self.__dict__ = kept[key]

    return make


def _with_element_ty(as_is: Any) -> Any:
    def with_element_ty(self: Any, scalar: Any) -> Any:
        kept = self.__dict__.setdefault(KEPT, {})
        key = scalar.name, getattr(scalar, "address_space", None)
        if key not in kept:
            kept[key] = as_is(self, scalar)
        return kept[key]

    return with_element_ty


def _to_ir(as_is: Any, builder_type: type) -> Any:
    def to_ir(self: Any, builder: Any) -> Any:
        if not isinstance(builder, builder_type):
            return as_is(self, builder)
        if "_kept_ir" not in self.__dict__:
            self.__dict__["_kept_ir"] = as_is(self, builder)
        return self.__dict__["_kept_ir"]

    return to_ir


def _tensor(as_is: Any) -> Any:
    """All attributes of a tensor but its handle follow from its type: they are copied from an earlier tensor."""

    def make(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        kept = type.__dict__.get("_kept_tensor")
        if kept is None:
            as_is(self, handle, type)
            type.__dict__["_kept_tensor"] = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            self.__dict__.update(kept)
            self.handle = handle

    return make


def _rewritten(as_is: Any) -> Any:
    """The source of a function is read once and not twice, and its lines have their numbers from the first on."""

    def rewritten(self: Any) -> Any:
        try:
            lines, number = inspect.getsourcelines(self.fn)
        except (OSError, TypeError):
            return as_is(self)
        self.filename = self.fn.__code__.co_filename
        before = next((at for at, line in enumerate(lines) if line.strip().startswith("def ")), 0)
        self.def_file_lineno = number + before
        self.def_lineno = self._find_def(lines)
        above = "\n" * (self.def_file_lineno - 1)
        tree = self.ast_transformer.visit(ast.parse(above + self._prepare_source(lines)))
        return self._compile_and_exec(ast.fix_missing_locations(tree))

    return rewritten


def _overflow(as_is: Any, builder_type: type) -> Any:
    """Without the debug option, the interpreter drops the result of its overflow check, so the check is skipped."""

    def look(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug or not isinstance(self.builder, builder_type):
            as_is(self, lhs, rhs, binary_op)

    return look
