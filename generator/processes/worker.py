"""The process that measures on one GPU. It may be lost at any time: the parent notes why, starts another and goes on."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

from ..measuring.bench import Timing
from ..measuring.stage import Baselines, Compared, Measured
from ..places import GENERATOR, cache_folder
from ..problem import Problem
from .forkserver import Child, LostError, fork_server

STAGE_SECONDS = 120.0  # making and checking the inputs of the largest problem takes a few seconds
TRIAL_SECONDS = 30.0  # a trial takes about 30 ms; one that compiles here first takes a second
MOST_STARTS = 3  # in a row without an answer: then the GPU is not coming back
PAUSE_SECONDS = 1.0  # before a start, if the last worker gave no answer: a driver that resets a GPU takes a moment
OLD_LOG_BYTES = 2**20  # a longer log of earlier workers is truncated
GPU_SERVER = f"{GENERATOR}.processes.serve:GpuServer"


class WorkerLostError(Exception):
    """The worker died, hung or lost its GPU; the message says how. Start it again."""


class WorkerGoneError(WorkerLostError):
    """Several workers in a row ended before they answered; the message says how the last one ended."""


class TrialFailedError(Exception):
    """The variant could not be measured, but the worker lives; the message says why."""


@dataclasses.dataclass
class Worker:
    """Call ``start`` first, then the methods that ask the process, and ``stop`` at the end.

    ``server`` names the class that answers in the process, made with ``device``; tests put in their own.
    """

    device: int
    server: str = GPU_SERVER
    stage_seconds: float = STAGE_SECONDS
    trial_seconds: float = TRIAL_SECONDS
    pause_seconds: float = PAUSE_SECONDS
    starts: int = 0  # in all
    _barren: int = 0  # starts since the last answer
    _asked: int = 0
    _child: Child | None = None
    _last: str = ""

    def start(self) -> None:
        """Start a new process in its own process group, with its own CUDA context; what it prints goes to its log.

        Raises:
            WorkerGoneError: the last MOST_STARTS processes gave no answer at all.
            WorkerLostError: the process could not be started.
        """
        self.stop()
        if self._barren >= MOST_STARTS:
            raise WorkerGoneError(f"{MOST_STARTS} workers in a row ended before they answered: {self._last}")
        if self._barren:
            time.sleep(self.pause_seconds)
        self._barren += 1
        self.starts += 1
        seen = re.sub(
            r"[^\w-]", "_", os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        )  # one of several tuners sees only its own GPU
        log = (cache_folder("logs") / f"worker-{seen}-{self.device}.log").open("a+b")
        if log.tell() > OLD_LOG_BYTES:
            log.truncate(0)
        try:
            self._child = fork_server().fork(self.server, (self.device,), log)
        except LostError as error:
            self._last = str(error)
            raise WorkerLostError(self._last) from None

    def stop(self) -> None:
        """End the process and everything that it started."""
        if self._child is not None:
            self._child.stop()
        self._child = None

    def stage(self, problem: Problem) -> Baselines:
        """Put a problem on the GPU; returns the baselines that its winner will be compared with."""
        return self._ask("stage", problem, self.stage_seconds, _is_baselines)  # type: ignore[no-any-return]

    def measure(self, variant: Any) -> Measured:
        """Check and time a variant of the staged problem."""
        return self._ask("measure", variant, self.trial_seconds, _is_measured)  # type: ignore[no-any-return]

    def compare(self, variants: list[Any]) -> list[Compared]:
        """Time variants again, interleaved; one Compared each."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == len(variants) and all(map(_is_compared, value))

        return self._ask("compare", variants, self.trial_seconds * max(1, len(variants)), fits)  # type: ignore[no-any-return]

    def environment(self) -> dict[str, Any]:
        """What the measurements are made with: device, versions, timing method."""
        return self._ask("environment", None, self.stage_seconds, _is_environment)  # type: ignore[no-any-return]

    def free_bytes(self) -> int:
        """Free memory of the GPU, once the problem staged before has been given up."""
        return self._ask("free_bytes", None, self.stage_seconds, _is_count)  # type: ignore[no-any-return]

    def _ask(self, verb: str, argument: Any, seconds: float, fits: Callable[[Any], bool]) -> Any:
        """The answer, if ``fits`` accepts its shape: a process that a variant has damaged may answer anything."""
        if self._child is None:
            raise WorkerLostError(self._last or "the worker was not started")
        self._asked += 1
        try:
            answer = self._child.ask((self._asked, verb, argument), seconds)
            match answer:
                case (self._asked, "done", value) if fits(value):
                    self._barren = 0
                    return value
                case (self._asked, "failed", str(why)):
                    self._barren = 0
                case (self._asked, "lost", str(why)):
                    raise self._child.lost(why)
                case _:
                    raise self._child.lost(f"it answered nonsense to {verb}, and was killed: {answer!r:.100}")
        except LostError as error:
            self._child = None
            self._last = str(error)
            raise WorkerLostError(self._last) from None
        raise TrialFailedError(why)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _is_timing(value: Any) -> bool:
    return isinstance(value, Timing) and _is_time(value.median_us) and _is_spread(value.spread_us)


def _is_spread(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def _is_measured(value: Any) -> bool:
    return isinstance(value, Measured) and _is_timing(value.timing) and _is_spread(value.error)


def _is_compared(value: Any) -> bool:
    return (
        isinstance(value, Compared) and bool(value.rounds) and _are_rounds(value.rounds) and _are_rounds(value.behind)
    )


def _are_rounds(value: Any) -> bool:
    """Whether a value is times, grouped by the memory that they were taken on."""
    return isinstance(value, tuple) and all(isinstance(v, tuple) and v and all(map(_is_time, v)) for v in value)


def _is_baselines(value: Any) -> bool:
    return (
        isinstance(value, Baselines)
        and all(map(_is_time, (value.copy_us, value.floor_us, value.eager_us)))
        and _is_count(value.bytes_moved)
        and isinstance(value.emptied, bool)
    )


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("device"), str)
