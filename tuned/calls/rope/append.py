"""The path of a rotation whose key and value go to a paged cache: checks, plans, and the call by PyTorch's operators.

As in ``tuned.calls.rope.call``: a call whose properties were seen before costs building one key, one lookup and the launch.
No gradient is computed. Lengths are part of the properties, so a call of a new length is checked in full.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tuned.calls.overlap import check_strides, refuse_overlap
from tuned.calls.refusal import check_dense
from tuned.calls.rope import plan as plans
from tuned.calls.rope.arguments import (
    INDICES,
    SUPPORTED,
    Given,
    Prepared,
    Settings,
    Sources,
    offset_limits,
    offset_of,
    strides_of,
)
from tuned.calls.rope.arguments import prepare as prepare_rotation
from tuned.calls.rope.call import EMPTY
from tuned.families.architecture import FLOAT8_CAPABILITY
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.eager import append, as_cached, put
from tuned.families.rope.launches import RopeCall, launches
from tuned.families.rope.spec import CACHE_LAYOUTS, RopeSpec
from tuned.launching import alike
from tuned.launching.overwrite import bump_all, refuse_inference
from tuned.launching.plan import (
    NO_KEY,
    current_device,
    direct_launch,
    listeners,
    may_be_negative,
    remember,
    tracing,
    traits,
    transforms_active,
)
from tuned.launching.rehearsal import NotedError, note_left
from tuned.lookup import misses
from tuned.lookup.gpu import LAZY, gpu_of, why_not_plain
from tuned.lookup.lookup import Choice

FLOAT8 = torch.float8_e4m3fn


@dataclasses.dataclass(slots=True, eq=False)
class Kept:
    """What calls of one set of properties do."""

    slow: Callable[..., Any]  # (given, cached, asked, prepared or None): serves any such call
    # (tensors as TENSORS, addresses of those given, offset): launches directly; False if it did nothing, ``slow`` must.
    fast: Callable[[tuple[Any, ...], tuple[int, ...], int], bool] | None = None


_PLANS: dict[Any, Any] = {}  # a call's properties -> Kept; and what ``alike.learn`` keeps of calls
_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


# The tensors of a call; first those that every call has. ``places``: the positions, or the offset if that is a tensor.
TENSORS = (
    "q", "k", "v", "key_cache", "value_cache", "slot_mapping", "angles", "places", "sin", "cu_seqlens", "weight", "key_weight",
    "key_scale", "value_scale",
)  # fmt: skip


class Cached(NamedTuple):
    """The tensors of a call besides those of a rotation."""

    value: Any
    key_cache: Any
    value_cache: Any
    slot_mapping: Any
    key_scale: Any = None
    value_scale: Any = None


class Asked(NamedTuple):
    """The arguments of a call that are not tensors."""

    rotation: Settings
    cache_layout: str = "NHD"
    key_inplace: bool = False


def call(  # noqa: PLR0912, PLR0913 - function calls would cost time; the tensors of the public call
    q: Any,
    k: Any,
    v: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
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
    key_scale: Any,
    value_scale: Any,
    settings: tuple[Any, ...],
    cache_layout: Any,
    key_inplace: Any,
) -> Any:
    """Rotate q in place, and write the rotated k and v to the caches; ``settings`` are the fields of Settings in order.

    See tuned.dispatch.rope_append_. Returns q.
    """
    if type(offset) is not int:
        offset = offset_of(offset, positions)
    if _compiling() or listeners():
        return _operator(
            *_gathered(
                q, k, v, key_cache, value_cache, slot_mapping, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis,
                cu_seqlens, positions, offset, weight, key_weight, key_scale, value_scale, settings, cache_layout,
                key_inplace,
            )
        )  # fmt: skip
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
    places, int_offset = positions, offset
    if positions is None and type(offset) is not int:  # a tensor
        places, int_offset = offset, 0
    tensors = (
        q, k, v, key_cache, value_cache, slot_mapping, angles, places, sin, cu_seqlens, weight, key_weight, key_scale,
        value_scale,
    )  # fmt: skip
    near = found = None
    # The ``try`` contains no launch: an error of a launch must not lead to a second launch.
    try:
        device = q.get_device()
        near = (
            q.shape, settings, cache_layout, key_inplace, source, positions is None, int_offset == 0, _grad_enabled(),
            # The current device only if q is on a GPU: asking for it initialises CUDA.
            forward_ad._current_level, device if device < 0 else current_device(),  # noqa: SLF001
        )  # fmt: skip
        for are_alike, launch in _PLANS.get(near, ()):
            if addresses := are_alike(*tensors):
                found = launch
                break
    except NO_KEY:
        near = None
    if found is not None and found(tensors, addresses, int_offset):
        return q
    kept, properties = _kept(near, tensors)
    if found is None and kept is not None and kept.fast is not None:
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        if kept.fast(tensors, addresses, int_offset):
            alike.learn(_PLANS, near, tensors, kept.fast)
            return q
    given, cached, asked = _gathered(
        q, k, v, key_cache, value_cache, slot_mapping, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens,
        positions, offset, weight, key_weight, key_scale, value_scale, settings, cache_layout, key_inplace,
    )  # fmt: skip
    prepared = None
    if kept is None:
        kept, prepared = _decide(given, cached, asked)
        # The properties do not tell whether torch.func or torch.jit is active, and that may have decided the plan.
        if properties is not None and not transforms_active() and tracing() is None:
            remember(_PLANS, properties, kept)
    try:
        return kept.slow(given, cached, asked, prepared)
    except NotedError:  # the launch was noted instead of made, or its kernel does not compile
        return run_eager(given, cached, asked)


def _gathered(*arguments: Any) -> tuple[Given, Cached, Asked]:
    """The arguments of ``call``, sorted."""
    q, k, *cache, settings, cache_layout, key_inplace = arguments
    given = Given(q, k, *cache[4:-2])
    return given, Cached(*cache[:4], *cache[-2:]), Asked(Settings(*settings), cache_layout, key_inplace)


def _kept(near: Any, tensors: tuple[Any, ...]) -> tuple[Kept | None, Any]:
    """What calls of these properties do, or None if that is not known; and the properties, or None if the call has none."""
    if near is None:
        return None, None
    try:
        # All that a compiled kernel, or the path to it, may depend on.
        properties = (
            *(t if t is None else traits(t) for t in tensors),
            *near,
            _grad_enabled() and _needs_gradient(*tensors),
        )
        return _PLANS.get(properties), properties
    except NO_KEY:
        return None, None


def _needs_gradient(*tensors: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


# Checks -------------------------------------------------------------------------------------------------------------


def prepare(given: Given, cached: Cached, asked: Asked) -> Prepared:
    """Check a call.

    Raises:
        TypeError: an argument has the wrong type, or a tensor the wrong dtype.
        ValueError: a shape, device or combination is not allowed.
        RuntimeError: a gradient would be lost. Nothing has been written.
    """
    _check_words(asked)
    _check_types(given.x, given.key, cached)
    _refuse_gradients(given, cached)
    settings = asked.rotation._replace(tensor_format="thd", inplace=False)
    # Checked as a call out of place, which has no checks of what is overwritten: ``_check_overwritten`` makes those.
    prepared = prepare_rotation(given, settings, make_out=lambda t: t)
    cache = _check_cache(given.x, given.key, cached)
    _check_overwritten(given, cached, asked)
    spec, eager_spec = (
        None if one is None else _with_cache(one, cache, asked) for one in (prepared.spec, prepared.eager_spec)
    )
    steps = {given.x.stride(-1), given.key.stride(-1), cached.value.stride(-1)}
    if len(steps) > 1 or cached.key_cache.stride(-1) != cached.value_cache.stride(-1):
        spec = None
    caches = _pages(given.key, cached, asked.cache_layout)
    scales = cached.key_scale, cached.value_scale
    made = dataclasses.replace(
        prepared.call,
        value=cached.value,
        value_strides=strides_of("thd", cached.value),
        key_cache=caches[0],
        value_cache=caches[1],
        slots=cached.slot_mapping,
        slot_count=cached.slot_mapping.shape[0],
        slot_stride=cached.slot_mapping.stride(0),
        pages=caches[0].shape[0],
        page_size=caches[0].shape[1],
        key_cache_strides=_steps_of(caches[0]),
        value_cache_strides=_steps_of(caches[1]),
        key_scale=scales[0],
        value_scale=scales[1],
        scale_strides=(_step_of(scales[0]), _step_of(scales[1])),
    )
    return Prepared(spec, prepared.size, made, eager_spec)  # type: ignore[arg-type]


def _pages(key: torch.Tensor, cached: Cached, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches as [pages, page_size, heads, head_dim]."""
    caches = [t if layout == "NHD" else t.transpose(1, 2) for t in (cached.key_cache, cached.value_cache)]
    if caches[0].shape[2:] != key.shape[1:] or caches[0].shape != caches[1].shape:
        axes = "[pages, page_size, heads, head_dim]" if layout == "NHD" else "[pages, heads, page_size, head_dim]"
        raise ValueError(
            f"key_cache and value_cache must both be {axes} for cache_layout {layout!r}, with the {key.shape[1]} heads and the "
            f"head_dim of k, {key.shape[2]}; got {list(cached.key_cache.shape)} and {list(cached.value_cache.shape)}: pass views "
            "that have these axes, or the other cache_layout"
        )
    return caches[0], caches[1]


