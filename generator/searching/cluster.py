"""Tune on many GPUs, of this host or of a Ray cluster: a tuner on each, and one driver that alone keeps what they find.

A tuner is a Ray actor with one GPU, and a problem is one of its tasks. Each trial is sent to the driver as soon as it
is measured. A lost node loses only the trial that it was measuring and the one on its way: the driver gives the
problem, with all other trials, to another GPU.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ..failures import TuningError
from ..problem import Problem
from ..rendering.structures import digests_of
from ..storage.backends import opened_storage
from ..storage.journal import Journal
from .connection import Tuners
from .run import NO_TIME, Display, Keeper, Orders, Run
from .search import Outcome, Progress
from .tuner import MakeTools

# So many tuners may die at one problem before it is skipped; or in a row before they are ready: then Ray cannot start
# them.
MOST_DEATHS = 3
WHY_CHARACTERS = 160  # kept of Ray's long text about why a tuner died
TICK_SECONDS = 1.0  # between looks at which GPUs the cluster has
ALIKE = {"device_name": "", "driver": "driver ", "torch": "torch ", "triton": "Triton "}
STREAM = {"num_returns": "streaming", "_generator_backpressure_num_objects": 1}  # each letter waits for the one before


@contextlib.contextmanager
def _noting_ctrl_c(run: Run) -> Iterator[None]:
    """Let Ctrl-C note that the run was interrupted, besides raising KeyboardInterrupt.

    Python drops an exception that is raised while an object is released, and Ray releases references all the time.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def note(*_: Any) -> None:
        run.interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass
class _Seat:
    """A GPU of the cluster, as the driver sees it."""

    actor: Any
    stream: Any  # the letters of the task under way
    name: str = "a GPU"
    ready: bool = False
    problem: Problem | None = None
    following: Problem | None = None  # the problem that it gets next, and compiles ahead
    over: str = ""  # why it gets no more problems


def _kernels(problem: Problem | None) -> tuple[str, Any] | None:
    """A key that problems share if they run the same kernels."""
    return None if problem is None else (problem.family, problem.spec)


