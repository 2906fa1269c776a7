"""Plans for calls that differ only in their lengths from a call that a kernel served: no full check, no compilation.

Decode loops and ragged training bring new lengths all the time. What the calls of one shape class have in common is kept:
the spec and, for each variant that served the class, the compiled kernel. A new length then costs the checks of its sizes,
the choice of a variant, and the few launch arguments that depend on lengths.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, NamedTuple

import torch

from tuned.calls.rope.arguments import Settings, Sources, offset_limits, packed_size, tokens_of
from tuned.families.launch import Launch
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import LAYOUTS, RopeSize, RopeSpec, search_steps
from tuned.families.rope.variant import programs, size_class
from tuned.launching.launcher import kernel
from tuned.launching.plan import DirectLaunch, kind_of, remember
from tuned.lookup.gpu import gpu_of
from tuned.lookup.lookup import Gpu, NearRows, has_rows, near_rows, usable, variant_at

# The kernel parameters whose values depend on lengths.
LENGTH_PARAMETERS = (
    {"seq", "batch", "sequences", "angle_rows"}
    | {f"{of}_stride_{axis}" for of in ("x", "out", "key", "key_out", "position") for axis in "sb"}
    | {"cp_size"}
)  # cp_size: in calls of positions with axes this parameter is the stride of an axis
NARROW = 2**31  # elements: strides of larger tensors may need 64 bits, for which Triton compiles other code


class CompiledLaunch(NamedTuple):
    """A compiled kernel of a shape class, and the integer arguments of one launch of it."""

    direct: DirectLaunch
    numbers: tuple[Any, ...]
    length_indices: tuple[tuple[int, str], ...]  # (index into numbers, parameter) of those that depend on lengths
    constants: tuple[Any, ...]
    search_steps: int  # the constexpr that it was compiled with; it follows from the number of sequences


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """What calls that differ only in their lengths have in common."""

    spec: RopeSpec
    settings: Settings
    sources: Sources
    gpu: Gpu
    sines: int  # with a cos_sin_cache: bytes from its first cosine to its first sine
    rows: NearRows  # of the dispatch table, for the spec
    launches: dict[Any, CompiledLaunch] = dataclasses.field(default_factory=dict)  # by variant
    # (variant, size class) -> whether the variant may serve it
    legal: dict[Any, bool] = dataclasses.field(default_factory=dict)


class SizedLaunch(NamedTuple):
    """The launch of one call of a shape class."""

    known: ShapeClass
    variant: Any
    direct: DirectLaunch
    limits: tuple[int, int]  # the smallest and the largest int offset that the call allows
    beside: tuple[int, int, int]  # as tuned.calls.rope.plan.beside


_CLASSES: dict[Any, ShapeClass] = {}


# The tensors that the first entries of a call's key stand for (tuned.calls.rope.call), in order; and how many of a
# tensor's last axes are not lengths. An entry is None, or (type, dtype, shape, True if contiguous else the strides,
# alignment, device, whether it needs a gradient).
TENSORS = {"x": 2, "angles": 1, "key": 2, "sin": 0, "positions": 0, "cu_seqlens": 0}


def class_of(properties: tuple[Any, ...]) -> Any:
    """The key of a call's shape class: its properties without the lengths. None unless all tensors are contiguous."""
    if len(properties[1][2]) == 3:  # noqa: PLR2004 - a table for each sequence
        return None
    found: list[Any] = []
    for traits, kept in zip(properties, TENSORS.values(), strict=False):
        if traits is None:
            found.append(None)
            continue
        kind, dtype, shape, dense, *rest = traits
        if dense is not True:
            return None
        axes = len(shape)
        found.append((kind, dtype, axes, shape[axes - kept :], *rest))
    return (*found, *properties[len(TENSORS) :])


def learn(  # noqa: PLR0913 - a call and how it was served
    class_key: Any,
    spec: RopeSpec,
    settings: Settings,
    sources: Sources,
    variant: Any,
    call: RopeCall,
    launch: Launch,
    direct: DirectLaunch,
    sines: int,
) -> None:
    """Remember a served call for calls of other lengths, if nothing but the lengths can differ between their launches."""
    gpu = gpu_of(call.x.device)
    if (
        class_key is None
        or sources.copied
        or settings.kv_heads == 0
        or settings.tensor_format not in LAYOUTS
        or sources.angles == "freqs_cis"
        or not has_rows(gpu)
        or os.environ.get("TUNED_RECORD")
    ):
        return  # kv_heads=0 and bhsd launch on a view of another shape; complex angles may be conjugated; the last two need the full choice for each call
    regular = all(_regular(t) for t in (call.x, call.out, call.key, call.key_out) if t is not None)
    # A table of one row counts as contiguous whatever its row stride; other calls of the class would use that stride.
    width = call.cos.shape[-1] * (2 if sources.angles == "cos_sin_cache" else 1)
    if not regular or (spec.angles != "inv_freq" and call.cos.stride(-2) != width):
        return
    known = _CLASSES.get(class_key)
    if known is None:
        rows = near_rows(ROPE, spec, gpu)
        if rows is None:
            return
        known = ShapeClass(spec, settings, sources, gpu, sines, rows)
        remember(_CLASSES, class_key, known)
    numbers = {
        parameter.name: value
        for parameter, value in zip(kernel(launch.kernel).params, launch.arguments, strict=False)
        if not isinstance(value, torch.Tensor)
    }
    known.launches[variant] = CompiledLaunch(
        direct=direct,
        numbers=tuple(numbers.values()),
        length_indices=tuple((index, name) for index, name in enumerate(numbers) if name in LENGTH_PARAMETERS),
        constants=tuple(launch.constants.values()),
        search_steps=search_steps(call.sequences),
    )


