"""Time launches on the device and calls on the host.

Whoever changes the way of timing changes TIMING: times taken another way are not compared with new ones, and are worth
tuning again. If earlier winners would be wrong under the new way, change tuned.lookup.record.METHOD too: their rows
then do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

TIMING = "warmed-cold-three-memories-checked/4"  # a change of METHOD is also a change of TIMING
GRAPH_US = 500.0  # launches in one graph take at least this long, so that starting the graph is under 1 percent
REPLAYS = 12
# A graph of thousands of time steps needs fewer replays, since each is a mean of many waits already. It holds no more
# launches than take LONGEST_US, since what one of them reads takes a thousandth of that, from memory or from the L2.
LONG_US, LONG_REPLAYS = 5_000.0, 5
LONGEST_US = 20_000.0
HOST_CALLS = 200  # a batch; small enough that the queue of 1024 launches never fills


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds for one launch or call: the median over repetitions, and half the interquartile range."""

    median_us: float
    spread_us: float


@dataclasses.dataclass(frozen=True)
class Emptied:
    """The launch that empties the L2 before each round of launches, and how long it takes alone."""

    run: Callable[[], object]
    us: float


def sets_beyond_l2(bytes_per_set: int, device: int | None = None) -> int:
    """How many buffer sets a rotation needs so that twice the L2 is read before a set comes again; at least 2."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device).L2_cache_size
    return sets_filling(l2, bytes_per_set)


def sets_filling(l2_bytes: int, bytes_per_set: int) -> int:
    """How many sets fill an L2 of a known size twice; at least 2."""
    return max(2, -(-2 * l2_bytes // max(bytes_per_set, 1)))


@functools.cache
def emptying() -> Callable[[], object]:
    """A launch that reads twice the size of the L2: it leaves only its own, clean lines there."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.ones(2 * l2_bytes // 4, device="cuda").sum


def summarise(times_us: Sequence[float]) -> Timing:
    """Median and half the interquartile range of at least two times."""
    return Timing(round(statistics.median(times_us), 4), round(half_spread(times_us), 4))


def half_spread(values: Sequence[float]) -> float:
    """Half the interquartile range of values; 0 of a single one."""
    if len(values) == 1:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


@contextlib.contextmanager
def capturing(graph: Any) -> Iterator[None]:
    """Capture the launches of a block by a CUDA graph; the current stream must not be a default stream.

    ``torch.cuda.graph`` empties the allocator's cache each time. The next check would then ask the driver for that
    memory again: gigabytes, where results are compared with float64.
    """
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # what is freed while a graph is captured may end the capture
    try:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def device_time(  # noqa: PLR0913 - each is one choice of how to time
    launches: Sequence[Callable[[], object]],
    replays: int = REPLAYS,
    restore: Callable[[], object] | None = None,
    warm_us: float = 0.0,
    poison: Callable[[], object] | None = None,
    emptied: Emptied | None = None,
) -> Timing:
    """Device time of one launch: replays of a CUDA graph that holds the launches in turn, each on its own buffers.

    The launches should rotate over ``sets_beyond_l2`` sets: a loop over one set times the cache.

    Args:
        launches: what is timed.
        replays: how many replays are timed.
        restore: renews the inputs of in-place launches; it runs before each two replays, of which the second is timed.
        warm_us: microseconds of replays before the timed ones: a GPU that was idle, while the host compiled, is slower
            for some milliseconds.
        poison: runs once, before all replays and after all other launches: results found afterwards come from replays.
        emptied: runs in the graph before each round of the launches, and its time is subtracted; for sets that are too
            few to displace each other from the L2.
    """
    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)  # what prepared the buffers may still run
    with torch.cuda.stream(stream):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        launches[0]()  # compiles and loads the kernel before the capture
        begin.record()
        for launch in launches:
            launch()
        end.record()
        end.synchronize()
        rough_us = max(begin.elapsed_time(end) * 1e3, 1.0)
        if rough_us > LONGEST_US:
            kept = max(1, int(len(launches) * LONGEST_US / rough_us))
            rough_us, launches = rough_us * kept / len(launches), launches[:kept]
        if rough_us > LONG_US:
            replays = min(replays, LONG_REPLAYS)
        emptied = emptied or Emptied(lambda: None, 0.0)
        round_us = rough_us + emptied.us
        rounds = max(1, round(GRAPH_US / round_us + 0.5))
        warming = int(warm_us / (rounds * round_us))
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for _ in range(rounds):
                emptied.run()
                for launch in launches:
                    launch()
        if poison is not None:
            poison()
        # All replays are queued before the first ends: otherwise the host's time to launch would count as device time.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        if restore is None:
            spans = list(itertools.pairwise(marks))
            for _ in range(1 + warming):
                graph.replay()
            for mark in marks[:-1]:
                mark.record()
                graph.replay()
            marks[-1].record()
        else:
            renew = torch.cuda.CUDAGraph()  # one launch, however many buffers: the queue stays ahead of the device
            with capturing(renew):
                restore()
            spans = [(torch.cuda.Event(enable_timing=True), mark) for mark in marks]
            for _ in range(warming):
                renew.replay()
                graph.replay()
            for begin, end in spans:
                renew.replay()
                graph.replay()  # leaves the L2 as launches do, not as the copies of the restore do
                begin.record()
                graph.replay()
                end.record()
            del spans[0]  # the first warms up, as above
        marks[-1].synchronize()
    here.wait_stream(stream)
    return summarise([(a.elapsed_time(b) * 1e3 / rounds - emptied.us) / len(launches) for a, b in spans])


def keeping(makes: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """The same calls, for ``device_time``, each of which keeps its result in memory of its own.

    The allocator would give the memory of a freed result to the next call, and that memory would stay in the L2.
    """
    results: list[object] = [None] * len(makes)
    return [functools.partial(_keep, results, index, make) for index, make in enumerate(makes)]


def _keep(results: list[object], index: int, make: Callable[[], object]) -> None:
    results[index] = make()


def timed_emptying(warm_us: float = 0.0) -> Emptied:
    """The launch that empties the L2, and its time; ``warm_us`` is as for ``device_time``."""
    return Emptied(emptying(), device_time([emptying()], warm_us=warm_us).median_us)


def copy_time(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], clock: Callable[..., Timing] = device_time) -> Timing:
    """Device time of ``out.copy_(x)`` over (x, out) pairs, or of an elementwise kernel where that is faster.

    In a graph a large copy is a memcpy node, which the driver may give to the copy engines: 2.6 TB/s on an H200,
    where a kernel moves 4.2. The floor should show what the memory can do.
    """
    copies = [functools.partial(out.copy_, x) for x, out in pairs]
    kernels = [functools.partial(torch.neg, x, out=out) for x, out in pairs]
    return min(clock(copies), clock(kernels), key=lambda t: t.median_us)


def host_time(call: Callable[[], object], batches: int = 15) -> Timing:
    """Wall time of one call in a loop that never fills the launch queue."""
    for _ in range(10):
        call()
    times_us = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times_us.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    return summarise(times_us)
