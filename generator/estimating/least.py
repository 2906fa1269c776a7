"""The least time that a card can take for a call, by its maker's data: a time below it was not measured right.

A card is known by its compute capability and multiprocessors. A card of a known capability with other multiprocessors
counts as the fastest of that capability; one of an unknown capability as the fastest of all. The bound is then only
lower.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned.families.architecture import shared_limit

from ..problem import Problem
from ..workload import WORKLOADS
from .targets import LIMITS, TARGETS, Target

ALLOWED = 1.1  # of the bandwidth, for memory clocked higher and data that stays in the L2. An H200 reached 0.97
LEAST_LAUNCH_US = 0.5  # the shortest row of an H200 takes 0.94
LEAST_OF_CHAIN = 1 / 3  # of the waits between steps; the rows of an H200 take 0.77 of them and more
# Threads, programs and registers of an unknown card: no card has less.
LEAST_THREADS, LEAST_PROGRAMS, LEAST_REGISTERS = 1024, 16, 65536


def cards_like(capability: int, multiprocessors: int) -> list[Target]:
    """The known cards with this capability and these multiprocessors; else all of the capability; else all."""
    alike = [t for t in TARGETS.values() if t.capability == capability]
    return [t for t in alike if t.processors == multiprocessors] or alike or list(TARGETS.values())


def card_of(device: str, capability: int, multiprocessors: int) -> Target:
    """A card as a target: the fastest memory of ``cards_like``, and the limits that its architecture is known to have."""
    fastest = max(cards_like(capability, multiprocessors), key=lambda t: t.bandwidth_gb_s)
    architecture = f"sm_{capability}"
    least = (LEAST_THREADS, LEAST_PROGRAMS, LEAST_REGISTERS, shared_limit(capability) + 1024)
    threads, programs, registers, shared_bytes = LIMITS.get(architecture, least)[:4]
    return dataclasses.replace(
        fastest,
        device=device,
        architecture=architecture,
        processors=multiprocessors,
        threads=threads,
        programs=programs,
        registers=registers,
        shared_bytes=shared_bytes,
        warp=32,
    )


def memory_us(moved: int, card: Target) -> float:
    """The least time in microseconds in which ``moved`` bytes can move."""
    return moved / (ALLOWED * card.bandwidth_gb_s * 1e3)


def least_possible_us(problem: Problem, variant: Any, card: Target) -> float:
    """The least time of a variant: the largest of the bounds for its launches, its bytes and its waits between steps."""
    works = WORKLOADS[problem.family].work(problem, variant)
    return max(
        LEAST_LAUNCH_US * len(works),
        memory_us(WORKLOADS[problem.family].bytes_moved(problem.spec, problem.size), card),
        LEAST_OF_CHAIN * sum(work.chain_us for work in works),
    )
