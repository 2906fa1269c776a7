"""The way of a RoPE call: what its properties are, the plan that was made for them, and the node autograd sees.

A call whose properties were seen before costs one key, one dictionary hit and the launch. Nothing of a caller's is kept
alive: plans hold numbers, kernels and settings, no tensors.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tuned.calls.rope.arguments import Given, Settings, Sources, heads_apart, offset_of, prepare, refuse_overlap
from tuned.calls.rope.lengths import class_of, sized
from tuned.calls.rope.plan import Plan, choice_of, kernel_plan, sized_plan
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.eager import rotate
from tuned.launching.overwrite import refuse_overwrite
from tuned.launching.plan import current_device, remember, tracing, transforms_active
from tuned.lookup import misses

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuned.lookup.lookup import Choice

_PLANS: dict[Any, Plan] = {}
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
# What listens to operators, and would miss a launch: FakeTensorMode, tracers, selective checkpointing.
_listeners: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001
# Errors of a key made of something that is no plain tensor: the checks say what is wrong, or eager PyTorch takes it.
_NO_KEY = (AttributeError, RuntimeError, TypeError)


def call(  # noqa: PLR0912, PLR0913 - a call of a function would cost more; the tensors of the public call
    x: Any,
    key: Any,
    freqs: Any,
    cos: Any,
    sin: Any,
    cos_sin_cache: Any,
    inv_freq: Any,
    cu_seqlens: Any,
    positions: Any,
    offset: Any,
    settings: tuple[Any, ...],
) -> Any:
    """Run RoPE on x, and on a key that is not None; ``settings`` are those of Settings, in order. See tuned.dispatch.

    A tensor with a key gives (x, key).
    """
    if type(offset) is not int:
        offset = offset_of(offset, positions)
    if _compiling() or _listeners():
        given = Given(x, key, freqs, cos, sin, cos_sin_cache, inv_freq, cu_seqlens, positions, offset)
        return _operator(given, Settings(*settings))
    if cos is None and sin is None:
        angles, source = freqs, 0
        if cos_sin_cache is not None or inv_freq is not None:
            angles, source = (cos_sin_cache, 1) if cos_sin_cache is not None else (inv_freq, 2)
            if freqs is not None or (cos_sin_cache is not None and inv_freq is not None):
                source = -1
    else:
        angles, source = cos, 3 if freqs is None and cos_sin_cache is None and inv_freq is None else -1
    place, number = positions, offset
    if positions is None and type(offset) is not int:  # a tensor
        place, number = offset, 0
    properties: Any
    try:
        here, device, table, grad = x.data_ptr(), x.get_device(), angles.data_ptr(), _grad_enabled()
        # All that a compiled kernel, or the way to it, may depend on; written out, since a call of a function that
        # did it for one tensor would cost as much again. Of a contiguous tensor the shape tells the strides.
        properties = (
            settings, source, positions is None, number == 0,
            type(x), x.dtype, x.shape, x.is_contiguous() or x.stride(), here & 15, device, grad and x.requires_grad,
            type(angles), angles.dtype, angles.shape, angles.is_contiguous() or angles.stride(), table & 15,
            angles.get_device(), grad and angles.requires_grad,
            key if key is None else (
                type(key), key.dtype, key.shape, key.is_contiguous() or key.stride(), key.data_ptr() & 15,
                key.get_device(), grad and key.requires_grad,
            ),
            sin if sin is None else (
                type(sin), sin.dtype, sin.shape, sin.is_contiguous() or sin.stride(), sin.data_ptr() & 15,
                sin.get_device(), grad and sin.requires_grad,
            ),
            place if place is None else (
                type(place), place.dtype, place.shape, place.is_contiguous() or place.stride(), place.data_ptr() & 15,
                place.get_device(),
            ),
            cu_seqlens if cu_seqlens is None else (
                type(cu_seqlens), cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.is_contiguous() or cu_seqlens.stride(),
                cu_seqlens.data_ptr() & 15, cu_seqlens.get_device(),
            ),
            # Only where a tensor is on a device: asking for the current one initialises it.
            grad, forward_ad._current_level, device if device < 0 else current_device(),  # noqa: SLF001
        )  # fmt: skip
        plan = _PLANS.get(properties)
    except _NO_KEY:
        properties = plan = None
        here = table = 0
    if plan is None:
        klass = None if properties is None else class_of(properties)
        plan = None if klass is None else _known_but_for_lengths(klass, x, key, angles, sin, cu_seqlens, place)
        if plan is None:
            given = Given(x, key, freqs, cos, sin, cos_sin_cache, inv_freq, cu_seqlens, positions, offset)
            plan = _decide(given, Settings(*settings), klass)
        # The properties do not tell whether something follows operators, which is what may have decided.
        if properties is not None and not transforms_active() and tracing() is None:
            remember(_PLANS, properties, plan)
    try:
        return plan.run(x, key, angles, sin, cu_seqlens, place, number, here, table)
    except RuntimeError:
        # torch.func.grad wraps all that is made inside of it, the results of tensors that it does not follow too, and
        # what is wrapped has no address. Nothing was launched then; in place nothing is made.
        if settings[2] or not transforms_active():
            raise
        given = Given(x, key, freqs, cos, sin, cos_sin_cache, inv_freq, cu_seqlens, positions, offset)
        return run_eager(given, Settings(*settings))


def _known_but_for_lengths(  # noqa: PLR0913 - the tensors of a call
    klass: Any, x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, place: Any
) -> Plan | None:
    """The plan of a call that differs in its lengths alone from one that a kernel served."""
    if transforms_active() or tracing() is not None:
        return None
    found = sized(klass, x, key, angles, sin, cu_seqlens, place)
    return None if found is None else _differentiable(sized_plan(found), found.settings, found.sources, x, key)


def _decide(given: Given, settings: Settings, klass: Any) -> Plan:
    """Check everything and choose what calls like this one do. Nothing is launched, nothing written."""
    sources = Sources.of(given)
    plan = _checked(given, settings, sources, klass)
    if settings.inplace:
        for t in (given.x, given.key):
            if t is not None:
                refuse_overwrite(t)
    if not plan.serves:
        return plan
    if any(map(_may_be_negative, (given.x, given.key, getattr(given, sources.angles), given.sin))):
        plan = Plan(_run_unless_negative(plan, settings, sources))
    return _differentiable(plan, settings, sources, given.x, given.key)


def _differentiable(plan: Plan, settings: Settings, sources: Sources, x: Any, key: Any) -> Plan:
    """The plan, as a node of the graph where a gradient is needed."""
    if not _grad_enabled():
        return plan
    needs = [x.requires_grad] if key is None else [x.requires_grad, key.requires_grad]
    if not any(needs):
        return plan
    return Plan(_Node(settings, sources, plan, None if all(needs) else needs.index(False)).run)


def _checked(given: Given, settings: Settings, sources: Sources, klass: Any) -> Plan:
    """The plan of a call of which nothing is known yet."""
    prepared = prepare(given, settings, make_out=_strides_of_result)
    choice = choice_of(prepared, _missed(given))
    if choice.variant is None:
        return Plan(_eager_run(settings, sources), serves=False)
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    if not all(t.numel() for t in tensors):  # what has no elements has no address
        one = given.key is not None and bool(given.x.numel()) != bool(given.key.numel())
        return Plan((_run_alone if one else _eager_run)(settings, sources), serves=False)
    misses.note(ROPE, prepared.spec, prepared.size, choice)
    if heads_apart(given.x, settings):  # what was prepared is of a copy
        return Plan(_run_copy(settings, sources))
    return kernel_plan(prepared, choice.variant, settings, sources, klass)


def _strides_of_result(t: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides that the result will have."""
    return t if t.is_contiguous() else torch.empty_like(t)


