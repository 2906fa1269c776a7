"""Form "staged" of the recurrence against the oracle; and, for every form, what a tile does with rows past the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from generator.families.gru import reference
from generator.families.gru_backward import reference as gradients
from generator.measuring.mended import mended_interpreter
from tests.support.gru_sequences import Sequences, assert_right, build, lengths_of, spec_of
from tests.support.run import DEVICE, run
from tuned.families.gru import variant as gru_variant
from tuned.families.gru.launches import COUNTER_STRIDE, launches, sequence
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, widths
from tuned.families.gru_backward.launches import launches as gradient_launches
from tuned.families.launch import Launch
from tuned.kernels.gru_dense_layer_split import _tile

pytestmark = pytest.mark.interpreter

STAGED = GruVariant("persistent", "staged", 16, 16, "poll", num_warps=4)


TEXTS = [*((layout, False) for layout in LAYOUTS), ("dense", True)]
PIECES = [("both", 129, 128, 2, 17), ("layer", 300, 128, 3, 3), ("layer", 384, 128, 3, 2), ("both", 466, 64, 8, 2)]


# Each text takes two of the numbers of pieces, and each number two texts: a kernel has one loop, over however many pieces.
@pytest.mark.parametrize(
    ("layout", "resets", "shape", "hidden", "width", "stages", "rows"),
    [(*text, *pieces) for i, text in enumerate(TEXTS) for j, pieces in enumerate(PIECES) if (j - i) % 4 < 2],
)
def test_a_state_is_taken_in_pieces_of_one_width(
    layout: str,
    shape: str,
    hidden: int,
    width: int,
    stages: int,
    rows: int,
    resets: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Fewer columns and warps than tuning would try, so that few programs suffice: of eight pieces, half of both again.
    monkeypatch.setattr(gru_variant, "STAGE_BYTES", width * STAGED.block_batch * 2)
    exchange = "poll" if resets else "counter"
    prefetch = "late" if stages == 2 else "early"
    variant = dataclasses.replace(STAGED, exchange=exchange, prefetch=prefetch, num_warps=width // 32)
    spec = spec_of("half", hidden, shape, layout, resets=resets)
    assert widths(spec, variant) == (*(width,) * (stages - 1), width if hidden == 384 else width // 2)
    assert_right(Sequences(spec, lengths_of(layout, rows, 1 if stages == 8 else 2), "rows"), variant)


# Each layout with two of the three, and each of the three in two layouts.
@pytest.mark.parametrize(
    ("layout", "dtype", "held"),
    [
        (layout, *numbers)
        for i, layout in enumerate(LAYOUTS)
        for j, numbers in enumerate([("half", 0), ("half", 2), ("tf32", 1)])
        if i != j
    ],
)
def test_weights_that_have_no_room_are_read_at_each_step(
    layout: str, dtype: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = 2 if dtype == "half" else 4
    variant = dataclasses.replace(
        STAGED, exchange="counter", num_warps=2
    )  # with 4, the last piece is as wide as the others
    monkeypatch.setattr(gru_variant, "READ_COLUMNS", 64)
    monkeypatch.setattr(gru_variant, "KEPT_BYTES", held * 64 * 3 * STAGED.block_hidden * item)
    spec = spec_of(dtype, 210, "both", layout)
    assert widths(spec, variant) == (64, 64, 64, 32)
    assert gru_variant.kept(spec, variant) == held
    assert_right(Sequences(spec, lengths_of(layout, 3, 2), "rows"), variant)


def test_each_direction_and_tile_counts_for_itself() -> None:
    spec = spec_of("half", 16, "both")  # one tile of units: each program waits only for itself
    built = build(Sequences(spec, (3,) * 17), DEVICE)
    built.call.counters.zero_()
    with mended_interpreter():
        run([sequence(spec, dataclasses.replace(STAGED, exchange="counter"), built.call, 0, 3)])
    assert built.call.counters[::COUNTER_STRIDE][:4].tolist() == [3] * 4  # two tiles of rows, twice


# Rows past the end --------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tiles(rows, stored, batch, BLOCK_BATCH: tl.constexpr, PAST: tl.constexpr):
    i_tile = tl.program_id(0)
    i_batch, m_batch = _tile(i_tile, batch, BLOCK_BATCH, PAST)
    at = i_tile * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    tl.store(rows + at, i_batch)
    tl.store(stored + at, m_batch.to(tl.int32))


def tiles(batch: int, block: int, past: str) -> tuple[list[int], list[int]]:
    count = -(-batch // block)
    rows, stored = (torch.full((count * block,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    rows_of_tiles[(count,)](rows, stored, batch, block, past)
    return rows.tolist(), stored.tolist()


@pytest.mark.parametrize(("batch", "block"), [(20, 32), (5, 8), (17, 16), (33, 16), (8, 8), (1, 8)])
def test_rows_past_the_end_are_the_others_of_the_tile_in_turn(batch: int, block: int) -> None:
    rows, stored = tiles(batch, block, "others")
    assert rows[:batch] == list(range(batch))
    assert stored == [int(at < batch) for at in range(len(rows))]
    first = (batch - 1) // block * block
    last = list(range(first, batch))
    assert rows[first:] == [last[at % len(last)] for at in range(block)]
    for past in ("last", "unread"):
        assert tiles(batch, block, past)[0] == [min(at, batch - 1) for at in range(len(rows))]


def test_a_launch_says_what_rows_past_the_end_are() -> None:
    def said(batch: int, hidden: int = 1104, **knobs: Any) -> Any:
        spec = GruSpec("bfloat16", hidden)
        variant = dataclasses.replace(GruVariant("persistent", "split", 16, 32, "spin", num_warps=8), **knobs)
        steps = launches(spec, variant, reference.inputs(spec, GruSize(batch, 4), "meta", 0))
        return next(step for step in steps if isinstance(step, Launch)).constants["PAST"]

    assert said(20) == said(40) == said(20, form="staged") == "others"
    assert said(32) == said(64) == "last"
    # Few rows, which would be read many times; also by few programs, or read less often.
    assert said(1) == said(33) == said(37) == said(1, form="staged") == "unread"
    assert said(33, hidden=128) == said(39) == "others"
    assert said(1, hidden=128) == said(7, hidden=128) == "unread"  # there is no full tile, which would take longer
    turns = {"turns": 2, "prefetch": "early"}
    assert said(80, **turns) == said(64, **turns) == "last"  # finding the other rows in each turn takes longer
    assert said(69, **turns) == "unread"


def test_a_gradient_leaves_loads_out_of_one_row_alone() -> None:
    spec = GruSpec("bfloat16", 256)
    for batch, turns, wanted in (
        (10, 1, "others"),
        (9, 1, "others"),
        (16, 1, "last"),
        (97, 2, "last"),
        (1, 1, "unread"),
    ):
        variant = GruVariant("persistent", "split", 16, 8, "spin", turns=turns)
        steps = gradient_launches(spec, variant, gradients.inputs(spec, GruSize(batch, 4), "meta", 0))
        assert next(step for step in steps if isinstance(step, Launch)).constants["PAST"] == wanted
