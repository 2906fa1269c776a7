"""Steps and linears that need a gradient: PyTorch's own serves them, and later ones at once; calls without one do not follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import tuned.nn
from tests.support.run import DEVICE, INTERPRETED
from tuned.calls.gru_cell import run as cell_run
from tuned.calls.linear_cat import run as linear_run
from tuned.calls.recurrent import serve
from tuned.dispatch import gru_cell, linear_cat
from tuned.launching import left

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tells of a call that was left, which a GPU's kernels are not")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls are decided as on a GPU; yields what was decided in full, not known again."""
    asked: list[str] = []
    monkeypatch.setattr(left, "LEFT", {})  # another test's weight may have had an id
    monkeypatch.setattr(serve, "why_eager", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("gru_cell", "linear_cat"):
        function = getattr(serve, name)
        monkeypatch.setattr(serve, name, lambda *a, of=function, n=name, **k: (asked.append(n), of(*a, **k))[1])
    yield asked
    asked.clear()


def kinds(weight: torch.Tensor) -> set[bool]:
    """Whether what is remembered of a weight is of calls with a gradient."""
    return {sizes[0] == left.GRADIENT for sizes, *_ in left.LEFT.get(id(weight), {})}


@pytest.mark.parametrize("joint", [False, True])
def test_a_step_with_a_gradient_is_decided_once(as_on_a_gpu: list[str], joint: bool) -> None:
    cell = tuned.nn.GRUCell(6, 5).to(DEVICE)
    a, b, h = (torch.randn(3, n, device=DEVICE) for n in (4, 2, 5))
    x = torch.cat((a, b), -1) if joint else (a, b)
    wanted = torch.nn.GRUCell.forward(cell, torch.cat((a, b), -1), h)
    given = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
    for _ in range(3):
        torch.testing.assert_close(gru_cell(x, h, *given), wanted)
        torch.testing.assert_close(cell(x, h), wanted)
    assert as_on_a_gpu == ["gru_cell"]
    assert kinds(cell.weight_ih) == {True}
    torch.autograd.grad(cell(x, h).sum(), list(cell.parameters()))
    cell(x, torch.randn(3, 5, device=DEVICE)[:2].repeat(2, 1)[:3])  # the same sizes, other strides
    assert as_on_a_gpu == ["gru_cell"]
    gru_cell((a[:2], b[:2]), h[:2], *given)
    assert as_on_a_gpu == ["gru_cell"] * 2, "other sizes"


def test_a_step_without_a_gradient_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = tuned.nn.GRUCell(6, 5).to(DEVICE)
    x, h = (torch.randn(3, 4, device=DEVICE), torch.randn(3, 2, device=DEVICE)), torch.randn(3, 5, device=DEVICE)
    given = [p.detach() for p in cell.parameters()]
    cell(x, h)
    with torch.no_grad():
        assert cell_run.known(x, h, *cell.parameters(), False) is None
    assert cell_run.known(x, h, *given, False) is None, "other tensors"
    assert cell_run.known(x, h, *cell.parameters(), True) is None, "in place a gradient is refused"
    monkeypatch.setattr(left, "listeners", lambda: True)
    assert cell_run.known(x, h, *cell.parameters(), False) is None, "what listens is told of each call"


def test_a_linear_with_a_gradient_is_decided_once_outside_of_graphs(
    as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (torch.randn(3, 4, device=DEVICE), torch.randn(3, 2, device=DEVICE))
    weight, bias = torch.randn(7, 6, device=DEVICE, requires_grad=True), torch.randn(7, device=DEVICE)
    for _ in range(3):
        torch.testing.assert_close(linear_cat(inputs, weight, bias), torch.cat(inputs, -1) @ weight.T + bias)
    assert as_on_a_gpu == ["linear_cat"]
    assert kinds(weight) == {True}
    with torch.no_grad():
        assert linear_run.known(inputs, weight, bias) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert linear_run.known(inputs, weight, bias) is None, "there a kernel may serve"
