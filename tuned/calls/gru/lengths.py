"""Where sequences start and how long they are, as the kernels of a GRU take it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from tuned.calls.gru.arguments import GruCall
from tuned.launching.plan import listeners

MAX_LENGTHS = 64  # sets of lengths whose tensors are kept on a device


class Lengths(NamedTuple):
    """The tensors of packed sequences as the kernels take them; templates/gru_layer.py.jinja says what they hold."""

    layout: str
    starts: torch.Tensor | None
    lengths: torch.Tensor | None
    seq: int


def steps_of(call: GruCall) -> int:
    """The number of steps of a call, at least that of its longest sequence."""
    if call.batch_sizes is not None:
        return call.batch_sizes.numel()
    if call.max_seqlen is not None:
        return call.max_seqlen
    return call.input.shape[1 if call.batch_first else 0]


def lengths_of(call: GruCall) -> Lengths:
    """Where sequences start and how long they are, as tensors on the device."""
    if call.batch_sizes is not None:
        starts, lengths = packed_tensors(sizes_of(call.batch_sizes), call.input.device)
        return Lengths("packed", starts, lengths, steps_of(call))
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens.contiguous()  # as the kernels assume
        return Lengths("thd", starts, starts.diff().clamp_(max=steps_of(call)), steps_of(call))
    return Lengths("dense", None, None, steps_of(call))


def sizes_of(batch_sizes: torch.Tensor) -> bytes:
    """The values of a tensor on the CPU, as bytes that identify a set of lengths: a list of them takes twenty times as long."""
    sizes = batch_sizes.contiguous()
    return ctypes.string_at(sizes.data_ptr(), sizes.nbytes)


def known_sizes(batch_sizes: Any) -> bytes | None:
    """``sizes_of`` a caller's argument; None unless it is a plain int64 tensor on the CPU, and if a dispatch mode is active."""
    if listeners():  # under a mode, contiguous() may return a tensor without memory
        return None
    plain = type(batch_sizes) is torch.Tensor and batch_sizes.dtype is torch.int64 and batch_sizes.device.type == "cpu"
    return sizes_of(batch_sizes) if plain else None


def neighbours(lengths: Lengths, tokens: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    """For each direction (each token's sequence, whether its step is the first, the token of the step before); packed or "thd".

    For a token that is of no sequence the indices are in range and mean nothing.
    """
    starts, counts = lengths.starts, lengths.lengths
    assert starts is not None, "sequences of one length have no starts"
    assert counts is not None
    token = torch.arange(tokens, device=starts.device)
    if lengths.layout == "packed":
        step = torch.searchsorted(starts, token, right=True) - 1
        sequence = token - starts[step]
        first, last = step == 0, step == counts[sequence] - 1
        before = starts[(step - 1).clamp(min=0)] + sequence
        after = starts[(step + 1).clamp(max=len(starts) - 1)] + sequence
    else:
        sequence = torch.searchsorted(starts[1:], token.to(starts.dtype), right=True).clamp(max=len(counts) - 1)
        first, last = token == starts[sequence], token == starts[sequence] + counts[sequence] - 1
        before, after = token - 1, token + 1
    highest = max(tokens - 1, 0)
    return (sequence, first, before.clamp(0, highest)), (sequence, last, after.clamp(0, highest))


_CAPTURED: dict[
    Any, tuple[torch.Tensor, torch.Tensor]
] = {}  # read by captured graphs, so kept for good: nothing tells when the last graph is gone


def packed_tensors(sizes: bytes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``_packed_lengths(sizes, device)``, kept alive as long as the current stream, or a graph captured on it, may read them."""
    key = sizes, device
    found = _CAPTURED.get(key)
    if found is not None:
        return found
    found = _packed_lengths(sizes, device)
    if device.type != "cuda":
        return found
    if torch.cuda.is_current_stream_capturing():
        # A graph holds addresses, not tensors. They take a few bytes per step and sequence, once for all such graphs.
        _CAPTURED[key] = found
    else:
        stream = torch.cuda.current_stream(device)
        for t in found:  # the cache may drop them before this stream has read them
            t.record_stream(stream)
    return found


@functools.lru_cache(maxsize=MAX_LENGTHS)
def _packed_lengths(sizes: bytes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each step, int64 [T], and the length of each sequence, int32 [B]; cached: the copies synchronize."""
    rows = torch.frombuffer(bytearray(sizes), dtype=torch.int64)
    lengths = (rows[:, None] > torch.arange(int(rows[0]), device="cpu")).sum(0, dtype=torch.int32)
    return (rows.cumsum(0) - rows).to(device), lengths.to(device)
