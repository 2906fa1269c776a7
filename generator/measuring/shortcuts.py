"""Operators on interpreted tensors as one call of NumPy, where Triton's interpreter takes a dozen steps to the same call.

What an operator does follows from the types of its operands. The first time that two types meet, the interpreter's own
operator runs; if NumPy's function gives the same bits, that function is called from then on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

_SIGNED = ("int8", "int16", "int32", "int64")
_EXACT = ("int1", *_SIGNED, "fp16", "fp32", "fp64")  # types that NumPy has: bfloat16 and float8 are kept as bits
_MOST = 2**31
_NORMAL = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the least and the largest normal float32
_ELSE = "as it is"  # a plan that says: call the interpreter's own operator


def _divided(a: Any, b: Any) -> Any:
    """Integer division rounded to 0, as on GPUs."""
    return (a - np.fmod(a, b)) // b


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _divided,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")


@dataclasses.dataclass(frozen=True)
class Triton:
    """The parts of Triton that interpret: triton.language.core, triton.runtime.interpreter and a semantic for them."""

    core: Any
    interpreter: Any
    semantic: Any

    def made(self, data: Any, element: Any, type: Any) -> Any:  # noqa: A002 - Triton's name
        """A tensor of these data and type, made without checking that they fit."""
        handle_type = self.interpreter.TensorHandle
        handle = handle_type.__new__(handle_type)
        handle.data, handle.dtype, handle.attr = data, element, {}
        return self.core.tensor(handle, type)


_numbers = itertools.count()
_known: dict[Any, int] = {}


def number_of(type: Any) -> int:  # noqa: A002 - Triton's name
    """A number for each type: equal for types of one element and shape."""
    kept = type.__dict__
    number = kept.get("_number")
    if number is None:
        shape = kept.get("shape")
        element = type.scalar
        key = element.name, getattr(element, "address_space", None), None if shape is None else tuple(shape)
        number = kept["_number"] = _known.setdefault(key, next(_numbers))
    return number  # type: ignore[no-any-return]


def _constant(name: str, value: Any) -> Any:
    """The operand that Triton makes of a Python number beside a tensor of this type; None for cases not covered here."""
    if type(value) is int and (name in _SIGNED or name == "fp32") and -_MOST <= value < _MOST:
        if name in _SIGNED and not np.iinfo(name).min <= value <= np.iinfo(name).max:
            return None
        return np.array([value], dtype=np.float32 if name == "fp32" else name)
    if type(value) is float and name == "fp32" and (_NORMAL[0] <= abs(value) <= _NORMAL[1] or abs(value) == np.inf):
        return np.array([value], dtype=np.float32)
    return None


def _pointers(size: int) -> Callable[[Any, Any], Any]:
    return lambda a, b: a + size * b.astype(np.uint64)


def _function(what: str, a: Any, b: Any, as_numpy: Any) -> Any:
    """NumPy's function for operands of these types, or None."""
    if a.is_ptr() and what == "add" and b.name in _SIGNED:
        return _pointers(max(1, a.element_ty.primitive_bitwidth // 8))
    if a.name == b.name and a.name in _EXACT:
        return as_numpy
    return as_numpy if a.name in _SIGNED and b.name in _SIGNED else None


def binary(as_is: Any, triton: Triton, what: str, *, reflected: bool = False) -> Any:
    """The operator as a method of a tensor; code that is compiled calls it with a ``_semantic`` of its own."""
    as_numpy = FUNCTIONS[what]
    core, semantic, made = triton.core, triton.semantic, triton.made
    tensor, constexpr, handle_type = core.tensor, core.constexpr, triton.interpreter.TensorHandle
    of_tensors: dict[Any, Any] = {}
    of_numbers: dict[type, dict[Any, Any]] = {int: {}, float: {}}

    def planned(self: Any, other: Any, result: Any) -> Any:
        """(function, constant, type and element of the result), or _ELSE."""
        if type(result) is not tensor or type(self.handle) is not handle_type:
            return _ELSE
        scalar, constant = self.type.scalar, None
        if type(other) is tensor:
            function, operand = _function(what, scalar, other.type.scalar, as_numpy), other.handle.data
        else:
            constant = operand = _constant("int64" if scalar.is_ptr() else scalar.name, other)
            function = as_numpy if not scalar.is_ptr() else _function(what, scalar, core.int32, as_numpy)
        if function is None or operand is None:
            return _ELSE
        both = (operand, self.handle.data) if reflected else (self.handle.data, operand)
        try:
            with np.errstate(all="ignore"):
                tried, found = function(*both), result.handle.data
        except TypeError:  # NumPy does not subtract booleans
            return _ELSE
        same = tried.dtype == found.dtype and tried.shape == found.shape and tried.tobytes() == found.tobytes()
        return (function, constant, result.type, result.handle.dtype) if same else _ELSE

    def quick(self: Any, other: Any, _semantic: Any = None) -> Any:
        if _semantic is not None:
            return as_is(self, other, _semantic=_semantic)
        kind = type(other)
        if kind is constexpr:
            other = other.value
            kind = type(other)
        handle = self.handle
        if kind is tensor:
            key: Any = number_of(self.type), number_of(other.type), handle.dtype.name
            plans = of_tensors
        elif kind in of_numbers:
            key, plans = (number_of(self.type), other, handle.dtype.name), of_numbers[kind]
        else:
            return as_is(self, other, _semantic=semantic)
        plan = plans.get(key)
        if plan is None:
            result = as_is(self, other, _semantic=semantic)
            plans[key] = planned(self, other, result)
            return result
        if plan is _ELSE:
            return as_is(self, other, _semantic=semantic)
        function, operand, type_of, dtype = plan
        if operand is None:
            operand = other.handle.data
        data = function(operand, handle.data) if reflected else function(handle.data, operand)
        return made(data, dtype, type_of)

    return quick


def index(as_is: Any, triton: Triton) -> Any:
    """Indexing that adds axes of size 1 to a block, such as ``x[:, None]``."""
    plans: dict[Any, Any] = {}
    semantic = triton.semantic

    def is_whole(one: Any) -> bool:
        return type(one) is slice and one.start is None and one.stop is None and one.step is None

    def quick(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if _semantic is not None:
            return as_is(self, slices, _semantic=_semantic)
        if type(slices) is not tuple or not all(one is None or is_whole(one) for one in slices):
            return as_is(self, slices, _semantic=semantic)
        key = number_of(self.type), tuple([one is None for one in slices])
        plan = plans.get(key)
        if plan is None:
            result = as_is(self, slices, _semantic=semantic)
            block = self.type.is_block() and result.handle.data.shape == self.handle.data[slices].shape
            plans[key] = result.type if block else _ELSE
            return result
        if plan is _ELSE:
            return as_is(self, slices, _semantic=semantic)
        return triton.made(self.handle.data[slices], self.handle.dtype, plan)

    return quick


_CASTS = {(a, b) for a in (*_SIGNED, "int1") for b in (*_SIGNED, "fp32", "fp64") if a != b} | {
    ("fp16", "fp32"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "fp32")
}  # fmt: skip


def cast(as_is: Any, triton: Triton) -> Any:
    """A cast of a tensor between element types that NumPy has."""
    plans: dict[Any, Any] = {}
    dtype_type, builder_type = triton.core.dtype, triton.interpreter.InterpreterBuilder

    def quick(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:  # noqa: A002 - Triton's names
        if (
            fp_downcast_rounding is not None
            or type(dst_ty) is not dtype_type
            or not isinstance(self.builder, builder_type)
        ):
            return as_is(self, input, dst_ty, fp_downcast_rounding)
        key = number_of(input.type), dst_ty.name, input.handle.dtype.name
        plan = plans.get(key)
        if plan is None:
            result = as_is(self, input, dst_ty)
            if result is input:
                plans[key] = True
            elif (input.type.scalar.name, dst_ty.name) in _CASTS and input.handle.dtype.name == input.type.scalar.name:
                plans[key] = result.handle.data.dtype, result.handle.dtype, result.type
            else:
                plans[key] = _ELSE
            return result
        if plan is True:
            return input
        if plan is _ELSE:
            return as_is(self, input, dst_ty)
        return triton.made(input.handle.data.astype(plan[0]), plan[1], plan[2])

    return quick


def broadcast(as_is: Any, triton: Triton) -> Any:
    """The broadcast of two tensors to one shape: how each gets it follows from their types."""
    plans: dict[Any, Any] = {}
    handle_type, builder_type = triton.interpreter.TensorHandle, triton.interpreter.InterpreterBuilder

    def plannable(given: Any, found: Any) -> bool:
        return found is given or (given.type.is_block() and type(found.handle) is handle_type)

    def spread(given: Any, plan: Any) -> Any:
        if plan is None:
            return given
        return triton.made(np.broadcast_to(given.handle.data, plan.shape), given.handle.dtype, plan)

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = getattr(lhs.type, "shape", None)  # a scalar has none
        if shape is not None and shape is getattr(rhs.type, "shape", None):
            return lhs, rhs
        if not isinstance(self.builder, builder_type):
            return as_is(self, lhs, rhs)
        key = number_of(lhs.type), number_of(rhs.type)
        plan = plans.get(key)
        if plan is None:
            a, b = as_is(self, lhs, rhs)
            both = plannable(lhs, a) and plannable(rhs, b)
            plans[key] = (None if a is lhs else a.type, None if b is rhs else b.type) if both else _ELSE
            return a, b
        if plan is _ELSE:
            return as_is(self, lhs, rhs)
        return spread(lhs, plan[0]), spread(rhs, plan[1])

    return quick


Change = tuple[Any, str, Callable[[Any], Any]]


def changes(core: Any, interpreter: Any, semantic_type: Any) -> list[Change]:
    """What to change in Triton: the owner, the name, and a function from the present attribute to the new one."""
    triton = Triton(core, interpreter, semantic_type(interpreter.interpreter_builder))

    def operator(what: str, *, reflected: bool) -> Change:
        name = f"__{'r' if reflected else ''}{what}__"
        return core.tensor, name, lambda as_is: binary(as_is, triton, what, reflected=reflected)

    return [
        (core.tensor, "__getitem__", lambda as_is: index(as_is, triton)),
        (semantic_type, "cast", lambda as_is: cast(as_is, triton)),
        (semantic_type, "broadcast_impl_value", lambda as_is: broadcast(as_is, triton)),
        *(operator(what, reflected=False) for what in FUNCTIONS),
        *(operator(what, reflected=True) for what in REFLECTED),
    ]
