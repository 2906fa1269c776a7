"""Zeros that are only read, such as the first states of a model that is given none: made once, then reused without a launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from tuned.launching.plan import capturing, modes

MOST_BYTES = 2**20  # of zeros that are kept for each device
MOST_VIEWS = 1024

_KEPT: dict[int, torch.Tensor] = {}  # device -> bytes of 0; captured graphs read them, so kept for good


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros on the device of ``like`` and of its dtype, which nobody may write to or give to a caller.

    A gradient may save it: autograd tells of a saved tensor that was written to since.
    """
    if like.is_cuda and math.prod(shape) * like.element_size() <= MOST_BYTES and modes(like.get_device()) is not None:
        index = like.get_device()
        # Making the zeros that are kept waits for a copy, once.
        if index in _KEPT or not (capturing(like) or torch.cuda.get_sync_debug_mode()):
            return _view(tuple(shape), like.dtype, index)
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


@functools.lru_cache(maxsize=MOST_VIEWS)
def _view(shape: tuple[int, ...], dtype: torch.dtype, index: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        if index not in _KEPT:
            # A copy from the CPU has ended when it returns, so that any stream may read it.
            made = torch.zeros(MOST_BYTES, dtype=torch.uint8, device="cpu").to(f"cuda:{index}")
            _KEPT.setdefault(index, made)  # those of another thread may be read already, and by a graph
        return _KEPT[index].view(dtype)[: math.prod(shape)].view(shape)
