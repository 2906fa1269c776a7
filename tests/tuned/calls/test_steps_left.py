"""Steps and linears that need a gradient: PyTorch serves them, later ones at once; other calls do not follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tuned.nn
from tests.support.run import DEVICE, INTERPRETED
from tuned.calls.gru_cell import run as cell_run
from tuned.calls.linear_cat import run as linear_run
from tuned.calls.recurrent import serve
from tuned.dispatch import gru_cell, linear_cat
from tuned.launching import alike, left, rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tells of a call that was left, which a GPU's kernels are not")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls are decided as on a GPU; yields those that were decided in full instead of being known."""
    asked: list[str] = []
    monkeypatch.setattr(serve, "why_eager", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("gru_cell", "linear_cat"):
        function = getattr(serve, name)
        monkeypatch.setattr(serve, name, lambda *a, of=function, n=name, **k: (asked.append(n), of(*a, **k))[1])
    yield asked
    asked.clear()


def kinds(weight: torch.Tensor) -> set[bool]:
    """Whether the remembered calls of a weight have a gradient."""
    return {sizes[0] == left.GRADIENT for sizes, *_ in left.LEFT[id(weight)].sizes}


def test_a_call_of_other_weights_is_checked_though_they_have_the_ids_of_those_before() -> None:
    """A freed weight leaves its id to another weight, and ``weight.data = ...`` keeps the id too."""
    inputs, weight = (
        (torch.randn(2, 4, device=DEVICE), torch.randn(2, 3, device=DEVICE)),
        torch.randn(5, 7, device=DEVICE),
    )
    bias = torch.randn(5, device=DEVICE)
    for given in (weight, bias):
        linear_cat(inputs, weight, bias)
        right, given.data = given.data, torch.randn(7, device=DEVICE)
        with pytest.raises(ValueError, match="must be"):
            linear_cat(inputs, weight, bias)
        given.data = right
    cell = torch.nn.GRUCell(4, 5).to(DEVICE)
    x, h = torch.randn(2, 4, device=DEVICE), torch.randn(2, 5, device=DEVICE)
    for given in cell.parameters():
        gru_cell(x, h, *cell.parameters())
        right, given.data = given.data, torch.randn(1, device=DEVICE)
        with pytest.raises(ValueError, match="must be"):
            gru_cell(x, h, *cell.parameters())
        given.data = right
    gru_cell(x, h, *cell.parameters())


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
    cell(x, torch.randn(3, 5, device=DEVICE)[:2].repeat(2, 1)[:3])  # the same sizes with other strides
    assert as_on_a_gpu == ["gru_cell"]
    gru_cell((a[:2], b[:2]), h[:2], *given)
    assert as_on_a_gpu == ["gru_cell"] * 2, "other sizes"


def test_a_weight_of_a_linear_and_of_a_cell_is_known_by_its_function() -> None:
    """A freed weight may give its id to another function's weight: calls left for one were found for the other."""
    cell = tuned.nn.GRUCell(6, 5).to(DEVICE)
    x, h = torch.randn(3, 6, device=DEVICE), torch.randn(3, 5, device=DEVICE)
    for _ in range(3):
        torch.testing.assert_close(
            linear_cat((x,), cell.weight_ih, cell.bias_ih), torch.nn.functional.linear(x, cell.weight_ih, cell.bias_ih)
        )
        wanted = torch.nn.GRUCell.forward(cell, x, h)
        torch.testing.assert_close(cell(x, h), wanted)
        torch.testing.assert_close(gru_cell(x, h, *cell.parameters()), wanted)
    assert {kind[0] for kind in left.LEFT[id(cell.weight_ih)].alike} == {"linear", "cell"}


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


KINDS = ("step", "step of two", "linear")


class Left:
    """A call that PyTorch serves, remembered as the first such call is."""

    def __init__(self, kind: str, *, grad: bool, captured: bool = True) -> None:
        a, b, h = (torch.randn(3, n, device=DEVICE) for n in (4, 2, 5))
        self.run: Any = linear_run if kind == "linear" else cell_run
        if kind == "linear":
            weights = torch.randn(7, 6, device=DEVICE, requires_grad=grad), torch.randn(7, device=DEVICE)
            self.given: tuple[Any, ...] = (a, b), *weights
            of_call = linear_run.sizes((a, b), weights[1])
        else:
            weights = [torch.randn(15, *n, device=DEVICE, requires_grad=grad) for n in ((6,), (5,), (), ())]
            self.given = (a, b) if kind == "step of two" else torch.cat((a, b), -1), h, *weights, False
            of_call = cell_run.sizes(self.given[0], False, *self.given[1:-1])
        left.leave(weights[0], (left.GRADIENT, of_call) if grad else of_call, captured=captured)

    def known(self, *given: Any) -> Any:
        return self.run.known(*(given or self.given))

    def right(self, *given: Any) -> None:
        """A known call gives PyTorch's result."""
        x, *others = given = given or self.given
        joint = torch.cat(x, -1) if isinstance(x, tuple) else x
        wanted = (
            torch.nn.functional.linear(joint, *others)
            if self.run is linear_run
            else torch.gru_cell(joint, *others[:-1])
        )
        got = self.known(*given)
        assert got.requires_grad is wanted.requires_grad
        torch.testing.assert_close(got, wanted)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the calls whose sizes were built."""
    of: list[str] = []
    for run in (cell_run, linear_run):
        monkeypatch.setattr(run, "sizes", lambda *a, sizes=run.sizes: (of.append("sizes"), sizes(*a))[1])
    return of


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_known_by_its_sizes_and_then_by_its_tensors(kind: str, grad: bool, asked: list[str]) -> None:
    call = Left(kind, grad=grad)
    asked.clear()
    for _ in range(4):
        call.right()
    assert len(asked) == 1
    x, *others = call.given
    strided = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in x) if isinstance(x, tuple) else x.mT.contiguous().mT
    call.right(strided, *others)
    assert len(asked) == 2, "other strides have the same sizes"
    with torch.no_grad():
        assert (call.known() is None) is grad, "of a call without a gradient those of one say nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_without_what_compares_tensors_a_call_is_known_by_its_sizes(
    kind: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike, "_Guards", None)
    call = Left(kind, grad=False)
    asked.clear()
    for _ in range(3):
        call.right()
    assert len(asked) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_a_call_depends_on_is_no_matter_of_its_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Left(kind, grad=False, captured=False)
    for _ in range(2):
        call.right()
    if kind != "linear":
        assert call.known(*call.given[:-1], True) is None, "tensors do not say that h is overwritten"
    for context in (
        rehearsal.listen(rehearsal.Heard()),
        FlopCounterMode(display=False),
        torch.autocast(DEVICE, torch.bfloat16),
    ):
        with context:
            assert call.known() is None
    call.right()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert call.known() is None, "in a CUDA graph a kernel serves"
