"""Rotations whose gradient reads the forward's input: those with a norm, and those whose angles need a gradient.

The forward saves its input. A call in place copies it first, since the input cannot be computed from the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuned.calls.overlap import refuse_overlap
from tuned.calls.rope.arguments import Given, Prepared, Settings, Sources, strides_of
from tuned.calls.rope.plan import Plan
from tuned.families.rope.eager import rotate
from tuned.families.rope.launches import RopeCall, launches
from tuned.launching.launcher import kernel, run_steps
from tuned.launching.overwrite import overwrite, refuse_overwrite
from tuned.launching.plan import bypassed, launch_known
from tuned.launching.rehearsal import Heard, listening
from tuned.lookup.gpu import why_not_plain

Gradients = tuple[
    Any, Any, Any, Any, Any, Any
]  # of x, the key, the angles, sin, and the weights of the norms of x and key
_NUMBERS = 2  # of Plan.run: the offset and the addresses


class Node:
    """A differentiable call: the plan of its forward, and what its backward must know.

    ``gradient(given, settings, grad, key_grad, create_graph=...)`` gives Gradients; ``call(given, settings)`` makes a call.
    """

    def __init__(
        self, settings: Settings, sources: Sources, forward: Plan, gradient: Callable[..., Gradients], call: Any
    ) -> None:
        self.settings, self.sources, self.forward = settings, sources, forward
        self.gradient, self.call = gradient, call

    def run(self, x: Any, key: Any, angles: Any, sin: Any, *others: Any) -> Any:
        """``Plan.run``, with a node in the autograd graph."""
        *rest, weights = others
        if not self.settings.inplace:
            return _Saved.apply(x, key, angles, sin, *(weights or (None, None)), self, *rest)
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


class _Saved(torch.autograd.Function):
    """The kernel as an autograd node."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, key: Any, angles: Any, sin: Any, weight: Any, key_weight: Any, node: Node, cu_seqlens: Any,
        positions: Any, *numbers: Any,
    ) -> Any:  # fmt: skip
        """Make the call; save its tensors."""
        ctx.save_for_backward(x, key, angles, sin, weight, key_weight, cu_seqlens, positions)
        ctx.node, ctx.numbers = node, numbers
        ctx.set_materialize_grads(False)
        weights = None if weight is None else (weight, key_weight)
        out = node.forward.run(x, key, angles, sin, cu_seqlens, positions, *numbers, weights)
        if key is not None:  # a result needs no gradient if nothing that it is computed from needs one
            of_x, of_key, *of_angles, of_weight, of_key_weight = ctx.needs_input_grad[:6]
            needs = of_x or of_weight, of_key or of_key_weight
            if not any(of_angles):
                ctx.mark_non_differentiable(*(t for t, need in zip(out, needs, strict=True) if not need))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the tensors that need one; by differentiable operators if these need gradients themselves."""
        nothing = (None,) * (3 + _NUMBERS)
        if all(grad is None for grad in grads):
            return (None,) * 6 + nothing
        x, key, angles, sin, weight, key_weight, cu_seqlens, positions = ctx.saved_tensors
        node: Node = ctx.node
        weights = None if weight is None else (weight, key_weight)
        rest = (cu_seqlens, positions, *ctx.numbers, weights)
        given = node.sources.given(x, key, angles, sin, *rest)
        create_graph = torch.is_grad_enabled() or (False if _bypassed(grads) else None)
        with torch.set_grad_enabled(create_graph is not None):
            made = node.gradient(given, node.settings, *grads, create_graph=create_graph)
        needed = zip(made, ctx.needs_input_grad, strict=False)
        return *(grad if needs else None for grad, needs in needed), *nothing


def _bypassed(grads: Sequence[Any]) -> bool:
    """Whether a kernel would bypass a transform of these gradients: batches of them, torch.func or forward-mode AD."""
    return bypassed() is not None or any(t is not None and why_not_plain(t) is not None for t in grads)


def given_gradients(given: Given, grad: Any, key_grad: Any) -> tuple[Any, Any]:
    """The gradients of the results; zeros for a result that nothing depends on."""
    grad = torch.zeros_like(given.x) if grad is None else grad
    if given.key is not None and key_grad is None:
        key_grad = torch.zeros_like(given.key)
    return grad, key_grad


def apart(given: Given) -> Given:
    """The call with each tensor that needs a gradient replaced by a view of its own.

    If one tensor is given twice, or one is computed from another, ``by_formula`` must give the gradient of each
    argument alone. Autograd adds them up when it goes on from there, and it knows which tensor was computed from which.
    """
    return Given(*(t.view_as(t) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in given))


def alike(grad: Any, key_grad: Any) -> tuple[Any, Any]:
    """The gradients of the results as kernels take them: with the same stride of features."""
    if key_grad is not None and key_grad.stride(-1) != grad.stride(-1):
        return grad.contiguous(), key_grad.contiguous()
    return grad, key_grad


def gradient_call(spec: Any, call: RopeCall, grad: Any, key_grad: Any, **sums: Any) -> RopeCall:
    """The call of the gradient's kernels, with outputs to fill, from the forward's call and the results' gradients.

    ``sums``: the fields for results that are added up over tokens or heads.
    """

    def steps(t: Any) -> Any:
        return (0, 0, 0, 0) if t is None else strides_of(spec.layout, t)

    out, key_out = empty_of(call.x), empty_of(call.key)
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
        **sums,
    )


def empty_of(t: Any) -> Any:
    """Room for the gradient of a tensor, or None."""
    return None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)


def launch(spec: Any, variant: Any, call: RopeCall) -> None:
    """Launch the kernels of a gradient."""
    with torch.cuda.device(call.x.device):
        run_steps(launches(spec, variant, call), functools.partial(launch_known, call.x.device.index))
    if listening() is not None:  # the launches were noted, not made
        for t in (call.out, call.key_out, call.weight_grad, call.key_weight_grad, call.angle_grad):
            if t is not None:
                t.zero_()


def note(heard: Heard, spec: Any, variant: Any, call: RopeCall) -> None:
    """Note what a gradient would launch."""
    for one in launches(spec, variant, call):
        heard.note(kernel(one.kernel), one)


def by_formula(prepared: Prepared, tensors: Sequence[Any], grads: Sequence[Any], *, create_graph: bool) -> list[Any]:
    """The gradients of the tensors that need one, None for the others; by autograd, and differentiable if ``create_graph``.

    ``tensors``: of a call that ``apart`` gave. Gradients are enabled.
    """
    forward = dataclasses.replace(prepared.eager_spec, direction="forward", angle_gradient=False)
    results = [t for t in rotate(forward, prepared.call) if t is not None]
    asked = [t for t in tensors if t is not None and t.requires_grad]
    over = [t for t in grads if t is not None]
    found = iter(torch.autograd.grad(results, asked, over, create_graph=create_graph, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]
