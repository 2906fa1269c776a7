"""cuBLAS and cuDNN are set up before a CUDA graph needs them."""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from typing import Any

import pytest
import torch

from tuned.calls.recurrent import serve
from tuned.dispatch import gru, gru_cell, linear_cat
from tuned.launching import library


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes what was asked of a GPU that is not here: device, launches, handles; of the last two, by which thread."""
    found: list[Any] = []
    zeros, zeros_like, main = torch.zeros, torch.zeros_like, threading.get_ident()

    def told(what: str) -> None:
        found.append((what, threading.get_ident() == main))

    def launched(made: Any) -> Any:
        told("launch")
        return made

    def recurrence(*args: Any) -> Any:
        told("recurrence")
        return gru_of(*args)

    gru_of = torch.gru
    monkeypatch.setattr(torch, "gru", recurrence)
    monkeypatch.setattr(library, "_WITH_GRADIENTS", set())
    monkeypatch.setattr(library, "_THREAD", threading.local())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: found.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: told("handle"))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **rest: launched(zeros(*shape, **(rest | {"device": "cpu"}))))
    monkeypatch.setattr(torch, "zeros_like", lambda t: launched(zeros_like(t)))
    return found


GPU = torch.device("cuda", 1)
HERE = [GPU, ("launch", True), ("handle", True)]


def test_each_thread_sets_it_up_once(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library.set_up(torch.device("cpu"))
    assert not asked, "which would initialise CUDA"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    library.set_up(GPU)
    assert not asked, "while a graph is captured it is too late"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    library.set_up(GPU)
    assert asked == HERE, "the library warns in a thread that has launched nothing"
    library.set_up(GPU)
    assert asked == HERE
    library.set_up(torch.device("cuda", 0))
    assert len(asked) == 6, "for each GPU"
    other = threading.Thread(target=library.set_up, args=(GPU,))
    other.start()
    other.join()
    assert asked[6:] == [GPU, ("launch", False), ("handle", False)]


def test_a_call_goes_on_where_it_cannot_be_set_up(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a product needs none of the library's memory; a call with a product reports the error itself."""

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_blas_handle", full)
        library.set_up(GPU, gradients=True)
    assert ("handle", True) not in asked
    library.set_up(GPU, gradients=True)
    handles = [one for one in asked if isinstance(one, tuple) and one[0] == "handle"]
    assert len(handles) == 2, "it is tried again, and for the thread of gradients"


def test_it_is_set_up_once_where_gradients_are_computed(asked: list[Any]) -> None:
    library.set_up(GPU)
    with torch.no_grad():  # of the caller, while gradients are computed
        library.set_up(GPU, gradients=True)
    assert [what for what, *_ in asked[6:]] == ["launch", "launch", "launch", "handle"], "leaf, forward, backward"
    library.set_up(GPU, gradients=True)
    assert len(asked) == 10


def test_recurrences_are_set_up_apart_from_products(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes 100 ms to set up, and a graph may need it although kernels serve the call outside of graphs."""
    library.set_up(GPU, gradients=True)
    del asked[:]
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cudnn, "enabled", False)
        library.set_up_recurrences(GPU)
    assert not asked, "PyTorch's own is not cuDNN's then"
    library.set_up_recurrences(GPU)
    library.set_up_recurrences(GPU)
    assert asked == [GPU, ("launch", True), ("recurrence", True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.set_up_recurrences(GPU, gradients=True)
    assert sum(one == ("recurrence", True) for one in asked) == 3, "here, and where gradients are computed"
    library.set_up_recurrences(GPU, gradients=True)
    assert sum(one == ("recurrence", True) for one in asked) == 3
    assert ("handle", True) not in asked


def test_modes_that_listen_hear_nothing_of_it(asked: list[Any]) -> None:
    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, *_: Any) -> Any:
            raise AssertionError("an operator that nobody called")

    with Heard():
        library.set_up(GPU, gradients=True)
    assert not asked
    library.set_up(GPU, gradients=True)
    assert asked[:3] == HERE, "without the mode it is made up for"


@pytest.mark.parametrize("gradient", [False, True])
def test_every_call_that_kernels_may_serve_sets_it_up(monkeypatch: pytest.MonkeyPatch, *, gradient: bool) -> None:
    """What serves a call now and what will serve it in a graph are two decisions, so either way the call sets it up."""
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
