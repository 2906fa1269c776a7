"""Every text of a kernel of RoPE: the product of the text axes; and how a winner is shown."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tuned.families.rope.launches import WEIGHTS, kernel_name
from tuned.families.rope.spec import ANGLES, DIRECTIONS, LAYOUTS, SEARCH_FAN, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.launching.launcher import PROBE_KERNEL
from tuned.lookup.record import RecordError, Winner

from ..text import Shown, Text, finished, head, refusal

ROWS = RopeVariant(whole_rows=True)


def rope_specs() -> Iterator[RopeSpec]:
    """One spec for each combination of text axes. Plain calls: layout, in place, style, angles; complete ones: the last three."""
    axes = list(itertools.product((False, True), STYLES, ANGLES))
    for layout, (inplace, style, angles) in itertools.product(LAYOUTS, axes):
        if angles != "inv_freq":
            yield RopeSpec(layout, "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace)
    for inplace, style, angles in axes:
        yield RopeSpec("bshd", "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace, key_heads=8)


def row_specs() -> Iterator[RopeSpec]:
    """The specs whose tiles may have whole rows: their half rows are no multiples of 16 bytes."""
    for spec in rope_specs():
        if not spec.interleaved:
            yield dataclasses.replace(spec, head_dim=36, rotary_dim=36)


def norm_specs() -> Iterator[RopeSpec]:
    """Specs of rotations with a norm: forward out of place and in place, and the gradient."""
    ways = (("forward", False), ("forward", True), ("backward", False))
    for (direction, inplace), style, angles in itertools.product(ways, STYLES, ANGLES):
        call = RopeSpec("bshd", "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace, key_heads=8)
        yield dataclasses.replace(call, direction=direction, norm="head")


def mla_specs() -> Iterator[RopeSpec]:
    """Specs of MLA: key and value, and their transpose; and a query with deinterleaved pairs, out of place and in place."""
    key = RopeSpec("sbhd", "bfloat16", 128, 192, 64, rotated="last", value_dim=128)
    for direction, style, angles in itertools.product(DIRECTIONS, STYLES, ANGLES):
        yield dataclasses.replace(key, direction=direction, style=style, angles=angles)
    query = dataclasses.replace(key, value_dim=0, deinterleaves=True)
    for inplace, angles in itertools.product((False, True), ANGLES):
        yield dataclasses.replace(query, inplace=inplace, angles=angles)


def angle_gradient_specs() -> Iterator[RopeSpec]:
    """Specs of gradients of the angles."""
    for style, angles in itertools.product(STYLES, ANGLES):
        call = RopeSpec("bshd", "bfloat16", 32, 128, 128, style=style, angles=angles, key_heads=8, direction="backward")
        yield dataclasses.replace(call, angle_gradient=True)


def template(spec: RopeSpec) -> str:
    """The template of a rotation with a norm, a cache, MLA or a gradient of the angles."""
    if spec.angle_gradient:
        return "rope_angle_gradient"
    if spec.splits:
        return "rope_mla_backward" if spec.sums_heads else "rope_mla"
    return "rope_norm_backward" if spec.gradient_of_norm else "rope"


def append_specs() -> Iterator[RopeSpec]:
    """Specs of rotations whose key and value go to a cache, without and with a norm."""
    for norm, style, angles in itertools.product(("", "head"), STYLES, ANGLES):
        call = RopeSpec("thd", "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=True, key_heads=8)
        yield dataclasses.replace(call, norm=norm, cache="same")


def texts() -> Iterator[Text]:
    """The texts of all rotations, and of the table kernel that probes a launcher."""
    for spec in rope_specs():
        yield "rope", kernel_name(spec, RopeVariant()), spec, RopeVariant(), True
    for spec in itertools.chain(norm_specs(), mla_specs(), append_specs(), angle_gradient_specs()):
        yield template(spec), kernel_name(spec, RopeVariant()), spec, RopeVariant(), True
    for spec in row_specs():
        yield "rope", kernel_name(spec, ROWS), spec, ROWS, True
    yield "rope_norm_weights", WEIGHTS, next(norm_specs()), RopeVariant(), True
    yield "rope_table", PROBE_KERNEL, next(rope_specs()), RopeVariant(), True


# How a winner is shown: the caller's arguments and the launches, as Python text.

SHAPES = {"sbhd": "seq, batch", "bshd": "batch, seq", "thd": "tokens"}
DIMS = {"sbhd": "sbhd", "bshd": "bshd", "thd": "shd"}  # a letter for each dimension


def wrapper(winner: Winner, shown: Shown) -> str:
    """The function of a rotation of one tensor, and of its gradient.

    Raises:
        RecordError: the call is a complete one; its kernel's further arguments are not written out.
    """
    spec, variant = winner.spec, winner.variant
    if not spec.plain:
        raise RecordError(f"{winner.name} is a complete RoPE call: show writes out plain ones only")
    backward = spec.direction == "backward"
    name, x = ("rope_backward", "grad") if backward else ("rope", "x")
    given = ["freqs"] if spec.computes_sincos else ["cos", "sin"]
    pairs, kinds = spec.rotary_dim // 2, "float32" if spec.computes_sincos else "float16, bfloat16, float32 or float64"
    what = "x, rotated in place" if spec.inplace else "x, rotated"
    what = "The gradient of x, given that of the result" if backward else what
    takes = (
        f"{x}: {spec.dtype} [{SHAPES[spec.layout]}, {spec.heads}, {spec.head_dim}], any strides."
        f" {' and '.join(given)}: {kinds} [positions, entries]{', in radians' if spec.computes_sincos else ''}."
    )
    entries = f"Of entries there are {pairs}, one a pair of features, or {spec.rotary_dim}, one a feature. Axes of 1 may stand between."
    packed = ["cu_seqlens: int32 [sequences + 1] on the same device, first token of each sequence and the end."]
    lines = [
        *head(
            name,
            [x, *given, *(["cu_seqlens"] if spec.packed else [])],
            f"{what}: {spec.style} pairs of the first {spec.rotary_dim} of {spec.head_dim} features.",
            [takes, entries, *(packed if spec.packed else [])],
        ),
        *refusal(
            f"{x}.dtype != torch.{spec.dtype} or tuple({x}.shape[-2:]) != ({spec.heads}, {spec.head_dim})",
            f"{x} must be {spec.dtype} [..., {spec.heads}, {spec.head_dim}]",
            x,
        ),
    ]
    if spec.packed:
        lines.append(f"    seq, batch, sequences = {x}.shape[0], 1, cu_seqlens.numel() - 1")
        lines.append(f"    steps = 1\n    while {SEARCH_FAN}**steps <= sequences:\n        steps += 1")
    else:
        lines.append(f"    {SHAPES[spec.layout]} = {x}.shape[:2]")
    first = given[0]
    few, rows = ("", "") if spec.packed else (f" or {first}.shape[0] < seq", ", a row a position")
    wrong = " and ".join(f"{first}.dtype != torch.{kind}" for kind in kinds.replace(" or ", ", ").split(", "))
    lines += refusal(f"({wrong}){few}", f"{first} must be {kinds}{rows}", first)
    if not spec.computes_sincos:
        lines += refusal("sin.shape != cos.shape or sin.dtype != cos.dtype", "sin must be as cos", "sin")
    lines += refusal(
        f"{first}.shape[-1] not in ({pairs}, {spec.rotary_dim}) or {first}.numel() != {first}.shape[0] * {first}.shape[-1]",
        f"{first} must be [positions, {pairs}] or [positions, {spec.rotary_dim}]",
        first,
    )
    lines += [f"    {angle} = {angle}.reshape({angle}.shape[0], {angle}.shape[-1])" for angle in given]
    lines.append(f"    out = {x}" if spec.inplace else f"    out = torch.empty_like({x})")
    lines.append(f"    if not {x}.numel():\n        return out")
    if not spec.computes_sincos:  # cos and sin share their strides
        lines.append("    if sin.stride() != cos.stride():\n        cos, sin = cos.contiguous(), sin.contiguous()")
    heads = f"{spec.heads} * batch" if spec.merges_batch else str(spec.heads)
    grid = f"triton.cdiv(seq, {variant.block_tokens}) * triton.cdiv({heads}, {variant.block_heads})"
    grid += "" if spec.merges_batch or spec.packed else " * batch"
    dims = {"x": DIMS[spec.layout], "out": DIMS[spec.layout], "angle": "sd"}
    names = {"x": x, "angle": given[0], "angle_rows": f"{given[0]}.shape[0]", "stride_d": f"{x}.stride(-1)"}
    options = [f"PER_FEATURE={first}.shape[1] == {spec.rotary_dim}", *(["SEARCH_STEPS=steps"] if spec.packed else [])]
    of_rows = f"(*{x}.stride()[:-1], *out.stride()[:-1])"
    for name, strides in (("MULTIPLE", of_rows), ("ANGLE_MULTIPLE", f"{first}.stride()[:1]")):
        # A number that divides the problem's strides need not divide a caller's.
        if (multiple := shown.launch.constants[name]) > 1:
            lines.append(f"    {name.lower()} = 1 if any(s % {multiple} for s in {strides}) else {multiple}")
            options.append(f"{name}={name.lower()}")
    call = shown.text(grid, dims, names, options=", ".join(options))
    return finished(lines, call, x, pdl=variant.pdl)


def group(spec: RopeSpec) -> str:
    """The group of GROUPS that a call belongs to."""
    return "in place" if spec.inplace else spec.direction
