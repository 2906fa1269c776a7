"""What torch.compile traces of a checked call: operators, the casts of autocast, and dropout between layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tuned.calls.gru.arguments import GruCall
from tuned.calls.products import autocast_dtype
from tuned.calls.recurrent import ops, serve


def _cast(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the dtype of autocast, if it is on. If one is float64 nothing is cast."""
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None or any(t.dtype == torch.float64 for t in tensors):
        return list(tensors)
    return [t.to(dtype) for t in tensors]


def _out(out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A result in the dtype that PyTorch returns: on a CPU, autocast leaves a GRU's state in its own dtype."""
    return out.to(state.dtype) if out.device.type == "cpu" else out


def gru(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) by one operator; by one per layer with dropout, or a gradient, whose kernels need the output of each layer."""
    x, hx, *weights = _cast(call.tensors)
    depth = 1 if call.dropout > 0 or serve.needs_gradient(call.tensors) else call.num_layers
    steps = call.num_layers // depth
    states = []
    for step in range(steps):
        own = weights[step * len(weights) // steps : (step + 1) * len(weights) // steps]
        state = hx if steps == 1 else hx[step * len(hx) // steps : (step + 1) * len(hx) // steps]
        dropped = torch.nn.functional.dropout(x, call.dropout) if step and call.dropout > 0 else x
        of_steps = (call.batch_sizes, call.cu_seqlens, call.max_seqlen, call.resets)
        x, h_n = ops.gru(dropped, state, own, call.has_biases, depth, call.bidirectional, call.batch_first, *of_steps)
        states.append(h_n)
    return _out(x, call.hx), _out(states[0] if steps == 1 else torch.cat(states), call.hx)


def gru_cell(  # noqa: PLR0913 - the arguments of torch.gru_cell
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
) -> torch.Tensor:
    """One step, as one operator."""
    biases = [] if bias_ih is None or bias_hh is None else [bias_ih, bias_hh]
    cast = _cast([*segments, h, weight_ih, weight_hh, *biases])
    state, w_ih, w_hh, *biases = cast[len(segments) :]
    b_ih, b_hh = biases or (None, None)
    return _out(ops.gru_cell(cast[: len(segments)], state, w_ih, w_hh, b_ih, b_hh), h)


def linear_cat(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear over segments, as one operator."""
    cast = _cast([*inputs, weight] + ([] if bias is None else [bias]))
    w, *rest = cast[len(inputs) :]
    return ops.linear_cat(cast[: len(inputs)], w, rest[0] if rest else None)  # type: ignore[no-any-return]
