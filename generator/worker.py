"""The process that measures on one GPU. It can be lost at any time: the parent notes why, starts another, goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from generator.problem import Problem

STAGE_SECONDS = 120.0  # making and checking the inputs of the largest problem takes a few seconds
TRIAL_SECONDS = 30.0  # a trial takes about 30 ms; one that compiles here first, a second
# After these the CUDA context is lost with everything in it: the process must go.
STICKY = ("illegal memory access", "misaligned address", "unspecified launch failure", "illegal instruction")


class WorkerLostError(Exception):
    """The worker died, hung or lost its GPU; the message says how. Start it again."""


class TrialFailedError(Exception):
    """The variant could not be measured, and the worker lives; the message says why."""


@dataclasses.dataclass
class Worker:
    """Start with ``start``; ask with the named methods; ``stop`` at the end."""

    device: int
    process: Any = None
    pipe: Connection | None = None

    def start(self) -> None:
        """A new process in its own process group, with its own CUDA context."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.device), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process and everything that it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None

    def stage(self, problem: Problem) -> Any:
        """Put a problem on the GPU; returns its generator.stage.Baselines."""
        return self._ask("stage", problem, STAGE_SECONDS)

    def measure(self, variant: Any) -> Any:
        """Check and time a variant of the staged problem; returns generator.stage.Measured."""
        return self._ask("measure", variant, TRIAL_SECONDS)

    def compare(self, variants: list[Any]) -> Any:
        """Time variants again, interleaved; returns one generator.bench.Timing each."""
        return self._ask("compare", variants, TRIAL_SECONDS * max(1, len(variants)))

    def environment(self) -> Any:
        """What the measurements are made with: device, versions, timing method."""
        return self._ask("environment", None, STAGE_SECONDS)

    def free_bytes(self) -> int:
        """Free memory of the GPU, once the problem staged before has been given up."""
        return int(self._ask("free_bytes", None, STAGE_SECONDS))

    def _ask(self, verb: str, argument: Any, seconds: float) -> Any:
        if self.process is None or self.pipe is None:
            raise WorkerLostError("the worker was not started")
        try:
            self.pipe.send((verb, argument))
            if not self.pipe.poll(seconds):
                self.stop()
                raise WorkerLostError(f"no answer in {seconds:g} s: it hung, and was killed")
            outcome, value = self.pipe.recv()
        except (EOFError, OSError, ValueError) as error:
            code = self.process.exitcode if self.process else None
            self.stop()
            raise WorkerLostError(f"the worker process died (exit code {code})") from error
        if outcome == "failed":
            raise TrialFailedError(value)
        if outcome == "lost":
            self.stop()
            raise WorkerLostError(value)
        return value


class _Server:
    """What the process holds: one staged problem at most."""

    def __init__(self, device: int) -> None:
        import torch  # noqa: PLC0415 - only here is CUDA touched

        torch.cuda.set_device(device)
        self.device = device
        self.staged: Any = None

    def environment(self, _: None) -> dict[str, Any]:
        from generator.environment import environment  # noqa: PLC0415

        return environment(self.device)

    def free_bytes(self, _: None) -> int:
        import torch  # noqa: PLC0415

        self._clear()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def stage(self, problem: Problem) -> Any:
        from triton.runtime import driver  # noqa: PLC0415

        from generator.stage import Stage  # noqa: PLC0415

        self._clear()
        self.staged = Stage(problem, driver.active.get_current_target())
        return self.staged.baselines()

    def measure(self, variant: Any) -> Any:
        return self.staged.measure(variant)

    def compare(self, variants: list[Any]) -> Any:
        return self.staged.compare(variants)

    def _clear(self) -> None:
        if self.staged is not None:
            self.staged.close()
            self.staged = None


def _serve(pipe: Connection, device: int) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    server = _Server(device)
    while True:
        try:
            verb, argument = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", getattr(server, verb)(argument)))
        except Exception as error:  # noqa: BLE001 - whatever a variant does, it is data here
            text = "".join(traceback.format_exception_only(error)).strip()
            sticky = any(sign in text for sign in STICKY)
            pipe.send(("lost" if sticky else "failed", text))
            if sticky:
                os._exit(1)
