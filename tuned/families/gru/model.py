"""What the time of a recurrence is made of, for a variant and for torch.nn.GRU, and the variants worth considering.

The time of a call is a weighted sum of amounts. The weights are fitted to measurements: tuned/tables/_models.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from tuned.families.choices import choices
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import (
    ROW_RESIDENT,
    STAGED_BATCHES,
    STAGED_UNITS,
    STAGED_WARPS,
    TILE_BATCHES,
    TILE_WARPS,
    GruVariant,
    alone,
    kept,
    past,
    programs,
    rejection,
    row_variant,
    stage_width,
    weight_bytes,
    widths,
)
from tuned.families.launch import ceil_div, next_power_of_2

SMALL_HIDDEN, SMALL_BATCH = (
    (64, 128),
    256,
)  # dense float32 layers for which cuDNN has a kernel that keeps the weights on chip
LAYER_OVER_FIRST = 0.2  # cuDNN runs the layers of a stack side by side: one more takes this part of the first's time
# A variant's estimate is raised by NEAR for each octave to a row that it won, and by NEAR_MOST at most.
NEAR, NEAR_MOST = 0.06, 0.1
MOST_ALIGNED = 16
MARGIN, MARGIN_NARROW = 0.85, 0.65
MARGIN_ROW = 0.9  # for form "row": of 123 drawn calls, those with an estimate of up to 0.92 took 0.93 at most
# For form "row" whose gates in float32 do not stay in the L2 from the product of the input to their step: eight such calls took 1.02
# to 1.45 of the model's estimate, which was fitted to calls of 64 steps (docs/decisions/0087).
MARGIN_ROW_FAR, L2_BYTES = 0.7, 50e6
MARGIN_STEPS = 0.95  # of a launch for each step, as nn.GRU has: of 46 shapes that were measured none took more than 1.04 of its time
MARGIN_ON_CHIP = 0.5  # for layers that ``stays_on_chip``: kernels took up to 2.1 times the model's estimate
# For float32, both directions, many rows. None was measured, and kernels took up to 2.4 times the model's estimate.
MARGIN_BOTH_FLOAT32, MANY_ROWS = 0.6, 128
# For float32 and more rows still: a call of 370 rows was estimated at 0.52 of PyTorch's time, and took 1.06.
MARGIN_MANY_FLOAT32, MOST_ROWS = 0.5, 256
MARGIN_NARROW_FLOAT32 = 0.45  # a call of 1015 units that was estimated at 0.5 took 0.86: docs/decisions/0080
# As a call torch.nn.GRU launches a GEMM and a kernel for each step of a cell (a layer and direction): of 290 random calls on six
# hosts with H200s none took less than 9.3 us for a step of a cell. The exceptions are dense float32 layers that cuDNN may run in
# one launch: those of up to 128 units, and of up to 192 with not too many rows.
HOST_STEP_US = 8.0
ONE_LAUNCH_HIDDEN, ONE_LAUNCH_BATCH = (128, 192), 256
LEAST_ROWS = 16  # of a product on tensor cores
# Units and rows beyond which cuDNN's one launch takes three to seven times as long: 467 rows of 182 units took 66 us a step.
SPILLED_HIDDEN, SPILLED_BATCH = 160, 160
# Bytes of a warp's part of a row of weights. From so many on, and if rows are a multiple of 16 bytes, products take up to three
# times as long.
WIDE_PART = 1024
# Units of form "tile" from which on warpgroups multiply; units of the smallest tile; registers up to which a thread has enough.
WARPGROUP_UNITS, FEWEST_UNITS, FREE_REGISTERS = 64, 8, 160
MEASURED, PROCESSORS = (
    90,
    132,
)  # the capability and multiprocessors that the weights were measured on, with tiles of all kinds
# Limits for ``registers``, of the 255 that a thread may have. Beyond, tiles spilled and took many times the model's estimate: 64 rows
# and 32 units of a stack of 448 spilled 60,996 bytes a thread, and took 25 times as long; 32 rows and 64 units, which need 224
# registers, 29,168 bytes and 21 times; 16 rows and 128 units, which need 200, 18,246 bytes and 12 times. Other forms have fewer
# sums and more operands, and spill less.
MOST_REGISTERS, MOST_SPLIT_REGISTERS = 208, 190
# If a row is no multiple of 16 bytes, kernels spill on other cards from so many elements of a piece of the state a thread, with so
# many rows or results a program: 20 of 23 did, by up to 37,302 bytes a thread (docs/decisions/0049).
NARROW_ELEMENTS, NARROW_ROWS, NARROW_RESULTS = 32, 32, 1024
# Beyond so many units (form "tile") or registers (either form) kernels spill on other cards whatever the row. Of 142 tiles that
# were compiled for sm_86, sm_100 and sm_120, 21 have less: none of them spills, and 82 of the others do. Of 34 kernels of form
# "split" on sm_86, 16 of the 22 with more spill.
TILE_UNITS, TILE_REGISTERS, SPLIT_REGISTERS = 16, 80, 104


def covers(variant: GruVariant) -> bool:
    """Whether ``kernels`` describes a variant: one that has all steps in one launch."""
    return variant.strategy == "persistent"


def kernels(spec: GruSpec, size: GruSize, variant: GruVariant) -> dict[str, float]:
    """Amounts of a persistent variant: of the launch, and of each time step in its slowest program."""
    if variant.by_row:
        return _of_row(spec, size, variant)
    if variant.staged:
        return _staged(spec, size, variant)
    of_pieces = widths(spec, variant)
    columns, sets = sum(of_pieces), 2 if spec.stacked else 1
    units, rows, threads = variant.block_hidden, variant.block_batch, 32 * variant.num_warps
    read = _read(spec, size, variant)
    waits, tile = not alone(spec, variant), not variant.splits_columns
    turns = variant.turns
    state = turns * read * columns * spec.item * sets
    aligned = math.gcd(spec.hidden * spec.item, MOST_ALIGNED)  # bytes that a thread can load at a time
    multiplied = turns * 3 * units * columns * sets
    parts = () if tile or aligned < MOST_ALIGNED else of_pieces
    wide = sum(width for width in parts if width // variant.num_warps * spec.item >= WIDE_PART)
    late, unit_tiles = variant.prefetch == "late", ceil_div(spec.hidden, units) / 100
    single, products = spec.dtype == "float32", multiplied * max(rows, 8) * spec.item / variant.num_warps / 1e6
    found = {
        "step": 1.0,
        "turns": turns - 1.0,
        "pieces": turns * (len(of_pieces) - 1.0),
        "pieces_per_warp": turns * (len(of_pieces) - 1.0) / variant.num_warps,
        "elements": turns * units * rows / threads,
        "tile_products" if tile else "products": products,
        "tile_weights" if tile else "weights": multiplied
        * spec.item
        * (1 if tile else max(1, rows / LEAST_ROWS))
        / 1e6,
        "tile_small": products if tile and units < WARPGROUP_UNITS else 0.0,
        "tile_float": multiplied * rows / 1e6 if tile and single else 0.0,
        "products_float": products if single and not tile else 0.0,
        "products_narrow": multiplied / 1e5 if aligned < MOST_ALIGNED else 0.0,
        "most_warps": float(variant.num_warps == max(TILE_WARPS)),
        "fewest_units": float(units == FEWEST_UNITS),
        "crammed": max(registers(spec, variant) - FREE_REGISTERS, 0.0) / 32,
        "sums": 0.0 if tile else turns * variant.splits * units * rows / 1e6,
        "ieee": multiplied * rows / 1e6 if spec.dtype == "float32" and spec.precision == "ieee" else 0.0,
        "wide": turns * 3 * units * wide * spec.item * sets / variant.num_warps / 1e6,
        "ragged": 0.0 if spec.dense else 1.0,
    }
    if waits:
        found |= {
            variant.exchange: 1.0,
            "polled_narrow": columns / 1e3 if variant.exchange == "poll" and aligned < MOST_ALIGNED else 0.0,
            "spun_pieces": float(variant.exchange == "spin") * (len(of_pieces) - 1.0),
            # With several pieces in 16 bits "late" is slower, by 3 to 13 percent; with one piece it is faster, by 4 to 13.
            "early": float(not late and (len(of_pieces) == 1 or single)),
            "late_pieces": float(late and len(of_pieces) > 1 and not single),
            "crowd": (programs(spec, size, variant) / PROCESSORS) ** 2,
            "late_unit_tiles": late * unit_tiles,
            "late_warps": float(late and read > 1) * variant.num_warps,
            "state": state / 1e6,
            "state_per_thread": state / threads / 1e3,
            # With narrow rows a thread has an address for each of its elements, and reads only some of them.
            "loads": state * (1 if aligned == MOST_ALIGNED else rows / read) / threads / aligned / 1e3,
            "message": programs(spec, size, variant) * state / 1e9,
            "unit_tiles": unit_tiles,
        }
    steps = size.seq + spec.layers - 1
    return {"call": 1.0, **{name: steps * amount for name, amount in found.items()}}


def _read(spec: GruSpec, size: GruSize, variant: GruVariant) -> int:
    """Rows of the state that the slowest program reads for a tile."""
    rows = variant.block_batch
    return min(rows, size.batch) if past(spec, size.batch, variant) == "unread" else rows


def _of_row(spec: GruSpec, size: GruSize, variant: GruVariant) -> dict[str, float]:
    """Amounts of form "row". Programs without room run after the others, and those on one multiprocessor share its lanes."""
    units, count = variant.block_hidden, programs(spec, size, variant)
    rounds = ceil_div(count, ROW_RESIDENT[units] * PROCESSORS)
    shared = ceil_div(count, rounds * PROCESSORS) - 1
    found = {
        "row": rounds,
        "row_products": rounds * units**2 / 1e6,
        "row_shared": rounds * shared * units**2 / 1e6,
        "row_bytes": count * spec.hidden * spec.item / 1e6,
        "row_ragged": 0.0 if spec.dense else rounds,
    }
    # Weights are loaded once, before the first step.
    return {"call": 1.0, "row_start": units**2 / 1e6, **{name: size.seq * amount for name, amount in found.items()}}


def _staged(spec: GruSpec, size: GruSize, variant: GruVariant) -> dict[str, float]:
    """Amounts of form "staged": a wait, then pieces one after the other; one direction after the other, too."""
    of_pieces, rows = widths(spec, variant), variant.block_batch
    state = _read(spec, size, variant) * sum(of_pieces) * spec.item
    at_each_step = sum(of_pieces[kept(spec, variant) :]) / sum(of_pieces) * weight_bytes(spec, variant)
    found = {
        "staged": 1.0,
        "staged_weights": weight_bytes(spec, variant) / 1e6,
        "staged_state": state / 1e6,
        "staged_message": programs(spec, size, variant) * state / 1e9,
        "staged_late": float(variant.prefetch == "late"),
        "staged_counter": float(variant.exchange == "counter"),
        "staged_pieces": len(of_pieces),
        "staged_products": weight_bytes(spec, variant) * max(rows - LEAST_ROWS, 0) / 1e9,
        "staged_read": at_each_step / 1e6,
        "staged_read_by_all": programs(spec, size, variant) * at_each_step / 1e9,
        "staged_ragged": 0.0 if spec.dense else 1.0,
    }
    return {"call": 1.0, **{name: size.seq * spec.directions * amount for name, amount in found.items()}}


def steps(spec: GruSpec, size: GruSize) -> tuple[GruVariant, dict[str, float]] | None:
    """(strategy "library", its amounts) in 16 bits; None for what it does not take, and for float32, whose products follow a setting.

    It works like nn.GRU, with one kernel for the gates: for large layers in 16 bits it took 0.5 to 0.8 of nn.GRU's time.
    """
    if not spec.dense or spec.stacked or spec.resets or spec.dtype == "float32":
        return None
    hidden, cells = spec.hidden, size.seq * spec.directions
    each = {
        "step": float(cells),
        "weights": cells * hidden**2 / 1e6,
        "gates": cells * size.batch * hidden / 1e6,
        "products": cells * max(size.batch, LEAST_ROWS) * hidden**2 / 1e9,
    }
    amounts = {"call": 1.0, "units": cells * hidden / 1e3, **each}
    if narrow := _narrow(hidden * spec.item):
        amounts |= {f"{name}_narrow": amount for name, amount in each.items()}
        amounts |= {f"{name}_narrower": amount * (narrow - 1) for name, amount in each.items()}
    return GruVariant(), amounts


def library(spec: GruSpec, size: GruSize) -> tuple[str, dict[str, float]]:
    """(which weights, amounts) of torch.nn.GRU in a CUDA graph, its input as wide as its state, projection included."""
    hidden, rows, both = spec.hidden, size.batch * spec.directions, float(spec.directions == 2)  # noqa: PLR2004
    steps, cells = size.seq * (1 + LAYER_OVER_FIRST * (spec.layers - 1)), size.seq * spec.layers
    large = {  # what fills the device, so that layers do not run side by side
        "weights": cells * hidden**2 * spec.directions / 1e6,
        "gates": cells * rows * hidden / 1e6,
        "products": cells * max(size.batch, LEAST_ROWS) * spec.directions * hidden**2 / 1e9,
    }
    amounts = {
        "call": 1.0,
        "step": steps,
        "step_of_both": steps * both,
        "cell": float(cells),
        "units": steps * hidden * spec.directions / 1e3,
        **large,
    }
    if narrow := math.log2(
        MOST_ALIGNED / math.gcd(hidden * spec.item, MOST_ALIGNED)
    ):  # how often the 16 bytes of a load are halved
        each = {"step": steps, **large}
        amounts |= {f"{name}_narrow": amount for name, amount in each.items()}
        amounts |= {f"{name}_narrower": amount * (narrow - 1) for name, amount in each.items()}
    if spec.dtype != "float32":
        return "library", amounts
    if stays_on_chip(spec, size):
        return "library_small_float32", amounts
    # Up to 192 units cuDNN runs some layers in one launch, and a step takes 3 us or more; with more units it runs none so, and a
    # step takes 6 or more.
    if hidden > ONE_LAUNCH_HIDDEN[1]:
        return "library_float32", amounts
    if hidden > SPILLED_HIDDEN and size.batch > SPILLED_BATCH:
        amounts["spilled"] = cells * rows / 1e3
    return "library_middle_float32", amounts


def stays_on_chip(spec: GruSpec, size: GruSize) -> bool:
    """Whether cuDNN has one launch for all steps of a layer, which keeps its weights on chip."""
    few = spec.hidden <= SMALL_HIDDEN[0] or (spec.hidden <= SMALL_HIDDEN[1] and size.batch <= SMALL_BATCH)
    return spec.dtype == "float32" and spec.dense and few


def called_us(spec: GruSpec, size: GruSize) -> float:
    """The least host time of torch.nn.GRU as a call; 0 where cuDNN may have one launch for all steps."""
    any_batch, few_rows = ONE_LAUNCH_HIDDEN
    one_launch = spec.hidden <= any_batch or (spec.hidden <= few_rows and size.batch <= ONE_LAUNCH_BATCH)
    if spec.dtype == "float32" and spec.dense and one_launch:
        return 0.0
    return size.seq * spec.layers * spec.directions * HOST_STEP_US


def projection(spec: GruSpec, size: GruSize) -> dict[str, float]:
    """Amounts of multiplying the input, as wide as the state, by its weights: the time of a recurrence does not include it."""
    return {"call": 1.0, **products_of_input(spec, size, spec.hidden)}


def products_of_input(spec: GruSpec, size: GruSize, features: int) -> dict[str, float]:
    """Amounts of multiplying an input of so many features by its weights."""
    # Float32 takes four times as long as 16 bits: half as many products at a time on the tensor cores, and by a kernel of our own.
    results = size.seq * size.batch * spec.directions * spec.hidden
    products = results * features * (spec.item / 2) ** 2 / 1e9
    return {
        "results": results * spec.item / 1e6,
        "products": products,
        "products_narrow": products * _narrow(features * spec.item),
    }


def _narrow(row_bytes: int) -> float:
    """How often a thread's load of 16 bytes must be halved until rows of so many bytes are a multiple of it."""
    return math.log2(MOST_ALIGNED / math.gcd(row_bytes, MOST_ALIGNED))


