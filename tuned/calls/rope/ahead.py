"""What a rotation of a recorded problem launches, from its spec and size alone."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.rope import angles as learned
from tuned.calls.rope import append
from tuned.calls.rope.arguments import Given, Settings, prepare
from tuned.calls.rope.norm import gradient_call
from tuned.families.launch import Step
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import weight_features
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.lookup.lookup import Choice, Gpu, choose

CP_SIZE = 2  # ranks, of a call that is context parallel
SCALING = 1.25  # of a call that scales
OFFSET = 64  # of a call with an offset
EPS = 1e-6  # of a call with a norm
PAGE_SIZE = 16  # of a cache
# A problem does not tell the dtype of positions, and a kernel is compiled for each dtype. Serving libraries use these.
INDEX_DTYPES = (torch.int64, torch.int32)


def steps(spec: RopeSpec, size: RopeSize, gpu: Gpu) -> tuple[Choice, tuple[Step, ...]]:
    """The choice for a problem, and the steps of its calls with contiguous tensors, which are on the device "meta"."""
    choice = choose(ROPE, spec, size, gpu)
    if choice.variant is None:
        return choice, ()
    found: list[Step] = []
    for dtype in INDEX_DTYPES if spec.positions in ("offset", "starts", "ids", "axes") else INDEX_DTYPES[:1]:
        if spec.appends:
            asked = append.Asked(settings_of(spec), spec.cache_layout, spec.key_inplace)
            call = append.prepare(given_of(spec, size, dtype), cached_of(spec, size), asked).call
            found += ROPE.launches(spec, choice.variant, call)
            continue
        given, settings = given_of(spec, size, dtype), settings_of(spec)
        call = prepare(given, settings, make_out=torch.empty_like, angle_gradient=spec.angle_gradient).call
        if spec.angle_gradient:
            grads = (torch.empty_like(t) for t in (call.x, call.key) if t is not None)
            call = learned.gradient_call(spec, call, *grads)
        if spec.gradient_of_norm:
            grads = (torch.empty_like(t) for t in (call.x, call.key) if t is not None)
            call = gradient_call(spec, choice.variant, call, *grads)
        found += ROPE.launches(spec, choice.variant, call)
    return choice, tuple(found)


def given_of(spec: RopeSpec, size: RopeSize, index_dtype: torch.dtype) -> Given:
    """The tensors of a call that has the spec and the size."""
    tokens = {"bshd": (size.batch, size.seq), "sbhd": (size.seq, size.batch), "thd": (size.tokens,)}[spec.layout]

    def empty(*shape: int, dtype: torch.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype, angle_dtype = getattr(torch, spec.dtype), getattr(torch, spec.angle_dtype)
    entries = spec.rotary_dim if spec.angle_entries == "feature" else spec.rotary_dim // 2
    reach = size.tokens * CP_SIZE + OFFSET
    table = (*((size.batch,) if spec.angles_per_batch else ()), reach, entries)
    angles: dict[str, Any] = {
        "inv_freq": lambda: {"inv_freq": empty(entries, dtype=angle_dtype)},
        "freqs": lambda: {"freqs": empty(*table, dtype=angle_dtype)},
        "cos_sin": lambda: {name: empty(*table, dtype=angle_dtype) for name in ("cos", "sin")},
    }[spec.angles]()
    places: dict[str, Any] = {
        "order": dict,
        "shifted": lambda: {"offset": OFFSET},
        "offset": lambda: {"offset": empty(dtype=index_dtype)},
        "starts": lambda: {"offset": empty(size.batch, dtype=index_dtype)},
        "ids": lambda: {"positions": empty(*tokens, dtype=index_dtype)},
        "axes": lambda: {"positions": empty(len(spec.sections), *tokens, dtype=index_dtype)},
    }[spec.positions]()
    widths = weight_features(spec)
    key: Any = empty(*tokens, spec.key_heads, spec.head_dim, dtype=dtype) if spec.key_heads else None
    if spec.splits:
        one = (spec.heads, spec.value_dim) if spec.sums_heads else (1, spec.rotary_dim)
        key = empty(*tokens, *one, dtype=dtype)
    return Given(
        empty(*tokens, spec.heads, spec.split_dims[0] if spec.splits else spec.head_dim, dtype=dtype),
        key,
        cu_seqlens=empty(size.batch + 1, dtype=torch.int32) if spec.packed else None,
        weight=empty(widths[0], dtype=dtype) if spec.normed else None,
        key_weight=empty(widths[1], dtype=dtype) if spec.normed and spec.key_heads else None,
        **angles,
        **places,
    )


def cached_of(spec: RopeSpec, size: RopeSize) -> append.Cached:
    """The tensors besides those of a rotation of a call that writes a cache."""
    dtype = getattr(torch, spec.dtype)
    page = (PAGE_SIZE, spec.key_heads) if spec.cache_layout == "NHD" else (spec.key_heads, PAGE_SIZE)
    kind, pages = append.FLOAT8 if spec.cache == "float8" else dtype, -(-size.tokens // PAGE_SIZE)
    caches = [torch.empty(pages, *page, spec.head_dim, dtype=kind, device="meta") for _ in range(2)]
    scales = [torch.empty((), device="meta") if spec.cache == "float8" else None for _ in range(2)]
    value = torch.empty(size.tokens, spec.key_heads, spec.head_dim, dtype=dtype, device="meta")
    slots = torch.empty(size.tokens, dtype=torch.int64, device="meta")
    return append.Cached(value, caches[0], caches[1], slots, scales[0], scales[1])


def settings_of(spec: RopeSpec) -> Settings:
    """The arguments that are not tensors of a call that has the spec."""
    return Settings(
        tensor_format=spec.layout,
        interleaved=spec.interleaved,
        inplace=spec.inplace,
        rotary_dim=None if spec.splits else spec.rotary_dim,
        angle_entries=spec.angle_entries,
        attention_scaling=SCALING if spec.scaled else 1.0,
        cp_size=CP_SIZE if spec.context_parallel else 1,
        cp_rank=CP_SIZE - 1 if spec.context_parallel else 0,
        rotated="first" if spec.splits else spec.rotated,
        conjugate=spec.conjugate,
        sections=spec.sections or None,
        interleaved_sections=spec.sections_interleaved,
        kv_heads=spec.copied_heads or None,
        deinterleave=spec.deinterleaves,
        k_dim=spec.kept_dim if spec.splits else 0,
        direction="forward" if spec.gradient_of_norm else spec.direction,
        norm=spec.norm,
        eps=EPS if spec.normed else 0.0,
        zero_centered=spec.zero_centered,
        rounding=spec.rounding,
    )
