"""The function of a shown rotation: what a caller gives, and the launch, as Python text."""

from __future__ import annotations

from tuned.families.launch import Launch
from tuned.families.rope.spec import SEARCH_FAN, RopeSpec
from tuned.lookup.record import Winner

from ..text import launch_text


def wrapper(winner: Winner, launches: tuple[Launch, ...]) -> str:
    """The function of a rotation of one tensor, and of its gradient."""
    spec, variant = winner.spec, winner.variant
    rotate = launches[-1]
    backward = spec.direction == "backward"
    name, x = ("rope_backward", "grad") if backward else ("rope", "x")
    given = ["freqs"] if spec.computes_sincos else ["cos", "sin"]
    shape = {"sbhd": "seq, batch", "bshd": "batch, seq", "thd": "tokens"}[spec.layout]
    width = spec.rotary_dim if spec.angle_entries == "feature" else spec.rotary_dim // 2
    parameters = [x, *given, *(["cu_seqlens"] if spec.packed else [])]
    what = (
        "The gradient of x, given that of the result"
        if backward
        else ("x, rotated in place" if spec.inplace else "x, rotated")
    )
    takes = (
        f"    {x}: {spec.dtype} [{shape}, {spec.heads}, {spec.head_dim}], any strides."
        f" {' and '.join(given)}: {spec.angle_dtype} [positions, {width}]"
        f"{', in radians' if spec.computes_sincos else ''}."
    )
    lines = [
        f"def {name}({', '.join(parameters)}):",
        f'    """{what}: {spec.style} pairs of the first {spec.rotary_dim} of {spec.head_dim} features. No autograd.',
        "",
        takes,
    ]
    if spec.packed:
        lines.append(
            "    cu_seqlens: int32 [sequences + 1] on the same device, first token of each sequence and the end."
        )
    lines += [
        '    """',
        f"    if {x}.dtype != torch.{spec.dtype} or tuple({x}.shape[-2:]) != ({spec.heads}, {spec.head_dim}):",
    ]
    lines.append(
        f'        raise ValueError(f"{x} must be {spec.dtype} [..., {spec.heads}, {spec.head_dim}], '
        f'got {{{x}.dtype}} {{tuple({x}.shape)}}")'
    )
    if not spec.packed:
        lines.append(f"    {shape} = {x}.shape[:2]")
    else:
        lines.append(f"    seq, batch, sequences = {x}.shape[0], 1, cu_seqlens.numel() - 1")
        lines.append(f"    steps = 1\n    while {SEARCH_FAN}**steps <= sequences:\n        steps += 1")
    for angle in given:
        lines.append(f"    {angle} = {angle}.reshape({angle}.shape[0], {width})")
        checked = f"{angle}.dtype != torch.{spec.angle_dtype}"
        checked += "" if spec.packed else f" or {angle}.shape[0] < seq"
        lines.append(f"    if {checked}:")
        least = "" if spec.packed else ", a row a position"
        lines.append(
            f'        raise ValueError(f"{angle} must be {spec.angle_dtype}{least}, got {{{angle}.dtype}} {{tuple({angle}.shape)}}")'
        )
    lines.append(f"    out = {x}" if spec.inplace else f"    out = torch.empty_like({x})")
    lines.append(f"    if not {x}.numel():\n        return out")
    if variant.pdl:
        lines.append(f"    dependent = {x}.is_cuda and torch.version.hip is None")
    strides = [f"{given[0]}.stride(0)", f"{given[0]}.stride(1)", *(["sequences"] if spec.packed else [])]
    if len(given) == 2:  # noqa: PLR2004 - cos and sin share their strides
        lines.append("    if sin.stride() != cos.stride():\n        cos, sin = cos.contiguous(), sin.contiguous()")
    arguments = [x, *([] if spec.inplace else ["out"]), *given]
    if spec.packed:
        arguments += ["cu_seqlens"]
    arguments += [
        "seq",
        "batch",
        f"{given[0]}.shape[0]",
        *_strides(spec.layout, x),
        *([] if spec.inplace else _strides(spec.layout, "out")),
    ]
    heads = f"{spec.heads} * batch" if spec.merges_batch else str(spec.heads)
    grid = f"triton.cdiv(seq, {variant.block_tokens}) * triton.cdiv({heads}, {variant.block_heads})"
    grid += "" if spec.merges_batch or spec.packed else " * batch"
    searched = ["SEARCH_STEPS=steps"] if spec.packed else []
    body = launch_text(rotate, grid, [*arguments, *strides, *searched], " " * 8)
    return "\n".join(lines) + f"\n    with torch.cuda.device_of({x}):\n{body}    return out\n"


def _strides(layout: str, tensor: str) -> list[str]:
    """Strides in the order seq, batch, heads, head_dim."""
    order = {"sbhd": (0, 1, 2, 3), "bshd": (1, 0, 2, 3), "thd": (0, None, 1, 2)}[layout]
    return ["0" if axis is None else f"{tensor}.stride({axis})" for axis in order]


def group(spec: RopeSpec) -> str:
    """Which of GROUPS a call is of."""
    return "in place" if spec.inplace else spec.direction
