"""What the tests of a GRU over sequences share: weights, and a stand-in for its kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tuned.calls.recurrent.serve
import tuned.nn
from tuned.calls.gru import eager
from tuned.calls.gru.arguments import GruCall
from tuned.calls.products import autocast_dtype
from tuned.launching import left
from tuned.lookup.lookup import Choice

T, B, FEATURES, H = 5, 3, 6, 4


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[GruCall]:
    """The calls of ``gru`` that reached its kernels; PyTorch in float64 stands for the kernels, on the CPU.

    No row says that kernels are faster for gradients, so PyTorch's operators serve these.
    """
    calls: list[GruCall] = []

    def forward(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
        assert not torch.is_grad_enabled()
        assert autocast_dtype("cpu") is None
        calls.append(call)
        exact = [t.double() for t in call.tensors]
        doubled = dataclasses.replace(call, input=exact[0], hx=exact[1], weights=tuple(exact[2:]))
        output, h_n = eager.gru(doubled)
        return output.to(call.input.dtype), h_n.to(call.input.dtype)

    monkeypatch.setattr(left, "LEFT", {})
    plain = (torch.Tensor, torch.nn.Parameter)
    for module in (tuned.nn, tuned.calls.recurrent.serve):
        monkeypatch.setattr(
            module, "why_eager", lambda x, **_: None if type(x) in plain else f"{type(x)} is a subclass"
        )
    monkeypatch.setattr(tuned.calls.recurrent.serve.run, "why_not", lambda _call, **_: None)
    monkeypatch.setattr(tuned.calls.recurrent.serve.run, "modelled_steps", lambda _call: False)
    monkeypatch.setattr(tuned.calls.recurrent.serve.run, "wide", lambda call: call)
    monkeypatch.setattr(
        tuned.calls.recurrent.serve.run, "choice_of", lambda _call, **_: (Choice("default", "", "v"), ("a_kernel",))
    )
    monkeypatch.setattr(tuned.calls.recurrent.serve.run, "forward", forward)
    monkeypatch.setattr(
        tuned.calls.recurrent.serve.training, "_choice", lambda _call: Choice("eager", "no row says so", None)
    )
    return calls


def weights_of(layers: int, directions: int, bias: bool = True, **kwargs: Any) -> list[torch.Tensor]:
    sets = []
    for layer in range(layers):
        features = FEATURES if layer == 0 else directions * H
        shapes = [(3 * H, features), (3 * H, H), *([(3 * H,)] * 2 if bias else [])]
        sets += [torch.randn(shape, **kwargs) / 2 for _ in range(directions) for shape in shapes]
    return sets
