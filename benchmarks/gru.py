"""Measure GRUs beside PyTorch's: ``python -m benchmarks.gru`` writes benchmarks/results/gru/<device>.json.

A row of a sequence times this project's module and nn.GRU, in turns: both as users call them (a loop of calls, which
counts the host's time where the device waits for it), and both in a CUDA graph. All include the projection of the
input, and all have the same weights. The bars compare the module as users call it with both forms of nn.GRU.

A row of a single step times launches in a CUDA graph, with cold weights (the launches rotate over more sets of weights
than twice the L2 holds) and with hot weights (one set). Host times are wall time a call in a loop that never fills the
queue.

Each result is compared with PyTorch in float64 just before it is timed. float32 runs with TF32, PyTorch's default for
recurrent networks. The floor is the larger of two times: that of the bytes that must move (input and weights read once,
the output written once; for a step the weights alone) at the speed of a copy in the same run, and that of the products
at the matrix rate. The floor ignores that the steps of a recurrence run one after another, so a small batch cannot come
near it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import tuned
import tuned.nn
from benchmarks import clock, gru_peers, record, session
from benchmarks.gru_peers import CONTENDERS, FLASHRNN, IN_A_GRAPH, NN_GRU, Run, data
from benchmarks.gru_plan import MATRIX_FLOPS, SequenceCall, StepCall, sequences, steps
from benchmarks.record import Row, quotient
from benchmarks.session import WrongResultError, largest

OURS, OURS_IN_A_GRAPH = "ours", "ours in a CUDA graph"
WRONG = 2.0  # times PyTorch's error: larger is more than rounding. The bar on errors is in benchmarks.bars
WRONG_FLASHRNN = 16.0  # the same for FlashRNN, which rounds each step's gates
GOAL_FLOORS, GOAL_US = 1.1, 1.5  # goal of a cell: so many floors, plus microseconds for starting the kernel


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """TF32 in products and in cuDNN inside the block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def error_of(result: tuple[Any, ...], expected: tuple[Any, ...]) -> float:
    """The largest error over output and last hidden state, or of a single tensor."""
    pairs = [(data(given), data(wanted)) for given, wanted in zip(result, expected, strict=True)]
    for given, wanted in pairs:
        if given.shape != wanted.shape:
            raise WrongResultError(f"shape {tuple(given.shape)} instead of {tuple(wanted.shape)}")
    return largest(given.double() - wanted for given, wanted in pairs)


def refuse_wrong(error: float, limit: float) -> None:
    """Raise for an error above the limit, or NaN."""
    if not error <= limit:
        raise WrongResultError(f"largest error {error:.3g} is above {limit:.3g}")


