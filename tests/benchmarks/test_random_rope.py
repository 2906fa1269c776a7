"""The random RoPE calls of the benchmark: which are drawn, how they are timed in turns, and what is reported."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from benchmarks import call as calls
from benchmarks import peers
from benchmarks.random_rope import MOST_ELEMENTS, PEERS, drawn, in_rounds, summary
from benchmarks.rope import OUR_ERROR, check


def test_calls_are_of_all_kinds_and_follow_the_seed() -> None:
    draw, again = random.Random(1), random.Random(1)
    found = [drawn(draw) for _ in range(400)]
    assert found == [drawn(again) for _ in range(400)]
    assert {(c.layout, c.inplace) for c in found} == {(a, b) for a in ("bshd", "sbhd", "thd") for b in (True, False)}
    assert {(c.direction, c.dtype) for c in found} == {
        (a, b) for a in ("forward", "backward") for b in (torch.bfloat16, torch.float32)
    }
    assert any(c.rotary_dim < c.head_dim for c in found)
    assert any(0 < c.key_heads < c.heads for c in found)
    assert any(c.sequences > 1 for c in found)
    assert all(c.tokens * (c.heads + c.key_heads) * c.head_dim <= MOST_ELEMENTS for c in found)
    assert set(PEERS) <= set(peers.PEERS)


def test_what_is_drawn_is_right_and_its_peers_would_be_asked() -> None:
    draw, asked = random.Random(2), 0
    for _ in range(25):
        call = drawn(draw)
        small = dataclasses.replace(
            call, batch=min(call.batch, 2), seq=max(4, call.sequences), heads=4, key_heads=min(call.key_heads, 2)
        )
        tensors = calls.make_tensors(small, 1, "cpu")[0]
        expected = calls.expected(small, calls.probe(small, tensors))
        check(calls.ours(small, [calls.probe(small, tensors)])[0], expected, OUR_ERROR[small.dtype])
        asked += not any(beyond(small) for beyond, _ in peers.LIMITS["flash-attention"])
    assert asked == 25


def test_what_seems_slower_is_measured_again() -> None:
    def turns(ours: float) -> tuple[dict[str, float], int]:
        read: list[str] = []

        def clock(name: str) -> float:
            read.append(name)
            return {"ours": ours, "theirs": 10.0, "copy": 1.0}[name]

        return in_rounds({name: name for name in ("ours", "theirs", "copy")}, clock, "ours"), len(read)

    assert turns(9.0) == ({"ours": 9.0, "theirs": 10.0, "copy": 1.0}, 3 * 6)
    assert turns(11.0) == ({"ours": 11.0, "theirs": 10.0, "copy": 1.0}, 3 * 26)


def test_the_summary_names_what_misses_a_bar() -> None:
    facts = calls.Call(1, 64, 8, 0, 64, 64).facts
    fast = {
        **facts,
        "floor_us": 35.0,
        "refusals": {},
        "graph_us": {"ours": 36.0, "a": 40.0},
        "call_us": {"ours": 9.0, "a": 18.0},
    }
    slow = {
        **fast,
        "floor_us": 30.0,
        "graph_us": {"ours": 45.0, "a": 50.0, "b": 40.0},
        "call_us": {"ours": 9.0, "a": 10.0},
    }
    told = summary([fast, slow])
    assert "graph_us: 2 calls" in told
    assert "most 1.125; under 1.00 50.0%; 1 over 1.05" in told
    assert "1.125 b1 s64 h8 d64 r64 bshd bfloat16 forward" in told
    assert "call_us: 2 calls, ours / best peer 0.671" in told
    assert "2 calls over 30 us" in told
    assert "most 1.500; 1 over 1.05" in told


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["random_rope"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from benchmarks.random_gru import run  # noqa: PLC0415

    with pytest.raises(SystemExit, match="no GPU"):
        run("About: it", drawn, None, None, lambda _: "")
