"""Gradients of first, second and third order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def of_several_orders(
    call: Callable[..., tuple[torch.Tensor, ...]], leaves: Sequence[torch.Tensor], orders: int = 3
) -> list[Any]:
    """The gradients of each order; zeros for a leaf that the result does not depend on."""
    total = sum((t**3 * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in call(*leaves))
    found: list[Any] = []
    for order in range(orders):
        made = torch.autograd.grad(
            total, leaves, create_graph=order + 1 < orders, allow_unused=True, materialize_grads=True
        )
        found += [t.detach() for t in made]
        total = sum((t**2).sum() for t in made) if order + 1 < orders else total
    return found
