"""From a RoPE call and a Variant to the kernels it launches: names, grids, arguments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tuned.families.launch import Launch, ceil_div, next_power_of_2
from tuned.families.rope.spec import SEARCH_FAN, search_steps
from tuned.families.rope.variant import CACHE, RopeVariant, half_block

if TYPE_CHECKING:
    from tuned.families.rope.spec import RopeSpec


@dataclasses.dataclass(frozen=True)
class RopeCall:
    """The tensors of one checked call. A tensor is anything with data_ptr, stride and dtype.

    Strides are in elements, in the order seq, batch, heads, head_dim; a packed call has batch 1 and batch stride 0.
    The fields from ``key`` on are used by complete calls only.
    """

    x: Any
    out: Any  # x itself in place
    cos: Any  # or freqs or inv_freq, if spec.computes_sincos
    sin: Any  # None if spec.computes_sincos
    seq: int
    batch: int
    angle_rows: int
    x_strides: tuple[int, int, int, int]
    out_strides: tuple[int, int, int, int]
    angle_strides: tuple[int, int]  # row, entry
    cu_seqlens: Any = None
    sequences: int = 0
    key: Any = None  # if None although the spec has key_heads, the key is a part of x: see ``_key_in``
    key_out: Any = None
    key_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    key_out_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    angle_stride_b: int = 0
    positions: Any = None  # the offset, starts or ids, as spec.positions says
    position_strides: tuple[int, int] = (0, 0)  # seq, batch
    offset: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    scaling: float = 1.0


def kernel_name(spec: RopeSpec, variant: RopeVariant) -> str:
    """Module and function name of the rotating kernel: every text axis, in a fixed order."""
    schedule = "loop" if variant.loops_heads else "grid"
    if spec.plain:
        return f"rope_{spec.layout}_{spec.output}_{spec.style}_{spec.angles}_{schedule}"
    return f"rope_call_{'inplace' if spec.inplace else 'copy'}_{spec.style}_{spec.angles}_{schedule}"


def kernel_names(spec: RopeSpec, variant: RopeVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (kernel_name(spec, variant),)


def programs(spec: RopeSpec, variant: RopeVariant, seq: int, batch: int) -> int:
    """Size of the rotating kernel's grid."""
    rows = spec.all_heads * (batch if spec.merges_batch else 1)
    tiles = ceil_div(seq, variant.block_tokens) * ceil_div(rows, variant.block_heads * variant.head_steps)
    return tiles if spec.merges_batch else tiles * batch


def _dependent(variant: RopeVariant) -> dict[str, bool]:
    # Given only if it is on: backends other than CUDA do not know the option.
    return {"launch_pdl": True} if variant.pdl else {}


def _plain_launch(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> Launch:
    """The launch of a plain call's kernel."""
    out = () if spec.inplace else (call.out,)
    angles = (call.cos,) if spec.computes_sincos else (call.cos, call.sin)
    packed = (call.cu_seqlens, call.sequences) if spec.packed else ()
    out_strides = () if spec.inplace else call.out_strides
    tail = spec.head_dim - spec.rotary_dim
    half = half_block(spec)
    load_evict, store_cache, _ = CACHE[variant.cache]
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


def _key_in(tensor: Any, spec: RopeSpec, call: RopeCall) -> Any:
    """The key inside x: after the query's heads of each token or, if x is [rows, head_dim], after all of the query."""
    if tensor.ndim == 2:  # noqa: PLR2004 - [rows, head_dim]
        return tensor[call.batch * call.seq * spec.heads :]
    return tensor.narrow(-2, spec.heads, spec.key_heads)


def _complete_launch(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> Launch:
    """The launch of a complete call's kernel. For a tensor that it does not read it gets another tensor's address."""
    key, key_out, key_strides, key_out_strides = call.key, call.key_out, call.key_strides, call.key_out_strides
    if key is None and spec.key_heads:
        key, key_out = _key_in(call.x, spec, call), _key_in(call.out, spec, call)
    elif key is None:
        key, key_out, key_strides, key_out_strides = call.x, call.out, call.x_strides, call.out_strides
    outs = () if spec.inplace else (call.out, key_out)
    angles = (call.cos,) if spec.computes_sincos else (call.cos, call.sin)
    out_strides = () if spec.inplace else (*call.out_strides[:3], *key_out_strides[:3], call.out_strides[3])
    tail = spec.head_dim - spec.rotary_dim if spec.copies_tail else 0
    load_evict, store_cache, angle_evict = CACHE[variant.cache]
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, variant, call.seq, call.batch),
        arguments=(
            call.x,
            key,
            *outs,
            *angles,
            call.cos if call.cu_seqlens is None else call.cu_seqlens,
            call.cos if call.positions is None else call.positions,
            call.offset,
            call.seq,
            call.batch,
            call.angle_rows,
            call.sequences,
            call.cp_size,
            call.cp_rank,
            call.scaling,
            *call.x_strides[:3],
            *key_strides[:3],
            call.x_strides[3],
            *out_strides,
            call.angle_strides[0],
            call.angle_stride_b,
            call.angle_strides[1],
            *call.position_strides,
        ),
        constants={
            "HEADS": spec.heads,
            "KEY_HEADS": spec.key_heads,
            "COPIED_HEADS": spec.copied_heads,
            "PAIRS": spec.moved_pairs,
            "PAIR_BLOCK": half_block(spec),
            "TURNED_PAIRS": spec.rotary_dim // 2,
            "PAIR_DISTANCE": spec.pair_distance,
            "FIRST_FEATURE": spec.head_dim - spec.rotary_dim if spec.rotated == "last" else 0,
            "TAIL": tail,
            "TAIL_BLOCK": next_power_of_2(max(tail, 1)),
            "TAIL_FEATURE": 0 if spec.rotated == "last" else spec.rotary_dim,
            "PER_FEATURE": spec.angle_entries == "feature",
            "BACKWARD": spec.direction == "backward",
            "CONJUGATE": spec.conjugate,
            "SCALED": spec.scaled,
            "ANGLES_PER_BATCH": spec.angles_per_batch,
            "POSITIONS": "order" if spec.positions == "shifted" else spec.positions,
            "PACKED": spec.packed,
            "CONTEXT_PARALLEL": spec.context_parallel,
            "BLOCK_TOKENS": variant.block_tokens,
            "BLOCK_HEADS": variant.block_heads,
            "HEAD_STEPS": variant.head_steps,
            "ORDER": variant.order,
            "LOAD_EVICT": load_evict,
            "STORE_CACHE": store_cache,
            "ANGLE_EVICT": angle_evict,
            "PDL": variant.pdl,
            "SEARCH_STEPS": search_steps(call.sequences),
            "SEARCH_FAN": SEARCH_FAN,
        },
        options={"num_warps": variant.num_warps, "num_stages": 1, **_dependent(variant)},
    )


def launches(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> tuple[Launch, ...]:
    """The launches of the call: exactly one."""
    return ((_plain_launch if spec.plain else _complete_launch)(spec, variant, call),)