def _steps_of(cache: torch.Tensor) -> tuple[int, int, int, int]:
    page, slot, head, feature = cache.stride()
    return page, slot, head, feature


def _step_of(scale: Any) -> int:
    """Elements from the scale of a head to that of the next; 0 if all share one."""
    return scale.stride(0) if scale is not None and scale.numel() > 1 else 0


def _with_cache(spec: RopeSpec, cache: str, asked: Asked) -> RopeSpec:
    """The spec of a call with a cache, from that of a rotation out of place; q is rotated in place."""
    backward = spec.direction == "backward"  # how a rotation out of place expresses conjugate
    return dataclasses.replace(
        spec,
        inplace=True,
        direction="forward",
        conjugate=spec.conjugate or backward,
        cache=cache,
        cache_layout=asked.cache_layout,
        key_inplace=bool(asked.key_inplace),
    )


def _check_types(q: Any, key: Any, cached: Cached) -> None:
    names = {"q": q, "k": key, **cached._asdict()}
    for name, t in names.items():
        if not isinstance(t, torch.Tensor) and not (t is None and name in ("key_scale", "value_scale")):
            hint = "a call without a key is one of rope" if name == "k" else "convert it with torch.as_tensor(...)"
            told = "v" if name == "value" else name
            raise TypeError(f"{told} must be a tensor, got {type(t).__name__}: {hint}")
    check_dense(names)


