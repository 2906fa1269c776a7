"""Join input segments for PyTorch's own operators, which take one tensor; the kernels read segments without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def joined(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    """The segments concatenated in the last axis; a single one as it is."""
    return segments[0] if len(segments) == 1 else torch.cat(tuple(segments), -1)
