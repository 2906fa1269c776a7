"""The gradient of a rotation whose angles need one: by a kernel where one serves, elsewhere by PyTorch's own operators.

The kernel sums over heads, and gives the gradient of each token's angles. What adds those of the tokens that share an angle
are operators of PyTorch, on tensors that have no heads: tuned.families.rope.eager.spread. Both have one order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from tuned.calls.rope.arguments import (
    Given,
    Prepared,
    Settings,
    Sources,
    packed_heads,
    prepare,
    refuse_overlap,
    strides_of,
    tokens_first,
)
from tuned.calls.rope.plan import Plan, choice_of
from tuned.families.rope.eager import angle_gradient, rotate, spread
from tuned.families.rope.launches import RopeCall, launches, token_angles
from tuned.launching.launcher import kernel, run_steps
from tuned.launching.overwrite import overwrite, refuse_overwrite
from tuned.launching.plan import launch_known
from tuned.launching.rehearsal import Heard, listening

Gradients = tuple[Any, Any, Any, Any]  # of x, the key, the tensor of angles, and sin
SOURCES = ("freqs", "cos", "sin", "cos_sin_cache", "inv_freq", "freqs_cis")


def need_gradient(given: Given) -> bool:
    """Whether a tensor of angles needs a gradient."""
    return torch.is_grad_enabled() and _learned(given)


def _learned(given: Given) -> bool:
    return any(isinstance(t := getattr(given, name), torch.Tensor) and t.requires_grad for name in SOURCES)


def _serves(settings: Settings) -> bool:
    return settings.direction == "forward" and not settings.norm and not settings.k_dim


def noted(given: Given, settings: Settings) -> bool:
    """Whether a call that is rehearsed, without gradients, will have its angles' gradient from the kernel."""
    return _learned(given) and _serves(settings)


def why_eager(given: Given, settings: Settings) -> str | None:
    """Why angles that need a gradient make the whole call PyTorch's own, or None."""
    if not need_gradient(given) or _serves(settings):
        return None
    what = (
        "with a norm" if settings.norm else "of MLA's key and value" if settings.k_dim else "that is a gradient itself"
    )
    return f"the angles of a call {what} need a gradient, which no kernel computes"


def differentiable(plan: Plan, settings: Settings, sources: Sources, call: Callable[..., Any]) -> Plan:
    """The plan as an autograd node of a call whose angles need a gradient; ``call(given, settings)`` makes a call."""
    return Plan(_Node(settings, sources, plan, call).run)


class _Node:
    """A differentiable call: the plan of its forward, and what its backward must know."""

    def __init__(self, settings: Settings, sources: Sources, forward: Plan, call: Callable[..., Any]) -> None:
        self.settings, self.sources, self.forward, self.call = settings, sources, forward, call

    def run(self, x: Any, key: Any, angles: Any, sin: Any, *others: Any) -> Any:
        """``Plan.run``, with a node in the autograd graph."""
        if not self.settings.inplace:
            return _AngleRope.apply(x, key, angles, sin, self, *others)
        # The gradient needs the input: it is copied.
        tensors = [x] if key is None else [x, key]
        for t in tensors:
            refuse_overwrite(t, by_gradient=True)
        if key is not None:
            refuse_overlap(x, key)
        given = self.sources.given(x.clone(), None if key is None else key.clone(), angles, sin, *others)
        out = self.call(given, self.settings._replace(inplace=False))
        for t, made in zip(tensors, (out,) if key is None else out, strict=True):
            overwrite(t, made)
        return x if key is None else (x, key)


class _AngleRope(torch.autograd.Function):
    """The kernel as an autograd node."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, key: Any, angles: Any, sin: Any, node: _Node, cu_seqlens: Any, positions: Any, *others: Any
    ) -> Any:
        """Rotate; save the input, the angles and the positions."""
        ctx.save_for_backward(x, key, angles, sin, cu_seqlens, positions)
        ctx.node, ctx.others = node, others
        ctx.set_materialize_grads(False)
        return node.forward.run(x, key, angles, sin, cu_seqlens, positions, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of x, key and the angles; by differentiable operators if they need gradients themselves."""
        node: _Node = ctx.node
        nothing = (None,) * (3 + len(ctx.others))
        if all(grad is None for grad in grads):
            return (None,) * 4 + nothing
        given = node.sources.given(*ctx.saved_tensors, *ctx.others)
        made = gradient(given, node.settings, *grads, create_graph=torch.is_grad_enabled())
        needed = zip(made, ctx.needs_input_grad, strict=False)
        return *(grad if needs else None for grad, needs in needed), *nothing


def gradient(
    given: Given, settings: Settings, grad: Any, key_grad: Any = None, *, create_graph: bool = False
) -> Gradients:
    """The gradients of x, key and the angles, given those of the results, of which one may be None."""
    grad = torch.zeros_like(given.x) if grad is None else grad
    if given.key is not None and key_grad is None:
        key_grad = torch.zeros_like(given.key)
    if not create_graph:
        given = Given(*(_plain(t) for t in given))
        grad, key_grad = _plain(grad), _plain(key_grad)
    prepared = _prepared(given, settings)
    grads = [_as_rotated(t, settings) for t in (grad, key_grad)]
    if create_graph:
        return _by_formula(given, prepared, grads)
    empty = not given.x.numel() or (given.key is not None and not given.key.numel())
    choice = choice_of(prepared, "a tensor is empty" if empty else None)
    if choice.variant is None:
        out, key_out, *tables = angle_gradient(prepared.eager_spec, prepared.call, *grads)
    else:
        out, key_out, *tables = _by_kernel(prepared, choice.variant, *grads)
    x_grad = tokens_first(out, settings).reshape(given.x.shape)
    return x_grad, tokens_first(key_out, settings), *_as_given(given, *tables)


