"""RoPE from its definition in float64, and a check of calls against it, values and gradients."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIRED = inspect.Parameter.empty


def signature(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of the parameters in order; all of them must take arguments by position and by name."""
    parameters = inspect.signature(function).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return tuple((p.name, p.default) for p in parameters)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tables(rows: int, pairs: int, seed: int = 9, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """cos and sin of random angles, [rows, pairs] each."""
    angles = 3 * randn(rows, pairs, seed=seed, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """x [..., heads, head_dim] rotated in float64; cos and sin [..., pairs] have one entry a pair."""
    order = (lambda a: a.repeat_interleave(2, -1)) if interleaved else (lambda a: torch.cat((a, a), -1))
    return rotated_by_feature(x, order(cos.double()), order(sin.double()), interleaved=interleaved)


def rotated_by_feature(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """x [..., heads, head_dim] rotated in float64; cos and sin [..., rotary_dim] have one entry a feature."""
    x, cos, sin = x.double(), cos.double()[..., None, :], sin.double()[..., None, :]
    rotary = cos.shape[-1]
    feature = torch.arange(rotary)
    partner = feature ^ 1 if interleaved else (feature + rotary // 2) % rotary
    turn = torch.where(feature < partner, -1.0, 1.0).double()
    return torch.cat((x[..., :rotary] * cos + turn * x[..., partner] * sin, x[..., rotary:]), -1)


def assert_agree(call: Callable[..., Any], formula: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """``call`` and the float64 ``formula`` have the same results and the same gradients in all inputs."""
    outs, grads = _results(call, [x.clone() for x in inputs])
    wanted, wanted_grads = _results(formula, [x.double() for x in inputs])
    for out, want, x in zip(outs, wanted, inputs, strict=True):
        assert out.dtype == x.dtype
        _assert_close(out, want)
    for grad, want in zip(grads, wanted_grads, strict=True):
        _assert_close(grad, want)


def _results(function: Callable[..., Any], leaves: list[torch.Tensor]) -> tuple[Any, Any]:
    """The results of ``function`` for the leaves, and the leaves' gradients for a fixed gradient of each result."""
    for leaf in leaves:
        leaf.requires_grad_()
    outs = function(*leaves)
    outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
    given = [randn(*out.shape, seed=70 + i, dtype=torch.bfloat16).to(out.dtype) for i, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, leaves, given)
    return [out.detach() for out in outs], grads


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to float32 arithmetic and one rounding to the dtype of ``got``."""
    ulp = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want.double(), rtol=ulp, atol=4e-6)
