"""RoPE in eager PyTorch for tokens in the order of their angles: what calls of the same properties share is decided once.

``eager`` has the formula of every call, and its results are these, bit for bit. A small call on a CPU takes as long as its
operators and the Python between them. So shapes are made once, both features of all pairs are multiplied at once, and
results are written where they belong. That is no way to make an autograd graph: no tensor here may need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import RopeSpec

# (x, key, angles, sin, offset) -> (out, key_out), new tensors; angles and sin as they are given, key and sin maybe None.
Rotation = Callable[[Any, Any, Any, Any, int], tuple[torch.Tensor, torch.Tensor | None]]


def rotation(  # noqa: PLR0913 - a call, and its tensors as they are given
    spec: RopeSpec, call: RopeCall, tensor_format: str, x: torch.Tensor, key: torch.Tensor | None, angles: torch.Tensor
) -> Rotation | None:
    """The rotation of calls with the properties of this one, of x and key as they are given; None if it is not for them.

    x of a packed qkv has one axis of heads.
    """
    more = spec.packed or spec.context_parallel or spec.normed or spec.splits or spec.deinterleaves
    if more or spec.positions not in ("order", "shifted"):
        return None
    angles_of = _angles(spec, call, tensor_format, angles)
    turn = _turn(spec, x)
    turn_key = None if key is None else _turn(spec, key)

    def rotate(x: Any, key: Any, angles: Any, sin: Any, offset: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        cosines, sines = angles_of(angles, sin, offset)
        return turn(x, cosines, sines), None if turn_key is None else turn_key(key, cosines, sines)

    return rotate


def _angles(
    spec: RopeSpec, call: RopeCall, tensor_format: str, angles: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor | None, int], tuple[torch.Tensor, torch.Tensor]]:
    """From the angles as they are given to cosines and sines with the axes of x, whose last two are those of ``_turn``."""
    compute = torch.promote_types(call.x.dtype, torch.float32)
    seq, scaled, scaling = call.seq, spec.scaled, call.scaling
    rates, per_batch = spec.angles == "inv_freq", spec.angles_per_batch
    complex_, rows_axis = angles.is_complex(), 1 if per_batch else 0
    # Cosines and sines of fewer bits are widened by the products.
    dtype = call.cos.dtype
    casts = dtype != compute if spec.computes_sincos else torch.promote_types(dtype, compute) != compute
    part = not rates and seq != call.angle_rows
    # Entries of pairs are shared by both features; a gradient or its conjugate takes each pair's sines the other way round.
    pairs, each = spec.rotary_dim // 2, 2 if spec.angle_entries == "feature" else 1
    entries = (pairs, each) if spec.interleaved else (each, pairs)
    flips, axis = each > 1 and spec.direction == "forward", -1 if spec.interleaved else -2
    batch = (call.batch,) if per_batch else ()
    swaps = per_batch and tensor_format == "sbhd"
    tokens = {
        "bshd": (*batch, seq, 1),
        "sbhd": (seq, *(batch or (1,)), 1),
        "bhsd": (*batch, *((1,) if per_batch else ()), seq),
    }[tensor_format]
    shape = (*tokens, *entries)

    def angles_of(angles: torch.Tensor, sin: torch.Tensor | None, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rates:
            positions = torch.arange(offset, offset + seq, device=angles.device)
            angles = positions.float()[:, None] * angles
        elif complex_:
            parts = torch.view_as_real(angles.resolve_conj())
            angles, sin = parts.select(-1, 0), parts.select(-1, 1)
        if part:
            angles = angles.narrow(rows_axis, offset, seq)
            sin = None if sin is None else sin.narrow(rows_axis, offset, seq)
        if casts:
            angles = angles.to(compute)
            sin = None if sin is None else sin.to(compute)
        cosines, sines = (torch.cos(angles), torch.sin(angles)) if sin is None else (angles, sin)
        if scaled:
            cosines, sines = cosines * scaling, sines * scaling
        if swaps:
            cosines, sines = cosines.transpose(0, 1), sines.transpose(0, 1)
        sines = sines.view(shape)
        return cosines.view(shape), sines.flip(axis) if flips else sines

    return angles_of


def _turn(spec: RopeSpec, x: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """From x, cosines and sines to x with its pairs rotated, by views [*tokens, heads, 2, pairs], or [..., pairs, 2]."""
    widens = torch.promote_types(x.dtype, torch.float32) != x.dtype  # to float32
    *outer, dim = x.shape
    turned, half = spec.rotary_dim, spec.rotary_dim // 2
    if spec.copied_heads:
        outer[-1] -= spec.copied_heads
    moved = outer[-1]
    narrows = turned != dim and spec.rotated != "proportional"
    begin = dim - turned if spec.rotated == "last" else 0
    distance = half if narrows else dim // 2  # of the two features of a pair
    shape = (*outer, distance, 2) if spec.interleaved else (*outer, 2, distance)
    axis = -1 if spec.interleaved else -2
    copies, some = bool(spec.copied_heads), distance != half
    make_out = torch.clone if copies or turned != dim else torch.empty_like
    reverses = (spec.direction == "backward") != spec.conjugate

    def pairs_of(t: torch.Tensor) -> torch.Tensor:
        if copies:
            t = t.narrow(-2, 0, moved)
        if narrows:
            t = t.narrow(-1, begin, turned)
        t = t.view(shape)
        return t.narrow(-1, 0, half) if some else t

    def turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        pairs, out = pairs_of(x), make_out(x)
        written = pairs_of(out)
        if widens:
            pairs = pairs.float()  # which is faster than .to()
            product = pairs * cosines
        else:
            product = torch.mul(pairs, cosines, out=written)
        first, second = product.unbind(axis)
        first_by_sine, second_by_sine = (pairs * sines).unbind(axis)
        if reverses:
            first.add_(second_by_sine)
            second.sub_(first_by_sine)
        else:
            first.sub_(second_by_sine)
            second.add_(first_by_sine)
        if widens:
            written.copy_(product)
        return out

    return turn
