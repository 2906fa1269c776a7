"""The rotation as tuning checks and times it: inputs, the float64 reference, the baseline, bytes, work."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from tuned.calls.rope.arguments import strides_of
from tuned.families.launch import ceil_div
from tuned.families.rope.eager import LARGEST_FLOAT8, angle_gradient, append, norm_gradient, positions, rotate
from tuned.families.rope.launches import RopeCall, flat_rows, token_angles, weight_features
from tuned.families.rope.spec import ITEM_SIZE, ROUNDINGS, RopeSize, RopeSpec
from tuned.families.rope.variant import (
    MULTIPROCESSORS,
    RESIDENT,
    RopeVariant,
    half_block,
    half_row,
    programs,
    rows_at_once,
)

from ...problem import Problem
from ..amounts import SMALLEST, UNIT_ROUNDOFF, Work

THETA = 500_000.0  # base of Llama 3's rotary frequencies: spreads angles from 1e-5 to 1 radian a position
CP_SIZE = 2  # ranks of context-parallel calls
SCALING = 1.25  # of calls with a scaling: about YaRN's at 16 times the length
EPS = 1e-6  # of a norm, as in most models
# Roundings of float32 in a norm, at most: half of those of a sum of squares (a thread's 32, then a tree), the root, two products.
NORM_UNITS = 24
GRID = 32  # patches along a side of a frame, for positions with axes
PAGE_SIZE, SPARE_PAGES = 16, 3  # slots of a cache page; pages of a cache that no token needs
SKIPPED = 16  # with a cache, the last of each group of so many tokens has no slot in it
SCALES = 0.05, 0.04  # of a float8 cache's keys and values: they use most of its range, and nothing is saturated
TABLE_ROWS = 4096  # drawn ids are below this: more rows than the L1 holds, and few bytes beside those of large problems


def _tokens(spec: RopeSpec, size: RopeSize) -> tuple[int, ...]:
    return {"bshd": (size.batch, size.seq), "sbhd": (size.seq, size.batch), "thd": (size.tokens,)}[spec.layout]


def _packs_qkv(spec: RopeSpec) -> bool:
    """Whether query and key are parts of a qkv tensor that is packed token by token, as in a server; its v is not written."""
    return spec.appends or (spec.inplace and spec.positions == "ids" and spec.key_heads > 0)


def _shape(spec: RopeSpec, size: RopeSize) -> tuple[int, ...]:
    """The shape of x, which may also hold the key and v: packed by token, or as rows of the query and then rows of the key.

    For MLA x has one dimension: all of kv, then all of k_pe; or all gradients of their results.
    """
    if spec.splits:
        return (sum(_split_numbers(spec, size.tokens)[0]),)
    if spec.appends:
        cached = 2 * math.prod(_pages(spec, size))
        cached //= ITEM_SIZE[spec.dtype] if spec.cache == "float8" else 1
        return (size.tokens * spec.all_heads * spec.head_dim + cached,)
    if _packs_qkv(spec):
        return (*_tokens(spec, size), spec.heads + 2 * spec.key_heads, spec.head_dim)
    leading = (size.tokens * spec.all_heads,) if spec.key_heads else (*_tokens(spec, size), spec.heads)
    return (*leading, spec.head_dim)


def _split_numbers(spec: RopeSpec, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """For MLA: elements that a call reads (kv, k_pe) and writes (key, value); or those of their gradients."""
    kv = tokens * spec.heads * (spec.kept_dim + spec.value_dim), tokens * spec.rotary_dim
    made = tokens * spec.heads * spec.head_dim, tokens * spec.heads * spec.value_dim
    return (made, kv) if spec.sums_heads else (kv, made)


def _split_parts(spec: RopeSpec, call: RopeCall) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For MLA: views of kv and k_pe in x, and of key and value in out, with the layout's axes; or of their gradients."""
    tokens = _axes(spec, call)
    kv = [(spec.heads, spec.kept_dim + spec.value_dim), (1, spec.rotary_dim)]
    made = [(spec.heads, spec.head_dim), (spec.heads, spec.value_dim)]
    found = []
    for flat, shapes in zip((call.x, call.out), (made, kv) if spec.sums_heads else (kv, made), strict=True):
        counts = [math.prod((*tokens, *shape)) for shape in shapes]
        found.append([t.view(*tokens, *shape) for t, shape in zip(flat.split(counts), shapes, strict=True)])
    return found[0], found[1]


def _axes(spec: RopeSpec, call: RopeCall) -> tuple[int, ...]:
    return {"bshd": (call.batch, call.seq), "sbhd": (call.seq, call.batch), "thd": (call.seq,)}[spec.layout]


