"""Measure RoPE beside its peers: ``python -m benchmarks.rope`` writes benchmarks/results/<device>.json.

A row is measured interleaved: this project, the copy, every peer, then this project and the copy again, whose two
medians are averaged, so that a drift of the clock falls on all of them. Nothing is timed that has not just been held
against the formula in float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tuned.dispatch
from benchmarks import peers, plan, record, session
from benchmarks.call import Buffers, Call, make_buffers, reference
from generator.measuring.bench import Timing, copy_time, device_time, host_time, sets_beyond_l2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.peers import Launch
    from benchmarks.plan import Row

WARM_UPS = 3  # calls before timing: TorchScript profiles two before it fuses
OURS_ERROR = 1.0  # of the largest value times the dtype's epsilon; one rounding makes at most half of that
FLOAT32_ERROR = 16.0  # the same in float32, where sines and cosines of float32 weigh as much as the rounding
PEER_ERROR = 8.0  # peers may round cosines, sines and products


class WrongResultError(Exception):
    """A kernel that would be timed does not compute RoPE."""


def our_keywords(call: Call, b: Buffers) -> dict[str, Any]:
    """The arguments of ``tuned.dispatch`` beside the tensor."""
    keywords: dict[str, Any] = {"tensor_format": call.layout, "interleaved": call.interleaved}
    if call.angles == "cos_sin pair":
        keywords |= {"cos": b.cos, "sin": b.sin, "angle_entries": "pair"}
    elif call.angles == "freqs pair":
        keywords |= {"freqs": b.freqs, "angle_entries": "pair"}
    else:
        keywords |= {"freqs": b.feature_freqs, "angle_entries": "feature"}
    if b.cu_seqlens is not None:
        keywords |= {"cu_seqlens": b.cu_seqlens, "max_seqlen": call.seq}
    return keywords


def ours(call: Call, sets: Sequence[Buffers]) -> list[Launch]:
    """One launch a set through the public dispatch, which makes its output, and any table, each time."""

    def launch(b: Buffers, keywords: dict[str, Any]) -> torch.Tensor:
        if call.direction == "backward":
            return tuned.dispatch.rope_backward(b.x, **keywords)
        rotated = [tuned.dispatch.rope(x, inplace=call.inplace, **keywords) for x in b.tensors]
        return rotated[0]

    return [functools.partial(launch, b, our_keywords(call, b)) for b in sets]


def copies(sets: Sequence[Buffers]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The physical floor, read once, write once: (x, out) of each set; of all its tensors, end to end."""
    flat = [b.x if len(b.tensors) == 1 else torch.cat([x.flatten() for x in b.tensors]) for b in sets]
    return [(x, torch.empty_like(x)) for x in flat]


