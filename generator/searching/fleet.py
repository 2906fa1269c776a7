"""Tune on several GPUs of one host: one tuner process each, all sharing the problems through the storage."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

from ..disk import disk_trouble
from ..problem import Problem
from ..processes.worker import WorkerLostError
from ..storage.backends import LOST_STORAGE, StorageError, lost_storage, opened_storage
from ..storage.record import record_path
from .queues import MixedDevicesError, Shared, owner_name
from .run import Orders, Renderer, Run, Tools, nothing, tune_all
from .sampler import BATCH
from .search import AHEAD, Outcome, Progress

STOP_SECONDS = 20.0  # for the tuners to give back what they hold after Ctrl-C; then they are killed
AGAIN_SECONDS = 5.0  # Python drops a KeyboardInterrupt that falls into a destructor or a callback: it is sent again
TICK_SECONDS = 1.0  # between looks at whether all tuners live
START = "spawn"  # a tuner may have CUDA in it, which does not survive a fork


class FleetError(Exception):
    """No tuner is left, and problems are; the message says what each died of."""


@dataclasses.dataclass(frozen=True)
class Seat:
    """One tuner of a host."""

    gpu: int
    compilers: int  # processes that it compiles with
    storage: str | None = None  # URL; None is the journal file
    owner: str = ""  # what the others call it


# What tuning on a GPU takes, given the seat and whom to tell what it waits for.
MakeTools = Callable[[Seat, Callable[[str], None]], AbstractContextManager[Tools]]


def seats(gpus: list[int], processes: int, storage: str | None) -> list[Seat]:
    """One seat a GPU. Each compiles with an even part of the cores, and with as many as one search keeps busy at most.

    A search wants AHEAD + BATCH variants compiled at once and then few for a while, so a tuner may use cores that the others
    leave idle. What that is worth is not known: docs/decisions/0012-what-tuning-costs.md.
    """
    share = max(1, processes // max(1, len(gpus)), min(processes, AHEAD + BATCH))
    return [Seat(gpu, share, storage, owner_name(gpu)) for gpu in gpus]


def trouble(error: BaseException) -> str | None:
    """The sentence for what a tuner may meet in its GPU, its storage or its disk; None if it is a defect."""
    if isinstance(error, StorageError | MixedDevicesError | WorkerLostError):
        return str(error)
    if lost_storage(error):
        return LOST_STORAGE
    return disk_trouble(error) if isinstance(error, OSError) else None


# --- in the process of a tuner ---------------------------------------------------------------------------------------


def _serve(pipe: Connection, seat: Seat, orders: Orders, make_tools: MakeTools) -> None:
    os.setpgrp()  # Ctrl-C reaches the parent, which tells all tuners
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run(orders.problems)

    parent = multiprocessing.parent_process()

    def tell(*message: Any) -> None:
        if parent is not None and os.getppid() != parent.pid:  # it is dead: end as at Ctrl-C
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # it died just now
            pipe.send(message)

    try:
        with make_tools(seat, lambda text: tell("said", f"GPU {seat.gpu}: {text}")) as tools:
            tell("ready", tools.environment)
            tune_all(
                run,
                tools,
                dataclasses.replace(orders, render=nothing),
                queue=orders.queue(tools.journal.storage, tools.environment, seat.owner),
                report=lambda index, progress: tell("progress", index, progress),
                done=lambda problem, outcome: tell("done", problem, outcome),
            )
        tell("end", run, "interrupted" if run.interrupted else "done")
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            tell("end", run, "interrupted")
    except Exception as error:
        why = trouble(error)
        if why is None:
            raise
        tell("failed", why)


# --- in the parent ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Tuner:
    """A tuner as its parent sees it."""

    seat: Seat
    process: Any
    pipe: Connection
    problem: str = ""  # that it works on
    over: str | None = None  # why it ended; "" for of its own accord


class Fleet:
    """The tuners of a host."""

    def __init__(  # noqa: PLR0913 - what to tell whom
        self,
        run: Run,
        orders: Orders,
        *,
        started: Callable[[Seat, dict[str, Any]], None],
        report: Callable[[int, Progress, int], None],
        done: Callable[[Problem, Outcome | str], None],
        say: Callable[[str], None],
    ) -> None:
        """``report`` is given how many problems are done, the progress of the one at hand, and its GPU."""
        self.run, self.orders = run, orders
        self._started, self._report, self._done, self._say = started, report, done, say
        self._tuners: list[_Tuner] = []
        self._environment: dict[str, Any] = {}
        self._skipped: dict[str, str] = {}
        self._kernels = Renderer(orders.render, run.stopwatch)

    def tune(self, places: list[Seat], make_tools: MakeTools) -> None:
        """Tune all problems; KeyboardInterrupt ends it early, with what was done kept.

        Raises:
            FleetError: every tuner failed.
        """
        context: Any = multiprocessing.get_context(START)
        try:
            for seat in places:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(theirs, seat, self.orders, make_tools), name=seat.owner)
                process.start()
                theirs.close()
                self._tuners.append(_Tuner(seat, process, ours))
            self._listen()
        except KeyboardInterrupt:
            self.run.interrupted = True
            self._stop()
        finally:
            self._kill()
            self._collect()
            self._kernels.now()
        failures = self._failures()
        if failures and not self.run.winners:
            raise FleetError(failures)

    def _failures(self) -> str:
        """What tuners died of, each reason once."""
        return "; ".join(sorted({t.over for t in self._tuners if t.over}))

    def _listen(self, end: float = math.inf) -> None:
        """Hear all tuners until each has ended, or until ``end`` (time.monotonic)."""
        while any(t.over is None for t in self._tuners) and time.monotonic() < end:
            living = [t for t in self._tuners if t.over is None]
            ready = multiprocessing.connection.wait([t.pipe for t in living], TICK_SECONDS)
            for tuner in living:
                # A process that the dead one forked may hold its end of the pipe open.
                if tuner.pipe in ready or not tuner.process.is_alive():
                    self._hear(tuner)

    def _hear(self, tuner: _Tuner) -> None:
        try:
            message = tuner.pipe.recv() if tuner.pipe.poll() else None
        except (EOFError, OSError):
            message = None
        match message:
            case ("ready", environment):
                self._environment = environment
                self._started(tuner.seat, environment)
            case ("said", text):
                self._say(text)
            case ("progress", index, progress):
                tuner.problem = progress.problem
                self._report(index, progress, tuner.seat.gpu)
            case ("done", problem, outcome):
                tuner.problem = ""
                self._keep(problem, outcome)
            case ("end", theirs, how):
                tuner.over = ""
                self._skipped |= theirs.skipped
                self.run.stopwatch.add(theirs.stopwatch.seconds)
                self.run.interrupted |= how == "interrupted"
            case ("failed", why):
                tuner.over = why
                if any(t.over is None for t in self._tuners):
                    self._say(f"GPU {tuner.seat.gpu} is left out: {why}")
            case _:
                self._bury(tuner)

    def _keep(self, problem: Problem, outcome: Outcome | str) -> None:
        if isinstance(outcome, str):
            self._skipped[problem.name] = outcome
        else:
            self.run.outcomes[problem.name] = outcome
            self.run.record = record_path(self._environment["device"], self.orders.folder)
            self._kernels.due()
        self._done(problem, outcome)

    def _bury(self, tuner: _Tuner) -> None:
        """Note that a tuner died, and let the others have its problem at once."""
        tuner.process.join(STOP_SECONDS)
        tuner.over = f"the tuner of GPU {tuner.seat.gpu} died (exit code {tuner.process.exitcode})"
        others = any(t.over is None for t in self._tuners)
        self._say(
            f"{tuner.over}{f' at {tuner.problem}' if tuner.problem else ''}{': another takes over' if others else ''}"
        )
        with self._queue() as queue:
            if queue is not None:
                queue.abandon(tuner.seat.owner)

    @contextlib.contextmanager
    def _queue(self) -> Iterator[Shared | None]:
        """The problems as the parent sees them; None if no tuner came so far as to claim one."""
        if not self._environment:
            yield None
            return
        with opened_storage(self._tuners[0].seat.storage, self._environment["device"]) as storage:
            yield self.orders.queue(storage, self._environment, "")

    def _stop(self) -> None:
        """Pass Ctrl-C on, and hear how each ends."""
        end = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(KeyboardInterrupt):  # pressed again: do not wait
            while (now := time.monotonic()) < end and (living := [t for t in self._tuners if t.over is None]):
                for tuner in living:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(tuner.process.pid, signal.SIGINT)
                self._listen(min(end, now + AGAIN_SECONDS))

    def _kill(self) -> None:
        for tuner in self._tuners:
            if tuner.over is not None:
                tuner.process.join(STOP_SECONDS)
            if tuner.process.is_alive():
                tuner.process.kill()
                tuner.process.join()
            tuner.pipe.close()

    def _collect(self) -> None:
        """Add what other hosts found, and say of the rest why it was not done."""
        with self._queue() as queue:
            if queue is None:
                return
            left = queue.left()
            self.run.others |= {w.name: w for w in queue.news() if w.name not in self.run.outcomes}
        if not self.run.interrupted:
            left = {name: self._failures() or why for name, why in left.items()} | self._skipped
            found = {winner.name for winner in self.run.winners}
            self.run.skipped = {name: why for name, why in left.items() if name not in found}
