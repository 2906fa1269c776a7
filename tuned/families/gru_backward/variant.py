"""The ways to run the gradient of a recurrence: as the recurrence in one launch, with messages of three values a unit."""

from __future__ import annotations

import dataclasses
import itertools
import math

from tuned.families.architecture import LEAST_SHARED, shared_limit
from tuned.families.choices import choices
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import (
    CORE_KNOBS,
    MAX_LOAD,
    MIN_PART,
    PTX_EXCHANGES,
    SMALLEST,
    SPIN_CAPABILITY,
    TILE_BATCHES,
    GruVariant,
    adapt,
    exchange_rejection,
    products_rejection,
    programs,
    sees_stores,
    size_rejection,
)
from tuned.families.launch import ceil_div, next_power_of_2
from tuned.families.products import WAVE

__all__ = [
    "CORE_KNOBS",
    "GruVariant",
    "adapt",
    "default_variant",
    "distance",
    "doubt",
    "fit",
    "rejection",
    "sized",
]

MAX_MESSAGE = 96  # registers of a thread for a message, and for the operand that it becomes; variants with more spill
MESSAGE_OF_FEW_WARPS = 2**15  # bytes of a tile's message up to which four warps wait for it as fast as eight
TURN_US, MESSAGE_BYTES_PER_US = 2.0, 37e3  # the time of a turn beside reading its message: docs/decisions/0082
FAR = 3.0  # octaves: a row says nothing of calls that are further away


def pieces(spec: GruSpec, splits: int) -> tuple[int, int, int]:
    """A message's columns, the gradients of three gates of each unit, as up to three widths: powers of two, 0 for none.

    The largest is as small as can be: shared memory has one piece at a time, beside the weights.
    """
    columns, least = 3 * spec.hidden, MIN_PART * splits
    largest = max(least, next_power_of_2(ceil_div(columns, 3)))
    widths: list[int] = []
    while columns > 0:
        widths.append(largest if columns > largest else max(least, next_power_of_2(columns)))
        columns -= widths[-1]
    first, second, third = (*widths, 0, 0)[:3]
    return first, second, third


def shared_bytes(spec: GruSpec, variant: GruVariant) -> int:
    """Bytes of shared memory per program: weights, and a piece of a message or accumulators that change layout."""
    widths = pieces(spec, variant.splits)
    message = variant.block_batch * max(widths) * spec.item
    sums = 4 * variant.splits * variant.block_hidden * variant.block_batch
    return variant.block_hidden * sum(widths) * spec.item + max(message, sums)


def alone(spec: GruSpec, variant: GruVariant) -> bool:
    """Whether a program has all units of its rows, and waits for its own messages alone."""
    return variant.block_hidden >= spec.hidden


