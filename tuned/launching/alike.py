"""Recognise a repeated call at once: one C function compares its tensors with those of an earlier call.

The function is a method of ``TensorGuards``, a private class of torch for the guards of compiled code. It compares types,
dispatch keys (so modes, transforms, and lazy negation and conjugation), dtypes, devices, shapes, strides and which tensors
require a gradient, and keeps no tensor. If this torch has no such class, or one that takes other arguments, calls are
recognised by their properties alone, as every call is the first two times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuned.launching.plan import ALIGNED_BYTES, remember

MOST = 4  # kinds of tensors remembered for one key
SELDOM = 64  # one in so many calls of further kinds replaces the oldest kind of its key
Alike = Callable[..., Any]

_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)  # noqa: SLF001
_crowded = itertools.count(1)


def learn(
    table: dict[Any, Any], key: Any, tensors: Sequence[torch.Tensor | None], plan: Any, *, addresses: bool = True
) -> None:
    """Let calls with tensors like these find their plan in ``table``, among the pairs (alike, plan) of ``key``.

    ``alike(*tensors)`` is true for tensors that are None where these are None, and else like these in all that a kernel may depend
    on. It then returns the addresses of those that are not None. With ``addresses=False`` it returns True: for a plan that takes
    no addresses, and so does not depend on their alignment. ``key`` is what else a plan depends on, including whether gradients
    are enabled if the plan depends on that.
    """
    if _Guards is None:
        return
    found = table.get(key, ())
    if len(found) >= MOST:
        if next(_crowded) % SELDOM:
            return
        found = found[1:]
    # If no comparison can be built, remember that too: trying again takes longer than a call.
    remember(table, key, (*found, (_compare(tensors, addresses) or _never, plan)))


def _never(*_tensors: Any) -> bool:
    return False


def _compare(tensors: Sequence[torch.Tensor | None], addresses: bool) -> Alike | None:  # noqa: FBT001
    """The function ``alike`` of ``learn``; None if it cannot be built for these tensors."""
    firsts = [next((i for i, other in enumerate(tensors) if other is t), 0) for t in tensors]  # first index of each
    apart = [t for i, t in enumerate(tensors) if t is not None and firsts[i] == i]
    try:
        sizes = {
            "dynamic_dims_sizes": [list(t.shape) for t in apart],
            "dynamic_dims_strides": [list(t.stride()) for t in apart],
        }
        check = _Guards(*apart, **sizes).check
        offsets = tuple(t.data_ptr() % ALIGNED_BYTES for t in apart) if addresses else ()
        places = tuple(None if t is None else firsts[i] for i, t in enumerate(tensors))
        alike = _written(places, offsets if any(offsets) else None, addresses)(check)
        return alike if alike(*tensors) else None
    except (TypeError, ValueError, RuntimeError, SystemError):  # another torch has other guards
        return None


@functools.cache
def _written(
    places: tuple[int | None, ...],
    offsets: tuple[int, ...] | None,
    addressed: bool,  # noqa: FBT001
) -> Callable[[Any], Alike]:
    """A function that makes ``alike`` from a check of TensorGuards. Its code is written out: loops would triple its time.

    ``places``: for each argument, the index of the first argument that is the same tensor, or None if it is None; the check takes
    those first arguments. ``offsets``: how far their addresses are from multiples of ALIGNED_BYTES; None if all are 0.
    ``addressed``: ``alike`` returns the addresses.
    """
    names = [f"t{i}" for i in range(len(places))]
    apart = [names[i] for i, place in enumerate(places) if place == i]
    same = [
        f"{name} is {'None' if at is None else names[at]}"
        for name, at in zip(names, places, strict=True)
        if names.index(name) != at
    ]
    check = f"check({', '.join(apart)})"
    addresses = [f"(at_{name} := {name}.data_ptr())" for name in apart]
    if not addressed:
        return _made(names, [*same, check])
    if offsets is None:
        aligned = [f"not ({' | '.join(addresses)}) % {ALIGNED_BYTES}"]
    else:
        aligned = [f"{address} % {ALIGNED_BYTES} == {at}" for address, at in zip(addresses, offsets, strict=True)]
    found = f"({''.join(f'at_{names[place]}, ' for place in places if place is not None)})"
    return _made(names, [*same, check, *aligned, found])


def _made(names: list[str], asked: list[str]) -> Callable[[Any], Alike]:
    return eval(f"lambda check: lambda {', '.join(names)}: {' and '.join(asked)}")  # type: ignore[no-any-return]  # noqa: S307 - of these names alone
