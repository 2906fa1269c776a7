"""Every text of a kernel of the linear over segments: the product of the text axes; and how a winner is shown."""

from __future__ import annotations

from collections.abc import Iterator

from tuned.families.launch import ceil_div
from tuned.families.linear_cat.launches import kernel_name
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.padded import multiplied
from tuned.families.products import MAX_SEGMENTS
from tuned.lookup.record import Winner

from ..text import Shown, Text, contiguous_lines, finished, head, padded_lines, refusal

# Form -> its template.
LINEAR_CAT_FORMS = {"tile": "linear_cat", "vector": "linear_cat", "outer": "linear_cat_outer"}


def texts() -> Iterator[Text]:
    """One text for each form."""
    spec = LinearCatSpec("bfloat16", (512, 512), 1024)
    for form, template in LINEAR_CAT_FORMS.items():
        variant = LinearCatVariant(form)
        yield template, kernel_name(spec, variant), spec, variant, True


# How a winner is shown: the caller's arguments and the launches, as Python text.


def wrapper(winner: Winner, shown: Shown) -> str:
    """The function ``linear_cat`` of a winner, whose kernel stands above it."""
    spec, variant = winner.spec, winner.variant
    x = [f"x{index}" for index in range(len(spec.inputs))]
    weights = ["weight", *(["bias"] if spec.bias else [])]
    segments = ", ".join(f"[rows, {width}]" for width in spec.inputs)
    shape = f"[{spec.outputs}, {spec.input_size}]"
    takes = [f"{', '.join(x)}: {spec.dtype} {segments}. weight: {shape}."]
    lines = [
        *head("linear_cat", [*x, *weights], "torch.nn.functional.linear of x side by side.", takes),
        *refusal(
            f"weight.dtype != torch.{spec.dtype} or tuple(weight.shape) != ({shape[1:-1]})",
            f"weight must be {spec.dtype} {shape}",
            "weight",
        ),
        "    rows = x0.shape[0]",
        f"    out = x0.new_empty((rows, {spec.outputs}))",
        "    if not rows:\n        return out",
        *contiguous_lines([*x, *weights]),
    ]
    if variant.pads:
        lines += padded_lines(x, "weight", "x0", *multiplied(spec, variant).inputs)
        x = ["x0"]
    unread = [*(f"x{index}" for index in range(len(x), MAX_SEGMENTS)), *([] if spec.bias else ["bias"])]
    tiles = f"triton.cdiv(rows, {variant.block_rows}) * {ceil_div(spec.outputs, variant.block_columns)}"
    return finished(lines, shown.text(tiles, {}, dict.fromkeys(unread, "weight")), "x0", pdl=variant.pdl)