class Driver:
    """Gives problems to the GPUs of the Ray that this process is connected to; it alone writes journal, record and table."""

    def __init__(  # noqa: PLR0913 - as ``tune_all``, and where tuners come from
        self,
        run: Run,
        orders: Orders,
        make_tools: MakeTools,
        storage: str | None,
        display: Display,
        tuners: Tuners,
    ) -> None:
        self.run, self.orders, self.display = run, orders, display
        self._make_tools, self._storage, self._tuners = make_tools, storage, tuners
        self._waiting = list(orders.problems)
        self._seats: list[_Seat] = []
        self._deaths = collections.Counter[str]()  # of tuners, by problem; "" is for those that were not ready yet
        self._environment: dict[str, Any] = {}  # of the first GPU; the others must be like it
        self._looked = -math.inf
        self._stack = contextlib.ExitStack()

    def tune(self) -> None:
        """Tune all problems; KeyboardInterrupt ends the run early, and what was done is kept.

        Raises:
            TuningError: no GPU could be tuned on.
        """
        with self._stack:
            self._stack.enter_context(_noting_ctrl_c(self.run))
            try:
                while not self.run.interrupted and (self._waiting or self._busy()):
                    self._fill()
                    self._give()
                    self._listen()
            except KeyboardInterrupt:
                self.run.interrupted = True
            finally:
                for seat in self._seats:
                    ray.kill(seat.actor)

    def _busy(self) -> int:
        return sum(seat.problem is not None for seat in self._seats)

    def _fill(self) -> None:
        """Start a tuner on each GPU that the cluster has by now, as far as there are problems for them."""
        if time.monotonic() - self._looked < TICK_SECONDS:
            return
        self._looked = time.monotonic()
        gpus = int(ray.cluster_resources().get("GPU", 0))
        over = [seat for seat in self._seats if seat.over]  # they keep their GPUs: Ray would offer a released one again
        wanted = len(over) + len(self._waiting) + self._busy()
        while len(self._seats) < min(gpus, wanted):
            actor = self._tuners.one()
            self._seats.append(_Seat(actor, actor.start.options(**STREAM).remote(self._make_tools)))
        if not gpus or len(self._seats) == len(over):
            why = "; ".join(dict.fromkeys(seat.over for seat in over)) or "the Ray cluster has no GPU: see ray status"
            self._skip(why)
            if not self.run.winners:
                raise TuningError(why)

    def _skip(self, why: str) -> None:
        self.run.skipped |= {problem.name: why for problem in self._waiting}
        self._waiting.clear()

    def _give(self) -> None:
        """Give the next problems to the seats that have none."""
        if time.monotonic() >= self.orders.end:
            self._skip(NO_TIME)
        tuners = sum(seat.ready for seat in self._seats)
        self.run.gpus = max(self.run.gpus, tuners)
        free = [seat for seat in self._seats if seat.ready and seat.stream is None]
        for seat in free[: len(self._waiting)]:
            # A problem that another seat was to get next is better than none.
            seat.problem = problem = self._next(seat) or self._waiting[0]
            self._waiting.remove(problem)
            seat.following = None
            seat.following = self._next(seat)
            share = min(1.0, tuners / (len(self._waiting) + self._busy()))
            work = self._keeper.work(problem, seat.following, share)
            held = self._journal.held(problem, self._environment, functools.partial(digests_of, problem))
            seat.stream = seat.actor.tune.options(**STREAM).remote(work, held)

    def _next(self, seat: _Seat) -> Problem | None:
        """The waiting problem that a seat gets next: the one it compiles ahead, else one that no other seat is to get.

        Problems of one spec run the same kernels, and two GPUs that tune them at once would both compile these. So a
        seat prefers problems of its own spec, and takes a problem of another seat's spec last.
        """
        if seat.following in self._waiting:
            return seat.following
        others = [other for other in self._seats if other is not seat and not other.over]
        theirs = {_kernels(p) for other in others for p in (other.problem, other.following)}
        free = [p for p in self._waiting if not any(p is other.following for other in others)]
        return min(free, key=lambda p: (_kernels(p) in theirs, _kernels(p) != _kernels(seat.problem)), default=None)

    def _listen(self) -> None:
        """Handle the letters that came, or wait a moment for one."""
        streams = {seat.stream: seat for seat in self._seats if seat.stream is not None}
        ready, _ = ray.wait(list(streams), num_returns=len(streams), timeout=0)
        for stream in ready or ray.wait(list(streams), timeout=TICK_SECONDS)[0]:
            seat = streams[stream]
            try:
                self._hear(seat, ray.get(next(stream)))
            except StopIteration:
                seat.stream = None
            except RayTaskError:  # a defect
                raise
            except RayError as error:
                self._bury(seat, error)

    def _hear(self, seat: _Seat, letter: tuple[Any, ...]) -> None:
        match letter:
            case ("ready", host, index, environment, compilers):
                seat.name = f"GPU {index}" if host == socket.gethostname() else f"{host} GPU {index}"
                self._admit(seat, environment, compilers)
            case ("said", text):
                self.display.say(text)
            case ("progress", progress):
                self.display.report(self.run.done, progress, seat.name)
            case ("trial", variant, result, digests) if seat.problem:
                self._journal.add(seat.problem, self._environment, variant, result, digests)
            case ("finish", settings, winner) if seat.problem:
                self._journal.finish(seat.problem, self._environment, settings, winner)
            case ("done", outcome, seconds):
                self.run.stopwatch.add(seconds)
                self._end(seat, outcome)
            case ("failed", why):
                self._leave_out(seat, why)

    def _admit(self, seat: _Seat, environment: dict[str, Any], compilers: int) -> None:
        """Let a GPU take problems, if it is like the first one."""
        if not self._environment:
            self._environment = environment
            self._keeper = Keeper(self.run, self.orders, environment["device"])
            self._stack.callback(self._keeper.end)
            self._journal = Journal(self._stack.enter_context(opened_storage(self._storage, environment["device"])))
        first, this = (
            ", ".join(f"{word}{e[k]}" for k, word in ALIKE.items()) for e in (self._environment, environment)
        )
        if first != this:
            self._leave_out(
                seat,
                "the GPUs of a run must be of one model, with one driver, torch and Triton, since their times go into one "
                f"table; the first is {first}, this one {this}. Tune on those like it in a run of their own",
            )
            return
        self._deaths[""] = 0
        seat.ready = True
        self.display.started(seat.name, environment, compilers)

    def _end(self, seat: _Seat, outcome: Outcome | str) -> None:
        """Note how a seat's problem ended; give the seat its next one before keeping this one, which takes 0.1 s."""
        problem, seat.problem, seat.stream = seat.problem, None, None
        assert problem is not None, "only a problem has an end"
        self._keeper.note(problem, outcome)
        self._give()
        self._keeper.keep()
        self.display.done(problem, outcome)

    def _leave_out(self, seat: _Seat, why: str) -> None:
        """Give a GPU no more problems; the one that it has goes to another GPU."""
        seat.over, seat.ready, seat.stream = why, False, None
        self._looked = -math.inf
        self.display.say(f"{seat.name} is left out: {why}")
        self._again(seat, why)

    def _bury(self, seat: _Seat, error: RayError) -> None:
        """Note that a tuner died; the problem that it worked on goes to another."""
        why = [line.strip() for line in str(error).splitlines() if line.strip()][-1][:WHY_CHARACTERS]
        at = "" if seat.problem is None else f" at {seat.problem.name}, which is tried again"
        self.display.say(f"the tuner of {seat.name} died{at}: {why}")
        self._seats.remove(seat)
        self._looked = -math.inf
        if not seat.ready:
            self._deaths[""] += 1
            if self._deaths[""] == MOST_DEATHS:
                raise TuningError(f"{MOST_DEATHS} tuners in a row died before they could start: {why}")
        self._again(seat, why)

    def _again(self, seat: _Seat, why: str) -> None:
        """Give the problem of a lost GPU to another one, unless too many tuners were lost at it."""
        if (problem := seat.problem) is None:
            return
        self.display.report(self.run.done, Progress(note="lost"), seat.name)
        self._deaths[problem.name] += 1
        if self._deaths[problem.name] == MOST_DEATHS:
            self._end(seat, f"{MOST_DEATHS} tuners died at it: {why}")
        else:
            seat.problem = None
            self._waiting.insert(0, problem)