def _check_words(asked: Asked) -> None:
    if asked.cache_layout not in CACHE_LAYOUTS:
        raise ValueError(
            f'cache_layout must be "NHD" (pages of [page_size, heads, head_dim]) or "HND", got {asked.cache_layout!r}: name the axes of '
            "a page"
        )
    if not isinstance(asked.key_inplace, bool):
        raise TypeError(f"key_inplace must be a bool, got {asked.key_inplace!r}: pass True or False")
    if asked.rotation.norm == "all":
        raise ValueError(
            "norm must be \"head\" beside a cache, got 'all': normalise and rotate by qk_norm_rope, and write the cache by "
            "tuned.compat.vllm.reshape_and_cache_flash"
        )


def _refuse_gradients(given: Given, cached: Cached) -> None:
    """Refuse tensors that need a gradient: no gradient comes back from a cache."""
    if not torch.is_grad_enabled() or not _needs_gradient(*given, *cached):
        return
    named = {"q": given.x, "k": given.key, "v": cached.value, "q_weight": given.weight, "k_weight": given.key_weight}
    named |= {**given._asdict(), **cached._asdict()}
    got = next(n for n, t in named.items() if isinstance(t, torch.Tensor) and t.requires_grad)
    raise RuntimeError(
        f"what writes a cache, as rope_append_, has no gradient, got {got} that requires one: call it under torch.no_grad() or torch.inference_mode(), or "
        "train with rope_qk"
    )


