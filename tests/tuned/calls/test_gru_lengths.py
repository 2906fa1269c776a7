"""Where sequences start, how long they are, and how long the tensors that hold this stay in memory."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from typing import Any

import pytest
import torch

import tuned.calls.gru.lengths
from tests.support.gru_running import T, call_of
from tuned.calls.gru.lengths import known_sizes, lengths_of, packed_tensors, sizes_of


def key(*batch_sizes: int) -> bytes:
    return sizes_of(torch.tensor(batch_sizes))


@pytest.mark.parametrize("step", [1, 2])
def test_sets_of_lengths_are_known_by_their_values_alone(step: int) -> None:
    sizes = torch.tensor([3, 3, 2, 2, 1, 1])
    assert sizes_of(sizes[::step]) == b"".join(n.to_bytes(8, "little") for n in sizes[::step].tolist())
    assert sizes_of(sizes) != sizes_of(sizes.flip(0))


def test_memory_of_another_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.tensor([2, 1])
    assert known_sizes(sizes) == sizes_of(sizes)
    monkeypatch.setattr(tuned.calls.gru.lengths, "sizes_of", lambda _: pytest.fail("it was read"))
    for other in (sizes.to("meta"), sizes.int(), torch.nn.Parameter(sizes, requires_grad=False), [2, 1]):
        assert known_sizes(other) is None


def test_a_packs_lengths_and_starts_are_those_of_its_batch_sizes() -> None:
    call = call_of("packed")
    layout, starts, lengths, seq = lengths_of(call)
    assert (layout, seq) == ("packed", 4)
    assert starts is not None
    assert lengths is not None
    assert starts.tolist() == [0, 3, 5, 7]
    assert lengths.tolist() == [4, 3, 1]
    assert (starts.dtype, lengths.dtype) == (torch.int64, torch.int32)
    again = lengths_of(call)
    assert again.starts is starts, "made anew, which on a GPU waits for a copy"


def test_lengths_by_bounds_are_their_differences_and_at_most_what_the_call_says() -> None:
    call = call_of("thd")
    _, starts, lengths, seq = lengths_of(call)
    assert seq == T
    assert starts is call.cu_seqlens
    assert lengths is not None
    assert lengths.tolist() == [2, 0, 4]
    shorter = lengths_of(dataclasses.replace(call, max_seqlen=3)).lengths
    assert shorter is not None
    assert shorter.tolist() == [2, 0, 3], "more would be written than the launch has steps"


@pytest.mark.parametrize("first", [False, True])
def test_sequences_of_one_length_have_none(first: bool) -> None:
    call = call_of(first=first)
    assert lengths_of(call) == ("dense", None, None, T)


# Memory of lengths ----------------------------------------------------------------------------------------------------


class _OnGpu:
    """A stand-in for a tensor on a GPU, which notes the streams that read it."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


@pytest.fixture
def lengths_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for tensors of lengths on a GPU: made for each set of lengths; the stream; whether it captures."""
    state = types.SimpleNamespace(made={}, stream="first", capturing=False)

    @functools.lru_cache(maxsize=2)  # so small that an entry soon leaves
    def packed(batch_sizes: Any, _device: Any) -> Any:
        made = _OnGpu(), _OnGpu()
        state.made.setdefault(batch_sizes, []).append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(tuned.calls.gru.lengths, "_packed_lengths", packed)
    monkeypatch.setattr(tuned.calls.gru.lengths, "_CAPTURED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: state.stream)
    return state


def test_lengths_that_a_graph_reads_stay_as_long_as_the_process(lengths_on_gpu: Any) -> None:
    device = torch.device("cuda", 0)
    packed_tensors(key(2, 1), device)
    lengths_on_gpu.capturing = True
    starts, _ = packed_tensors(key(2, 1), device)
    lengths_on_gpu.capturing = False
    address = id(starts)
    del starts
    for count in range(3, 12):
        packed_tensors(key(count), device)
    gc.collect()
    assert lengths_on_gpu.made[key(2, 1)][0]() is not None, "the graph reads memory that was given back"
    assert lengths_on_gpu.made[key(3)][0]() is None, "the table kept what no graph reads"
    assert id(packed_tensors(key(2, 1), device)[0]) == address


def test_lengths_are_not_given_back_while_a_stream_reads_them(lengths_on_gpu: Any) -> None:
    device = torch.device("cuda", 0)
    for stream in ("first", "second"):
        lengths_on_gpu.stream = stream
        found = packed_tensors(key(3, 1), device)
    assert [t.streams for t in found] == [["first", "second"]] * 2
