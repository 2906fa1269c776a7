"""Products of bfloat16 matrices in float32, which PyTorch has on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tuned.calls.gru import factors


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Products of bfloat16 matrices in float32 on a CPU; the shapes of those that were made."""
    made: list[tuple[Any, ...]] = []

    def product(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor | None) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        made.append((tuple(a.shape), tuple(b.shape)))
        found = a.float() @ b.float()
        return found if to is None else found + to

    monkeypatch.setattr(factors, "_product", product)
    return made
