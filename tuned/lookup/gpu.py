"""What dispatch must know about a call's device, and when no kernel can serve it."""

from __future__ import annotations

import functools
import importlib.util

import torch

from tuned.lookup.asked import asked
from tuned.lookup.lookup import Gpu
from tuned.lookup.record import device_slug


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is not imported here."""
    return importlib.util.find_spec("triton") is not None


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a tensor's device; or the one that tuned.explain is asked about."""
    return asked() or _gpu_here(device)


@functools.cache
def _gpu_here(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    # AMD's version numbers mean something else: 0 disables what needs an NVIDIA architecture.
    capability = 0 if torch.version.hip else properties.major * 10 + properties.minor
    return Gpu(device_slug(properties.name), capability, properties.multi_processor_count, properties.name)


PLAIN = (torch.Tensor, torch.nn.Parameter)  # the types of tensors that have no rules of their own


LAZY = "a tensor has the negative or conjugate bit, which only PyTorch's own operators resolve"

BATCHED = "a tensor is a batch of gradients, which torch.autograd.grad(..., is_grads_batched=True) makes and which has no memory"
# Torch has no public way to ask. A torch without this one is taken for one without such tensors.
_is_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda _: False)  # noqa: SLF001


def why_not_plain(t: torch.Tensor) -> str | None:
    """Why a kernel cannot take a tensor, or None: a kernel sees memory alone, so not the rules of a subclass."""
    if type(t) not in PLAIN:
        return f"{type(t).__name__} is a subclass of Tensor with rules of its own"
    return BATCHED if _is_batched(t) else None


def why_eager(x: torch.Tensor, supported_dtype: bool) -> str | None:  # noqa: FBT001
    """Why eager PyTorch must serve a tensor, or None if a kernel can take it."""
    if (reason := why_not_plain(x)) is not None:
        return reason
    if not x.is_cuda and asked() is None:
        return f"the tensors are on {x.device.type}, the kernels are for GPUs"
    if not supported_dtype:
        return f"no kernel takes {x.dtype}"
    return None if has_triton() or asked() is not None else "Triton is not installed: pip install triton"
