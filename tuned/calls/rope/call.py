"""The path of a RoPE call: its properties, the plan made for them, and the autograd node.

A call whose properties were seen before costs building one key, one dictionary lookup and the launch. Plans keep none of
the caller's tensors alive: they hold numbers, kernels and settings.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import torch
from torch.autograd import forward_ad

from tuned.calls.overlap import refuse_overlap
from tuned.calls.rope import angles as learned
from tuned.calls.rope import norm
from tuned.calls.rope.arguments import (
    Given,
    Prepared,
    Settings,
    Sources,
    check_strided,
    heads_apart,
    offset_of,
    prepare,
    tokens_first,
)
from tuned.calls.rope.in_order import eager_run
from tuned.calls.rope.lengths import class_of, sized
from tuned.calls.rope.plan import Plan, choice_of, kernel_plan, sized_plan
from tuned.families.launch import Launch
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.eager import rotate
from tuned.launching import alike
from tuned.launching.launcher import kernel
from tuned.launching.overwrite import apart, overwrite, refuse_inference, refuse_overwrite
from tuned.launching.plan import (
    NO_KEY,
    bypassed,
    current_device,
    listeners,
    may_be_negative,
    remember,
    tracing,
    transforms_active,
)
from tuned.launching.rehearsal import Heard, NotedError, listening, note_left
from tuned.lookup import misses
from tuned.lookup.gpu import LAZY, why_not_plain
from tuned.lookup.lookup import Choice

EMPTY = "a tensor is empty"
_PLANS: dict[Any, Any] = {}  # a call's properties -> its plan; and what ``alike.learn`` keeps of calls
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


def call(  # noqa: PLR0912, PLR0913 - function calls would cost time; the tensors of the public call
    x: Any,
    key: Any,
    freqs: Any,
    cos: Any,
    sin: Any,
    cos_sin_cache: Any,
    inv_freq: Any,
    freqs_cis: Any,
    cu_seqlens: Any,
    positions: Any,
    offset: Any,
    weight: Any,
    key_weight: Any,
    settings: tuple[Any, ...],
) -> Any:
    """Rotate x, and key unless it is None; ``settings`` are the fields of Settings in order. See tuned.dispatch.

    ``weight`` and ``key_weight`` are those of the norms of x and of the key; None without a norm.

    Returns the rotated x, or (x, key) if there is a key.
    """
    if type(offset) is not int:
        offset = offset_of(offset, positions)
    if _compiling() or listeners():
        given = Given(
            x, key, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens, positions, offset,
            weight, key_weight,
        )  # fmt: skip
        return _operator(given, Settings(*settings))
    if cos is None and sin is None:
        angles, source = freqs, 0
        if cos_sin_cache is not None or inv_freq is not None:
            angles, source = (cos_sin_cache, 1) if cos_sin_cache is not None else (inv_freq, 2)
            if freqs is not None or (cos_sin_cache is not None and inv_freq is not None):
                source = -1
        if freqs_cis is not None:
            alone = freqs is None and cos_sin_cache is None and inv_freq is None
            angles, source = freqs_cis, 4 if alone else -1
    else:
        alone = freqs is None and cos_sin_cache is None and inv_freq is None and freqs_cis is None
        angles, source = cos, 3 if alone else -1
    weights = None if weight is None else (weight, key_weight)
    position_tensor, int_offset = positions, offset
    if positions is None and type(offset) is not int:  # a tensor
        position_tensor, int_offset = offset, 0
    near: Any = None
    plan: Any = None
    first = None
    try:
        device = x.get_device()
        near = (
            x.shape, settings, source, positions is None, int_offset == 0, _grad_enabled(),
            # Asked only if x is on a GPU: asking for the current device initialises CUDA.
            forward_ad._current_level, device if device < 0 else current_device(),  # noqa: SLF001
        )  # fmt: skip
        for are_alike, plan in _PLANS.get(near, ()):  # noqa: B007 - used after the loop
            if addresses := are_alike(x, angles, key, sin, position_tensor, cu_seqlens, weight, key_weight):
                break
        else:
            plan = None
    except NO_KEY:
        near = plan = None
    if plan is None:
        given = Given(
            x, key, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens, positions, offset,
            weight, key_weight,
        )  # fmt: skip
        plan, addresses, first = _plan_of(
            given, settings, near, (x, angles, key, sin, position_tensor, cu_seqlens, weight, key_weight)
        )
    try:
        return plan.run(x, key, angles, sin, cu_seqlens, position_tensor, int_offset, addresses, weights)
    except NotedError:  # the launch was noted instead of made, or its kernel does not compile
        given = Given(
            x, key, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens, positions, offset,
            weight, key_weight,
        )  # fmt: skip
        return _rehearsed(given, Settings(*settings))
    finally:
        if first is not None:  # so that no tensor of a caller is kept
            first.prepared = None


def _plan_of(
    given: Given, settings: tuple[Any, ...], near: Any, tensors: tuple[Any, ...]
) -> tuple[Plan, tuple[int, ...], threading.local | None]:
    """(plan, addresses, first) of a call that ``_PLANS`` does not find by ``near``: the plan runs with the addresses.

    ``first`` holds the prepared call for the plan's first run; None for a known plan. ``near`` is None if an argument
    is not a plain tensor. ``tensors`` are the call's, in the order of ``lengths.TENSORS``, then the weights.
    """
    x, angles, key, sin, positions, cu_seqlens, weight, key_weight = tensors
    properties = plan = None
    addresses: tuple[int, ...] = ()
    if near is not None and angles is not None:
        _, *others = near
        try:
            properties = (*map(_traits, tensors), *others)
            addresses = tuple([t.data_ptr() for t in tensors if t is not None])
            # Every tensor made under torch.func belongs to its transform, even if it depends on none of the transform's
            # tensors, and plans make plain tensors. In place no tensor is made.
            if settings[2] or not transforms_active():
                plan = _PLANS.get(properties)
        except NO_KEY:
            properties = None
    if plan is not None:
        alike.learn(_PLANS, near, tensors, plan)
        return plan, addresses, None
    # Once the plan is known, another thread may run it first: its own call must not take what is prepared for this one.
    first = threading.local()
    class_key = None if properties is None else class_of(properties)
    weights = None if weight is None else (weight, key_weight)
    plan = _known_but_for_lengths(class_key, x, key, angles, sin, cu_seqlens, positions, weights)
    if plan is None:
        plan = _decide(given, Settings(*settings), class_key, first)
    # The properties do not tell whether torch.func or torch.jit is active, and that may have decided the plan.
    if properties is not None and not transforms_active() and tracing() is None:
        remember(_PLANS, properties, plan)
    return plan, addresses, first


def _traits(t: torch.Tensor | None) -> Any:
    """All properties of a tensor that a kernel, or the path to it, may depend on, as ``lengths.class_of`` takes them.

    The shape of a contiguous tensor implies its strides.
    """
    if t is None:
        return None
    needs = _grad_enabled() and t.requires_grad
    return type(t), t.dtype, t.shape, t.is_contiguous() or t.stride(), t.data_ptr() & 15, t.get_device(), needs


def _known_but_for_lengths(  # noqa: PLR0913 - the tensors of a call
    class_key: Any, x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, positions: Any, weights: Any
) -> Plan | None:
    """The plan of a call that differs only in its lengths from one that a kernel served, or None."""
    if class_key is None or transforms_active() or tracing() is not None:
        return None
    found = sized(class_key, x, key, angles, sin, cu_seqlens, positions)
    if found is None:
        return None
    learns = _grad_enabled() and (angles.requires_grad or (sin is not None and sin.requires_grad))
    plan, known = sized_plan(found, x, key), found.known
    return _differentiable(plan, known.settings, known.sources, x, key, weights, learns=learns)


def _decide(given: Given, settings: Settings, class_key: Any, first: threading.local) -> Plan:
    """Check a call and choose what calls with its properties do. It launches nothing and writes nothing.

    The prepared call is kept in ``first``, for the plan's first run.
    """
    check_strided(given, settings)
    sources = Sources.of(given)
    plan = _checked(given, settings, sources, class_key, first)
    if not plan.serves:
        return plan
    if sources.angles == "freqs_cis":
        plan = Plan(functools.partial(_run_unless_conjugate, plan, settings, sources))
    read = [t for t in (given.x, given.key, getattr(given, sources.angles), given.sin) if t is not None]
    if any(t.is_floating_point() and may_be_negative(t) for t in read):
        plan = Plan(functools.partial(_run_unless_negative, plan, settings, sources))
    weights = (given.weight, given.key_weight) if settings.norm else None
    learns = learned.need_gradient(given)
    return _differentiable(plan, settings, sources, given.x, given.key, weights, learns=learns)


def _differentiable(  # noqa: PLR0913 - the tensors that may need a gradient
    plan: Plan, settings: Settings, sources: Sources, x: Any, key: Any, weights: Any, *, learns: bool
) -> Plan:
    """The plan; as an autograd node if a gradient is needed. ``learns``: the angles need a gradient."""
    if not _grad_enabled():
        return plan
    if learns:
        return learned.differentiable(plan, settings, sources, call_given)
    if weights is not None:
        return norm.differentiable(plan, settings, sources, (x, key, *weights), call_given)
    needs = [x.requires_grad] if key is None else [x.requires_grad, key.requires_grad]
    if not any(needs):
        return plan
    if settings.k_dim:  # the first result depends on both, the second on x alone
        return Plan(_Node(settings, sources, plan, None if needs[0] else 1).run)
    return Plan(_Node(settings, sources, plan, None if all(needs) else needs.index(False)).run)


def _checked(given: Given, settings: Settings, sources: Sources, class_key: Any, first: threading.local) -> Plan:
    """The plan of a call whose properties are new."""
    bypassed = _why_no_launch(given, settings) or _why_empty(given, settings)
    prepared = prepare(given, settings, make_out=(lambda t: t) if bypassed else torch.empty_like)
    choice = choice_of(prepared, bypassed)
    if choice.variant is not None and _one_is_empty(given, settings):
        return Plan(functools.partial(_run_alone, settings, sources), serves=False)
    if choice.variant is None:
        first.prepared = prepared
        checked = functools.partial(_run_eagerly, settings, sources, first, choice.why)
        return Plan(eager_run(prepared, given, settings, sources, checked), serves=False)
    misses.note(ROPE, prepared.spec, prepared.size, choice)
    if heads_apart(given.x, settings):  # ``prepared`` is of a contiguous copy
        return Plan(functools.partial(_run_copy, settings, sources))
    return kernel_plan(given.x, given.key, prepared, choice.variant, settings, sources, class_key, first)


def _why_empty(given: Given, settings: Settings) -> str | None:
    """EMPTY if a tensor is empty and so has no address; None if not, or if the query or its key can get a kernel alone."""
    empty = any(not t.numel() for t in given if isinstance(t, torch.Tensor))
    return EMPTY if empty and not _one_is_empty(given, settings) else None


def _one_is_empty(given: Given, settings: Settings) -> bool:
    """Whether a query or its key is empty, and the other is not."""
    both = isinstance(given.x, torch.Tensor) and isinstance(given.key, torch.Tensor)
    return both and not settings.k_dim and bool(given.x.numel()) != bool(given.key.numel())


def _alone(given: Given, t: torch.Tensor, settings: Settings) -> Given:
    """The call of a query or of its key alone."""
    alone = given._replace(x=t, key=None)
    if not settings.norm:
        return alone
    return alone._replace(weight=given.weight if t is given.x else given.key_weight, key_weight=None)


def _bypassed(given: Given, settings: Settings) -> str | None:
    """Why a launch would bypass torch.func or forward-mode AD, or lose a gradient of the angles; or None."""
    if transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        return "a kernel would bypass torch.func or forward-mode differentiation"
    return learned.why_eager(given, settings)


def _why_no_launch(given: Given, settings: Settings) -> str | None:
    """Why a launch would bypass torch.func or tracing, lose a gradient, or find no plain tensor in memory; or None."""
    if tracing() is not None:
        return "a kernel would bypass torch.jit tracing"
    for t in given:
        if isinstance(t, torch.Tensor) and (reason := why_not_plain(t)) is not None:
            return reason
    return _bypassed(given, settings)


# ``Plan.run`` where no kernel is launched right away: each takes what its plan binds, then ``Plan.run``'s arguments.


def _run_unless_negative(  # noqa: PLR0913
    plan: Plan, settings: Settings, sources: Sources, x: Any, key: Any, angles: Any, sin: Any, *rest: Any
) -> Any:
    """The plan's run, but eager PyTorch for tensors with the negative bit: kernels read memory as it is."""
    if any(t is not None and t.is_neg() for t in (x, key, angles, sin)):
        return _run_eagerly(settings, sources, None, LAZY, x, key, angles, sin, *rest)
    return plan.run(x, key, angles, sin, *rest)