def _check_cache(q: torch.Tensor, key: torch.Tensor, cached: Cached) -> str:
    """Check what is written and where; returns ``RopeSpec.cache``."""
    value, slots = cached.value, cached.slot_mapping
    if value.shape != key.shape or value.dtype != key.dtype or value.device != key.device:
        raise ValueError(
            f"v must be as k, {list(key.shape)} {key.dtype} on {key.device}, got {list(value.shape)} {value.dtype} on {value.device}: "
            "values of another head_dim need a cache of their own, which is written by PyTorch's index_copy_"
        )
    if slots.dtype not in INDICES:
        raise TypeError(f"slot_mapping must be int32 or int64, got {slots.dtype}: convert with .to(torch.int64)")
    if slots.ndim != 1 or slots.shape[0] > q.shape[0] or slots.device != q.device:
        raise ValueError(
            f"slot_mapping must be a place for each of the first tokens, [{q.shape[0]}] or shorter, on {q.device}; got "
            f"{list(slots.shape)} on {slots.device}: pass as many as tokens are to be kept, page * page_size + slot each"
        )
    for name, cache in (("key_cache", cached.key_cache), ("value_cache", cached.value_cache)):
        if cache.ndim != 4 or cache.device != q.device:  # noqa: PLR2004
            raise ValueError(
                f"{name} must have 4 axes, of which the first are pages, on the device of q, {q.device}; got {list(cache.shape)} on "
                f"{cache.device}: pass cache[:, 0] and cache[:, 1] of a tensor with both, or cache[None] of a single page"
            )
        if cache.dtype not in (key.dtype, FLOAT8) or cache.dtype != cached.key_cache.dtype:
            raise TypeError(
                f"{name} must be {key.dtype}, as k is, or {FLOAT8}, and as key_cache is; got {cache.dtype}: view bytes as "
                "cache.view(torch.float8_e4m3fn)"
            )
    float8 = cached.key_cache.dtype == FLOAT8
    if (cached.key_scale is None) != (cached.value_scale is None) or (cached.key_scale is not None and not float8):
        got = [n for n in ("key_scale", "value_scale") if getattr(cached, n) is not None]
        raise ValueError(
            f"key_scale and value_scale must come together, with caches of {FLOAT8}, got {' and '.join(got)} with "
            f"{cached.key_cache.dtype}: give both, or leave both out"
        )
    for name, scale in (("key_scale", cached.key_scale), ("value_scale", cached.value_scale)):
        if scale is None:
            continue
        if scale.dtype != torch.float32 or scale.device != q.device:
            raise TypeError(
                f"{name} must be float32 on the device of q, {q.device}, got {scale.dtype} on {scale.device}: convert with "
                ".to(q.device, torch.float32)"
            )
        if scale.ndim > 1 or scale.numel() not in (1, key.shape[1]):
            raise ValueError(
                f"{name} must be one number, or one for each of the {key.shape[1]} heads of k, got {list(scale.shape)}: pass [1] or "
                f"[{key.shape[1]}]"
            )
    return "float8" if float8 else "same"


