"""The tuner on one GPU of a Ray cluster: it tunes one problem after another, and tells the driver each trial at once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import ray

from ..problem import Problem
from ..processes.compiler import CompilerPool
from ..processes.worker import Worker, WorkerGoneError
from ..storage.journal import Held, Journal, Result, finished_key
from .run import Tools, Work, trouble, tuned
from .sampler import BATCH
from .search import AHEAD, Progress
from .stopwatch import Stopwatch

TELL_SECONDS = 0.25  # between two reports of progress, at least

Letter = tuple[Any, ...]  # (kind, its content...)
Tell = Callable[..., None]
# (GPU index, number of compilers, function to tell what it waits for) -> worker, compilers, environment to tune with.
MakeTools = Callable[
    [int, int, Callable[[str], None]], AbstractContextManager[tuple[Worker, CompilerPool, dict[str, Any]]]
]


def compilers(cores: int, gpus: int) -> int:
    """How many processes a tuner compiles with, on a host where so many GPUs may be tuned on.

    The larger of an even share of the cores and as many as one search keeps busy at most. A search wants AHEAD + BATCH
    variants compiled at once and then few for a while, so a tuner may use cores that the others leave idle. What that
    is worth is not known: docs/decisions/0012-what-tuning-costs.md.
    """
    return max(1, cores // max(1, gpus), min(cores, AHEAD + BATCH))


@dataclasses.dataclass(frozen=True)
class Told(Journal):
    """The journal of one problem on the tuner's side: it sends each entry to the driver, which has the storage."""

    sent: Held
    tell: Tell

    def recalled(self, *_: Any) -> tuple[dict[Any, Result], collections.Counter[Any]]:
        """What the driver held when the problem was given to this GPU."""
        return self.sent.known, self.sent.failures

    def add(self, _: Problem, __: dict[str, Any], variant: Any, result: Result, digests: dict[str, str]) -> None:
        """Send a trial."""
        self.tell("trial", variant, result, digests)

    def finished(self, _: Problem, environment: dict[str, Any], settings: str) -> dict[str, Any] | None:
        """How the search ended before, as the driver knows it."""
        return self.sent.ended.get(finished_key(environment, settings))

    def finish(self, _: Problem, __: dict[str, Any], settings: str, winner: dict[str, Any]) -> None:
        """Send how the search ended."""
        self.tell("finish", settings, winner)


class Tuner:
    """What a Ray actor with one GPU does. Its methods yield letters: the driver gets a trial while the next one is measured."""

    def start(self, make_tools: MakeTools) -> Iterator[Letter]:
        """Start the worker and the compilers, once. ("said", text)*, then ("ready", ...) or ("failed", why)."""
        here = ray.get_runtime_context()
        (index,) = here.get_accelerator_ids()["GPU"]
        resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here.get_node_id())
        count = compilers(int(resources.get("CPU", 1)), int(resources["GPU"]))
        self.stack = contextlib.ExitStack()

        def work(tell: Tell) -> None:
            made = make_tools(0, count, lambda text: tell("said", text))  # 0: Ray lets this process see only its GPU
            self.worker, self.compiler, self.environment = self.stack.enter_context(made)
            tell("ready", socket.gethostname(), index, self.environment, count)

        yield from letters(work)

    def tune(self, work: Work, held: Held) -> Iterator[Letter]:
        """Tune a problem. ("trial", ...), ("finish", ...) and ("progress", ...), then ("done", outcome, seconds) or ("failed", why)."""

        def all_of_it(tell: Tell) -> None:
            stopwatch, last = Stopwatch(), 0.0

            def report(progress: Progress) -> None:
                nonlocal last
                if progress.note or time.monotonic() - last > TELL_SECONDS:
                    last = time.monotonic()
                    tell("progress", dataclasses.replace(progress))

            tools = Tools(self.worker, self.compiler, Told(held, tell), self.environment)
            tell("done", tuned(work, tools, stopwatch, report), stopwatch.seconds)

        yield from letters(all_of_it)


def letters(work: Callable[[Tell], None]) -> Iterator[Letter]:
    """Run ``work`` in a thread and yield the letters that it tells; it waits until the letter before is taken."""
    told: queue.Queue[Letter | None] = queue.Queue(maxsize=1)
    defects: list[BaseException] = []

    def run() -> None:
        try:
            work(lambda *letter: told.put(letter))
        except Exception as error:  # noqa: BLE001 - raised below
            why = f"the GPU is lost: {error}" if isinstance(error, WorkerGoneError) else trouble(error)
            if why is None:
                defects.append(error)
            else:
                told.put(("failed", why))
        told.put(None)

    threading.Thread(target=run, daemon=True).start()
    while (letter := told.get()) is not None:
        yield letter
    if defects:
        raise defects[0]
