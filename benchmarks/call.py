"""A RoPE call to time: its description, its tensors, its right result, and the call of this project's function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

import tuned.dispatch
from tuned.calls.products import name_of as dtype_name

Angles = Literal["freqs pair", "cos_sin pair", "freqs feature", "cos_sin_cache", "inv_freq"]
Layout = Literal["bshd", "sbhd", "thd"]
Direction = Literal["forward", "backward"]
Positions = Literal["implicit", "counted", "random"]
Rotated = Literal["first", "last", "proportional"]
Formula = Literal["transformers", "TransformerEngine"]
Launch = Callable[[], tuple[torch.Tensor, ...]]  # of the query, and the key if the call has one

ANGLE_BYTES = 4  # float32, which every peer but one gets
ID_BYTES = 8  # int64, the only ids that every serving kernel takes
ROPE_BASE = 500_000.0  # Llama 3
FIRST_POSITION = 17  # position 0 would rotate nothing
PIECE_ELEMENTS = 1 << 26  # 0.5 GB of float64
SEED = 5  # of the lengths of packed sequences
SIZES = (
    "batch", "seq", "heads", "key_heads", "head_dim", "rotary_dim", "sequences", "positions", "rows", "packed",
    "gradient",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on ``batch`` sequences of ``seq`` tokens each, in thd too; or on ragged sequences of ``seq`` tokens in all."""

    batch: int
    seq: int
    heads: int
    key_heads: int  # 0: no key
    head_dim: int
    rotary_dim: int
    layout: Layout = "bshd"
    direction: Direction = "forward"
    angles: Angles = "freqs pair"
    inplace: bool = False
    interleaved: bool = False
    rotated: Rotated = "first"
    sequences: int = 1  # above 1: ragged sequences, only for thd of batch 1
    positions: Positions = "implicit"  # "counted": the ids 0, 1, 2, ...; "random": ids below rows
    rows: int = 0  # of the table that ids choose from
    packed: bool = False  # query and key are views of one tensor that holds the value as well
    gradient: bool = False  # the tensors require a gradient
    formula: Formula = "transformers"  # project whose PyTorch code is the eager peer; TransformerEngine's takes angles
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.batch * self.seq

    @property
    def problem(self) -> str:
        """The sizes as text: batch, sequence, heads, head dimension, rotated features, ragged sequences."""
        keys = f"+{self.key_heads}" if self.key_heads else ""
        ragged = f" n{self.sequences}" if self.sequences > 1 else ""
        return f"b{self.batch} s{self.seq} h{self.heads}{keys} d{self.head_dim} r{self.rotary_dim}{ragged}"

    @property
    def source(self) -> str:
        """Where the angles come from, in words."""
        ids = {"implicit": "", "counted": " by position", "random": " by random position"}[self.positions]
        return self.angles + ids

    @property
    def style(self) -> str:
        """Which features make a pair, and which rotate."""
        pairs = "interleaved" if self.interleaved else "half"
        return pairs if self.rotated == "first" else f"{pairs}, {self.rotated}"

    @property
    def words(self) -> tuple[str, ...]:
        """Words that tell this call from any other: the middle of a row's key."""
        place = "in place" if self.inplace else "out of place"
        extra = [text for text, on in (("packed", self.packed), ("with autograd", self.gradient)) if on]
        return (
            self.problem,
            self.layout,
            dtype_name(self.dtype),
            self.direction,
            self.source,
            place,
            self.style,
            *extra,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of this call in a record."""
        return {
            "problem": self.problem,
            "layout": self.layout,
            "dtype": dtype_name(self.dtype),
            "direction": self.direction,
            "sizes": {name: getattr(self, name) for name in SIZES},
            "angles": self.source,
            "inplace": self.inplace,
            "style": self.style,
        }

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; ragged lengths are at least 1, add up to ``seq``, and are the same in every run."""
        if self.sequences == 1:
            return (self.seq,) * self.batch
        cuts = sorted(random.Random(SEED).sample(range(1, self.seq), self.sequences - 1))  # noqa: S311 (no secret)
        return tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, self.seq)))

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all heads of query and key, counted once."""
        return self.tokens * (self.heads + self.key_heads) * self.head_dim * self.dtype.itemsize

    @property
    def angle_bytes(self) -> int:
        """Bytes of the angles that must be read: each row that the tokens use once, and the ids."""
        if self.angles == "inv_freq":
            return self.rotary_dim // 2 * ANGLE_BYTES
        entries = self.rotary_dim // 2 if self.angles == "freqs pair" else self.rotary_dim
        if self.positions == "implicit":
            return self.longest * entries * ANGLE_BYTES
        rows = self.seq if self.positions == "counted" else self.tokens
        return rows * entries * ANGLE_BYTES + self.tokens * ID_BYTES

    @property
    def touched_bytes(self) -> int:
        """Bytes of memory that one call reads or writes."""
        return self.tensor_bytes * (1 if self.inplace else 2) + self.angle_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that must move: rotated features read and written, out of place the other features too, and the angles."""
        share = self.rotary_dim / self.head_dim if self.inplace else 1.0
        return round(2 * self.tensor_bytes * share) + self.angle_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes that a copy of as many elements moves."""
        return 2 * self.tensor_bytes


@dataclasses.dataclass(frozen=True)
class Table:
    """Angles, with a row for each position."""

    freqs: torch.Tensor  # [rows, R / 2] float32
    cos: torch.Tensor  # [rows, R / 2] float32
    sin: torch.Tensor  # [rows, R / 2] float32
    cache: torch.Tensor  # [rows, R] float32: cosines, then sines
    inv_freq: torch.Tensor  # [R / 2] float32


@dataclasses.dataclass(frozen=True)
class Tensors:
    """One set of tensors for a call: everything that any peer reads or writes."""

    rotated: tuple[torch.Tensor, ...]  # query, and key if the call has one; backward: the gradient of the output
    qkv: torch.Tensor | None  # [t, H + 2 Hk, D], if the call is packed: ``rotated`` are views of it
    table: Table
    ids: torch.Tensor  # [tokens] int64: the row of the table for each token, in the order of memory
    cu_seqlens: torch.Tensor | None  # [sequences + 1] int32: thd without ids


def make_table(call: Call, device: str) -> Table:
    """A table of the call's angles."""
    # With inv_freq the kernel counts positions from 0. Other tables begin further on: position 0 would rotate nothing.
    first = 0 if call.angles == "inv_freq" else FIRST_POSITION
    rows = call.longest if call.positions == "implicit" else call.rows
    position = torch.arange(rows, device=device, dtype=torch.float32) + first
    inv_freq = ROPE_BASE ** -(torch.arange(0, call.rotary_dim, 2, device=device, dtype=torch.float32) / call.rotary_dim)
    freqs = torch.outer(position, inv_freq)
    cos, sin = freqs.cos(), freqs.sin()
    return Table(freqs, cos, sin, torch.cat((cos, sin), dim=-1), inv_freq)


