"""From a RoPE call and a Variant to the kernels it launches: names, grids, arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import torch

from tuned.families.launch import Launch, ceil_div, next_power_of_2
from tuned.families.rope.spec import ITEM_SIZE, SEARCH_FAN, RopeSpec, search_steps
from tuned.families.rope.variant import (
    CACHE,
    VECTOR_BYTES,
    RopeVariant,
    half_block,
    programs,
    row_features,
    rows_at_once,
    rows_of_tile,
    stages,
)

ALIGNED = 16  # elements: if it divides an integer argument, Triton compiles code that knows it
# Parameters of kernels of complete calls only; a plain call's kernel has constants instead.
OF_COMPLETE = frozenset((
    "key", "key_out", "positions", "offset", "cp_size", "cp_rank", "scaling",
    "key_stride_s", "key_stride_b", "key_stride_h", "key_out_stride_s", "key_out_stride_b", "key_out_stride_h",
    "angle_stride_b", "position_stride_s", "position_stride_b",
    "KEY_HEADS", "COPIED_HEADS", "TURNED_PAIRS", "PAIR_DISTANCE", "FIRST_FEATURE", "TAIL_FEATURE", "CONJUGATE", "SCALED",
    "ANGLES_PER_BATCH", "POSITIONS", "PACKED", "CONTEXT_PARALLEL", "ANGLE_EVICT",
    "SECTION_1", "SECTION_2", "SECTION_3", "SECTIONS_INTERLEAVED",
))  # fmt: skip
OF_NORM = frozenset((
    "weight", "key_weight", "eps", "HEAD_DIM", "NORM_ALL", "ZERO_CENTERED", "ROUNDING", "STAGES", "CHUNKS",
))  # fmt: skip
OF_CACHE = frozenset((
    "value", "key_cache", "value_cache", "slots", "key_scale", "value_scale", "slot_count", "cache_slots", "slot_stride",
    "value_stride_s", "value_stride_h", "key_page_stride", "key_slot_stride", "key_head_stride", "value_page_stride",
    "value_slot_stride", "value_head_stride", "cache_stride_d", "key_scale_stride", "value_scale_stride",
    "WRITTEN_HEADS", "TAIL_HEADS", "PAGE_SIZE", "CACHE_MULTIPLE", "FLOAT8", "CACHE_SCALED",
))  # fmt: skip
OF_GIVEN = frozenset((
    "given", "key_given", "given_stride_s", "given_stride_b", "given_stride_h", "given_stride_d",
    "key_given_stride_s", "key_given_stride_b", "key_given_stride_h",
))  # fmt: skip
OF_GRADIENT_OF_ANGLES = frozenset(("angle_grad",))
OF_PAIRS, OF_ROWS = frozenset(("PAIR_BLOCK", "TAIL", "TAIL_BLOCK")), frozenset(("ROW", "ROW_BLOCK", "HEAD_STRIDE"))
OF_SPLIT = frozenset(("key_stride_d", "VALUE", "VALUE_BLOCK"))
WEIGHTS = "rope_norm_weights"  # the kernel that adds up the weights' gradients from parts
PARTS_AT_ONCE, COLUMNS_AT_ONCE = 512, 8  # of the parts, for a program of WEIGHTS; 8 columns are a sector of 32 bytes
OF_BOUNDS = frozenset(("cu_seqlens", "sequences", "SEARCH_STEPS", "SEARCH_FAN"))
OF_OUT = frozenset((  # of calls out of place
    "out", "key_out", "out_stride_s", "out_stride_b", "out_stride_h", "out_stride_d",
    "key_out_stride_s", "key_out_stride_b", "key_out_stride_h",
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeCall:
    """The tensors of one checked call. A tensor is anything with data_ptr, stride and dtype.

    Strides are in elements, in the order seq, batch, heads, head_dim; a packed call has batch 1 and batch stride 0.
    The fields from ``key`` on are used by complete calls only.
    """

    SCRATCH = (
        "weight_grad",
        "key_weight_grad",
        "partials",
        "angle_grad",
    )  # written besides ``out``: checks of the inputs leave them out

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
    positions: Any = None  # the offset, starts, ids or axes, as spec.positions says
    position_strides: tuple[int, int] = (0, 0)  # seq, batch
    axis_stride: int = 0  # of positions with axes
    offset: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    scaling: float = 1.0
    # Of a norm: the weights of x and of the key, contiguous, [head_dim] or [heads * head_dim] each.
    weight: Any = None
    key_weight: Any = None
    eps: float = 0.0
    # Of a cache. If value is None, the key, the value and both caches are parts of x: see ``_cache_in``.
    value: Any = None
    key_cache: Any = None
    value_cache: Any = None
    slots: Any = None  # [slot_count], int32 or int64: each token's place, page * page_size + slot; negative: none
    key_scale: Any = None  # float32, or None for none
    value_scale: Any = None
    slot_count: int = 0  # tokens past it have no slot
    pages: int = 0
    page_size: int = 0
    slot_stride: int = 0
    value_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    key_cache_strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # page, slot, head, feature
    value_cache_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    scale_strides: tuple[int, int] = (0, 0)  # of key_scale and of value_scale: 0 if all heads share one
    # Of the gradient of a norm or of angles: the forward's x and key. Of the gradient of a norm also: the weights'
    # gradients, and ``partials``, which has ``parts(spec, ...)`` numbers of float32.
    given: Any = None
    key_given: Any = None
    given_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    key_given_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    weight_grad: Any = None
    key_weight_grad: Any = None
    partials: Any = None
    angle_grad: Any = None  # the gradients of each token's angles, float32, of shape ``token_angles(spec, ...)``


def kernel_name(spec: RopeSpec, variant: RopeVariant) -> str:
    """Module and function name of the kernel: every text axis, in a fixed order."""
    calls = spec.layout if spec.plain else "complete"
    if spec.gradient_of_norm:
        return f"rope_norm_backward_{spec.style}_{spec.angles}"
    if spec.angle_gradient:
        return f"rope_angle_gradient_{spec.style}_{spec.angles}"
    if spec.splits:
        return f"rope_mla_{'backward_' if spec.sums_heads else ''}{spec.style}_{spec.angles}"
    if spec.deinterleaves:
        return f"rope_{calls}_{'inplace' if spec.inplace else 'copy'}_deinterleave_{spec.angles}"
    calls = "norm" if spec.normed else calls
    if spec.appends:
        return f"rope_{'norm_' if spec.normed else ''}append_{spec.style}_{spec.angles}"
    style = "rows" if variant.whole_rows else spec.style
    return f"rope_{calls}_{'inplace' if spec.inplace else 'copy'}_{style}_{spec.angles}"


def kernel_names(spec: RopeSpec, variant: RopeVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches, in order."""
    return (kernel_name(spec, variant), *((WEIGHTS,) if spec.gradient_of_norm else ()))


