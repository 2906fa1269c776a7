"""One problem on one GPU: its buffers, its reference, and the measuring of variants on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from tuned.families.launch import Launch, Step
from tuned.launching.launcher import direct_launcher, run_step

from ..problem import Problem
from ..rendering.structures import load
from ..workload import WORKLOADS
from .bench import Emptied, Timing, copy_time, device_time, half_spread, keeping, sets_filling, timed_emptying
from .check import WrongResultError, check, fingerprint, guard, inputs_of, poison, probe, worst_error
from .compile import compile_launch, same_code

MAX_SETS = 256  # buffer sets of a tiny problem: more would only take time to make
EMPTIED_SETS = 64  # if the L2 is emptied before each round of the sets: the error of that is then a hundredth of a us
EAGER_SETS = 4  # on which eager PyTorch is timed, since it may take thousands of launches for each
EAGER_US = 5_000.0  # if eager PyTorch takes no longer for all sets together, it is timed on all
REFERENCE = 13  # sets' worth of memory: reference and bound in float64, temporaries of checking and of eager PyTorch
SETS_SHARE = 0.25  # of the memory beyond REFERENCE: finalists are timed on ALLOCATIONS of all sets at once
MOST_OF_COPY = 4  # times the output: a problem that moves more is not like a copy of its output
# Each finalist is timed, interleaved, on several allocations: a launch of 128k tokens took 12 percent longer on some
# memory than on other. Their number is odd, so that the median is one of them; all timings together are as many as one
# allocation would get.
ALLOCATIONS = 3
FINAL_ROUNDS = 2  # on each allocation
# A GPU that waited is slower for 8 ms (docs/decisions/0021). Checking and the tuner take about 10 ms between two
# timings; a longer gap was a wait, mostly for compilers. Warming takes no longer than the wait before it.
IDLE_S = 0.02
WARM_US = 20_000.0
FOREIGN_ELEMENTS = 2**18  # of the foreign kernel, which is not ours: it takes about 2 us, and 1/30 of the L2
LEAST_US = 0.01  # for the time of a pair of kernels less that of the foreign one


@dataclasses.dataclass(frozen=True)
class Baselines:
    """What a winner is compared with, all timed the same way on the same buffers."""

    copy_us: float  # a plain copy of the same x, read once, write once: see generator.measuring.bench.copy_time
    floor_us: float  # copy_us, scaled to the bytes that must move
    eager_us: float  # eager PyTorch
    bytes_moved: int
    emptied: bool = False  # whether the L2 was emptied before each round, because the sets are too few


class DamagedError(Exception):
    """A variant wrote over data that results are judged by; the message says which. The stage is of no more use."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One variant whose result is right, and its time."""

    timing: Timing
    error: float  # worst error over its bound
    check_s: float = 0.0  # seconds of the trial that checking took


@dataclasses.dataclass(frozen=True)
class Compared:
    """One finalist, timed beside others: medians of its rounds, by the memory that they ran on."""

    rounds: tuple[tuple[float, ...], ...]
    # The same behind a foreign kernel, less that kernel's own time; () if no finalist is a dependent launch.
    behind: tuple[tuple[float, ...], ...] = ()

    @property
    def timing(self) -> Timing:
        """The time behind launches of itself, as for copies and eager PyTorch: median over memories, spread of rounds."""
        every = [us for rounds in self.rounds for us in rounds]
        return Timing(round(middle(self.rounds), 4), round(half_spread(every), 4))

    @property
    def mean(self) -> tuple[tuple[float, ...], ...]:
        """The mean of each round and the time behind the foreign kernel on the same memory."""
        return tuple(
            tuple((us + other) / 2 for us in rounds) for rounds, (other,) in zip(self.rounds, self.behind, strict=True)
        )


def middle(taken: tuple[tuple[float, ...], ...]) -> float:
    """The median over memories of the medians on each."""
    return statistics.median(map(statistics.median, taken))


def dependent(variant: Any) -> bool:
    """Whether a variant's kernel may begin before the one in front of it has ended (programmatic dependent launch)."""
    return any(getattr(variant, knob, False) for knob in ("pdl", "launch_pdl"))


def bytes_needed(problem: Problem) -> int:
    """Device memory that staging a problem takes: at least two sets, and REFERENCE times a set beside them."""
    return (2 + REFERENCE) * WORKLOADS[problem.family].tensor_bytes(problem.spec, problem.size)


