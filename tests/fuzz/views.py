"""Tensors of any strides, each inside a larger poisoned storage; one seed determines everything that is drawn."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import random

MARGIN = 16  # elements around a view that nothing may read or write: at least 16 bytes, which keeps alignment
POISON = {True: math.nan, False: 2**30 + 7}  # key: whether the dtype is floating point
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class View:
    """How one tensor of a call is made: its place in a storage, and its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int
    size: int  # elements of the storage
    scale: float = 1.0  # scale of normal numbers
    function: str = ""  # "cos" or "sin" of the numbers of ``stream``; "rates": falling, as inv_freq
    values: Any = None  # integers in the order of the shape, in place of random numbers
    stream: str = ""  # tensors with the same stream have the same numbers
    negative: bool = False  # as z.conj().imag is: memory holds minus the value
    device: str = ""  # another device than the call's
    grad: str = ""  # "leaf": it requires a gradient; "made": it is a view of something made of a leaf

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass
class Built:
    """A tensor of a call, its storage, and the contents of the storage before the call."""

    view: View
    tensor: torch.Tensor
    storage: torch.Tensor  # [size]
    before: torch.Tensor  # bits of the storage, as integers
    leaf: torch.Tensor | None = None  # the tensor whose gradient is asked for

    def value(self) -> torch.Tensor:
        """The tensor as it was before the call, in new memory."""
        storage = self.before.view(self.view.dtype)
        t = storage.as_strided(self.view.shape, self.view.strides, self.view.offset).clone()
        return -t if self.view.negative else t


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(INTEGERS[t.element_size()])


@functools.lru_cache(maxsize=256)
def outside(view: View, device: str) -> torch.Tensor:
    """[size]: which elements of the storage do not belong to the view."""
    out = torch.ones(view.size, dtype=torch.bool, device=device)
    if view.numel:
        out[places(view, device).flatten()] = False
    return out


@functools.lru_cache(maxsize=256)
def places(view: View, device: str) -> torch.Tensor:
    """For each element of the view, its place in the storage."""
    return torch.arange(view.size, device=device).as_strided(view.shape, view.strides, view.offset)


@functools.lru_cache(maxsize=256)
def overlaps(view: View) -> int:
    """The largest number of elements of the view that lie in one place."""
    return int(places(view, "cpu").flatten().bincount().max()) if view.numel else 1


def numbers(view: View, seed: int, device: str) -> torch.Tensor:
    """[size]: the numbers drawn for a view."""
    draw = torch.Generator(device).manual_seed(seed)
    wide = torch.float64 if view.dtype == torch.float64 else torch.float32
    drawn = torch.randn(view.size, generator=draw, device=device, dtype=wide)
    if view.function == "rates":
        drawn = drawn.abs() * view.scale
    elif view.function:
        drawn = getattr(torch, view.function)(drawn * view.scale)
    elif view.scale != 1.0:
        drawn = drawn * view.scale
    return drawn.to(view.dtype)


@functools.lru_cache(maxsize=256)
def _listed(view: View, device: str) -> torch.Tensor:
    """The storage of a view whose values are given; cached, because a copy to a GPU waits for the GPU."""
    storage = torch.full((view.size,), POISON[view.dtype.is_floating_point], dtype=view.dtype)
    if view.numel:
        storage[places(view, "cpu").flatten()] = torch.tensor(view.values, dtype=view.dtype).flatten()
    return storage.to(device)


def filled(view: View, seed: int, device: str) -> torch.Tensor:
    """A storage with the values of the view, and poison everywhere else."""
    if view.values is not None:
        return _listed(view, device).clone()
    if not view.dtype.is_floating_point:
        return torch.full((view.size,), 1, dtype=view.dtype, device=device)
    return numbers(view, seed, device).masked_fill_(outside(view, device), POISON[True])


def seed_of(seed: int, name: str) -> int:
    """Another seed for each tensor of a call; hash() would differ from process to process."""
    return (seed * 1_000_003 + sum(ord(c) * 131**i for i, c in enumerate(name))) % 2**63