def _key_in(tensor: Any, spec: RopeSpec, call: RopeCall) -> Any:
    """The key inside x: after the query's heads of each token or, if x is [rows, head_dim], after all of the query.

    MLA's tensors are flat: k_pe follows kv, and the value follows the key. Their gradients lie in the same way.
    """
    if spec.splits:
        return tensor[call.batch * call.seq * spec.heads * spec.split_dims[tensor is call.out] :]
    rows = tensor.ndim == 2  # noqa: PLR2004 - [rows, head_dim]
    return tensor[call.batch * call.seq * spec.heads :] if rows else tensor.narrow(-2, spec.heads, spec.key_heads)


def flat_rows(spec: RopeSpec, call: RopeCall) -> int:
    """Elements of a flat x before its caches: the packed rows of all tokens."""
    return call.seq * spec.all_heads * spec.head_dim


def _cache_in(spec: RopeSpec, call: RopeCall) -> RopeCall:
    """The call with views of a flat x: each token's rows of the query, the key and the value, then both caches."""
    key_at, value_at = spec.heads * spec.head_dim, (spec.heads + spec.key_heads) * spec.head_dim
    caches = call.x[flat_rows(spec, call) :].chunk(2)
    if spec.cache == "float8":
        caches = [cache.view(torch.float8_e4m3fn) for cache in caches]
    key, value = call.x[key_at:], call.x[value_at:]
    return dataclasses.replace(call, key=key, key_out=key, value=value, key_cache=caches[0], value_cache=caches[1])


