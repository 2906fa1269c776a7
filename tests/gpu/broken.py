"""Kernels that are broken on purpose, and a worker on a real GPU whose fastest variants launch them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from generator.measuring.stage import Stage
from generator.processes.serve import GpuServer
from tests.broken.server import ranked

if TYPE_CHECKING:
    from collections.abc import Callable

    from generator.problem import Problem

DEEDS = (
    "wrong result",
    "wrong result while timed",
    "past the end",
    "changed input",
    "out of memory",
    "far outside",
    "illegal access",
    "endless loop",
)
INPUT, PLACE = "x0", 77  # a tensor that variants must not write, and an element of that tensor and of the output
NOWHERE = 2**44  # elements from a tensor: beyond every address of a GPU's memory


@triton.jit
def write(pointer, offset, value):
    """Write one element at any address."""
    tl.store(pointer + offset, value)


@triton.jit
def wait(pointer):
    """Wait for a value that never comes."""
    value = tl.load(pointer, volatile=True)
    while value == 0:
        value = tl.load(pointer, volatile=True)


class BrokenGpuServer(GpuServer):
    """The real server with another stage."""

    def stage(self, problem: Problem) -> Any:
        from triton.runtime import driver  # noqa: PLC0415 - needs a GPU

        self._clear()
        self.staged = BrokenGpuStage(problem, driver.active.get_current_target())
        return self.staged.baselines()


class BrokenGpuStage(Stage):
    """Runs a variant's kernels on the probe; then each of the fastest variants (by fake costs) does its deed."""

    def launches(self, variant: Any) -> list[Callable[[], None]]:
        probe, *rest = super().launches(variant)
        place = ranked(self.problem).index(variant)

        def broken() -> None:
            probe()
            self.do(DEEDS[place])

        def wrong(launch: Callable[[], None], call: Any) -> None:
            launch()
            write[(1,)](call.out, PLACE, 3.0)

        if place < len(DEEDS) and DEEDS[place] == "wrong result while timed":
            timed = zip(rest, self.calls, strict=True)
            return [probe, *(functools.partial(wrong, launch, call) for launch, call in timed)]
        return [broken, *rest] if place < len(DEEDS) else [probe, *rest]

    def do(self, deed: str) -> None:
        call = self.probe
        match deed:
            case "wrong result":
                write[(1,)](call.out, PLACE, 3.0)
            case "past the end":
                write[(1,)](call.out, call.out.numel(), 3.0)
            case "changed input":
                write[(1,)](getattr(call, INPUT), PLACE, 3.0)
            case "out of memory":
                torch.empty(
                    2 * torch.cuda.get_device_properties(self.device).total_memory, dtype=torch.int8, device="cuda"
                )
            case "far outside":
                write[(1,)](self.wanted, PLACE, 3.0)
            case "illegal access":
                write[(1,)](call.out, NOWHERE, 3.0)
            case "endless loop":
                wait[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
