"""One problem on one GPU: its buffers, its reference, and the measuring of variants on them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from tuned.families.launch import Launch, Step
from tuned.launching.launcher import direct_launcher, run_step

from ..problem import Problem
from ..rendering.structures import load
from ..workload import WORKLOADS
from .bench import Timing, copy_time, device_time, sets_beyond_l2
from .check import WrongResultError, check, fingerprint, guard, inputs_of, probe
from .compile import compile_launch, same_code

MAX_SETS = 256  # buffer sets of a tiny problem; beyond this only making them would take time
MOST_OF_COPY = 4  # times the output: what moves beyond that is not like a copy of it
FINAL_ROUNDS = 5  # interleaved timings of each finalist


@dataclasses.dataclass(frozen=True)
class Baselines:
    """What a winner is compared with, all timed the same way on the same buffers."""

    copy_us: float  # a plain copy of the same x, read once, write once: see generator.measuring.bench.copy_time
    floor_us: float  # that, scaled to the bytes that must move
    eager_us: float  # eager PyTorch
    bytes_moved: int


class DamagedError(Exception):
    """Something wrote over what results are judged by; the message says what. The stage is of no more use."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One variant, right and timed."""

    timing: Timing
    error: float  # worst error over its bound
    check_s: float = 0.0  # seconds that checking took, of all that the trial took


def bytes_needed(problem: Problem) -> int:
    """Device memory that staging a problem takes.

    Two sets at least; another twelve for the reference and its bound in float64, and the temporaries of checking and of
    eager PyTorch.
    """
    return (2 + 12) * WORKLOADS[problem.family].tensor_bytes(problem.spec, problem.size)


def _in_turn(steps: list[Callable[[], object]]) -> None:
    for step in steps:
        step()


