"""RoPE in eager PyTorch: it serves calls on a CPU, in float64, and gradients that no kernel takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import RopeSpec


def positions(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The position of each token, and whether a sequence holds it; without synchronizing with the GPU.

    Returns:
        (positions, inside): int64, [seq] or [batch, seq], with a last axis of pairs if positions have axes; and bool,
        [seq], or None if sequences hold all tokens.
    """
    given: Any = None if call.positions is None else call.positions.long()
    if spec.positions == "axes":
        # [seq, pairs] or [batch, seq, pairs]. A list as an index would be copied to the GPU: no CUDA graph captures that.
        places = torch.stack([given[axis] for axis in spec.axis_of_pair], -1)
        return places.transpose(0, 1) if places.ndim > 2 and spec.layout == "sbhd" else places, None  # noqa: PLR2004
    if spec.positions == "ids":
        return given.t() if given.ndim > 1 and spec.layout == "sbhd" else given, None
    tokens = torch.arange(call.seq, device=call.x.device)
    inside, sequence = None, None
    length: torch.Tensor | int = call.seq
    if spec.packed:
        bounds = call.cu_seqlens.long()
        if spec.context_parallel:
            bounds = torch.div(bounds, call.cp_size, rounding_mode="floor")
        sequence = torch.searchsorted(bounds, tokens, right=True) - 1
        inside = (sequence >= 0) & (tokens < bounds[-1])
        sequence = sequence.clamp(0, max(call.sequences - 1, 0))
        tokens = tokens - bounds[sequence]
        if spec.context_parallel and call.sequences:
            length = bounds.diff()[sequence]
    if spec.context_parallel:
        tokens = dual_chunk(tokens, length, call.cp_size, call.cp_rank)
    tokens = tokens + call.offset
    if spec.positions == "offset":
        tokens = tokens + given
    elif spec.positions == "starts":
        starts = given[sequence] if sequence is not None and call.sequences else given[:, None]
        tokens = tokens + starts if given.numel() else tokens
    return tokens, inside