def rejection(
    spec: GruSpec,
    size: GruSize | None,
    variant: GruVariant,
    capability: int = 90,
    multiprocessors: int | None = None,
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, on so many multiprocessors, if given), or None."""
    reason = _text_rejection(spec, variant) or products_rejection(variant) or _tile_rejection(spec, variant, capability)
    reason = reason or exchange_rejection(spec, variant, capability, pieces(spec, variant.splits))
    if reason is not None or size is None:
        return reason
    return size_rejection(spec, size, variant, multiprocessors, waits=not alone(spec, variant))


def _text_rejection(spec: GruSpec, variant: GruVariant) -> str | None:  # noqa: PLR0911 - one return per rule
    if variant.strategy != "persistent":
        return f"strategy={variant.strategy!r} is not there for gradients: PyTorch's own takes a launch for each step"
    if variant.by_row:
        return "form='row' is not there for gradients: their messages are three times as large as the state"
    if variant.staged:
        return "form='staged' is not there for gradients: a message of so many units is not in registers"
    if spec.stacked:
        return "the gradient of a stack is taken layer by layer"
    if spec.thd and variant.exchange != "counter":
        return "layout='thd' counts: rows that no sequence has would be waited for, and end in the gradients of weights"
    if variant.exchange == "probe":
        return "exchange='probe' is not there for gradients: pieces behind the first are not loaded in vain as it is"
    if variant.in_turn and variant.prefetch == "late":
        return "turns: other tiles are computed while one is waited for, so how it is waited for matters little"
    return None


def _tile_rejection(spec: GruSpec, variant: GruVariant, capability: int) -> str | None:
    threads = 32 * variant.num_warps
    if variant.block_hidden >= 2 * next_power_of_2(max(spec.hidden, SMALLEST)):
        return f"block_hidden={variant.block_hidden} would leave more than half of its units empty with {spec.hidden}"
    if variant.form == "tile":
        return "form='tile' has a message in registers three times as large as the recurrence: each one that was compiled spills"
    limit = shared_limit(capability)
    if (needed := shared_bytes(spec, variant)) > limit:
        return (
            f"{needed} bytes of weights and messages are more than the {limit} of shared memory that a program can have"
        )
    registers = variant.block_batch * sum(pieces(spec, variant.splits)) * spec.item / 4 / threads
    if registers > MAX_MESSAGE:
        return f"a message of {variant.block_batch} rows needs {registers:.0f} registers of a thread, and {MAX_MESSAGE} are left"
    return None


def default_variant(spec: GruSpec, size: GruSize | None = None) -> GruVariant:
    """A variant for any spec and size that is legal on an H200; without a size, on every GPU if there is one.

    Waiting for messages and reading them takes the time of a step. So of the variants that fit the multiprocessors of an H200 it
    is the one with the fewest rows a program, then the fewest turns; then tiles of 16 units and more come before smaller ones.
    """
    knobs = choices(GruVariant)
    tiles = itertools.product(TILE_BATCHES[:3], (16, 32, 64, 8), knobs["turns"] if size is not None else (1,))
    tried = []
    for rows, units, turns in tiles:
        warps = 4 if 3 * spec.hidden * rows * spec.item <= MESSAGE_OF_FEW_WARPS else 8
        tried.append(GruVariant("persistent", "split", units, rows, num_warps=warps, turns=turns))
    here = [v for v in tried if rejection(spec, size, v, multiprocessors=WAVE if size else None) is None]
    legal = [v for v in here if all(rejection(spec, size, v, capability) is None for capability in LEAST_SHARED)]
    if size is None:
        return (legal or here or tried)[0]
    return min(here or tried[:1], key=lambda v: (v.turns * v.block_batch, v.turns))


def step_us(spec: GruSpec, size: GruSize, variant: GruVariant) -> float:
    """The estimated time of a step: each turn waits for a message, and reads it. It is 0.6 to 1.15 of eight in ten H100 rows' time."""
    message = min(variant.block_batch, size.batch) * 3 * spec.hidden * spec.item
    return variant.turns * (TURN_US + message / MESSAGE_BYTES_PER_US)


def sized(variant: GruVariant, spec: GruSpec, size: GruSize, multiprocessors: int) -> GruVariant:
    """A variant with as many turns as its programs need at a size, and no more rows than there are."""
    rows = min(variant.block_batch, max(SMALLEST, next_power_of_2(size.batch)))
    tried = [dataclasses.replace(variant, block_batch=rows, turns=turns) for turns in choices(GruVariant)["turns"]]
    fitting = [v for v in tried if programs(spec, size, v) <= multiprocessors]
    if not fitting:
        return variant
    one = fitting[0]
    return dataclasses.replace(one, prefetch="early") if one.in_turn else one


def distance(a: GruSpec, b: GruSpec) -> float:
    """The distance between two specs, in octaves.

    Octaves of the hidden size count 2 each; both directions for one count 1, another item size 1. Resets count
    nothing; each other difference counts a half.
    """
    others = (a.layout != b.layout, a.bias != b.bias, a.dtype != b.dtype, a.precision != b.precision)
    octaves = 2 * abs(math.log2(a.hidden / b.hidden)) + float(a.directions != b.directions)
    return octaves + float(a.item != b.item) + 0.5 * sum(others)


def doubt(row: GruSpec, spec: GruSpec, _size: GruSize, octaves: float) -> str | None:
    """Why a row's time does not say that a kernel is faster than PyTorch's operator at another shape, or None."""
    if (row.item, row.item == 4 and row.precision) != (spec.item, spec.item == 4 and spec.precision):  # noqa: PLR2004 - bytes
        return "products of another precision take another time"
    if octaves > FAR:
        return f"{octaves:.2g} octaves are far"
    if spec.hidden * spec.item % MAX_LOAD and not row.hidden * row.item % MAX_LOAD:
        return f"rows that are no multiples of {MAX_LOAD} bytes are loaded an element at a time"
    return None


def fit(variant: GruVariant, spec: GruSpec, capability: int) -> GruVariant:
    """The variant for a spec on another architecture: no inline PTX where it is impossible, and smaller tiles until it fits."""
    if spec.thd:
        variant = dataclasses.replace(variant, exchange="counter")
    lacks = capability < SPIN_CAPABILITY[spec.item] or spec.hidden * spec.item % MAX_LOAD
    if variant.exchange in PTX_EXCHANGES and lacks:
        variant = dataclasses.replace(variant, exchange="poll" if sees_stores(capability) else GruVariant.exchange)
    while rejection(spec, None, variant, capability) is not None and variant.block_hidden > SMALLEST:
        variant = dataclasses.replace(variant, block_hidden=variant.block_hidden // 2)
    return variant
