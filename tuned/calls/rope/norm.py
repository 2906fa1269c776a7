"""The gradient of a rotation with a norm before it: by a kernel where one serves, elsewhere by PyTorch's own operators.

The forward saves its input, not the reciprocal norms: the gradient reads the input anyway, and takes them again on chip.
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
    prepare,
    refuse_overlap,
    strides_of,
    tokens_first,
)
from tuned.calls.rope.plan import Plan, choice_of
from tuned.families.rope.eager import norm_gradient, rotate
from tuned.families.rope.launches import RopeCall, launches, parts
from tuned.launching.launcher import kernel, run_steps
from tuned.launching.overwrite import overwrite, refuse_overwrite
from tuned.launching.plan import launch_known
from tuned.launching.rehearsal import Heard, listening

Gradients = tuple[torch.Tensor | None, ...]  # of x, the key, and the weights of their norms


def needs_gradient(given: Given) -> bool:
    """Whether the call has a norm, and something of it needs a gradient."""
    tensors = (given.x, given.key, given.weight, given.key_weight)
    return (
        given.weight is not None and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    )


def differentiable(plan: Plan, settings: Settings, sources: Sources, tensors: tuple[Any, ...], call: Any) -> Plan:
    """The plan; as an autograd node if one of x, key and the weights needs a gradient.

    ``call(given, settings)`` makes a call.
    """
    if not any(t is not None and t.requires_grad for t in tensors):
        return plan
    return Plan(_Node(settings, sources, plan, call).run)


class _Node:
    """A differentiable call: the plan of its forward, and what its backward must know."""

    def __init__(self, settings: Settings, sources: Sources, forward: Plan, call: Callable[..., Any]) -> None:
        self.settings, self.sources, self.forward, self.call = settings, sources, forward, call

    def run(self, x: Any, key: Any, *others: Any) -> Any:
        """``Plan.run``, with a node in the autograd graph."""
        *rest, weights = others
        if not self.settings.inplace:
            return _NormRope.apply(x, key, *weights, self, *rest)
        # The gradient needs the input, and dividing the norm out of the result would not give it back: it is copied.
        tensors = [x] if key is None else [x, key]
        for t in tensors:
            refuse_overwrite(t, by_gradient=True)
        if key is not None:
            refuse_overlap(x, key)
        given = self.sources.given(x.clone(), None if key is None else key.clone(), *others)
        out = self.call(given, self.settings._replace(inplace=False))
        for t, made in zip(tensors, (out,) if key is None else out, strict=True):
            overwrite(t, made)
        return x if key is None else (x, key)


class _NormRope(torch.autograd.Function):
    """The kernel as an autograd node."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, key: Any, weight: Any, key_weight: Any, node: _Node, *others: Any
    ) -> Any:
        """Normalise and rotate; save the input, the weights, the angles and the positions."""
        tensors, numbers = others[:4], others[4:]  # angles, sin, cu_seqlens, positions; the rest of Plan.run
        ctx.save_for_backward(x, key, weight, key_weight, *tensors)
        ctx.node, ctx.numbers = node, numbers
        ctx.set_materialize_grads(False)
        return node.forward.run(x, key, *others, (weight, key_weight))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of x, key and the weights; by differentiable operators if they need gradients themselves."""
        x, key, weight, key_weight, angles, sin, cu_seqlens, positions = ctx.saved_tensors
        node: _Node = ctx.node
        nothing = (None,) * (5 + len(ctx.numbers))
        if all(grad is None for grad in grads):
            return (None,) * 4 + nothing
        offset, x_ptr, angles_ptr = ctx.numbers
        weights = weight, key_weight
        tensors = angles, sin, cu_seqlens, positions
        given = node.sources.given(x, key, *tensors, offset, x_ptr, angles_ptr, weights)
        made = gradient(given, node.settings, *grads, create_graph=torch.is_grad_enabled())
        needed = zip(made, ctx.needs_input_grad, strict=False)
        return *(grad if needs else None for grad, needs in needed), *nothing


def gradient(
    given: Given, settings: Settings, grad: Any, key_grad: Any = None, *, create_graph: bool = False
) -> Gradients:
    """The gradients of x, key and the weights of the norms, given those of the results, of which one may be None."""
    settings = settings._replace(inplace=False, direction="backward")
    grad = torch.zeros_like(given.x) if grad is None else grad
    if given.key is not None and key_grad is None:
        key_grad = torch.zeros_like(given.key)
    if settings.tensor_format == "bhsd":  # the same of views
        x, key, grad, key_grad = (tokens_first(t, settings) for t in (given.x, given.key, grad, key_grad))
        of_views = given._replace(x=x, key=key), settings._replace(tensor_format="bshd")
        made, key_made, *of_weights = gradient(*of_views, grad, key_grad, create_graph=create_graph)
        return tokens_first(made, settings), tokens_first(key_made, settings), *of_weights
    if create_graph:
        return _by_formula(given, settings, grad, key_grad)
    given = Given(*(t.resolve_neg() if isinstance(t, torch.Tensor) else t for t in given))
    prepared = prepare(given, settings, make_out=lambda t: t)
    empty = not given.x.numel() or (given.key is not None and not given.key.numel())
    choice = choice_of(prepared, "a tensor is empty" if empty else None)
    if choice.variant is None:
        return norm_gradient(prepared.eager_spec, prepared.call, grad, key_grad)
    return _by_kernels(prepared.spec, choice.variant, prepared, grad.resolve_neg(), key_grad)


def note_gradient(heard: Heard, given: Given, settings: Settings, bypassed: str | None) -> None:
    """Note what the gradient of a call would launch."""
    views = given._replace(x=tokens_first(given.x, settings), key=tokens_first(given.key, settings))
    layout = "bshd" if settings.tensor_format == "bhsd" else settings.tensor_format
    backward = settings._replace(inplace=False, direction="backward", tensor_format=layout)
    prepared = prepare(views, backward, make_out=lambda t: t)
    choice, spec = choice_of(prepared, bypassed), prepared.spec
    if choice.variant is None or spec is None:
        return
    grads = [torch.empty_like(t) for t in (prepared.call.x, prepared.call.key) if t is not None]
    for launch in launches(spec, choice.variant, gradient_call(spec, choice.variant, prepared.call, *grads)):
        heard.note(kernel(launch.kernel), launch)


def _by_kernels(spec: Any, variant: Any, prepared: Prepared, grad: Any, key_grad: Any) -> Gradients:
    key_grad = None if key_grad is None else key_grad.resolve_neg()
    if key_grad is not None and key_grad.stride(-1) != grad.stride(-1):  # kernels have one stride of features for both
        grad, key_grad = grad.contiguous(), key_grad.contiguous()
    call = gradient_call(spec, variant, prepared.call, grad, key_grad)
    with torch.cuda.device(grad.device):
        run_steps(launches(spec, variant, call), functools.partial(launch_known, grad.device.index))
    made = (call.out, call.key_out, call.weight_grad, call.key_weight_grad)
    if listening() is not None:  # noted, not made
        return tuple(None if t is None else t.zero_() for t in made)
    return made


def gradient_call(spec: Any, variant: Any, call: RopeCall, grad: Any, key_grad: Any = None) -> RopeCall:
    """The gradient of a forward's call, given those of its results, as the kernels take it; its results are not filled."""

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
        weight_grad=like(call.weight),
        key_weight_grad=like(call.key_weight),
        partials=torch.empty(parts(spec, variant, call.seq, call.batch), dtype=torch.float32, device=grad.device),
    )


def _by_formula(given: Given, settings: Settings, grad: Any, key_grad: Any) -> Gradients:
    """The gradients by autograd, differentiable themselves."""
    tensors = (given.x, given.key, given.weight, given.key_weight)
    with torch.enable_grad():
        prepared = prepare(given, settings, make_out=lambda t: t)
        forward = dataclasses.replace(prepared.eager_spec, direction="forward")
        results = [t for t in rotate(forward, prepared.call) if t is not None]
        asked = [t for t in tensors if t is not None and t.requires_grad]
        grads = [t for t in (grad, key_grad) if t is not None]
        found = iter(torch.autograd.grad(results, asked, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in tensors)
