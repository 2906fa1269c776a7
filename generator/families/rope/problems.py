"""Default problems of RoPE, most common first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tuned.families.rope.spec import DIRECTIONS, RopeSize, RopeSpec

from ...problem import Problem


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
    yield from _complete(problem, bf16)
    yield from _normed(problem, bf16)
    yield from _of_axes(problem, bf16)
    yield from _latent(problem, bf16)
    yield from _cached(problem, bf16)
    yield from _learned(problem, bf16)
    # The calls of the studies: small, float32, sbhd, one angle entry for each feature.
    for seq, heads, dim in ((64, 16, 64), (128, 16, 128), (32, 8, 256)):
        small = RopeSpec("sbhd", "float32", heads, dim, dim, angle_entries="feature")
        yield problem(f"study_small_{dim}", small, 1, seq)


def _complete(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Complete calls of models: with a query and a key, with given positions, or rotating other features than the first."""
    llama, kv = (
        bf16("bshd", heads, 128, angles="cos_sin", key_heads=key_heads) for heads, key_heads in ((32, 8), (8, 2))
    )
    sizes = ((llama, 2, 4096), (kv, 1, 32768), (kv, 1, 131072), (llama, 1, 128), (llama, 64, 1))
    for (spec, batch, seq), angles, inplace in itertools.product(sizes, ("cos_sin", "freqs"), (False, True)):
        heads = "qk" if spec.heads == llama.heads else "qk_8_2"
        name = f"{heads}_{angles}{'_inplace' if inplace else ''}"
        yield problem(name, dataclasses.replace(spec, angles=angles, inplace=inplace), batch, seq)
    for spec, batch, seq in sizes[:3]:
        backward = dataclasses.replace(spec, angles="freqs", direction="backward")
        yield problem("qk_backward", backward, batch, seq)
    packed = dataclasses.replace(llama, layout="thd", angles="freqs")
    for sequences in (1, 16, 256, 2401):
        yield problem("qk_packed", packed, sequences, 65536 // sequences)
    served = dataclasses.replace(llama, layout="thd", inplace=True, positions="ids")
    models = {
        "llama3_8b": served,
        "llama3_70b_8_ranks": dataclasses.replace(served, heads=8, key_heads=1),
        "gpt_oss": dataclasses.replace(served, heads=64, head_dim=64, rotary_dim=64),
    }
    for (name, spec), octave in itertools.product(models.items(), range(10)):
        yield problem(f"{name}_served", spec, 1, 2**octave)
    for octave in (10, 11, 12, 13, 14, 15, 17):
        yield problem("llama3_8b_served", served, 1, 2**octave)
    yield problem("qk_inv_freq", dataclasses.replace(llama, angles="inv_freq"), 2, 4096)
    yield problem("qk_8_2_inv_freq", dataclasses.replace(kv, angles="inv_freq"), 1, 32768)
    yield problem("llama3_8b_served_inv_freq", dataclasses.replace(served, angles="inv_freq"), 1, 64)
    yield problem("qk_starts_inplace", dataclasses.replace(llama, inplace=True, positions="starts"), 64, 1)
    # A packed qkv out of place, for training: v is copied.
    qkv = dataclasses.replace(llama, heads=48, key_heads=0, copied_heads=8, angles="freqs")
    for direction in DIRECTIONS:
        yield problem(f"qkv_{direction}", dataclasses.replace(qkv, direction=direction), 2, 4096)
    mla = bf16(
        "thd", 128, 192, 64, style="interleaved", rotated="last", inplace=True, positions="ids", angles="cos_sin"
    )
    yield problem("deepseek_v3_last_inplace", mla, 1, 4096)
    in_order = dataclasses.replace(mla, positions="order", angles="freqs")
    yield problem("deepseek_v3_last_in_order_inplace", in_order, 1, 4096)
    gemma = bf16("bshd", 8, 512, 128, rotated="proportional", angles="cos_sin")
    yield problem("gemma4_proportional", gemma, 1, 8192)
    yield problem("gemma4_proportional_inplace", dataclasses.replace(gemma, inplace=True), 1, 8192)
    glm = bf16("bshd", 32, 128, 64, style="interleaved", angles="cos_sin", key_heads=2)
    yield problem("glm4_qk", glm, 2, 8192)
    yield problem("glm4_qk_freqs", dataclasses.replace(glm, angles="freqs"), 2, 8192)
    yield problem("gpt_neox_qk", bf16("bshd", 64, 96, 24, angles="cos_sin", key_heads=64), 4, 2048)


def _normed(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Calls of models that normalise queries and keys before they rotate them."""
    qwen = bf16("bshd", 32, 128, angles="cos_sin", key_heads=8, norm="head")
    models = {
        "qwen3_8b_norm": qwen,
        "qwen3_235b_norm": dataclasses.replace(qwen, heads=64, key_heads=4),
        "gemma3_4b_norm": bf16("bshd", 8, 256, angles="cos_sin", key_heads=4, norm="head", zero_centered=True),
        "olmo2_7b_norm": bf16("bshd", 32, 128, angles="cos_sin", key_heads=32, norm="all"),
        "olmo2_32b_norm": bf16("bshd", 40, 128, angles="cos_sin", key_heads=8, norm="all"),
    }
    for (name, spec), direction in itertools.product(models.items(), DIRECTIONS):
        word = "" if direction == "forward" else f"_{direction}"
        yield problem(f"{name}{word}", dataclasses.replace(spec, direction=direction), 1, 4096)
    for direction in DIRECTIONS:
        word = "" if direction == "forward" else f"_{direction}"
        yield problem(f"qwen3_8b_norm{word}", dataclasses.replace(qwen, direction=direction), 1, 32768)
    served = dataclasses.replace(qwen, layout="thd", inplace=True, positions="ids")
    for tokens in (1, 16, 64, 512, 4096):
        yield problem("qwen3_8b_norm_served", served, 1, tokens)


def _of_axes(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Calls of image and video models: a token's time, height and width each rotate some of the pairs."""
    vision = {"positions": "axes", "angles": "cos_sin"}
    qwen = bf16("thd", 28, 128, key_heads=4, inplace=True, sections=(16, 24, 24), **vision)
    for tokens in (1, 64, 8192):
        yield problem("qwen25_vl_7b_mrope_served", qwen, 1, tokens)
    qwen3 = bf16("bshd", 32, 128, key_heads=8, sections=(24, 20, 20), sections_interleaved=True, **vision)
    wan = bf16("bshd", 40, 128, key_heads=40, style="interleaved", sections=(22, 21, 21), **vision)
    for direction in DIRECTIONS:
        word = "" if direction == "forward" else f"_{direction}"
        yield problem(f"qwen3_vl_8b_mrope{word}", dataclasses.replace(qwen3, direction=direction), 1, 8192)
        yield problem(f"wan_14b_axial{word}", dataclasses.replace(wan, direction=direction), 1, 8192)


def _latent(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Calls of multi-head latent attention in training: DeepSeek V3, in Megatron's style and in DeepSeek's."""
    kv = bf16(
        "sbhd",
        128,
        192,
        64,
        rotated="last",
        value_dim=128,
        angles="cos_sin",
        angle_entries="feature",
        deinterleaves=True,
    )
    models = {
        "deepseek_v3_mla_kv": kv,
        "deepseek_v3_mla_kv_thd": dataclasses.replace(kv, layout="thd"),
        "deepseek_v3_mla_kv_interleaved": dataclasses.replace(
            kv, style="interleaved", deinterleaves=False, angle_entries="pair"
        ),
        "deepseek_v3_mla_kv_8_ranks": dataclasses.replace(kv, heads=16),
    }
    for (name, spec), direction in itertools.product(models.items(), DIRECTIONS):
        word = "" if direction == "forward" else f"_{direction}"
        yield problem(f"{name}{word}", dataclasses.replace(spec, direction=direction), 1, 4096)
    query = dataclasses.replace(kv, value_dim=0, inplace=True)
    for layout in ("sbhd", "thd"):
        yield problem(f"deepseek_v3_mla_q_{layout}_inplace", dataclasses.replace(query, layout=layout), 1, 4096)
    backward = dataclasses.replace(query, inplace=False, direction="backward")
    yield problem("deepseek_v3_mla_q_backward", backward, 1, 4096)


def _cached(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Calls of servers, which keep the rotated key and the value in pages of a cache."""
    served = {"angles": "cos_sin", "key_heads": 8, "inplace": True, "positions": "ids"}
    llama = bf16("thd", 32, 128, cache="same", **served)
    for tokens in (1, 16, 64, 512, 4096, 32768):
        yield problem("llama3_8b_append", llama, 1, tokens)
    for tokens in (64, 4096):
        yield problem("llama3_8b_append_hnd", dataclasses.replace(llama, cache_layout="HND"), 1, tokens)
        yield problem("llama3_8b_append_float8", dataclasses.replace(llama, cache="float8"), 1, tokens)
        yield problem("qwen3_8b_norm_append", dataclasses.replace(llama, norm="head"), 1, tokens)


def _learned(problem: Callable[..., Problem], bf16: Callable[..., RopeSpec]) -> Iterator[Problem]:
    """Gradients of learned angles: a ViT-L on images of 224 and 512 pixels, rotated by both axes, and a Llama's table."""
    backward = {"direction": "backward", "angle_gradient": True}
    vit = bf16(
        "bshd",
        16,
        64,
        style="interleaved",
        angles="inv_freq",
        key_heads=16,
        positions="axes",
        sections=(16, 16),
        **backward,
    )
    yield problem("rope_vit_l_learned_backward", vit, 256, 196)
    yield problem("rope_vit_l_learned_backward", vit, 64, 1024)
    llama = bf16("bshd", 32, 128, key_heads=8, **backward)
    yield problem("llama3_8b_learned_backward", llama, 2, 4096)
    yield problem("llama3_8b_learned_cos_sin_backward", dataclasses.replace(llama, angles="cos_sin"), 2, 4096)
