"""RoPE in eager PyTorch for tokens in the order of their angles: what calls of the same properties share is decided once.

``eager`` has the formula of every call, and gives the same results, bit for bit. A small call on a CPU takes as long as
its operators and the Python between them. So shapes are made once, both features of all pairs are multiplied at once,
and results are written where they belong. Autograd cannot follow that: no tensor here may need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import RopeSpec

# (x, key, angles, sin, offset) -> (out, key_out), new tensors. The caller's angles and sin; key and sin may be None.
Rotation = Callable[[Any, Any, Any, Any, int], tuple[torch.Tensor, torch.Tensor | None]]
AnglesOf = Callable[[torch.Tensor, torch.Tensor | None, int], tuple[torch.Tensor, torch.Tensor]]
# Up to so many elements of a 16-bit query and key, a copy of both to one tensor takes less time than operators for
# each. With 32 bits it takes less for some strides only.
JOINED = 2**14


def rotation(  # noqa: PLR0913 - a call, and its tensors as they are given
    spec: RopeSpec, call: RopeCall, tensor_format: str, x: torch.Tensor, key: torch.Tensor | None, angles: torch.Tensor
) -> Rotation | None:
    """The rotation of calls with the properties of this one; None if this module does not serve them.

    ``x`` and ``key`` are the caller's, but a packed qkv must have one axis of heads.
    """
    more = spec.packed or spec.context_parallel or spec.normed or spec.splits or spec.deinterleaves
    if more or spec.positions not in ("order", "shifted"):
        return None
    angles_of = _angles(spec, call, angles)
    if key is not None and _widens(x) and x.numel() + key.numel() <= JOINED:
        return _joined(spec, tensor_format, x, key, angles_of)
    turn = _turn(spec, tensor_format, x)
    turn_key = None if key is None else _turn(spec, tensor_format, key)

    def rotate(x: Any, key: Any, angles: Any, sin: Any, offset: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        cosines, sines = angles_of(angles, sin, offset)
        return turn(x, cosines, sines), None if turn_key is None else turn_key(key, cosines, sines)

    return rotate


def _widens(x: torch.Tensor) -> bool:
    """Whether x has fewer bits than float32, in which it is rotated."""
    return torch.promote_types(x.dtype, torch.float32) != x.dtype


def _joined(spec: RopeSpec, tensor_format: str, x: torch.Tensor, key: torch.Tensor, angles_of: AnglesOf) -> Rotation:
    """The rotation of a small query and key as one tensor of the heads of both."""
    axis = tensor_format.index("h")
    with torch.autocast(
        x.device.type, enabled=False
    ):  # under autocast, cat takes no dtype but autocast's; calls under autocast have no such plan
        turn = _turn(spec, tensor_format, torch.cat((x, key), axis))
    heads = x.shape[axis], key.shape[axis]

    def rotate(x: Any, key: Any, angles: Any, sin: Any, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, key_out = turn(torch.cat((x, key), axis), *angles_of(angles, sin, offset)).split(heads, axis)
        return torch.empty_like(x).copy_(out), torch.empty_like(key).copy_(key_out)

    return rotate


def _angles(spec: RopeSpec, call: RopeCall, angles: torch.Tensor) -> AnglesOf:
    """A function from the caller's angles to cosines and sines with the axes of ``_turn``, or the last of these axes."""
    compute = torch.promote_types(call.x.dtype, torch.float32)
    seq, scaled, scaling = call.seq, spec.scaled, call.scaling
    rates, per_batch, complex_ = spec.angles == "inv_freq", spec.angles_per_batch, angles.is_complex()
    rows_axis = 1 if per_batch else 0
    # Cosines and sines of fewer bits need no cast: the products widen them.
    dtype = call.cos.dtype
    casts = dtype != compute if spec.computes_sincos else torch.promote_types(dtype, compute) != compute
    part = not rates and seq != call.angle_rows
    # Both features of a pair share an entry for the pair. With an entry for each feature, a forward multiplies each
    # feature by the sine of the other one, so sines are flipped; a gradient does not.
    pairs, each = spec.rotary_dim // 2, 2 if spec.angle_entries == "feature" else 1
    flips, axis = each > 1 and spec.direction == "forward", -1 if spec.interleaved else -3
    interleaved = spec.interleaved
    shape = (*((call.batch, 1) if per_batch else ()), *((seq, pairs, each) if interleaved else (each, seq, pairs)))
    fits = each == 1 and not (interleaved or per_batch or part)  # a table that is [seq, pairs]

    def laid(t: torch.Tensor, offset: int) -> torch.Tensor:
        if not fits or t.ndim > 2:  # noqa: PLR2004 - [rows, 1, 1, entries]
            given = t.stride()
            row, step = given[rows_axis], given[-1]
            strides: tuple[int, ...] = (row, each * step, step) if interleaved else (pairs * step, row, step)
            if per_batch:
                strides = (given[0], 0, *strides)
            t = t.as_strided(shape, strides, t.storage_offset() + offset * row)
        return t.to(compute) if casts else t

    def angles_of(angles: torch.Tensor, sin: torch.Tensor | None, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rates:
            positions = torch.arange(offset, offset + seq, device=angles.device)
            angles, offset = positions.float()[:, None] * angles, 0
        elif complex_:
            angles, sin = torch.view_as_real(angles.resolve_conj()).unbind(-1)
        cosines = laid(angles, offset)
        cosines, sines = (torch.cos(cosines), torch.sin(cosines)) if sin is None else (cosines, laid(sin, offset))
        if scaled:
            cosines, sines = cosines * scaling, sines * scaling
        return cosines, sines.flip(axis) if flips else sines

    return angles_of


def _turn(
    spec: RopeSpec, tensor_format: str, x: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function from x, cosines and sines to x with its pairs rotated.

    It uses views [batch, heads, 2, seq, pairs], or [batch, heads, seq, pairs, 2] if interleaved. With the former a
    table [seq, pairs] needs no view. ``as_strided`` makes each view in one operator.
    """
    widens = _widens(x)
    axes = [tensor_format.index(name) for name in "bhs"]
    batch, heads, seq = (x.shape[axis] for axis in axes)
    dim, turned = x.shape[-1], spec.rotary_dim
    begin = dim - turned if spec.rotated == "last" else 0
    distance = dim // 2 if spec.rotated == "proportional" else turned // 2  # of the two features of a pair
    outer = batch, heads - spec.copied_heads, seq
    shape = (*outer, turned // 2, 2) if spec.interleaved else (*outer[:2], 2, seq, turned // 2)
    axis = -1 if spec.interleaved else -3
    make_out = torch.clone if spec.copied_heads or turned != dim else torch.empty_like
    reverses = (spec.direction == "backward") != spec.conjugate

    def strides_of(t: torch.Tensor) -> tuple[int, ...]:
        of_batch, of_heads, of_seq = (t.stride(axis) for axis in axes)
        step = t.stride(-1)
        if spec.interleaved:
            return of_batch, of_heads, of_seq, 2 * step, step
        return of_batch, of_heads, distance * step, of_seq, step

    strides, strides_out = strides_of(x), strides_of(torch.empty_like(x))

    def turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        out = make_out(x)
        rotated, written = (x.narrow(-1, begin, turned), out.narrow(-1, begin, turned)) if begin else (x, out)
        pairs, written = rotated.as_strided(shape, strides), written.as_strided(shape, strides_out)
        if widens:  # ``pairs`` becomes a copy, which may be overwritten
            pairs = pairs.float()  # which is faster than .to()
            product = pairs * cosines
            by_sines = pairs.mul_(sines)
        else:
            product = torch.mul(pairs, cosines, out=written)
            by_sines = pairs * sines
        first, second = product.unbind(axis)
        first_by_sine, second_by_sine = by_sines.unbind(axis)
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
