"""The loop of a forked process: it answers one request after the other, whatever a variant does to it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import traceback
from typing import Any

from ..problem import Problem
from .channel import Channel, ClosedError

TEXT_CHARACTERS = 1000  # kept of an error: a compiler's may hold a whole program


def serve_with(channel: Channel, name: str, arguments: tuple[Any, ...]) -> None:
    """Answer (number, verb, argument) with the methods of the class ``name`` ("module:name") until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle
    module, _, attribute = name.partition(":")
    server = getattr(importlib.import_module(module), attribute)(*arguments)
    with contextlib.suppress(ClosedError):
        while True:
            number, verb, argument = channel.receive()
            channel.send((number, *_answer(server, verb, argument)))


def _answer(server: Any, verb: str, argument: Any) -> tuple[str, Any]:
    """("done", result), ("failed", why) or ("lost", why); after "lost" this process is of no more use."""
    try:
        return "done", getattr(server, verb)(argument)
    except Exception as error:  # noqa: BLE001 - whatever a variant does, it is data here
        text = _text(error)
    # Recover outside of the handler: in it the error's traceback would still hold the tensors of the trial.
    try:
        server.recover()
    except Exception as error:  # noqa: BLE001 - as above
        second = _text(error)
        return "lost", text if second in text else f"{text}; then {second}"
    return "failed", text


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:TEXT_CHARACTERS]


class Caller:
    """What a compiler's process answers with: it calls functions."""

    def call(self, request: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
        """The result of function(*arguments, **keywords)."""
        function, arguments, keywords = request
        return function(*arguments, **keywords)

    def recover(self) -> None:
        """Do nothing: no state is kept from one call to the next."""


class GpuServer:
    """Measures on one GPU; holds one staged problem at most."""

    def __init__(self, device: int) -> None:
        import torch  # noqa: PLC0415 - 1 s, which a Caller need not wait for

        torch.cuda.set_device(device)
        self.device = device
        self.staged: Any = None

    def environment(self, _: None) -> dict[str, Any]:
        """The GPU and the versions that measurements are made with."""
        from ..measuring.environment import environment  # noqa: PLC0415

        return environment(self.device)

    def free_bytes(self, _: None) -> int:
        """Free memory of the GPU, once the staged problem has been given up."""
        import torch  # noqa: PLC0415 - as above

        self._clear()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def stage(self, problem: Problem) -> Any:
        """Put a problem on the GPU; returns its Baselines."""
        from triton.runtime import driver  # noqa: PLC0415

        from ..measuring.stage import Stage  # noqa: PLC0415

        self._clear()
        self.staged = Stage(problem, driver.active.get_current_target())
        return self.staged.baselines()

    def measure(self, variant: Any) -> Any:
        """Check and time a variant."""
        return self.staged.measure(variant)

    def compare(self, variants: list[Any]) -> Any:
        """Time variants again, interleaved, on other memory too."""
        return self.staged.compare(variants)

    def recover(self) -> None:
        """After a failure, give its memory back and check that the GPU still works and the staged problem is unharmed.

        After an illegal access every CUDA call fails, also a launch: then this raises, and the process has to end.
        """
        import torch  # noqa: PLC0415 - as above

        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        # As much memory as the smallest problem takes: after running out of memory it must be free again.
        torch.ones(2**20, device=f"cuda:{self.device}").sum().item()
        if self.staged is not None:
            self.staged.verify()

    def _clear(self) -> None:
        if self.staged is not None:
            self.staged.close()
            self.staged = None
