"""Operators of torch.library for RoPE: ``tuned::rope`` and ``tuned::rope_qk``, and both in place.

torch.compile, tracers and dispatch modes see these operators; other calls do not use them. The backward of each is the
functional operator with the transposed map, and so differentiable again. ``tuned::rope_`` and ``tuned::rope_qk_``
overwrite their arguments: torch.compile makes one launch of them, and no copy. They are defined without
torch.library.custom_op, which gives no gradient to an operator that overwrites. None of these gives a gradient of the
angles: ``tuned::rope_learned`` does, with a backward that is an operator too. Calls run as PyTorch's operators if no
kernel gives that gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tuned.calls.operators import define, save, saved
from tuned.calls.rope import angles as learned
from tuned.calls.rope import append as caching
from tuned.calls.rope import call as eager
from tuned.calls.rope.arguments import Given, Settings, asks_for_norm
from tuned.calls.rope.norm import gradient, needs_gradient
from tuned.launching.overwrite import bump_versions

_TENSORS = (
    "Tensor? freqs, Tensor? cos, Tensor? sin, Tensor? cos_sin_cache, Tensor? inv_freq, Tensor? freqs_cis, "
    "Tensor? cu_seqlens, "
    "Tensor? positions, Tensor? starts, SymInt offset"
)
_SETTINGS = (
    "str tensor_format, bool interleaved, SymInt? rotary_dim, str? angle_entries, SymInt? max_seqlen, "
    "float attention_scaling, int cp_size, int cp_rank, str rotated, bool conjugate, int[]? sections, bool interleaved_sections, "
    "int? kv_heads, bool deinterleave, int k_dim, str direction"
)
_OF_NORM = ", str norm, float eps, bool zero_centered, str rounding"  # the last fields of Settings
_COUNT, _NORM_COUNT = 10, 4  # arguments in _TENSORS and in _OF_NORM


def call(given: Given, settings: Settings) -> Any:
    """Run the call as an operator."""
    starts = given.offset if isinstance(given.offset, torch.Tensor) else None
    named = settings._asdict()
    inplace = named.pop("inplace")
    others = (*given[2:10], starts, 0 if starts is not None else given.offset, *named.values())
    if asks_for_norm(given, settings):
        return _norm_call(given, others, inplace=inplace)
    others = others[:-_NORM_COUNT]
    if learned.need_gradient(given):
        return _learned_call(given, others, inplace=inplace)
    if settings.k_dim:
        return mla_kv_rope(given.x, given.key, *others)
    if not inplace:
        return rope(given.x, *others) if given.key is None else rope_qk(given.x, given.key, *others)
    if given.key is None:
        rope_(given.x, *others)
        return given.x
    rope_qk_(given.x, given.key, *others)
    return given.x, given.key


def _arguments(x: Any, key: Any, others: tuple[Any, ...], *, inplace: bool = False) -> tuple[Given, Settings]:
    _refuse_tangents(x, key, *others[:_COUNT])
    *tensors, starts, offset = others[:_COUNT]
    first, interleaved, *rest = others[_COUNT:]
    given = Given(x, key, *tensors)._replace(offset=offset if starts is None else starts)
    settings = Settings(first, interleaved, inplace, *rest)
    return given, settings._replace(sections=None if settings.sections is None else tuple(settings.sections))


def _refuse_tangents(*tensors: Any) -> None:
    """Refuse forward mode over an operator's gradient: PyTorch gives operators of torch.library no rule for it, and would drop tangents.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    if forward_ad._current_level < 0:  # noqa: SLF001 - no public way to ask
        return
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "forward mode cannot follow the gradient of a call that torch.compile or a dispatch mode recorded, got a tensor with a "
            "tangent: make the call inside of forward_ad.dual_level() too, where PyTorch's operators serve it"
        )


