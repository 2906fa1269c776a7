"""How the suites time: whole calls interleaved, calls in a CUDA graph, launches on cold tensors, the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from generator.measuring.bench import Timing, copy_time, device_time, host_time, sets_beyond_l2, summarise
from generator.measuring.bench import emptying as _flush

Call = Callable[[], object]

WARM_UPS = 3
# Of replays before those that are timed: after a peer was compiled, the first 8 ms of gigabyte calls took 5 to 10 percent
# longer, those of plain copies did not.
WARM_US = 30_000.0
ROUNDS = 9
ROUND_US = 20_000.0  # a call's part of a round lasts at least this long
MAX_CALLS = 200  # of one part
COPY_ELEMENTS = 1 << 27  # 256 MB of bfloat16: four times the L2
MOST_SETS = 64  # where more would be needed to fill the L2, a read of something else empties it

sets = sets_beyond_l2
host = host_time


def capture(call: Call) -> Call:
    """The call in a CUDA graph, as its replay; what the call returns lives as long as the graph does."""
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
    """Microseconds a call between two events, the queue empty before the first: where the host is slower, its time."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def interleaved(calls: dict[str, Call]) -> dict[str, Timing]:
    """Each call in each round, so that a drift of the clock falls on all; the median over the rounds."""
    counts = {}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        rough_us = max(span_us(call, 1), 1.0)
        counts[name] = min(MAX_CALLS, round(ROUND_US / rough_us + 0.5))
    rounds = [{name: span_us(call, counts[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: summarise([times[name] for times in rounds]) for name in calls}


def device(launches: Sequence[Call]) -> Timing:
    """Device time of one of the launches, in turn in a CUDA graph.

    Each launch's result lives until the next has run, so that two in a row never write the same memory.
    """
    last: list[object] = []

    def keeping(launch: Call) -> None:
        last[:] = [launch()]

    return device_time([functools.partial(keeping, launch) for launch in launches])


def set_count(bytes_per_set: int) -> int:
    """How many sets ``cold`` needs for launches that touch so many bytes."""
    return min(sets(bytes_per_set), MOST_SETS)


def cold(launches: Sequence[Call], bytes_per_set: int) -> Timing:
    """Device time of one of the launches, each on a set of its own that has left the L2 since it was touched.

    A round is all of them once. All results of a round live until its end, so that no two are written to the same
    memory. Sets that fill the L2 twice leave it by themselves; before a round of fewer, the L2 is emptied, and the time
    of that alone is taken off.
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
