"""The functions of a shown GRU step and of a shown linear over segments, as Python text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from generator.rendering.show_call import call_text
from tuned.families.gru_cell.spec import MAX_SEGMENTS
from tuned.families.launch import Launch, ceil_div

if TYPE_CHECKING:
    from tuned.families.launch import Step
    from tuned.lookup.record import Winner


def cell_wrapper(winner: Winner, steps: tuple[Step, ...]) -> str:
    """The function ``gru_cell`` of a winner, whose kernel stands above it."""
    spec, variant = winner.spec, winner.variant
    launch = next(step for step in steps if isinstance(step, Launch))
    x = [f"x{index}" for index in range(len(spec.inputs))]
    bias = ["bias_ih", "bias_hh"] if spec.bias else []
    weights = ["weight_ih", "weight_hh", *bias]
    segments = ", ".join(f"[batch, {width}]" for width in spec.inputs)
    lines = [
        f"def gru_cell({', '.join([*x, 'h', *weights])}):",
        '    """The next hidden state of torch.nn.GRUCell, x side by side. No autograd.',
        "",
        f"    {', '.join(x)}: {spec.dtype} {segments}. h: [batch, {spec.hidden}]{', overwritten' if spec.inplace else ''}.",
        f"    weight_ih: [{3 * spec.hidden}, {spec.input_size}]. weight_hh: [{3 * spec.hidden}, {spec.hidden}].",
        '    """',
        f"    if h.dtype != torch.{spec.dtype} or h.shape[1] != {spec.hidden}:",
        f'        raise ValueError(f"h must be {spec.dtype} [batch, {spec.hidden}], got {{h.dtype}} {{tuple(h.shape)}}")',
        "    batch = h.shape[0]",
        "    out = h" if spec.inplace else "    out = torch.empty_like(h, memory_format=torch.contiguous_format)",
        "    if not h.numel():\n        return out",
    ]
    tiles = f"triton.cdiv(batch, {variant.block_batch}) * {ceil_div(spec.hidden, variant.block_hidden)}"
    if variant.form == "library":
        lines += [f"    {name} = {name}.contiguous()" for name in bias]
        whole = x[0] if len(x) == 1 else f"torch.cat(({', '.join(x)}), -1)"
        lines += [f"    gates_x = {whole} @ weight_ih.T", "    gates_h = h @ weight_hh.T"]
        states = ["h"] if spec.inplace else ["h", "out"]
        strides = [f"{name}.stride({axis})" for name in states for axis in (0, 1)]
        arguments = ["gates_x", "gates_h", *bias, *states, "batch", "gates_x.stride(0)", "gates_h.stride(0)", *strides]
    else:
        lines += _contiguous([*x, "h", *weights])
        padded = [*x, *["h"] * (MAX_SEGMENTS - len(x))]
        arguments = [*padded, "h", "weight_ih", "weight_hh", *(bias or ["weight_ih", "weight_hh"]), "out", "batch"]
        arguments += [f"{name}.stride(0)" for name in (*padded, "h", "weight_ih", "weight_hh", "out")]
    return _finished(lines, call_text(launch, tiles, arguments, " " * 8), "h", pdl=variant.pdl)


def linear_cat_wrapper(winner: Winner, steps: tuple[Step, ...]) -> str:
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
        *_contiguous([*x, *weights]),
    ]
    padded = [*x, *["weight"] * (MAX_SEGMENTS - len(x))]
    arguments = [*padded, "weight", "bias" if spec.bias else "weight", "out", "rows"]
    arguments += [f"{name}.stride(0)" for name in (*padded, "weight", "out")]
    tiles = f"triton.cdiv(rows, {variant.block_rows}) * {ceil_div(spec.outputs, variant.block_columns)}"
    return _finished(lines, call_text(launch, tiles, arguments, " " * 8), "x0", pdl=variant.pdl)


def _contiguous(names: list[str]) -> list[str]:
    """ALIGN, a literal here, is that of contiguous rows."""
    return [f"    {name} = {name}.contiguous()" for name in names]


def _finished(lines: list[str], call: str, tensor: str, *, pdl: bool) -> str:
    if pdl:
        lines.append(f"    dependent = {tensor}.is_cuda and torch.version.hip is None")
    return "\n".join(lines) + f"\n    with torch.cuda.device_of({tensor}):\n{call}    return out\n"
