"""From the gates of one GRU step and a Variant to the kernel it launches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tuned.launch import Launch, ceil_div

if TYPE_CHECKING:
    from tuned.gru_cell.spec import GruCellSpec
    from tuned.gru_cell.variant import GruCellVariant


@dataclasses.dataclass(frozen=True)
class GruCellCall:
    """The tensors of one step, all checked; ``out`` is ``h`` itself in place."""

    gates_x: Any  # [batch, 3 * hidden], last stride 1
    gates_h: Any  # [batch, 3 * hidden], last stride 1
    h: Any  # [batch, hidden]
    out: Any
    batch: int
    bias_ih: Any = None  # [3 * hidden], contiguous
    bias_hh: Any = None


def kernel_name(spec: GruCellSpec, variant: GruCellVariant) -> str:
    """Module and function name: every text axis, in a fixed order."""
    del variant  # no knob of this family chooses text
    return f"gru_cell_{'bias' if spec.bias else 'nobias'}_{'inplace' if spec.inplace else 'copy'}"


def kernel_names(spec: GruCellSpec, variant: GruCellVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (kernel_name(spec, variant),)


def launches(spec: GruCellSpec, variant: GruCellVariant, call: GruCellCall) -> tuple[Launch, ...]:
    """Every launch of the call, in order."""
    bias = (call.bias_ih, call.bias_hh) if spec.bias else ()
    out = () if spec.inplace else (call.out,)
    out_strides = () if spec.inplace else call.out.stride()
    tiles = ceil_div(call.batch, variant.block_batch) * ceil_div(spec.hidden, variant.block_hidden)
    return (
        Launch(
            kernel=kernel_name(spec, variant),
            programs=tiles,
            arguments=(
                call.gates_x,
                call.gates_h,
                *bias,
                call.h,
                *out,
                call.batch,
                call.gates_x.stride(0),
                call.gates_h.stride(0),
                *call.h.stride(),
                *out_strides,
            ),
            constants={
                "HIDDEN": spec.hidden,
                "BLOCK_BATCH": variant.block_batch,
                "BLOCK_HIDDEN": variant.block_hidden,
            },
            options={"num_warps": variant.num_warps, "num_stages": 1},
        ),
    )