def _pages(spec: RopeSpec, size: RopeSize) -> tuple[int, int, int, int]:
    """The shape of each cache: pages, slots of a page, heads, features."""
    return -(-size.tokens // PAGE_SIZE) + SPARE_PAGES, PAGE_SIZE, spec.key_heads, spec.head_dim


def _strides(spec: RopeSpec, size: RopeSize, heads: int, head_dim: int = 0) -> tuple[int, int, int, int]:
    """Strides of a contiguous tensor with that many heads, as RopeCall has them."""
    return strides_of(spec.layout, torch.empty((*_tokens(spec, size), heads, head_dim or spec.head_dim), device="meta"))


def _split_strides(spec: RopeSpec, size: RopeSize) -> dict[str, Any]:
    """For MLA: the strides of the tensors read and written; the head stride of k_pe is 0, since all heads share it."""
    wide, narrow = _strides(spec, size, spec.heads), _strides(spec, size, spec.heads, spec.value_dim)
    kv, (s, b, _, d) = (
        _strides(spec, size, spec.heads, spec.kept_dim + spec.value_dim),
        _strides(spec, size, 1, spec.rotary_dim),
    )
    shared = (s, b, 0, d)
    one, two = ("out", "x") if spec.sums_heads else ("x", "out")
    other, third = ("key_out", "key") if spec.sums_heads else ("key", "key_out")
    return {f"{one}_strides": kv, f"{two}_strides": wide, f"{other}_strides": shared, f"{third}_strides": narrow}


def _table_rows(spec: RopeSpec, size: RopeSize) -> int:
    """Rows of the angle table: all positions that the call reaches."""
    reach = size.seq * (CP_SIZE if spec.context_parallel else 1)
    drawn = max(TABLE_ROWS, size.tokens)
    return {"ids": drawn, "axes": drawn, "order": reach}.get(spec.positions, reach + TABLE_ROWS)


def _table(spec: RopeSpec, size: RopeSize, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A model's angles, of the spec's kind and width: (angles, None) or (cos, sin)."""
    pairs = spec.rotary_dim // 2
    dtype = getattr(torch, spec.angle_dtype)
    if device == "meta":  # arithmetic on "meta" imports 900 modules, which costs each compiler process 2 s
        rows = 1 if spec.angles == "inv_freq" else _table_rows(spec, size)
        batch = (size.batch,) if spec.angles_per_batch else ()
        table = torch.empty(
            (*batch, rows, pairs * (2 if spec.angle_entries == "feature" else 1)), dtype=dtype, device=device
        )
        return table, None if spec.computes_sincos else table.new_empty(table.shape)
    rates = THETA ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
    angles = torch.arange(_table_rows(spec, size), device=device, dtype=torch.float64)[:, None] * rates
    if spec.angles == "inv_freq":
        angles = rates[None]
    if spec.angle_entries == "feature":
        angles = torch.cat((angles, angles), -1) if not spec.interleaved else angles.repeat_interleave(2, -1)
    if spec.angles_per_batch:
        angles = angles.expand(size.batch, *angles.shape).contiguous()
    return (angles.to(dtype), None) if spec.computes_sincos else (angles.cos().to(dtype), angles.sin().to(dtype))


def _places(spec: RopeSpec, size: RopeSize, device: str, generator: torch.Generator | None) -> torch.Tensor | None:
    """The tensor of positions that the spec asks for, or None: many ids are in order, few are drawn."""
    if spec.positions in ("order", "shifted"):
        return None
    if spec.positions == "axes":
        return _grid(spec, size, device, generator)
    count = {"ids": size.tokens, "starts": size.batch, "offset": 1}[spec.positions]
    if spec.positions == "ids" and size.tokens >= TABLE_ROWS and device != "meta":
        places = torch.arange(count, device=device)
    else:
        places = torch.zeros(count, dtype=torch.int64, device=device)
        if generator is not None:
            places.random_(0, TABLE_ROWS, generator=generator)
    if spec.positions == "ids" and spec.layout != "thd":
        return places.view(_tokens(spec, size))
    return places if spec.positions != "offset" else places[0]


def _grid(spec: RopeSpec, size: RopeSize, device: str, generator: torch.Generator | None) -> torch.Tensor:
    """Positions with axes, int64 [axes, tokens]: for many tokens frames and patches in order, for few drawn."""
    axes, shape = len(spec.sections), _tokens(spec, size)
    if size.tokens >= TABLE_ROWS and device != "meta":
        token = torch.arange(size.tokens, device=device).view(shape)
        return torch.stack([token // GRID**2, token // GRID % GRID, token % GRID, token % GRID][:axes])
    places = torch.zeros((axes, *shape), dtype=torch.int64, device=device)
    return places if generator is None else places.random_(0, TABLE_ROWS, generator=generator)


def inputs(spec: RopeSpec, size: RopeSize, device: str, seed: int) -> RopeCall:
    """One set of random inputs: x normal, angles those of a model; out not filled.

    A key lies in the tensor of x: behind all of the query, or, in place with positions given token by token, behind
    each token's query and before its v. With a cache x is flat: such a qkv, then both caches. On the device "meta"
    nothing is allocated, which is enough to compile.
    """
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    x = torch.empty(_shape(spec, size), dtype=dtype, device=device)
    if generator is not None:
        x.normal_(generator=generator)
    out = x if spec.inplace else x.new_empty(x.shape)
    if spec.splits:
        out = x.new_empty(sum(_split_numbers(spec, size.tokens)[1]))
    first, second = _table(spec, size, device)
    places = _places(spec, size, device, generator)
    place_strides: tuple[int, ...] = (0, 0)
    if places is not None and places.ndim:
        steps = places.stride()[1:] if spec.positions == "axes" else places.stride()
        whole = {"bshd": steps[::-1], "sbhd": steps, "thd": (*steps, 0)}[spec.layout]
        place_strides = whole if spec.positions in ("ids", "axes") else (0, places.stride(0))
    whole_heads = spec.heads + 2 * spec.key_heads
    query_strides, key_strides = (
        _strides(spec, size, whole_heads if _packs_qkv(spec) else heads) for heads in (spec.heads, spec.key_heads)
    )
    of_cache = _of_cache(spec, size, device, generator) if spec.appends else {}
    thd, parallel = spec.layout == "thd", CP_SIZE if spec.context_parallel else 1
    of_norm = _of_norm(spec, x, generator) if spec.normed else {}
    of_given = _of_given(spec, x, generator, query_strides, key_strides) if spec.reads_given else {}
    cu_seqlens = None
    if spec.packed:
        cu_seqlens = torch.zeros(size.batch + 1, device=device, dtype=torch.int32)
        if device != "meta":
            cu_seqlens += torch.arange(size.batch + 1, device=device, dtype=torch.int32) * size.seq * parallel
    strides = {"x": query_strides, "out": query_strides, "key": key_strides, "key_out": key_strides}
    named: dict[str, Any] = (
        _split_strides(spec, size) if spec.splits else {f"{n}_strides": steps for n, steps in strides.items()}
    )
    return RopeCall(
        x=x,
        out=out,
        cos=first,
        sin=second,
        seq=size.tokens if thd else size.seq,
        batch=1 if thd else size.batch,
        angle_rows=first.shape[-2],
        **named,
        angle_strides=(first.stride(-2), first.stride(-1)),
        cu_seqlens=cu_seqlens,
        sequences=size.batch if spec.packed else 0,
        angle_stride_b=first.stride(0) if spec.angles_per_batch else 0,
        positions=places,
        position_strides=(place_strides[0], place_strides[1]),
        axis_stride=places.stride(0) if places is not None and spec.positions == "axes" else 0,
        offset=TABLE_ROWS if spec.positions == "shifted" else 0,
        cp_size=parallel,
        cp_rank=parallel - 1,
        scaling=SCALING if spec.scaled else 1.0,
        **of_norm,
        **of_given,
        **of_cache,
    )


def _of_cache(spec: RopeSpec, size: RopeSize, device: str, generator: torch.Generator | None) -> dict[str, Any]:
    """The fields of a call with a cache. Many tokens have consecutive slots in pages, like a prompt; few have random slots."""
    pages, page_size, heads, dim = _pages(spec, size)
    slots = torch.zeros(size.tokens, dtype=torch.int64, device=device)
    if generator is not None:
        blocks = pages if size.tokens >= TABLE_ROWS else pages * page_size
        whole = torch.randperm(blocks, generator=generator, device=device)
        if blocks == pages:
            whole = (whole[:, None] * page_size + torch.arange(page_size, device=device)).view(-1)
        slots.copy_(whole[: size.tokens])
        slots[SKIPPED - 1 :: SKIPPED] = -1
    slot, head = (heads * dim, dim) if spec.cache_layout == "NHD" else (dim, page_size * dim)
    strides = (page_size * heads * dim, slot, head, 1)
    scales = [torch.tensor(scale, dtype=torch.float32, device=device) for scale in SCALES]
    return {
        "value_strides": _strides(spec, size, spec.all_heads),
        "key_cache_strides": strides,
        "value_cache_strides": strides,
        "slots": slots,
        "slot_count": size.tokens,
        "slot_stride": 1,
        "pages": pages,
        "page_size": page_size,
        **(dict(zip(("key_scale", "value_scale"), scales, strict=True)) if spec.cache == "float8" else {}),
    }


def _of_norm(
    spec: RopeSpec,
    x: torch.Tensor,
    generator: torch.Generator | None,
) -> dict[str, Any]:
    """The fields of a call with a norm: weights around 1 (0 if zero-centered), and the further outputs of its gradient."""
    weights = [torch.empty(n, dtype=x.dtype, device=x.device) for n in weight_features(spec)]
    if generator is not None:
        for weight in weights:
            weight.normal_(mean=0.0 if spec.zero_centered else 1.0, std=0.1, generator=generator)
    fields: dict[str, Any] = {"weight": weights[0], "key_weight": weights[1] if spec.key_heads else None, "eps": EPS}
    if not spec.gradient_of_norm:
        return fields
    most = max(spec.all_heads, MULTIPROCESSORS * max(RESIDENT)) * sum(weight_features(spec))
    return {
        **fields,
        "weight_grad": weights[0].new_empty(weights[0].shape),
        "key_weight_grad": weights[1].new_empty(weights[1].shape) if spec.key_heads else None,
        "partials": torch.empty(most, dtype=torch.float32, device=x.device),
    }


def _of_given(
    spec: RopeSpec,
    x: torch.Tensor,
    generator: torch.Generator | None,
    strides: tuple[int, int, int, int],
    key_strides: tuple[int, int, int, int],
) -> dict[str, Any]:
    """The fields of a gradient that reads the forward's input; for a gradient of the angles also its output."""
    given = x.new_empty(x.shape)
    if generator is not None:
        given.normal_(generator=generator)
    fields: dict[str, Any] = {"given": given, "given_strides": strides, "key_given_strides": key_strides}
    if spec.angle_gradient:
        tokens = x.numel() // (spec.all_heads * spec.head_dim)
        fields["angle_grad"] = torch.empty(token_angles(spec, tokens, 1), dtype=torch.float32, device=x.device)
    return fields


def _features(spec: RopeSpec) -> tuple[list[int], list[int]]:
    """The first and the second feature of each pair."""
    start = spec.head_dim - spec.rotary_dim if spec.rotated == "last" else 0
    pairs = range(spec.rotary_dim // 2)
    step, apart = (2, 1) if spec.interleaved else (1, spec.pair_distance)
    return [start + step * j for j in pairs], [start + step * j + apart for j in pairs]


def _entries(spec: RopeSpec) -> tuple[slice, slice]:
    """The entries of a row of angles that belong to the first, and to the second feature of each pair."""
    if spec.angle_entries == "pair":
        return slice(None), slice(None)
    if spec.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, spec.rotary_dim // 2), slice(spec.rotary_dim // 2, None)


def _turns(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine in float64, with the axes of x before its last: [..., 1, entries]."""
    rows, _ = positions(spec, call)
    if spec.positions == "axes":
        cos, sin = _turns_of_axes(spec, call, rows)
    elif spec.angles == "inv_freq":
        radians = (rows.float()[..., None] * call.cos).double()
        cos, sin = radians.cos(), radians.sin()
    else:
        table, second = call.cos.double(), call.sin
        cos, sin = (table.cos(), table.sin()) if spec.computes_sincos else (table, second.double())
        if spec.angles_per_batch:
            rows = rows.expand(call.batch, call.seq)
            cos, sin = (torch.stack([a[b][rows[b]] for b in range(call.batch)]) for a in (cos, sin))
        else:
            cos, sin = cos[rows], sin[rows]
    cos, sin = cos * call.scaling, sin * call.scaling * (-1 if spec.conjugate else 1)
    if spec.layout == "thd":
        return cos[:, None], sin[:, None]
    cos, sin = (a if a.ndim > 2 else a[None] for a in (cos, sin))  # noqa: PLR2004 - [batch or 1, seq, entries]
    if spec.layout == "sbhd":
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    return cos[:, :, None], sin[:, :, None]


def _turns_of_axes(spec: RopeSpec, call: RopeCall, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine in float64, [..., entries], where each pair of a token may read another row of the angles."""
    one, two = _entries(spec)
    wide = rows
    if spec.angle_entries == "feature":
        wide = rows.new_empty((*rows.shape[:-1], spec.rotary_dim))
        wide[..., one], wide[..., two] = rows, rows
    if spec.angles == "inv_freq":
        radians = (wide.float() * call.cos).double()
        return radians.cos(), radians.sin()
    table, second = call.cos.double(), call.sin
    found = (table.cos(), table.sin()) if spec.computes_sincos else (table, second.double())
    if not spec.angles_per_batch:
        cos, sin = (a.expand(*wide.shape[:-1], *a.shape).gather(-2, wide[..., None, :])[..., 0, :] for a in found)
        return cos, sin
    wide = wide.expand(call.batch, call.seq, -1)
    cos, sin = (a.gather(1, wide) for a in found)
    return cos, sin


def reference(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that one rounding and float32 arithmetic may leave, per element.

    The bound: half a unit in the last place of the result for the store; and in float32, for each of the two products,
    2 units in the last place for sine and cosine (CUDA's documented bound), and one rounding each for the product and
    the sum: 4 x 2^-24 of |first| + |second|. A scaling adds one rounding and multiplies this bound.
    """
    if spec.appends:
        return _cached_reference(spec, call)
    if spec.normed:
        return _normed_reference(spec, call)
    if spec.splits:
        return _split_reference(spec, call)
    x = call.x.double()
    out, bound = x.clone(), torch.zeros_like(x)
    for turned, out_part, bound_part in zip(*(_parts(spec, call, t) for t in (x, out, bound)), strict=True):
        _rotate(spec, call, turned, torch.zeros_like(turned), out_part, bound_part)
    return out, bound


def _rotate(  # noqa: PLR0913 - a tensor, its error, and where both go
    spec: RopeSpec, call: RopeCall, x: torch.Tensor, error: torch.Tensor, out: torch.Tensor, bound: torch.Tensor
) -> None:
    """Write the rotated features of x to ``out`` and their error bound to ``bound``; ``error`` is the error bound of x."""
    cos, sin = _turns(spec, call)
    one, two = _entries(spec)
    (i_first, i_second), written = _features(spec), _features(spec)
    if spec.deinterleaves:
        pairs = dataclasses.replace(spec, style="interleaved", deinterleaves=False)
        forward = spec.direction == "forward"
        (i_first, i_second), written = (_features(pairs), written) if forward else (written, _features(pairs))
    sin_first, sin_second = sin[..., one], sin[..., two]
    if spec.direction == "backward":
        sin_first, sin_second = -sin_second, -sin_first
    first, second = x[..., i_first], x[..., i_second]
    size = (first.abs() + second.abs()) * (4 if call.scaling == 1.0 else 5 * abs(call.scaling)) * 2.0**-24
    size = size + (error[..., i_first] + error[..., i_second]) * abs(call.scaling)
    for features, result in (
        (written[0], first * cos[..., one] - second * sin_first),
        (written[1], second * cos[..., two] + first * sin_second),
    ):
        out[..., features] = result
        bound[..., features] = size + result.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype]


def _split_reference(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference`` of MLA's key and value, or of their transpose.

    Copied features have no error. The sum over heads has one float32 rounding for each head, of the absolute values' sum.
    """
    out = torch.zeros(call.out.shape, dtype=torch.float64, device=call.out.device)
    bound = torch.zeros_like(out)
    (x, key), _ = _split_parts(spec, call)
    (made, second), (bound_made, bound_second) = (
        _split_parts(spec, dataclasses.replace(call, out=t))[1] for t in (out, bound)
    )
    whole = dataclasses.replace(spec, head_dim=spec.rotary_dim, value_dim=0, rotated="first")
    kept = spec.kept_dim
    if spec.sums_heads:
        made[..., :kept], made[..., kept:] = x[..., :kept].double(), key.double()
        total = x[..., kept:].double().sum(-2, keepdim=True)
        off = x[..., kept:].double().abs().sum(-2, keepdim=True) * spec.heads * 2.0**-24
        _rotate(whole, call, total, off, second, bound_second)
        return out, bound
    made[..., :kept], second[...] = x[..., :kept].double(), x[..., kept:].double()
    shared = key.double()
    turned, off = torch.empty_like(shared), torch.empty_like(shared)
    _rotate(whole, call, shared, torch.zeros_like(shared), turned, off)
    made[..., kept:], bound_made[..., kept:] = turned, off
    return out, bound


def _normed_reference(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference`` of a call with a norm, or of the gradient of its input.

    The bound: NORM_UNITS float32 roundings before the rotation, and the roundings to 16 bits that the spec asks for.
    """
    x = call.x.double()
    out, bound = x.clone(), torch.zeros_like(x)
    given = call.given.double() if spec.gradient_of_norm else x
    weights = (call.weight, call.key_weight)
    for index, (grad, own, out_part, bound_part) in enumerate(
        zip(*(_tensors(spec, call, t) for t in (x, given, out, bound)), strict=True)
    ):
        weight = weights[index].double().view(-1, spec.head_dim) + (1.0 if spec.zero_centered else 0.0)
        axes = (-2, -1) if spec.norm == "all" else (-1,)
        reciprocal = ((own * own).mean(axes, keepdim=True) + call.eps).rsqrt()
        n = own * reciprocal
        unit = NORM_UNITS * 2.0**-24
        if not spec.gradient_of_norm:
            normed = n * weight
            error = normed.abs() * (unit + ROUNDINGS.index(spec.rounding) * UNIT_ROUNDOFF[spec.dtype])
            out_part.copy_(normed)
            bound_part.copy_(error + normed.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype])
            _rotate(spec, call, normed, error, out_part, bound_part)
            continue
        z, off = grad.clone(), torch.zeros_like(grad)
        _rotate(spec, call, grad, torch.zeros_like(grad), z, off)
        y, size = z * weight, (z.abs() + off) * weight.abs()
        off = off - (z.abs() * UNIT_ROUNDOFF[spec.dtype]) * (off > 0)  # not rounded before y
        along, along_size = (y * n).mean(axes, keepdim=True), (size * n.abs()).mean(axes, keepdim=True)
        result = reciprocal * (y - n * along)
        out_part.copy_(result)
        error = reciprocal * (unit * (size + n.abs() * along_size) + off * weight.abs())
        bound_part.copy_(error + result.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype])
    return out, bound


def _rows_of(spec: RopeSpec, call: RopeCall, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of query, key and value, [tokens, heads, head_dim], in a flat tensor like x of a call with a cache."""
    packed = x[: flat_rows(spec, call)].view(call.seq, spec.all_heads, spec.head_dim)
    return packed.split((spec.heads, spec.key_heads, spec.key_heads), 1)


def _caches_of(spec: RopeSpec, call: RopeCall, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of both caches in that tensor, as numbers of a dtype: [pages, page_size, heads, head_dim]."""
    shape = (call.pages, call.page_size, spec.key_heads, spec.head_dim)
    if spec.cache_layout == "HND":
        shape = (shape[0], shape[2], shape[1], shape[3])
    found = [part.view(dtype).view(shape) for part in x[flat_rows(spec, call) :].chunk(2)]
    return tuple(part.transpose(1, 2) if spec.cache_layout == "HND" else part for part in found)


def _cached_reference(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference`` of a call with a cache: the flat tensor of all tokens' rows and both caches.

    A number has one right float8 rounding, unless its error bound reaches past the middle between two float8 numbers:
    then both are allowed. The bytes are compared as numbers of the dtype of x, since the caches lie in the memory of x.
    """
    plain = dataclasses.replace(spec, cache="", cache_layout="NHD", key_inplace=False, key_heads=0)
    out, bound = call.x.double(), torch.zeros_like(call.x, dtype=torch.float64)
    query, key, value = _rows_of(spec, call, call.x)
    turned = []
    for part, weight in ((query, call.weight), (key, call.key_weight)):
        alone = dataclasses.replace(call, x=part, weight=weight, key_weight=None)
        turned.append(reference(dataclasses.replace(plain, heads=part.shape[1]), alone))
    for index in range(2 if spec.key_inplace else 1):
        for whole, part in zip((out, bound), turned[index], strict=True):
            _rows_of(spec, call, whole)[index].copy_(part)
    rows = (turned[1], (value.double(), torch.zeros_like(value, dtype=torch.float64)))
    slots = call.slots[: call.slot_count]
    kept = (slots >= 0) & (slots < call.pages * call.page_size)
    places = slots[kept] // call.page_size, slots[kept] % call.page_size
    if spec.cache == "same":
        for at, own in enumerate(rows):
            for whole, part in zip((out, bound), own, strict=True):
                _caches_of(spec, call, whole, torch.float64)[at][places] = part[: len(slots)][kept]
        return out, bound
    ends = call.x.clone(), call.x.clone()  # the least and the largest numbers that the caches may hold
    for at, ((number, off), scale) in enumerate(zip(rows, (call.key_scale, call.value_scale), strict=True)):
        # The bound without the rounding to the dtype of x: numbers in the cache are not rounded to it.
        error = (off - number.abs() * UNIT_ROUNDOFF[spec.dtype] - SMALLEST[spec.dtype]).clamp_min(0.0)
        scaled, error = (t / (1.0 if scale is None else scale.double()) for t in (number, error))
        error = error + scaled.abs() * 2.0**-23  # of the division
        for end, sign in zip(ends, (-1, 1), strict=True):
            stored = (scaled + sign * error).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).float().to(torch.float8_e4m3fn)
            _caches_of(spec, call, end, torch.uint8)[at][places] = stored.view(torch.uint8)[: len(slots)][kept]
    first = flat_rows(spec, call)
    bytes_of = [end[first:].view(torch.uint8).view(-1, ITEM_SIZE[spec.dtype]) for end in ends]
    seen = []
    for choice in itertools.product(range(2), repeat=ITEM_SIZE[spec.dtype]):
        mixed = torch.stack([bytes_of[end][:, at] for at, end in enumerate(choice)], 1)
        seen.append(mixed.view(call.x.dtype)[:, 0].double())
    least, most = torch.stack(seen).amin(0), torch.stack(seen).amax(0)
    out[first:], bound[first:] = (least + most) / 2, (most - least) / 2
    return out, bound


def _tensors(spec: RopeSpec, call: RopeCall, x: torch.Tensor) -> list[torch.Tensor]:
    """Views of the query, and of the key if there is one, in a tensor like x of a call, with the layout's axes."""
    parts = _parts(spec, call, x)
    if len(parts) == 1 and spec.key_heads:
        return list(parts[0].split((spec.heads, spec.key_heads), -2))
    return parts if spec.key_heads else parts[:1]


def _parts(spec: RopeSpec, call: RopeCall, x: torch.Tensor) -> list[torch.Tensor]:
    """Views of the heads that rotate in a tensor like x: the query, and the key if it is there, with the layout's axes."""
    if x.ndim > 2:  # noqa: PLR2004 - not rows
        return [x[..., : spec.all_heads - spec.copied_heads, :]]
    tokens = _axes(spec, call)
    rows = call.batch * call.seq * spec.heads
    return [
        part.view(*tokens, heads, spec.head_dim) for part, heads in ((x[:rows], spec.heads), (x[rows:], spec.key_heads))
    ]


def eager(spec: RopeSpec, call: RopeCall) -> Any:
    """The eager PyTorch baseline of the same call, as dispatch would run it."""
    if spec.appends:
        x, key, value = _rows_of(spec, call, call.x)
        dtype = torch.float8_e4m3fn if spec.cache == "float8" else call.x.dtype
        caches = _caches_of(spec, call, call.x, dtype)
        whole = dataclasses.replace(call, x=x, key=key, value=value, key_cache=caches[0], value_cache=caches[1])
        return lambda: append(spec, whole)
    if spec.normed:
        query, *keys = _tensors(spec, call, call.given if spec.gradient_of_norm else call.x)
        given = dataclasses.replace(call, x=query, key=keys[0] if keys else None)
        if not spec.gradient_of_norm:
            return lambda: rotate(spec, given)
        grad, *key_grads = _tensors(spec, call, call.x)
        return lambda: norm_gradient(spec, given, grad, key_grads[0] if key_grads else None)
    if spec.angle_gradient:
        query, *keys = _tensors(spec, call, call.given)
        given = dataclasses.replace(call, x=query, key=keys[0] if keys else None)
        grad, *key_grads = _tensors(spec, call, call.x)
        return lambda: angle_gradient(spec, given, grad, key_grads[0] if key_grads else None)
    if spec.splits:
        (query, key), _ = _split_parts(spec, call)
        given = dataclasses.replace(call, x=query, key=key)
    elif call.x.ndim > 2:  # noqa: PLR2004 - query and key are heads of one tensor, and are rotated alike
        given = dataclasses.replace(call, x=call.x[..., : spec.all_heads, :])
    else:
        query, key = _parts(spec, call, call.x)
        given = dataclasses.replace(call, x=query, key=key)
    return lambda: rotate(spec, given)


def bytes_moved(spec: RopeSpec, size: RopeSize) -> int:
    """Bytes that any implementation must move: x read and written once, the angles read once a position.

    A norm's gradient also reads the forward's input; the weights are so few that they are not counted. MLA reads kv and
    k_pe and writes key and value. The gradient of angles also reads the rotated features of the input, and writes the
    sums for each row of angles.
    """
    if spec.splits:
        read, written = (sum(numbers) for numbers in _split_numbers(spec, size.tokens))
        return (read + written) * ITEM_SIZE[spec.dtype] + angle_rows(spec, size) * angle_row_bytes(spec)
    if spec.appends:
        return _bytes_with_cache(spec, size)
    features = spec.head_dim if spec.moves_all else spec.rotary_dim
    token = (3 if spec.gradient_of_norm else 2) * spec.all_heads * features * ITEM_SIZE[spec.dtype]
    moved = size.tokens * token + angle_rows(spec, size) * angle_row_bytes(spec)
    if spec.angle_gradient:
        turned = (spec.all_heads - spec.copied_heads) * spec.rotary_dim * ITEM_SIZE[spec.dtype]
        moved += size.tokens * turned + 4 * math.prod(token_angles(spec, angle_rows(spec, size), 1))
    return moved


def _bytes_with_cache(spec: RopeSpec, size: RopeSize) -> int:
    """``bytes_moved`` with a cache: query read and written, key and value read, slots read, and the cache's rows written."""
    item, turned = ITEM_SIZE[spec.dtype], spec.head_dim if spec.normed else spec.rotary_dim
    rows = spec.key_heads * spec.head_dim
    token = (2 * spec.heads * turned + 2 * rows + (spec.key_heads * turned if spec.key_inplace else 0)) * item
    kept = (size.tokens - size.tokens // SKIPPED) * 2 * rows * (1 if spec.cache == "float8" else item)
    places = size.tokens * 8
    return size.tokens * token + kept + places + angle_rows(spec, size) * angle_row_bytes(spec)


def angle_row_bytes(spec: RopeSpec) -> int:
    """Bytes of the angles of one position."""
    if spec.angles == "inv_freq":
        return 0
    entries = spec.rotary_dim if spec.angle_entries == "feature" else spec.rotary_dim // 2
    return entries * ITEM_SIZE[spec.angle_dtype] * (1 if spec.computes_sincos else 2)


def angle_rows(spec: RopeSpec, size: RopeSize) -> int:
    """Rows of angles that must be read: one per position, shared by the batch unless each entry has its own."""
    own = spec.positions in ("ids", "starts", "axes") or spec.angles_per_batch
    return size.tokens if own else size.seq


def tensor_bytes(spec: RopeSpec, size: RopeSize) -> int:
    """Bytes of one set of inputs and outputs."""
    if spec.splits:
        return bytes_moved(spec, size) + (_table_rows(spec, size) - angle_rows(spec, size)) * angle_row_bytes(spec)
    x = math.prod(_shape(spec, size)) * ITEM_SIZE[spec.dtype]
    return (3 if spec.reads_given else 1 if spec.inplace else 2) * x + _table_rows(spec, size) * angle_row_bytes(spec)


def small(size: RopeSize, variant: RopeVariant) -> RopeSize:
    """A size with so few tokens that the interpreter takes under a second, and with a tile that is not full."""
    return dataclasses.replace(size, batch=min(size.batch, 2), seq=min(size.seq, variant.block_tokens + 1))


# The work of a variant: programs, bytes, sines, threads; and the tile of a program.


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The work of the one launch of the rotation."""
    spec, size = problem.spec, problem.size
    item, half = ITEM_SIZE[spec.dtype], half_block(spec)
    entries_per_pair = 2 if spec.angle_entries == "feature" else 1
    angle_row = angle_row_bytes(spec)
    seq, batch = (size.tokens, 1) if spec.layout == "thd" else (size.seq, size.batch)
    count = programs(spec, variant, seq, batch)
    tile_rows = variant.block_tokens * rows_at_once(spec, variant)
    tiles = count * (ceil_div(spec.all_heads, variant.block_heads) if spec.takes_all_heads else 1)
    # Pairs that rotate, or half of the features that are moved of a row.
    moved = half_row(spec, variant.whole_rows) if spec.splits or variant.whole_rows else half
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=bytes_moved(spec, size),
            again_bytes=max(0.0, count * variant.block_tokens * angle_row - angle_rows(spec, size) * angle_row),
            in_flight_bytes=tile_rows * (2 * moved if spec.splits else spec.rotary_dim) * item
            + variant.block_tokens * angle_row,
            elements=tiles * tile_rows * 2 * moved,
            sines=count * variant.block_tokens * half * 2 * entries_per_pair if spec.computes_sincos else 0,
            pairs_per_thread=tile_rows * moved / (32 * variant.num_warps),
            row_bytes=(2 * moved if variant.whole_rows else half) * item,
            early=variant.pdl,
        ),
    )


def features(variant: RopeVariant) -> tuple[int, ...]:
    """Inputs of a model of the time besides the knobs, in octaves: rows of a tile, and rows a warp."""
    rows = variant.block_tokens * variant.block_heads
    return round(math.log2(rows)), round(math.log2(rows / variant.num_warps))


def tile(spec: RopeSpec, variant: RopeVariant) -> tuple[int, int]:
    """Rows of the tensor that a program takes at a time, and features of each row that rotate."""
    return variant.block_tokens * rows_at_once(spec, variant), spec.rotary_dim
