"""Make operators of torch.library, and save their arguments for a backward."""

from __future__ import annotations

from typing import Any

import torch


def define(  # noqa: PLR0913
    name: str, schema: str, function: Any, fake: Any, backward: Any = None, setup: Any = None
) -> Any:
    """The operator ``tuned::name``, with a gradient if there is a ``backward``; ``setup`` saves what the backward needs."""
    made = torch.library.custom_op(f"tuned::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward, setup_context=setup)
    return made


def save(ctx: Any, values: tuple[Any, ...]) -> None:
    """Save arguments of an operator for its backward: tensors by save_for_backward, the rest on ctx."""
    flat, ctx.layout = [], []
    for value in values:
        many = isinstance(value, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in value)
        tensors = list(value) if many else [value] if isinstance(value, torch.Tensor) else []
        ctx.layout.append((many, len(tensors), None if tensors or many else value))
        flat += tensors
    ctx.save_for_backward(*flat)


def saved(ctx: Any) -> list[Any]:
    """The arguments that ``save`` saved, in their original structure."""
    tensors = iter(ctx.saved_tensors)
    given: list[Any] = []
    for many, count, value in ctx.layout:
        own = [next(tensors) for _ in range(count)]
        given.append(own if many else own[0] if own else value)
    return given
