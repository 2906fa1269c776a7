"""Measure GRU sequences beside nn.GRU: ``python -m benchmarks.gru`` writes benchmarks/results/gru/<device>.json.

A row times, in turns, this project's module and nn.GRU as users call them (a loop of calls, the host's time counted
where the device waits for it) and both in a CUDA graph, all with the projection of the input and all on the same
weights. The bars compare the module as users call it with both forms of nn.GRU. Nothing is timed that has not just been
held against nn.GRU in float64; float32 runs with TF32, as PyTorch's default for recurrent networks is.

The floor is the larger of the bytes that must move (input and weights read once, the output written once) at the speed
of a copy in the same run, and the products at the matrix rate. It says nothing of the steps' order, which no
implementation of a recurrence escapes: a small batch cannot come near it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

import torch

import tuned
import tuned.nn
from benchmarks import clock, gru_peers, record, session
from benchmarks.gru_peers import FLASHRNN, IN_A_GRAPH, NN_GRU, data
from benchmarks.gru_plan import MATRIX_FLOPS, GruRow, SequenceCall, sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.gru_peers import Run

OURS, OURS_IN_A_GRAPH = "ours", "ours in a CUDA graph"
WRONG = 2.0  # times nn.GRU's own error: not a rounding any more; the bar is benchmarks.bars' business
WRONG_FLASHRNN = 16.0  # it rounds each step's gates


class WrongResultError(Exception):
    """What would be timed does not compute a GRU."""


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """TF32 in products and in cuDNN, as long as it lasts."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def error_of(result: tuple[Any, torch.Tensor], expected: tuple[Any, torch.Tensor]) -> float:
    """The largest error of output and last hidden state."""
    pairs = ((data(result[0]), data(expected[0])), (result[1], expected[1]))
    for given, wanted in pairs:
        if given.shape != wanted.shape:
            raise WrongResultError(f"shape {tuple(given.shape)} instead of {tuple(wanted.shape)}")
    return max(float((given.double() - wanted).abs().max()) for given, wanted in pairs)


def refuse_wrong(error: float, limit: float) -> None:
    """Raise for an error above the limit, or NaN."""
    if not error <= limit:
        raise WrongResultError(f"largest error {error:.3g} is above {limit:.3g}")


def attempt(make: Callable[[], Callable[[], object] | str]) -> Callable[[], object] | str:
    """What ``make`` gives, or its failure as a reason."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (foreign code, or a capture: whatever it raises is the reason)
        return session.reason(error)


def checked(run: Run | str, expected: tuple[Any, torch.Tensor], limit: float) -> Run | str:
    """The call if its result is right, or its reason."""
    if not isinstance(run, str):
        refuse_wrong(error_of(run(), expected), limit)
    return run


def explained(function: Any, *arguments: Any) -> dict[str, Any]:
    """What serves the call, and why."""
    choice = tuned.explain(function, *arguments)
    variant = None if choice.variant is None else str(choice.variant)
    return {"rule": choice.rule, "why": choice.why, "kernels": list(choice.kernels), "variant": variant}


def floor_us(moved_bytes: int, flops: int, dtype: torch.dtype) -> float:
    """The larger of the time to move the bytes as a copy does, and of the products."""
    return max(moved_bytes / clock.copy_rate(), flops / MATRIX_FLOPS[dtype]) * 1e6


def quotient(a: float | str | None, b: float | str | None) -> float | None:
    """A ratio, if both are times."""
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return None
    return round(a / b, record.DIGITS)


def measure(row: GruRow[SequenceCall], device: str = "cuda") -> dict[str, Any]:
    """Time one row.

    Raises:
        WrongResultError: the module's result is further from float64 than ``WRONG`` times nn.GRU's.
    """
    with torch.no_grad(), tf32():
        torch.manual_seed(0)
        theirs = gru_peers.make_gru(row.call, device)
        mine = gru_peers.make_gru(row.call, device, tuned.nn.GRU)
        mine.load_state_dict(theirs.state_dict())
        x = gru_peers.make_input(row.call, device)
        exact = copy.deepcopy(theirs).double()
        exact.flatten_parameters()
        expected = exact(x.to(torch.float64))
        error, peer_error = error_of(mine(x), expected), error_of(theirs(x), expected)
        refuse_wrong(error, WRONG * peer_error)
        flashrnn = attempt(
            lambda: checked(gru_peers.flashrnn(row.call, theirs, x), expected, WRONG_FLASHRNN * peer_error)
        )
        ours, nn_gru = functools.partial(mine, x), functools.partial(theirs, x)
        calls: dict[str, Callable[[], object] | str] = {
            OURS: ours,
            NN_GRU: nn_gru,
            OURS_IN_A_GRAPH: attempt(lambda: clock.capture(ours)),
            IN_A_GRAPH: attempt(lambda: clock.capture(nn_gru)),
            FLASHRNN: flashrnn,
        }
        times = clock.interleaved({name: call for name, call in calls.items() if not isinstance(call, str)})
        serving = explained(mine, x)
    found: dict[str, float | str] = {
        name: call if isinstance(call, str) else round(times[name].median_us, 3) for name, call in calls.items()
    }
    in_a_graph = found.pop(OURS_IN_A_GRAPH)
    ours_us = times[OURS].median_us
    del found[OURS]
    floor = floor_us(row.call.moved_bytes, row.call.flops, row.call.dtype)
    return record.common(row, ours_us=ours_us, ours_spread_us=times[OURS].spread_us, found=found) | {
        "floor": round(floor, 3),
        "ours_over_floor": quotient(ours_us, floor),
        "ours_in_a_graph": in_a_graph,
        "us_per_step": round(ours_us / row.call.steps, 3),
        "speedup": quotient(found[NN_GRU], ours_us),
        "speedup_over_graph": quotient(found[IN_A_GRAPH], ours_us),
        "speedup_graph_over_graph": quotient(found[IN_A_GRAPH], in_a_graph),
        "error": error,
        "peer_error": peer_error,
        "error_over_peer": quotient(error, peer_error),
        **serving,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return session.command(
        arguments,
        prog="benchmarks.gru",
        about=__doc__,
        rows=sequences(),
        measure=measure,
        versions=gru_peers.versions,
    )


if __name__ == "__main__":
    raise SystemExit(main())