def _run_unless_conjugate(  # noqa: PLR0913
    plan: Plan, settings: Settings, sources: Sources, x: Any, key: Any, angles: Any, *rest: Any
) -> Any:
    """The plan's run, but eager PyTorch for complex angles that are conjugated lazily: memory has the other sign."""
    if angles.is_conj():
        return _run_eagerly(settings, sources, None, LAZY, x, key, angles, *rest)
    return plan.run(x, key, angles, *rest)


def _run_eagerly(settings: Settings, sources: Sources, first: threading.local | None, why: str, *tensors: Any) -> Any:
    """Run a call with PyTorch's operators. ``first`` holds the call that the plan was made for, checked and prepared."""
    given = sources.given(*tensors)
    note_left("rope", given.x, why)
    if settings.inplace:
        for t in (given.x, given.key):
            if t is not None:
                refuse_overwrite(t, by_gradient=norm.needs_gradient(given) or learned.need_gradient(given))
    return run_eager(given, settings, getattr(first, "prepared", None))


def _run_copy(settings: Settings, sources: Sources, x: Any, *others: Any) -> Any:
    """Run a packed qkv with ``heads_apart`` as a call of its contiguous copy."""
    return call_given(sources.given(x.contiguous(), *others), settings)


def _run_alone(settings: Settings, sources: Sources, x: Any, key: Any, *others: Any) -> Any:
    """Run a call of a query and a key, one of them empty, as two calls; the empty one first, since it may be refused."""
    results, given = {}, sources.given(x, key, *others)
    for t in sorted((x, key), key=torch.Tensor.numel):
        results[t is x] = call_given(_alone(given, t, settings), settings)
    return results[True], results[False]


