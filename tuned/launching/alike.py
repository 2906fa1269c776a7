"""Calls known again at once: one C function compares a call's tensors with those of a call before.

It is ``TensorGuards``, torch's own of its guards of compiled code, and not public. It knows types, dispatch keys (so modes,
transforms, and what is negated or conjugated lazily), dtypes, devices, shapes, strides and who requires a gradient, and keeps no
tensor. Where there is none, or it takes other arguments, calls are known by their properties alone, as every call is the first
two times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuned.launching.plan import ALIGNED_BYTES, remember

MOST = 4  # kinds of tensors of one key
SELDOM = 64  # calls of further kinds, after which the oldest of a key makes room
Alike = Callable[..., Any]

_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)  # noqa: SLF001
_crowded = itertools.count(1)


def learn(
    table: dict[Any, Any], key: Any, tensors: Sequence[torch.Tensor | None], plan: Any, *, addresses: bool = True
) -> None:
    """Let calls with tensors like these find their plan in ``table``, among the pairs (alike, plan) of ``key``.

    ``alike(*tensors)`` is whether a call's are: None where these are None, else alike in all that a kernel may depend on. If they
    are, it gives the addresses of those that are not None; with ``addresses=False``, for a plan that takes no addresses and so
    does not depend on their alignment, True. The key is what else a plan depends on, with whether gradients are enabled if it
    depends on that.
    """
    if _Guards is None:
        return
    found = table.get(key, ())
    if len(found) >= MOST:
        if next(_crowded) % SELDOM:
            return
        found = found[1:]
    # Where nothing compares them, that is remembered too: trying takes longer than a call.
    remember(table, key, (*found, (_compare(tensors, addresses) or _never, plan)))


def _never(*_tensors: Any) -> bool:
    return False


def _compare(tensors: Sequence[torch.Tensor | None], addresses: bool) -> Alike | None:  # noqa: FBT001
    """The function ``alike`` of ``learn``; None if there is none for these."""
    firsts = [next((i for i, other in enumerate(tensors) if other is t), 0) for t in tensors]  # of those that are one
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
    except (TypeError, ValueError, RuntimeError, SystemError):  # of another torch
        return None


@functools.cache
def _written(
    places: tuple[int | None, ...],
    offsets: tuple[int, ...] | None,
    addressed: bool,  # noqa: FBT001
) -> Callable[[Any], Alike]:
    """What makes ``alike`` of a check of tensors. Written out: loops over the tensors would triple its time.

    ``places`` has for each argument the place of the first that is the same tensor, or None where none is given; the check takes
    the first ones. ``offsets``: of their addresses from multiples of ALIGNED_BYTES; None if all are 0. ``addressed``: it gives
    the addresses.
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
