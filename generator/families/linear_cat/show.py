"""The function of a shown linear over segments, as Python text."""

from __future__ import annotations

from tuned.families.launch import Launch, Step, ceil_div
from tuned.families.products import MAX_SEGMENTS
from tuned.lookup.record import Winner

from ..text import contiguous_lines, finished, launch_text


def wrapper(winner: Winner, steps: tuple[Step, ...]) -> str:
    """The function ``linear_cat`` of a winner, whose kernel stands above it."""
    spec, variant = winner.spec, winner.variant
    (launch,) = (step for step in steps if isinstance(step, Launch))
    x = [f"x{index}" for index in range(len(spec.inputs))]
    weights = ["weight", *(["bias"] if spec.bias else [])]
    segments = ", ".join(f"[rows, {width}]" for width in spec.inputs)
    wanted = f"weight must be {spec.dtype} [{spec.outputs}, {spec.input_size}]"
    lines = [
        f"def linear_cat({', '.join([*x, *weights])}):",
        '    """torch.nn.functional.linear of x side by side. No autograd.',
        "",
        f"    {', '.join(x)}: {spec.dtype} {segments}. weight: [{spec.outputs}, {spec.input_size}].",
        '    """',
        f"    if weight.dtype != torch.{spec.dtype} or tuple(weight.shape) != ({spec.outputs}, {spec.input_size}):",
        f'        raise ValueError(f"{wanted}, got {{weight.dtype}} {{tuple(weight.shape)}}")',
        "    rows = x0.shape[0]",
        f"    out = x0.new_empty((rows, {spec.outputs}))",
        "    if not rows:\n        return out",
        *contiguous_lines([*x, *weights]),
    ]
    padded = [*x, *["weight"] * (MAX_SEGMENTS - len(x))]
    arguments = [*padded, "weight", "bias" if spec.bias else "weight", "out", "rows"]
    arguments += [f"{name}.stride(0)" for name in (*padded, "weight", "out")]
    tiles = f"triton.cdiv(rows, {variant.block_rows}) * {ceil_div(spec.outputs, variant.block_columns)}"
    return finished(lines, launch_text(launch, tiles, arguments, " " * 8), "x0", pdl=variant.pdl)