def run_eager(given: Given, settings: Settings, prepared: Prepared | None = None) -> Any:
    """Run the call with PyTorch's operators; in place, the tensors are overwritten after everything is computed.

    ``prepared``: the call, if it is checked already.
    """
    prepared = prepared or prepare(given, settings, make_out=lambda t: t)
    call = prepared.call
    if settings.inplace:
        refuse_inference(call.x, call.key)
    if settings.inplace and (learned.need_gradient(given) or norm.needs_gradient(given)):  # by formulas of old values
        call = dataclasses.replace(call, x=call.x.clone(), key=None if call.key is None else call.key.clone())
    out, key_out = rotate(prepared.eager_spec, call)
    if settings.inplace:
        overwrite(prepared.call.x, out)
        if given.key is not None and key_out is not None:
            overwrite(prepared.call.key, key_out)
        out, key_out = given.x, given.key
    else:
        out, key_out = tokens_first(out, settings), tokens_first(key_out, settings)
    if out.shape != given.x.shape and not settings.k_dim:  # a packed qkv with an axis of 3
        out = out.reshape(given.x.shape)
    # As what a kernel gives, a result may be overwritten where gradients are enabled, in a node or after no_grad.
    if not settings.inplace and not torch.is_grad_enabled() and not _compiling() and bypassed() is None:
        out, key_out = (t if t is None or why_not_plain(t) is not None else apart(t) for t in (out, key_out))
    return out if given.key is None else (out, key_out)


