"""From a linear over segments and a Variant to the kernel it launches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tuned.families.gru_cell.launches import alignment
from tuned.families.gru_cell.spec import MAX_SEGMENTS
from tuned.families.launch import Launch, check_rows
from tuned.families.linear_cat.variant import lanes, programs

if TYPE_CHECKING:
    from tuned.families.linear_cat.spec import LinearCatSpec
    from tuned.families.linear_cat.variant import LinearCatVariant


@dataclasses.dataclass(frozen=True)
class LinearCatCall:
    """The tensors of one checked call; 2D tensors have last stride 1."""

    x0: Any  # [rows, widths[0]], and one tensor for each segment
    x1: Any
    x2: Any
    x3: Any
    weight: Any  # [outputs, input_size]
    out: Any  # [rows, outputs]
    bias: Any = None  # [outputs], contiguous

    @property
    def segments(self) -> tuple[Any, ...]:
        """The segments that exist."""
        return tuple(x for x in (self.x0, self.x1, self.x2, self.x3) if x is not None)


def call_of(segments: tuple[Any, ...], *tensors: Any) -> LinearCatCall:
    """The call of 1 to 4 segments, and the other tensors in the order of LinearCatCall."""
    return LinearCatCall(*segments, *(None,) * (MAX_SEGMENTS - len(segments)), *tensors)


def kernel_name(spec: LinearCatSpec, variant: LinearCatVariant) -> str:
    """Module and function name: every text axis, in a fixed order."""
    del spec  # no field of the spec chooses text
    return f"linear_cat_{variant.form}"


def kernel_names(spec: LinearCatSpec, variant: LinearCatVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (kernel_name(spec, variant),)


def launches(spec: LinearCatSpec, variant: LinearCatVariant, call: LinearCatCall) -> tuple[Launch, ...]:
    """The launches of the call: exactly one.

    Raises:
        ValueError: a tensor does not have the strides that LinearCatCall requires.
    """
    check_rows(x0=call.x0, x1=call.x1, x2=call.x2, x3=call.x3, weight=call.weight, out=call.out, bias=call.bias)
    # A segment that does not exist is never read: any pointer will do.
    x = (*call.segments, *(call.weight,) * (MAX_SEGMENTS - len(call.segments)))
    rows = call.out.shape[0]
    widths = (*spec.inputs, *(0,) * (MAX_SEGMENTS - len(spec.inputs)))
    form = {"ORDER": variant.order, "PRECISION": spec.precision or "ieee"}  # ignored for 16-bit dtypes
    return (
        Launch(
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
                **{f"WIDTH{index}": width for index, width in enumerate(widths)},
                "COLUMNS": spec.outputs,
                "BIAS": spec.bias,
                "ALIGN": alignment(spec.dtype, *x, call.weight),
                "BLOCK_ROWS": variant.block_rows,
                "BLOCK_COLUMNS": variant.block_columns,
                "BLOCK_K": variant.block_k,
                **({"LANES": lanes(spec)} if variant.is_vector else form),
                "PDL": variant.pdl,
            },
            options={
                "num_warps": variant.num_warps,
                "num_stages": 1 if variant.is_vector else variant.num_stages,
                # Given only if it is on: backends other than CUDA do not know the option.
                **({"launch_pdl": True} if variant.pdl else {}),
            },
        ),
    )
