"""What dispatch chooses for calls on cards that nobody measured: draw shapes by a seed, ask the lookup, test its choice.

A choice holds if it is legal on the card, ships, compiles without a spill within the card's shared memory, and a processor
has room for a program; programs that wait for each other must all run at once. A family with a model of its time must
offer a variant in one launch wherever one fits. A card is known by its architecture and processors, not by its name.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tuned.families.choices import undeclared
from tuned.families.launch import ceil_div
from tuned.lookup.lookup import Choice, Gpu, choose
from tuned.lookup.table import ships, tables

from ..estimating.targets import TARGETS, Target, UnknownTargetError, target_named
from ..measuring.compile import Resources, distinct
from ..problem import Problem
from ..processes.compiler import compile_variant, compiled, hopeless
from ..searching.pool import legal_pool
from ..workload import WORKLOADS, Workload, default_problems

SHAPES, SEED = 200, 0
COMPILE_SECONDS = 120.0  # long, since the machine may do other things too: a slow compilation is no verdict
RESERVED_BYTES = 1024  # of shared memory, for each program: CUDA C++ Programming Guide, technical specifications
REGISTER_UNIT = 8  # registers are allocated to a thread in units of so many
# How a family with a model serves a call.
ONE_LAUNCH, LIBRARY, STEPS = "one launch", "PyTorch's own", "a launch a step"


@dataclasses.dataclass(frozen=True)
class Room:
    """What one kernel of a call asks of a card."""

    need: Resources
    warps: int
    waits: bool  # whether its programs wait for each other


@dataclasses.dataclass(frozen=True)
class Asked:
    """A call on a card, and the choice that serves it there."""

    problem: Problem
    choice: Choice
    way: str | None  # one of the three above; None for a family without a model
    wrong: str | None  # why the choice does not hold, if that is known without the compiler


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compiler says of one of the choices; ``wrong`` is why the choice does not hold."""

    asked: Asked
    rooms: tuple[Room, ...]
    wrong: str | None


@dataclasses.dataclass(frozen=True)
class Card:
    """All that was found of one card."""

    target: Target
    asked: tuple[Asked, ...]
    kernels: tuple[Kernel, ...]
    distinct: int  # how many different kernels the choices have; ``kernels`` are those that were compiled

    @property
    def wrong(self) -> list[str]:
        """The choices that do not hold, as sentences."""
        found = [(a.problem, a.choice, a.wrong) for a in (*self.asked, *self.unfit) if a.wrong is not None]
        return [
            f"{self.target.device}: {p.family} {p.spec} with {p.size}: {choice.rule}: {why}: {choice.variant}"
            for p, choice, why in found
        ]

    @property
    def unfit(self) -> list[Asked]:
        """The choices whose kernels do not hold, with the reason."""
        return [dataclasses.replace(k.asked, wrong=k.wrong) for k in self.kernels if k.wrong is not None]


