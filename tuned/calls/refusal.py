"""Tell errors of argument checks from errors of what runs afterwards.

PyTorch's modules, and its functions while they are patched, raise their own errors for wrong arguments. So a call there
that our checks refuse is passed on to PyTorch.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_MARK = "refused_by_tuned"


def refuses(check: Callable[..., T]) -> Callable[..., T]:
    """``check``, with its TypeErrors and ValueErrors marked, so that ``was_refused`` is true for them."""

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> T:
        try:
            return check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if not torch.compiler.is_dynamo_compiling():  # Dynamo sets no attribute of an error
                setattr(error, _MARK, True)
            raise

    return checked


def was_refused(error: Exception) -> bool:
    """Whether an error comes from an argument check, so that nothing has run; always False while torch.compile traces."""
    return not torch.compiler.is_dynamo_compiling() and getattr(error, _MARK, False)


def no_tensor(**named: Any) -> TypeError:
    """The error that names the first of these arguments that is no tensor.

    Use it where a call has failed already: asking before would cost each call time.
    """
    for name, given in named.items():
        if not isinstance(given, torch.Tensor):
            return TypeError(
                f"{name} must be a tensor, got {type(given).__name__}: convert it with torch.as_tensor(...), on the device of the others"
            )
    kinds = [type(given).__name__ for given in named.values()]
    return TypeError(f"{' and '.join(named)} must be plain tensors, got {kinds}: convert them")


def check_dense(named: Mapping[str, Any]) -> None:
    """Refuse tensors without strides, sparse and nested ones. Arguments that are no tensors pass.

    Raises:
        TypeError: a tensor has no strides.
    """
    for name, t in named.items():
        if not isinstance(t, torch.Tensor) or (t.layout is torch.strided and not t.is_nested):
            continue
        kind, way_out = str(t.layout).removeprefix("torch."), "convert it with .to_dense()"
        if t.is_nested:
            kind = "nested"
            way_out = "pass what it packs, .values() of a jagged one, with .offsets().int() as cu_seqlens, or .to_padded_tensor(0)"
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one: {way_out}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of Python or of NumPy."""
    return not isinstance(value, bool) and isinstance(value, (int, float, numbers.Real))


def check_flag(name: str, value: Any, way_out: str = "pass True or False") -> None:
    """Refuse what is given in the place of a bool and would count as True whatever it says; and a tensor.

    Raises:
        TypeError: the value is one of these.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a bool, got a tensor, whose value may change: convert it with bool(...)")
    whole = isinstance(value, int) and value in (0, 1)  # bools, and what C and NumPy write for them
    if not whole and type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be a bool, got {value!r}: {way_out}")
