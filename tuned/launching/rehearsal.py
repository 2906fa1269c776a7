"""Calls that note what they would launch instead of launching it: tuned.warm listens to them.

While a thread listens, each launch that may have to be compiled is noted, and PyTorch's operators serve its call: a user's
model goes on with true values. Plans launch as always, since their kernels are compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from tuned.families.launch import Launch


class NotedError(RuntimeError):
    """A launch was not made, but noted, or does not compile: PyTorch's operators must serve the call. No user sees this error."""


class Pointer:
    """Stands for a tensor in a launch that is only compiled, and keeps no memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._address, self._bytes = tensor.dtype, tensor.data_ptr(), tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """The address: Triton asks whether 16 divides it."""
        return self._address

    def ptr_range(self) -> int:
        """The bytes of the storage: on AMD, Triton asks whether they are below 2**31."""
        return self._bytes


@dataclasses.dataclass(frozen=True)
class Noted:
    """A launch that was noted; it holds no tensors."""

    function: Any  # the @triton.jit function
    launch: Launch  # with a Pointer for each tensor
    device: int


@dataclasses.dataclass
class Heard:
    """What a thread noted while it listened."""

    gradients: bool = False  # note what gradients of the calls would launch, too
    launches: list[Noted] = dataclasses.field(default_factory=list)
    left: Counter[str] = dataclasses.field(default_factory=Counter)  # calls that PyTorch's operators serve, with why

    def note(self, function: Any, launch: Launch, device: int | None = None) -> None:
        """Note a launch, by default on the device of its tensors."""
        tensors = [value for value in launch.arguments if isinstance(value, torch.Tensor)]
        pointers = tuple(Pointer(v) if isinstance(v, torch.Tensor) else v for v in launch.arguments)
        launch = dataclasses.replace(launch, arguments=pointers)
        self.launches.append(Noted(function, launch, tensors[0].get_device() if device is None else device))


class _Here(threading.local):
    heard: Heard | None = None  # a default of the class: to find that a thread lacks an attribute takes longer


HERE = _Here()


def listening() -> Heard | None:
    """Where this thread notes launches; None if it launches, as always during the capture of a CUDA graph, which keeps what runs."""
    heard = HERE.heard
    if heard is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None
    return heard


@contextlib.contextmanager
def listen(heard: Heard | None) -> Iterator[None]:
    """Inside, calls of this thread note their launches; with None they launch, as they do outside."""
    before, HERE.heard = HERE.heard, heard
    try:
        yield
    finally:
        HERE.heard = before


def note_left(call: str, x: torch.Tensor, why: str) -> None:
    """Note, if this thread listens, that PyTorch's operators serve a call of x."""
    if (heard := listening()) is not None:
        heard.left[f"{call} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}: {why}"] += 1
