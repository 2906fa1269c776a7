"""Random GRUs that kernels serve in a CUDA graph and PyTorch's operators serve as a plain call, or the reverse."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from benchmarks.random_gru import Shape, drawn
from tuned.calls.gru import run, training
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.lookup.lookup import Gpu

MOST_DRAWS = 600
MOST_STATES = 2**25  # states of all layers and directions: one process has the memory for the gradients of such a GRU


def drawn_otherwise(count: int, seed: int, gpu: Gpu, *, trained: bool) -> list[Shape]:
    """``count`` random GRUs, or fewer if not found: kernels serve half as plain calls only, the others in a graph only."""
    draw, found = random.Random(seed), {False: [], True: []}  # type: ignore[var-annotated]
    for _ in range(MOST_DRAWS):
        shape = drawn(draw)
        states = shape.steps * shape.batch * shape.hidden * shape.layers * (2 if shape.bidirectional else 1)
        if shape.packed or states > MOST_STATES:
            continue
        called, captured = (by_kernels(shape, gpu, captured=in_graph, trained=trained) for in_graph in (False, True))
        if called is not captured and len(found[called]) < (count + 1) // 2:
            found[called].append(shape)
        if sum(map(len, found.values())) >= count:
            break
    return [*found[True], *found[False]]


def by_kernels(shape: Shape, gpu: Gpu, *, captured: bool, trained: bool) -> bool:
    """Whether kernels would serve a random GRU on ``gpu``, which need not be present."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (run, training):
            patched.setattr(module, "gpu_of", lambda _device: gpu)
            patched.setattr(module, "why_eager", lambda *_: None)
        patched.setattr(run, "limit_of", lambda _device: ())
        patched.setattr(run, "capturing", lambda _device: captured)
        by: Any = training if trained else run
        return by.why_not(by.wide(_call(shape))) is None


def _call(shape: Shape) -> GruCall:
    """The call of a shape, with tensors on the device "meta"."""
    settings: dict[str, Any] = {"num_layers": shape.layers, "bidirectional": shape.bidirectional}
    given: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, shape.dtype)}
    made = torch.nn.GRU(shape.hidden, shape.hidden, **settings, **given)
    cells = shape.layers * (2 if shape.bidirectional else 1)
    x, hx = (torch.empty(*n, shape.batch, shape.hidden, **given) for n in ((shape.steps,), (cells,)))
    return gru_call(x, hx, made._flat_weights, **settings)
