"""The gradient of a rotation with a norm before it: by a kernel where one serves, elsewhere by PyTorch's operators.

The forward saves its input, not the reciprocal norms: the gradient reads the input anyway, and recomputes them on chip.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tuned.calls.rope import saved
from tuned.calls.rope.arguments import Given, Prepared, Settings, Sources, prepare, tokens_first
from tuned.calls.rope.plan import Plan, choice_of
from tuned.families.rope.eager import norm_gradient
from tuned.families.rope.launches import RopeCall, parts
from tuned.launching.rehearsal import Heard, NotedError

Gradients = tuple[torch.Tensor | None, ...]  # of x, the key, and the weights of their norms


def needs_gradient(given: Given) -> bool:
    """Whether the call has a norm, and x, the key or a weight needs a gradient."""
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
    return Plan(saved.Node(settings, sources, plan, _gradients, call).run)


def _gradients(given: Given, settings: Settings, *grads: Any, create_graph: bool | None) -> saved.Gradients:
    x, key, weight, key_weight = gradient(given, settings, *grads, create_graph=create_graph)
    return x, key, None, None, weight, key_weight


def gradient(
    given: Given, settings: Settings, grad: Any, key_grad: Any = None, *, create_graph: bool | None = None
) -> Gradients:
    """The gradients of x, key and the norms' weights, given the gradients of the results; one of these may be None.

    With ``create_graph`` they come from ``saved.by_formula``, and gradients are enabled; None: from a kernel where one serves.
    """
    settings = settings._replace(inplace=False, direction="backward")
    grad, key_grad = saved.given_gradients(given, grad, key_grad)
    if settings.tensor_format == "bhsd":  # the gradient of the same call on views [b, s, h, d]
        x, key, grad, key_grad = (tokens_first(t, settings) for t in (given.x, given.key, grad, key_grad))
        of_views = given._replace(x=x, key=key), settings._replace(tensor_format="bshd")
        made, key_made, *of_weights = gradient(*of_views, grad, key_grad, create_graph=create_graph)
        return tokens_first(made, settings), tokens_first(key_made, settings), *of_weights
    if create_graph is not None:
        given = saved.apart(given)
    else:
        given = Given(*(t.resolve_neg() if isinstance(t, torch.Tensor) else t for t in given))
    prepared = prepare(given, settings, make_out=lambda t: t)
    if create_graph is not None:
        tensors = (given.x, given.key, given.weight, given.key_weight)
        return tuple(saved.by_formula(prepared, tensors, (grad, key_grad), create_graph=create_graph))
    empty = not given.x.numel() or (given.key is not None and not given.key.numel())
    choice = choice_of(prepared, "a tensor is empty" if empty else None)
    if choice.variant is not None:
        with contextlib.suppress(NotedError):  # a kernel does not compile
            return _by_kernels(prepared.spec, choice.variant, prepared, grad, key_grad)
    return norm_gradient(prepared.eager_spec, prepared.call, grad, key_grad)


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
    saved.note(heard, spec, choice.variant, gradient_call(spec, choice.variant, prepared.call, *grads))


def _by_kernels(spec: Any, variant: Any, prepared: Prepared, grad: Any, key_grad: Any) -> Gradients:
    grad, key_grad = (None if t is None else t.resolve_neg() for t in (grad, key_grad))
    call = gradient_call(spec, variant, prepared.call, *saved.alike(grad, key_grad))
    saved.launch(spec, variant, call)
    return call.out, call.key_out, call.weight_grad, call.key_weight_grad


def gradient_call(spec: Any, variant: Any, call: RopeCall, grad: Any, key_grad: Any = None) -> RopeCall:
    """The call of the gradient's kernels, with outputs to fill, from the forward's call and the results' gradients."""
    partials = torch.empty(parts(spec, variant, call.seq, call.batch), dtype=torch.float32, device=grad.device)
    weights = {"weight_grad": saved.empty_of(call.weight), "key_weight_grad": saved.empty_of(call.key_weight)}
    return saved.gradient_call(spec, call, grad, key_grad, partials=partials, **weights)
