"""RoPE of random shapes against flash-attention and Liger: python -m benchmarks.random_rope [--seconds 60] [--shapes 300] [--seed N] [--out FILE].

Each call is drawn log-uniform, not rounded: 1 to 65,536 tokens in all layouts, 1 to 64 heads, no key or one with at
most as many, 16 to 256 features of which all or some rotate, by halves or interleaved, in place or not, forward or
backward, bfloat16 or float32. Each result is compared with the formula in float64. The call is then timed in turns with
every peer that takes it: in a CUDA graph of at least 20 calls, over sets that fill the L2 twice, or 64 sets; and as a
call, on the wall clock. The floor is the time of a copy, scaled to the bytes that must move.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import call as calls
from benchmarks import clock
from benchmarks.call import Call, Direction, Launch, Layout
from benchmarks.random_gru import AGAIN, TIMES, call_us, captured, graph_us, run
from benchmarks.rope import OUR_ERROR, PEER_ERROR, attempt, check

PEERS = ("flash-attention", "Liger-Kernel")
SHAPES = 300  # that the bar asks for
MOST_ELEMENTS = 2**27  # of query and key
LARGE_US = 30.0  # calls that take longer are judged by the floor
SLOWER, FLOOR = 1.05, 1.05  # bars: times the best peer's time, and times the floor
LAYOUTS: tuple[Layout, ...] = ("bshd", "sbhd", "thd")
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward", "forward", "backward")
CALLS = 20  # calls for each reading of the wall clock
LEAST = 20  # calls of a graph at least: with two, starting the graph added a microsecond to each


def drawn(draw: random.Random) -> Call:
    """A random call whose tensors fit into memory many times."""

    def between(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    while True:
        layout = draw.choice(LAYOUTS)
        direction = draw.choice(DIRECTIONS)
        tokens, heads, half = between(1, 65_536), between(1, 64), between(8, 128)
        batch = 1 if layout == "thd" else between(1, min(tokens, 64))
        seq = max(1, tokens // batch)
        forward = direction == "forward"
        made = Call(
            batch=batch,
            seq=seq,
            heads=heads,
            key_heads=between(1, heads) if forward and draw.random() < 0.5 else 0,  # noqa: PLR2004
            head_dim=2 * half,
            rotary_dim=2 * draw.choice((half, half, between(1, half))),
            layout=layout,
            direction=direction,
            angles=draw.choice(("freqs pair", "cos_sin pair")),
            inplace=forward and draw.random() < 0.5,  # noqa: PLR2004
            interleaved=draw.random() < 0.3,  # noqa: PLR2004
            sequences=between(1, max(1, min(seq // 2, 64))) if layout == "thd" else 1,
            dtype=draw.choice((torch.bfloat16, torch.bfloat16, torch.float32)),
        )
        if made.tokens * (made.heads + made.key_heads) * made.head_dim <= MOST_ELEMENTS:
            return made


def _looped(launches: Sequence[Launch], count: int) -> Launch:
    def calls_in_turn() -> tuple[torch.Tensor, ...]:
        kept: list[Any] = [launches[i % len(launches)]() for i in range(count)]
        return tuple(kept[-1])

    return calls_in_turn


def in_rounds(timed: dict[str, Any], clock_us: Any, ours: str) -> dict[str, float]:
    """The median time of each, timed in turns; if a peer is faster than ours, over five times as many rounds."""
    for one in timed.values():
        clock_us(one)
    times: dict[str, list[float]] = {name: [] for name in timed}
    found: dict[str, float] = {}
    for count in (TIMES, (AGAIN - 1) * TIMES):
        for _ in range(count):
            for name, one in timed.items():
                times[name].append(clock_us(one))
        found = {name: statistics.median(column) for name, column in times.items()}
        if found[ours] <= min(us for name, us in found.items() if name not in {ours, "copy"}):
            break
    return found


def served(call: Call) -> None:
    """Run one call by ours and by each peer, so that their kernels are compiled."""
    sets = calls.make_tensors(call, 1, "cuda")
    calls.ours(call, sets)[0]()

    def launched(given: list[Launch]) -> list[Launch]:
        given[0]()
        return given

    for name in PEERS:
        attempt(launched, name, call, sets)


def compared(call: Call, device: str = "cuda", peers: Sequence[str] = PEERS) -> dict[str, Any] | None:
    """Ours and each peer that takes the call: microseconds in a graph and as a call; None if no peer does."""
    sets = calls.make_tensors(call, clock.set_count(call.touched_bytes), device)
    untouched = calls.probe(call, sets[0])
    expected = calls.expected(call, untouched)
    launches = {"ours": calls.ours(call, [calls.probe(call, untouched), *sets])}
    check(launches["ours"][0], expected, OUR_ERROR[call.dtype])
    refusals: dict[str, str] = {}
    for name in peers:

        def checked(given: list[Launch]) -> list[Launch]:
            check(given[0], expected, PEER_ERROR)
            return given

        found = attempt(checked, name, call, [calls.probe(call, untouched), *sets])
        (refusals if isinstance(found, str) else launches)[name] = found
    if len(launches) == 1:
        return None
    elements = call.tensor_bytes // call.dtype.itemsize
    pairs = [
        [torch.randn(elements, device=device, dtype=call.dtype) for _ in range(2)]
        for _ in range(clock.set_count(call.copy_bytes))
    ]
    launches["copy"] = [functools.partial(lambda x, out: (torch.neg(x, out=out),), *pair) for pair in pairs]
    count = len(sets) * math.ceil(LEAST / len(sets))
    graphs = {name: captured(_looped(given[1:] or given, count)) for name, given in launches.items()}
    in_graphs = {name: us / count for name, us in in_rounds(graphs, graph_us, "ours").items()}
    loops = {name: _looped(given[1:2] or given, CALLS) for name, given in launches.items() if name != "copy"}
    as_calls = {name: us / CALLS for name, us in in_rounds(loops, call_us, "ours").items()}
    floor_us = in_graphs.pop("copy") * call.moved_bytes / call.copy_bytes
    facts = {**call.facts, "floor_us": floor_us, "refusals": refusals}
    return facts | {"graph_us": in_graphs, "call_us": as_calls}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The ratios that the bars judge, and the worst rows that miss a bar."""
    lines = []
    for which in ("graph_us", "call_us"):
        ratios = [(r[which]["ours"] / min(us for name, us in r[which].items() if name != "ours"), r) for r in rows]
        slower = [one for one in ratios if one[0] > SLOWER]
        faster = sum(ratio < 1 for ratio, _ in ratios) / len(ratios)
        lines.append(
            f"{which}: {len(rows)} calls, ours / best peer {statistics.geometric_mean([r for r, _ in ratios]):.3f} in the geometric mean, "
            f"most {max(r for r, _ in ratios):.3f}; under 1.00 {faster:.1%}; {len(slower)} over {SLOWER}"
        )
        lines += [
            f"    {ratio:.3f} {_shown(row, which)}" for ratio, row in sorted(slower, key=lambda one: -one[0])[:20]
        ]
    large = [(r["graph_us"]["ours"] / r["floor_us"], r) for r in rows if r["graph_us"]["ours"] > LARGE_US]
    if large:
        worst = sorted(large, key=lambda one: -one[0])
        over = [one for one in worst if one[0] > FLOOR]
        lines.append(
            f"{len(large)} calls over {LARGE_US:g} us: ours / floor {statistics.geometric_mean([r for r, _ in large]):.3f}, "
            f"most {worst[0][0]:.3f}; {len(over)} over {FLOOR}"
        )
        lines += [f"    {ratio:.3f} {_shown(row, 'graph_us')}" for ratio, row in over[:10]]
    return "\n".join(lines)


def _shown(row: dict[str, Any], which: str) -> str:
    times = ", ".join(f"{name} {us:.2f}" for name, us in row[which].items())
    words = ("problem", "layout", "dtype", "direction", "angles", "style")
    return f"{' '.join(str(row[word]) for word in words)}{' in place' if row['inplace'] else ''}: {times}; floor {row['floor_us']:.2f}"


if __name__ == "__main__":
    run(__doc__, drawn, served, compared, summary, SHAPES)