def _followed(given: Given) -> str | None:
    """Why a launch would be missed by what follows operators here, or None."""
    if transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        return "torch.func or forward-mode differentiation follows PyTorch's own operators"
    if _angles_need_gradient(given):
        return "the angles need a gradient, which the kernels do not give"
    return None


def _missed(given: Given) -> str | None:
    """Why a launch would be missed, or would not find a tensor's values in memory, or None."""
    if tracing() is not None:
        return "torch.jit traces PyTorch's own operators"
    for t in given:
        if isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter):
            return f"{type(t).__name__} is a subclass of Tensor with rules of its own"
    return _followed(given)


def _angles_need_gradient(given: Given) -> bool:
    angles = (given.freqs, given.cos, given.sin, given.cos_sin_cache, given.inv_freq)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in angles)


def _may_be_negative(t: torch.Tensor | None) -> bool:
    """Whether a tensor with these strides may be the imaginary part of a conjugate: PyTorch negates it when it reads.

    Of an axis of length 1 the stride says nothing.
    """
    if t is None or not t.is_floating_point():
        return False
    return all(step % 2 == 0 for step, n in zip(t.stride(), t.shape, strict=True) if n != 1)


def _run_unless_negative(plan: Plan, settings: Settings, sources: Sources) -> Callable[..., Any]:
    """Kernels read memory as it is, so negative views are for eager PyTorch."""
    eager = _eager_run(settings, sources)

    def run(x: Any, key: Any, angles: Any, sin: Any, *rest: Any) -> Any:
        negative = any(t is not None and t.is_neg() for t in (x, key, angles, sin))
        return (eager if negative else plan.run)(x, key, angles, sin, *rest)

    return run


def _eager_run(settings: Settings, sources: Sources) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        given = sources.given(*tensors)
        if settings.inplace:
            for t in (given.x, given.key):
                if t is not None:
                    refuse_overwrite(t)
        return run_eager(given, settings)

    return run


def _run_copy(settings: Settings, sources: Sources) -> Callable[..., Any]:
    """The call of a packed qkv whose heads no view has on one axis, as a call of a copy that lies densely."""

    def run(x: Any, *others: Any) -> Any:
        return _call(sources.given(x.contiguous(), *others), settings)

    return run


