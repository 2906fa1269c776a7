"""The peers of the GRU, on the same weights.

For a sequence: nn.GRU, as users call it and in a CUDA graph, and FlashRNN if it is installed. For a cell: nn.GRUCell.
For the segmented calls: ``cat`` followed by one step of nn.GRU, by nn.GRUCell or by ``F.linear``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import tuned.dispatch
import tuned.nn
from benchmarks.gru_plan import SequenceCall, StepCall
from tuned.calls.products import name_of as dtype_name

Input = torch.Tensor | PackedSequence
Run = Callable[[], tuple[Input, torch.Tensor]]  # output and last hidden state, as nn.GRU gives them
Launch = Callable[[], torch.Tensor]

NN_GRU = "nn.GRU"
IN_A_GRAPH = "nn.GRU in a CUDA graph"
FLASHRNN = "FlashRNN"
NN_GRU_CELL, CAT_NN_GRU, CAT_NN_GRU_CELL, CAT_LINEAR = "nn.GRUCell", "cat, nn.GRU", "cat, nn.GRUCell", "cat, F.linear"
PACKAGES = {"flashrnn": "flashrnn"}  # import name to distribution


def make_gru(call: SequenceCall, device: str, kind: Callable[..., torch.nn.RNNBase] = torch.nn.GRU) -> torch.nn.RNNBase:
    """A GRU of the call's sizes, with weights as PyTorch draws them, in one chunk of memory, which is best for cuDNN."""
    gru = kind(
        call.input_size,
        call.hidden,
        num_layers=call.layers,
        bidirectional=call.bidirectional,
        device=device,
        dtype=call.dtype,
    ).eval()
    gru.flatten_parameters()
    return gru


def make_input(call: SequenceCall, device: str) -> Input:
    """Random input: ``[steps, batch, input]``, or packed."""
    x = torch.randn(call.steps, call.batch, call.input_size, device=device, dtype=call.dtype)
    return pack_padded_sequence(x, torch.tensor(call.lengths), enforce_sorted=True) if call.lengths else x


def data(output: Input) -> torch.Tensor:
    """The tensor of an output, packed or not."""
    return output.data if isinstance(output, PackedSequence) else output


def flashrnn(call: SequenceCall, gru: torch.nn.RNNBase, x: Input, backend: str = "cuda") -> Run | str:
    """FlashRNN with the weights of ``gru``, and the projection of the input by PyTorch; or why FlashRNN cannot run the call.

    It takes batch-first tensors: the projection of r, z and n as ``[B, T, 3, 1, H]``, recurrent weights of n, r and z
    as ``[3, 1, H, H]``, and four biases ``[4, 1, H]``: the recurrent bias of n, the sums for r and for z, the input
    bias of n.
    """
    if isinstance(x, PackedSequence) or call.layers > 1 or call.bidirectional:
        return "it runs one layer in one direction over sequences of one length"
    try:
        run: Any = importlib.import_module("flashrnn").flashrnn
    except ImportError as error:
        return f"not installed: {error}"
    w_ih, w_hh, b_ih, b_hh = gru.parameters()
    recurrent = w_hh.view(3, 1, call.hidden, call.hidden)[[2, 0, 1]].contiguous()
    ih, hh = b_ih.view(3, 1, call.hidden), b_hh.view(3, 1, call.hidden)
    biases = torch.stack((hh[2], ih[0] + hh[0], ih[1] + hh[1], ih[2]))

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        projected = torch.nn.functional.linear(x, w_ih).view(call.steps, call.batch, 3, 1, call.hidden)
        states, last = run(
            projected.transpose(0, 1).contiguous(),
            recurrent,
            biases,
            function="gru",
            backend=backend,
            dtype=dtype_name(call.dtype),
        )
        return states[0, :, :, 0].transpose(0, 1), last[0, :, :, 0].transpose(0, 1)

    return launch


# Single steps ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contenders:
    """One launch for each set of weights, for this project and for each peer; and the right result of the first set."""

    ours: list[Launch]
    peers: dict[str, list[Launch]]
    expected: torch.Tensor  # float64
    explain: tuple[Any, ...]  # arguments of ``tuned.explain``


def cells(call: StepCall, device: str, sets: int) -> Contenders:
    """tuned.nn.GRUCell beside torch.nn.GRUCell on ``[batch, input]`` and h ``[batch, hidden]``, with shared parameters."""
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
        return gru(torch.cat(xs, -1)[None], h[None])[1][0]

    def with_cell(cell: torch.nn.GRUCell) -> torch.Tensor:
        return cell(torch.cat(xs, -1), h)

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
        return torch.nn.functional.linear(torch.cat(xs, -1), layer.weight, layer.bias)

    return Contenders(
        [functools.partial(tuned.dispatch.linear_cat, xs, layer.weight, layer.bias) for layer in layers],
        {CAT_LINEAR: [functools.partial(with_cat, layer) for layer in layers]},
        torch.nn.functional.linear(torch.cat(xs, -1).double(), layers[0].weight.double(), layers[0].bias.double()),
        (tuned.dispatch.linear_cat, xs, layers[0].weight, layers[0].bias),
    )


CONTENDERS: dict[str, Callable[[StepCall, str, int], Contenders]] = {
    "cell": cells,
    "step": decoder_steps,
    "linear_cat": output_layers,
}
