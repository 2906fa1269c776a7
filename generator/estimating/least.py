"""The least time that a card can take for a call, of what its maker says of it: what is below was not measured right.

A card is known by its compute capability and multiprocessors. One with other multiprocessors counts as the fastest of its
capability, one of another capability as the fastest of all: the bound is then only lower.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned.families.architecture import shared_limit

from ..problem import Problem
from ..workload import WORKLOADS
from .targets import LIMITS, TARGETS, Target

ALLOWED = 1.1  # of the bandwidth: memory that is clocked higher, and what stays in the L2. An H200 reached 0.97
LEAST_LAUNCH_US = 0.5  # the shortest row of an H200 takes 0.94
LEAST_OF_CHAIN = 1 / 3  # of the waits between steps; the rows of an H200 take 0.77 of them and more
# Threads, programs, registers and threads of a warp of a card that is not known: no card has less.
LEAST_THREADS, LEAST_PROGRAMS, LEAST_REGISTERS = 1024, 16, 65536


def cards_like(capability: int, multiprocessors: int) -> list[Target]:
    """The known cards that a card may be: with its capability and multiprocessors; else of its capability; else all."""
    alike = [t for t in TARGETS.values() if t.capability == capability]
    return [t for t in alike if t.processors == multiprocessors] or alike or list(TARGETS.values())


def card_of(device: str, capability: int, multiprocessors: int) -> Target:
    """A card as a target: the fastest memory of those that it may be, and the room that its architecture is known to have."""
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
    """The least time in which so many bytes move."""
    return moved / (ALLOWED * card.bandwidth_gb_s * 1e3)


def least_possible_us(problem: Problem, variant: Any, card: Target) -> float:
    """The least time of a variant: of its launches, of the bytes that must move, of the steps that wait for each other."""
    works = WORKLOADS[problem.family].work(problem, variant)
    return max(
        LEAST_LAUNCH_US * len(works),
        memory_us(WORKLOADS[problem.family].bytes_moved(problem.spec, problem.size), card),
        LEAST_OF_CHAIN * sum(work.chain_us for work in works),
    )
