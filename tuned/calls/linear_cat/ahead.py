"""What a linear over segments of a recorded problem launches, from its spec and size alone."""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.linear_cat.run import prepared
from tuned.families.launch import Step
from tuned.families.linear_cat import FAMILY as LINEAR_CAT
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.lookup.lookup import Choice, Gpu, choose


def steps(spec: LinearCatSpec, size: LinearCatSize, gpu: Gpu) -> tuple[Choice, tuple[Step, ...]]:
    """The choice, and the steps of the call with contiguous tensors; they are on the device "meta" and have no memory."""
    choice = choose(LINEAR_CAT, spec, size, gpu)
    if choice.variant is None:
        return choice, ()

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")

    segments = [empty(size.batch, width) for width in spec.inputs]
    call = prepared(segments, empty(spec.outputs, spec.input_size), empty(spec.outputs) if spec.bias else None)
    return choice, LINEAR_CAT.launches(spec, choice.variant, call)
