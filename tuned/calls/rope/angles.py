"""The gradient of a rotation whose angles need one: by a kernel where one serves, elsewhere by PyTorch's operators.

The kernel sums over heads, and gives the gradient of each token's angles. PyTorch's operators then add the gradients of
tokens that share an angle, on tensors without heads: tuned.families.rope.eager.spread. Both add in a fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tuned.calls.rope import saved
from tuned.calls.rope.arguments import Given, Prepared, Settings, Sources, packed_heads, prepare, tokens_first
from tuned.calls.rope.plan import Plan, choice_of
from tuned.families.rope.eager import angle_gradient, spread
from tuned.families.rope.launches import RopeCall, token_angles
from tuned.launching.rehearsal import Heard, NotedError

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
    """Whether the kernel will give the angles' gradient of a call that is rehearsed without gradients."""
    return _learned(given) and _serves(settings)


def why_eager(given: Given, settings: Settings) -> str | None:
    """Why PyTorch's operators must serve the whole call since its angles need a gradient, or None."""
    if not need_gradient(given) or _serves(settings):
        return None
    what = (
        "with a norm" if settings.norm else "of MLA's key and value" if settings.k_dim else "that is a gradient itself"
    )
    return f"the angles of a call {what} need a gradient, which no kernel computes"


def differentiable(plan: Plan, settings: Settings, sources: Sources, call: Callable[..., Any]) -> Plan:
    """The plan as an autograd node of a call whose angles need a gradient; ``call(given, settings)`` makes a call."""
    return Plan(saved.Node(settings, sources, plan, _gradients, call).run)


def _gradients(given: Given, settings: Settings, *grads: Any, create_graph: bool | None) -> saved.Gradients:
    return *gradient(given, settings, *grads, create_graph=create_graph), None, None


def gradient(
    given: Given, settings: Settings, grad: Any, key_grad: Any = None, *, create_graph: bool | None = None
) -> Gradients:
    """The gradients of x, key and the angles, given the gradients of the results; one of these may be None.

    With ``create_graph`` they come from ``saved.by_formula``, and gradients are enabled; None: from a kernel where one serves.
    """
    grad, key_grad = saved.given_gradients(given, grad, key_grad)
    if create_graph is not None:
        given = saved.apart(given)
    else:
        given = Given(*(_plain(t) for t in given))
        grad, key_grad = _plain(grad), _plain(key_grad)
    prepared = _prepared(given, settings)
    grads = [_as_rotated(t, settings) for t in (grad, key_grad)]
    if create_graph is not None:
        return _by_formula(given, prepared, grads, create_graph=create_graph)
    empty = not given.x.numel() or (given.key is not None and not given.key.numel())
    choice = choice_of(prepared, "a tensor is empty" if empty else None)
    made = None
    if choice.variant is not None:
        with contextlib.suppress(NotedError):  # a kernel does not compile
            made = _by_kernel(prepared, choice.variant, *grads)
    out, key_out, *tables = made or angle_gradient(prepared.eager_spec, prepared.call, *grads)
    x_grad = tokens_first(out, settings).reshape(given.x.shape)
    return x_grad, tokens_first(key_out, settings), *_as_given(given, *tables)


def note_gradient(heard: Heard, given: Given, settings: Settings, bypassed: str | None) -> None:
    """Note what the gradient of a call would launch."""
    prepared = _prepared(given, settings)
    choice, spec = choice_of(prepared, bypassed), prepared.spec
    if choice.variant is None or spec is None:
        return
    grads = [torch.empty_like(t) for t in (prepared.call.x, prepared.call.key) if t is not None]
    saved.note(heard, spec, choice.variant, gradient_call(spec, prepared.call, *grads))


def gradient_call(spec: Any, call: RopeCall, grad: Any, key_grad: Any = None) -> RopeCall:
    """The call of the gradient's kernel, with outputs to fill, from the forward's call and the results' gradients."""
    sums = torch.empty(token_angles(spec, call.seq, call.batch), dtype=torch.float32, device=grad.device)
    return saved.gradient_call(spec, call, grad, key_grad, angle_grad=sums)


def _plain(t: Any) -> Any:
    return t.resolve_conj().resolve_neg() if isinstance(t, torch.Tensor) else t


def _prepared(given: Given, settings: Settings) -> Prepared:
    """The prepared call of the gradient's kernel, with the forward's tensors."""
    backward = settings._replace(inplace=False, direction="backward")
    return prepare(given, backward, make_out=lambda t: t, angle_gradient=True)


def _as_rotated(t: Any, settings: Settings) -> Any:
    """A gradient with the axes of the rotated tensor: tokens before heads, and all heads of a packed qkv on one axis."""
    t = tokens_first(t, settings)
    layout = "bshd" if settings.tensor_format == "bhsd" else settings.tensor_format
    return t if t is None or settings.kv_heads is None else packed_heads(t, settings._replace(tensor_format=layout))[0]


def _by_kernel(prepared: Prepared, variant: Any, grad: Any, key_grad: Any) -> Gradients:
    spec = prepared.spec
    assert spec is not None
    call = gradient_call(spec, prepared.call, *saved.alike(grad, key_grad))
    saved.launch(spec, variant, call)
    return call.out, call.key_out, *spread(spec, prepared.call, list(call.angle_grad))


def _as_given(given: Given, table: Any, second: Any) -> tuple[Any, Any]:
    """The gradients of the caller's tensor of angles, and of sin, from the gradients of their views."""
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


def _by_formula(given: Given, prepared: Prepared, grads: list[Any], *, create_graph: bool) -> Gradients:
    """The gradients by autograd, and differentiable themselves if ``create_graph``."""
    angles = next(
        t for t in (given.freqs, given.cos, given.cos_sin_cache, given.inv_freq, given.freqs_cis) if t is not None
    )
    tensors = (given.x, given.key, angles, given.sin)
    x, key, table, second = saved.by_formula(prepared, tensors, grads, create_graph=create_graph)
    return x, key, table, second
