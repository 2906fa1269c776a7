"""Calls that PyTorch's own operators serve, known again by their sizes.

A kernel depends on all of a call's properties. PyTorch's own takes any strides, gradient and mode, so a call that is left to it
is known by less. A call that kernels serve pays one lookup for this: of one of its weights, by id.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.launching.plan import listeners, remember
from tuned.launching.rehearsal import listening

# Id of a weight -> sizes of a call -> whether PyTorch's own serves it in a CUDA graph too. If a weight is freed and another
# gets its id, sizes that are alike are served by PyTorch's own, which is right for any.
LEFT: dict[int, dict[Any, bool]] = {}
GRADIENT = "gradient"  # before the sizes of calls that PyTorch's own serves where a gradient is needed
# On any kind of device. A call outside of autocast may be refused that is right in it.
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)  # noqa: SLF001 - where there is no public one


def leave(weight: torch.Tensor, sizes: Any, *, captured: bool = True) -> None:
    """Remember that PyTorch's own serves calls of these sizes with a weight; ``captured``: in a CUDA graph too."""
    # ``module.to`` gives a weight another dtype and device, and keeps its id.
    key = sizes, weight.dtype, weight.get_device(), _autocast()
    try:
        hash(key)
    except TypeError:  # a size that a tracer has not decided
        return
    known = LEFT.get(id(weight))
    if known is None:  # kept in a variable: another thread may clear the table
        known = {}
        remember(LEFT, id(weight), known)
    remember(known, key, captured)


def is_left(weight: torch.Tensor, sizes: Any) -> bool:
    """Whether PyTorch's own serves a call; False for a thread that listens, which is told of each call."""
    known = LEFT.get(id(weight))
    if known is None:
        return False
    captured = known.get((sizes, weight.dtype, weight.get_device(), _autocast()))
    if (
        captured is None or listening() is not None or listeners()
    ):  # what counts operations counts those of our operators
        return False
    return captured or not torch.cuda.is_current_stream_capturing()
