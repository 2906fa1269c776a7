"""Single steps of a GRU: this project and its peers on the same weights, and what they should give.

The cell's peer is nn.GRUCell; that of the segmented calls is ``cat`` followed by one step of nn.GRU, by nn.GRUCell or by
``F.linear``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

import tuned.dispatch
import tuned.nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gru_plan import StepCall

    Launch = Callable[[], torch.Tensor]

NN_GRU_CELL, CAT_NN_GRU, CAT_NN_GRU_CELL, CAT_LINEAR = "nn.GRUCell", "cat, nn.GRU", "cat, nn.GRUCell", "cat, F.linear"


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
