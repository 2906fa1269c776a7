"""RoPE in float64 from its definition, over whole tensors on any device, and the error that each element may have.

It shares no code with tuned, nor with the NumPy oracle, against which it is tested.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

# Bits of the significand, with the implicit bit, and the exponent of the smallest subnormal number.
PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
SWAPPED = {"sbhd": (0, 1), "bhsd": (1, 2)}  # axes in another order than [batch, seq, heads, head_dim]
SMALLEST_EXPONENT = {torch.float64: -1074, torch.float32: -149, torch.float16: -24, torch.bfloat16: -133}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The arguments of a call that are no tensors."""

    layout: str = "bshd"
    interleaved: bool = False
    entries: str = "pair"
    rotated: str = "first"
    conjugate: bool = False
    transposed: bool = False
    scaling: float = 1.0
    cp_size: int = 1
    cp_rank: int = 0
    offset: int = 0
    copied: int = 0  # heads at the end, which belong to v
    sections: tuple[int, ...] = ()  # pairs of each axis of positions
    in_turn: bool = False  # 0 1 2 0 1 2 instead of in a row


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of each value in ``dtype``; for zeros and NaN the unit of the smallest number."""
    _, exponent = torch.frexp(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return torch.ldexp(
        torch.ones_like(values), (exponent - PRECISION[dtype]).clamp(min=SMALLEST_EXPONENT[dtype]).double()
    )


def positions(
    call: Rope, seq: int, batch: int, tensors: dict[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions, [batch, seq], and which tokens a sequence holds, [seq], or None for all."""
    given = tensors.get("positions")
    if given is not None:
        rows = given.long()
        if rows.ndim == 1:
            return rows.expand(batch, seq), None
        return (rows if call.layout in ("bshd", "bhsd") else rows.t()), None
    token = torch.arange(seq, device=device)
    held, place, sequence = None, token, torch.zeros_like(token)
    length = torch.full_like(token, seq)
    bounds = tensors.get("cu_seqlens")
    if bounds is not None:
        bounds = bounds.long() // call.cp_size
        held = (token >= bounds[0]) & (token < bounds[-1])
        sequence = (torch.bucketize(token, bounds, right=True) - 1).clamp(0, max(len(bounds) - 2, 0))
        place = token - bounds[sequence]
        if len(bounds) > 1:
            length = (bounds[1:] - bounds[:-1])[sequence]
    if call.cp_size > 1:
        chunk = length // 2
        later = (2 * call.cp_size - 1 - call.cp_rank) * chunk + place - chunk
        place = torch.where(place < chunk, call.cp_rank * chunk + place, later)
    starts = tensors.get("starts")
    out = (place + call.offset).expand(batch, seq)
    if starts is not None and starts.ndim == 0:
        out = out + starts.long()
    elif starts is not None and starts.numel():
        out = out + (starts.long()[sequence][None] if bounds is not None else starts.long()[:, None])
    return out, held