def _left_out(spec: RopeSpec, variant: RopeVariant) -> frozenset[str]:
    """The parameters that a call's kernel does not have."""
    without = [
        (OF_OUT, spec.inplace),
        (frozenset({"sin"}), spec.computes_sincos),
        (OF_COMPLETE, spec.plain),
        (OF_BOUNDS, not spec.takes_bounds),
        (OF_NORM, not spec.normed),
        (OF_CACHE, not spec.appends),
        (frozenset({"CHUNKS"}), not spec.takes_chunks),
        (OF_GIVEN, not spec.reads_given),
        (frozenset({"partials"}), not spec.gradient_of_norm),
        (OF_GRADIENT_OF_ANGLES, not spec.angle_gradient),
        (OF_SPLIT, not spec.splits),
        (frozenset({"DEINTERLEAVES"}), not (spec.splits or spec.angle_gradient)),
        (OF_PAIRS if variant.whole_rows else OF_ROWS, True),
    ]
    return frozenset().union(*(names for names, are_left_out in without if are_left_out))


def weight_features(spec: RopeSpec) -> tuple[int, int]:
    """Features of the weights of a norm: that of x, and that of the key."""
    heads = (spec.heads, spec.key_heads) if spec.norm == "all" else (1, min(1, spec.key_heads))
    return heads[0] * spec.head_dim, heads[1] * spec.head_dim


def parts(spec: RopeSpec, variant: RopeVariant, seq: int, batch: int) -> int:
    """How many numbers ``RopeCall.partials`` has: a row for each program of the gradient of a norm."""
    return programs(spec, variant, seq, batch) * sum(weight_features(spec))


def token_angles(spec: RopeSpec, seq: int, batch: int) -> tuple[int, int, int, int]:
    """The shape of ``RopeCall.angle_grad``: 1 for radians or 2 for cosines and sines; then batch, seq, entries."""
    entries = spec.rotary_dim // 2 * (2 if spec.angle_entries == "feature" else 1)
    return 1 if spec.computes_sincos else 2, batch, seq, entries


class _Key(NamedTuple):
    """What a launch gets as its key: the call's key, a part of x, or x itself if there is no key."""

    tensor: Any
    out: Any
    strides: tuple[int, int, int, int]
    out_strides: tuple[int, int, int, int]
    given: Any  # the forward's key, for a gradient
    given_strides: tuple[int, int, int, int]


def launches(spec: RopeSpec, variant: RopeVariant, call: RopeCall) -> tuple[Launch, ...]:
    """The launch of the call: exactly one; two for the gradient of a norm.

    For a tensor that a kernel does not read, it gets another tensor's address.
    """
    if spec.appends and call.value is None:
        call = _cache_in(spec, call)
    key, left_out = _key(spec, call), _left_out(spec, variant)
    strides = [call.x_strides, call.out_strides, key.strides, key.out_strides]
    strides += [call.given_strides, key.given_strides] if spec.reads_given else []
    strides += [call.value_strides] if spec.appends else []
    count = programs(spec, variant, call.seq, call.batch)
    one = Launch(
        kernel=kernel_name(spec, variant),
        programs=count,
        arguments=tuple(value for name, value in _arguments(spec, call, key).items() if name not in left_out),
        constants={n: value for n, value in _constants(spec, variant, call, strides).items() if n not in left_out},
        # The option is passed only if it is on: backends other than CUDA do not know it.
        options={"num_warps": variant.num_warps, "num_stages": 1, **({"launch_pdl": True} if variant.pdl else {})},
    )
    return (one, _weights_launch(spec, variant, call, count)) if spec.gradient_of_norm else (one,)


