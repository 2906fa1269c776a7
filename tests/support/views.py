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
    """What a convolution or .t() leaves: the last axis is not the inner one."""
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 1 else sliced(t)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """Every second element of a row, as the imaginary part of complex numbers is."""
    memory = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
    return memory[..., 1::2].copy_(t)


def apart(t: torch.Tensor) -> torch.Tensor:
    """Rows with something between them, of an odd width."""
    memory = t.new_full((*t.shape[:-1], t.shape[-1] + 3), torch.nan)
    return memory[..., 1 : 1 + t.shape[-1]].copy_(t)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element past an aligned address."""
    return t.new_full((t.numel() + 1,), torch.nan)[1:].view(t.shape).copy_(t)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """All rows of the first axis one: stride 0, and other values."""
    return t[:1].expand_as(t)


def repeated(t: torch.Tensor) -> torch.Tensor:
    """All elements of a row one: stride 0 in the last axis, and other values."""
    return t[..., :1].expand_as(t)


def odd(t: torch.Tensor) -> torch.Tensor:
    """Strides that mean nothing in the axes of size 1."""
    strides = [7 if n == 1 else s for s, n in zip(t.stride(), t.shape, strict=True)]
    return t.as_strided(t.shape, strides)


def batch_innermost(t: torch.Tensor) -> torch.Tensor:
    """The two last axes swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else misaligned(sliced(t))


def negative(t: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate: its sign is a flag that only PyTorch's operators see."""
    if t.dtype == torch.bfloat16:  # no complex numbers are made of it
        return sliced(t)
    return torch.complex(torch.zeros_like(t), -t).conj().imag


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    view.__name__: view
    for view in (plain, transposed, sliced, apart, misaligned, expanded, repeated, odd, batch_innermost, negative)
}
