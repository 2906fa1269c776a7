"""The peers of the sequence: nn.GRU, as users call it and in a CUDA graph, and FlashRNN where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from benchmarks.record import dtype_name

if TYPE_CHECKING:
    from benchmarks.gru_plan import SequenceCall

Input = torch.Tensor | PackedSequence
Run = Callable[[], tuple[Input, torch.Tensor]]  # output and last hidden state, as nn.GRU gives them

NN_GRU = "nn.GRU"
IN_A_GRAPH = "nn.GRU in a CUDA graph"
FLASHRNN = "FlashRNN"
PACKAGES = {"flashrnn": "flashrnn"}  # import name to distribution


def make_gru(call: SequenceCall, device: str, kind: Callable[..., torch.nn.RNNBase] = torch.nn.GRU) -> torch.nn.RNNBase:
    """A GRU of the call's sizes, with weights as PyTorch draws them, in one chunk of memory as cuDNN likes them best."""
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
    if not call.lengths:
        return x
    return torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(call.lengths), enforce_sorted=True)


def data(output: Input) -> torch.Tensor:
    """The tensor of an output, packed or not."""
    return output.data if isinstance(output, PackedSequence) else output


def flashrnn(call: SequenceCall, gru: torch.nn.RNNBase, x: Input, backend: str = "cuda") -> Run | str:
    """FlashRNN with the weights of ``gru``, the projection of the input by PyTorch; or why it cannot.

    It takes the batch first, the projection of r, z and n as ``[B, T, 3, 1, H]``, recurrent weights of n, r and z as
    ``[3, 1, H, H]``, and four biases ``[4, 1, H]``: n's recurrent one, r's and z's summed, n's of the input.
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
