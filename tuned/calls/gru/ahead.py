"""What a GRU of a recorded problem launches, from its spec and size alone.

A problem does not tell the width of the input. So the steps leave out the kernel that multiplies the input by its weights
where the library does not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tuned.calls.gru import run
from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.lengths import lengths_of
from tuned.calls.gru.wide import wider_spec
from tuned.families.copying import INTEGERS, copy_launch, filled
from tuned.families.gru import FAMILY as GRU
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.launch import Step
from tuned.lookup.lookup import Choice, Gpu, choose


def steps(spec: GruSpec, size: GruSize, gpu: Gpu) -> tuple[Choice, tuple[Step, ...]]:
    """The choice outside of CUDA graphs, and the steps of the call with contiguous tensors, which have no memory."""
    wider = wider_spec(spec)
    choice, broad = (run.timely(choose(GRU, one, size, gpu), one, size, captured=False) for one in (spec, wider))
    one_layer = dataclasses.replace(spec, layers=1)
    if wider != spec and spec.layers == 1:
        broad = run.padded_call(broad, spec, size, 1)
    if wider != spec and run.pays(one_layer, size, spec.layers, [choice], [broad], captured=False):
        spec, choice = wider, broad
    if choice.variant is None:
        return choice, ()

    def empty(*shape: int, dtype: str = spec.dtype) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    hidden, cells = spec.hidden, spec.layers * spec.directions
    wide = spec.directions * hidden
    one = (empty(3 * hidden, hidden), empty(3 * hidden, hidden), *((empty(3 * hidden),) * 2 if spec.bias else ()))
    tokens = (size.seq, size.batch) if spec.dense else (size.seq * size.batch,)
    call = GruCall(
        input=empty(*tokens, hidden),
        hx=empty(cells, size.batch, hidden),
        weights=one * cells,
        has_biases=spec.bias,
        num_layers=spec.layers,
        bidirectional=spec.directions > 1,
        batch_first=False,
        batch_sizes=torch.full((size.seq,), size.batch, device="cpu") if spec.packed else None,
        cu_seqlens=empty(size.batch + 1, dtype="int32") if spec.thd else None,
        max_seqlen=size.seq if spec.thd else None,
    )
    gates, out = empty(spec.directions, *tokens, 3 * hidden), empty(*tokens, wide)
    h_n, lengths = torch.empty_like(call.hx), lengths_of(call)
    recurrence = run.recurrence_of(call, spec, size, choice.variant, gates, out, slice(0, cells), h_n, lengths)
    # The kernel by which plans pad, fill and cut tensors.
    memory = torch.empty(1, dtype=INTEGERS[spec.item], device="meta")
    copies = copy_launch([(memory, memory, filled(1, 1, 0))])
    return choice, (copies, *GRU.launches(spec, choice.variant, recurrence))
