"""Calls of a GRU whose kernels the interpreter runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from generator.rendering.structures import load
from tests.support.gru_sequences import single_steps
from tests.support.run import DEVICE
from tuned.calls.gru import eager, run
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.families.gru.launches import sequence
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

T, B, FEATURES, H = 4, 3, 6, 20


def weights_of(layers: int, directions: int, *, bias: bool = True, hidden: int = H) -> list[torch.Tensor]:
    made = []
    for layer in range(layers):
        features = FEATURES if layer == 0 else directions * hidden
        shapes = [(3 * hidden, features), (3 * hidden, hidden), *([(3 * hidden,)] * 2 if bias else [])]
        made += [torch.randn(shape) / 4 for _ in range(directions) for shape in shapes]
    return [w.to(DEVICE) for w in made]


def call_of(
    layout: str = "dense",
    layers: int = 1,
    directions: int = 1,
    *,
    bias: bool = True,
    first: bool = False,
    hidden: int = H,
    **rest: Any,
) -> GruCall:
    """A call of float32 that passed the checks of arguments, with a state that is not contiguous."""
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"num_layers": layers, "bidirectional": directions == 2, "bias": bias, **rest}
    if layout == "dense":
        x = torch.randn((B, T, FEATURES) if first else (T, B, FEATURES))
        kwargs["batch_first"] = first
    elif layout == "packed":
        packed = pack_sequence([torch.randn(n, FEATURES) for n in (4, 3, 1)])
        x, kwargs["batch_sizes"] = packed.data, packed.batch_sizes
    else:
        x = torch.randn(6, FEATURES)
        kwargs |= {"cu_seqlens": torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE), "max_seqlen": T}
    hx = torch.randn(layers * directions, hidden, B).transpose(1, 2).to(DEVICE)
    return gru_call(x.to(DEVICE), hx, weights_of(layers, directions, bias=bias, hidden=hidden), **kwargs)


class _NoDevice:
    def __init__(self, _device: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Calls run on the CPU, one launch a step; yields the launches that a call would make, without the input's products."""
    made: list[Launch] = []
    pending: list[Any] = []
    launches = run.GRU.launches

    def remembered(spec: GruSpec, variant: GruVariant, recurrence: Any) -> Any:
        pending.append((spec, variant, recurrence))
        return launches(spec, variant, recurrence)

    def one(launch: Launch) -> None:
        load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)

    def launched(_device: Any, launch: Launch) -> None:
        if launch.kernel.startswith("gru_"):
            made.append(launch)
        if not launch.options.get("launch_cooperative_grid"):
            one(launch)
            return
        for begin, end in single_steps(pending[-1][2].seq):
            spec, variant, recurrence = pending[-1]
            one(sequence(spec, variant, recurrence, begin, end))

    monkeypatch.setattr(run, "GRU", dataclasses.replace(run.GRU, launches=remembered))
    monkeypatch.setattr(run, "launch_known", launched)
    monkeypatch.setattr(torch.cuda, "device", _NoDevice)
    yield made
    made.clear()


VARIANTS = {
    "persistent": GruVariant("persistent", block_hidden=16, exchange="poll"),
    "steps": GruVariant("steps", block_hidden=32),
    "library": GruVariant(),
}


def assert_as_pytorch(call: GruCall, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    wanted = eager.gru(call)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)  # the error of products in TF32