def _operator(given: Given, settings: Settings) -> Any:
    """The call under torch.compile or a dispatch mode: as an operator of torch.library.

    Under torch.func and forward-mode AD, and if the angles need a gradient that no kernel gives, eager PyTorch runs.
    """
    from tuned.calls.rope import ops  # noqa: PLC0415 - registering operators takes 10 ms, and only this path needs them

    return ops.call(given, settings) if _bypassed(given, settings) is None else run_eager(given, settings)


class _Node:
    """A differentiable call: the plan of its forward and the settings of its backward."""

    def __init__(self, settings: Settings, sources: Sources, forward: Plan, frozen: int | None) -> None:
        self.settings, self.sources, self.forward = settings, sources, forward
        self.frozen = frozen  # index of the result that needs no gradient; None if all results need one
        self.transposed = tuple(transposed(settings))

    def run(self, x: Any, key: Any, *others: Any) -> Any:
        """``Plan.run``, with a node in the autograd graph."""
        if not self.settings.inplace:
            return _apply(x, key, self, *others)
        refuse_overwrite(x)
        if key is None:
            return _apply(x, key, self, *others)
        # An autograd node may not overwrite two views. So rotate out of place, and let copy_ overwrite each.
        refuse_overwrite(key)
        refuse_overlap(x, key)
        given = self.sources.given(x, key, *others)
        for t, rotated in zip((x, key), call_given(given, self.settings._replace(inplace=False)), strict=True):
            t.copy_(rotated)
        return x, key

    def backward(self, grad: Any, key_grad: Any, *others: Any) -> tuple[Any, Any]:
        """Gradients of x and of the key; None for a result without one."""
        if not self.settings.k_dim and (grad is None or key_grad is None):
            one = call_given(self.sources.given(key_grad if grad is None else grad, None, *others), self.transposed)
            return (None, one) if grad is None else (one, None)
        both: tuple[Any, Any] = call_given(self.sources.given(grad, key_grad, *others), self.transposed)
        return both