def rotation(problem: Problem, l2_bytes: int, free_bytes: int) -> tuple[int, bool]:
    """How many sets of inputs are timed in turn, and whether the L2 must be emptied before each round of them.

    Only the bytes that a launch touches count: a table of angles is allocated whole, but a call of one token reads a row.
    """
    work, inplace = WORKLOADS[problem.family], getattr(problem.spec, "inplace", False)
    moved, held = (count(problem.spec, problem.size) for count in (work.bytes_moved, work.tensor_bytes))
    touched = min(held, moved // 2 if inplace else moved)  # in place the same bytes are read and written
    wanted = sets_filling(l2_bytes, touched)
    room = int(SETS_SHARE * (free_bytes - REFERENCE * held) / (2 * held if inplace else held))
    if wanted <= min(MAX_SETS, max(2, room)):
        return wanted, False
    return max(2, min(EMPTIED_SETS, room)), True


def _in_turn(steps: list[Callable[[], object]]) -> None:
    for step in steps:
        step()


class Stage:
    """A problem's inputs on the current GPU. Use one stage at a time, and ``close`` it: it holds gigabytes."""

    def __init__(
        self,
        problem: Problem,
        target: GPUTarget | None,
        place: str | None = None,
        clock: Callable[..., Timing] = device_time,
    ) -> None:
        """``place`` and ``clock`` are for tests, which have no GPU."""
        self.problem, self.target, self.clock = problem, target, clock
        self.work = WORKLOADS[problem.family]
        self.device = 0 if place else torch.cuda.current_device()
        count, self.empties = 2, False
        if not place:
            l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            count, self.empties = rotation(problem, l2_bytes, torch.cuda.mem_get_info(self.device)[0])
        self.place = place or f"cuda:{self.device}"
        self.busy = -math.inf  # when the GPU was last seen at work: time.monotonic()
        self.calls = self._inputs(count)
        # Variants are checked on the first set's inputs, with a guarded output, and timed on memory as models have it.
        self.probe = probe(self.calls[0])
        self.wanted, self.bound = self.work.reference(problem.spec, self.probe)
        self.before = {name: tensor.clone() for name, tensor in inputs_of(self.probe).items()}
        # In place, inputs are restored from these before each run of a graph, outside the timed region.
        self.fresh = [call.out.clone() for call in self.calls] if getattr(problem.spec, "inplace", False) else []
        # A variant may write anywhere. If it hits one of these, later variants would look wrong, or right.
        self.judges = {
            "its reference": self.wanted,
            "the error allowed": self.bound,
            **{f"its input {name}": tensor for name, tensor in inputs_of(self.probe).items()},
            **{f"the copy of input {name}": tensor for name, tensor in self.before.items()},
            **({"the copy to restore its input from": self.fresh[0]} if self.fresh else {}),
        }
        self.seal = dict(zip(self.judges, fingerprint(list(self.judges.values())), strict=True))
        # The last result that was compared with the reference and is right, and its worst error. Most variants give the
        # same bits, and comparing these moves a thirtieth of what reading the reference and its bound moves.
        self.right: tuple[torch.Tensor, float] | None = None
        ones, result = (torch.ones(FOREIGN_ELEMENTS, device=self.place) for _ in range(2))
        self.foreign = functools.partial(torch.neg, ones, out=result)

    @functools.cached_property
    def emptied(self) -> Emptied:
        """The launch that empties the L2, and its time."""
        return timed_emptying(WARM_US)

    def _inputs(self, count: int) -> list[Any]:
        """So many sets of inputs, made with the seeds 0, 1, ...: always the same values."""
        return [self.work.inputs(self.problem.spec, self.problem.size, self.place, seed) for seed in range(count)]

    def _restore(self) -> None:
        for call, fresh in zip(self.calls, self.fresh, strict=False):
            call.out.copy_(fresh)

    def launches(self, variant: Any) -> list[Callable[[], None]]:
        """Thunks that run all steps of a variant: one for the probe, then one for each buffer set.

        A kernel is compiled once for all launches that its code serves: the sets are alike, and so are most time steps.
        """
        launchers: dict[Any, Callable[[int, tuple[Any, ...]], None]] = {}
        return [
            functools.partial(
                _in_turn,
                [self._ready(step, launchers) for step in self.work.family.launches(self.problem.spec, variant, call)],
            )
            for call in (self.probe, *self.calls)
        ]

    def _ready(self, step: Step, launchers: dict[Any, Callable[[int, tuple[Any, ...]], None]]) -> Callable[[], object]:
        """A step, ready to be called; its kernel is taken from ``launchers``, or compiled and put there."""
        if not isinstance(step, Launch):
            return functools.partial(run_step, step)
        key = same_code(load(step.kernel), step)
        if key not in launchers:
            launchers[key] = direct_launcher(compile_launch(step, self.target), self.device)
        return functools.partial(launchers[key], step.programs, (*step.arguments, *step.constants.values()))

    def measure(self, variant: Any) -> Measured:
        """Check a variant on these inputs, time it on the same inputs, and check what the timed launches wrote.

        Raises:
            WrongResultError: the result is not right, before or after it was timed.
            DamagedError: the variant wrote over data that results are judged by.
        """
        start = time.perf_counter()
        error, thunks = self.check(variant)
        checked = time.perf_counter()
        timing = self._time(thunks)
        timed = time.perf_counter()
        self.verify()
        self._judge(thunks[0], self.probe.out)
        return Measured(timing, error, checked - start + time.perf_counter() - timed)

    def _time(self, thunks: list[Callable[[], None]]) -> Timing:
        how: dict[str, Any] = {"restore": self._restore} if self.fresh else {"poison": self._poison}
        return self._timed(self.clock, thunks, empties=self.empties, **how)

    def _timed(self, clock: Callable[..., Timing], launches: Any, *, empties: bool, **how: Any) -> Timing:
        """The time of launches, on a warm GPU and with a cold L2, as everything is timed here."""
        emptied = self.emptied if empties else None
        waited = time.monotonic() - self.busy > IDLE_S
        timing = clock(launches, **how, warm_us=WARM_US if waited else 0.0, emptied=emptied)
        self.busy = time.monotonic()
        return timing

    def _poison(self) -> None:
        self.calls[0].out.fill_(poison(self.calls[0].out.dtype))

    def _judge(self, thunk: Callable[[], None], right: torch.Tensor | None) -> None:
        """Check the result of the launches that were just timed, on the first set, whose right result is known.

        ``right`` is a result that was compared with the reference: nearly always the timed launches gave the same bits.
        In place, they have rotated their inputs many times over, so one more launch, on a restored input, is judged.

        Raises:
            WrongResultError: the result is not right.
        """
        out = self.calls[0].out
        if self.fresh:
            out.copy_(self.fresh[0])
            thunk()
        if right is not None and torch.equal(out, right):
            return
        worst = worst_error(out, self.wanted, self.bound)
        if not worst <= 1:
            raise WrongResultError(f"after it was timed, the worst error is {worst:.3g} times what rounding allows")

    def verify(self) -> None:
        """Check that the data that results are judged by are as they were made.

        Raises:
            DamagedError: they are not.
        """
        now = dict(zip(self.judges, fingerprint(list(self.judges.values())), strict=True))
        harmed = [name for name, seal in self.seal.items() if seal != now[name]]
        if harmed:
            raise DamagedError(f"a variant wrote outside its output, over {' and '.join(harmed)}")

    def check(self, variant: Any) -> tuple[float, list[Callable[[], None]]]:
        """The worst error of a variant over its bound, and one thunk for each buffer set to time it with.

        Raises:
            WrongResultError: the result is not right.
        """
        probe_thunk, *thunks = self.launches(variant)
        guard(self.probe.out)
        if self.fresh:
            self.probe.out.copy_(self.fresh[0])
        else:
            self.probe.out.fill_(poison(self.probe.out.dtype))
        probe_thunk()
        now = inputs_of(self.probe)
        unchanged = {name: (now[name], before) for name, before in self.before.items()}
        out, known = self.probe.out, None
        if self.right is not None and torch.equal(out, self.right[0]):
            known = self.right[1]
        try:
            worst = check(out, self.wanted, self.bound, unchanged, known)
        except WrongResultError:
            for tensor, before in unchanged.values():  # later variants must not be blamed for what this one changed
                tensor.copy_(before)
            raise
        if known is None:
            self.right = out.clone(), worst
            self.judges["a result that is right"] = self.right[0]
            self.seal["a result that is right"] = fingerprint([self.right[0]])[0]
        return worst, thunks

    def compare(
        self, variants: list[Any], rounds: int = FINAL_ROUNDS, allocations: int = ALLOCATIONS
    ) -> list[Compared]:
        """Time measured variants again, interleaved, so that drift meets all alike, and on other memory too.

        If any of them is a dependent launch, all are timed behind a foreign kernel as well, once on each memory: behind
        a launch of itself it may begin early, which few kernels of a model allow.

        Raises:
            WrongResultError: a result is not right after it was timed.
        """
        behind = self._alone_us if any(map(dependent, variants)) else None
        first = self.calls, self.fresh
        try:
            by_memory = [self._compared(variants, rounds, behind) for _ in self._memories(allocations)]
        finally:
            self.calls, self.fresh = first
        return [
            Compared(tuple(own for own, _ in each), tuple((other,) for _, other in each if other is not None))
            for each in zip(*by_memory, strict=True)
        ]

    def _compared(
        self, variants: list[Any], rounds: int, foreign: Callable[[], float] | None
    ) -> list[tuple[tuple[float, ...], float | None]]:
        """(medians of rounds, median behind the foreign kernel) of each variant, on the present sets."""
        thunks = [self.launches(variant)[1:] for variant in variants]
        own = [[self._time(launches).median_us for launches in thunks] for _ in range(rounds - 1)]
        foreign_us = foreign() if foreign else 0.0
        last: list[tuple[float, float | None]] = []
        right = None
        for launches in thunks:
            own_us, other_us = self._time(launches).median_us, None
            self._judge(launches[0], right)
            right = self.calls[0].out.clone() if right is None else right
            if foreign:
                pairs: list[Callable[[], None]] = [functools.partial(_in_turn, [self.foreign, one]) for one in launches]
                other_us = max(LEAST_US, self._time(pairs).median_us - foreign_us)
                self._judge(pairs[0], right)
            last.append((own_us, other_us))
        return [((*before, own_us), other_us) for *before, (own_us, other_us) in zip(*own, last, strict=True)]

    def _alone_us(self) -> float:
        """The time of the foreign kernel behind launches of itself."""
        return self.clock([self.foreign]).median_us

    def _memories(self, allocations: int) -> Iterator[int]:
        """Yield with ``calls`` on their present memory, and then on other memory, as far as there is room for it.

        The sets timed before stay allocated meanwhile: the allocator would give freed memory out again.
        """
        held: list[Any] = []
        yield 0
        for number in range(1, allocations):
            held.append((self.calls, self.fresh))
            try:
                calls = self._inputs(len(self.calls))
                fresh = [call.out.clone() for call in calls] if self.fresh else []
            except torch.OutOfMemoryError:  # the record says on how many memories variants were timed
                return
            self.calls, self.fresh = calls, fresh
            yield number

    def baselines(self) -> Baselines:
        """Copy, floor and eager PyTorch for this problem."""
        spec, size = self.problem.spec, self.problem.size
        moved = self.work.bytes_moved(spec, size)
        pairs = self._copies(moved)
        clock = functools.partial(self._timed, device_time, empties=self.empties)
        copy_us = min(copy_time(pairs, clock).median_us for _ in range(2))  # clocks may still rise during the first
        copied = 2 * pairs[0][1].numel() * pairs[0][1].element_size()
        del pairs
        return Baselines(copy_us, round(copy_us * moved / copied, 4), self._eager_us(), moved, self.empties)

    def _eager_us(self) -> float:
        """The time of eager PyTorch on all sets, as of kernels; if it is too slow for that, on a few with an emptied L2."""

        def timed(calls: Sequence[Any], *, empties: bool) -> float:
            eager = keeping([self.work.eager(self.problem.spec, call) for call in calls])
            return self._timed(device_time, eager, empties=empties, replays=3).median_us

        few = len(self.calls) > EAGER_SETS  # then EAGER_SETS are too few to displace each other from the L2
        eager_us = timed(self.calls[:EAGER_SETS], empties=self.empties or few)
        if few and eager_us * len(self.calls) <= EAGER_US:
            with contextlib.suppress(torch.OutOfMemoryError):
                return timed(self.calls, empties=self.empties)
        return eager_us

    def _copies(self, moved: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied for the floor, (x, out) for each set: the very buffers that the kernels use.

        In place there is no second buffer, so one is made. New buffers of half of all ``moved`` bytes are copied
        instead if the output is a small part of what must move, most of it being weights, or could not be copied from
        the first input.
        """
        outs = [call.out for call in self.calls]
        x = next(iter(inputs_of(self.calls[0]).values()), None)
        if (
            not is_copy_of(outs[0], x, alike=not self.fresh)
            or moved > MOST_OF_COPY * outs[0].numel() * outs[0].element_size()
        ):
            words = max(1, moved // 8)  # read once, written once, 4 bytes each
            return [(torch.zeros(words, device=out.device), torch.empty(words, device=out.device)) for out in outs]
        sources = outs if self.fresh else [next(iter(inputs_of(call).values())) for call in self.calls]
        targets = [torch.empty_like(out) for out in outs] if self.fresh else outs
        return [(x[..., : out.shape[-1]], out) for x, out in zip(sources, targets, strict=True)]

    def close(self) -> None:
        """Give the memory back."""
        for kept in (self.calls, self.fresh, self.before, self.judges):
            kept.clear()
        del self.wanted, self.bound, self.probe, self.right
        gc.collect()
        torch.cuda.empty_cache()


def is_copy_of(out: torch.Tensor, x: torch.Tensor | None, *, alike: bool = True) -> bool:
    """Whether an output could be copied from the first features of an input; ``alike``: dtype and other axes must match."""
    if x is None or not x.ndim or not out.ndim or x.shape[-1] < out.shape[-1]:
        return False
    if not alike:
        return True
    return x.dtype == out.dtype and x.is_floating_point() and x.shape[:-1] == out.shape[:-1]


__all__ = ["Baselines", "Compared", "DamagedError", "Measured", "Stage", "WrongResultError", "bytes_needed"]