def keeping(launch: Launch) -> Callable[[], object]:
    """The launch, its last result kept alive: inside a CUDA graph no two sets may then share an output in the cache."""
    last: list[torch.Tensor] = []

    def run() -> None:
        result = launch()
        last[:] = [result]

    return run


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, in units of the dtype's epsilon times the largest value."""
    if result.shape != expected.shape:
        raise WrongResultError(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    unit = torch.finfo(result.dtype).eps * expected.abs().max()
    return float((result.float() - expected).abs().max() / unit)


def check(launch: Launch, expected: torch.Tensor, limit: float) -> None:
    """Run once on inputs of its own, compare, and warm up."""
    error = largest_error(launch(), expected)
    if not error <= limit:  # NaN is wrong too
        raise WrongResultError(f"largest error {error:.3g} is above {limit:.3g}, in units of epsilon")
    for _ in range(WARM_UPS):
        launch()


def probe(call: Call, b: Buffers) -> Buffers:
    """The set with inputs that may be overwritten."""
    return dataclasses.replace(b, tensors=[x.clone() for x in b.tensors]) if call.inplace else b


def time_peer(
    name: str, call: Call, untouched: Buffers, sets: Sequence[Buffers], expected: torch.Tensor
) -> float | str:
    """Microseconds, or the reason why there are none. A peer may fail in any way it likes; the row goes on."""
    try:
        launches = peers.launches(name, call, [probe(call, untouched), *sets])
        if isinstance(launches, str):
            return launches
        check(launches[0], expected, PEER_ERROR)
        return round(device_time([keeping(launch) for launch in launches[1:]]).median_us, 3)
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return session.reason(error)


def device_row(row: Row) -> dict[str, Any]:
    """Time one row on the device."""
    call = row.call
    per_set = call.tensor_bytes * (1 if call.inplace else 2) + call.angle_bytes
    sets = [make_buffers(call) for _ in range(sets_beyond_l2(per_set))]
    untouched = probe(call, sets[0])  # an in-place call rotates its sets again at every replay
    expected = reference(call, untouched)
    mine = ours(call, [probe(call, untouched), *sets])
    check(mine[0], expected, OURS_ERROR if call.dtype != torch.float32 else FLOAT32_ERROR)

    def timed(launches: Sequence[Launch]) -> Timing:
        return device_time([keeping(launch) for launch in launches])

    floors = copies(sets)
    our_times, copy_times = [timed(mine[1:])], [copy_time(floors)]
    found = {name: time_peer(name, call, untouched, sets, expected) for name in row.peers}
    our_times.append(timed(mine[1:]))
    copy_times.append(copy_time(floors))
    return record.device_row(
        row,
        call,
        ours_us=statistics.fmean(t.median_us for t in our_times),
        ours_spread_us=max(t.spread_us for t in our_times),
        copy_us=statistics.fmean(t.median_us for t in copy_times),
        found=found,
    )


def host_calls(row: Row, b: Buffers) -> dict[str, Callable[[], object] | str]:
    """Whole calls as a model makes them, or reasons; a backward row is forward with backward through autograd."""
    call = row.call
    x = b.x.detach().clone().requires_grad_(call.direction == "backward")
    grad, other, keywords = torch.randn_like(x), torch.randn_like(x), our_keywords(call, b)
    forward, on_x = dataclasses.replace(call, direction="forward"), dataclasses.replace(b, tensors=[x])
    calls: dict[str, Launch | str] = {"ours": lambda: tuned.dispatch.rope(x, **keywords)}
    for name in row.peers:
        if name == "torch.add":
            calls[name] = lambda: torch.add(x, other)
        else:
            launches = peers.launches(name, forward, [on_x])
            calls[name] = launches if isinstance(launches, str) else launches[0]

    def both(forward_call: Launch) -> object:
        return torch.autograd.grad(forward_call(), x, grad)

    if call.direction == "forward":
        return dict(calls)
    return {name: run if isinstance(run, str) else functools.partial(both, run) for name, run in calls.items()}


def time_host_call(run: Callable[[], object] | str) -> Timing | str:
    """The wall time of a call, or the reason why there is none."""
    if isinstance(run, str):
        return run
    try:
        for _ in range(WARM_UPS):
            run()
        return host_time(run)
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return session.reason(error)


def host_row(row: Row) -> dict[str, Any]:
    """Time one row by the wall clock."""
    call = row.call
    b = make_buffers(call)
    limit = OURS_ERROR if call.dtype != torch.float32 else FLOAT32_ERROR
    with torch.no_grad():
        expected = reference(call, b)
        check(ours(call, [b])[0], expected, limit)
    calls = host_calls(row, b)
    with torch.set_grad_enabled(call.direction == "backward"):
        first = time_host_call(calls["ours"])
        found = {name: time_host_call(calls[name]) for name in row.peers}
        times = (first, time_host_call(calls["ours"]))
    failed = [t for t in times if isinstance(t, str)]
    if failed:
        raise RuntimeError(failed[0])
    timings = [t for t in times if not isinstance(t, str)]
    return record.host_row(
        row,
        ours_us=statistics.fmean(t.median_us for t in timings),
        ours_spread_us=max(t.spread_us for t in timings),
        found={name: t if isinstance(t, str) else round(t.median_us, 3) for name, t in found.items()},
        direction=call.direction,
    )


def measure(row: Row) -> dict[str, Any]:
    """One row, whatever its kind."""
    if row.kind == "host":
        return host_row(row)
    with torch.no_grad():
        return device_row(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rope", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="bshd alone, and no peer that compiles for each shape")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--only", action="append", choices=tuple(plan.SUITES), help="a suite; may be repeated")
    parser.add_argument("--minutes", type=float, default=session.DEFAULT_MINUTES, help="begin no row after this many")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.rope measures on a GPU, and PyTorch sees none here")
        return 1
    suites = tuple(options.only or plan.SUITES)
    results = record.Results.open(options.out, suites)
    session.run(plan.rows(suites, quick=options.quick), results, measure, minutes=options.minutes)
    print(f"{len(results.rows)} rows in {results.path}, {len(results.skipped)} skipped")
    for key, why in results.skipped.items():
        print(f"  skipped {key}: {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
