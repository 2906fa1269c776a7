"""From a seed and an index to a case: its call, the neighbour of the call, and the order in which they come."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch

from tests.fuzz import draw_append, draw_dropins, draw_gru, draw_latent, draw_norm, draw_rope
from tests.fuzz.case import Call, Case, Name
from tests.fuzz.forced import every_row, rows
from tests.fuzz.views import View, drawn, redrawn

if TYPE_CHECKING:
    from collections.abc import Sequence

ELEMENTS = 3e7  # elements of all calls' tensors in a case; a case of larger tensors still has six calls
NORMED = 0.2  # share of rotations with a norm before them
LATENT = 0.15  # share of the other rotations that are of latent attention
APPENDED = 0.1  # share of rotations that write a cache
WRONG = 0.1  # share of all cases whose calls are not allowed
KINDS = {"rope": 46, "gru": 13, "gru_cell": 9, "linear_cat": 6, "nn_gru": 8, "nn_gru_cell": 5, "dropin": 13}


@dataclasses.dataclass(frozen=True)
class World:
    """Where calls run: everything about the place that decides what is drawn, or what is right."""

    device: str = "cpu"
    truncates: bool = False  # Triton's interpreter, which rounds bfloat16 toward zero
    sees_values: bool = True  # of positions, which a call reads on a CPU
    most: int = 200_000  # elements of a rotated tensor
    hidden: int = 256
    long: int = 5  # how often sequences are long
    texts: bool = True  # modules raise errors with PyTorch's text
    modes: tuple[str, ...] = ("plain", "no_grad", "inference", "grad", "autocast", "stream", "graph")
    kinds: tuple[str, ...] = tuple(KINDS)
    forces: bool = False  # whether every second case forces a variant

    @property
    def casts(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16) if self.device == "cuda" else (torch.bfloat16,)

    def mode(self, rng: random.Random, allowed: Sequence[str]) -> str:
        weights = {"plain": 25, "no_grad": 25, "inference": 8, "grad": 20, "autocast": 6, "stream": 6, "graph": 8}
        names = [n for n in allowed if n in self.modes]
        return rng.choices(names, [weights[n] for n in names])[0]

    def integers(self, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, values: Sequence[int]) -> View:
        """A tensor of positions, offsets or bounds."""
        return drawn(rng, shape, dtype, shared=False, values=tuple(values))


CPU = World(modes=("plain", "no_grad", "inference", "grad", "autocast"))
GPU = World("cuda", sees_values=False, most=1_000_000, hidden=600, forces=True)


def drawn_call(rng: random.Random, world: World, kind: str, row: Any = None) -> Call:
    """A call of a kind; like a table's row if one is given."""
    wrong = row is None and rng.random() < WRONG
    spec = None if row is None else row.spec
    if kind == "rope":
        return _rotation(rng, world, row, wrong=wrong)
    if kind == "dropin":
        return draw_dropins.draw(rng, world, wrong=wrong)
    if kind in ("nn_gru", "nn_gru_cell"):
        return getattr(draw_gru, kind)(rng, world, wrong=wrong)  # type: ignore[no-any-return]
    size = None if row is None or rng.random() < 0.2 else row.size
    call = getattr(draw_gru, kind)(rng, world, spec, size)
    return draw_gru.spoiled(rng, world, call) if wrong else call


def _rotation(rng: random.Random, world: World, row: Any, *, wrong: bool) -> Call:
    spec = None if row is None else row.spec
    way = rng.random() if spec is None else 0.5
    if way > 1 - APPENDED if spec is None else spec.appends:
        return draw_append.draw(rng, world, spec)
    if way < NORMED if spec is None else spec.normed:
        return draw_norm.draw(rng, world, spec)
    if rng.random() < LATENT if spec is None else spec.splits or spec.deinterleaves:
        return draw_latent.draw(rng, world, spec)
    call = draw_rope.draw(rng, world, spec, None if row is None else row.size)
    plain = all(type(v) is not Name or str(v) in call.views for v in call.arguments.values())
    return draw_rope.spoiled(rng, world, call) if wrong and plain else call


