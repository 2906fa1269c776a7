"""The function of a shown GRU step, as Python text."""

from __future__ import annotations

from tuned.families.launch import Launch, Step, ceil_div
from tuned.families.products import MAX_SEGMENTS
from tuned.lookup.record import Winner

from ..text import contiguous_lines, finished, launch_text


def wrapper(winner: Winner, steps: tuple[Step, ...]) -> str:
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
        lines += contiguous_lines([*x, "h", *weights])
        padded = [*x, *["h"] * (MAX_SEGMENTS - len(x))]
        arguments = [*padded, "h", "weight_ih", "weight_hh", *(bias or ["weight_ih", "weight_hh"]), "out", "batch"]
        arguments += [f"{name}.stride(0)" for name in (*padded, "h", "weight_ih", "weight_hh", "out")]
    return finished(lines, launch_text(launch, tiles, arguments, " " * 8), "h", pdl=variant.pdl)
