"""Measure RoPE beside its peers: ``python -m benchmarks.rope`` writes benchmarks/results/<device>.json.

A row is measured interleaved: this project, a copy, every peer, then this project and the copy again. The two medians
of this project, and those of the copy, are averaged, so that a drift of the clock falls on all of them. The copy is of
one contiguous tensor with as many elements as query and key together. Each result is compared with the formula in
float64 just before it is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import call as calls
from benchmarks import clock, peers, plan, record, session
from benchmarks.call import Call, Launch, Tensors
from benchmarks.record import NO_RIVAL, Row, quotient
from benchmarks.session import WrongResultError
from generator.measuring.bench import summarise

WARM_UPS = 3  # calls before timing: TorchScript profiles two before it fuses
OURS = "ours"
# Largest error, in units of the largest value times the dtype's epsilon. One rounding makes at most half a unit; in
# float32, the float32 sines and cosines weigh as much as that rounding.
OUR_ERROR = {torch.bfloat16: 1.0, torch.float32: 16.0}
PEER_ERROR = 8.0  # peers may round cosines, sines and products
HOST_ROUNDS = 7


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, in units of the dtype's epsilon times the largest value."""
    if result.shape != expected.shape:
        raise WrongResultError(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    unit = torch.finfo(result.dtype).eps * expected.abs().max()
    return float((result.float() - expected).abs().max() / unit)


def check(launch: Launch, expected: Sequence[torch.Tensor], limit: float) -> None:
    """Run a launch once on fresh inputs, compare each of its results, and warm up."""
    results = launch()
    if len(results) != len(expected):
        raise WrongResultError(f"{len(results)} tensors instead of {len(expected)}")
    for result, right in zip(results, expected, strict=True):
        error = largest_error(result.detach(), right)
        if not error <= limit:  # NaN is wrong too
            raise WrongResultError(f"largest error {error:.3g} is above {limit:.3g}, in units of epsilon")
    for _ in range(WARM_UPS):
        launch()


def attempt(timed: Callable[[list[Launch]], Any], name: str, call: Call, sets: Sequence[Tensors]) -> Any:
    """The result of ``timed`` for a peer's launches, or the reason why there is none; a peer may raise anything."""
    try:
        launches = peers.launches(name, call, sets)
        return launches if isinstance(launches, str) else timed(launches)
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return session.reason(error)


def copy_us(call: Call, device: str) -> float:
    """Microseconds of a copy of as many elements, read once and written once, by the faster of copy_ and torch.neg."""
    elements = call.tensor_bytes // call.dtype.itemsize
    xs = [torch.randn(elements, device=device, dtype=call.dtype) for _ in range(clock.set_count(call.copy_bytes))]
    outs = [torch.empty_like(x) for x in xs]
    copies = [functools.partial(out.copy_, x) for x, out in zip(xs, outs, strict=True)]
    kernels = [functools.partial(torch.neg, x, out=out) for x, out in zip(xs, outs, strict=True)]
    return min(clock.cold(launches, call.copy_bytes).median_us for launches in (copies, kernels))


def device_row(row: Row[Call], device: str) -> dict[str, Any]:
    """Time one row on the device."""
    call = row.call
    sets = calls.make_tensors(call, clock.set_count(call.touched_bytes), device)
    untouched = calls.probe(call, sets[0])  # kept, since an in-place call rotates its sets again at every replay
    expected = calls.expected(call, untouched)

    def timed(launches: list[Launch]) -> float:
        check(launches[0], expected, PEER_ERROR)
        return round(clock.cold(launches[1:], call.touched_bytes).median_us, 3)

    mine = calls.ours(call, [calls.probe(call, untouched), *sets])
    check(mine[0], expected, OUR_ERROR[call.dtype])
    our_times, copies = [clock.cold(mine[1:], call.touched_bytes)], [copy_us(call, device)]
    found = {name: attempt(timed, name, call, [calls.probe(call, untouched), *sets]) for name in row.peers}
    our_times.append(clock.cold(mine[1:], call.touched_bytes))
    copies.append(copy_us(call, device))
    ours_us, copied_us = statistics.fmean(t.median_us for t in our_times), statistics.fmean(copies)
    floor_us = copied_us * call.moved_bytes / call.copy_bytes  # a copy, scaled to the bytes that must move
    measured = record.common(row, ours_us=ours_us, ours_spread_us=max(t.spread_us for t in our_times), found=found)
    return measured | {
        "floor": round(floor_us, 3),
        "copy": round(copied_us, 3),
        "bytes_moved": call.moved_bytes,
        "ours_over_floor": quotient(ours_us, floor_us),
        "ours_over_copy": quotient(ours_us, copied_us),
    }


def host_row(row: Row[Call], device: str) -> dict[str, Any]:
    """Time one row by the wall clock: forward alone, or with the gradient of x if the call is backward.

    The median over rounds in which every call is timed, so that a host that slows down for a while does so for all
    calls.
    """
    backward = row.call.direction == "backward"
    call = dataclasses.replace(row.call, direction="forward", gradient=row.call.gradient or backward)
    t = calls.make_tensors(call, 1, device)[0]
    grads = tuple(torch.randn_like(x) for x in t.rotated)
    expected = calls.expected(row.call, dataclasses.replace(t, rotated=grads) if backward else t)

    def whole(launch: Launch) -> Launch:
        return (lambda: torch.autograd.grad(launch(), t.rotated, grads)) if backward else launch

    def checked(launches: list[Launch]) -> Launch:
        launch = whole(launches[0])
        if name != NO_RIVAL:  # torch.add has no result to compare
            check(launch, expected, PEER_ERROR)
        return launch

    mine = whole(calls.as_a_user_calls(call, calls.probe(call, t)))
    check(mine, expected, OUR_ERROR[call.dtype])
    timed, found = {OURS: mine}, dict[str, float | str]()
    for name in row.peers:
        given = attempt(checked, name, call, [calls.probe(call, t)])
        (found if isinstance(given, str) else timed)[name] = given
    rounds = [{name: clock.host(launch).median_us for name, launch in timed.items()} for _ in range(HOST_ROUNDS)]
    times = {name: summarise([taken[name] for taken in rounds]) for name in timed}
    ours = times.pop(OURS)
    found |= {name: round(peer.median_us, 3) for name, peer in times.items()}
    measured = record.common(row, ours_us=ours.median_us, ours_spread_us=ours.spread_us, found=found)
    return measured | {
        "measured": "forward with backward" if backward else "forward",
        "ours_over_eager": quotient(ours.median_us, found.get("eager PyTorch")),
        "ours_over_add": quotient(ours.median_us, found.get(NO_RIVAL)),
    }


def measure(row: Row[Call], device: str = "cuda") -> dict[str, Any]:
    """One row, whatever its kind."""
    host = row.kind == "host"
    with torch.set_grad_enabled(row.call.gradient or (host and row.call.direction == "backward")):
        return host_row(row, device) if host else device_row(row, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return session.command(
        arguments,
        prog="benchmarks.rope",
        about=__doc__,
        rows=plan.rows(),
        measure=measure,
        packages=peers.PACKAGES,
        folder=session.RESULTS,
        quick=plan.quick,
    )


if __name__ == "__main__":
    raise SystemExit(main())
