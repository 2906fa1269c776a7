"""PyTorch's libraries of products (cuBLAS) and of recurrences (cuDNN), set up before a CUDA graph needs them.

PyTorch sets each library up at its first use in a thread, which fails while a graph is captured. So callers warm up. But a graph
may need a library that the warm-up calls did not use: cuBLAS for the products beside a kernel, where cuDNN or kernels alone served
the calls; or cuDNN, where kernels did.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from tuned.launching.plan import listeners

_THREAD = threading.local()  # ``done``: what a thread has set up, and for which GPU
_WITH_GRADIENTS: set[tuple[Any, int]] = set()  # the same for autograd's thread, of which a process has one for each GPU
_LOCK = threading.Lock()


def set_up(device: torch.device, *, gradients: bool = False) -> None:
    """Set the library of products up on a GPU for this thread, and with ``gradients`` for autograd's thread.

    It does nothing during a capture, where it is too late, nor under dispatch modes, which would see operators that nobody called.
    If it fails, say for want of memory, a call that needs no product goes on; the next call tries again.
    """
    _set_up(_products, device, gradients)


def set_up_recurrences(device: torch.device, *, gradients: bool = False) -> None:
    """``set_up`` of the library of recurrences. Once, it takes some 100 ms and 28 MiB of a GPU: only where a graph may need it."""
    if torch.backends.cudnn.enabled:
        _set_up(_recurrences, device, gradients)


def _set_up(library: Callable[[torch.device], None], device: torch.device, gradients: bool) -> None:  # noqa: FBT001
    if device.type != "cuda":
        return
    one, mine = (library, device.index), _THREAD.__dict__.setdefault("done", set())
    missing = gradients and one not in _WITH_GRADIENTS
    if (one in mine and not missing) or torch.cuda.is_current_stream_capturing() or listeners():
        return
    with torch.cuda.device(device), contextlib.suppress(RuntimeError):
        library(device)
        mine.add(one)
        if missing:
            with _LOCK, torch.enable_grad():
                leaf = torch.zeros((), device=device, requires_grad=True)
                torch.autograd.grad(_SetsUp.apply(leaf, library), leaf)  # type: ignore[no-untyped-call]
                _WITH_GRADIENTS.add(one)


def _products(device: torch.device) -> None:
    # The first launch in a thread gives the thread a context, without which the library warns.
    torch.zeros((), device=device)
    torch.cuda.current_blas_handle()


def _recurrences(device: torch.device) -> None:
    """Run one step of one unit. The weights lie in memory as cuDNN wants them; otherwise PyTorch warns."""
    numbers = torch.zeros(14, device=device)
    weights = [numbers[:3].view(3, 1), numbers[3:6].view(3, 1), numbers[6:9], numbers[9:12]]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.gru(numbers[12:13].view(1, 1, 1), numbers[13:].view(1, 1, 1), weights, True, 1, 0.0, False, False, False)  # noqa: FBT003


class _SetsUp(torch.autograd.Function):
    """Sets a library up in the thread that computes gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, library: Any) -> torch.Tensor:
        ctx.library = library
        return torch.zeros_like(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.library(grad.device)
        return grad, None