def _key(spec: RopeSpec, call: RopeCall) -> _Key:
    """The key of a launch."""
    key, key_out, key_strides, key_out_strides = call.key, call.key_out, call.key_strides, call.key_out_strides
    if key is None and (spec.key_heads or spec.splits):
        key, key_out = _key_in(call.x, spec, call), _key_in(call.out, spec, call)
    elif key is None:
        key, key_out, key_strides, key_out_strides = call.x, call.out, call.x_strides, call.out_strides
    key_given, key_given_strides = call.key_given, call.key_given_strides
    if key_given is None:
        key_given = _key_in(call.given, spec, call) if spec.reads_given and spec.key_heads else call.given
        key_given_strides = key_given_strides if spec.key_heads else call.given_strides
    return _Key(key, key_out, key_strides, key_out_strides, key_given, key_given_strides)


def _arguments(spec: RopeSpec, call: RopeCall, key: _Key) -> dict[str, Any]:
    """Every parameter that some kernel has and that is not a constant, in the order of the kernels' signatures."""
    return {
        "x": call.x,
        "out": call.out,
        "cos": call.cos,  # or freqs or inv_freq
        "sin": call.sin,
        "cu_seqlens": call.cos if call.cu_seqlens is None else call.cu_seqlens,
        "key": key.tensor,
        "key_out": key.out,
        "positions": call.cos if call.positions is None else call.positions,
        "weight": call.weight,
        "key_weight": call.weight if call.key_weight is None else call.key_weight,
        "value": call.value,
        "key_cache": call.key_cache,
        "value_cache": call.value_cache,
        "slots": call.slots,
        "key_scale": call.cos if call.key_scale is None else call.key_scale,
        "value_scale": call.cos if call.value_scale is None else call.value_scale,
        "given": call.given,
        "key_given": key.given,
        "partials": call.partials,
        "angle_grad": call.angle_grad,
        "offset": call.offset,
        "seq": call.seq,
        "batch": call.batch,
        "angle_rows": call.angle_rows,
        **_strides("x", call.x_strides),
        "stride_d": call.x_strides[3],
        **_strides("out", call.out_strides),
        "out_stride_d": call.out_strides[3],
        "angle_stride_s": call.angle_strides[0],
        "angle_stride_d": call.angle_strides[1],
        "sequences": call.sequences,
        "cp_size": call.axis_stride if spec.positions == "axes" else call.cp_size,
        "cp_rank": call.cp_rank,
        "scaling": call.scaling,
        "eps": call.eps,
        **_strides("key", key.strides),
        "key_stride_d": key.strides[3],
        "angle_stride_b": call.angle_stride_b,
        "position_stride_s": call.position_strides[0],
        "position_stride_b": call.position_strides[1],
        **_strides("key_out", key.out_strides),
        "slot_count": call.slot_count,
        "cache_slots": call.pages * call.page_size,
        "slot_stride": call.slot_stride,
        "value_stride_s": call.value_strides[0],
        "value_stride_h": call.value_strides[2],
        **_cache_strides("key", call.key_cache_strides),
        **_cache_strides("value", call.value_cache_strides),
        "cache_stride_d": call.key_cache_strides[3],
        "key_scale_stride": call.scale_strides[0],
        "value_scale_stride": call.scale_strides[1],
        **_strides("given", call.given_strides),
        "given_stride_d": call.given_strides[3],
        **_strides("key_given", key.given_strides),
    }