def _check_overwritten(given: Given, cached: Cached, asked: Asked) -> None:
    """Refuse what would be written twice, or read after it was written."""
    written = {"q": given.x, "key_cache": cached.key_cache, "value_cache": cached.value_cache}
    written |= {"k": given.key} if asked.key_inplace else {}
    for name, t in written.items():
        check_strides(name, t, "pass a contiguous copy of it")
    pairs = [("q", "k"), ("q", "v"), ("key_cache", "value_cache"), *([("k", "v")] if asked.key_inplace else [])]
    named = {**written, "k": given.key, "v": cached.value}
    for one, other in pairs:
        _refuse_shared(one, named[one], other, named[other])


def _refuse_shared(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    try:
        refuse_overlap(t, other)
    except ValueError:
        raise ValueError(
            f"{name} is overwritten, and must not share memory with {other_name}, got tensors that do: pass a clone of {other_name}"
        ) from None


# What a call does ---------------------------------------------------------------------------------------------------


def run_eager(given: Given, cached: Cached, asked: Asked, prepared: Prepared | None = None) -> Any:
    """The call by PyTorch's operators."""
    prepared = prepared or prepare(given, cached, asked)
    refuse_inference(given.x, cached.key_cache, cached.value_cache, given.key if asked.key_inplace else None)
    append(prepared.eager_spec, prepared.call)
    return given.x


def _run_left(why: str, given: Given, cached: Cached, asked: Asked, prepared: Prepared | None) -> Any:
    """The call by PyTorch's operators; it is noted if this thread listens (``tuned.launching.rehearsal``)."""
    note_left("rope", given.x, why)
    return run_eager(given, cached, asked, prepared)


def chosen(prepared: Prepared, given: Given, cached: Cached) -> Choice:
    """Which variant a call gets, or why it runs in eager PyTorch."""
    tensors = [t for t in (*given, *cached) if isinstance(t, torch.Tensor)]
    bypassed = next(filter(None, map(why_not_plain, tensors)), None)
    if tracing() is not None or transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        bypassed = "a kernel would bypass torch.func, forward-mode differentiation or torch.jit tracing"
    if prepared.spec is None and given.x.dtype in SUPPORTED:
        bypassed = "q, k and v, or both caches, have different strides of head_dim, and kernels take one for all"
        return Choice("eager", bypassed, None)
    if any(not t.numel() for t in tensors):
        bypassed = bypassed or EMPTY
    choice = plans.choice_of(prepared, bypassed)
    if choice.variant is None or prepared.spec is None or prepared.spec.cache != "float8":
        return choice
    capability = gpu_of(given.x.device).capability
    if capability >= FLOAT8_CAPABILITY:
        return choice
    return Choice("eager", f"casts to float8 e4m3 need compute capability 8.9, not {capability / 10}", None)


def explain(given: Given, cached: Cached, asked: Asked) -> tuple[Choice, Any]:
    """The choice for a call, and its spec; nothing is launched."""
    prepared = prepare(given, cached, asked)
    choice = chosen(prepared, given, cached)
    if choice.variant is not None and _is_lazy(given, cached):
        choice = Choice("eager", LAZY, None)
    return choice, prepared.spec


def _decide(given: Given, cached: Cached, asked: Asked) -> tuple[Kept, Prepared]:
    """Check a call and choose what calls with its properties do. Returns the prepared call too. Nothing is written."""
    prepared = prepare(given, cached, asked)
    choice = chosen(prepared, given, cached)
    if choice.variant is None or prepared.spec is None:
        return Kept(functools.partial(_run_left, choice.why)), prepared
    misses.note(ROPE, prepared.spec, prepared.size, choice)
    return _kernel(prepared, choice.variant, given, cached, asked), prepared


def _is_lazy(given: Given, cached: Cached) -> bool:
    """Whether a tensor is negated or conjugated lazily: kernels read memory as it is."""
    return any(isinstance(t, torch.Tensor) and (t.is_neg() or t.is_conj()) for t in (*given, *cached))


def _tensors(given: Given, cached: Cached) -> tuple[Any, ...]:
    """The tensors of a call, in the order of TENSORS."""
    places = given.positions if given.positions is not None or type(given.offset) is int else given.offset
    return (
        given.x, given.key, *cached[:4], getattr(given, Sources.of(given).angles), places, given.sin, given.cu_seqlens,
        given.weight, given.key_weight, cached.key_scale, cached.value_scale,
    )  # fmt: skip


def _ready(spec: RopeSpec, variant: Any, call: RopeCall) -> plans.Ready:
    return plans.Ready(spec, call, *launches(spec, variant, call))


def _kernel(prepared: Prepared, variant: Any, first: Given, first_cached: Cached, asked: Asked) -> Kept:
    """What calls with the properties of this one do: a public launch first, direct launches from the second call on."""
    spec = prepared.spec
    assert spec is not None
    # If the strides allow a tensor that is negated or conjugated lazily, each call checks for one.
    scales = [t for t in (first_cached.key_scale, first_cached.value_scale) if t is not None]
    scalars = any(
        t.numel() == 1 for t in scales
    )  # strides tell nothing of a single number: the direct launch checks these too
    tensors = [
        t for t in (*first, *first_cached[:-2], *(t for t in scales if t.numel() > 1)) if isinstance(t, torch.Tensor)
    ]
    asks = first.freqs_cis is not None or any(t.is_floating_point() and may_be_negative(t) for t in tensors)
    direct = not Sources.of(first).copied and not asks

    def slow(given: Given, cached: Cached, asked: Asked, prepared: Prepared | None) -> Any:
        if (asks or scalars) and _is_lazy(given, cached):
            return _run_left(LAZY, given, cached, asked, prepared)
        now = _ready(spec, variant, (prepared or prepare(given, cached, asked)).call)
        compiled = plans.run_public(now)
        bump_all((given.x, cached.key_cache, cached.value_cache, *((given.key,) if asked.key_inplace else ())))
        # The direct launcher cannot be probed during CUDA graph capture: the next call decides how later ones launch.
        if not plans.capturing():
            plans.keep_kernel(variant, now, compiled)
            if direct and kept.fast is None and plans.as_given(given, now.call):
                kept.fast = _fast(now, compiled, asked, _tensors(given, cached), scalars=scalars)
        return given.x

    kept, now = Kept(slow), _ready(spec, variant, prepared.call)
    compiled = plans.known_kernel(variant, now)
    if compiled is not None and direct and plans.as_given(first, now.call) and not plans.capturing():
        kept.fast = _fast(now, compiled, asked, _tensors(first, first_cached), scalars=scalars)
    return kept


def _fast(
    now: plans.Ready, compiled: Any, asked: Asked, tensors: tuple[Any, ...], *, scalars: bool
) -> Callable[..., bool] | None:
    """The function that launches the kernel directly; None if Triton's public launcher must. ``tensors``: as TENSORS."""
    spec, call, part = now
    device = call.x.device.index
    found = direct_launch(part, compiled, device)
    if found is None:
        return None
    run, function, head, programs, (_, *numbers), stream_of, enter, leave = found
    rest, (low, high) = tuple(numbers), offset_limits(spec, asked.rotation, call.angle_rows, call.seq)
    key_inplace, sines = asked.key_inplace, 0 if spec.computes_sincos else call.sin.data_ptr() - call.cos.data_ptr()
    key_at, key_near, key_far = plans.beside(call.x, call.key)
    value_at, value_near, value_far = plans.beside(call.x, call.value)
    cache_at, cache_near, cache_far = plans.beside(call.key_cache, call.value_cache)

    # ``at``: the index of each given tensor's address. ``before`` and ``after`` order the addresses as the kernel's
    # signature does, with the address of the angles for a tensor that is not given.
    named = dict(zip(TENSORS, itertools.accumulate(t is not None for t in tensors), strict=True))
    at = {name: named[name] - 1 for name, t in zip(TENSORS, tensors, strict=True) if t is not None}
    angles = at["angles"]
    cosines = (at["q"], angles, at["sin"]) if "sin" in at else (at["q"], angles)
    weights = (at["weight"], at["key_weight"]) if spec.normed else ()
    written = (at["v"], at["key_cache"], at["value_cache"], at["slot_mapping"])
    others = (at.get("cu_seqlens", angles), at["k"], at.get("places", angles), *weights, *written)
    before = operator.itemgetter(*cosines)
    after = operator.itemgetter(*others, at.get("key_scale", angles), at.get("value_scale", angles))
    joint = not spec.computes_sincos and "sin" not in at  # sines are in the tensor of the cosines
    scaled = scalars and "key_scale" in at

    def fast(tensors: tuple[Any, ...], addresses: tuple[int, ...], offset: int) -> bool:
        q_ptr, k_ptr, v_ptr, key_ptr, value_ptr, *_ = addresses
        to_key, to_value, to_cache = k_ptr - q_ptr, v_ptr - q_ptr, value_ptr - key_ptr
        if (
            enter.calls  # a profiler has hooks: only the public launcher calls them
            or leave.calls
            or not low <= offset <= high
            # Tensors may overlap: the checks of ``slow`` tell.
            or (to_key != key_at and (key_near < to_key < key_far or key_inplace))
            or (to_value != value_at and (value_near < to_value < value_far or key_inplace))
            or (to_cache != cache_at and cache_near < to_cache < cache_far)
            or (scaled and (tensors[-2].is_neg() or tensors[-1].is_neg()))
        ):
            return False
        sine = (addresses[angles] + sines,) if joint else ()
        run(
            programs, 1, 1, stream_of(device), function, *head, *before(addresses), *sine, *after(addresses), offset, *rest,
        )  # fmt: skip
        q, k, _, key_cache, value_cache, *_ = tensors
        bump_all((q, key_cache, value_cache, k) if key_inplace else (q, key_cache, value_cache))
        return True

    return fast


def _operator(given: Given, cached: Cached, asked: Asked) -> Any:
    """The call under torch.compile or a dispatch mode: as an operator of torch.library."""
    from tuned.calls.rope import ops  # noqa: PLC0415 - registering operators takes 10 ms, and only this path needs them

    if transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        return run_eager(given, cached, asked)
    _check_words(asked)
    _refuse_gradients(given, cached)
    return ops.append(given, cached, asked)


# Without a rotation -------------------------------------------------------------------------------------------------


def write(key: Any, cached: Cached, cache_layout: str = "NHD") -> None:
    """Write a key and a value to the pages of a cache as they are, by PyTorch's operators; nothing waits for the GPU.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``call``; nothing has been written.
    """
    _check_words(Asked(Settings(), cache_layout))
    _check_types(key, key, cached)
    _refuse_gradients(Given(None, key), cached)
    if key.ndim != 3:  # noqa: PLR2004
        raise ValueError(
            f"k must be [tokens, heads, head_dim], got {list(key.shape)}: reshape it, as k.view(tokens, heads, -1)"
        )
    _check_cache(key, key, cached)
    caches = _pages(key, cached, cache_layout)
    for name, t in (("key_cache", caches[0]), ("value_cache", caches[1])):
        check_strides(name, t, "pass a contiguous copy of it")
    _refuse_shared("key_cache", caches[0], "value_cache", caches[1])
    slots = cached.slot_mapping.long()
    rows = (key, cached.key_scale), (cached.value, cached.value_scale)
    made = [as_cached(t, caches[0].dtype, scale) for t, scale in rows]
    for cache, part in zip(caches, made, strict=True):
        put(cache, part, slots)
