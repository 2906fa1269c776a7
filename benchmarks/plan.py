"""The RoPE rows to measure, as data: the call, its peers, and the bar that judges it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.call import Angles, Call, Direction, Layout
from benchmarks.record import Row

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
BOTH_ANGLES: tuple[Angles, ...] = ("freqs pair", "cos_sin pair")

# One tensor: batch, sequence, heads, head dimension, rotated features
LARGE = (
    (2, 4096, 32, 128, 128),
    (1, 32768, 8, 128, 128),
    (16, 512, 10, 512, 512),
    (4, 4096, 32, 128, 64),
    (1, 131072, 8, 128, 128),
)  # a copy takes over 30 us on an H200
SMALL = ((1, 128, 32, 128, 128), (64, 1, 32, 128, 128))
UNTUNED = ((2, 3000, 32, 128, 128), (1, 3000, 40, 128, 128), (2, 4096, 40, 128, 128))  # no problems of the tuner
STUDIES = (  # batch, sequence, heads, head dimension, rotated features: calls of the studies that were slower than eager
    (1, 64, 16, 64, 64),
    (1, 128, 16, 128, 128),
    (1, 32, 8, 256, 256),
    (1, 2, 2, 4, 4),
    (2, 10, 4, 16, 8),
)
SWEEPS = {"study": (16, 10, 512), "Llama 3 8B": (1, 32, 128)}  # batch, heads, head dimension
SWEEP_SEQUENCES = (128, 256, 512, 1024, 2048, 4096, 8192)

# Query and key: batch, sequence, heads, head dimension; the key has a quarter of the heads
LARGE_PAIRS = ((2, 4096, 32, 128), (1, 32768, 8, 128), (1, 131072, 8, 128))
SMALL_PAIRS = ((1, 128, 32, 128), (64, 1, 32, 128))
PACKED_TOKENS, SEQUENCES = 65_536, (1, 16, 256, 2401)  # TransformerEngine#2866 packs up to 2401
TABLE_ROWS = 131_072  # the context of Llama 3.1 and of gpt-oss
LLAMA = "Llama 3 8B"
MODELS = {LLAMA: (32, 8, 128), "Llama 3 70B on 8 ranks": (8, 1, 128), "gpt-oss": (64, 8, 64)}
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
JUDGED_PREFILL = 4096

LIGHT = ("eager PyTorch", "flash-attention", "TransformerEngine")  # they neither compile nor tune for a shape
HEAVY = ("torch.jit.script", "torch.compile", "flash-linear-attention", "quack", "C++ extension")
SWEPT = ("eager PyTorch", "torch.jit.script", "flash-attention", "TransformerEngine")  # the study's peers, and Triton
REQUIRED = ("torch.compile", "flash-attention", "TransformerEngine")  # a row without them does not count for the mean
EVERYONE = (
    "eager PyTorch", "torch.jit.script", "torch.compile", "flash-attention", "flash-attention bf16 angles",
    "TransformerEngine", "flash-linear-attention", "quack",
)  # fmt: skip
ANY_PLACE = ("torch.compile", "flash-attention", "flash-attention bf16 angles", "eager PyTorch")
OUT_OF_PLACE = ("TransformerEngine", *ANY_PLACE)
IN_PLACE = ("Liger-Kernel", "FlashInfer", "vLLM", *ANY_PLACE)
SERVING = ("FlashInfer", "vLLM", "TransformerEngine fused qkv", *ANY_PLACE)
HOST = ("torch.add", "C++ extension", "eager PyTorch", "torch.compile", "flash-attention")


def one(sizes: tuple[int, int, int, int, int], **other: Any) -> Call:
    """The call of one tensor: batch, sequence, heads, head dimension, rotated features."""
    batch, seq, heads, head_dim, rotary_dim = sizes
    return Call(batch, seq, heads, 0, head_dim, rotary_dim, formula="TransformerEngine", **other)


def pair(sizes: tuple[int, int, int, int], **other: Any) -> Call:
    """The call of a query and a key: batch, sequence, heads of the query, head dimension."""
    batch, seq, heads, head_dim = sizes
    return Call(batch, seq, heads, max(1, heads // 4), head_dim, head_dim, **other)


def serving(name: str, tokens: int, **other: Any) -> Call:
    """The call of a model that serves packed tokens."""
    heads, key_heads, head_dim = MODELS[name]
    return Call(
        1, tokens, heads, key_heads, head_dim, head_dim,
        layout="thd", angles="cos_sin_cache", inplace=True, packed=True, **other,
    )  # fmt: skip


def _small_bar(direction: Direction, angles: Angles, layout: Layout) -> str | None:
    judged = direction == "forward" and layout == "bshd"
    return f"small, {'freqs' if angles == 'freqs pair' else 'cos and sin'}" if judged else None


STUDY: dict[str, Any] = {"layout": "sbhd", "angles": "freqs feature", "dtype": torch.float32}
STUDY_BARS: dict[Direction, str] = {"forward": "host, forward", "backward": "host, forward with backward"}
EVERYDAY = ("eager PyTorch", "torch.add")
ONE_TOKEN = (1, 1, 32, 128, 128)
GENERAL = ("torch.compile", "eager PyTorch")

COMPLETE = {"rope-qk", "rope-thd", "rope-prefill", "rope-decode", "rope-calls-host", "rope-features"}  # calls of models
SUITES: dict[str, Sequence[Row[Call]]] = {
    # The rows that the bars judge come first.
    "rope": (
        *(
            Row(
                "rope",
                one(sizes, layout=layout, direction=way),
                "out of place" if way == "forward" else "backward",
                EVERYONE,
            )
            for way, sizes, layout in itertools.product(DIRECTIONS, LARGE, LAYOUTS)
        ),
        *(
            Row("rope", call, "in place" if call.rotary_dim == call.head_dim else "in place, 64 of 128", EVERYONE)
            for call in (one(s, layout=layout, inplace=True) for s, layout in itertools.product(LARGE, LAYOUTS))
        ),
        *(
            Row(
                "rope",
                one(sizes, layout=layout, direction=way, angles=angles),
                _small_bar(way, angles, layout),
                EVERYONE,
            )
            for way, sizes, angles, layout in itertools.product(DIRECTIONS, SMALL, BOTH_ANGLES, LAYOUTS)
        ),
    ),
    "rope-untuned": (
        *(
            Row("rope-untuned", one(sizes, layout=layout), "untuned", LIGHT)
            for sizes, layout in itertools.product(UNTUNED, LAYOUTS)
        ),
        *(Row("rope-untuned", one(sizes, direction="backward"), "untuned", LIGHT) for sizes in UNTUNED),
    ),
    "rope-host": (
        *(
            Row("rope-host", one(sizes, direction=way, **STUDY), bar, EVERYDAY, kind="host")
            for (way, bar), sizes in itertools.product(STUDY_BARS.items(), STUDIES)
        ),
        *(
            Row(
                "rope-host",
                one(ONE_TOKEN, angles=angles),
                None,
                (*EVERYDAY, "flash-attention", "torch.compile"),
                kind="host",
            )
            for angles in BOTH_ANGLES
        ),
        Row("rope-host", one(ONE_TOKEN, direction="backward"), None, EVERYDAY, kind="host"),
    ),
    "rope-qk": (
        *(
            Row("rope-qk", pair(sizes, angles=angles, inplace=inplace), bar, IN_PLACE if inplace else OUT_OF_PLACE)
            for (sizes, bar), angles, inplace in itertools.product(
                [*((s, "large") for s in LARGE_PAIRS), *((s, "small") for s in SMALL_PAIRS)], BOTH_ANGLES, (False, True)
            )
        ),
        Row("rope-qk", pair(LARGE_PAIRS[1], angles="inv_freq"), None, OUT_OF_PLACE),
        Row(
            "rope-qk",
            pair(LARGE_PAIRS[1], angles="cos_sin pair", positions="counted", rows=LARGE_PAIRS[1][1]),
            None,
            OUT_OF_PLACE,
        ),
    ),
    "rope-thd": tuple(
        Row("rope-thd", Call(1, PACKED_TOKENS, 32, 8, 128, 128, layout="thd", sequences=count), "ragged", OUT_OF_PLACE)
        for count in SEQUENCES
    ),
    "rope-prefill": tuple(
        Row(
            "rope-prefill",
            serving(LLAMA, tokens, positions="counted", rows=tokens),
            "prefill" if tokens >= JUDGED_PREFILL else None,
            SERVING,
            LLAMA,
        )
        for tokens in PREFILL_TOKENS
    ),
    "rope-decode": tuple(
        Row("rope-decode", serving(name, tokens, positions="random", rows=TABLE_ROWS), "decode", SERVING, name)
        for name, tokens in itertools.product(MODELS, DECODE_TOKENS)
    ),
    "rope-calls-host": tuple(
        Row("rope-calls-host", call, bar, HOST, kind="host")
        for bar, call in {
            "out of place": Call(1, 1, 32, 0, 128, 128),
            "in place": Call(1, 1, 32, 0, 128, 128, inplace=True),
            "query and key in place": Call(1, 1, 32, 8, 128, 128, inplace=True),
            "with autograd": Call(1, 1, 32, 0, 128, 128, gradient=True),
        }.items()
    ),
    "rope-features": (
        Row(
            "rope-features",
            Call(1, 4096, 128, 0, 192, 64, layout="thd", inplace=True, interleaved=True, rotated="last"),
            None,
            ("flash-attention", *GENERAL),
            "DeepSeek-V3",
        ),
        Row(
            "rope-features",
            Call(1, 8192, 8, 0, 512, 128, inplace=True, rotated="proportional"),
            None,
            GENERAL,
            "Gemma 4",
        ),
        Row(
            "rope-features",
            Call(2, 8192, 32, 2, 128, 64, interleaved=True),
            None,
            ("TransformerEngine", "flash-attention", *GENERAL),
            "GLM-4-9B",
        ),
    ),
    # Angles with one entry for each feature, as TransformerEngine takes them: twice the bytes.
    "rope-feature": tuple(
        Row("rope-feature", one(sizes, direction=direction, angles="freqs feature"), None, LIGHT)
        for direction, sizes in itertools.product(DIRECTIONS, (*LARGE, *SMALL))
    ),
    "rope-interleaved": tuple(
        Row("rope-interleaved", one(LARGE[0], direction=direction, interleaved=True), None, LIGHT)
        for direction in DIRECTIONS
    ),
    "rope-sweep": tuple(
        Row("rope-sweep", one((batch, seq, heads, head_dim, head_dim), direction=direction), None, SWEPT)
        for (batch, heads, head_dim), direction, seq in itertools.product(SWEEPS.values(), DIRECTIONS, SWEEP_SEQUENCES)
    ),
}


def png_path(results: Path, name: str) -> Path:
    """The plot of a sweep, beside the results."""
    return results.with_name(f"{results.stem}-{name.lower().replace(' ', '-')}.png")


def rows() -> list[Row[Call]]:
    """All rows of the plan, in the order of the suites."""
    return [row for suite in SUITES.values() for row in suite]


def quick(plan: Sequence[Row[Call]]) -> list[Row[Call]]:
    """Of rows of one tensor on the device only those in bshd, and no peer that compiles or tunes for each shape."""
    kept = (r for r in plan if r.kind == "host" or r.call.layout == "bshd" or r.suite in COMPLETE)
    return [dataclasses.replace(row, peers=tuple(p for p in row.peers if p not in HEAVY)) for row in kept]
