"""RoPE as PyTorch operations: what eager PyTorch, ``torch.jit.script`` and ``torch.compile`` run."""

from __future__ import annotations

from collections.abc import Callable

import torch

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """Rotate pairs (j, j + R / 2) of all R features of x, or back if ``sign`` is -1; cos and sin broadcast over x."""
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.add(x * cos, torch.cat((-second, first), dim=-1) * sin, alpha=sign)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """As ``halves`` for pairs (2 j, 2 j + 1)."""
    exchanged = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return torch.add(x * cos, exchanged * sin, alpha=sign)


ROTATIONS: dict[bool, Rotate] = {False: halves, True: interleaved}


def from_angles(rotate: Rotate) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """TransformerEngine's formula, a function of its own each time: compilers keep their caches by it.

    Cosine and sine of float32 angles ``[..., R]``, cast to the type of x, and the features that do not rotate appended.
    """

    def run(x: torch.Tensor, angles: torch.Tensor, sign: float) -> torch.Tensor:
        cos, sin = torch.cos(angles).to(x.dtype), torch.sin(angles).to(x.dtype)
        width = angles.shape[-1]
        return torch.cat((rotate(x[..., :width], cos, sin, sign), x[..., width:]), dim=-1)

    return run
