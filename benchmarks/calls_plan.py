"""The complete calls to measure, as data: which call, against whom, and which bar it answers to."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from benchmarks.calls import CompleteCall
from benchmarks.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.calls import AngleSource

# batch, sequence, heads, head dimension; the key has a quarter of the heads
LARGE = ((2, 4096, 32, 128), (1, 32768, 8, 128), (1, 131072, 8, 128))
SMALL = ((1, 128, 32, 128), (64, 1, 32, 128))
BOTH_ANGLES: tuple[AngleSource, ...] = ("freqs pair", "cos_sin pair")
PACKED_TOKENS, SEQUENCES = 65_536, (1, 16, 256, 2401)  # TransformerEngine#2866 packs up to 2401
TABLE_ROWS = 131_072  # the context of Llama 3.1 and of gpt-oss
LLAMA = "Llama 3 8B"
MODELS = {LLAMA: (32, 8, 128), "Llama 3 70B on 8 ranks": (8, 1, 128), "gpt-oss": (64, 8, 64)}
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
JUDGED_PREFILL = 4096

ANY_PLACE = ("torch.compile", "flash-attention", "flash-attention bf16 angles", "eager PyTorch")
OUT_OF_PLACE = ("TransformerEngine", *ANY_PLACE)
IN_PLACE = ("Liger-Kernel", "FlashInfer", "vLLM", *ANY_PLACE)
SERVING = ("FlashInfer", "vLLM", "TransformerEngine fused qkv", *ANY_PLACE)
HOST = ("torch.add", "C++ extension", "eager PyTorch", "torch.compile", "flash-attention")


@dataclasses.dataclass(frozen=True)
class CallRow:
    """One measurement of this project beside its peers."""

    suite: str
    call: CompleteCall
    bar: str | None  # a name in benchmarks.bars, or None: recorded, not judged
    peers: tuple[str, ...]
    name: str = ""  # the model that makes the call
    kind: Kind = "device"

    @property
    def key(self) -> str:
        """What it is, in words, once in a plan."""
        return ", ".join((self.suite, *self.call.words, self.kind))

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of the call."""
        return self.call.facts | {"name": self.name}


def _query_key() -> Iterator[CallRow]:
    def call(sizes: tuple[int, int, int, int], **other: Any) -> CompleteCall:
        batch, seq, heads, head_dim = sizes
        return CompleteCall(batch, seq, heads, max(1, heads // 4), head_dim, head_dim, **other)

    for (sizes, bar), angles, inplace in itertools.product(
        [*((s, "large") for s in LARGE), *((s, "small") for s in SMALL)], BOTH_ANGLES, (False, True)
    ):
        peers = IN_PLACE if inplace else OUT_OF_PLACE
        yield CallRow("rope-qk", call(sizes, angles=angles, inplace=inplace), bar, peers)
    yield CallRow("rope-qk", call(LARGE[1], angles="inv_freq"), None, OUT_OF_PLACE)
    by_id = call(LARGE[1], angles="cos_sin pair", positions="counted", rows=LARGE[1][1])
    yield CallRow("rope-qk", by_id, None, OUT_OF_PLACE)


def _packed_sequences() -> Iterator[CallRow]:
    for sequences in SEQUENCES:
        call = CompleteCall(1, PACKED_TOKENS, 32, 8, 128, 128, layout="thd", sequences=sequences)
        yield CallRow("rope-thd", call, "ragged", OUT_OF_PLACE)


def _serving(name: str, tokens: int, **other: Any) -> CompleteCall:
    heads, key_heads, head_dim = MODELS[name]
    return CompleteCall(
        1, tokens, heads, key_heads, head_dim, head_dim,
        layout="thd", angles="cos_sin_cache", inplace=True, packed=True, **other,
    )  # fmt: skip


def _decode() -> Iterator[CallRow]:
    for name, tokens in itertools.product(MODELS, DECODE_TOKENS):
        call = _serving(name, tokens, positions="random", rows=TABLE_ROWS)
        yield CallRow("rope-decode", call, "decode", SERVING, name)


def _prefill() -> Iterator[CallRow]:
    for tokens in PREFILL_TOKENS:
        call = _serving(LLAMA, tokens, positions="counted", rows=tokens)
        yield CallRow("rope-prefill", call, "prefill" if tokens >= JUDGED_PREFILL else None, SERVING, LLAMA)


def _host() -> Iterator[CallRow]:
    out_of_place = CompleteCall(1, 1, 32, 0, 128, 128)
    calls = {
        "out of place": out_of_place,
        "in place": dataclasses.replace(out_of_place, inplace=True),
        "query and key in place": dataclasses.replace(out_of_place, inplace=True, key_heads=8),
        "with autograd": dataclasses.replace(out_of_place, gradient=True),
    }
    for bar, call in calls.items():
        yield CallRow("rope-calls-host", call, bar, HOST, kind="host")


def _features() -> Iterator[CallRow]:
    general = ("torch.compile", "eager PyTorch")
    trailing = CompleteCall(
        1, 4096, 128, 0, 192, 64, layout="thd", inplace=True, interleaved=True, rotated="last",
    )  # fmt: skip
    yield CallRow("rope-features", trailing, None, ("flash-attention", *general), "DeepSeek-V3")
    proportional = CompleteCall(1, 8192, 8, 0, 512, 128, inplace=True, rotated="proportional")
    yield CallRow("rope-features", proportional, None, general, "Gemma 4")
    glm = CompleteCall(2, 8192, 32, 2, 128, 64, interleaved=True)
    yield CallRow("rope-features", glm, None, ("TransformerEngine", "flash-attention", *general), "GLM-4-9B")


SUITES = {
    "rope-qk": _query_key,
    "rope-thd": _packed_sequences,
    "rope-prefill": _prefill,
    "rope-decode": _decode,
    "rope-calls-host": _host,
    "rope-features": _features,
}


def rows() -> list[CallRow]:
    """The plan."""
    return [row for suite in SUITES.values() for row in suite()]