def _rehearsed(given: Given, settings: Settings) -> Any:
    """Run a noted call with PyTorch's operators; if asked, also note what its gradient would launch."""
    heard = listening()
    if heard is not None and heard.gradients and settings.norm:
        if settings.inplace:  # the autograd node makes the call on copies, out of place
            _note(heard, given, settings._replace(inplace=False))
        norm.note_gradient(heard, given, settings, _why_no_launch(given, settings))
    elif heard is not None and heard.gradients and learned.noted(given, settings):
        if settings.inplace:
            _note(heard, given, settings._replace(inplace=False))
        learned.note_gradient(heard, given, settings, _why_no_launch(given, settings))
    elif heard is not None and heard.gradients and settings.direction == "forward":
        if settings.inplace and given.key is not None:  # as _Node rotates two tensors
            _note(heard, given, settings._replace(inplace=False))
        results = (given.x, given.key)
        if settings.k_dim:
            made = prepare(given, settings, make_out=torch.empty_like).call
            results = made.out, made.key_out
        x, key = (None if t is None else torch.empty_like(t) for t in results)
        like = given._replace(x=x, key=key)
        _note(heard, like, transposed(settings))
    return run_eager(given, settings)


def _note(heard: Heard, given: Given, settings: Settings) -> None:
    prepared = prepare(given, settings, make_out=torch.empty_like)
    choice = choice_of(prepared, _why_no_launch(given, settings))
    if choice.variant is None:
        return
    misses.note(ROPE, prepared.spec, prepared.size, choice)
    for launch in ROPE.launches(prepared.spec, choice.variant, prepared.call):
        if isinstance(launch, Launch):
            heard.note(kernel(launch.kernel), launch)


def call_given(given: Given, settings: Any) -> Any:
    """``call``, with its tensors as one ``Given``."""
    return call(*given, tuple(settings))


def transposed(settings: Settings) -> Settings:
    """The settings of a call's backward: its transpose, out of place."""
    return settings._replace(inplace=False, direction="backward" if settings.direction == "forward" else "forward")


class _Rope(torch.autograd.Function):
    """The kernel as an autograd node. Its backward is the transposed call, and so differentiable again."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, key: Any, node: _Node, angles: Any, sin: Any, cu_seqlens: Any, positions: Any, *others: Any
    ) -> Any:
        """Rotate; save the angles and the positions, not x."""
        ctx.save_for_backward(angles, sin, cu_seqlens, positions)
        ctx.node, ctx.others = node, others
        ctx.set_materialize_grads(bool(node.settings.k_dim))  # MLA: a result without a gradient counts as zeros
        if node.settings.inplace:
            ctx.mark_dirty(x)
        out = node.forward.run(x, key, angles, sin, cu_seqlens, positions, *others)
        if node.frozen is not None:
            ctx.mark_non_differentiable(out[node.frozen])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradients, out of place, since autograd may share them."""
        grad, key_grad = grads if len(grads) > 1 else (*grads, None)
        if grad is None and key_grad is None:
            return (None,) * 10
        return *ctx.node.backward(grad, key_grad, *ctx.saved_tensors, *ctx.others), *(None,) * 8


# What Function.apply calls in the end if no torch.func transform is active; its checks before cost 1.5 us per call.
_apply: Any = super(torch.autograd.Function, _Rope).apply


def explain(given: Given, settings: Settings) -> tuple[Choice, Any]:
    """The choice for a call, and its spec; nothing is launched."""
    prepared = prepare(given, settings, make_out=lambda t: t)
    choice = choice_of(prepared, _why_no_launch(given, settings) or _why_empty(given, settings))
    if choice.variant is not None and _one_is_empty(given, settings):  # the call of the other tensor gets a kernel
        return explain(_alone(given, max(given.x, given.key, key=torch.Tensor.numel), settings), settings)
    read = [t for t in (given.x, given.key, *given[2:8]) if t is not None]  # and angles
    if choice.variant is not None and any(t.is_neg() or t.is_conj() for t in read):
        choice = Choice("eager", LAZY, None)
    return choice, prepared.spec