def alike(size: GruSize) -> GruSize:
    """The size with its length rounded up to a power of two: lengths differ only in the start's part of a call's time."""
    return dataclasses.replace(size, seq=next_power_of_2(max(size.seq, 1)))


def candidates(spec: GruSpec, size: GruSize, capability: int, multiprocessors: int) -> tuple[GruVariant, ...]:
    """The persistent variants that a GPU has room for, with the fewest turns, in each way of waiting that is legal."""
    return _candidates(spec, size.batch, capability, multiprocessors)


@functools.lru_cache(maxsize=256)
def _candidates(spec: GruSpec, batch: int, capability: int, multiprocessors: int) -> tuple[GruVariant, ...]:
    size, knobs = GruSize(batch, 1), choices(GruVariant)
    found = []
    staged = itertools.product(("staged",), (STAGED_UNITS,), STAGED_BATCHES, (STAGED_WARPS,))
    tiles = itertools.product(("split", "tile"), knobs["block_hidden"], TILE_BATCHES, TILE_WARPS)
    for form, units, rows, warps in itertools.chain(tiles, staged):
        variant = GruVariant("persistent", form, units, rows, num_warps=warps)
        if not alone(spec, variant):
            fitting = [turns for turns in knobs["turns"] if _fits(spec, size, variant, turns, multiprocessors)]
            if not fitting:
                continue
            variant = dataclasses.replace(variant, turns=fitting[0])
        for exchange, prefetch in itertools.product(("spin", "poll", "counter"), knobs["prefetch"]):
            one = dataclasses.replace(variant, exchange=exchange, prefetch=prefetch)
            if rejection(spec, size, one, capability, multiprocessors) is None:
                found.append(one)
    row = row_variant(spec.hidden)
    if row is not None and rejection(spec, size, row, capability, multiprocessors) is None:
        found.append(row)
    roomy = [one for one in found if registers(spec, one) <= _most_registers(one)]
    found = roomy if roomy or spec.stacked else found  # a stack may be launched layer by layer
    slim = () if capability == MEASURED else tuple(one for one in found if not spills(spec, one))
    return slim or tuple(found)


