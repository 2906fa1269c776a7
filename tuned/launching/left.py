"""Calls that PyTorch's own operators serve, known again by their sizes.

A kernel depends on all of a call's properties. PyTorch's own takes any strides, gradient and mode, so a call that is left to it
is known by less. A call that kernels serve pays one lookup for this: of one of its weights, by id.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.launching.plan import remember
from tuned.launching.rehearsal import listening

# Id of a weight -> sizes of a call -> whether PyTorch's own serves it in a CUDA graph too. If a weight is freed and another
# gets its id, sizes that are alike are served by PyTorch's own, which is right for any.
LEFT: dict[int, dict[Any, bool]] = {}
_autocast = torch.is_autocast_enabled


def _of(weight: torch.Tensor) -> tuple[Any, ...]:
    """What may change of a weight, whose id stays: ``module.to`` gives it another dtype and device."""
    return weight.shape, weight.dtype, weight.get_device(), _autocast("cuda")


def leave(weight: torch.Tensor, sizes: Any, *, captured: bool = True) -> None:
    """Remember that PyTorch's own serves calls of these sizes with a weight; ``captured``: in a CUDA graph too."""
    if id(weight) not in LEFT:
        remember(LEFT, id(weight), {})
    remember(LEFT[id(weight)], (_of(weight), sizes), captured)


def is_left(weight: torch.Tensor, sizes: Any) -> bool:
    """Whether PyTorch's own serves a call; False for a thread that listens, which is told of each call."""
    known = LEFT.get(id(weight))
    captured = None if known is None else known.get((_of(weight), sizes))
    if captured is None or listening() is not None:
        return False
    return captured or not torch.cuda.is_current_stream_capturing()
