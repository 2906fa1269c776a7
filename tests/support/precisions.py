"""PyTorch's settings of the precision of float32 products, as a program changes them between two calls."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def other_gemms() -> Iterator[None]:
    """Inside, GEMMs are in TF32 if they were in IEEE precision, and the reverse."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = not before
    try:
        yield
    finally:
        matmul.allow_tf32 = before
