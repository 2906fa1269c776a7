"""RoPE as PyTorch operations: the unfused formula that the fused kernels replace.

Cosine and sine of float32 angles, cast to the type of x, the two features of each pair exchanged through ``cat``, and
the features that do not rotate appended. Eager PyTorch, ``torch.jit.script`` and ``torch.compile`` run the same
functions; in float64 they are what every kernel is held against before it is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (j, j + R / 2) of the leading R features, R the width of ``angles``, which broadcasts over x."""
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
    rotated, tail = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    x1, x2 = torch.chunk(rotated, 2, dim=-1)
    return torch.cat((rotated * cos + torch.cat((-x2, x1), dim=-1) * sin, tail), dim=-1)


def halves_backward(grad: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The transpose of ``halves``, written out: fewer kernels than autograd's own, so kinder to those that run it."""
    cos, sin = torch.cos(angles).to(grad.dtype), torch.sin(angles).to(grad.dtype)
    rotated, tail = grad[..., : angles.shape[-1]], grad[..., angles.shape[-1] :]
    g1, g2 = torch.chunk(rotated * sin, 2, dim=-1)
    return torch.cat((rotated * cos + torch.cat((g2, -g1), dim=-1), tail), dim=-1)


def interleaved(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As ``halves`` for pairs (2 j, 2 j + 1)."""
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
    rotated, tail = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    exchanged = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rotated * cos + exchanged * sin, tail), dim=-1)


def interleaved_backward(grad: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As ``halves_backward`` for pairs (2 j, 2 j + 1)."""
    cos, sin = torch.cos(angles).to(grad.dtype), torch.sin(angles).to(grad.dtype)
    rotated, tail = grad[..., : angles.shape[-1]], grad[..., angles.shape[-1] :]
    weighted = rotated * sin
    exchanged = torch.stack((weighted[..., 1::2], -weighted[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rotated * cos + exchanged, tail), dim=-1)


ROTATIONS: dict[tuple[str, bool], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ("forward", False): halves,
    ("backward", False): halves_backward,
    ("forward", True): interleaved,
    ("backward", True): interleaved_backward,
}


def broadcast(freqs: torch.Tensor, layout: str, positions: torch.Tensor | None) -> torch.Tensor:
    """Angles [S, 1, 1, R] as the layout needs them: [1, S, 1, R], [S, 1, 1, R], or gathered to [T, 1, R]."""
    if positions is not None:
        return freqs[:, 0].index_select(0, positions)
    return freqs.transpose(0, 1) if layout == "bshd" else freqs
