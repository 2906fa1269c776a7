"""The library of products is set up before a CUDA graph needs it."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import Any

import pytest
import torch

from tuned.calls.recurrent import serve
from tuned.dispatch import gru, gru_cell, linear_cat
from tuned.launching import library


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of a GPU that is not here: the device, then the handle and whether gradients' thread did."""
    found: list[Any] = []
    empty, main = torch.empty, threading.get_ident()
    monkeypatch.setattr(library, "_WITH_GRADIENTS", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: found.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: found.append(threading.get_ident() == main))
    monkeypatch.setattr(torch, "empty", lambda *shape, **rest: empty(*shape, **(rest | {"device": "cpu"})))
    return found


GPU = torch.device("cuda", 1)


def test_each_call_sets_it_up_for_its_thread(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library.set_up(torch.device("cpu"))
    assert not asked, "which would initialise CUDA"
    library.set_up(GPU)
    assert asked == [GPU, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    library.set_up(GPU)
    assert len(asked) == 2, "while a graph is captured it is too late"


def test_it_is_set_up_once_where_gradients_are_computed(asked: list[Any]) -> None:
    with torch.no_grad():  # of a caller, who saves and counts what autograd does
        library.set_up(GPU, gradients=True)
    assert len(asked) == 3, "in the backward too"
    library.set_up(GPU, gradients=True)
    assert len(asked) == 5, "in this thread alone"


def test_modes_that_listen_hear_nothing_of_it(asked: list[Any]) -> None:
    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, *_: Any) -> Any:
            raise AssertionError("a call that nobody made")

    with Heard():
        library.set_up(GPU, gradients=True)
    assert len(asked) == 2
    library.set_up(GPU, gradients=True)
    assert len(asked) == 5, "without the mode it is made up for"


@pytest.mark.parametrize("gradient", [False, True])
def test_every_call_that_kernels_may_serve_sets_it_up(monkeypatch: pytest.MonkeyPatch, *, gradient: bool) -> None:
    """What serves a call, and what it will be in a graph, are two decisions."""
    asked: list[Any] = []
    fake = types.SimpleNamespace(set_up=lambda device, *, gradients=False: asked.append((device.type, gradients)))
    monkeypatch.setattr(serve, "library", fake)
    monkeypatch.setattr(serve, "why_torch", lambda *_, **__: None)
    for by in (serve.run, serve.training):
        monkeypatch.setattr(by, "wide", lambda call: call)
        monkeypatch.setattr(by, "why_not", lambda _call: "as a call PyTorch's own takes less")
        monkeypatch.setattr(by, "remember_eager", lambda _call: None)
    monkeypatch.setattr(serve.run, "pads_pytorch", lambda _call: False)
    monkeypatch.setattr(serve.linear_run, "run_linear_cat", lambda *_: torch.empty(0))
    monkeypatch.setattr(serve.cell_run, "run_cell", lambda *_, **__: torch.empty(0))
    w = [torch.randn(shape, requires_grad=gradient) for shape in ((12, 5), (12, 4), (12,), (12,))]
    gru(torch.randn(3, 2, 5), torch.randn(1, 2, 4), w)
    assert asked == [("cpu", gradient)]
    linear_cat((torch.randn(2, 2), torch.randn(2, 3)), w[0], w[2])
    assert asked[1:] == [("cpu", gradient)]
    gru_cell(torch.randn(2, 5), torch.randn(2, 4), *w)
    assert len(asked) == 3