def build(name: str, view: View, seed: int, device: str) -> Built:
    """The tensor that a view describes, for one seed."""
    where = view.device or device
    if where == "meta":
        t = torch.empty_strided(view.shape, view.strides, dtype=view.dtype, device="meta")
        return Built(view, t, t, t)
    storage = filled(view, seed_of(seed, view.stream or name), where)
    before = bits(storage).clone()
    leaf = None
    base = storage
    if view.grad == "made":
        leaf = storage.clone().requires_grad_()
        base = leaf.clone()
    t = base.as_strided(view.shape, view.strides, view.offset)
    if view.negative:
        t = torch._neg_view(t)
    if view.grad == "leaf":
        t = leaf = t.detach().requires_grad_()
    return Built(view, t, base.detach(), before, leaf)


def refill(built: Built, name: str, seed: int, device: str) -> None:
    """Put other values into the same memory, as for a captured graph before a replay."""
    if built.storage.device.type != "meta":
        built.storage.copy_(filled(built.view, seed_of(seed, built.view.stream or name), built.view.device or device))
        built.before.copy_(bits(built.storage))


# What is drawn ------------------------------------------------------------------------------------------------------

PLAIN = 0.35  # share of contiguous tensors


def drawn(
    rng: random.Random,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    shared: bool = True,
    plain: float = PLAIN,
    inner: bool = False,
    **rest: Any,
) -> View:
    """A view of this shape with any strides; ``shared``: several of its elements may lie in one place.

    ``inner``: the last axis is dense. Otherwise axes are in any order, with any steps and gaps, expanded or overlapping;
    axes of length 1 have any stride, and the first element is anywhere.
    """
    strides, extent = _strides(rng, shape, shared=shared, plain=plain, inner=inner)
    misaligned = 0 if rng.random() < 0.6 else rng.choice((1, 1, 2, 3, 4, 8, 13))
    negative = rest.pop("negative", False)
    if negative:  # the view is a part of a complex tensor: two numbers an element
        strides, extent, misaligned = tuple(2 * s for s in strides), 2 * extent, 2 * misaligned + 1
    offset = MARGIN + misaligned
    return View(shape, dtype, strides, offset, offset + extent + MARGIN, negative=negative, **rest)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def _strides(
    rng: random.Random, shape: tuple[int, ...], *, shared: bool, plain: float, inner: bool
) -> tuple[tuple[int, ...], int]:
    strides = list(dense(shape))
    if rng.random() >= plain:
        axes = list(range(len(shape)))
        way = rng.random()
        if way < 0.35:
            rng.shuffle(axes)
        elif way < 0.5 and len(axes) > 1:  # a transpose of two
            a, b = rng.sample(axes, 2)
            axes[a], axes[b] = axes[b], axes[a]
        if inner and shape:
            axes.remove(len(shape) - 1)
            axes.append(len(shape) - 1)
        step = 1
        for axis in reversed(axes):
            apart = 1 if rng.random() < 0.75 else rng.choice((2, 3))
            if inner and axis == len(shape) - 1:
                apart = 1
            strides[axis] = step * apart
            step = strides[axis] * max(shape[axis], 1)
            if rng.random() < 0.25:
                step += rng.choice((1, 2, 3, 8, 16, 24))
        long = [axis for axis, n in enumerate(shape) if n > 1 and not (inner and axis == len(shape) - 1)]
        if shared and long and rng.random() < 0.15:
            strides[rng.choice(long)] = 0
        elif shared and long and rng.random() < 0.03:  # overlapping windows, as unfold gives
            axis = rng.choice(long)
            strides[axis] = max(1, strides[axis] // 2)
    for axis, n in enumerate(shape):
        if n == 1 and rng.random() < 0.4:
            strides[axis] = rng.choice((0, 1, 3, 7, 40, 1000))
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    return tuple(strides), extent


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, **rest: Any) -> View:
    return View(shape, dtype, dense(shape), MARGIN, MARGIN + math.prod(shape) + MARGIN, **rest)


def redrawn(rng: random.Random, view: View, **changes: Any) -> View:
    """The same tensor with other strides."""
    shared = any(s == 0 and n > 1 for s, n in zip(view.strides, view.shape, strict=True))
    kept = {f.name: getattr(view, f.name) for f in dataclasses.fields(View) if f.name not in _PLACE}
    made = drawn(rng, view.shape, view.dtype, shared=shared, **kept)
    return dataclasses.replace(made, **changes)


_PLACE = ("shape", "dtype", "strides", "offset", "size")