def _constants(
    spec: RopeSpec, variant: RopeVariant, call: RopeCall, strides: list[tuple[int, int, int, int]]
) -> dict[str, Any]:
    """Every constant that some kernel has; ``strides``: of all tensors that have rows."""
    tail = spec.head_dim - spec.rotary_dim if spec.copies_tail else 0
    load_evict, store_cache, angle_evict = CACHE[variant.cache]
    return {
        "HEADS": spec.heads,
        "PAIRS": spec.moved_pairs,
        "ROW": row_features(spec),
        "ROW_BLOCK": next_power_of_2(row_features(spec)),
        "HEAD_STRIDE": spec.head_dim if side_by_side(spec, *strides) else 0,
        "PAIR_BLOCK": half_block(spec),
        "TAIL": tail,
        "TAIL_BLOCK": next_power_of_2(max(tail, 1)),
        "PER_FEATURE": spec.angle_entries == "feature",
        "BACKWARD": spec.direction == "backward",
        "BLOCK_TOKENS": variant.block_tokens,
        "BLOCK_HEADS": rows_of_tile(spec, variant),
        "ORDER": variant.order,
        "LOAD_EVICT": load_evict,
        "STORE_CACHE": store_cache,
        "PDL": variant.pdl,
        "MULTIPLE": _multiple_of_rows(spec, variant, call, *strides),
        "ANGLE_MULTIPLE": _multiple_of_angles(spec, call),
        "SEARCH_STEPS": search_steps(call.sequences),
        # At least one place for each thread: with fewer, Triton lets every thread load all of them.
        "SEARCH_FAN": max(SEARCH_FAN, 32 * variant.num_warps // variant.block_tokens),
        "KEY_HEADS": spec.key_heads,
        "COPIED_HEADS": spec.copied_heads,
        "TURNED_PAIRS": spec.rotary_dim // 2,
        "PAIR_DISTANCE": spec.pair_distance,
        "FIRST_FEATURE": spec.head_dim - spec.rotary_dim if spec.rotated == "last" else 0,
        "TAIL_FEATURE": 0 if spec.rotated == "last" else spec.rotary_dim,
        "CONJUGATE": spec.conjugate,
        "SCALED": spec.scaled,
        "ANGLES_PER_BATCH": spec.angles_per_batch,
        "POSITIONS": "order" if spec.positions == "shifted" else spec.positions,
        **_sections(spec),
        "PACKED": spec.packed,
        "CONTEXT_PARALLEL": spec.context_parallel,
        "ANGLE_EVICT": angle_evict,
        "HEAD_DIM": spec.head_dim,
        "NORM_ALL": spec.norm == "all",
        "ZERO_CENTERED": spec.zero_centered,
        "ROUNDING": spec.rounding,
        "STAGES": stages(spec, variant),
        "CHUNKS": rows_at_once(spec, variant) // rows_of_tile(spec, variant),
        "VALUE": spec.value_dim,
        "VALUE_BLOCK": next_power_of_2(max(spec.value_dim, 1)),
        "DEINTERLEAVES": spec.deinterleaves,
        "WRITTEN_HEADS": spec.heads + (spec.key_heads if spec.key_inplace else 0),
        "TAIL_HEADS": 0 if spec.normed else spec.heads,
        "PAGE_SIZE": call.page_size,
        "CACHE_MULTIPLE": _multiple_of_cache(spec, call) if spec.appends else 1,
        "FLOAT8": spec.cache == "float8",
        "CACHE_SCALED": call.key_scale is not None,
    }


def _weights_launch(spec: RopeSpec, variant: RopeVariant, call: RopeCall, count: int) -> Launch:
    """The launch that adds up the parts of the weights' gradients, which ``count`` programs stored."""
    width, key_width = weight_features(spec)
    key_weight_grad = call.weight_grad if call.key_weight_grad is None else call.key_weight_grad
    return Launch(
        kernel=WEIGHTS,
        programs=ceil_div(width + key_width, COLUMNS_AT_ONCE),
        arguments=(call.partials, call.weight_grad, key_weight_grad, count),
        constants={
            "WIDTH": width,
            "KEY_WIDTH": key_width,
            "BLOCK_PROGRAMS": PARTS_AT_ONCE,
            "BLOCK": COLUMNS_AT_ONCE,
            "PDL": variant.pdl,
        },
        options={"num_warps": 4, "num_stages": 1, **({"launch_pdl": True} if variant.pdl else {})},
    )


def _sections(spec: RopeSpec) -> dict[str, Any]:
    """Where the pairs of axes 1 to 3 begin, or end if sections are interleaved; an axis that is missing gets no pair."""
    if spec.sections_interleaved:
        ends = [3 * spec.sections[1], 3 * spec.sections[2], 0]
    else:
        begins = list(itertools.accumulate(spec.sections))[:-1]
        ends = [*begins, *[spec.rotary_dim] * 3][:3]
    named = {f"SECTION_{axis}": end for axis, end in enumerate(ends, 1)}
    return {**named, "SECTIONS_INTERLEAVED": spec.sections_interleaved}


def side_by_side(spec: RopeSpec, *tensors: tuple[int, int, int, int]) -> bool:
    """Whether in all tensors each row begins where the last one ends: heads, and batch entries if ``merges_batch``."""
    wide = spec.heads * spec.head_dim
    return all(steps[2] == spec.head_dim and (not spec.merges_batch or steps[1] == wide) for steps in tensors)


def _multiple_of_rows(spec: RopeSpec, variant: RopeVariant, call: RopeCall, *tensors: tuple[int, int, int, int]) -> int:
    """How many elements, up to 16 bytes of them, divide all strides of rows; 1 if 16 divide them, which Triton sees itself.

    An axis of length 1 does not count: nothing is multiplied by its stride.
    """
    longer = call.seq > 1, call.batch > 1, spec.heads > 1 or spec.key_heads > 1
    common = math.gcd(*(step for steps in tensors for step, counts in zip(steps, longer, strict=False) if counts))
    common = common or spec.head_dim
    if common % ALIGNED == 0:
        return 1
    # Both features of a pair are loaded alike.
    apart = 0 if spec.interleaved or variant.whole_rows else spec.pair_distance
    return math.gcd(common, apart, VECTOR_BYTES // ITEM_SIZE[spec.dtype])


def _multiple_of_cache(spec: RopeSpec, call: RopeCall) -> int:
    """``_multiple_of_rows`` for the strides of both caches."""
    longer = call.pages > 1, call.page_size > 1, spec.key_heads > 1
    tensors = call.key_cache_strides, call.value_cache_strides
    shared = math.gcd(*(step for steps in tensors for step, counts in zip(steps, longer, strict=False) if counts))
    shared = shared or spec.head_dim
    if shared % ALIGNED == 0:
        return 1
    apart = 0 if spec.interleaved else spec.pair_distance
    item = 1 if spec.cache == "float8" else ITEM_SIZE[spec.dtype]
    return math.gcd(shared, apart, VECTOR_BYTES // item)


def _multiple_of_angles(spec: RopeSpec, call: RopeCall) -> int:
    """``_multiple_of_rows`` for a table of angles; the two entries of a pair, if they differ, are half a row apart."""
    strides = [call.angle_strides[0]] if call.angle_rows > 1 else []
    strides += [call.angle_stride_b] if spec.angles_per_batch and call.batch > 1 else []
    common = math.gcd(spec.rotary_dim // 2, *strides)
    return math.gcd(common, VECTOR_BYTES // ITEM_SIZE[spec.angle_dtype]) if common % ALIGNED else 1


def _strides(tensor: str, strides: tuple[int, int, int, int]) -> dict[str, int]:
    """The strides of tokens, batch entries and heads. The stride of features is another parameter."""
    return dict(zip((f"{tensor}_stride_s", f"{tensor}_stride_b", f"{tensor}_stride_h"), strides[:3], strict=True))


def _cache_strides(tensor: str, strides: tuple[int, int, int, int]) -> dict[str, int]:
    """The strides of the pages, slots and heads of a cache. Both caches share one stride of features."""
    return dict(zip((f"{tensor}_page_stride", f"{tensor}_slot_stride", f"{tensor}_head_stride"), strides, strict=False))
