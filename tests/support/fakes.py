"""A worker and a compiler that need no GPU: the search runs on a known landscape."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import TYPE_CHECKING, Any

from generator.measuring.bench import TIMING, Timing
from generator.measuring.compile import Resources
from generator.measuring.stage import Baselines, Compared, Measured
from generator.processes.worker import TrialFailedError, WorkerLostError
from tuned.lookup.record import METHOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from generator.problem import Problem

ENVIRONMENT: dict[str, Any] = {
    "device": "test_gpu",
    "device_name": "Test GPU",
    "capability": 90,
    "multiprocessors": 132,
    "l2_bytes": 60_000_000,
    "memory_bytes": 2**37,
    "driver": "1.2.3",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "method": METHOD,
    "timing": TIMING,
}


def fine(problem: Problem, variant: Any) -> tuple[Resources, ...]:
    """A compiler's report without a complaint."""
    del problem
    return (Resources(registers=32, spill_bytes=0, shared_bytes=0, machine_code=repr(variant)),)


@dataclasses.dataclass
class FakeCompiler(concurrent.futures.Executor):
    """Answers at once with ``report`` of the variant."""

    report: Callable[[Problem, Any], Any] = fine
    asked: list[Any] = dataclasses.field(default_factory=list)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Take the place of compile_variant(problem, variant, architecture)."""
        del fn, kwargs
        problem, variant, _ = args
        self.asked.append(variant)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self.report(problem, variant))
        return future


@dataclasses.dataclass
class FakeWorker:
    """Measures by ``cost``, which may raise; remembers what it measured and staged."""

    cost: Callable[[Problem, Any], float]
    measured: list[Any] = dataclasses.field(default_factory=list)
    staged: list[str] = dataclasses.field(default_factory=list)
    starts: int = 0
    alive: bool = True
    free: int = 2**37
    problem: Any = None
    stop_after: int | None = None  # measurements after which a user presses Ctrl-C

    def start(self) -> None:
        """Start a new process."""
        self.starts += 1
        self.alive, self.problem = True, None

    def stop(self) -> None:
        """End the process."""
        self.alive = False

    def _must_live(self) -> None:
        if not self.alive:
            raise WorkerLostError("the worker was not started")

    def free_bytes(self) -> int:
        """Free memory."""
        self._must_live()
        return self.free

    def environment(self) -> dict[str, Any]:
        """Device and versions."""
        self._must_live()
        return ENVIRONMENT

    def stage(self, problem: Problem) -> Baselines:
        """Put a problem on the GPU."""
        self._must_live()
        self.problem = problem
        self.staged.append(problem.name)
        return Baselines(copy_us=9.0, floor_us=9.5, eager_us=95.0, bytes_moved=1_000_000)

    def measure(self, variant: Any) -> Measured:
        """Time a variant."""
        self._must_live()
        assert self.problem is not None, "measured before a problem was staged"
        if self.stop_after is not None and len(self.measured) >= self.stop_after:
            raise KeyboardInterrupt
        self.measured.append(variant)
        try:
            return Measured(Timing(self.cost(self.problem, variant), 0.01), 0.5)
        except WorkerLostError:
            self.alive = False
            raise

    def compare(self, variants: list[Any]) -> list[Compared]:
        """Time variants again."""
        self._must_live()
        return [Compared(((self.cost(self.problem, v),) * 2,) * 3) for v in variants]


__all__ = ["ENVIRONMENT", "FakeCompiler", "FakeWorker", "TrialFailedError", "WorkerLostError"]
