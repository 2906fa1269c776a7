"""Steps and linears of unaligned rows on a real GPU, by the forms that copy: known calls, changed weights, views, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tuned.calls.gru_cell.run
import tuned.calls.linear_cat.run
from tests.support.gru_cell_forms import PADDED, PADDED_LIBRARY
from tuned.dispatch import gru_cell, linear_cat
from tuned.families.linear_cat.variant import LinearCatVariant

pytestmark = pytest.mark.gpu

ROWS, HIDDEN = 33, 75
STEPS = {"padded": PADDED, "padded_library": PADDED_LIBRARY}
LINEAR = LinearCatVariant("padded", 32, 32, 64, num_stages=2)


def drawn(*shape: int, wide: bool = False) -> torch.Tensor:
    """A bfloat16 tensor; ``wide``: a view of every other row, which starts at an odd element."""
    if not wide:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 4
    return (torch.randn(2 * shape[0], shape[1] + 3, device="cuda", dtype=torch.bfloat16) / 4)[::2, 1 : 1 + shape[1]]


def assert_known_calls_right(function: Any, exact: Any, tensors: list[torch.Tensor], changed: torch.Tensor) -> None:
    """Calls and a graph of the function are right, each after ``changed`` was changed in place."""

    def check(found: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), exact([t.double() for t in tensors]), rtol=2e-2, atol=2e-2)

    with torch.no_grad():
        for _ in range(4):
            changed.mul_(-0.75)
            check(function(tensors))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = function(tensors)
        for _ in range(2):
            changed.mul_(-1.5)
            graph.replay()
            check(found)


@pytest.mark.parametrize("wide", [False, True], ids=["contiguous", "views"])
@pytest.mark.parametrize("widths", [(45,), (64,), (5, 30)], ids=str)
@pytest.mark.parametrize("form", STEPS)
@pytest.mark.parametrize("at", [-4, -3], ids=["weight_ih", "weight_hh"])
def test_a_known_step_reads_all_its_tensors_again(
    monkeypatch: pytest.MonkeyPatch, at: int, form: str, widths: tuple[int, ...], *, wide: bool
) -> None:
    monkeypatch.setattr(tuned.calls.gru_cell.run, "_PLANS", {})
    monkeypatch.setattr(tuned.calls.gru_cell.run.MOMENTS, "variant_of", lambda *_: (STEPS[form], True))
    count = len(widths)
    inputs = [drawn(ROWS, width, wide=wide) for width in (*widths, HIDDEN)]
    weights = [drawn(3 * HIDDEN, width, wide=wide) for width in (sum(widths), HIDDEN)]
    tensors = [*inputs, *weights, drawn(3 * HIDDEN), drawn(3 * HIDDEN)]
    assert_known_calls_right(
        lambda given: gru_cell(given[0] if count == 1 else tuple(given[:count]), *given[count:]),
        lambda given: torch.gru_cell(torch.cat(given[:count], -1), *given[count:]),
        tensors,
        tensors[at],
    )


@pytest.mark.parametrize("wide", [False, True], ids=["contiguous", "views"])
@pytest.mark.parametrize("widths", [(40, 5), (5, 30, 1, 3)], ids=str)
def test_a_known_linear_reads_all_its_tensors_again(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], *, wide: bool
) -> None:
    monkeypatch.setattr(tuned.calls.linear_cat.run, "_PLANS", {})
    monkeypatch.setattr(tuned.calls.linear_cat.run.MOMENTS, "variant_of", lambda *_: (LINEAR, True))
    count = len(widths)
    tensors = [drawn(ROWS, width, wide=wide) for width in widths]
    tensors += [drawn(37, sum(widths), wide=wide), drawn(37)]
    assert_known_calls_right(
        lambda given: linear_cat(tuple(given[:count]), *given[count:]),
        lambda given: torch.nn.functional.linear(torch.cat(given[:count], -1), *given[count:]),
        tensors,
        tensors[count],
    )
