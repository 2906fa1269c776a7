"""Choose where kernels run before Triton is imported: on the GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import os

import pytest
import torch

# @triton.jit reads this when a kernel is defined, so it must be set before any test module imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu, gpu_sample or sanitizer are skipped, with the reason, where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if any(item.get_closest_marker(name) for name in ("gpu", "gpu_sample", "sanitizer")):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))
