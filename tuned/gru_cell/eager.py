"""The gates of a GRU step in eager PyTorch, for the CPU and as a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tuned.gru_cell.launches import GruCellCall
    from tuned.gru_cell.spec import GruCellSpec


def gates(spec: GruCellSpec, call: GruCellCall) -> torch.Tensor:
    """A new tensor h' of [batch, hidden]: float32 inside, one rounding; differentiable."""
    compute = torch.promote_types(call.h.dtype, torch.float32)
    x, h_gates, h = (t.to(compute) for t in (call.gates_x, call.gates_h, call.h))
    if spec.bias:
        x, h_gates = x + call.bias_ih.to(compute), h_gates + call.bias_hh.to(compute)
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h_gates.chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return (n + z * (h - n)).to(call.h.dtype)
