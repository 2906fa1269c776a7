"""From one GRU step and a Variant to what it launches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned.families.copying import KERNEL as COPY
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import TENSOR_CORES, GruCellVariant, outer_tile, programs
from tuned.families.launch import Copy, Launch, Product, Step, check_rows
from tuned.families.padded import Pads, Side, multiplied, pads_of
from tuned.families.products import MAX_SEGMENTS, Segments, alignment, lanes, widths_of


@dataclasses.dataclass(frozen=True)
class GruCellCall(Segments):
    """The tensors of one checked step, after the segments ``[batch, widths[i]]`` of x.

    2D tensors have last stride 1, and in place ``out`` is ``h`` itself.
    """

    h: Any  # [batch, hidden]; any strides if the variant has form "library"
    weight_ih: Any  # [3 * hidden, input_size]
    weight_hh: Any  # [3 * hidden, hidden]
    out: Any  # [batch, hidden]
    bias_ih: Any = None  # [3 * hidden], contiguous
    bias_hh: Any = None


def gates_name(*, bias: bool, inplace: bool) -> str:
    """Module and function name of the gates kernel: every text axis, in a fixed order."""
    return f"gru_gates_{'bias' if bias else 'nobias'}_{'inplace' if inplace else 'copy'}"


def kernel_name(spec: GruCellSpec, variant: GruCellVariant) -> str:
    """Module and function name of the kernel that has the gates."""
    by_library = variant.by_library
    return gates_name(bias=spec.bias, inplace=spec.inplace) if by_library else f"gru_cell_{variant.form}"


def kernel_names(spec: GruCellSpec, variant: GruCellVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (*((COPY,) if variant.pads else ()), kernel_name(spec, variant))


def launches(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall) -> tuple[Step, ...]:
    """All steps of the call, in order: launches, GEMMs and copies."""
    if variant.by_library:
        return _library(spec, variant, call)
    return _padded(spec, variant, call) if variant.pads else (fused_launch(spec, variant, call),)


def fused_launch(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall) -> Launch:
    """The whole step in one kernel.

    Raises:
        ValueError: a tensor does not have the strides that GruCellCall requires.
    """
    check_rows(
        x0=call.x0, x1=call.x1, x2=call.x2, x3=call.x3, h=call.h, weight_ih=call.weight_ih, weight_hh=call.weight_hh,
        out=call.out, bias_ih=call.bias_ih, bias_hh=call.bias_hh,
    )  # fmt: skip
    # A segment that does not exist is never read: any pointer will do.
    x = (*call.segments, *(call.h,) * (MAX_SEGMENTS - len(call.segments)))
    bias = (call.bias_ih, call.bias_hh) if spec.bias else (call.weight_ih, call.weight_hh)
    batch = call.h.shape[0]
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, variant, batch),
        arguments=(
            *x,
            call.h,
            call.weight_ih,
            call.weight_hh,
            *bias,
            call.out,
            batch,
            *(t.stride(0) for t in x),
            call.h.stride(0),
            call.weight_ih.stride(0),
            call.weight_hh.stride(0),
            call.out.stride(0),
        ),
        constants=_constants(spec, variant, alignment(spec.dtype, *x, call.h, call.weight_ih, call.weight_hh)),
        options=_options(variant),
    )


def pads_sides(call: GruCellCall) -> tuple[Side, ...]:
    """What form "padded" copies: x and h, and the weight that each is multiplied by."""
    return (call.segments, call.weight_ih), ((call.h,), call.weight_hh)


def copies_of(variant: GruCellVariant, call: GruCellCall) -> Pads:
    """What a variant copies first: all that is not aligned, for the library rows of products too."""
    return pads_of(pads_sides(call), results=variant.by_library)


def _copied(variant: GruCellVariant, call: GruCellCall) -> tuple[tuple[Launch, ...], GruCellCall]:
    """The launches that copy inputs and weights whose rows are not aligned, and the call with the copies."""
    sides, copies = pads_sides(call), copies_of(variant, call)
    memory = call.h.new_empty(copies.elements)
    (x, weight_ih), ((h,), weight_hh) = copies.padded(memory, sides)
    joined = GruCellCall.of(x, h, weight_ih, weight_hh, call.out, call.bias_ih, call.bias_hh)
    return copies.launches(memory, sides), joined


def _padded(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall) -> tuple[Step, ...]:
    """The copies of inputs and weights whose rows are not aligned, and the whole step in one kernel."""
    copies, joined = _copied(variant, call)
    return *copies, fused_launch(multiplied(spec, variant), variant, joined)


def _constants(spec: GruCellSpec, variant: GruCellVariant, align: int) -> dict[str, Any]:
    """Every tl.constexpr of a fused kernel, in the order of its signature."""
    constants = widths_of(spec.inputs) | {
        "HIDDEN": spec.hidden,
        "BIAS": spec.bias,
        "ALIGN": align,
        "BLOCK_BATCH": variant.block_batch,
        "BLOCK_HIDDEN": variant.block_hidden,
        "BLOCK_K": variant.block_k,
    }
    if variant.form == "outer":
        outer = outer_tile(spec, variant).constants(spec, align)
        return {**constants, **outer, "WARPS": variant.num_warps, "PDL": variant.pdl}
    if variant.form == "vector":
        return {**constants, "LANES": lanes(spec), "PDL": variant.pdl}
    return {
        **constants,
        "PARTS": variant.k_parts,
        "SCHEDULE": variant.schedule,
        "STACKED": variant.stacked,
        "ORDER": variant.order,
        "PRECISION": spec.precision or "ieee",  # ignored for 16-bit dtypes
        "PDL": variant.pdl,
    }


def _options(variant: GruCellVariant) -> dict[str, Any]:
    stages = variant.num_stages if variant.form in TENSOR_CORES else 1
    # Given only if it is on: backends other than CUDA do not know the option.
    return {"num_warps": variant.num_warps, "num_stages": stages, **({"launch_pdl": True} if variant.pdl else {})}


def gates_launch(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall, gates: tuple[Any, Any]) -> Launch:
    """The gates kernel, on the products x @ weight_ih.T and h @ weight_hh.T, each [batch, 3 * hidden].

    Raises:
        ValueError: the last stride of a product or bias is not 1; h and the output may have any strides.
    """
    check_rows(gates_x=gates[0], gates_h=gates[1], bias_ih=call.bias_ih, bias_hh=call.bias_hh)
    bias = (call.bias_ih, call.bias_hh) if spec.bias else ()
    out = () if spec.inplace else (call.out,)
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, variant, call.h.shape[0]),
        arguments=(
            *gates,
            *bias,
            call.h,
            *out,
            call.h.shape[0],
            *(t.stride(0) for t in gates),
            *call.h.stride(),
            *(stride for t in out for stride in t.stride()),
        ),
        constants={
            "HIDDEN": spec.hidden,
            "BLOCK_BATCH": variant.block_batch,
            "BLOCK_HIDDEN": variant.block_hidden,
        },
        options=_options(variant),
    )


def _library(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall) -> tuple[Step, ...]:
    """Both GEMMs by the library, after copies with padded rows or concatenating the segments of x, and the gates kernel."""
    batch = call.h.shape[0]
    copies: list[Step] = []
    given = call
    if variant.pads:
        launches, given = _copied(variant, call)
        copies += launches
    x = given.x0
    if len(given.segments) > 1:
        x = call.h.new_empty((batch, spec.input_size))
        copies += map(Copy, given.segments, x.split(spec.inputs, 1))
    operands = (x, given.weight_ih), (given.h, given.weight_hh)
    products = [Product(a, b, call.h.new_empty((batch, b.shape[0]))) for a, b in operands]
    gates_x, gates_h = (product.out[:, : 3 * spec.hidden] for product in products)
    return (*copies, *products, gates_launch(spec, variant, call, (gates_x, gates_h)))
