"""When a tensor may be written over, and how autograd is told."""

from __future__ import annotations

import torch


def bump_version(x: torch.Tensor) -> None:
    """Tell autograd that x has changed, so that a node which kept its old value says so instead of being wrong."""
    if not x.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(x)


def refuse_overwrite(x: torch.Tensor) -> None:
    """Raise RuntimeError, before any write, if overwriting x would lose or falsify a gradient."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return
    base = x._base if x._is_view() else x  # noqa: SLF001 - no public way to ask
    if base is not None and base.is_leaf and base.requires_grad:
        raise RuntimeError(
            "x is a leaf that requires grad, or a view of one: overwriting it would lose the value its gradient belongs "
            "to; use inplace=False, or overwrite a clone"
        )
    creation = torch._C._autograd  # noqa: SLF001
    if x._is_view() and creation._get_creation_meta(x) != creation.CreationMeta.DEFAULT:  # noqa: SLF001
        raise RuntimeError(
            "x is one of several views made together (unbind, split, chunk) or was made under no_grad, and autograd "
            "cannot follow a write to it; use inplace=False, or slice instead of splitting"
        )