def neighbour(rng: random.Random, world: World, kind: str, call: Call, row: Any = None) -> Call:
    """A call that differs from this one in a tensor's strides or place, or in the mode; sometimes in more."""
    way = rng.random()
    if call.check == "check_refused" or way < 0.3:
        return drawn_call(rng, world, kind, row)
    if way < 0.45:
        modes = [m for m in ("plain", "no_grad", "inference") if m in world.modes]
        if call.mode in modes:
            return dataclasses.replace(call, mode=rng.choice(modes))
    name = rng.choice(sorted(call.views))
    if call.function.endswith("rope_qkv") and name == "qkv":
        return call
    plain = [n for n in sorted(call.views) if n not in ("qkv", "kv", "batch_sizes", "order", "query", "key")]
    if not plain:
        return call
    name = rng.choice(plain)
    view = call.views[name]
    if view.device:
        return call
    new = redrawn(rng, view) if name not in call.written else redrawn(rng, dataclasses.replace(view))
    if rng.random() < 0.4:  # only another place in memory
        new = dataclasses.replace(view, offset=view.offset + (2 if view.negative else 1), size=view.size + 2)
    return dataclasses.replace(call, views=call.views | {name: new})


# Families that serve calls of another kind if these need a gradient. In the interpreter nothing here runs them.
CALLED_BY = {"gru_backward": "gru"}


def _walk(world: World) -> list[tuple[str, int]]:
    """The rows that calls of a world can get."""
    there = [pair for pair in every_row() if CALLED_BY.get(pair[0], pair[0]) in world.kinds]
    return [pair for pair in there if pair[0] not in CALLED_BY or world.device == "cuda"]


def case(world: World, seed: int, index: int, repeats: int = 3) -> Case:
    """The case of an index; it is the same in every process.

    Every second case walks over the rows of tables and portfolios and forces a row's variant. In every other walk calls
    are like the row. Such cases have few repeats, since they are for seeing another kernel.
    """
    rng = random.Random(seed * 1_000_003 + index)
    kinds = [k for k in KINDS if k in world.kinds]
    force, row = None, None
    if world.forces and index % 2:
        walk = _walk(world)
        turn, at = divmod(index // 2, len(walk))
        force = walk[at]
        kinds, repeats = [CALLED_BY.get(force[0], force[0])], min(repeats, 4)
        row = None if turn % 2 else rows(force[0])[force[1]]
        # What kernels serve: PyTorch serves steps and linears that need a gradient; autocast asks for another dtype.
        modes = [m for m in world.modes if m != "autocast" and (m != "grad" or force[0] == "rope")]
        modes = ["grad"] if force[0] in CALLED_BY else modes
        world = dataclasses.replace(world, modes=tuple(modes))
    kind = rng.choices(kinds, [KINDS[k] for k in kinds])[0]
    first = drawn_call(rng, world, kind, row)
    second = neighbour(rng, world, kind, first, row)
    elements = max(sum(v.size for v in call.views.values()) for call in (first, second))
    repeats = max(min(repeats, int(ELEMENTS / max(elements, 1))), min(repeats, 3))
    seeds = [rng.randrange(1 << 30) for _ in range(2 * repeats)]
    order = [0, 0, 1, 0, 1, 1][: 2 * repeats] + [rng.randrange(2) for _ in range(2 * repeats - 6)]
    return Case(seed, index, (first, second), tuple(zip(order, seeds, strict=True)), force)


def index_of(world: World, family: str, row: int, turn: int) -> int:
    """The index of the case that forces a row in a walk; in walks of even turns the calls are like the row."""
    walk = _walk(world)
    return 2 * (turn * len(walk) + walk.index((family, row))) + 1
