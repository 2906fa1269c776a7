"""From a RoPE call and a Variant to the kernels it launches: names, grids, arguments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tuned.launch import Launch, ceil_div, next_power_of_2
from tuned.rope.spec import SEARCH_FAN, search_steps
from tuned.rope.variant import CACHE, RopeVariant, half_block

if TYPE_CHECKING:
    from tuned.rope.spec import RopeSpec


@dataclasses.dataclass(frozen=True)
class RopeCall:
    """The tensors of one call, all checked. Tensors are anything with data_ptr, stride and dtype.

    Strides are in elements and in the order seq, batch, heads, head_dim; a packed call has batch 1, batch stride 0.
    """

    x: Any
    out: Any  # x itself in place
    cos: Any  # or freqs, when the spec takes sine
    sin: Any  # None when the spec takes sine
    seq: int
    batch: int
    angle_rows: int
    x_strides: tuple[int, int, int, int]
    out_strides: tuple[int, int, int, int]
    angle_strides: tuple[int, int]
    cu_seqlens: Any = None
    sequences: int = 0


def kernel_name(spec: RopeSpec, variant: RopeVariant) -> str:
    """Module and function name of the rotating kernel: every text axis, in a fixed order."""
    return f"rope_{spec.layout}_{spec.output}_{spec.style}_{spec.angles}_{'loop' if variant.loops_heads else 'grid'}"


def kernel_names(spec: RopeSpec, variant: RopeVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (kernel_name(spec, variant),)


def programs(spec: RopeSpec, variant: RopeVariant, seq: int, batch: int) -> int:
    """Size of the rotating kernel's grid."""
    rows = spec.heads * (batch if spec.merges_batch else 1)
    tiles = ceil_div(seq, variant.block_tokens) * ceil_div(rows, variant.block_heads * variant.head_steps)
    return tiles if spec.merges_batch else tiles * batch


def _dependent(variant: RopeVariant) -> dict[str, bool]:
    # Named only where it is wanted: other backends than CUDA do not know the option.
    return {"launch_pdl": True} if variant.pdl else {}


def rotate_launch(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> Launch:
    """The launch of the rotating kernel, angles as the text wants them."""
    out = () if spec.inplace else (call.out,)
    angles = (call.cos,) if spec.takes_sine else (call.cos, call.sin)
    packed = (call.cu_seqlens, call.sequences) if spec.packed else ()
    out_strides = () if spec.inplace else call.out_strides
    tail = spec.head_dim - spec.rotary_dim
    half = half_block(spec)
    load_evict, store_cache = CACHE[variant.cache]
    constants = {
        "HEADS": spec.heads,
        "HEAD_DIM": spec.head_dim,
        "ROTARY_DIM": spec.rotary_dim,
        "HALF_BLOCK": half,
        "TAIL_BLOCK": next_power_of_2(tail) if tail else half,
        "PER_FEATURE": spec.angle_entries == "feature",
        "BACKWARD": spec.direction == "backward",
        "BLOCK_TOKENS": variant.block_tokens,
        "BLOCK_HEADS": variant.block_heads,
        "HEAD_STEPS": variant.head_steps,
        "ORDER": variant.order,
        "LOAD_EVICT": load_evict,
        "STORE_CACHE": store_cache,
        "PDL": variant.pdl,
    }
    if spec.packed:
        constants |= {"SEARCH_STEPS": search_steps(call.sequences), "SEARCH_FAN": SEARCH_FAN}
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, variant, call.seq, call.batch),
        arguments=(
            call.x,
            *out,
            *angles,
            *packed,
            call.seq,
            call.batch,
            call.angle_rows,
            *call.x_strides,
            *out_strides,
            *call.angle_strides,
        ),
        constants=constants,
        options={"num_warps": variant.num_warps, "num_stages": 1, **_dependent(variant)},
    )


def launches(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> tuple[Launch, ...]:
    """Every launch of the call, in order: the one that there is."""
    return (rotate_launch(spec, variant, call),)
