"""A RoPE call worth timing, and the tensors it is made on."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from benchmarks import formula

Angles = Literal["freqs pair", "cos_sin pair", "freqs feature"]
Layout = Literal["bshd", "sbhd", "thd"]
Direction = Literal["forward", "backward"]

ITEM_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
ANGLE_BYTES = 4  # float32, as every peer but one is given
ROPE_BASE = 500_000.0  # Llama 3
FIRST_POSITION = 17  # position 0 would rotate nothing
PIECE_ELEMENTS = 1 << 26  # 0.5 GB of float64


@dataclasses.dataclass(frozen=True)
class Call:
    """What is asked for. ``seq`` is the length of each of ``batch`` sequences, packed ones included."""

    batch: int
    seq: int
    heads: int
    head_dim: int
    rotary_dim: int
    layout: Layout = "bshd"
    direction: Direction = "forward"
    angles: Angles = "freqs pair"
    inplace: bool = False
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16
    key_heads: int = 0  # above 0: rotate a key of as many heads as well, in the same measurement

    @property
    def problem(self) -> str:
        """The sizes as text: batch, sequence, heads, head dimension, rotated features."""
        keys = f"+{self.key_heads}" if self.key_heads else ""
        return f"b{self.batch} s{self.seq} h{self.heads}{keys} d{self.head_dim} r{self.rotary_dim}"

    @property
    def dtype_name(self) -> str:
        """As in the records: without the package."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def words(self) -> tuple[str, ...]:
        """What tells it from any other call: the middle of a row's key."""
        place = "in place" if self.inplace else "out of place"
        style = "interleaved" if self.interleaved else "half"
        return (self.problem, self.layout, self.dtype_name, self.direction, self.angles, place, style)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "problem": self.problem,
            "layout": self.layout,
            "dtype": self.dtype_name,
            "direction": self.direction,
            "sizes": {
                "batch": self.batch,
                "seq": self.seq,
                "heads": self.heads,
                "key_heads": self.key_heads,
                "head_dim": self.head_dim,
                "rotary_dim": self.rotary_dim,
            },
            "angles": self.angles,
            "inplace": self.inplace,
            "style": "interleaved" if self.interleaved else "half",
        }

    def shape(self, heads: int) -> tuple[int, ...]:
        """The shape of a tensor of this call with that many heads."""
        if self.layout == "thd":
            return (self.batch * self.seq, heads, self.head_dim)
        first = (self.seq, self.batch) if self.layout == "sbhd" else (self.batch, self.seq)
        return (*first, heads, self.head_dim)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all that is rotated, counted once."""
        heads = self.heads + self.key_heads
        return self.batch * self.seq * heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def angle_bytes(self) -> int:
        """Bytes of the angles that the call gives, once a position, shared by the batch."""
        entries = self.rotary_dim // 2 if self.angles == "freqs pair" else self.rotary_dim
        return self.seq * entries * ANGLE_BYTES

    @property
    def moved_bytes(self) -> int:
        """Bytes that must move: what rotates in and out, the tail too out of place, and the angles."""
        share = self.rotary_dim / self.head_dim if self.inplace else 1.0
        return round(2 * self.tensor_bytes * share) + self.angle_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes that ``out.copy_(x)`` moves."""
        return 2 * self.tensor_bytes


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One set of tensors for a call: everything that any peer reads or writes."""

    tensors: list[torch.Tensor]  # x, or x and a key; the gradient of the output in a backward call
    freqs: torch.Tensor  # [S, R / 2] float32
    cos: torch.Tensor  # [S, R / 2] float32
    sin: torch.Tensor  # [S, R / 2] float32
    feature_freqs: torch.Tensor  # [S, 1, 1, R] float32
    cu_seqlens: torch.Tensor | None  # [B + 1] int32, thd only
    positions: torch.Tensor | None  # [T] int64, thd only: for the peers that gather angles

    @property
    def x(self) -> torch.Tensor:
        """The tensor that is rotated, or the first of the two."""
        return self.tensors[0]


def make_buffers(call: Call, device: str = "cuda") -> Buffers:
    """Fresh tensors with their own angles, so that no set finds its angles in the cache."""
    shapes = [call.shape(heads) for heads in (call.heads, call.key_heads) if heads]
    tensors = [torch.randn(shape, device=device, dtype=call.dtype) for shape in shapes]
    position = torch.arange(call.seq, device=device, dtype=torch.float32) + FIRST_POSITION
    exponent = torch.arange(0, call.rotary_dim, 2, device=device, dtype=torch.float32) / call.rotary_dim
    freqs = torch.outer(position, ROPE_BASE**-exponent)
    feature = freqs.repeat_interleave(2, dim=-1) if call.interleaved else torch.cat((freqs, freqs), dim=-1)
    cu_seqlens = positions = None
    if call.layout == "thd":
        cu_seqlens = torch.arange(call.batch + 1, device=device, dtype=torch.int32) * call.seq
        positions = torch.arange(call.seq, device=device).repeat(call.batch)
    return Buffers(
        tensors=tensors,
        freqs=freqs,
        cos=freqs.cos(),
        sin=freqs.sin(),
        feature_freqs=feature[:, None, None, :],
        cu_seqlens=cu_seqlens,
        positions=positions,
    )


def reference(call: Call, buffers: Buffers) -> torch.Tensor:
    """The first tensor by the formula in float64, rounded to float32; in pieces, for float64 is four times the size."""
    run = formula.ROTATIONS[call.direction, call.interleaved]
    x, expected = buffers.x, torch.empty_like(buffers.x, dtype=torch.float32)
    freqs, positions = buffers.feature_freqs.double(), buffers.positions
    axis = 1 if call.layout == "bshd" else 0
    step = max(1, PIECE_ELEMENTS * x.shape[axis] // x.numel())
    for start in range(0, x.shape[axis], step):
        length = min(step, x.shape[axis] - start)
        if positions is None:
            angles = formula.broadcast(freqs.narrow(0, start, length), call.layout, None)
        else:
            angles = formula.broadcast(freqs, call.layout, positions.narrow(0, start, length))
        expected.narrow(axis, start, length).copy_(run(x.narrow(axis, start, length).double(), angles))
    return expected