def per_feature(call: Call, x: torch.Tensor) -> torch.Tensor:
    """One entry for each pair, [rows, R / 2], as one entry for each feature, [rows, R]."""
    return x.repeat_interleave(2, dim=-1) if call.interleaved else torch.cat((x, x), dim=-1)


def make_ids(call: Call, device: str) -> torch.Tensor:
    """The position of each token."""
    if call.positions == "random":
        return torch.randint(call.rows, (call.tokens,), device=device)
    ids = torch.cat([torch.arange(length, device=device) for length in call.lengths])
    return ids.view(call.batch, call.seq).t().flatten() if call.layout == "sbhd" else ids


def _views(call: Call, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv[:, : call.heads], qkv[:, call.heads : call.heads + call.key_heads]


def make_tensors(call: Call, count: int, device: str = "cuda") -> list[Tensors]:
    """Fresh sets, each with its own angles so that no set has them in the L2; with random ids all share one large table."""
    first = {"thd": (call.tokens,), "bshd": (call.batch, call.seq), "sbhd": (call.seq, call.batch)}[call.layout]
    cu_seqlens = None
    if call.layout == "thd" and call.positions == "implicit":
        cu_seqlens = torch.tensor([0, *itertools.accumulate(call.lengths)], device=device, dtype=torch.int32)
    options: dict[str, Any] = {"device": device, "dtype": call.dtype}
    sets: list[Tensors] = []
    for _ in range(count):
        table = sets[0].table if sets and call.positions == "random" else make_table(call, device)
        qkv = None
        if call.packed:
            qkv = torch.randn((*first, call.heads + 2 * call.key_heads, call.head_dim), **options)
            rotated = _views(call, qkv)
        else:
            heads = [heads for heads in (call.heads, call.key_heads) if heads]
            rotated = tuple(torch.randn((*first, h, call.head_dim), **options) for h in heads)
        if call.gradient:
            rotated = tuple(x.requires_grad_() for x in rotated)
        sets.append(Tensors(rotated, qkv, table, make_ids(call, device), cu_seqlens))
    return sets


def probe(call: Call, t: Tensors) -> Tensors:
    """The set, with copies of the tensors that the call overwrites."""
    if not call.inplace:
        return t
    if t.qkv is None:
        return dataclasses.replace(t, rotated=tuple(x.clone() for x in t.rotated))
    qkv = t.qkv.clone()
    return dataclasses.replace(t, qkv=qkv, rotated=_views(call, qkv))


def pairs(call: Call) -> tuple[slice, slice]:
    """The first features of a head's pairs, and the second features."""
    begin = call.head_dim - call.rotary_dim if call.rotated == "last" else 0
    if call.interleaved:
        return slice(begin, begin + call.rotary_dim, 2), slice(begin + 1, begin + call.rotary_dim, 2)
    half = call.rotary_dim // 2
    apart = call.head_dim // 2 if call.rotated == "proportional" else half
    return slice(begin, begin + half), slice(begin + apart, begin + apart + half)


def expected(call: Call, t: Tensors) -> list[torch.Tensor]:
    """Query and key by the formula in float64, rounded to float32; in pieces, since float64 takes four times the memory."""
    return [_turned(call, x.detach(), t) for x in t.rotated]


def _turned(call: Call, x: torch.Tensor, t: Tensors) -> torch.Tensor:
    tokens = x.reshape(call.tokens, *x.shape[-2:])
    out = torch.empty(tokens.shape, dtype=torch.float32, device=x.device)
    first, second = pairs(call)
    sign = -1 if call.direction == "backward" else 1
    step = max(1, PIECE_ELEMENTS * call.tokens // x.numel())
    for start in range(0, call.tokens, step):
        piece = slice(start, start + step)
        angle = t.table.freqs[t.ids[piece]].double()[:, None]  # [tokens, 1, R / 2]
        cos, sin = angle.cos(), sign * angle.sin()
        a, b = tokens[piece, :, first].double(), tokens[piece, :, second].double()
        out[piece] = tokens[piece].float()
        out[piece, :, first] = (a * cos - b * sin).float()
        out[piece, :, second] = (b * cos + a * sin).float()
    return out.view(x.shape)


def our_keywords(call: Call, t: Tensors) -> dict[str, Any]:
    """The arguments of ``tuned.dispatch`` besides the rotated tensors."""
    wide = per_feature(call, t.table.freqs)[:, None, None]
    angles: dict[Angles, dict[str, Any]] = {
        "freqs pair": {"freqs": t.table.freqs, "angle_entries": "pair"},
        "cos_sin pair": {"cos": t.table.cos, "sin": t.table.sin, "angle_entries": "pair"},
        "freqs feature": {"freqs": wide, "angle_entries": "feature"},
        "cos_sin_cache": {"cos_sin_cache": t.table.cache},
        "inv_freq": {"inv_freq": t.table.inv_freq},
    }
    keywords: dict[str, Any] = {"tensor_format": call.layout, "interleaved": call.interleaved} | angles[call.angles]
    if call.direction == "forward":
        keywords |= {"inplace": call.inplace}
    if call.positions != "implicit":
        shape = (call.tokens,) if call.layout == "thd" else (call.batch, call.seq)
        keywords |= {"positions": t.ids.view(shape)}
    if t.cu_seqlens is not None:
        keywords |= {"cu_seqlens": t.cu_seqlens, "max_seqlen": call.longest}
    if call.rotated != "first":
        keywords |= {"rotated": call.rotated, "rotary_dim": call.rotary_dim}
    return keywords


def ours(call: Call, sets: Sequence[Tensors]) -> list[Launch]:
    """One launch for each set through the public dispatch, which allocates its outputs and makes any table on each call."""

    def launch(t: Tensors, keywords: dict[str, Any]) -> Any:
        if call.key_heads:
            return tuned.dispatch.rope_qk(*t.rotated, **keywords)
        run = tuned.dispatch.rope if call.direction == "forward" else tuned.dispatch.rope_backward
        return (run(*t.rotated, **keywords),)

    return [functools.partial(launch, t, our_keywords(call, t)) for t in sets]


def as_a_user_calls(call: Call, t: Tensors) -> Launch:
    """The call of a host row, written out without the benchmark's wrappers, whose time no user waits for."""
    keywords = our_keywords(call, t)
    freqs, cos, sin = (keywords.pop(name, None) for name in ("freqs", "cos", "sin"))
    layout, interleaved, entries, inplace = (
        keywords.pop(name, None) for name in ("tensor_format", "interleaved", "angle_entries", "inplace")
    )
    if keywords or interleaved or entries is None:
        raise ValueError(f"host rows are whole tensors with freqs or cosines and sines, by halves, got {call}")
    x, *others = t.rotated
    if others:
        (key,) = others
        return lambda: tuned.dispatch.rope_qk(  # type: ignore[return-value]
            x, key, freqs, cos, sin, tensor_format=layout, angle_entries=entries, inplace=inplace
        )
    return lambda: (
        tuned.dispatch.rope(x, freqs, cos, sin, tensor_format=layout, angle_entries=entries, inplace=inplace),
    )
