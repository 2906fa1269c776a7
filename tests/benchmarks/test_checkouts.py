"""Benchmarks of other projects, which need checkouts of these: what is said where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import kernelbench, tritonbench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("benchmark", "repository"),
    [(kernelbench, "ScalingIntelligence/KernelBench"), (tritonbench, "pytorch-labs/tritonbench")],
)
def test_what_is_no_checkout_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, benchmark: Any, repository: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([str(tmp_path)]) == 1
    assert "PyTorch sees none here" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert benchmark.main([str(tmp_path)]) == 1
    assert f"give a clone of github.com/{repository}" in capsys.readouterr().out
