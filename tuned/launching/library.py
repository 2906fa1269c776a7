"""PyTorch's library of products (cuBLAS), set up before a CUDA graph needs it.

PyTorch sets it up at the first product of each thread, which fails while a graph is captured. So callers warm up. But in a graph another
form may serve than in the calls that warmed up: products of the library and a kernel, where cuDNN or kernels alone served before.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from tuned.launching.plan import listeners

_THREAD = threading.local()  # ``gpus``: for which a thread has it
_WITH_GRADIENTS: set[int] = set()  # GPUs whose thread of gradients has it; there is one of a process
_LOCK = threading.Lock()


def set_up(device: torch.device, *, gradients: bool = False) -> None:
    """Set the library up on a GPU for this thread, and for that of ``gradients``.

    Nothing in a capture, where it is too late, nor under modes that listen, which would be told of operators that nobody called. Where
    it cannot be, say for want of memory, a call that needs no product goes on; it is tried again at the next.
    """
    if device.type != "cuda":
        return
    index, mine = device.index, _THREAD.__dict__.setdefault("gpus", set())
    missing = gradients and index not in _WITH_GRADIENTS
    if (index in mine and not missing) or torch.cuda.is_current_stream_capturing() or listeners():
        return
    with torch.cuda.device(device), contextlib.suppress(RuntimeError):
        # The first launch of a thread gives it a context, without which the library warns.
        torch.zeros((), device=device)
        torch.cuda.current_blas_handle()
        mine.add(index)
        if missing:
            with _LOCK, torch.enable_grad():
                leaf = torch.zeros((), device=device, requires_grad=True)
                torch.autograd.grad(_SetsUp.apply(leaf), leaf)  # type: ignore[no-untyped-call]
                _WITH_GRADIENTS.add(index)


class _SetsUp(torch.autograd.Function):
    """Sets the library up in the thread that computes gradients."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found = torch.zeros_like(grad)
        torch.cuda.current_blas_handle()
        return found
