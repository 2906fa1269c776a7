"""A GRU step by PyTorch's own operators: the baseline."""

from __future__ import annotations

import torch

from tuned.families.gru_cell.launches import GruCellCall
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.products import joined


def cell(spec: GruCellSpec, call: GruCellCall) -> torch.Tensor:
    """The next state [batch, hidden], in ``call.h`` itself in place; segments are concatenated."""
    # torch.gru_cell, not torch._VF's: that is what tuned.nn.patched replaces.
    out = torch.gru_cell(joined(call.segments), call.h, call.weight_ih, call.weight_hh, call.bias_ih, call.bias_hh)
    return call.h.copy_(out) if spec.inplace else out