def _most_registers(variant: GruVariant) -> int:
    """Registers beyond which a kernel spills so much that other kernels are taken."""
    return MOST_SPLIT_REGISTERS if variant.splits_columns else MOST_REGISTERS


def registers(spec: GruSpec, variant: GruVariant) -> float:
    """Registers that a thread needs at least for sums of products and a piece of the state. In form "split" each warp has all sums."""
    threads = 32 * variant.num_warps
    if variant.by_row:
        return 3 * variant.block_hidden**2 / threads
    sums = 3 * variant.block_hidden * variant.block_batch / (32 if variant.splits_columns else threads)
    sets = 2 if spec.stacked else 1
    ahead = 2 if variant.staged else 1  # a piece is multiplied while the next one comes
    return sums + sets * ahead * variant.block_batch * max(widths(spec, variant)) * spec.item / 4 / threads


def spills(spec: GruSpec, variant: GruVariant) -> bool:
    """Whether a thread most likely needs more registers than it has, for addresses or for rows and sums, except on Hopper.

    Narrow loads of many rows need an address each. In form "tile" a thread also has its part of the weights, which Hopper multiplies
    from shared memory. In form "split" the threads of each warp share all sums.
    """
    units, rows, threads = variant.block_hidden, variant.block_batch, 32 * variant.num_warps
    # In registers of 4 bytes.
    columns = (2 * stage_width(spec, variant) if variant.staged else sum(widths(spec, variant))) * spec.item / 4
    if variant.form == "tile" and (
        units > TILE_UNITS or (3 * units * (columns + rows) + rows * columns) / threads > TILE_REGISTERS
    ):
        return True
    if variant.splits_columns and rows * columns / threads + 3 * units * rows / 32 > SPLIT_REGISTERS:
        return True
    each = rows * max(widths(spec, variant)) // (32 * variant.num_warps)
    narrow = spec.hidden * spec.item % MOST_ALIGNED != 0 and not variant.by_row
    return narrow and each >= NARROW_ELEMENTS and (rows >= NARROW_ROWS or units * rows >= NARROW_RESULTS)