def _regular(t: torch.Tensor) -> bool:
    """Whether Triton specialises on a tensor's strides as it would for any length: no stride is 1 by chance or too wide.

    Rows may be further apart than their heads are wide: in place, a packed qkv is passed without its v.
    """
    *lengths, heads, head_dim = t.shape
    row = t.stride(-2) * heads if not lengths else t.stride(len(lengths) - 1)
    step = row
    for axis in reversed(range(len(lengths))):
        if t.stride(axis) != step:
            return False
        step *= lengths[axis]
    # One token counts as contiguous whatever its row stride; other calls of the class have rows as wide as their heads.
    wide = kind_of(16) == kind_of(row) == kind_of(step) == kind_of(heads * head_dim)
    return wide and t.stride()[-2:] == (head_dim, 1) and row >= heads * head_dim


def sized(  # noqa: PLR0913 - one return per check; the tensors of a call
    class_key: Any, x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, positions: Any
) -> SizedLaunch | None:
    """The launch of a call whose shape class is known.

    None if ``prepare`` must look at the call: it may be refused there, with the reason.
    """
    known = _CLASSES.get(class_key)
    if known is None:
        return None
    spec, shape, rows = known.spec, x.shape, angles.shape[0]
    seq, batch = tokens_of(spec.layout, x)
    sequences = cu_seqlens.shape[0] - 1 if spec.packed else 0
    steps = _position_strides(spec, positions, seq, batch, sequences, shape)
    # An empty tensor has no address, cu_seqlens has at least one entry, and a single angle may be a lazily negated view.
    if (
        not 0 < x.numel() < NARROW
        or (spec.splits and x.numel() // spec.split_dims[0] * max(spec.split_dims) >= NARROW)
        or (key is not None and (key.shape[:-2] != shape[:-2] or not 0 < key.numel() < NARROW))
        or angles.numel() < 2  # noqa: PLR2004
        or (angles.ndim > 1 and angles.numel() != rows * angles.shape[-1])
        or (sin is not None and sin.shape != angles.shape)
        or sequences < 0
        or (positions is not None and not positions.numel())
        or (spec.context_parallel and not spec.packed and seq % 2)
        or steps is None
    ):
        return None
    size = packed_size(seq, sequences) if spec.packed else RopeSize(batch, seq)
    variant = variant_at(known.rows, ROPE, spec, size, known.gpu)
    compiled = known.launches.get(variant)
    if compiled is None or compiled.search_steps != search_steps(sequences) or not _legal(known, variant, size):
        return None
    limits = offset_limits(spec, known.settings, rows, seq)
    if limits[1] < limits[0]:
        return None
    row = shape[-1] * shape[-2]
    key_row = row if key is None else key.shape[-1] * key.shape[-2]
    out_row, key_out_row = row, key_row
    if spec.splits:
        out_row, key_out_row = (math.prod(made[-2:]) for made in spec.split_shapes(tuple(shape)))
    per_token, per_batch = {"bshd": (1, seq), "sbhd": (batch, 1), "thd": (1, 0)}[spec.layout]
    new = {
        "seq": seq, "batch": batch, "sequences": sequences, "angle_rows": 1 if spec.angles == "inv_freq" else rows,
        "x_stride_s": per_token * row, "x_stride_b": per_batch * row,
        "out_stride_s": per_token * out_row, "out_stride_b": per_batch * out_row,
        "key_stride_s": per_token * key_row, "key_stride_b": per_batch * key_row,
        "key_out_stride_s": per_token * key_out_row, "key_out_stride_b": per_batch * key_out_row,
        "position_stride_s": steps[0], "position_stride_b": steps[1],
        "cp_size": positions.stride(0) if spec.positions == "axes" else known.settings.cp_size,
    }  # fmt: skip
    numbers = list(compiled.numbers)
    for index, name in compiled.length_indices:
        numbers[index] = new[name]
    rest = (*numbers, *compiled.constants)
    direct = compiled.direct._replace(programs=programs(spec, variant, seq, batch), rest=rest)
    reach = x.numel() * x.element_size()
    beside = (reach, 0 if key is None else -key.numel() * x.element_size(), reach)
    return SizedLaunch(known, variant, direct, limits, beside)


def _legal(known: ShapeClass, variant: Any, size: RopeSize) -> bool:
    """Whether the variant may serve the size; decided once per size class, since the rules see nothing finer."""
    key = variant, size_class(known.spec, size)
    found = known.legal.get(key)
    if found is None:
        gpu = known.gpu
        found = known.legal[key] = usable(ROPE, known.spec, size, variant, gpu.capability, gpu.multiprocessors)
    return found


def _position_strides(  # noqa: PLR0913 - the sizes of a call
    spec: RopeSpec, positions: Any, seq: int, batch: int, sequences: int, shape: Any
) -> tuple[int, int] | None:
    """Strides of positions in elements as the kernel takes them, (seq, batch); None if the shape is not allowed."""
    if positions is None or not positions.ndim:
        return 0, 0
    given = tuple(positions.shape)
    if spec.positions == "starts":
        return (0, 1) if given[0] == (sequences if spec.packed else batch) else None
    if spec.positions == "axes":
        if given[0] != len(spec.sections):
            return None
        given = given[1:]
    if given == (seq,):
        return 1, 0
    if given != tuple(shape[: len(given)]) or len(given) != 2:  # noqa: PLR2004 - tokens on two axes
        return None
    return (1, seq) if spec.layout == "bshd" else (batch, 1)