def _run_alone(settings: Settings, sources: Sources) -> Callable[..., Any]:
    """The call of a query and a key of which one has no heads, as a call of the other."""

    def run(x: Any, key: Any, *others: Any) -> Any:
        empty = key if x.numel() else x
        if settings.inplace:
            refuse_overwrite(empty)
        out = _call(sources.given(x if x.numel() else key, None, *others), settings)
        nothing = empty if settings.inplace else empty.clone()
        return (out, nothing) if x.numel() else (nothing, out)

    return run


def run_eager(given: Given, settings: Settings) -> Any:
    """The call by PyTorch's operators; in place, the tensors are overwritten after all has been computed."""
    prepared = prepare(given, settings, make_out=lambda t: t)
    call = prepared.call
    if settings.inplace and _angles_need_gradient(given):  # which takes the old values
        call = dataclasses.replace(call, x=call.x.clone(), key=None if call.key is None else call.key.clone())
    out, key_out = rotate(prepared.eager_spec, call)
    if settings.inplace:
        prepared.call.x.copy_(out)
        if given.key is not None:
            given.key.copy_(key_out)
        out, key_out = given.x, given.key
    elif out.shape != given.x.shape:  # a packed qkv with an axis of 3
        out = out.reshape(given.x.shape)
    return out if given.key is None else (out, key_out)


def _operator(given: Given, settings: Settings) -> Any:
    """The call for what follows operators: as one of torch.library, or by PyTorch's own where the angles need a gradient."""
    from tuned.calls.rope import ops  # noqa: PLC0415 - making operators takes 10 ms, which only this needs

    if _followed(given) is not None:
        return run_eager(given, settings)
    return ops.call(given, settings)


class _Node:
    """A differentiable call: the plan of its forward, and the settings of its backward."""

    def __init__(self, settings: Settings, sources: Sources, forward: Plan, frozen: int | None) -> None:
        self.settings, self.sources, self.forward = settings, sources, forward
        self.frozen = frozen  # which of two tensors needs no gradient, if one
        self.transposed = tuple(transposed(settings))

    def run(self, x: Any, key: Any, *others: Any) -> Any:
        """The call as a node of the graph: ``Plan.run``."""
        if not self.settings.inplace:
            return _apply(x, key, self, *others)
        refuse_overwrite(x)
        if key is None:
            return _apply(x, key, self, *others)
        # A node may not overwrite two tensors that are views; copies of its results autograd can follow.
        refuse_overwrite(key)
        refuse_overlap(x, key)
        given = self.sources.given(x, key, *others)
        for t, rotated in zip((x, key), _call(given, self.settings._replace(inplace=False)), strict=True):
            t.copy_(rotated)
        return x, key

    def backward(self, grad: Any, key_grad: Any, *others: Any) -> tuple[Any, Any]:
        """Gradients of x and of the key; None where none came."""
        if grad is None or key_grad is None:
            one = _call(self.sources.given(key_grad if grad is None else grad, None, *others), self.transposed)
            return (None, one) if grad is None else (one, None)
        both: tuple[Any, Any] = _call(self.sources.given(grad, key_grad, *others), self.transposed)
        return both


def _call(given: Given, settings: Any) -> Any:
    return call(*given, tuple(settings))


def transposed(settings: Settings) -> Settings:
    """The settings of a call's backward: the transposed map, out of place."""
    turned = "backward" if settings.direction == "forward" else "forward"
    return settings._replace(inplace=False, direction=turned)


class _Rope(torch.autograd.Function):
    """The kernel as a node of the graph. Its backward is the transposed call, and so differentiable again."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, key: Any, node: _Node, angles: Any, sin: Any, cu_seqlens: Any, place: Any, *numbers: int
    ) -> Any:
        """Rotate; keep the angles and where the tokens are, not x."""
        ctx.save_for_backward(angles, sin, cu_seqlens, place)
        ctx.node, ctx.numbers = node, numbers
        ctx.set_materialize_grads(False)
        if node.settings.inplace:
            ctx.mark_dirty(x)
        out = node.forward.run(x, key, angles, sin, cu_seqlens, place, *numbers)
        if node.frozen is not None:
            ctx.mark_non_differentiable(out[node.frozen])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradients, out of place: they may be shared."""
        grad, key_grad = grads if len(grads) > 1 else (*grads, None)
        if grad is None and key_grad is None:
            return (None,) * 10
        return *ctx.node.backward(grad, key_grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 8


# What Function.apply ends in when no transform of torch.func is active; the checks before cost 1.5 us a call.
_apply: Any = super(torch.autograd.Function, _Rope).apply


def explain(given: Given, settings: Settings) -> tuple[Choice, Any]:
    """The choice for a call, and its spec; nothing runs."""
    prepared = prepare(given, settings, make_out=lambda t: t)
    return choice_of(prepared, _missed(given)), prepared.spec