class Stage:
    """A problem's inputs on the current GPU. Use one at a time, and ``close`` it: it holds gigabytes."""

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
        count = 2 if place else min(sets_beyond_l2(self.work.tensor_bytes(problem.spec, problem.size)), MAX_SETS)
        place = place or f"cuda:{self.device}"
        self.calls = [self.work.inputs(problem.spec, problem.size, place, seed) for seed in range(count)]
        # Checked on the inputs of the first set, in memory of its own, guarded; timed on memory as a model has it.
        self.probe = probe(self.calls[0])
        self.wanted, self.bound = self.work.reference(problem.spec, self.probe)
        self.before = {name: tensor.clone() for name, tensor in inputs_of(self.probe).items()}
        # In place, inputs are restored from these before each run of a graph, outside the timed region.
        self.fresh = [call.out.clone() for call in self.calls] if getattr(problem.spec, "inplace", False) else []
        # A variant may write anywhere, and what it hits there would make those after it look wrong, or right.
        self.judges = {
            "its reference": self.wanted,
            "the error allowed": self.bound,
            **{f"its input {name}": tensor for name, tensor in inputs_of(self.probe).items()},
            **{f"the copy of input {name}": tensor for name, tensor in self.before.items()},
            **({"the copy to restore its input from": self.fresh[0]} if self.fresh else {}),
        }
        self.seal = fingerprint(list(self.judges.values()))

    def _restore(self) -> None:
        for call, fresh in zip(self.calls, self.fresh, strict=False):
            call.out.copy_(fresh)

    def launches(self, variant: Any) -> list[Callable[[], None]]:
        """One thunk for the probe, then one a buffer set, running all steps of a variant.

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
        """A step that needs only be called; its kernel is taken from ``launchers``, or compiled and put there."""
        if not isinstance(step, Launch):
            return functools.partial(run_step, step)
        key = same_code(load(step.kernel), step)
        if key not in launchers:
            launchers[key] = direct_launcher(compile_launch(step, self.target), self.device)
        return functools.partial(launchers[key], step.programs, (*step.arguments, *step.constants.values()))

    def measure(self, variant: Any) -> Measured:
        """Check a variant on these inputs, then time it on the same.

        Raises:
            WrongResultError: the result is not right; nothing was timed.
            DamagedError: it wrote over what results are judged by.
        """
        start = time.perf_counter()
        error, thunks = self.check(variant)
        checked = time.perf_counter()
        timing = self._time(thunks)
        timed = time.perf_counter()
        self.verify()
        return Measured(timing, error, checked - start + time.perf_counter() - timed)

    def _time(self, thunks: list[Callable[[], None]]) -> Timing:
        return self.clock(thunks, restore=self._restore if self.fresh else None)

    def verify(self) -> None:
        """See that what results are judged by is as it was made.

        Raises:
            DamagedError: it is not.
        """
        now = fingerprint(list(self.judges.values()))
        harmed = [name for name, a, b in zip(self.judges, self.seal, now, strict=True) if a != b]
        if harmed:
            raise DamagedError(f"a variant wrote outside its output, over {' and '.join(harmed)}")

    def check(self, variant: Any) -> tuple[float, list[Callable[[], None]]]:
        """The worst error of a variant over its bound, and one thunk a buffer set to time it with.

        Raises:
            WrongResultError: the result is not right.
        """
        probe_thunk, *thunks = self.launches(variant)
        guard(self.probe.out)
        if self.fresh:
            self.probe.out.copy_(self.fresh[0])
        else:
            self.probe.out.fill_(torch.nan)
        probe_thunk()
        now = inputs_of(self.probe)
        unchanged = {name: (now[name], before) for name, before in self.before.items()}
        try:
            return check(self.probe.out, self.wanted, self.bound, unchanged), thunks
        except WrongResultError:
            for tensor, before in unchanged.values():  # those after this one are not to be blamed for it
                tensor.copy_(before)
            raise

    def compare(self, variants: list[Any], rounds: int = FINAL_ROUNDS) -> list[Timing]:
        """Time variants that have been measured again, interleaved, so that drift meets all alike."""
        thunks = [self.launches(variant)[1:] for variant in variants]
        taken = [[self._time(rotation).median_us for rotation in thunks] for _ in range(rounds)]
        times = map(sorted, zip(*taken, strict=True))  # of each variant
        return [Timing(round(t[len(t) // 2], 4), round((t[-2] - t[1]) / 2, 4)) for t in times]

    def baselines(self) -> Baselines:
        """Copy, floor and eager PyTorch for this problem."""
        spec, size = self.problem.spec, self.problem.size
        moved = self.work.bytes_moved(spec, size)
        pairs = self._copies(moved)
        copy_us = min(copy_time(pairs).median_us for _ in range(2))  # the first may meet clocks still rising
        copied = 2 * pairs[0][1].numel() * pairs[0][1].element_size()
        del pairs
        eager_us = device_time([self.work.eager(spec, call) for call in self.calls[:4]], replays=3).median_us
        return Baselines(copy_us, round(copy_us * moved / copied, 4), eager_us, moved)

    def _copies(self, moved: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied for the floor, (x, out) for each set: the very buffers that the kernels use.

        In place there is no second one, so it is made; and where the output is a small part of what must move, weights
        being most of it, or no input is as wide, half of all ``moved`` bytes are copied between buffers made for it.
        """
        outs = [call.out for call in self.calls]
        narrow = next(iter(inputs_of(self.calls[0]).values())).shape[-1] < outs[0].shape[-1]
        if narrow or moved > MOST_OF_COPY * outs[0].numel() * outs[0].element_size():
            words = max(1, moved // 8)  # read once, written once, 4 bytes each
            return [(torch.zeros(words, device=out.device), torch.empty(words, device=out.device)) for out in outs]
        sources = outs if self.fresh else [next(iter(inputs_of(call).values())) for call in self.calls]
        targets = [torch.empty_like(out) for out in outs] if self.fresh else outs
        return [(x[..., : out.shape[-1]], out) for x, out in zip(sources, targets, strict=True)]

    def close(self) -> None:
        """Give the memory back."""
        for kept in (self.calls, self.fresh, self.before, self.judges):
            kept.clear()
        del self.wanted, self.bound, self.probe
        gc.collect()
        torch.cuda.empty_cache()


__all__ = ["Baselines", "DamagedError", "Measured", "Stage", "WrongResultError", "bytes_needed"]
