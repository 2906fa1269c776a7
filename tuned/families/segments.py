"""Inputs in segments, for PyTorch's own operators, which take one tensor; the kernels read the segments where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def joined(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    """The segments in the last axis, one after another; a single one as it is."""
    return segments[0] if len(segments) == 1 else torch.cat(tuple(segments), -1)
