"""What the gradient of a GRU of a recorded problem launches, from its spec and size alone."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.gru import training
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru_backward import FAMILY as GRU_BACKWARD
from tuned.families.gru_backward.launches import PARTS, RecurrenceGradient, counters_needed
from tuned.families.launch import Step
from tuned.lookup.lookup import Choice, Gpu, choose


def steps(spec: GruSpec, size: GruSize, gpu: Gpu) -> tuple[Choice, tuple[Step, ...]]:
    """The choice, and the steps of the call with contiguous tensors; they are on the device "meta" and have no memory."""
    choice = training.proven(choose(GRU_BACKWARD, spec, size, gpu))
    if choice.variant is None:
        return choice, ()

    def empty(*shape: int, dtype: str = spec.dtype) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    sets, hidden = spec.directions, spec.hidden
    tokens = (size.seq, size.batch) if spec.dense else (size.seq * size.batch,)
    biases = (empty(sets, 3 * hidden), empty(sets, 3 * hidden)) if spec.bias else (None, None)
    starts = {"packed": empty(size.seq, dtype="int64"), "thd": empty(size.batch + 1, dtype="int32")}
    gradient = RecurrenceGradient(
        gates=empty(sets, *tokens, 3 * hidden),
        hidden=empty(sets, *tokens, 3 * hidden),
        before=empty(sets, *tokens, hidden),
        weight_hh=empty(sets, 3 * hidden, hidden),
        grad_out=empty(*tokens, sets * hidden),
        grad_h_n=empty(sets, size.batch, hidden),
        out=empty(sets, *tokens, PARTS * hidden),
        grad_h_0=empty(sets, size.batch, hidden),
        batch=size.batch,
        seq=size.seq,
        bias_ih=biases[0],
        bias_hh=biases[1],
        states=empty(sets, size.batch, hidden, dtype="float32"),
        counters=empty(counters_needed(spec, size.batch), dtype="int32"),
        starts=starts.get(spec.layout),
        lengths=None if spec.dense else empty(size.batch, dtype="int32"),
    )
    return choice, GRU_BACKWARD.launches(spec, choice.variant, gradient)