def cards_named(names: str | None) -> list[Target]:
    """The targets with these names (or parts of names, with commas between); without names, all that have no table here.

    Raises:
        UnknownTargetError: a name fits no target or several.
    """
    if names is None:
        measured = tables()
        return [target for device, target in TARGETS.items() if device not in measured]
    found = [target_named(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise UnknownTargetError(
            f"cards must be names with commas between, got {names!r}: leave them out for all without a table"
        )
    return found


def drawn(count: int, seed: int, families: Mapping[str, Workload] | None = None) -> list[Problem]:
    """So many problems, of each family in turn, of all families or of these; the same seed gives the same problems."""
    works, draw = list((families or WORKLOADS).values()), random.Random(seed)  # noqa: S311 - shapes, no secrets
    return [_drawn(works[i % len(works)], draw) for i in range(count)]


def _drawn(work: Workload, draw: random.Random) -> Problem:
    """A problem of any shape; for a family that draws no shapes, one of its default problems."""
    return draw.choice(default_problems(work.family.name)) if work.any_shape is None else work.any_shape(draw)


def gpu_of(target: Target) -> Gpu:
    """A card as dispatch sees it: its architecture and its processors, under a name that no table has."""
    return Gpu(f"any_{target.architecture}_of_{target.processors}", target.capability, target.processors)


def ask(problem: Problem, target: Target) -> Asked:
    """What dispatch's lookup chooses for a call on a card; nothing is compiled."""
    family, gpu = WORKLOADS[problem.family].family, gpu_of(target)
    choice = choose(family, problem.spec, problem.size, gpu)
    variant = choice.variant
    wrong = None
    if variant is not None:
        wrong = undeclared(variant) or family.rejection(
            problem.spec, problem.size, variant, gpu.capability, gpu.multiprocessors
        )
        if wrong is None and not ships(family, problem.spec, variant):
            wrong = "the package does not ship its kernels"
    if family.model is None:
        return Asked(problem, choice, None, wrong)
    way = LIBRARY if variant is None else ONE_LAUNCH if family.model.covers(variant) else STEPS
    if wrong is None and (way == STEPS or (way == LIBRARY and not choice.us)):
        wrong = _not_offered(problem, target)
    return Asked(problem, choice, way, wrong)


def _not_offered(problem: Problem, target: Target) -> str | None:
    """The complaint that a variant in one launch fits and was not offered; None if no variant of the pool fits."""
    family = WORKLOADS[problem.family].family
    assert family.model is not None
    pool = legal_pool(problem, target.capability, target.processors).variants
    one = next((v for v in pool if family.model.covers(v) and ships(family, problem.spec, v)), None)
    return None if one is None else f"a variant in one launch fits and was not offered: {one}"


def rooms(problem: Problem, variant: Any, architecture: str) -> tuple[Room, ...] | str:
    """What each kernel of a call asks for, or the compiler's complaint. Runs in a pool process; touches no GPU."""
    needs = compile_variant(problem, variant, architecture)
    if isinstance(needs, str):
        return needs
    work = WORKLOADS[problem.family]
    steps = work.family.launches(problem.spec, variant, work.inputs(problem.spec, problem.size, "meta", 0))
    options = (launch.options for launch, _ in distinct(steps))
    return tuple(
        Room(need, int(option.get("num_warps", 4)), bool(option.get("launch_cooperative_grid")))
        for need, option in zip(needs, options, strict=True)
    )


def no_room(found: tuple[Room, ...] | str, target: Target) -> str | None:
    """Why a card cannot run the compiled kernels, or None."""
    needs = found if isinstance(found, str) else tuple(room.need for room in found)
    if (reason := hopeless(needs, target.capability)) is not None:
        return reason
    assert not isinstance(found, str)
    return next((reason for room in found if (reason := _no_room(room, target)) is not None), None)


def _no_room(room: Room, target: Target) -> str | None:
    here = held(room, target)
    if here < 1:
        return (
            f"a processor holds no program of {room.warps} warps with {room.need.registers} registers a thread and "
            f"{room.need.shared_bytes} bytes of shared memory"
        )
    if room.waits and room.need.programs > here * target.processors:
        return f"{room.need.programs} programs wait for each other, and {target.processors} processors hold {here} each"
    return None


def held(room: Room, target: Target) -> int:
    """How many programs of a launch a processor holds at a time: the CUDA occupancy calculation."""
    threads = target.warp * room.warps
    registers = ceil_div(max(1, room.need.registers), REGISTER_UNIT) * REGISTER_UNIT
    reserved = RESERVED_BYTES if target.capability else 0
    shared = room.need.shared_bytes + reserved
    return min(
        target.threads // threads,
        target.registers // (registers * threads),
        target.shared_bytes // shared if shared else target.programs,
        target.programs,
    )


def _code(asked: Asked) -> tuple[Any, ...]:
    """A key, equal for choices that Triton compiles alike: of a size, it knows whether it is 1, or a multiple of 16."""
    sizes = tuple((n == 1, n % 16 == 0) for n in dataclasses.astuple(asked.problem.size))
    return asked.problem.family, asked.problem.spec, asked.choice.variant, sizes


def look(
    target: Target, shapes: int, seed: int, compiler: concurrent.futures.Executor, most: int | None = None
) -> Card:
    """Ask for so many shapes; compile each different kernel of the choices once, or ``most`` of them, evenly spaced."""
    asked = tuple(ask(problem, target) for problem in drawn(shapes, seed))
    by_code = {_code(a): a for a in reversed(asked) if a.choice.variant is not None and a.wrong is None}
    every = list(reversed(by_code.values()))
    count = len(every) if most is None else min(most, len(every))
    sample = [every[i * len(every) // count] for i in range(count)]
    waiting = [compiler.submit(rooms, a.problem, a.choice.variant, target.architecture) for a in sample]
    kernels = []
    for one, future in zip(sample, waiting, strict=True):
        found: Any = compiled(future)
        kernels.append(Kernel(one, () if isinstance(found, str) else found, no_room(found, target)))
    return Card(target, asked, tuple(kernels), len(every))


def by_family(card: Card) -> Iterator[tuple[str, list[Asked], list[Kernel]]]:
    """Family, its choices, its kernels."""
    for name in WORKLOADS:
        asked = [a for a in card.asked if a.problem.family == name]
        if asked:
            yield name, asked, [k for k in card.kernels if k.asked.problem.family == name]


def ways(card: Card) -> dict[tuple[str, str], Counter[str]]:
    """(family, dtype) -> how often its calls are served in which way, for families with a model."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for asked in card.asked:
        if asked.way is not None:
            kind = asked.problem.family, str(getattr(asked.problem.spec, "dtype", ""))
            found.setdefault(kind, Counter())[asked.way] += 1
    return dict(sorted(found.items()))
