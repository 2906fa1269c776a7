"""Gradients of a GRU whose kernels the interpreter runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from generator.rendering.structures import load
from tuned.calls.gru import eager, training
from tuned.calls.gru import gradient as gradient_run
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_backward.launches import sequence
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuned.calls.gru.arguments import GruCall
    from tuned.families.launch import Launch

ONE = GruVariant("persistent", "split", 16, 8, "poll", num_warps=2)
TURNS = dataclasses.replace(ONE, block_hidden=8, turns=2)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Gradients run on the CPU, one launch a step; gives the list of launches that a call would make."""
    made: list[Launch] = []
    pending: list[Any] = []
    launches = gradient_run.BACKWARD.launches

    def remembered(spec: Any, variant: GruVariant, gradient: Any) -> Any:
        states = torch.full_like(gradient.grad_h_0, torch.nan, dtype=torch.float32)
        pending.append((spec, variant, dataclasses.replace(gradient, states=states)))
        return launches(spec, variant, gradient)

    def launched(_device: Any, launch: Launch) -> None:
        made.append(launch)
        spec, variant, gradient = pending[-1]
        for step in range(gradient.seq + 1):
            one = sequence(spec, variant, gradient, step, step + 1)
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # from memory that no program waited for, whose values are not used
                load(one.kernel)[(one.programs,)](*one.arguments, **one.constants, **one.options)

    monkeypatch.setattr(gradient_run, "BACKWARD", dataclasses.replace(gradient_run.BACKWARD, launches=remembered))
    monkeypatch.setattr(gradient_run, "launch_known", launched)
    return made


def choose(monkeypatch: pytest.MonkeyPatch, variant: GruVariant | None) -> None:
    why = "a test asked for it"
    monkeypatch.setattr(training, "_choice", lambda _call: Choice("winner" if variant else "eager", why, variant))


def wanted_of(call: GruCall, given: tuple[Any, Any]) -> list[torch.Tensor]:
    """Autograd's gradients of all tensors of a call, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in call.tensors]
    outputs = eager.gru(dataclasses.replace(call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:])))
    pairs = [(out, grad.double()) for out, grad in zip(outputs, given, strict=True) if grad is not None]
    found = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def outputs_of(call: GruCall) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the forward keeps: the output of each layer, and the product of the input and the lowest layer's weights."""
    each, x, outputs = len(call.weights) // call.num_layers, call.input, []
    for layer in range(call.num_layers):
        own = call.weights[each * layer : each * (layer + 1)]
        one = dataclasses.replace(call, input=x, hx=call.hx[layer : layer + 1], weights=own, num_layers=1)
        x, _ = eager.gru(one)
        outputs.append(x)
    return outputs, (call.input @ call.weights[0].t())[None]


def assert_alike(found: Any, wanted: list[torch.Tensor]) -> None:
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.shape == theirs.shape, index
        scale = theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(
            ours.double() / scale, theirs / scale, rtol=0, atol=3e-3, msg=lambda m, i=index: f"{i}: {m}"
        )