def _like(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result with the strides that the fake implementation returns."""
    wanted = torch.empty_like(x)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)


def _running(count: int, *, inplace: bool = False) -> Callable[..., Any]:
    """The implementation of an operator that rotates its first ``count`` arguments."""

    def run(*arguments: Any) -> Any:
        rotated = arguments[:count]
        x, key = rotated if count > 1 else (*rotated, None)
        with torch.no_grad():
            given, settings = _arguments(x, key, arguments[count:], inplace=inplace)
            out = eager.call_given(given, settings)
            if inplace:
                return None
            return tuple(map(_like, out, rotated)) if count > 1 else _like(out, x)

    return run


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the angles and the positions, not what was rotated."""
    rotated = len(output) if isinstance(output, tuple) else 1
    save(ctx, inputs[rotated:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    *rest, direction = saved(ctx)
    others = (*rest, "backward" if direction == "forward" else "forward")
    nothing = (None,) * len(others)
    given = [grad for grad in grads if grad is not None]
    if len(given) == 2:  # noqa: PLR2004 - of q and k
        return *rope_qk(*given, *others), *nothing
    return *(grad if grad is None else rope(grad, *others) for grad in grads), *nothing


class _Overwrite(torch.autograd.Function):
    """The autograd node of the first ``count`` tensors that an operator overwrites."""

    @staticmethod
    def forward(ctx: Any, launch: Any, count: int, *arguments: Any) -> Any:
        """Launch, if another node has not done so; save what the backward needs."""
        rotated = arguments[:count]
        _setup(ctx, arguments, rotated)
        ctx.mark_dirty(*rotated)
        if launch is not None:
            launch()
        return rotated if count > 1 else rotated[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradients, out of place, since autograd may share them."""
        return None, None, *_backward(ctx, *grads)


def _overwriting(name: str, schema: str, count: int) -> Any:
    _LIBRARY.define(name + schema)
    function, made = _running(count, inplace=True), getattr(torch.ops.tuned, name)

    def autograd(*arguments: Any) -> None:
        rotated, enabled = arguments[:count], torch.is_grad_enabled()

        def launch() -> None:
            # In a node gradients are disabled, and AOTAutograd leaves out of the gradient what a write without them does to an
            # argument of the graph.
            with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(enabled):  # noqa: SLF001 - as torch.library's own operators do
                made(*arguments)

        needing = [t for t in rotated if enabled and t.requires_grad]
        if len(needing) < count:
            bump_versions(*rotated)
        if not needing:
            launch()
        elif len(needing) == count and not any(t._is_view() for t in rotated):  # noqa: SLF001
            _Overwrite.apply(launch, count, *arguments)
        else:
            # A node may not overwrite two views, and makes all that it overwrites require grad. So each tensor that needs
            # a gradient gets a node of its own; the first one launches.
            for t in needing:
                _Overwrite.apply(launch if t is needing[0] else None, 1, t, *arguments[count:])

    _implement(name, function)
    _LIBRARY.impl(name, autograd, "Autograd")
    return made


def _implement(name: str, function: Callable[..., None]) -> None:
    """Register what an operator that overwrites does, beside its gradient."""
    _LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")  # type: ignore[attr-defined]  # noqa: SLF001
    torch.library.register_fake(f"tuned::{name}", lambda *_: None, lib=_LIBRARY)
    made = getattr(torch.ops.tuned, name)
    written = [a.alias_info is not None and a.alias_info.is_write for a in made.default._schema.arguments]  # noqa: SLF001

    def negative(*arguments: Any) -> None:
        plain = [t.resolve_neg() if isinstance(t, torch.Tensor) else t for t in arguments]
        made(*plain)
        for t, new, writes in zip(arguments, plain, written, strict=False):
            if writes and new is not t:
                t.copy_(new)

    # PyTorch's own way for tensors with the negative bit fails where an argument is None.
    _LIBRARY.impl(name, negative, "Negative")


rope = define(
    "rope",
    f"(Tensor x, {_TENSORS}, {_SETTINGS}) -> Tensor",
    _running(1),
    lambda x, *_: torch.empty_like(x),
    _backward,
    _setup,
)
rope_qk = define(
    "rope_qk",
    f"(Tensor q, Tensor k, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _running(2),
    lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
    _backward,
    _setup,
)
_LIBRARY = torch.library.Library("tuned", "FRAGMENT")
rope_ = _overwriting("rope_", f"(Tensor(a!) x, {_TENSORS}, {_SETTINGS}) -> ()", 1)
rope_qk_ = _overwriting("rope_qk_", f"(Tensor(a!) q, Tensor(b!) k, {_TENSORS}, {_SETTINGS}) -> ()", 2)


# With angles that need a gradient. An operator without a key, and a backward without sin, return empty tensors for them.


def _overwrite(tensors: list[Any], made: tuple[Any, ...]) -> None:
    """Overwrite the tensors of a call in place by its results; an empty result stands for no tensor."""
    for t, new in zip(tensors, made, strict=False):
        t.view_as(t).copy_(new)  # a view made now has t's history: tuned.launching.overwrite


def _learned_call(given: Given, others: tuple[Any, ...], *, inplace: bool) -> Any:
    x, key = given.x, given.key
    if not inplace:
        out, key_out = rope_learned(x, key, *others)
        return out if key is None else (out, key_out)
    tensors = [x] if key is None else [x, key]
    made = rope_learned(x.clone(), None if key is None else key.clone(), *others)  # its gradient needs the input
    _overwrite(tensors, made)
    return x if key is None else (x, key)


def _run_learned(x: Any, key: Any, *others: Any) -> Any:
    with torch.no_grad():
        out = eager.call_given(*_arguments(x, key, others))
        if key is None:
            return _like(out, x), x.new_empty(0)
        return _like(out[0], x), _like(out[1], key)


def _run_learned_backward(grad: Any, key_grad: Any, x: Any, key: Any, *others: Any) -> Any:
    with torch.no_grad():
        _refuse_tangents(grad, key_grad)
        given, settings = _arguments(x, key, others)
        made = learned.gradient(given, settings, grad, key_grad)
        return tuple(map(_as_fake, made, (x, key, *_angles_of(others)), (x,) * 4))


def _angles_of(others: tuple[Any, ...]) -> tuple[Any, Any]:
    """The tensor of angles, and sin."""
    freqs, cos, sin, *rest = others[:6]
    return next(t for t in (freqs, cos, *rest) if t is not None), sin


def _fake_learned_backward(_grad: Any, _key_grad: Any, x: Any, key: Any, *others: Any) -> Any:
    return tuple(
        x.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x, key, *_angles_of(others))
    )


def _setup_whole(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what was rotated too."""
    del output
    save(ctx, inputs)
    ctx.set_materialize_grads(False)


def _learned_backward(ctx: Any, grad: Any, key_grad: Any) -> tuple[Any, ...]:
    x, key, *others = saved(ctx)
    if grad is None and key_grad is None:
        return (None,) * (2 + len(others))
    grad = torch.zeros_like(x) if grad is None else grad
    made = rope_learned_backward(grad, None if key is None else key_grad, x, key, *others)
    of_angles = [None if t is None else made[3 if at == _SIN else 2] for at, t in enumerate(others[:_SOURCES])]
    return made[0], None if key is None else made[1], *of_angles, *(None,) * (len(others) - _SOURCES)


_SIN, _SOURCES = 2, 6  # of the tensors of angles in _TENSORS
rope_learned = define(
    "rope_learned",
    f"(Tensor q, Tensor? k, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _run_learned,
    lambda q, k, *_: (torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)),
    _learned_backward,
    _setup_whole,
)
rope_learned_backward = define(
    "rope_learned_backward",
    f"(Tensor grad, Tensor? key_grad, Tensor q, Tensor? k, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_learned_backward,
    _fake_learned_backward,
)


# MLA's key and value, or the gradients of kv and k_pe.


def _run_split(x: Any, key: Any, *others: Any) -> Any:
    with torch.no_grad():
        return eager.call_given(*_arguments(x, key, others))


def _fake_split(x: Any, key: Any, *others: Any) -> Any:
    _, settings = _arguments(x, key, others)
    heads = (1,) if settings.direction == "backward" else x.shape[-2:-1]
    rest = x.shape[-1] - settings.k_dim  # features of x that the first result does not keep
    return x.new_empty((*x.shape[:-1], settings.k_dim + key.shape[-1])), x.new_empty((*x.shape[:-2], *heads, rest))


def _setup_split(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _setup(ctx, inputs, output)
    ctx.set_materialize_grads(True)  # a result without a gradient counts as zeros


def _split_backward(ctx: Any, grad: Any, key_grad: Any) -> tuple[Any, ...]:
    *rest, direction = saved(ctx)
    turned = "backward" if direction == "forward" else "forward"
    return *mla_kv_rope(grad, key_grad, *rest, turned), *(None,) * (len(rest) + 1)


mla_kv_rope = define(
    "mla_kv_rope",
    f"(Tensor kv, Tensor k_pe, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _run_split,
    _fake_split,
    _split_backward,
    _setup_split,
)


# With a norm. An operator without a key returns an empty tensor for it.


def _norm_call(given: Given, others: tuple[Any, ...], *, inplace: bool) -> Any:
    x, key = given.x, given.key
    if not inplace:
        out, key_out = qk_norm_rope(x, key, given.weight, given.key_weight, *others)
        return out if key is None else (out, key_out)
    tensors = [x] if key is None else [x, key]
    if needs_gradient(given):  # the gradient needs the input
        copied = [t.clone() for t in tensors]
        made = qk_norm_rope(copied[0], None if key is None else copied[1], given.weight, given.key_weight, *others)
        _overwrite(tensors, made)
    else:
        qk_norm_rope_(x, key, given.weight, given.key_weight, *others)
    return x if key is None else (x, key)


def _norm_arguments(arguments: tuple[Any, ...], *, inplace: bool = False) -> tuple[Given, Settings]:
    x, key, weight, key_weight, *others = arguments
    _refuse_tangents(weight, key_weight)
    given, settings = _arguments(x, key, tuple(others), inplace=inplace)
    return given._replace(weight=weight, key_weight=key_weight), settings


def _run_norm(*arguments: Any) -> Any:
    with torch.no_grad():
        given, settings = _norm_arguments(arguments)
        out = eager.call_given(given, settings)
        if given.key is None:
            return _like(out, given.x), given.x.new_empty(0)
        return _like(out[0], given.x), _like(out[1], given.key)


def _run_norm_inplace(*arguments: Any) -> None:
    with torch.no_grad():
        eager.call_given(*_norm_arguments(arguments, inplace=True))


def _run_norm_backward(grad: Any, key_grad: Any, *arguments: Any) -> Any:
    with torch.no_grad():
        _refuse_tangents(grad, key_grad)
        given, settings = _norm_arguments(arguments)
        made = gradient(given, settings, grad, key_grad)
        return tuple(map(_as_fake, made, given[:2] + given[-2:], (given.x,) * 4))


def _as_fake(made: Any, of: Any, x: Any) -> Any:
    """A gradient with the strides that the fake implementation returns: contiguous; an empty tensor for None."""
    return x.new_empty(0) if of is None else torch.zeros_like(of) if made is None else made.contiguous()


def _fake_norm(q: Any, k: Any, *_: Any) -> Any:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


def _fake_norm_backward(_grad: Any, _key_grad: Any, q: Any, k: Any, weight: Any, key_weight: Any, *_: Any) -> Any:
    return tuple(
        q.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (q, k, weight, key_weight)
    )


def _norm_backward(ctx: Any, grad: Any, key_grad: Any) -> tuple[Any, ...]:
    arguments = saved(ctx)
    present = [t is not None for t in arguments[:4]]
    nothing = (None,) * (len(arguments) - 4)
    if grad is None and key_grad is None:
        return (None,) * 4 + nothing
    if grad is None:
        grad = torch.zeros_like(arguments[0])
    made = qk_norm_rope_backward(grad, key_grad if present[1] else None, *arguments)
    return *(t if there else None for t, there in zip(made, present, strict=True)), *nothing


_NORM_TENSORS = f"Tensor q_weight, Tensor? k_weight, {_TENSORS}, {_SETTINGS}{_OF_NORM}"
qk_norm_rope = define(
    "qk_norm_rope",
    f"(Tensor q, Tensor? k, {_NORM_TENSORS}) -> (Tensor, Tensor)",
    _run_norm,
    _fake_norm,
    _norm_backward,
    _setup_whole,
)
qk_norm_rope_backward = define(
    "qk_norm_rope_backward",
    f"(Tensor grad, Tensor? key_grad, Tensor q, Tensor? k, {_NORM_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_norm_backward,
    _fake_norm_backward,
)
_LIBRARY.define(f"qk_norm_rope_(Tensor(a!) q, Tensor(b!)? k, {_NORM_TENSORS}) -> ()")
qk_norm_rope_ = torch.ops.tuned.qk_norm_rope_
_implement("qk_norm_rope_", _run_norm_inplace)


# With a cache. ``rope_append_`` does not overwrite the key, ``rope_append_key_`` does.


def append(given: Given, cached: caching.Cached, asked: caching.Asked) -> Any:
    """Run the call as an operator."""
    starts = given.offset if isinstance(given.offset, torch.Tensor) else None
    named = asked.rotation._asdict()
    named.pop("inplace")
    others = (*given[2:10], starts, 0 if starts is not None else given.offset, *named.values(), asked.cache_layout)
    run = rope_append_key_ if asked.key_inplace else rope_append_
    run(given.x, given.key, *cached, given.weight, given.key_weight, *others)
    return given.x


def _run_append(key_inplace: bool, *arguments: Any) -> None:  # noqa: FBT001
    x, key, *rest = arguments
    cached, (weight, key_weight, *others, cache_layout) = caching.Cached(*rest[:6]), rest[6:]
    with torch.no_grad():
        given, settings = _arguments(x, key, tuple(others))
        given = given._replace(weight=weight, key_weight=key_weight)
        caching.call(
            *given[:1], given.key, *cached[:4], *given[2:], *cached[4:], tuple(settings), cache_layout, key_inplace
        )


def _appending(name: str, key: str) -> Any:
    _LIBRARY.define(
        f"{name}(Tensor(a!) q, {key} k, Tensor v, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slot_mapping, "
        f"Tensor? key_scale, Tensor? value_scale, Tensor? q_weight, Tensor? k_weight, {_TENSORS}, {_SETTINGS}{_OF_NORM}, "
        "str cache_layout) -> ()"
    )
    _implement(name, functools.partial(_run_append, key.endswith("!)")))
    return getattr(torch.ops.tuned, name)


rope_append_ = _appending("rope_append_", "Tensor")
rope_append_key_ = _appending("rope_append_key_", "Tensor(b!)")
