"""Worker processes without a GPU whose variants are broken on purpose: real tensors, real checks, a fake stopwatch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from generator.measuring.bench import Timing
from generator.measuring.stage import Baselines, Compared, Measured, Stage
from generator.places import cache_folder
from generator.processes import channel
from generator.processes.forkserver import PRELOAD
from generator.searching.pool import legal_pool
from generator.selection import problem_named
from tests.support.fakes import ENVIRONMENT
from tests.support.processes import HUNG, hang

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from generator.problem import Problem

REPLAYS = 3
FOREIGN_US = 2.0
WARM = (*PRELOAD, "tests.broken.warm")  # the modules that a fork server of tests imports
COPY = problem_named("gru_cell_dreamer_200_16")
_WIDE = problem_named("gru_cell_1024_inplace_64")
INPLACE = dataclasses.replace(  # as many variants, and a CPU takes a 25th of the time
    _WIDE, name="gru_cell_200_inplace_64", spec=dataclasses.replace(_WIDE.spec, hidden=200, inputs=(200,))
)
PRINTED = b"\xff\x00garbage \x1b[31mthat no terminal wants\n"
# What each of the fastest variants does, the fastest first. A variant that is not caught would win.
DEEDS = (
    "illegal access",
    "killed",
    "endless loop",
    "endless loop that prints",
    "out of memory",
    "out of memory for good",
    "wrong result",
    "not a number",
    "past the end",
    "before the start",
    "far outside",
    "changed input",
    "exits",
    "interrupts",
    "garbage in the pipe",
    "half a message",
    "a message of another shape",
    "a message of another class",
    "no time",
    "raises",
    "changed input while timed",
    "wrong result while timed",
)


def cost(variant: Any) -> float:
    """Microseconds, different for each variant of a pool."""
    tile = math.log2(variant.block_hidden) + 1.1 * math.log2(variant.block_batch)
    return round(5 + tile + 0.07 * variant.num_warps, 4)


@functools.lru_cache
def ranked(problem: Problem) -> tuple[Any, ...]:
    """The pool of a problem, the fastest first."""
    return tuple(sorted(legal_pool(problem, 90).variants, key=cost))


def deed_of(problem: Problem, variant: Any) -> str:
    """What is wrong with a variant; "" for most."""
    place = ranked(problem).index(variant)
    return DEEDS[place] if place < len(DEEDS) else ""


class CpuServer:
    """Measures right variants, as the server for a GPU does."""

    def __init__(self, device: int) -> None:
        torch.set_num_threads(1)  # tests run side by side
        self.device = device
        self.staged: Any = None
        self.dead = self.full = False

    def environment(self, _: None) -> dict[str, Any]:
        return ENVIRONMENT

    def free_bytes(self, _: None) -> int:
        return 2**37

    def stage(self, problem: Problem) -> Baselines:
        self.staged = CpuStage(problem, self)
        ranked(problem)  # fill the cache now: enumerating the pool takes longer than a trial may
        return Baselines(9.0, 9.5, 95.0, 1_000_000)

    def measure(self, variant: Any) -> Measured:
        measured: Measured = self.staged.measure(variant)
        return measured

    def compare(self, variants: list[Any]) -> list[Compared]:
        compared: list[Compared] = self.staged.compare(variants)
        return compared

    def recover(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.")
        if self.staged is not None:
            self.staged.verify()

    def do(self, deed: str, call: Any) -> None:
        """Something that a right variant does not do."""


class BrokenServer(CpuServer):
    """Has a deed for each of the fastest variants."""

    def measure(self, variant: Any) -> Any:
        deed = deed_of(self.staged.problem, variant)
        match deed:
            case "a message of another shape":
                return {"median_us": 1.0}
            case "a message of another class":
                return Measured(torch.ones(1), 0.5)  # type: ignore[arg-type]
            case "no time":
                return Measured(Timing(math.nan, 0.0), 0.5)
        os.write(1, PRINTED)  # every variant also prints garbage
        return super().measure(variant)

    def do(self, deed: str, call: Any) -> None:  # noqa: PLR0912 - one a deed
        match deed:
            case "illegal access":
                self.dead = True
                raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "endless loop":
                hang()
            case "endless loop that prints":
                while True:
                    os.write(2, f"{HUNG} again and again\n".encode())
                    time.sleep(0.01)
            case "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB.")
            case "out of memory for good":
                self.full = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB.")
            case "wrong result":
                call.out.view(-1)[0] += 1
            case "not a number":
                call.out.fill_(math.nan)
            case "past the end":
                around(call.out)[-1] = 1
            case "before the start":
                around(call.out)[0] = 1
            case "far outside":
                self.staged.wanted.view(-1)[-1] += 1e-3
            case "changed input":
                call.x0.view(-1)[0] += 1
            case "changed input while timed":
                call.x0.view(-1)[0] += float(call is not self.staged.probe)
            case "wrong result while timed":
                call.out.view(-1)[0] += float(call is not self.staged.probe)
            case "exits":
                sys.exit(7)
            case "interrupts":
                raise KeyboardInterrupt
            case "garbage in the pipe":
                for end in pipes():
                    os.write(end, os.urandom(64))
                signal.pause()
            case "half a message":
                for end in pipes():
                    os.write(end, channel.HEAD.pack(channel.MARK, 1000) + b"and no more")
                signal.pause()
            case "raises":
                raise ValueError("this variant cannot be launched")


class NeverStarts(CpuServer):
    """Fails before the first answer, every time."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        raise RuntimeError("No CUDA GPUs are available")


