"""A linear over segments that needs a gradient: a kernel for the forward, and library products for the backward.

Neither concatenates the segments. One product gives the gradients of all segments, and each takes its columns. The gradient
of the weight is written segment by segment, into the segment's columns.

It serves where a CUDA graph is captured. There launches count: two segments need as many as PyTorch's operators (1 instead of
2 forward, 4 instead of 3 backward), and nothing is copied. Elsewhere host time counts: a node of autograd written in Python
took the host 20 us more than PyTorch's operators, forward and backward, and no row of several segments wins more than 5 us.
See docs/decisions/0055.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tuned.calls.linear_cat import run
from tuned.launching.plan import capturing


def pays(weight: torch.Tensor) -> bool:
    """Whether a call with a gradient may take less by kernels than by PyTorch's operators."""
    return capturing(weight)


def why_not(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why no kernel serves the forward of a checked call, or None."""
    reason = run.why_not(inputs, weight)
    if reason is not None:
        return reason
    choice, _ = run.choice_of(inputs, weight, bias)
    return choice.why if choice.variant is None else None


def forward(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear, with its gradient, of a call that ``why_not`` accepts: ``[..., n]``."""
    return _Linear.apply(weight, bias, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, bias: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(weight, *inputs)
        out = run.known(inputs, weight, bias)
        return run.run_linear_cat(inputs, weight, bias) if out is None else out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # type: ignore[override]
        weight, *inputs = ctx.saved_tensors
        of_weight, of_bias, *of_inputs = ctx.needs_input_grad
        with torch.autocast(weight.device.type, enabled=False):  # as the forward ran
            found = gradients(grad, inputs, weight, of_inputs, of_weight, of_bias, joined=torch.is_grad_enabled())
        segments, *others = found
        return *others, *segments


def gradients(  # noqa: PLR0913 - a call, and what is wanted of it
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    of_inputs: Sequence[bool],
    of_weight: bool,  # noqa: FBT001
    of_bias: bool,  # noqa: FBT001
    *,
    joined: bool,
) -> tuple[list[Any], Any, Any]:
    """The gradients (of each segment, of weight, of bias), None where they are not wanted.

    ``joined``: the weight's gradient is its parts concatenated, which is differentiable; else the parts are written into one tensor.
    """
    widths = [t.shape[-1] for t in inputs]
    rows = grad.reshape(-1, grad.shape[-1])
    segments: list[Any]
    if all(of_inputs):
        segments = list(torch.split(grad @ weight, widths, dim=-1))
    else:
        parts = torch.split(weight, widths, dim=1)
        segments = [grad @ part if want else None for part, want in zip(parts, of_inputs, strict=True)]
    flat = [t.reshape(-1, t.shape[-1]) for t in inputs] if of_weight else []
    return segments, _of_weight(rows.t(), flat, weight, joined) if flat else None, rows.sum(0) if of_bias else None


def _of_weight(columns: Any, inputs: Sequence[Any], weight: Any, joined: bool) -> Any:  # noqa: FBT001
    if joined:
        return torch.cat([columns @ t for t in inputs], 1)
    found = torch.empty_like(weight, memory_format=torch.contiguous_format)
    ends = list(itertools.accumulate((t.shape[1] for t in inputs), initial=0))
    for t, (start, end) in zip(inputs, itertools.pairwise(ends), strict=True):
        torch.mm(columns, t, out=found[:, start:end])
    return found
