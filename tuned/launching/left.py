"""Repeated calls that PyTorch's operators serve, recognised by their sizes.

A kernel is valid only for the properties that it was chosen for. PyTorch's operators take any strides, gradient and mode, so a
call that they serve is recognised by its sizes. A call that kernels serve pays one lookup for this: of one of its weights, by id.

Building the sizes takes the host a microsecond, more than a small call of PyTorch's operators can lose. So once a call was
recognised by its sizes, calls with tensors like its own are recognised at once (``tuned.launching.alike``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tuned.launching import alike
from tuned.launching.plan import listeners, remember
from tuned.launching.rehearsal import listening


class OfWeight(NamedTuple):
    """The calls with one weight that PyTorch's operators serve, each with whether they serve it in a CUDA graph too."""

    sizes: dict[Any, bool]
    # Kind of a call -> pairs: ``alike`` of its tensors (tuned.launching.alike), and whether PyTorch's operators serve it in a CUDA
    # graph too. A kind begins with the function, since several functions may take one weight.
    alike: dict[Any, Any]


# By the id of a weight. If a weight is freed and another gets its id, PyTorch's operators serve calls that are alike in all shapes
# and dtypes, which is right for any weight.
LEFT: dict[int, OfWeight] = {}
GRADIENT = "gradient"  # stands before the sizes of calls that PyTorch's operators serve where a gradient is needed
# Whether autocast is on, for any kind of device. A call may be right inside of autocast and be refused outside.
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)  # noqa: SLF001 - where there is no public one


def leave(weight: torch.Tensor, sizes: Any, *, captured: bool = True) -> None:
    """Remember that PyTorch's operators serve calls of these sizes with a weight; ``captured``: in a CUDA graph too."""
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
    """Whether PyTorch's operators serve a call; False for a thread that listens, which is told of each call.

    ``kind`` and ``tensors``: if they serve it, ``OfWeight.alike`` learns the tensors under this kind, so that the next call with
    tensors like these is found there; with None it learns nothing.
    """
    known = LEFT.get(id(weight))
    key = sizes, weight.shape, weight.dtype, weight.get_device(), _autocast()
    captured = None if known is None else known.sizes.get(key)
    # A dispatch mode that counts operations must see our operators.
    if known is None or captured is None or listening() is not None or listeners():
        return False
    if not captured and torch.cuda.is_current_stream_capturing():
        return False
    if kind is not None:
        alike.learn(known.alike, kind, tensors, captured, addresses=False)
    return True
