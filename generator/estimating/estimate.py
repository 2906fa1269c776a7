"""Estimate the time of variants on a device that is not here, in microseconds.

Where landscapes of the family were recorded (``generator.storage.landscape``), a regression on them ranks the variants
(``generator.estimating.model``). ``python tune.py replay`` says how well, with each problem left out in turn. Elsewhere
a model by hand ranks them: it is right about a factor, not about percents. For each launch

    time = start + program + chain + max(memory, cache, issue, (waves - 1) x program)

with, in microseconds unless said,

* memory = bytes that must move / (0.88 x bandwidth). Roofline (Williams, Waterman, Patterson 2009); the best large calls
  that were measured on an H200 reach 88 percent of the bandwidth that its data sheet states.
* cache = (those bytes + angle rows read again by other programs) / (2.2 x bandwidth): by published microbenchmarks of
  A100 and H100, the L2 delivers two to three times the bandwidth of memory.
* issue = instructions / (processors x 128 lanes x clock), with 10 instructions for an element moved and rotated, 45
  for a sine or cosine with its range reduction, 60 for each thread's addresses: rough counts of the machine code.
* waves = ceil(programs / (resident x processors)). resident = the programs that threads, registers (in units of 8),
  shared memory and the limit on programs allow on a processor: the CUDA occupancy calculation.
* program = latency x max(1, bytes in flight / share) + the sines of one thread. A program waits once for its loads,
  0.6 us (published pointer chases: 0.4 to 0.7 us). Share is Little's law: to use its part of the bandwidth, a processor
  must have latency x bandwidth / processors bytes in flight; more bytes take longer than the latency. With too few
  bytes in flight, the model therefore shows many waves of programs that each cost a latency.
* chain = the steps of a recurrence one after the other, 0 for a family without one: see the work of the family.
* start = 0.6 us from one kernel of a graph to the next, 0.3 with programmatic dependent launch.

The model does not know cache hints, grid order, the path of loads through shared memory, or clocks under load. Variants
that differ in these alone get the same time, and the simpler one comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuned.families.launch import Launch, ceil_div

from ..families.amounts import Work
from ..measuring.compile import Resources, same_code
from ..problem import Problem
from ..rendering.structures import load
from ..workload import WORKLOADS
from .model import fitted
from .targets import Target, resident

COPY_EFFICIENCY = 0.88
CACHE_OVER_MEMORY = 2.2
LATENCY_US = 0.6
START_US = 0.6
LEAST_US = 1.5  # the time of decode calls of any kind; their bytes alone would take a tenth of it
LANES = 128  # a processor
PER_ELEMENT, PER_SINE, PER_THREAD = 10, 45, 60  # instructions


def estimates(
    problem: Problem, variants: Sequence[Any], target: Target, needs: Mapping[Any, Sequence[Resources]] | None = None
) -> dict[Any, float]:
    """Estimated microseconds of each variant; where ``needs`` lacks the compiler's register count, one is assumed."""
    by_hand = {v: by_hand_us(problem, v, target, needs.get(v) if needs else None) for v in variants}
    model = fitted(problem.family)
    if model is None or not variants:
        return by_hand
    found = [
        (v, WORKLOADS[problem.family].work(problem, v)[0], next(iter(needs.get(v, ())), None) if needs else None)
        for v in variants
    ]
    base_us = least_us(found[0][1], target)
    return {v: base_us * (1 + e) for v, e in zip(variants, model.excess(problem, target, found), strict=True)}


def least_us(work: Work, target: Target) -> float:
    """The time of the best variants: the time of the bytes that must move for large calls, LEAST_US for small ones."""
    memory_us = work.memory_bytes / (COPY_EFFICIENCY * target.bandwidth_gb_s * 1e3)
    return (memory_us**4 + LEAST_US**4) ** 0.25


def by_hand_us(problem: Problem, variant: Any, target: Target, needs: Sequence[Resources] | None = None) -> float:
    """The time in microseconds by the model that this module's docstring describes."""
    works = WORKLOADS[problem.family].work(problem, variant)
    if needs and len(needs) < len(works):
        needs = _in_order(problem, variant, needs)
    return sum(_launch_us(work, target, needs[i] if needs else None) for i, work in enumerate(works))


def _in_order(problem: Problem, variant: Any, needs: Sequence[Resources]) -> list[Resources]:
    """What each launch of a call needs, in order; ``needs`` has launches of one code and grid once, as compile.distinct does."""
    work = WORKLOADS[problem.family]
    steps = work.family.launches(problem.spec, variant, work.inputs(problem.spec, problem.size, "meta", 0))
    kinds = [(s.programs, same_code(load(s.kernel), s)) for s in steps if isinstance(s, Launch)]
    found = dict(zip(dict.fromkeys(kinds), needs, strict=True))
    return [found[kind] for kind in kinds]


def _launch_us(work: Work, target: Target, need: Resources | None) -> float:
    bytes_per_us = target.bandwidth_gb_s * 1e3
    memory_us = work.memory_bytes / (COPY_EFFICIENCY * bytes_per_us)
    cache_us = (work.memory_bytes + work.again_bytes) / (CACHE_OVER_MEMORY * bytes_per_us)
    instructions = (
        work.elements * PER_ELEMENT + work.sines * PER_SINE + work.programs * work.warps * target.warp * PER_THREAD
    )
    issue_us = instructions / (target.processors * LANES * target.clock_ghz * 1e3)
    here = resident(work, target, need)
    waves = ceil_div(work.programs, here * target.processors)
    # A launch may have too few programs to fill a processor: then fewer are resident than would fit.
    at_once = min(here, ceil_div(work.programs, target.processors))
    share = LATENCY_US * bytes_per_us / target.processors
    sines_us = work.sines / max(work.programs, 1) / (work.warps * target.warp) * PER_SINE * 4 / (target.clock_ghz * 1e3)
    program_us = LATENCY_US * max(1.0, at_once * work.in_flight_bytes / share) + sines_us
    start_us = START_US / 2 if work.early else START_US
    together = ceil_div(work.programs, target.processors)  # programs that share a processor's path to the caches
    chain_us = work.chain_us + together * work.chain_clocks / (target.clock_ghz * 1e3)
    return start_us + program_us + chain_us + max(memory_us, cache_us, issue_us, (waves - 1) * program_us)
