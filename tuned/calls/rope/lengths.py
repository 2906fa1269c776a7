"""Calls that differ in their lengths alone from one that was served: a plan without checking or compiling it all again.

A decode loop or ragged training brings new lengths all the time. What a class of such calls has in common is kept:
its spec, and for each variant that served it the compiled kernel. A new length then costs the sizes' own checks, the
choice of the variant, and the few numbers of a launch that depend on sizes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tuned.calls.rope.arguments import Settings, Sources, offset_limits, packed_size
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import programs
from tuned.families.rope.spec import RopeSize, RopeSpec, search_steps
from tuned.families.rope.variant import size_class
from tuned.launching.launcher import kernel
from tuned.launching.plan import Bare, remember
from tuned.lookup.gpu import gpu_of
from tuned.lookup.lookup import NearRows, has_rows, near_rows, usable, variant_at

if TYPE_CHECKING:
    from tuned.families.launch import Launch
    from tuned.families.rope.launches import RopeCall
    from tuned.lookup.lookup import Gpu

# The numbers of a launch that depend on lengths, by their names in the kernels.
SIZED = {"seq", "batch", "sequences", "angle_rows", "position_stride_s", "position_stride_b"}
SIZED |= {f"{of}_stride_{axis}" for of in ("x", "out", "key", "key_out") for axis in "sb"}
NARROW = 2**31  # elements: strides of larger tensors may need 64 bits, and other code


class Form(NamedTuple):
    """A compiled kernel of a class, and the numbers of one launch of it."""

    bare: Bare
    numbers: tuple[Any, ...]
    sized: tuple[tuple[int, str], ...]  # which of them depend on lengths: place and name
    constants: tuple[Any, ...]
    search_steps: int  # that it was compiled for


@dataclasses.dataclass(frozen=True)
class Lengths:
    """What the calls of one class have in common."""

    spec: RopeSpec
    settings: Settings
    sources: Sources
    gpu: Gpu
    device: int
    sines: int  # of one cache: how many bytes after its cosines the sines begin
    rows: NearRows  # of the table, for its spec
    forms: dict[Any, Form] = dataclasses.field(default_factory=dict)  # variant -> its kernel
    # (variant, class of sizes) -> whether it may serve
    legal: dict[Any, bool] = dataclasses.field(default_factory=dict)


class Sized(NamedTuple):
    """The launch of one call of a class."""

    spec: RopeSpec
    settings: Settings
    sources: Sources
    variant: Any
    two: bool  # a key is rotated too
    bare: Bare
    device: int
    sines: int
    limits: tuple[int, int]  # the least and the largest offset that is a number of the call
    beside: tuple[int, int, int]  # between which distances of the key from x, in bytes, they overlap


_CLASSES: dict[Any, Lengths] = {}


def class_of(properties: tuple[Any, ...]) -> Any:
    """What of a call's properties does not tell lengths, for contiguous tensors; None for others.

    ``properties`` are those that tuned.calls.rope.call makes.
    """
    (
        settings, source, ordered, unshifted,
        kind, dtype, shape, dense, alignment, device, grad,
        table_kind, table_dtype, table_shape, table_dense, table_alignment, table_device, table_grad,
        key, sin, place, cu_seqlens, *modes,
    ) = properties  # fmt: skip
    if dense is not True or table_dense is not True or len(table_shape) == 3:  # noqa: PLR2004 - tables of a batch's own
        return None
    others: list[Any] = []
    for other in (key, sin, place, cu_seqlens):
        if other is None:
            others.append(None)
            continue
        other_kind, other_dtype, other_shape, other_dense, *rest = other
        if other_dense is not True:
            return None
        others.append((other_kind, other_dtype, len(other_shape), *rest))
    return (
        settings, source, ordered, unshifted, kind, dtype, shape[-2:], len(shape), alignment, device, grad,
        table_kind, table_dtype, len(table_shape), table_shape[-1], table_alignment, table_device, table_grad,
        None if key is None else key[2][-2:], *others, *modes,
    )  # fmt: skip


def learn(  # noqa: PLR0913 - a call that was served, and how
    klass: Any,
    spec: RopeSpec,
    settings: Settings,
    sources: Sources,
    variant: Any,
    call: RopeCall,
    launch: Launch,
    bare: Bare,
) -> None:
    """Keep what a call that a kernel served has in common with those of other lengths, where that is all it takes."""
    gpu = gpu_of(call.x.device)
    if klass is None or sources.copied or settings.kv_heads == 0 or not has_rows(gpu) or os.environ.get("TUNED_RECORD"):
        return  # a packed qkv with an axis of 3 is seen through another shape; the others have more to tell of each call
    if not all(_regular(t) for t in (call.x, call.out, call.key, call.key_out) if t is not None):
        return
    # A table of one row is contiguous whatever that row's stride, which others of its class would be walked by.
    width = call.cos.shape[-1] * (2 if sources.angles == "cos_sin_cache" else 1)
    if spec.angles != "inv_freq" and call.cos.stride(-2) != width:
        return
    known = _CLASSES.get(klass)
    if known is None:
        sines = 0 if spec.takes_sine else call.sin.data_ptr() - call.cos.data_ptr()
        rows = near_rows(ROPE, spec, gpu)
        if rows is None:
            return
        known = Lengths(spec, settings, sources, gpu, call.x.get_device(), sines, rows)
        remember(_CLASSES, klass, known)
    parameters = kernel(launch.kernel).params
    numbers = {
        parameter.name: value
        for parameter, value in zip(parameters, launch.arguments, strict=False)
        if not isinstance(value, torch.Tensor)
    }
    constants = tuple(launch.constants.values())
    places = tuple((place, name) for place, name in enumerate(numbers) if name in SIZED)
    known.forms[variant] = Form(bare, tuple(numbers.values()), places, constants, search_steps(call.sequences))


def _regular(t: torch.Tensor) -> bool:
    """Whether a tensor's strides are of the kind that they are for all lengths: none is 1 for want of a length, or wide.

    In place, a packed qkv is seen without its v: its rows are further apart than its heads are many.
    """
    *lengths, heads, head_dim = t.shape
    row = t.stride(-2) * heads if not lengths else t.stride(len(lengths) - 1)
    step = row
    for axis in reversed(range(len(lengths))):
        if t.stride(axis) != step:
            return False
        step *= lengths[axis]
    return t.stride()[-2:] == (head_dim, 1) and row >= heads * head_dim and row % 16 == 0 and step < NARROW


def sized(  # noqa: PLR0911, PLR0913 - one return a check; the tensors of a call
    klass: Any, x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, place: Any
) -> Sized | None:
    """The launch of a call whose class was seen; None where something is not as in ``prepare``, which then says what."""
    known = _CLASSES.get(klass)
    if known is None:
        return None
    spec, settings = known.spec, known.settings
    shape, rows = x.shape, angles.shape[0]
    if spec.layout == "thd":
        seq, batch = shape[0], 1
    else:
        seq, batch = (shape[1], shape[0]) if spec.layout == "bshd" else (shape[0], shape[1])
    sequences = cu_seqlens.shape[0] - 1 if spec.packed else 0
    if not 0 < x.numel() < NARROW or (sin is not None and sin.shape != angles.shape):
        return None
    if key is not None and (key.shape[:-2] != shape[:-2] or not 0 < key.numel() < NARROW):
        return None
    # What has no elements has no address; bounds have one at least; and one angle alone may be negated when it is read.
    if sequences < 0 or angles.numel() < 2 or (place is not None and not place.numel()):  # noqa: PLR2004
        return None
    steps = _position_strides(spec, place, seq, batch, sequences, shape)
    if steps is None or (spec.context_parallel and not spec.packed and seq % 2):
        return None
    size = packed_size(seq, sequences) if spec.packed else RopeSize(batch, seq)
    variant = variant_at(known.rows, ROPE, size, known.gpu)
    form = known.forms.get(variant)
    if form is None or form.search_steps != search_steps(sequences) or not _legal(known, variant, size):
        return None
    limits = offset_limits(spec, settings, rows, seq)
    if limits[1] < limits[0]:
        return None
    row = shape[-1] * shape[-2]
    key_row = row if key is None else shape[-1] * key.shape[-2]
    per_token, per_batch = {"bshd": (1, seq), "sbhd": (batch, 1), "thd": (1, 0)}[spec.layout]
    new = {
        "seq": seq, "batch": batch, "sequences": sequences, "angle_rows": 1 if spec.angles == "inv_freq" else rows,
        "x_stride_s": per_token * row, "x_stride_b": per_batch * row,
        "out_stride_s": per_token * row, "out_stride_b": per_batch * row,
        "key_stride_s": per_token * key_row, "key_stride_b": per_batch * key_row,
        "key_out_stride_s": per_token * key_row, "key_out_stride_b": per_batch * key_row,
        "position_stride_s": steps[0], "position_stride_b": steps[1],
    }  # fmt: skip
    numbers = list(form.numbers)
    for at, name in form.sized:
        numbers[at] = new[name]
    grid = programs(spec, variant, seq, batch)
    bare = form.bare._replace(programs=grid, rest=(*numbers, *form.constants))
    reach = x.numel() * x.element_size()
    beside = (reach, 0 if key is None else -key.numel() * x.element_size(), reach)
    return Sized(
        spec, settings, known.sources, variant, key is not None, bare, known.device, known.sines, limits, beside
    )


def _legal(known: Lengths, variant: Any, size: RopeSize) -> bool:
    """Whether the variant may serve the size, asked once for all sizes that the rules do not tell apart."""
    key = variant, size_class(known.spec, size)
    found = known.legal.get(key)
    if found is None:
        gpu = known.gpu
        found = known.legal[key] = usable(ROPE, known.spec, size, variant, gpu.capability, gpu.multiprocessors)
    return found


def _position_strides(  # noqa: PLR0913 - the sizes of a call
    spec: RopeSpec, place: Any, seq: int, batch: int, sequences: int, shape: Any
) -> tuple[int, int] | None:
    """Strides of positions as the kernel takes them, seq and batch; None for a shape that is not allowed."""
    if place is None or not place.ndim:
        return 0, 0
    if spec.positions == "starts":
        return (0, 1) if place.shape[0] == (sequences if spec.packed else batch) else None
    if place.ndim == 1:
        return (1, 0) if place.shape[0] == seq else None
    if place.shape != shape[:2]:
        return None
    return (1, seq) if spec.layout == "bshd" else (batch, 1)
