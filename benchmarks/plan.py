"""The rows to measure, as data: which call, against whom, and which bar it answers to."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from benchmarks.call import Angles, Call, Direction, Layout
from benchmarks.peers import PEERS, QUERY_AND_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["device", "host"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
BOTH_ANGLES: tuple[Angles, ...] = ("freqs pair", "cos_sin pair")

# batch, sequence, heads, head dimension, rotated features
LARGE = (
    (2, 4096, 32, 128, 128),
    (1, 32768, 8, 128, 128),
    (16, 512, 10, 512, 512),
    (4, 4096, 32, 128, 64),
    (1, 131072, 8, 128, 128),
)  # a copy takes over 30 us on an H200
SMALL = ((1, 128, 32, 128, 128), (64, 1, 32, 128, 128))
UNTUNED = ((2, 3000, 32, 128, 128), (1, 3000, 40, 128, 128), (2, 4096, 40, 128, 128))  # no problem of the tuner
STUDIES = (  # sequence, batch, heads, head dimension, rotated features: the calls that were slower than eager there
    (64, 1, 16, 64, 64),
    (128, 1, 16, 128, 128),
    (32, 1, 8, 256, 256),
    (2, 1, 2, 4, 4),
    (10, 2, 4, 16, 8),
)
SWEEPS = {"study": (16, 10, 512), "Llama 3 8B": (1, 32, 128)}  # batch, heads, head dimension
SWEEP_SEQUENCES = (128, 256, 512, 1024, 2048, 4096, 8192)

EVERYONE = tuple(name for name in PEERS if name not in QUERY_AND_KEY)
LIGHT = ("eager PyTorch", "flash-attention", "TransformerEngine")  # nothing to compile or to tune for a shape
SWEPT = ("eager PyTorch", "torch.jit.script", "flash-attention", "TransformerEngine")  # those of the study, and Triton


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement of this project beside its peers."""

    suite: str
    call: Call
    bar: str | None  # a name in benchmarks.bars, or None: recorded, not judged
    peers: tuple[str, ...]
    kind: Kind = "device"

    @property
    def key(self) -> str:
        """What it is, in words, once in a plan."""
        return ", ".join((self.suite, *self.call.words, self.kind))

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of the call."""
        return self.call.facts


def _known() -> Iterator[Row]:
    for direction, sizes, layout in itertools.product(DIRECTIONS, LARGE, LAYOUTS):
        call = Call(*sizes, layout=layout, direction=direction)
        yield Row("rope", call, "out of place" if direction == "forward" else "backward", EVERYONE)
    for sizes, layout in itertools.product(LARGE, LAYOUTS):
        call = Call(*sizes, layout=layout, inplace=True)
        yield Row("rope", call, "in place" if call.rotary_dim == call.head_dim else "in place, 64 of 128", EVERYONE)
    for direction, sizes, angles, layout in itertools.product(DIRECTIONS, SMALL, BOTH_ANGLES, LAYOUTS):
        judged = direction == "forward" and layout == "bshd"
        bar = f"small, {'freqs' if angles == 'freqs pair' else 'cos and sin'}" if judged else None
        yield Row("rope", Call(*sizes, layout=layout, direction=direction, angles=angles), bar, EVERYONE)


def _untuned() -> Iterator[Row]:
    for sizes, layout in itertools.product(UNTUNED, LAYOUTS):
        yield Row("rope-untuned", Call(*sizes, layout=layout), "untuned", LIGHT)
    for sizes in UNTUNED:
        yield Row("rope-untuned", Call(*sizes, direction="backward"), "untuned", LIGHT)


def _host() -> Iterator[Row]:
    everyday = ("eager PyTorch", "torch.add")
    for direction, (seq, *sizes) in itertools.product(DIRECTIONS, STUDIES):
        batch, heads, head_dim, rotary_dim = sizes
        call = Call(
            batch, seq, heads, head_dim, rotary_dim,
            layout="sbhd", direction=direction, angles="freqs feature", dtype=torch.float32,
        )  # fmt: skip
        bar = "host, forward" if direction == "forward" else "host, forward with backward"
        yield Row("rope-host", call, bar, everyday, "host")
    decode = (1, 1, 32, 128, 128)
    for angles in BOTH_ANGLES:
        peers = (*everyday, "flash-attention", "torch.compile")
        yield Row("rope-host", Call(*decode, angles=angles), None, peers, "host")
    yield Row("rope-host", Call(*decode, direction="backward"), None, everyday, "host")


def _feature() -> Iterator[Row]:
    """Angles of one entry a feature, as TransformerEngine takes them: twice the bytes."""
    for direction, sizes in itertools.product(DIRECTIONS, (*LARGE, *SMALL)):
        yield Row("rope-feature", Call(*sizes, direction=direction, angles="freqs feature"), None, LIGHT)


def _interleaved() -> Iterator[Row]:
    for direction in DIRECTIONS:
        yield Row("rope-interleaved", Call(*LARGE[0], direction=direction, interleaved=True), None, LIGHT)


def _query_key() -> Iterator[Row]:
    peers = ("flash-attention", *QUERY_AND_KEY)
    for batch, seq, heads, head_dim, rotary_dim in (LARGE[0], LARGE[4], *SMALL):
        call = Call(
            batch, seq, heads, head_dim, rotary_dim, angles="cos_sin pair", inplace=True, key_heads=max(1, heads // 4)
        )
        yield Row("rope-query-key", call, None, peers)


def _sweep() -> Iterator[Row]:
    for (batch, heads, head_dim), direction, seq in itertools.product(SWEEPS.values(), DIRECTIONS, SWEEP_SEQUENCES):
        yield Row("rope-sweep", Call(batch, seq, heads, head_dim, head_dim, direction=direction), None, SWEPT)


SUITES = {
    "rope": _known,  # first: the bars are about these
    "rope-untuned": _untuned,
    "rope-host": _host,
    "rope-feature": _feature,
    "rope-interleaved": _interleaved,
    "rope-query-key": _query_key,
    "rope-sweep": _sweep,
}


def rows(suites: tuple[str, ...] = tuple(SUITES), *, quick: bool = False) -> list[Row]:
    """The plan. Quick: bshd alone, and only the peers that need no time for a shape."""
    plan = [row for suite in suites for row in SUITES[suite]()]
    if not quick:
        return plan
    kept = (row for row in plan if row.kind == "host" or row.call.layout == "bshd")
    return [dataclasses.replace(row, peers=tuple(p for p in row.peers if p in {*LIGHT, "torch.add"})) for row in kept]
