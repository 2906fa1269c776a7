"""What a GRU step of a recorded problem launches, from its spec and size alone."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.gru_cell.run import prepared
from tuned.families.gru_cell import FAMILY as GRU_CELL
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.launch import Step
from tuned.lookup.lookup import Choice, Gpu, choose


def steps(spec: GruCellSpec, size: GruCellSize, gpu: Gpu) -> tuple[Choice, tuple[Step, ...]]:
    """The choice, and the steps of the call with contiguous tensors; they are on the device "meta" and have no memory."""
    choice = choose(GRU_CELL, spec, size, gpu)
    if choice.variant is None:
        return choice, ()

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")

    wide = 3 * spec.hidden
    segments = [empty(size.batch, width) for width in spec.inputs]
    weight_ih, weight_hh = empty(wide, spec.input_size), empty(wide, spec.hidden)
    bias_ih, bias_hh = (empty(wide), empty(wide)) if spec.bias else (None, None)
    h = empty(size.batch, spec.hidden)
    call = prepared(segments, h, weight_ih, weight_hh, bias_ih, bias_hh, spec.inplace)
    return choice, GRU_CELL.launches(spec, choice.variant, call)