def dual_chunk(tokens: torch.Tensor, length: torch.Tensor | int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Index in the whole sequence of a rank's tokens, which are chunks cp_rank and 2 cp_size - 1 - cp_rank of 2 cp_size.

    ``length`` is the number of tokens of the sequence that the rank has.
    """
    chunk = length // 2 if isinstance(length, int) else torch.div(length, 2, rounding_mode="floor")
    later = (2 * cp_size - 2 - cp_rank) * chunk + tokens  # the second chunk's tokens begin at index ``chunk``
    return torch.where(tokens < chunk, cp_rank * chunk + tokens, later)


def angles(spec: RopeSpec, call: RopeCall, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine at each of ``rows``, [*tokens, entries], NaN outside the table; differentiable in the table."""
    compute = torch.promote_types(call.x.dtype, torch.float32)
    if spec.positions == "axes":
        return _angles_of_axes(spec, call, rows, compute)
    if spec.angles == "inv_freq":
        radians = rows.float()[..., None] * call.cos  # rounded once to float32, as in the kernels and in transformers
        return torch.cos(radians.to(compute)), torch.sin(radians.to(compute))
    radians = call.cos.to(compute)
    taken = (torch.cos(radians), torch.sin(radians)) if spec.computes_sincos else (call.cos, call.sin)
    known = (rows >= 0) & (rows < call.angle_rows)
    if spec.angles_per_batch:
        rows, known = (t.expand(call.batch, call.seq) for t in (rows, known))
    if not call.angle_rows:
        return _unknown(taken, (*rows.shape, call.cos.shape[-1]), compute)
    index: tuple[torch.Tensor, ...] = (rows.clamp(0, call.angle_rows - 1),)
    if spec.angles_per_batch:
        index = (torch.arange(call.batch, device=rows.device)[:, None], *index)
    cos, sin = (torch.where(known[..., None], table.to(compute)[index], torch.nan) for table in taken)
    return cos, sin


def _unknown(
    taken: Sequence[torch.Tensor], shape: Sequence[int], compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN at all positions, for tables without rows; differentiable: the gradient of such a table has no rows either."""
    cos, sin = (
        table.to(compute).sum() + torch.full(tuple(shape), torch.nan, dtype=compute, device=table.device)
        for table in taken
    )
    return cos, sin


def _angles_of_axes(
    spec: RopeSpec, call: RopeCall, rows: torch.Tensor, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``angles`` if each pair has a position of its own: ``rows`` is [*tokens, pairs]."""
    if spec.angle_entries == "feature":
        rows = rows.repeat_interleave(2, -1) if spec.interleaved else torch.cat((rows, rows), -1)
    if spec.angles == "inv_freq":
        radians = (rows.float() * call.cos).to(compute)
        return torch.cos(radians), torch.sin(radians)
    radians = call.cos.to(compute)
    taken = (torch.cos(radians), torch.sin(radians)) if spec.computes_sincos else (call.cos, call.sin)
    if not call.angle_rows:
        return _unknown(taken, rows.shape, compute)
    known = (rows >= 0) & (rows < call.angle_rows)
    index: tuple[torch.Tensor, ...] = (
        rows.clamp(0, call.angle_rows - 1),
        torch.arange(rows.shape[-1], device=rows.device),
    )
    if spec.angles_per_batch:
        entry = torch.arange(call.batch, device=rows.device)[:, None, None]
        index, known = (entry, *index), known.expand(call.batch, call.seq, -1)
    cos, sin = (torch.where(known, table.to(compute)[index], torch.nan) for table in taken)
    return cos, sin


def _in_order(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``angles`` of a call whose positions are successive rows of one table, by slicing it; None for any other call."""
    plain = spec.positions == "order" and spec.angles != "inv_freq" and not (spec.packed or spec.context_parallel)
    begin, end = call.offset, call.offset + call.seq
    if not plain or spec.angles_per_batch or begin < 0 or end > call.angle_rows:
        return None
    compute = torch.promote_types(call.x.dtype, torch.float32)
    if spec.computes_sincos:
        radians = call.cos[begin:end].to(compute)
        return torch.cos(radians), torch.sin(radians)
    return call.cos[begin:end].to(compute), call.sin[begin:end].to(compute)


def rotate(
    spec: RopeSpec, call: RopeCall, key_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New tensors with the rotated features of ``call.x`` and of ``call.key``; differentiable in them and in the angles.

    The rotated key is rounded to ``key_dtype``, if given, instead of the key's dtype.
    """
    kind = call.x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        # All dtypes here are explicit, and autocast's promotion for torch.cat does not support float16 on a CPU.
        with torch.autocast(kind, enabled=False):
            return _rotated(spec, call, key_dtype)
    return _rotated(spec, call, key_dtype)


LARGEST_FLOAT8 = 448.0  # of e4m3


def append(spec: RopeSpec, call: RopeCall) -> None:
    """Make a call with a cache: overwrite ``call.x``, the key if asked, and the tokens' places in both caches.

    The caches are [pages, page_size, heads, head_dim]. It does not synchronize with the GPU.
    """
    alone = dataclasses.replace(spec, cache="", cache_layout="NHD", key_inplace=False)
    compute = torch.promote_types(call.x.dtype, torch.float32)
    out, key_out = rotate(alone, call, compute if spec.cache == "float8" else None)
    inside = positions(alone, call)[1] if spec.packed else None
    assert key_out is not None
    slots = call.slots.long()
    put(call.key_cache, as_cached(key_out, call.key_cache.dtype, call.key_scale), slots, inside)
    put(call.value_cache, as_cached(call.value, call.value_cache.dtype, call.value_scale), slots, inside)
    call.x.copy_(out)
    if spec.key_inplace:
        call.key.copy_(key_out)


def as_cached(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows [tokens, heads, head_dim] as a cache of a dtype holds them: in float8 divided by the scale, and saturated."""
    if dtype == rows.dtype or dtype.itemsize > 1:
        return rows
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    rows = rows if scale is None else rows / scale.reshape(-1, 1)
    return rows.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(dtype)


def put(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, inside: torch.Tensor | None = None) -> None:
    """Write rows unchanged to their places in the pages of a cache; rows without a place are not written."""
    pages, page_size = cache.shape[:2]
    count = slots.shape[0]
    if not count or not cache.numel():
        return
    kept = (slots >= 0) & (slots < pages * page_size)
    kept = kept if inside is None else kept & inside[:count]
    # No value is read on the host. So a token without a place writes the same as the first token with one; if no token
    # has a place, all write what is there already.
    first = kept.to(torch.int32).argmax()
    token = torch.where(kept, torch.arange(count, device=slots.device), first)
    some = kept.any()
    place = torch.where(some, slots[token], 0)
    rows = rows.resolve_neg()
    # PyTorch cannot write float8 by an index, so bytes are written. Others are not viewed as bytes: vmap and
    # torch.jit.trace cannot do that.
    if cache.element_size() == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    index = torch.div(place, page_size, rounding_mode="floor"), place % page_size
    cache.index_put_(index, torch.where(some, rows[token], cache[0, 0]))


def _rotated(
    spec: RopeSpec, call: RopeCall, key_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    inside = None
    if (taken := _in_order(spec, call)) is not None:
        cos, sin = taken
    else:
        rows, inside = positions(spec, call)
        cos, sin = angles(spec, call, rows)
    if spec.scaled:
        cos, sin = cos * call.scaling, sin * call.scaling
    if inside is not None:  # copied tokens have no angle: a NaN here would make even their zero gradients NaN
        cos, sin = (torch.where(inside[:, None], a, still) for a, still in ((cos, 1.0), (sin, 0.0)))
    # From [seq, entries] or [batch, seq, entries] to axes that broadcast over x.
    if spec.layout == "thd":
        cos, sin = (a.reshape(call.seq, 1, a.shape[-1]) for a in (cos, sin))
    elif spec.layout == "bshd":
        cos, sin = (a.unsqueeze(-2) for a in (cos, sin))
    else:
        cos, sin = (a.transpose(0, 1)[:, :, None] if a.ndim > 2 else a[:, None, None] for a in (cos, sin))  # noqa: PLR2004
    if spec.conjugate:
        sin = -sin
    if spec.splits:
        return _split(spec, call, cos, sin, inside)
    # Copied heads pass their gradient on unchanged, whatever the angles are.
    moved = call.x.shape[-2] - spec.copied_heads
    own = (
        call.x[..., :moved, :] if spec.copied_heads else call.x
    )  # no slice of all: batches of gradients have no rule for it
    x = _turn(spec, _normed(spec, own, call.weight, call.eps, inside), cos, sin, inside, own)
    if spec.copied_heads:
        x = torch.cat((x, call.x[..., moved:, :]), -2)
    if call.key is None:
        return x, None
    key = _normed(spec, call.key, call.key_weight, call.eps, inside)
    given = call.key if key_dtype is None else call.key.to(key_dtype)
    return x, _turn(spec, key, cos, sin, inside, given)


def _split(
    spec: RopeSpec, call: RopeCall, cos: torch.Tensor, sin: torch.Tensor, inside: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA's key and value, or the transpose: the gradients of kv and of the shared key head. Each rounds once."""
    whole = dataclasses.replace(spec, head_dim=spec.rotary_dim, value_dim=0, rotated="first")
    x, key = call.x, call.key
    kept, rest = x[..., : spec.kept_dim], x[..., spec.kept_dim :]
    if spec.sums_heads:
        total = rest.sum(-2, keepdim=True, dtype=cos.dtype)
        shared = _turn(whole, total, cos, sin, inside, total)
        return torch.cat((kept, key), -1).contiguous(), shared.to(x.dtype).contiguous()
    wide = key.to(cos.dtype)
    # Expanded before it is rounded, so that its gradient is summed over heads before that is rounded.
    shared = _turn(whole, wide, cos, sin, inside, wide).expand(*x.shape[:-1], spec.rotary_dim)
    return torch.cat((kept, shared.to(x.dtype)), -1).contiguous(), rest.clone(memory_format=torch.contiguous_format)


def _normed(
    spec: RopeSpec, x: torch.Tensor, weight: torch.Tensor | None, eps: float, inside: torch.Tensor | None
) -> torch.Tensor:
    """X after its norm, in float32 at least; x itself without one."""
    if not spec.normed or weight is None:
        return x
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    if inside is not None:  # tokens of no sequence may hold anything: zero gradients would become NaN by a NaN
        wide = torch.where(inside[:, None, None], wide, 1.0)
    axes = (-2, -1) if spec.norm == "all" else (-1,)
    wide = wide * torch.rsqrt((wide * wide).mean(axes, keepdim=True) + eps)
    if spec.rounding == "each":
        wide = wide.to(x.dtype).to(compute)
    scale = weight.to(compute).view(-1, x.shape[-1])
    wide = wide * (scale + 1.0 if spec.zero_centered else scale)
    return wide if spec.rounding == "once" else wide.to(x.dtype).to(compute)


def _turn(  # noqa: PLR0913
    spec: RopeSpec,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inside: torch.Tensor | None,
    given: torch.Tensor,
) -> torch.Tensor:
    """X with its pairs rotated, in the dtype of ``given``; tokens outside ``inside`` are copied from ``given``."""
    turned, half = spec.rotary_dim, spec.rotary_dim // 2
    before = spec.head_dim - turned if spec.rotated == "last" else 0
    # ``kept``: the features kept before the first features of pairs, between first and second, and after; None for none.
    kept: list[torch.Tensor | None]
    if spec.rotated == "proportional":
        between = spec.head_dim // 2 - half
        first, still, second, after = x.split([half, between, half, between], -1)
        kept, head = [None, still, after], torch.cat((first, second), -1)
    elif turned == spec.head_dim:
        kept, head = [None, None, None], x
    else:
        head = x[..., before : before + turned]
        kept = [x[..., :before], None, x[..., before + turned :]]
    head = head.to(cos.dtype)
    # Where the first and the second of each pair are.
    neighbours, halves = (slice(0, None, 2), slice(1, None, 2)), (slice(half), slice(half, None))
    one, other = neighbours if spec.interleaved else halves
    # Whether the features of a pair are neighbours in the input, and in the result. Angles always lie as the style says.
    read, written = spec.interleaved, spec.interleaved
    if spec.deinterleaves:
        read, written = spec.direction == "forward", spec.direction == "backward"
    first, second = (head[..., part] for part in (neighbours if read else halves))
    pair_cos, pair_sin = (cos, cos), (sin, sin)
    if spec.angle_entries == "feature":
        pair_cos, pair_sin = (cos[..., one], cos[..., other]), (sin[..., one], sin[..., other])
    if spec.direction == "backward":
        pair_sin = (-pair_sin[1], -pair_sin[0])
    out_first = (first * pair_cos[0] - second * pair_sin[0]).to(given.dtype)
    out_second = (second * pair_cos[1] + first * pair_sin[1]).to(given.dtype)
    if spec.deinterleaves and inside is not None:  # tokens that do not rotate are deinterleaved too
        out_first, out_second = (
            torch.where(inside[:, None, None], out, was.to(given.dtype))
            for out, was in ((out_first, first), (out_second, second))
        )
        inside = None
    middle = [out_first, kept[1], out_second]
    if written:  # reshape, not flatten: torch.autograd.grad(..., is_grads_batched=True) has no rule for that
        middle = [torch.stack((out_first, out_second), -1).reshape(*out_first.shape[:-1], turned), kept[1]]
    pieces = [piece.to(given.dtype) for piece in (kept[0], *middle, kept[2]) if piece is not None]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    return out if inside is None else torch.where(inside[:, None, None], out, given)


def angle_gradient(
    spec: RopeSpec, call: RopeCall, grad: torch.Tensor, key_grad: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, the key, and ``call.cos`` and ``call.sin``, given the gradients of the results.

    ``call`` is the forward's call, ``spec`` the gradient's spec. No operator in here needs autograd.
    """
    turned = dataclasses.replace(spec, angle_gradient=False)
    out, key_out = rotate(turned, dataclasses.replace(call, x=grad, key=key_grad))
    compute = torch.promote_types(call.x.dtype, torch.float32)
    moved = call.x.shape[-2] - spec.copied_heads
    parts = [(call.x[..., :moved, :], grad[..., :moved, :])]
    parts += [] if call.key is None or key_grad is None else [(call.key, key_grad)]
    sums: list[torch.Tensor] = []  # gradients of cosines and sines: of each pair's first feature, then of the second
    for x, over in parts:
        # If the call deinterleaves, the features of a pair are neighbours in x only.
        first, second = (t.to(compute) for t in _pairs(spec, x, neighbours=spec.interleaved or spec.deinterleaves))
        of_first, of_second = (t.to(compute) for t in _pairs(spec, over, neighbours=spec.interleaved))
        own = of_first * first, -of_first * second, of_second * second, of_second * first
        added = [t.sum(-2) for t in own]
        sums = added if not sums else [a + b for a, b in zip(sums, added, strict=True)]
    if spec.angle_entries == "pair":
        cos, sin = sums[0] + sums[2], sums[1] + sums[3]
    elif spec.interleaved:
        cos, sin = (torch.stack((a, b), -1).flatten(-2) for a, b in (sums[::2], sums[1::2]))
    else:
        cos, sin = (torch.cat((a, b), -1) for a, b in (sums[::2], sums[1::2]))
    if spec.scaled:
        cos, sin = cos * call.scaling, sin * call.scaling
    if spec.conjugate:
        sin = -sin
    cos, sin = (  # batch entries first
        t[None] if spec.layout == "thd" else t.transpose(0, 1) if spec.layout == "sbhd" else t for t in (cos, sin)
    )
    rows, inside = positions(spec, call)
    made = [cos, sin]
    if spec.computes_sincos:
        b_cos, b_sin = angles(spec, call, rows)
        made = [b_cos * sin - b_sin * cos]
    if inside is not None:
        made = [torch.where(inside[:, None], t, 0.0) for t in made]
    table, second_table = spread(spec, call, made)
    return out, key_out, table, second_table


def spread(spec: RopeSpec, call: RopeCall, of_tokens: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of ``call.cos`` and ``call.sin`` from the gradients of each token's angles, [batch, seq, entries] each.

    The order of additions is fixed: on a GPU too ``index_put_`` sorts what it adds. Nothing synchronizes with the GPU.
    """
    rows, _ = positions(spec, call)
    of_axes = spec.positions == "axes"
    if of_axes and spec.angle_entries == "feature":
        rows = rows.repeat_interleave(2, -1) if spec.interleaved else torch.cat((rows, rows), -1)
    shared = rows.ndim == (2 if of_axes else 1)  # all batch entries have the positions of one
    if shared and not spec.angles_per_batch:
        of_tokens = [t.sum(0, keepdim=True) for t in of_tokens]
    elif shared:
        rows = rows.expand(call.batch, *rows.shape)
    made = [_spread(spec, call, rows, t) for t in of_tokens]
    return made[0], made[1] if len(made) > 1 else None


def _spread(spec: RopeSpec, call: RopeCall, rows: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
    """``spread`` of one tensor; if it has one batch entry, all batch entries share its positions."""
    if spec.takes_rates:
        places = rows.to(of_tokens.dtype) if spec.positions == "axes" else rows.to(of_tokens.dtype)[..., None]
        return (places * of_tokens).sum((0, 1)).view(call.cos.shape).to(call.cos.dtype)
    table = torch.zeros(call.cos.shape, dtype=of_tokens.dtype, device=of_tokens.device)
    if not table.numel():
        return table.to(call.cos.dtype)
    begin, end = call.offset, call.offset + call.seq
    in_order = spec.positions == "order" and not (spec.packed or spec.context_parallel)
    if in_order and begin >= 0 and end <= call.angle_rows:
        table[..., begin:end, :] = of_tokens if spec.angles_per_batch else of_tokens[0]
        return table.to(call.cos.dtype)
    known = (rows >= 0) & (rows < call.angle_rows)
    index: tuple[torch.Tensor, ...] = (rows.clamp(0, call.angle_rows - 1),)
    values = (
        of_tokens.view(*rows.shape, *of_tokens.shape[2:]) if spec.positions != "axes" else of_tokens.view(rows.shape)
    )
    if spec.positions == "axes":
        index = (*index, torch.arange(rows.shape[-1], device=rows.device))
    if spec.angles_per_batch:
        entry = torch.arange(call.batch, device=rows.device)[:, None]
        index = (entry[..., None] if spec.positions == "axes" else entry, *index)
    values = torch.where(known if spec.positions == "axes" else known[..., None], values, 0.0)
    return table.index_put_(index, values, accumulate=True).to(call.cos.dtype)


def _pairs(spec: RopeSpec, x: torch.Tensor, *, neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second feature of each pair that rotates."""
    begin = spec.head_dim - spec.rotary_dim if spec.rotated == "last" else 0
    if neighbours:
        head = x[..., begin : begin + spec.rotary_dim]
        return head[..., 0::2], head[..., 1::2]
    half, second = spec.rotary_dim // 2, begin + spec.pair_distance
    return x[..., begin : begin + half], x[..., second : second + half]


def norm_gradient(
    spec: RopeSpec, call: RopeCall, grad: torch.Tensor, key_grad: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, the key, and the weights of their norms, given the gradients of the results.

    ``call`` is the forward's call, ``spec`` the gradient's spec. No operator in here needs autograd, which is off
    inside an operator of torch.library. A CUDA graph can capture it.
    """
    compute = torch.promote_types(call.x.dtype, torch.float32)
    turned = dataclasses.replace(spec, norm="", zero_centered=False, rounding="once")
    grads = [None if t is None else t.to(compute) for t in (grad, key_grad)]
    found = rotate(turned, dataclasses.replace(call, x=grads[0], key=grads[1]))  # gradients of the norm's results
    _, inside = positions(spec, call)
    axes = (-2, -1) if spec.norm == "all" else (-1,)
    made: list[Any] = []
    for x, given_grad, z, weight in zip((call.x, call.key), grads, found, (call.weight, call.key_weight), strict=True):
        if x is None or z is None or given_grad is None:
            made += [None, None]
            continue
        used = z if inside is None else torch.where(inside[:, None, None], z, 0.0)
        wide = x.to(compute)
        if inside is not None:  # tokens of no sequence may hold anything: they add nothing to the weights' gradients
            wide = torch.where(inside[:, None, None], wide, 1.0)
        reciprocal = torch.rsqrt((wide * wide).mean(axes, keepdim=True) + call.eps)
        n = wide * reciprocal
        scale = weight.to(compute).view(-1, x.shape[-1])
        y = used * (scale + 1.0 if spec.zero_centered else scale)
        out = reciprocal * (y - n * (y * n).mean(axes, keepdim=True))
        out = out if inside is None else torch.where(inside[:, None, None], out, given_grad)
        of_weight = (used * n).sum(tuple(range(x.ndim - (2 if spec.norm == "all" else 1))))
        made += [out.to(x.dtype), of_weight.reshape(weight.shape).to(weight.dtype)]
    out, weight_grad, key_out, key_weight_grad = made
    return out, key_out, weight_grad, key_weight_grad