def attempt(make: Callable[[], Callable[[], object] | str]) -> Callable[[], object] | str:
    """The result of ``make``, or its failure as a reason."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (foreign code, or a capture: whatever it raises is the reason)
        return session.reason(error)


def checked(run: Run | str, expected: tuple[Any, torch.Tensor], limit: float) -> Run | str:
    """The call, after checking its result; or the reason why there is no call."""
    if not isinstance(run, str):
        refuse_wrong(error_of(run(), expected), limit)
    return run


def told(  # noqa: PLR0913 (the results besides the times)
    call: SequenceCall | StepCall, ours_us: float, moved_bytes: int, error: float, peer_error: float, explain: Any
) -> dict[str, Any]:
    """The fields of rows of both kinds: the floor, the errors, and the rule, kernels and variant that served the call."""
    floor = max(moved_bytes / clock.copy_rate(), call.flops / MATRIX_FLOPS[call.dtype]) * 1e6
    choice = tuned.explain(*explain)
    return {
        "floor": round(floor, 3),
        "ours_over_floor": quotient(ours_us, floor),
        "error": error,
        "peer_error": peer_error,
        "error_over_peer": quotient(error, peer_error),
        "rule": choice.rule,
        "why": choice.why,
        "kernels": list(choice.kernels),
        "variant": None if choice.variant is None else str(choice.variant),
    }


def sequence_row(row: Row[SequenceCall], device: str) -> dict[str, Any]:
    """Time a sequence.

    Raises:
        WrongResultError: the module's result is further from float64 than ``WRONG`` times nn.GRU's.
    """
    theirs = gru_peers.make_gru(row.call, device)
    mine = gru_peers.make_gru(row.call, device, tuned.nn.GRU)
    mine.load_state_dict(theirs.state_dict())
    x = gru_peers.make_input(row.call, device)
    exact = copy.deepcopy(theirs).double()
    exact.flatten_parameters()
    expected = exact(x.to(torch.float64))
    error, peer_error = error_of(mine(x), expected), error_of(theirs(x), expected)
    refuse_wrong(error, WRONG * peer_error)
    ours, nn_gru = functools.partial(mine, x), functools.partial(theirs, x)
    limit = WRONG_FLASHRNN * peer_error
    calls: dict[str, Callable[[], object] | str] = {
        OURS: ours,
        NN_GRU: nn_gru,
        OURS_IN_A_GRAPH: attempt(lambda: clock.capture(ours)),
        IN_A_GRAPH: attempt(lambda: clock.capture(nn_gru)),
        FLASHRNN: attempt(lambda: checked(gru_peers.flashrnn(row.call, theirs, x), expected, limit)),
    }
    times = clock.interleaved({name: call for name, call in calls.items() if not isinstance(call, str)})
    found: dict[str, float | str] = {
        name: call if isinstance(call, str) else round(times[name].median_us, 3) for name, call in calls.items()
    }
    del found[OURS]
    in_a_graph = found.pop(OURS_IN_A_GRAPH)
    ours_us = times[OURS].median_us
    measured = record.common(row, ours_us=ours_us, ours_spread_us=times[OURS].spread_us, found=found)
    return measured | {
        **told(row.call, ours_us, row.call.moved_bytes, error, peer_error, (mine, x)),
        "ours_in_a_graph": in_a_graph,
        "us_per_step": round(ours_us / row.call.steps, 3),
        "speedup": quotient(found[NN_GRU], ours_us),
        "speedup_over_graph": quotient(found[IN_A_GRAPH], ours_us),
        "speedup_graph_over_graph": quotient(found[IN_A_GRAPH], in_a_graph),
    }


def step_row(row: Row[StepCall], device: str) -> dict[str, Any]:
    """Time a single step: this project, the peers, then this project again; this project's two medians are averaged.

    Raises:
        WrongResultError: the result is further from float64 than ``WRONG`` times the least exact peer's.
    """
    call = row.call
    both = CONTENDERS[call.operation](call, device, clock.sets(call.weight_bytes))
    firsts = {OURS: both.ours[0]} | {name: launches[0] for name, launches in both.peers.items()}
    errors = {name: error_of((launch(),), (both.expected,)) for name, launch in firsts.items()}
    error, peer_error = errors.pop(OURS), max(errors.values())
    refuse_wrong(error, WRONG * peer_error)
    cold = [clock.device(both.ours)]
    found = {name: round(clock.device(launches).median_us, 3) for name, launches in both.peers.items()}
    cold.append(clock.device(both.ours))
    hot = {name: round(clock.device([launch]).median_us, 3) for name, launch in firsts.items()}
    host = {name: round(clock.host(launch).median_us, 3) for name, launch in firsts.items()}
    ours_us = statistics.fmean(t.median_us for t in cold)
    measured = record.common(row, ours_us=ours_us, ours_spread_us=max(t.spread_us for t in cold), found={**found})
    measured |= told(call, ours_us, call.weight_bytes, error, peer_error, both.explain)
    return measured | {
        "ours_over_goal": quotient(ours_us, GOAL_FLOORS * measured["floor"] + GOAL_US),
        "speedup": quotient(min(found.values()), ours_us),
        "hot": hot,
        "host": host,
        "ours_host": host[OURS],
        "host_over_best_peer": quotient(host[OURS], min(us for name, us in host.items() if name != OURS)),
    }


def measure(row: Row[Any], device: str = "cuda") -> dict[str, Any]:
    """Time one row, of a sequence or of a single step."""
    with torch.no_grad(), tf32():
        torch.manual_seed(0)
        return (sequence_row if isinstance(row.call, SequenceCall) else step_row)(row, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    rows: list[Row[Any]] = [*sequences(), *steps()]
    return session.command(
        arguments,
        prog="benchmarks.gru",
        about=__doc__,
        rows=rows,
        measure=measure,
        packages=gru_peers.PACKAGES,
        folder=session.RESULTS / "gru",
    )


if __name__ == "__main__":
    raise SystemExit(main())