class DiesStaging(CpuServer):
    """Dies whenever it stages the first problem of the family."""

    def stage(self, problem: Problem) -> Baselines:
        if problem == COPY:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().stage(problem)


class BreaksComparing(CpuServer):
    """Its process dies when the fastest variant is timed again."""

    def compare(self, variants: list[Any]) -> list[Compared]:
        if ranked(self.staged.problem)[0] in variants:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compare(variants)


class HasChildren(CpuServer):
    """Starts a child process, as compilers start assemblers, and then hangs."""

    def measure(self, variant: Any) -> Any:
        del variant
        os.write(1, f"started {subprocess.Popen(['sleep', '3600']).pid} from {os.getpid()}\n".encode())
        hang()


class CpuStage(Stage):
    """A stage on the CPU: PyTorch stands for its kernels, and its clock returns the made-up costs."""

    def __init__(self, problem: Problem, server: CpuServer) -> None:
        self.server = server
        super().__init__(problem, None, "cpu", self.stopwatch)

    def launches(self, variant: Any) -> list[Callable[[], None]]:
        return [functools.partial(self.run, variant, call) for call in (self.probe, *self.calls)]

    def run(self, variant: Any, call: Any) -> None:
        # In float32: bfloat16 on a CPU rounds after every step.
        tensors = (*call.segments, call.h, call.weight_ih, call.weight_hh, call.bias_ih, call.bias_hh)
        call.out.copy_(torch.gru_cell(*(t.float() for t in tensors)))
        self.server.do(deed_of(self.problem, variant), call)

    def stopwatch(
        self,
        thunks: Sequence[Any],
        restore: Callable[[], None] | None = None,
        poison: Callable[[], None] | None = None,
        **_: Any,
    ) -> Timing:
        """Run thunks as device_time does, and assert that inputs which an earlier run has overwritten are never timed."""
        if thunks == [self.foreign]:
            return Timing(FOREIGN_US, 0.01)
        behind = self.foreign in (first := thunks[0].args[0] if isinstance(thunks[0].args[0], list) else [])
        if poison is not None:
            thunks[0]()
            poison()
        for _ in range(REPLAYS):
            if restore is not None:
                restore()
            for seed, (thunk, call) in enumerate(zip(thunks, self.calls, strict=True)):
                if self.problem.spec.inplace:
                    made = self.work.inputs(self.problem.spec, self.problem.size, "cpu", seed)
                    assert torch.equal(call.out, made.out), "timed on what an earlier run has overwritten"
                thunk()
        return Timing(cost(first[1].args[0]) + FOREIGN_US if behind else cost(thunks[0].args[0]), 0.01)


def around(out: Any) -> Any:
    """A guarded tensor with one element before its start and one past its end."""
    return out.as_strided((out.numel() + 2,), (1,), out.storage_offset() - 1)


def leave_a_mark() -> None:
    """A function that a fork server should call before it is asked to fork."""
    (cache_folder("marks") / "mark").touch()


def pipes() -> list[int]:
    """The file descriptors of all sockets of this process."""
    ends = []
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the folder is closed by now
            if str(path.readlink()).startswith("socket:"):
                ends.append(int(path.name))
    return ends
