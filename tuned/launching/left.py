"""Calls that PyTorch's own operators serve, known again by their sizes.

A kernel depends on all of a call's properties. PyTorch's own takes any strides, gradient and mode, so a call that is left to it
is known by its sizes. A call that kernels serve pays one lookup for this: of one of its weights, by id.

Building the sizes takes the host a microsecond, more than PyTorch's own of a small call can lose. Tensors like those of a call
that was known by its sizes are known at once (``tuned.launching.alike``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tuned.launching import alike
from tuned.launching.plan import listeners, remember
from tuned.launching.rehearsal import listening


class OfWeight(NamedTuple):
    """The calls with a weight that PyTorch's own serves, each with whether it does in a CUDA graph too."""

    sizes: dict[Any, bool]
    # Kind of a call, its function first, since a weight may be one of several -> pairs of ``alike`` (tuned.launching.alike) of its
    # tensors, and that.
    alike: dict[Any, Any]


# By the id of a weight. If a weight is freed and another gets its id, calls that are alike in all shapes and dtypes are served by
# PyTorch's own, which is right for any of them.
LEFT: dict[int, OfWeight] = {}
GRADIENT = "gradient"  # before the sizes of calls that PyTorch's own serves where a gradient is needed
# On any kind of device. A call outside of autocast may be refused that is right in it.
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)  # noqa: SLF001 - where there is no public one


def leave(weight: torch.Tensor, sizes: Any, *, captured: bool = True) -> None:
    """Remember that PyTorch's own serves calls of these sizes with a weight; ``captured``: in a CUDA graph too."""
    # ``module.to`` gives a weight another dtype and device, ``weight.data = ...`` another shape, and it keeps its id.
    key = sizes, weight.shape, weight.dtype, weight.get_device(), _autocast()
    try:
        hash(key)
    except TypeError:  # a size that a tracer has not decided
        return
    known = LEFT.get(id(weight))
    if known is None:  # kept in a variable: another thread may clear the table
        known = OfWeight({}, {})
        remember(LEFT, id(weight), known)
    remember(known.sizes, key, captured)


def is_left(weight: torch.Tensor, sizes: Any, kind: Any = None, tensors: Sequence[Any] = ()) -> bool:
    """Whether PyTorch's own serves a call; False for a thread that listens, which is told of each call.

    ``kind`` and ``tensors``: under which the next call with tensors like these is among those of ``OfWeight.alike``; with None, none is.
    """
    known = LEFT.get(id(weight))
    key = sizes, weight.shape, weight.dtype, weight.get_device(), _autocast()
    captured = None if known is None else known.sizes.get(key)
    # What counts operations counts those of our operators.
    if known is None or captured is None or listening() is not None or listeners():
        return False
    if not captured and torch.cuda.is_current_stream_capturing():
        return False
    if kind is not None:
        alike.learn(known.alike, kind, tensors, captured, addresses=False)
    return True
