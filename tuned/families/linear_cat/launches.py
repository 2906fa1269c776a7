"""From a linear over segments and a Variant to the kernel it launches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned.families.copying import KERNEL as COPY
from tuned.families.launch import Launch, check_rows
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import TILES, LinearCatVariant, outer_tile, programs
from tuned.families.padded import Side, multiplied, pads_of
from tuned.families.products import MAX_SEGMENTS, Segments, alignment, lanes, widths_of


@dataclasses.dataclass(frozen=True)
class LinearCatCall(Segments):
    """The tensors of one checked call, after the segments ``[rows, widths[i]]``; 2D tensors have last stride 1."""

    weight: Any  # [outputs, input_size]
    out: Any  # [rows, outputs]
    bias: Any = None  # [outputs], contiguous


def kernel_name(_spec: LinearCatSpec, variant: LinearCatVariant) -> str:
    """Module and function name of the kernel that multiplies: every text axis. No field of the spec chooses text."""
    return f"linear_cat_{'tile' if variant.pads else variant.form}"


def kernel_names(spec: LinearCatSpec, variant: LinearCatVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (*((COPY,) if variant.pads else ()), kernel_name(spec, variant))


def launches(spec: LinearCatSpec, variant: LinearCatVariant, call: LinearCatCall) -> tuple[Launch, ...]:
    """The launches of the call: one, after the copies of form "padded".

    Raises:
        ValueError: a tensor does not have the strides that LinearCatCall requires.
    """
    check_rows(x0=call.x0, x1=call.x1, x2=call.x2, x3=call.x3, weight=call.weight, out=call.out, bias=call.bias)
    if not variant.pads:
        return (_product(spec, variant, call),)
    sides = pads_sides(call)
    pads = pads_of(sides)
    memory = call.weight.new_empty(pads.elements)
    ((x, weight),) = pads.padded(memory, sides)
    joined = LinearCatCall.of(x, weight, call.out, call.bias)
    return *pads.launches(memory, sides), _product(multiplied(spec, variant), variant, joined)


def pads_sides(call: LinearCatCall) -> tuple[Side, ...]:
    """What form "padded" copies: the segments, and the weight that they are multiplied by."""
    return ((call.segments, call.weight),)


def _product(spec: LinearCatSpec, variant: LinearCatVariant, call: LinearCatCall) -> Launch:
    # A segment that does not exist is never read: any pointer will do.
    x = (*call.segments, *(call.weight,) * (MAX_SEGMENTS - len(call.segments)))
    rows = call.out.shape[0]
    align = alignment(spec.dtype, *x, call.weight)
    outer: dict[str, int] = {}
    form: dict[str, Any] = {"ORDER": variant.order, "PRECISION": spec.precision or "ieee"}  # ignored for 16-bit dtypes
    if variant.is_outer:
        outer, form = outer_tile(spec, variant).constants(spec, align), {"WARPS": variant.num_warps}
    elif variant.is_vector:
        form = {"LANES": lanes(spec)}
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, variant, rows),
        arguments=(
            *x,
            call.weight,
            call.bias if spec.bias else call.weight,
            call.out,
            rows,
            *(t.stride(0) for t in x),
            call.weight.stride(0),
            call.out.stride(0),
        ),
        constants={
            **widths_of(spec.inputs),
            "COLUMNS": spec.outputs,
            "BIAS": spec.bias,
            "ALIGN": align,
            "BLOCK_ROWS": variant.block_rows,
            "BLOCK_COLUMNS": variant.block_columns,
            "BLOCK_K": variant.block_k,
        }
        | outer
        | form
        | {"PDL": variant.pdl},
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages if variant.form in TILES else 1,
            # Given only if it is on: backends other than CUDA do not know the option.
            **({"launch_pdl": True} if variant.pdl else {}),
        },
    )
