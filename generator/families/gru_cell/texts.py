"""Every text of a kernel of the GRU step: the product of the text axes; and how a winner is shown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.gru_cell.launches import gates_name, kernel_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.launch import ceil_div
from tuned.families.padded import multiplied, padded_widths
from tuned.families.products import ITEM_SIZE, MAX_SEGMENTS
from tuned.lookup.record import Winner

from ..text import Shown, Text, contiguous_lines, finished, head, padded_lines, refusal


def gru_gates_specs() -> Iterator[GruCellSpec]:
    """One spec for each text of the gates after the library's products: with and without bias, out of place and in place."""
    for bias, inplace in itertools.product((True, False), (False, True)):
        yield GruCellSpec("bfloat16", 1024, (1024,), bias=bias, inplace=inplace)


# Form of a whole step in one kernel -> its template.
GRU_CELL_FORMS = {
    "split": "gru_cell",
    "tile": "gru_cell",
    "padded": "gru_cell",
    "vector": "gru_cell_vector",
    "outer": "gru_cell_outer",
}


def texts() -> Iterator[Text]:
    """The gates after the library's products, then each form of a whole step in one kernel."""
    for gates in gru_gates_specs():
        yield "gru_gates", gates_name(bias=gates.bias, inplace=gates.inplace), gates, GruCellVariant("library"), True
    cell = GruCellSpec("bfloat16", 1024, (1024,))
    for form, template in GRU_CELL_FORMS.items():
        yield template, kernel_name(cell, GruCellVariant(form)), cell, GruCellVariant(form), True


# How a winner is shown: the caller's arguments and the launches, as Python text.


def wrapper(winner: Winner, shown: Shown) -> str:
    """The function ``gru_cell`` of a winner, whose kernel stands above it."""
    spec, variant = winner.spec, winner.variant
    x = [f"x{index}" for index in range(len(spec.inputs))]
    bias = ["bias_ih", "bias_hh"] if spec.bias else []
    weights = ["weight_ih", "weight_hh", *bias]
    segments = ", ".join(f"[batch, {width}]" for width in spec.inputs)
    takes = [
        f"{', '.join(x)}: {spec.dtype} {segments}. h: [batch, {spec.hidden}]{', overwritten' if spec.inplace else ''}.",
        f"weight_ih: [{3 * spec.hidden}, {spec.input_size}]. weight_hh: [{3 * spec.hidden}, {spec.hidden}].",
    ]
    wanted = f"h must be {spec.dtype} [batch, {spec.hidden}]"
    lines = [
        *head("gru_cell", [*x, "h", *weights], "The next hidden state of torch.nn.GRUCell, x side by side.", takes),
        *refusal(f"h.dtype != torch.{spec.dtype} or h.shape[1] != {spec.hidden}", wanted, "h"),
        "    batch = h.shape[0]",
        "    out = h" if spec.inplace else "    out = torch.empty_like(h, memory_format=torch.contiguous_format)",
        "    if not h.numel():\n        return out",
    ]
    given, padding, state, of_gates = x, list[str](), "h", ""
    if variant.pads:
        joined = multiplied(spec, variant).inputs
        (columns,) = padded_widths((spec.hidden,), ITEM_SIZE[spec.dtype])
        rows = 0
        if variant.by_library:  # rows of the products are aligned too
            (rows,), state = padded_widths((3 * spec.hidden,), ITEM_SIZE[spec.dtype]), "state"
            of_gates = f"[:, : {3 * spec.hidden}]"
        if joined != spec.inputs or rows > 3 * spec.hidden:
            padding, x = padded_lines(x, "weight_ih", "x0", sum(joined), rows), ["x0"]
        padding += padded_lines(["h"], "weight_hh", state, columns, rows)
    if variant.by_library:
        lines += padding
        whole = x[0] if len(x) == 1 else f"torch.cat(({', '.join(x)}), -1)"
        lines += [
            *contiguous_lines(bias),
            f"    gates_x = ({whole} @ weight_ih.T){of_gates}" if of_gates else f"    gates_x = {whole} @ weight_ih.T",
            f"    gates_h = ({state} @ weight_hh.T){of_gates}" if of_gates else "    gates_h = h @ weight_hh.T",
        ]
        unread = {}
    else:
        lines += contiguous_lines([*given, "h", *weights])
        lines += padding
        unread = {f"x{index}": "h" for index in range(len(x), MAX_SEGMENTS)}
        unread |= {} if bias else {"bias_ih": "weight_ih", "bias_hh": "weight_hh"}
    tiles = f"triton.cdiv(batch, {variant.block_batch}) * {ceil_div(spec.hidden, variant.block_hidden)}"
    return finished(lines, shown.text(tiles, {"h": "bd", "out": "bd"}, unread), "h", pdl=variant.pdl)
