"""What GPU tests share, which run in several processes side by side."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest
import torch

from tuned.calls.gru import run

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def kernels_for_short_packed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences test them."""
    monkeypatch.setattr(run, "PACKED_US", -1e9)


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For a test that takes tens of gigabytes of a GPU: one runs at a time, in whatever process, and gives them back."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with (folder / "much_memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
