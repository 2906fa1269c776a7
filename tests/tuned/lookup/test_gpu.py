"""What a kernel can take, in a torch that lacks what this one has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tuned.lookup import gpu


def test_a_torch_that_cannot_tell_batches_of_gradients_takes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._functorch, "is_legacy_batchedtensor")
    spec = importlib.util.spec_from_file_location("gpu_of_another_torch", Path(gpu.__file__))
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.why_not_plain(torch.zeros(2)) is None
    assert gpu.why_not_plain(torch.zeros(2)) is None


def test_a_batch_of_gradients_is_not_plain() -> None:
    seen = []

    def look(grad: torch.Tensor) -> None:
        seen.append(gpu.why_not_plain(grad))

    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(look)
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [gpu.BATCHED]
