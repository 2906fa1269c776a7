"""Whether results are as close to float64 as PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

WORSE = 1.1  # an error of so many times that of PyTorch's module still passes


def data_of(x: Any) -> torch.Tensor:
    return x.data if isinstance(x, PackedSequence) else x


def assert_as_good(found: Any, theirs: Any, exact: Any, worse: float = WORSE) -> None:
    """The root mean square error against float64 is at most ``worse`` times that of PyTorch, plus one rounding of the dtype."""
    for a, b, c in zip(found, theirs, exact, strict=True):
        ours, reference, wanted = data_of(a), data_of(b), data_of(c)
        assert (ours.shape, ours.dtype) == (reference.shape, reference.dtype)
        error, allowed = ((t.double() - wanted).square().mean().sqrt() for t in (ours, reference))
        rounding = torch.finfo(ours.dtype).eps / 8 * wanted.square().mean().sqrt()
        assert error <= worse * allowed + rounding, f"{error:.3g} against {allowed:.3g}"
