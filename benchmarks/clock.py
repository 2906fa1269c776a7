"""The clocks of the suites: whole calls interleaved, calls in a CUDA graph, launches on cold tensors, the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from generator.measuring.bench import Timing, copy_time, device_time, host_time, sets_beyond_l2, summarise
from generator.measuring.bench import emptying as _flush

Call = Callable[[], object]

WARM_UPS = 3
# Replays before the timed ones last this long: after a peer was compiled, the first 8 ms of gigabyte calls took 5 to 10
# percent longer, those of plain copies did not.
WARM_US = 30_000.0
ROUNDS = 9
ROUND_US = 20_000.0  # a call's part of a round lasts at least this long
MAX_CALLS = 200  # of one part
COPY_ELEMENTS = 1 << 27  # 256 MB of bfloat16: four times the L2
MOST_SETS = 64  # if more would be needed to fill the L2, a read of other data empties it

sets = sets_beyond_l2
host = host_time


def capture(call: Call) -> Call:
    """A function that replays the call from a CUDA graph; the call's result lives as long as the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), list[object]()
    with torch.cuda.graph(graph):
        kept.append(call())

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def span_us(call: Call, calls: int) -> float:
    """Microseconds a call between two events, the queue empty before the first; if the host is slower, the host's time."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def interleaved(calls: dict[str, Call]) -> dict[str, Timing]:
    """The median over rounds in which every call is timed, so that a drift of the clock falls on all calls."""
    counts = {}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        rough_us = max(span_us(call, 1), 1.0)
        counts[name] = min(MAX_CALLS, round(ROUND_US / rough_us + 0.5))
    rounds = [{name: span_us(call, counts[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: summarise([times[name] for times in rounds]) for name in calls}


def device(launches: Sequence[Call]) -> Timing:
    """Device time of one launch; all launches run in turn in a CUDA graph.

    Each launch's result lives until the next has run, so that two in a row never write the same memory.
    """
    last: list[object] = []

    def keeping(launch: Call) -> None:
        last[:] = [launch()]

    return device_time([functools.partial(keeping, launch) for launch in launches])


def set_count(bytes_per_set: int) -> int:
    """How many sets ``cold`` needs for launches that touch ``bytes_per_set`` bytes each."""
    return min(sets(bytes_per_set), MOST_SETS)


def cold(launches: Sequence[Call], bytes_per_set: int) -> Timing:
    """Device time of one launch; each launch has its own set of tensors, which has left the L2 since it was last touched.

    A round is every launch once. All results of a round live until its end, so that no two are written to the same
    memory. If the sets fill the L2 twice, each has left it before its next turn. Otherwise the L2 is emptied before
    each round, and the time of emptying alone is subtracted.
    """

    def one_round() -> None:
        results = [launch() for launch in launches]
        del results

    if len(launches) >= sets(bytes_per_set):
        whole, emptying_us = device_time([one_round], warm_us=WARM_US), 0.0
    else:
        flush = _flush()

        def flushed() -> None:
            flush()
            one_round()

        whole = device_time([flushed], warm_us=WARM_US)
        emptying_us = device_time([flush], warm_us=WARM_US).median_us
    count = len(launches)
    return Timing(round((whole.median_us - emptying_us) / count, 4), round(whole.spread_us / count, 4))


@functools.cache
def copy_rate() -> float:
    """Bytes a second that a copy moves, read and written."""
    ones = [torch.ones(COPY_ELEMENTS, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    moved_bytes = 2 * ones[0].nbytes
    return moved_bytes / (copy_time([(x, torch.empty_like(x)) for x in ones]).median_us * 1e-6)
