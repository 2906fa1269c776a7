"""When a tensor may be overwritten, and how autograd learns of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch.autograd.graph.increment_version calls this; calling it directly saves half a microsecond. Not every torch version has it.
_increment: Callable[[Any], None] = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)  # noqa: SLF001


def apart(t: torch.Tensor) -> torch.Tensor:
    """The result t or, if t is a view, a tensor of its own in the same memory.

    A caller may overwrite a result of an autograd node, as by ``q.mul_(scale)``, but not a view that was made inside of the node.
    """
    return t.data if t._is_view() else t  # noqa: SLF001 - no public way to ask


def bump_versions(x: torch.Tensor, key: torch.Tensor | None = None) -> None:
    """Tell autograd that tensors have changed, so that a node that saved an old value raises instead of being wrong."""
    try:
        _increment((x,) if key is None else (x, key))
    except RuntimeError:  # inference tensors have no version counter, and not every torch version skips them
        for t in (x, key):
            if t is not None and not t.is_inference():
                torch.autograd.graph.increment_version(t)


def bump_all(tensors: tuple[torch.Tensor, ...]) -> None:
    """``bump_versions`` of any number of tensors."""
    try:
        _increment(tensors)
    except RuntimeError:
        for t in tensors:
            if not t.is_inference():
                torch.autograd.graph.increment_version(t)


def overwrite(t: torch.Tensor, value: torch.Tensor) -> None:
    """``t.copy_(value)``, in the autograd graph.

    If a value that needs a gradient was written to another view of the same tensor, t needs a gradient too. Autograd notices only
    when it is asked for t's history; before that, copy_ would take t for a leaf.
    """
    if torch.is_grad_enabled():  # without gradients, autograd would refuse a view that was made without gradients
        _ = t.grad_fn
    t.copy_(value)


def refuse_inference(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError, before any write, where PyTorch's operators could not write to one of these tensors."""
    if not torch.is_inference_mode_enabled() and any(t is not None and t.is_inference() for t in tensors):
        raise RuntimeError(
            "what was made in inference mode cannot be overwritten outside of it by PyTorch's operators: call it in "
            "torch.inference_mode(), or pass a clone"
        )


def refuse_overwrite(x: torch.Tensor, *, by_gradient: bool = False) -> None:
    """Raise RuntimeError, before any write, if overwriting x would lose or falsify a gradient.

    ``by_gradient``: the value that is written needs a gradient, whether x does or not.
    """
    if not torch.is_grad_enabled() or not (x.requires_grad or by_gradient):
        return
    base = x._base if x._is_view() else x  # noqa: SLF001 - no public way to ask
    # A leaf may also be a view, of a base that requires no grad.
    if (x.is_leaf and x.requires_grad) or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            f"what would be overwritten, of shape {list(x.shape)}, is a leaf that requires grad, or a view of one: overwriting it would "
            "lose the value its gradient belongs to; use inplace=False where there is one, or overwrite a clone"
        )
    creation = torch._C._autograd  # noqa: SLF001
    if x._is_view() and creation._get_creation_meta(x) != creation.CreationMeta.DEFAULT:  # noqa: SLF001
        raise RuntimeError(
            f"what would be overwritten, of shape {list(x.shape)}, is one of several views made together (unbind, split, chunk) or was "
            "made under no_grad, and autograd cannot follow a write to it; use inplace=False where there is one, or slice instead of "
            "splitting"
        )
