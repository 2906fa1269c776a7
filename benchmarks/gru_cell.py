"""Measure GRU cells, a decoder's step of two inputs and its output layer of three: ``python -m benchmarks.gru_cell``.

Device times are those of launches in a CUDA graph, with weights that are cold (the launches rotate over more sets of
weights than twice the L2 holds) and hot (one set). Host times are wall time a call in a loop that never fills the queue.
The cell's peer is nn.GRUCell; that of the segmented calls is ``cat`` followed by one step of nn.GRU, by nn.GRUCell or
by ``F.linear``. Floor: the larger of reading the weights once, at the speed of a copy in the same run, and the products
at the matrix rate.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

import tuned
import tuned.dispatch
import tuned.nn
from benchmarks import clock, gru_peers, record, session
from benchmarks.gru import WRONG, explained, floor_us, quotient, refuse_wrong, tf32
from benchmarks.gru_plan import GruRow, StepCall, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Launch = Callable[[], torch.Tensor]

NN_GRU_CELL, CAT_NN_GRU, CAT_NN_GRU_CELL, CAT_LINEAR = "nn.GRUCell", "cat, nn.GRU", "cat, nn.GRUCell", "cat, F.linear"
GOAL_FLOORS, GOAL_US = 1.1, 1.5  # of a cell: so many floors, and so many microseconds for starting the kernel


@dataclasses.dataclass(frozen=True)
class Contenders:
    """One launch a set of weights, for this project and for each peer; and what the first set should give."""

    ours: list[Launch]
    peers: dict[str, list[Launch]]
    expected: torch.Tensor  # float64
    explain: tuple[Any, ...]  # what to give ``tuned.explain``


def cells(call: StepCall, device: str, sets: int) -> Contenders:
    """``[batch, input]`` and h ``[batch, hidden]`` through modules that share their parameters."""
    (width,) = call.segments
    x = torch.randn(call.batch, width, device=device, dtype=call.dtype)
    h = torch.randn(call.batch, call.outputs, device=device, dtype=call.dtype).tanh()
    theirs = [torch.nn.GRUCell(width, call.outputs, device=device, dtype=call.dtype) for _ in range(sets)]
    mine = [tuned.nn.GRUCell(width, call.outputs, device="meta", dtype=call.dtype) for _ in range(sets)]
    for ours, cell in zip(mine, theirs, strict=True):
        ours.load_state_dict(cell.state_dict(keep_vars=True), assign=True)
    weights = [p.double() for p in (theirs[0].weight_ih, theirs[0].weight_hh, theirs[0].bias_ih, theirs[0].bias_hh)]
    return Contenders(
        [functools.partial(cell, x, h) for cell in mine],
        {NN_GRU_CELL: [functools.partial(cell, x, h) for cell in theirs]},
        torch.gru_cell(x.double(), h.double(), *weights),
        (mine[0], x, h),
    )


def decoder_steps(call: StepCall, device: str, sets: int) -> Contenders:
    """A cell over inputs that are never concatenated, beside a cat and one step of nn.GRU or nn.GRUCell."""
    xs = tuple(torch.randn(call.batch, width, device=device, dtype=call.dtype) for width in call.segments)
    h = torch.randn(call.batch, call.outputs, device=device, dtype=call.dtype).tanh()
    grus = [torch.nn.GRU(sum(call.segments), call.outputs, device=device, dtype=call.dtype) for _ in range(sets)]
    cells = [torch.nn.GRUCell(sum(call.segments), call.outputs, device="meta", dtype=call.dtype) for _ in range(sets)]
    for gru, cell in zip(grus, cells, strict=True):
        state = gru.state_dict(keep_vars=True)
        cell.load_state_dict({name.removesuffix("_l0"): p for name, p in state.items()}, assign=True)
    parameters = [tuple(gru.parameters()) for gru in grus]

    def with_gru(gru: torch.nn.GRU) -> torch.Tensor:
        last: torch.Tensor = gru(torch.cat(xs, -1)[None], h[None])[1]
        return last[0]

    def with_cell(cell: torch.nn.GRUCell) -> torch.Tensor:
        stepped: torch.Tensor = cell(torch.cat(xs, -1), h)
        return stepped

    return Contenders(
        [functools.partial(tuned.dispatch.gru_cell, xs, h, *p) for p in parameters],
        {
            CAT_NN_GRU: [functools.partial(with_gru, gru) for gru in grus],
            CAT_NN_GRU_CELL: [functools.partial(with_cell, cell) for cell in cells],
        },
        torch.gru_cell(torch.cat(xs, -1).double(), h.double(), *(p.double() for p in parameters[0])),
        (tuned.dispatch.gru_cell, xs, h, *parameters[0]),
    )


def output_layers(call: StepCall, device: str, sets: int) -> Contenders:
    """``linear_cat`` beside a cat and ``F.linear``."""
    xs = tuple(torch.randn(call.batch, width, device=device, dtype=call.dtype) for width in call.segments)
    layers = [torch.nn.Linear(sum(call.segments), call.outputs, device=device, dtype=call.dtype) for _ in range(sets)]

    def with_cat(layer: torch.nn.Linear) -> torch.Tensor:
        return linear(torch.cat(xs, -1), layer.weight, layer.bias)

    return Contenders(
        [functools.partial(tuned.dispatch.linear_cat, xs, layer.weight, layer.bias) for layer in layers],
        {CAT_LINEAR: [functools.partial(with_cat, layer) for layer in layers]},
        linear(torch.cat(xs, -1).double(), layers[0].weight.double(), layers[0].bias.double()),
        (tuned.dispatch.linear_cat, xs, layers[0].weight, layers[0].bias),
    )


CONTENDERS: dict[str, Callable[[StepCall, str, int], Contenders]] = {
    "cell": cells,
    "step": decoder_steps,
    "linear_cat": output_layers,
}


def error_of(launch: Launch, expected: torch.Tensor) -> float:
    """The largest error of a launch's result."""
    result = launch()
    if result.shape != expected.shape:
        raise ValueError(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    return float((result.double() - expected).abs().max())


def measure(row: GruRow[StepCall], device: str = "cuda") -> dict[str, Any]:
    """Time one row: this project, the peers, this project again, whose two medians are averaged.

    Raises:
        WrongResultError: the result is further from float64 than ``WRONG`` times the least exact peer's.
    """
    call = row.call
    with torch.no_grad(), tf32():
        torch.manual_seed(0)
        both = CONTENDERS[call.operation](call, device, clock.sets(call.weight_bytes))
        error = error_of(both.ours[0], both.expected)
        peer_error = max(error_of(launches[0], both.expected) for launches in both.peers.values())
        refuse_wrong(error, WRONG * peer_error)
        cold = [clock.device(both.ours)]
        found: dict[str, float | str] = {
            name: round(clock.device(launches).median_us, 3) for name, launches in both.peers.items()
        }
        cold.append(clock.device(both.ours))
        firsts = {"ours": both.ours[0]} | {name: launches[0] for name, launches in both.peers.items()}
        hot = {name: round(clock.device([launch]).median_us, 3) for name, launch in firsts.items()}
        host = {name: round(clock.host(launch).median_us, 3) for name, launch in firsts.items()}
        serving = explained(*both.explain)
    ours_us = statistics.fmean(t.median_us for t in cold)
    floor = floor_us(call.weight_bytes, call.flops, call.dtype)
    best_peer = min(us for us in found.values() if not isinstance(us, str))
    return record.common(row, ours_us=ours_us, ours_spread_us=max(t.spread_us for t in cold), found=found) | {
        "floor": round(floor, 3),
        "ours_over_floor": quotient(ours_us, floor),
        "ours_over_goal": quotient(ours_us, GOAL_FLOORS * floor + GOAL_US),
        "speedup": quotient(best_peer, ours_us),
        "hot": hot,
        "host": host,
        "ours_host": host["ours"],
        "host_over_best_peer": quotient(host["ours"], min(us for name, us in host.items() if name != "ours")),
        "error": error,
        "peer_error": peer_error,
        "error_over_peer": quotient(error, peer_error),
        **serving,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return session.command(
        arguments,
        prog="benchmarks.gru_cell",
        about=__doc__,
        rows=steps(),
        measure=measure,
        versions=gru_peers.versions,
    )


if __name__ == "__main__":
    raise SystemExit(main())
