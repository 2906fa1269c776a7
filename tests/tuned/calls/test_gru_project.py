"""The product of a GRU's input and weights: both directions at once where the host's time counts."""

from __future__ import annotations

import pytest
import torch

from tuned.calls.gru import project

ROWS, FEATURES, WIDTH = 5, 7, 12


def laid(between: int) -> list[torch.Tensor]:
    """The weights of two directions in one memory, with ``between`` elements between them."""
    memory = torch.randn(2 * WIDTH * FEATURES + between)
    second = WIDTH * FEATURES + between
    return [memory[at : at + WIDTH * FEATURES].view(WIDTH, FEATURES) for at in (0, second)]


@pytest.mark.parametrize("between", [0, 3])
def test_products_of_both_directions_are_one(between: int) -> None:
    rows, weights = torch.randn(ROWS, FEATURES), laid(between)
    found = project.of_both(rows, weights)
    assert found is not None
    assert (found.shape, found.is_contiguous()) == ((2, ROWS, WIDTH), True)
    for one, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(one, rows @ weight.t())


def test_weights_that_are_no_rows_of_one_tensor_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, (first, second) = torch.randn(ROWS, FEATURES), laid(2)
    for weights in (
        (second, first),  # in reverse order
        (first, second.clone()),  # of two memories, whichever comes first
        (first.clone(), second),
        (second.clone(), first),
        (first, first),
        (first, second.t().contiguous().t()),
    ):
        assert project.of_both(rows, weights) is None
    monkeypatch.setattr(project, "SMALL_PRODUCT", ROWS * WIDTH * FEATURES - 1)
    assert project.of_both(rows, (first, second)) is None, "that is the device's time"


def test_overlapping_weights_are_multiplied_one_by_one() -> None:
    memory = torch.randn((WIDTH + 1) * FEATURES)
    first, second = (memory[at : at + WIDTH * FEATURES].view(WIDTH, FEATURES) for at in (0, FEATURES))
    assert project.of_both(torch.randn(ROWS, FEATURES), (first, second)) is None