def _fits(spec: GruSpec, size: GruSize, variant: GruVariant, turns: int, multiprocessors: int) -> bool:
    return programs(spec, size, dataclasses.replace(variant, turns=turns)) <= multiprocessors


def margin(spec: GruSpec, variant: GruVariant) -> float:
    """The largest part of PyTorch's time that a variant's estimate may be if it is to be chosen: the model errs.

    It errs by more where rows are no multiples of 16 bytes, since their loads are narrow; not for form "row", which reads an element
    at a time. Sequences that cu_seqlens bounds must be reordered for PyTorch's operator first, and the host reads the bounds: any
    kernel is better.
    """
    if spec.thd:
        return math.inf
    if variant.by_row:
        return MARGIN_ROW
    return MARGIN if spec.hidden * spec.item % MOST_ALIGNED == 0 else MARGIN_NARROW


def margin_of_device(spec: GruSpec, size: GruSize, variant: GruVariant) -> float:
    """``margin`` where only the device's time counts: the model errs most for float32."""
    if spec.dtype != "float32" or spec.thd:
        return margin(spec, variant)
    if variant.by_row:
        gates = 3 * size.batch * size.seq * spec.directions * spec.hidden * spec.item
        return MARGIN_ROW_FAR if gates > L2_BYTES else MARGIN_ROW
    if spec.hidden * spec.item % MOST_ALIGNED != 0:
        return MARGIN_NARROW_FLOAT32
    if stays_on_chip(spec, size):
        return MARGIN_ON_CHIP
    if size.batch > MOST_ROWS:
        return MARGIN_MANY_FLOAT32
    return MARGIN_BOTH_FLOAT32 if spec.directions > 1 and size.batch > MANY_ROWS else margin(spec, variant)


def handicap(variant: GruVariant, won: Mapping[GruVariant, float]) -> float:
    """The factor on a variant's estimate: larger, the further away the nearest row is that the variant won.

    Models are right about factors, rows about percents: near a row, another variant must beat its winner by more than the model's
    error. Form "row" has one variant for each size, and its time hardly depends on what the model leaves out.
    """
    if variant.by_row:
        return 1.0
    return math.exp(min(NEAR * won.get(variant, math.inf), NEAR_MOST))


def octaves(spec: GruSpec, size: GruSize, other: GruSpec, other_size: GruSize) -> float:
    """How far a row is from a call, for ``handicap``: octaves of the hidden size count 2 each, those of the batch 1."""
    unlike = (spec.directions != other.directions) + (spec.stacked != other.stacked)
    item = abs(math.log2(spec.item / other.item))
    hidden = abs(math.log2(spec.hidden / other.hidden))
    return 2 * hidden + 2 * item + abs(math.log2(max(size.batch, 1) / max(other_size.batch, 1))) + unlike
