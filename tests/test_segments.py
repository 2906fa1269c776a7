"""Segments joined along the last axis."""

import torch

from tuned.families.products import joined


def test_segments_are_put_together_in_their_order() -> None:
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    assert joined([a, b]).tolist() == [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]]


def test_a_single_segment_is_not_copied() -> None:
    only = torch.ones(2, 3)
    assert joined((only,)) is only
