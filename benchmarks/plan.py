"""The RoPE rows to measure, as data: which call, against whom, and which bar it answers to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
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
UNTUNED = ((2, 3000, 32, 128, 128), (1, 3000, 40, 128, 128), (2, 4096, 40, 128, 128))  # no problem of the tuner
STUDIES = (  # batch, sequence, heads, head dimension, rotated features: the calls that were slower than eager there
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

LIGHT = ("eager PyTorch", "flash-attention", "TransformerEngine")  # nothing to compile or to tune for a shape
HEAVY = ("torch.jit.script", "torch.compile", "flash-linear-attention", "quack", "C++ extension")
SWEPT = ("eager PyTorch", "torch.jit.script", "flash-attention", "TransformerEngine")  # those of the study, and Triton
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


def _known() -> Iterator[Row[Call]]:
    for direction, sizes, layout in itertools.product(DIRECTIONS, LARGE, LAYOUTS):
        call = one(sizes, layout=layout, direction=direction)
        yield Row("rope", call, "out of place" if direction == "forward" else "backward", EVERYONE)
    for sizes, layout in itertools.product(LARGE, LAYOUTS):
        call = one(sizes, layout=layout, inplace=True)
        yield Row("rope", call, "in place" if call.rotary_dim == call.head_dim else "in place, 64 of 128", EVERYONE)
    for direction, sizes, angles, layout in itertools.product(DIRECTIONS, SMALL, BOTH_ANGLES, LAYOUTS):
        judged = direction == "forward" and layout == "bshd"
        bar = f"small, {'freqs' if angles == 'freqs pair' else 'cos and sin'}" if judged else None
        yield Row("rope", one(sizes, layout=layout, direction=direction, angles=angles), bar, EVERYONE)


def _untuned() -> Iterator[Row[Call]]:
    for sizes, layout in itertools.product(UNTUNED, LAYOUTS):
        yield Row("rope-untuned", one(sizes, layout=layout), "untuned", LIGHT)
    for sizes in UNTUNED:
        yield Row("rope-untuned", one(sizes, direction="backward"), "untuned", LIGHT)


def _host() -> Iterator[Row[Call]]:
    everyday = ("eager PyTorch", "torch.add")
    for direction, sizes in itertools.product(DIRECTIONS, STUDIES):
        call = one(sizes, layout="sbhd", direction=direction, angles="freqs feature", dtype=torch.float32)
        bar = "host, forward" if direction == "forward" else "host, forward with backward"
        yield Row("rope-host", call, bar, everyday, kind="host")
    decode = (1, 1, 32, 128, 128)
    for angles in BOTH_ANGLES:
        peers = (*everyday, "flash-attention", "torch.compile")
        yield Row("rope-host", one(decode, angles=angles), None, peers, kind="host")
    yield Row("rope-host", one(decode, direction="backward"), None, everyday, kind="host")


def _query_key() -> Iterator[Row[Call]]:
    def call(sizes: tuple[int, int, int, int], **other: Any) -> Call:
        batch, seq, heads, head_dim = sizes
        return Call(batch, seq, heads, max(1, heads // 4), head_dim, head_dim, **other)

    for (sizes, bar), angles, inplace in itertools.product(
        [*((s, "large") for s in LARGE_PAIRS), *((s, "small") for s in SMALL_PAIRS)], BOTH_ANGLES, (False, True)
    ):
        peers = IN_PLACE if inplace else OUT_OF_PLACE
        yield Row("rope-qk", call(sizes, angles=angles, inplace=inplace), bar, peers)
    yield Row("rope-qk", call(LARGE_PAIRS[1], angles="inv_freq"), None, OUT_OF_PLACE)
    by_id = call(LARGE_PAIRS[1], angles="cos_sin pair", positions="counted", rows=LARGE_PAIRS[1][1])
    yield Row("rope-qk", by_id, None, OUT_OF_PLACE)


def _packed_sequences() -> Iterator[Row[Call]]:
    for sequences in SEQUENCES:
        call = Call(1, PACKED_TOKENS, 32, 8, 128, 128, layout="thd", sequences=sequences)
        yield Row("rope-thd", call, "ragged", OUT_OF_PLACE)


def _serving(name: str, tokens: int, **other: Any) -> Call:
    heads, key_heads, head_dim = MODELS[name]
    return Call(
        1, tokens, heads, key_heads, head_dim, head_dim,
        layout="thd", angles="cos_sin_cache", inplace=True, packed=True, **other,
    )  # fmt: skip


def _prefill() -> Iterator[Row[Call]]:
    for tokens in PREFILL_TOKENS:
        call = _serving(LLAMA, tokens, positions="counted", rows=tokens)
        yield Row("rope-prefill", call, "prefill" if tokens >= JUDGED_PREFILL else None, SERVING, LLAMA)


def _decode() -> Iterator[Row[Call]]:
    for name, tokens in itertools.product(MODELS, DECODE_TOKENS):
        call = _serving(name, tokens, positions="random", rows=TABLE_ROWS)
        yield Row("rope-decode", call, "decode", SERVING, name)


def _calls_host() -> Iterator[Row[Call]]:
    out_of_place = Call(1, 1, 32, 0, 128, 128)
    calls = {
        "out of place": out_of_place,
        "in place": dataclasses.replace(out_of_place, inplace=True),
        "query and key in place": dataclasses.replace(out_of_place, inplace=True, key_heads=8),
        "with autograd": dataclasses.replace(out_of_place, gradient=True),
    }
    for bar, call in calls.items():
        yield Row("rope-calls-host", call, bar, HOST, kind="host")


def _features() -> Iterator[Row[Call]]:
    general = ("torch.compile", "eager PyTorch")
    trailing = Call(1, 4096, 128, 0, 192, 64, layout="thd", inplace=True, interleaved=True, rotated="last")
    yield Row("rope-features", trailing, None, ("flash-attention", *general), "DeepSeek-V3")
    proportional = Call(1, 8192, 8, 0, 512, 128, inplace=True, rotated="proportional")
    yield Row("rope-features", proportional, None, general, "Gemma 4")
    glm = Call(2, 8192, 32, 2, 128, 64, interleaved=True)
    yield Row("rope-features", glm, None, ("TransformerEngine", "flash-attention", *general), "GLM-4-9B")


def _feature() -> Iterator[Row[Call]]:
    """Angles of one entry a feature, as TransformerEngine takes them: twice the bytes."""
    for direction, sizes in itertools.product(DIRECTIONS, (*LARGE, *SMALL)):
        yield Row("rope-feature", one(sizes, direction=direction, angles="freqs feature"), None, LIGHT)


def _interleaved() -> Iterator[Row[Call]]:
    for direction in DIRECTIONS:
        yield Row("rope-interleaved", one(LARGE[0], direction=direction, interleaved=True), None, LIGHT)


def _sweep() -> Iterator[Row[Call]]:
    for (batch, heads, head_dim), direction, seq in itertools.product(SWEEPS.values(), DIRECTIONS, SWEEP_SEQUENCES):
        yield Row("rope-sweep", one((batch, seq, heads, head_dim, head_dim), direction=direction), None, SWEPT)


COMPLETE: dict[str, Callable[[], Iterator[Row[Call]]]] = {  # calls as models make them
    "rope-qk": _query_key,
    "rope-thd": _packed_sequences,
    "rope-prefill": _prefill,
    "rope-decode": _decode,
    "rope-calls-host": _calls_host,
    "rope-features": _features,
}
SUITES = {
    "rope": _known,  # first: what the bars are about
    "rope-untuned": _untuned,
    "rope-host": _host,
    **COMPLETE,
    "rope-feature": _feature,
    "rope-interleaved": _interleaved,
    "rope-sweep": _sweep,
}


def rows() -> list[Row[Call]]:
    """The plan."""
    return [row for suite in SUITES.values() for row in suite()]


def quick(plan: Sequence[Row[Call]]) -> list[Row[Call]]:
    """Of one tensor on the device bshd alone, and no peer that needs time for a shape."""
    kept = (r for r in plan if r.kind == "host" or r.call.layout == "bshd" or r.suite in COMPLETE)
    return [dataclasses.replace(row, peers=tuple(p for p in row.peers if p not in HEAVY)) for row in kept]
