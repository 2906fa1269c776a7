"""What tuning needs to know of RoPE besides its kernels: inputs, the float64 reference, baselines, default problems."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from generator.problem import Problem
from tuned.rope.arguments import strides_of
from tuned.rope.eager import rotate
from tuned.rope.launches import RopeCall
from tuned.rope.spec import DIRECTIONS, ITEM_SIZE, RopeSize, RopeSpec
from tuned.rope.variant import RopeVariant

if TYPE_CHECKING:
    from collections.abc import Iterator

THETA = 500_000.0  # base of Llama 3's rotary frequencies: spreads angles from 1e-5 to 1 radian a position
# Unit roundoff: what one rounding to the type may change, relative.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def _shape(spec: RopeSpec, size: RopeSize) -> tuple[int, ...]:
    tokens = {"bshd": (size.batch, size.seq), "sbhd": (size.seq, size.batch), "thd": (size.tokens,)}[spec.layout]
    return (*tokens, spec.heads, spec.head_dim)


def inputs(spec: RopeSpec, size: RopeSize, device: str, seed: int) -> RopeCall:
    """One set of random inputs: x normal, angles those of a model; out not filled.

    On the device "meta" nothing is allocated: enough to compile for.
    """
    dtype = getattr(torch, spec.dtype)
    shape = _shape(spec, size)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    x = torch.empty(shape, dtype=dtype, device=device)
    if generator is not None:
        x.normal_(generator=generator)
    out = x if spec.inplace else torch.empty_like(x)
    pairs = spec.rotary_dim // 2
    rates = THETA ** -(torch.arange(pairs, device=device, dtype=torch.float64) / pairs)
    angles = torch.arange(size.seq, device=device, dtype=torch.float64)[:, None] * rates
    if spec.angle_entries == "feature":
        angles = torch.cat((angles, angles), -1) if not spec.interleaved else angles.repeat_interleave(2, -1)
    angle_dtype = getattr(torch, spec.angle_dtype)
    first = angles.to(angle_dtype) if spec.takes_sine else angles.cos().to(angle_dtype)
    second = None if spec.takes_sine else angles.sin().to(angle_dtype)
    cu_seqlens = None
    if spec.packed:
        cu_seqlens = torch.arange(size.batch + 1, device=device, dtype=torch.int32) * size.seq
    return RopeCall(
        x=x,
        out=out,
        cos=first,
        sin=second,
        seq=size.tokens if spec.packed else size.seq,
        batch=1 if spec.packed else size.batch,
        angle_rows=size.seq,
        x_strides=strides_of(spec.layout, x),
        out_strides=strides_of(spec.layout, out),
        angle_strides=(first.stride(0), first.stride(1)),
        cu_seqlens=cu_seqlens,
        sequences=size.batch if spec.packed else 0,
    )


def _positions(spec: RopeSpec, call: RopeCall) -> torch.Tensor:
    """Position of each token along the token axis of x: [seq], for a packed call by cu_seqlens."""
    tokens = torch.arange(call.seq, device=call.x.device)
    if not spec.packed:
        return tokens
    bounds = call.cu_seqlens.long()
    owner = torch.searchsorted(bounds, tokens, right=True) - 1
    return tokens - bounds[owner]


def reference(spec: RopeSpec, call: RopeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that one rounding and float32 arithmetic may leave, per element.

    The bound: half a unit in the last place of the result for the store, and in float32, for each of the two
    products, 2 units in the last place for sine and cosine (CUDA's documented bound), one rounding each for the
    product and the sum: 4 x 2^-24 of |first| + |second|.
    """
    x = call.x.double()
    cos = call.cos.double()
    sin = torch.sin(cos) if spec.takes_sine else call.sin.double()
    cos = torch.cos(cos) if spec.takes_sine else cos
    rows = _positions(spec, call)
    cos, sin = cos[rows], sin[rows]
    # [seq, ...] to the axes of x
    shape = {"bshd": (1, -1, 1), "sbhd": (-1, 1, 1), "thd": (-1, 1)}[spec.layout]
    cos, sin = (a.view(*shape, a.shape[-1]) for a in (cos, sin))
    half = spec.rotary_dim // 2
    head, tail = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
    if spec.interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        entries = (slice(0, None, 2), slice(1, None, 2))
    else:
        first, second = head[..., :half], head[..., half:]
        entries = (slice(0, half), slice(half, None))
    if spec.angle_entries == "pair":
        entries = (slice(None), slice(None))
    cos_first, cos_second = cos[..., entries[0]], cos[..., entries[1]]
    sin_first, sin_second = sin[..., entries[0]], sin[..., entries[1]]
    if spec.direction == "backward":
        sin_first, sin_second = -sin_second, -sin_first
    out_first = first * cos_first - second * sin_first
    out_second = second * cos_second + first * sin_second
    size = first.abs() + second.abs()
    out = _join(spec, out_first, out_second)
    # Both features of a pair get the bound of the pair.
    bound = _join(spec, size, size) * 4 * 2.0**-24 + out.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype]
    return torch.cat((out, tail), -1), torch.cat((bound, torch.zeros_like(tail)), -1)