def note_gradient(heard: Heard, given: Given, settings: Settings, bypassed: str | None) -> None:
    """Note what the gradient of a call would launch."""
    prepared = _prepared(given, settings)
    choice, spec = choice_of(prepared, bypassed), prepared.spec
    if choice.variant is None or spec is None:
        return
    grads = [torch.empty_like(t) for t in (prepared.call.x, prepared.call.key) if t is not None]
    for launch in launches(spec, choice.variant, gradient_call(spec, prepared.call, *grads)):
        heard.note(kernel(launch.kernel), launch)


def gradient_call(spec: Any, call: RopeCall, grad: Any, key_grad: Any = None) -> RopeCall:
    """The gradient of a forward's call, given those of its results, as the kernel takes it; its results are not filled."""

    def like(t: Any) -> Any:
        return None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)

    def steps(t: Any) -> Any:
        return (0, 0, 0, 0) if t is None else strides_of(spec.layout, t)

    out, key_out = like(call.x), like(call.key)
    return dataclasses.replace(
        call,
        x=grad,
        x_strides=steps(grad),
        key=key_grad,
        key_strides=steps(key_grad),
        out=out,
        out_strides=steps(out),
        key_out=key_out,
        key_out_strides=steps(key_out),
        given=call.x,
        given_strides=call.x_strides,
        key_given=call.key,
        key_given_strides=call.key_strides,
        angle_grad=torch.empty(token_angles(spec, call.seq, call.batch), dtype=torch.float32, device=grad.device),
    )


def _plain(t: Any) -> Any:
    return t.resolve_conj().resolve_neg() if isinstance(t, torch.Tensor) else t


def _prepared(given: Given, settings: Settings) -> Prepared:
    """The call whose kernel is the gradient; its tensors are the forward's."""
    backward = settings._replace(inplace=False, direction="backward")
    return prepare(given, backward, make_out=lambda t: t, angle_gradient=True)


def _as_rotated(t: Any, settings: Settings) -> Any:
    """A gradient with the axes of what is rotated: tokens before heads, and all heads of a packed qkv on one axis."""
    t = tokens_first(t, settings)
    layout = "bshd" if settings.tensor_format == "bhsd" else settings.tensor_format
    return t if t is None or settings.kv_heads is None else packed_heads(t, settings._replace(tensor_format=layout))[0]


def _by_kernel(prepared: Prepared, variant: Any, grad: Any, key_grad: Any) -> Gradients:
    spec = prepared.spec
    assert spec is not None
    if key_grad is not None and key_grad.stride(-1) != grad.stride(
        -1
    ):  # the kernel has one stride of features for both
        grad, key_grad = grad.contiguous(), key_grad.contiguous()
    call = gradient_call(spec, prepared.call, grad, key_grad)
    with torch.cuda.device(grad.device):
        run_steps(launches(spec, variant, call), functools.partial(launch_known, grad.device.index))
    if listening() is not None:  # noted, not made
        for t in (call.out, call.key_out, call.angle_grad):
            if t is not None:
                t.zero_()
    return call.out, call.key_out, *spread(spec, prepared.call, list(call.angle_grad))


def _as_given(given: Given, table: Any, second: Any) -> tuple[Any, Any]:
    """The gradients of the tensor of angles that was given, and of sin, from those of its views."""
    if given.freqs_cis is not None:
        parts = (
            torch.complex(table.float(), second.float())
            if table.dtype != torch.float64
            else torch.complex(table, second)
        )
        return parts.to(given.freqs_cis.dtype).reshape(given.freqs_cis.shape), None
    if given.cos_sin_cache is not None:
        return torch.cat((table, second), -1).reshape(given.cos_sin_cache.shape), None
    first = given.freqs if given.freqs is not None else given.inv_freq if given.inv_freq is not None else given.cos
    return table.reshape(first.shape), None if second is None else second.reshape(given.sin.shape)


def _by_formula(given: Given, prepared: Prepared, grads: list[Any]) -> Gradients:
    """The gradients by autograd, differentiable themselves."""
    angles = next(
        t for t in (given.freqs, given.cos, given.cos_sin_cache, given.inv_freq, given.freqs_cis) if t is not None
    )
    tensors = (given.x, given.key, angles, given.sin)
    with torch.enable_grad():
        forward = dataclasses.replace(prepared.eager_spec, direction="forward", angle_gradient=False)
        results = [t for t in rotate(forward, prepared.call) if t is not None]
        asked = [t for t in tensors if t is not None and t.requires_grad]
        over = [t for t in grads if t is not None]
        found = iter(torch.autograd.grad(results, asked, over, create_graph=True, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in tensors)  # type: ignore[return-value]
