"""Tensors as models leave them: the same shape, any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def plain(t: torch.Tensor) -> torch.Tensor:
    """As it is."""
    return t


def transposed(t: torch.Tensor) -> torch.Tensor:
    """As a convolution or .t() leaves it: the last axis is not the innermost in memory."""
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 1 else sliced(t)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """Every second element of a row, like the imaginary parts of complex numbers."""
    memory = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
    return memory[..., 1::2].copy_(t)


def apart(t: torch.Tensor) -> torch.Tensor:
    """Rows with a gap between them, at a distance that need not be aligned."""
    memory = t.new_full((*t.shape[:-1], t.shape[-1] + 3), torch.nan)
    return memory[..., 1 : 1 + t.shape[-1]].copy_(t)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element past an aligned address."""
    return t.new_full((t.numel() + 1,), torch.nan)[1:].view(t.shape).copy_(t)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The first index of the first axis repeated: stride 0, so the values differ from those of ``t``."""
    return t[:1].expand_as(t)


def repeated(t: torch.Tensor) -> torch.Tensor:
    """The first element of each row repeated: stride 0 in the last axis, so the values differ from those of ``t``."""
    return t[..., :1].expand_as(t)


def odd(t: torch.Tensor) -> torch.Tensor:
    """Arbitrary strides in the axes of size 1."""
    strides = [7 if n == 1 else s for s, n in zip(t.stride(), t.shape, strict=True)]
    return t.as_strided(t.shape, strides)


def batch_innermost(t: torch.Tensor) -> torch.Tensor:
    """The last two axes swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else misaligned(sliced(t))


def negative(t: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate: its sign is a flag that only PyTorch's operators see."""
    if t.dtype == torch.bfloat16:  # PyTorch has no complex numbers of bfloat16
        return sliced(t)
    return torch.complex(torch.zeros_like(t), -t).conj().imag


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    view.__name__: view
    for view in (plain, transposed, sliced, apart, misaligned, expanded, repeated, odd, batch_innermost, negative)
}