def angles(tensors: dict[str, torch.Tensor], where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, [batch, seq, entries] in float64; NaN at positions for which a table has no row."""
    if "inv_freq" in tensors:
        # Rounded to float32 once; in the reference too, although its other tensors are float64.
        radians = (where.float()[..., None] * tensors["inv_freq"].float()).double()
        return radians.cos(), radians.sin()
    if "freqs" in tensors:
        table = tensors["freqs"].double()
        table = table.reshape(table.shape[0], table.shape[-1])
        both = [table.cos(), table.sin()]
    elif "cos_sin_cache" in tensors:
        both = list(tensors["cos_sin_cache"].double().chunk(2, -1))
    else:
        both = [tensors[name].double() for name in ("cos", "sin")]
        both = [t if t.ndim < 4 else t.reshape(t.shape[0], t.shape[-1]) for t in both]
    rows = both[0].shape[-2]
    known = (where >= 0) & (where < rows)
    found = []
    for table in both:
        if not rows:
            out = torch.full((*where.shape, table.shape[-1]), torch.nan, dtype=torch.float64, device=where.device)
        elif table.ndim > 2:
            entry = torch.arange(len(where), device=where.device)[:, None]
            out = table[entry, where.clamp(0, rows - 1)]
        else:
            out = table[where.clamp(0, rows - 1)]
        found.append(torch.where(known[..., None], out, torch.nan))
    return found[0], found[1]


def angles_of_axes(
    call: Rope, seq: int, batch: int, tensors: dict[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of positions with axes: all angles are computed for each axis, and each pair takes those of one axis."""
    each = []
    for given in tensors["positions"]:
        one = tensors | {"positions": given}
        each.append(angles(one, positions(call, seq, batch, one, device)[0]))
    entries, pairs = each[0][0].shape[-1], sum(call.sections)
    if call.in_turn:
        left = list(call.sections)
        axis_of = []
        for j in range(pairs):
            axis = j % 3 if left[j % 3] and j % 3 else 0
            left[axis] -= 1
            axis_of.append(axis)
    else:
        axis_of = [axis for axis, count in enumerate(call.sections) for _ in range(count)]
    pair_of = list(range(entries))
    if call.entries == "feature":
        pair_of = [e // 2 if call.interleaved else e % pairs for e in range(entries)]
    axis_of_entry = indices(tuple(axis_of[pair_of[e]] for e in range(entries)), device)
    found = [torch.stack(part) for part in zip(*each, strict=True)]  # [axes, batch, seq, entries]
    cos, sin = (part.gather(0, axis_of_entry.expand(1, *part.shape[1:]))[0] for part in found)
    return cos, sin


def held(tensors: dict[str, Any]) -> slice:
    """The tokens that belong to a sequence."""
    bounds = tensors.get("cu_seqlens")
    if bounds is None:
        return slice(None)
    first, *_, last = bounds.tolist()  # asks a GPU only once
    return slice(first, last)


def canonical(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, seq, heads, head_dim], a view."""
    if layout == "thd":
        return x[None]
    return x if layout == "bshd" else x.transpose(*SWAPPED[layout])


@functools.lru_cache(maxsize=1024)
def indices(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers as an index of a tensor. A list would be copied to a GPU at each use, which waits for the GPU."""
    with torch.inference_mode(mode=False):  # the gradient of a later call may keep the index
        return torch.tensor(numbers, device=device)


def pairs(
    call: Rope, head_dim: int, rotary: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two features of each pair, and its two entries where each feature has one."""
    first, second, one, two = _pairs(call, head_dim, rotary)
    return tuple(indices(tuple(each), device) for each in (first, second, one, two))  # type: ignore[return-value]


def _pairs(call: Rope, head_dim: int, rotary: int) -> tuple[list[int], list[int], list[int], list[int]]:
    half = rotary // 2
    if call.interleaved:
        one, two = list(range(0, rotary, 2)), list(range(1, rotary, 2))
    else:
        one, two = list(range(half)), list(range(half, rotary))
    if call.rotated == "proportional":
        return list(range(half)), [head_dim // 2 + j for j in range(half)], one, two
    first = head_dim - rotary if call.rotated == "last" else 0
    return [first + j for j in one], [first + j for j in two], one, two


def rope(
    call: Rope, x: torch.Tensor, tensors: dict[str, torch.Tensor], *, truncates: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for x, shaped like it, and the largest right error of each element: 0 where it is only copied.

    ``tensors``: the angles by their names in ``tuned.dispatch.rope``; cu_seqlens, positions; starts, a tensor offset.

    In float32 a result is first * cos - second * sin or its like. Each product may be off by 2 units in the last place of
    its sine or cosine, by its own rounding and by that of the sum, together 4 u of the operands; a factor is one rounding
    more. The store then rounds once. float64, by PyTorch's operators, is computed in float64.
    """
    whole = canonical(x, call.layout).double()
    moved = whole.shape[2] - call.copied
    batch, seq = whole.shape[:2]
    if call.sections:
        held = None
        cos, sin = angles_of_axes(call, seq, batch, tensors, x.device)
    else:
        where, held = positions(call, seq, batch, tensors, x.device)
        cos, sin = angles(tensors, where)
    if call.scaling != 1.0:
        cos, sin = cos * call.scaling, sin * call.scaling
    if call.conjugate:
        sin = -sin
    out, bound = whole.clone(), torch.zeros_like(whole)
    rotary = cos.shape[-1] * (1 if call.entries == "feature" else 2)
    a, b, one, two = pairs(call, whole.shape[-1], rotary, x.device)
    if call.entries == "feature":
        cos_a, cos_b, sin_a, sin_b = (
            t[:, :, None] for t in (cos[..., one], cos[..., two], sin[..., one], sin[..., two])
        )
    else:
        cos_a = cos_b = cos[:, :, None]
        sin_a = sin_b = sin[:, :, None]
    if call.transposed:
        sin_a, sin_b = -sin_b, -sin_a
    first, second = whole[:, :, :moved, a], whole[:, :, :moved, b]
    new = first * cos_a - second * sin_a, second * cos_b + first * sin_b
    u = 2.0**-53 if x.dtype == torch.float64 else 2.0**-24
    roundings = (4 if call.scaling == 1.0 else 5) * u
    grown = max(1.0, abs(call.scaling))
    error = [
        roundings * (own.abs() * c.abs().clamp(min=grown) + other.abs() * s.abs().clamp(min=grown))
        for own, other, c, s in ((first, second, cos_a, sin_a), (second, first, cos_b, sin_b))
    ]
    for features, value, arithmetic in zip((a, b), new, error, strict=True):
        stored = ulp(value.abs() + arithmetic, x.dtype) * (1.0 if truncates else 0.5)
        right = arithmetic.nan_to_num(nan=0.0) + stored
        if held is not None:
            keep = held[None, :, None, None]
            out[:, :, :moved, features] = torch.where(keep, value, whole[:, :, :moved, features])
            bound[:, :, :moved, features] = torch.where(keep, right, 0.0)
        else:
            out[:, :, :moved, features], bound[:, :, :moved, features] = value, right

    def back(t: torch.Tensor) -> torch.Tensor:
        return t[0] if call.layout == "thd" else canonical(t, call.layout)  # it is its own inverse

    return back(out), back(bound)


def wrong(got: Any, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Which elements are further off than allowed; NaN must occur exactly where it is wanted."""
    got = got.double()
    near = (got - want).abs() <= bound
    return ~torch.where(want.isnan(), got.isnan(), near | (got == want))
