"""Fixtures of the GPU tests, which run in several processes side by side."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest
import torch

from tuned.calls.gru import run
from tuned.launching import residents

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def kernels_for_short_packed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve packed calls however short they are, so that short sequences test the kernels."""
    monkeypatch.setattr(run, "PACKED_US", -1e9)


@pytest.fixture(autouse=True)
def no_limit_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget launches that were too large for a test: later captures in its process would use other variants."""
    monkeypatch.setattr(residents, "_PLACES", {})
    monkeypatch.setattr(residents, "_SEEN", [])


@pytest.fixture(autouse=True)
def no_capture_is_left() -> Iterator[None]:
    """A capture without an end breaks its process's random numbers: look at the first test that fails here."""
    yield
    if torch.cuda.is_available():
        try:
            torch.empty(1, device="cuda").uniform_()
        except RuntimeError as error:
            pytest.fail(
                f"this test, or one before it in this process, left a capture of a CUDA graph without an end: {error}"
            )


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests that take tens of gigabytes of a GPU: one at a time over all processes, then the memory is freed."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
    with (folder / "much_memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
