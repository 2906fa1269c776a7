"""tuned.calls.linear_cat.training without a GPU: the kernel of the forward, and gradients without a concatenation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned.calls.linear_cat.run as linear
import tuned.launching.left
import tuned.launching.plan
from generator.measuring.mended import mended_interpreter
from tests.support.gru_machine import believing
from tests.support.run import INTERPRETED
from tuned.calls.linear_cat import training
from tuned.calls.recurrent import serve
from tuned.dispatch import linear_cat
from tuned.lookup.gpu import why_not_plain
from tuned.lookup.lookup import Choice, Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="this stands in for a GPU where there is none"),
]
ROWS, WIDTHS, OUTPUTS = (2, 3), (16, 8, 5), 24


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """CPU tensors take the path of GPU tensors in a CUDA graph's capture; yields the kernels that were launched."""
    made: list[Any] = []
    public = linear.run_publicly

    def counted(steps: Any, device: int) -> Any:
        made.append(steps)
        return public(steps, device)

    for module in (linear, serve):
        monkeypatch.setattr(module, "why_eager", lambda x, *_, **__: why_not_plain(x))
    monkeypatch.setattr(linear, "gpu_of", lambda _: Gpu("a_card_without_a_table", 80, 100))
    monkeypatch.setattr(linear, "_PLANS", {})
    for module in (linear, tuned.launching.plan):
        monkeypatch.setattr(module, "run_publicly", counted)
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: False)
    monkeypatch.setattr(tuned.launching.plan, "direct_launch", lambda *_: None)
    monkeypatch.setattr(training, "pays", lambda _: True)
    believing(monkeypatch)
    monkeypatch.setattr(linear, "choice_of", lambda *_: (Choice("default", "a test asked for it", object()), None))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with np.errstate(all="ignore"), mended_interpreter():
        yield made


def given(*, bias: bool = True, wanted: str = "all") -> tuple[list[torch.Tensor], torch.Tensor, Any]:
    """Segments, weight and bias; a segment is transposed, one sliced."""
    torch.manual_seed(0)
    inputs = [torch.randn(*ROWS, width) for width in WIDTHS]
    inputs[1] = torch.randn(WIDTHS[1], *ROWS).permute(1, 2, 0)
    inputs[2] = torch.randn(*ROWS, WIDTHS[2] + 3)[..., 3:]
    weight, b = torch.randn(OUTPUTS, sum(WIDTHS)) / 4, torch.randn(OUTPUTS) if bias else None
    asked = {"all": [*inputs, weight, b], "segments": inputs, "one": inputs[1:2], "weight": [weight], "bias": [b]}
    for t in asked[wanted]:
        if t is not None:
            t.requires_grad_()
    return inputs, weight, b


def leaves_of(inputs: Any, weight: Any, bias: Any) -> list[torch.Tensor]:
    return [t for t in (*inputs, weight, bias) if t is not None and t.requires_grad]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("segments were concatenated")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wanted", ["all", "segments", "one", "weight", "bias"])
def test_gradients_are_pytorchs_and_nothing_is_concatenated(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], wanted: str, *, bias: bool
) -> None:
    arguments = given(bias=bias, wanted=wanted)
    leaves = leaves_of(*arguments)
    if not leaves:
        pytest.skip("without a bias there is no gradient of one")
    theirs = linear.eager(*arguments)
    grad = torch.randn_like(theirs)
    expected = torch.autograd.grad(theirs, leaves, grad)
    monkeypatch.setattr(torch, "cat", refuse)
    out = linear_cat(*arguments)
    assert len(launched) == 1
    torch.testing.assert_close(out, theirs, rtol=1e-3, atol=1e-2)
    products = []
    monkeypatch.setattr(torch, "mm", lambda *a, mm=torch.mm, **k: products.append(k) or mm(*a, **k))
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad), expected)
    assert len(products) == (len(WIDTHS) if wanted in ("all", "weight") else 0)


def test_a_result_may_be_overwritten(launched: list[Any]) -> None:
    """A view that was made inside an autograd node may not be overwritten, so the result must be no such view."""
    arguments = given()
    leaves, outs = leaves_of(*arguments), []
    for _ in range(2):  # launched, then known
        out = linear_cat(*arguments)
        assert not out._is_view()
        outs.append(torch.autograd.grad(out.relu_().sum(), leaves))
    wanted = torch.autograd.grad(linear.eager(*arguments).relu().sum(), leaves)
    for found in outs:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)
    assert launched


def test_the_next_call_is_known_and_has_gradients_too(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = given()
    linear_cat(*arguments)
    assert linear._PLANS
    monkeypatch.setattr(linear, "run_linear_cat", refuse)
    out = linear_cat(*arguments)
    assert len(launched) == 2
    assert out.requires_grad


def test_gradients_have_gradients(launched: list[Any]) -> None:
    def penalty(by: Any) -> list[torch.Tensor]:
        arguments = given()
        leaves = leaves_of(*arguments)
        first = torch.autograd.grad(by(*arguments).tanh().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    torch.testing.assert_close(penalty(linear_cat), penalty(linear.eager), rtol=1e-2, atol=2e-2)
    assert len(launched) == 1


def test_casts_of_autocast_have_gradients(launched: list[Any]) -> None:
    arguments = given()
    leaves = leaves_of(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        out, theirs = linear_cat(*arguments), linear.eager(*arguments)
    assert len(launched) == 1
    assert out.dtype == theirs.dtype == torch.bfloat16
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(y, leaves, grad) for y in (out, theirs))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("why", ["capture", "choice"])
def test_pytorchs_own_trains_where_it_takes_less(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], why: str
) -> None:
    if why == "capture":
        monkeypatch.setattr(training, "pays", lambda _: False)
    else:
        monkeypatch.setattr(linear, "choice_of", lambda *_: (Choice("eager", "PyTorch's own takes less", None), None))
    arguments = given()
    out = linear_cat(*arguments)
    assert not launched
    assert type(out.grad_fn).__name__ != "_LinearBackward"
    assert torch.equal(out, linear.eager(*arguments))


def test_a_call_pays_in_a_cuda_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not training.pays(torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert training.pays(type("OnAGpu", (), {"is_cuda": True})())  # type: ignore[arg-type]
