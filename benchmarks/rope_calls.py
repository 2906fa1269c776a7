"""Measure complete RoPE calls beside their peers: ``python -m benchmarks.rope_calls``.

It writes benchmarks/results/calls/<device>.json. A row is measured as in benchmarks.rope: this project, a copy, every
peer, then this project and the copy again. The copy is of one contiguous tensor with as many elements as query and key
have together. Nothing is timed whose query and key have not just been held against the formula in float64.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import calls, calls_peers, calls_plan, clock, peers, record, session
from benchmarks.rope import FLOAT32_ERROR, OURS_ERROR, PEER_ERROR, WrongResultError, largest_error
from generator.measuring.bench import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.calls import CompleteCall, Launch, Tensors
    from benchmarks.calls_plan import CallRow

FOLDER = session.FOLDER.parent / "calls"
WARM_UPS = 3
OURS = "ours"
HOST_ROUNDS = 7
NO_ROPE = "torch.add"  # a column of host rows: there is nothing to hold it against


def check(launch: Launch, expected: Sequence[torch.Tensor], limit: float) -> None:
    """Run once on inputs of its own, compare each of its tensors, and warm up."""
    results = launch()
    if len(results) != len(expected):
        raise WrongResultError(f"{len(results)} tensors instead of {len(expected)}")
    for result, right in zip(results, expected, strict=True):
        error = largest_error(result.detach(), right)
        if not error <= limit:  # NaN is wrong too
            raise WrongResultError(f"largest error {error:.3g} is above {limit:.3g}, in units of epsilon")
    for _ in range(WARM_UPS):
        launch()


def probe(call: CompleteCall, t: Tensors) -> Tensors:
    """The set with inputs that may be overwritten."""
    return calls.copied(call, t) if call.inplace else t


def our_limit(call: CompleteCall) -> float:
    """The largest error that is allowed here, in units of epsilon."""
    return FLOAT32_ERROR if call.dtype == torch.float32 else OURS_ERROR


def bytes_per_set(call: CompleteCall) -> int:
    """Bytes that one call touches."""
    return call.tensor_bytes * (1 if call.inplace else 2) + call.angle_bytes


def copy_us(call: CompleteCall, device: str) -> float:
    """Microseconds of a copy of as many elements, read once and written once, or of a kernel where that is faster."""
    elements = call.tensor_bytes // call.dtype.itemsize
    xs = [torch.randn(elements, device=device, dtype=call.dtype) for _ in range(clock.set_count(call.copy_bytes))]
    outs = [torch.empty_like(x) for x in xs]
    copies = [functools.partial(out.copy_, x) for x, out in zip(xs, outs, strict=True)]
    kernels = [functools.partial(torch.neg, x, out=out) for x, out in zip(xs, outs, strict=True)]
    return min(clock.cold(launches, call.copy_bytes).median_us for launches in (copies, kernels))


def time_peer(
    name: str, call: CompleteCall, untouched: Tensors, sets: Sequence[Tensors], expected: Sequence[torch.Tensor]
) -> float | str:
    """Microseconds, or the reason why there are none. A peer may fail in any way it likes; the row goes on."""
    try:
        launches = calls_peers.launches(name, call, [probe(call, untouched), *sets])
        if isinstance(launches, str):
            return launches
        check(launches[0], expected, PEER_ERROR)
        return round(clock.cold(launches[1:], bytes_per_set(call)).median_us, 3)
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return session.reason(error)


def device_row(row: CallRow, device: str) -> dict[str, Any]:
    """Time one row on the device."""
    call = row.call
    touched = bytes_per_set(call)
    sets = calls.make_tensors(call, clock.set_count(touched), device)
    untouched = probe(call, sets[0])  # an in-place call rotates its sets again at every replay
    expected = calls.expected(call, untouched)
    mine = calls.ours(call, [probe(call, untouched), *sets])
    check(mine[0], expected, our_limit(call))
    our_times, copy_times = [clock.cold(mine[1:], touched)], [copy_us(call, device)]
    found = {name: time_peer(name, call, untouched, sets, expected) for name in row.peers}
    our_times.append(clock.cold(mine[1:], touched))
    copy_times.append(copy_us(call, device))
    return record.device_row(
        row,
        call,
        ours_us=statistics.fmean(t.median_us for t in our_times),
        ours_spread_us=max(t.spread_us for t in our_times),
        copy_us=statistics.fmean(copy_times),
        found=found,
    )


def host_peer(name: str, call: CompleteCall, t: Tensors, expected: Sequence[torch.Tensor]) -> Launch | str:
    """A peer's call, checked, or the reason why there is none."""
    try:
        launches = calls_peers.launches(name, call, [probe(call, t)])
        if isinstance(launches, str):
            return launches
        if name != NO_ROPE:
            check(launches[0], expected, PEER_ERROR)
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return session.reason(error)
    return launches[0]


def host_row(row: CallRow, device: str) -> dict[str, Any]:
    """Time one row by the wall clock: forward alone, with what autograd keeps where the call has a gradient.

    Each call in each round, so that a host that slows down for a while does so for all; the median over the rounds.
    """
    call = row.call
    t = calls.make_tensors(call, 1, device)[0]
    expected = calls.expected(call, t)
    mine = calls.as_a_user_calls(call, probe(call, t))
    check(mine, expected, our_limit(call))
    peers = {name: host_peer(name, call, t, expected) for name in row.peers}
    timed = {OURS: mine, **{name: launch for name, launch in peers.items() if not isinstance(launch, str)}}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(HOST_ROUNDS):
        for name, launch in timed.items():
            times[name].append(clock.host(launch).median_us)
    ours = summarise(times.pop(OURS))
    medians = {name: round(statistics.median(found), 3) for name, found in times.items()}
    found: dict[str, float | str] = dict(medians)
    found |= {name: why for name, why in peers.items() if isinstance(why, str)}
    measured = record.host_row(row, ours_us=ours.median_us, ours_spread_us=ours.spread_us, found=found)
    add = medians.get(NO_ROPE)
    return measured | {"ours_over_add": None if add is None else round(ours.median_us / add, record.DIGITS)}


def measure(row: CallRow, device: str = "cuda") -> dict[str, Any]:
    """One row, whatever its kind."""
    with torch.set_grad_enabled(row.call.gradient):
        return host_row(row, device) if row.kind == "host" else device_row(row, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return session.command(
        arguments,
        prog="benchmarks.rope_calls",
        about=__doc__,
        rows=calls_plan.rows(),
        measure=measure,
        versions=peers.versions,
        folder=FOLDER,
        apart=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
