"""PyTorch's library of products (cuBLAS), set up before a CUDA graph needs it.

PyTorch sets it up at the first product of each thread, which fails while a graph is captured. So callers warm up. But in a graph another
form may serve than in the calls that warmed up: products of the library and a kernel, where cuDNN or kernels alone served before.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tuned.launching.plan import listeners

_WITH_GRADIENTS: set[int] = set()  # GPUs whose thread of gradients has it; there is one of a process
_LOCK = threading.Lock()


def set_up(device: torch.device, *, gradients: bool = False) -> None:
    """Set the library up on a GPU for this thread, and for that of ``gradients``; nothing in a capture, where it is too late."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
        index = torch.cuda.current_device()
        if (
            not gradients or index in _WITH_GRADIENTS or listeners()
        ):  # a mode that listens would be told of a call that nobody made
            return
        with _LOCK, torch.enable_grad():
            leaf = torch.empty((), device=device, requires_grad=True)
            torch.autograd.grad(_SetsUp.apply(leaf), leaf)  # type: ignore[no-untyped-call]
            _WITH_GRADIENTS.add(index)


class _SetsUp(torch.autograd.Function):
    """Sets the library up in the thread that computes gradients."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda.current_blas_handle()
        return grad