def _join(spec: RopeSpec, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if spec.interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def eager(spec: RopeSpec, call: RopeCall) -> Any:
    """The eager PyTorch baseline of the same call, as dispatch would run it."""
    return lambda: rotate(spec, call)


def bytes_moved(spec: RopeSpec, size: RopeSize) -> int:
    """Bytes that any implementation must move: x read and written once, the angles read once a position."""
    return size.tokens * spec.bytes_per_token() + size.seq * spec.bytes_per_position()


def tensor_bytes(spec: RopeSpec, size: RopeSize) -> int:
    """Bytes of one set of inputs and outputs."""
    x = size.tokens * spec.heads * spec.head_dim * ITEM_SIZE[spec.dtype]
    return (1 if spec.inplace else 2) * x + size.seq * spec.bytes_per_position()


def features(variant: RopeVariant) -> tuple[int, ...]:
    """What a model of the time should see beside the knobs, in octaves: rows of a tile, and rows a warp."""
    rows = variant.block_tokens * variant.block_heads
    return round(math.log2(rows)), round(math.log2(rows / variant.num_warps))


def problems() -> Iterator[Problem]:
    """The default problems, most common first; head counts are those of the models' public configurations."""

    def problem(name: str, spec: RopeSpec, batch: int, seq: int) -> Problem:
        return Problem(f"{name}_{batch}x{seq}", "rope", spec, RopeSize(batch, seq))

    def bf16(layout: str, heads: int, dim: int, rotary: int | None = None, **rest: Any) -> RopeSpec:
        return RopeSpec(layout, "bfloat16", heads, dim, rotary or dim, **rest)

    def each_way(name: str, spec: RopeSpec, batch: int, seq: int) -> Iterator[Problem]:
        """A shape in every layout, forward and backward: the grid that the benchmark measures."""
        for direction, layout in itertools.product(DIRECTIONS, ("bshd", "sbhd", "thd")):
            words = [name, *([layout] if layout != "bshd" else []), *([direction] if direction != "forward" else [])]
            yield problem("_".join(words), dataclasses.replace(spec, layout=layout, direction=direction), batch, seq)

    llama, kv, study, half = (
        bf16("bshd", 32, 128),
        bf16("bshd", 8, 128),
        bf16("bshd", 10, 512),
        bf16("bshd", 32, 128, 64),
    )
    given = dataclasses.replace(llama, angles="cos_sin")
    every_feature = dataclasses.replace(llama, angle_entries="feature")
    yield from each_way("llama3_8b", llama, 2, 4096)
    yield from each_way("llama3_8b_decode", llama, 64, 1)
    yield from each_way("llama3_8b_prefill", llama, 1, 128)
    yield problem("llama3_8b_cos_sin", given, 2, 4096)
    yield from each_way("llama3_8b_cos_sin_decode", given, 64, 1)
    yield from each_way("llama3_8b_cos_sin_prefill", given, 1, 128)
    yield problem("llama3_8b_cos_sin_inplace", dataclasses.replace(given, inplace=True), 2, 4096)
    for layout in ("bshd", "sbhd", "thd"):
        inplace = dataclasses.replace(llama, layout=layout, inplace=True)
        yield problem(f"llama3_8b_inplace_{layout}", inplace, 2, 4096)
        yield problem(f"llama3_8b_feature_{layout}", dataclasses.replace(every_feature, layout=layout), 2, 4096)
        yield problem(f"half_rotary_inplace_{layout}", dataclasses.replace(inplace, rotary_dim=64), 4, 4096)
        yield problem(f"study_inplace_{layout}", dataclasses.replace(study, layout=layout, inplace=True), 16, 512)
        over_kv = dataclasses.replace(kv, layout=layout, inplace=True)
        yield problem(f"llama3_8b_kv_inplace_{layout}", over_kv, 1, 32768)
        yield problem(f"llama3_8b_kv_128k_inplace_{layout}", over_kv, 1, 131072)
    yield problem("llama3_8b_inplace_decode", dataclasses.replace(llama, inplace=True), 64, 1)
    yield from each_way("llama3_8b_kv", kv, 1, 32768)
    yield from each_way("llama3_8b_kv_128k", kv, 1, 131072)
    yield from each_way("study", study, 16, 512)
    yield from each_way("half_rotary", half, 4, 4096)
    yield problem("llama3_70b", bf16("bshd", 64, 128), 1, 8192)
    yield problem("glm4_interleaved", bf16("bshd", 32, 128, 64, style="interleaved"), 2, 8192)
    yield problem("gptj_interleaved_sbhd", bf16("sbhd", 16, 256, 64, style="interleaved"), 4, 2048)
    yield problem("qwen2_7b", bf16("bshd", 28, 128), 4, 4096)
    yield problem("gpt_neox_20b_25_percent", bf16("bshd", 64, 96, 24), 4, 2048)
    yield problem("phi2_partial", bf16("bshd", 32, 80, 32), 8, 2048)
    yield problem("gemma3_4b", bf16("bshd", 8, 256), 2, 8192)
    yield problem("gpt_oss", bf16("bshd", 64, 64), 1, 8192)
    yield problem("packed_16_sequences", bf16("thd", 32, 128), 16, 4096)
    yield problem("packed_1024_sequences", bf16("thd", 32, 128), 1024, 64)
    yield problem("llama3_8b_fp16", RopeSpec("bshd", "float16", 32, 128, 128), 2, 4096)
    yield problem("llama3_8b_fp32", RopeSpec("bshd", "float32", 32, 128, 128), 2, 4096)
    # The studies' own calls: float32, sbhd, an entry a feature, small.
    for seq, heads, dim in ((64, 16, 64), (128, 16, 128), (32, 8, 256)):
        small = RopeSpec("sbhd", "float32", heads, dim, dim, angle_entries="feature")
        yield problem(f"study_small_{dim}", small, 1, seq)
