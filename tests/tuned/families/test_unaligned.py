"""Steps and linears of rows that are no multiple of 16 bytes: form "outer", and what rows of a table say of other calls."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tuned.calls.gru_cell.run import MOMENTS as CELL
from tuned.calls.linear_cat.run import MOMENTS as LINEAR
from tuned.families import products
from tuned.families.gru_cell import variant as cells
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat import variant as linears
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.padded import Matrix, pads_of
from tuned.families.products import OuterTile
from tuned.lookup.lookup import Gpu
from tuned.lookup.table import tables

H200 = Gpu("nvidia_h200", 90, 132)


def row_of(family: str, spec: Any, size: Any) -> Any:
    return next(r for r in tables()["nvidia_h200"].rows[family] if r.spec == spec and r.size == size)


def step(hidden: int, dtype: str = "bfloat16") -> GruCellSpec:
    return GruCellSpec(dtype, hidden, (hidden,), precision="ieee" if dtype == "float32" else "")


# Form "outer" ---------------------------------------------------------------------------------------------------------


def test_a_lane_reads_as_many_bytes_as_alignment_and_registers_allow() -> None:
    few, many = (OuterTile("float32", (640,), rows, columns, 1, 1) for rows, columns in ((4, 2), (8, 4)))
    assert [few.elements(align) for align in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [many.elements(align) for align in (1, 2, 4)] == [1, 2, 2], "its sums of 4 elements do not fit"
    assert OuterTile("bfloat16", (640,), 4, 1, 1, 1).elements(8) == 8


@pytest.mark.parametrize("align", [1, 2, 4])
def test_blocks_are_what_a_warp_reads_at_once(align: int) -> None:
    spec = LinearCatSpec("float32", (640,), 100, precision="ieee")
    tile = OuterTile("float32", spec.inputs, 4, 2, 1, 1)
    assert tile.constants(spec, align) == {"BLOCK_K": 32 * align, "ALIGN": align}


def test_strides_may_allow_less_than_widths_and_no_more() -> None:
    aligned, odd = (LinearCatSpec("float32", (width,), 100, precision="ieee") for width in (640, 641))
    tiles = [OuterTile("float32", spec.inputs, 4, 2, 1, 1) for spec in (aligned, odd)]
    assert tiles[0].constants(aligned, 1) == tiles[1].constants(odd, 4) == {"BLOCK_K": 32, "ALIGN": 1}


@pytest.mark.parametrize(
    ("spec", "rows", "tried"),
    [
        (step(96, "float32"), 9, True),
        (step(96, "float32"), 8, True),
        (step(96, "float32"), 1, False),
        (step(96), 8, True),
        (step(96), 9, False),
        (step(75, "float32"), 5, True),
        (step(75), 64, True),
        (step(75), 65, False),
        (step(96), 30, False),
        (step(2049), 30, False),
    ],
)
def test_the_form_is_tried_where_tensor_cores_do_not_multiply_or_wait(spec: Any, rows: int, tried: bool) -> None:
    found = cells.rejection(spec, GruCellSize(rows), GruCellVariant("outer", 4, 4))
    assert (found is None) is tried, found


# Form "padded" --------------------------------------------------------------------------------------------------------

LINE = LinearCatSpec("bfloat16", (601, 300), 4500)
PADDED_LINE, PADDED_CELL = (
    LinearCatVariant("padded", 64, 64, 64),
    GruCellVariant("padded", 64, 16, 64, k_parts=1, num_stages=6),
)


@pytest.mark.parametrize(
    ("spec", "rows", "why"),
    [
        (LINE, 180, None),
        (dataclasses.replace(LINE, dtype="float16", inputs=(4, 901 - 4)), 64, None),
        (LINE, 16, "does not pay for 16 rows"),
        (dataclasses.replace(LINE, inputs=(600, 296)), 180, "no multiples of 16 bytes"),
        (dataclasses.replace(LINE, dtype="float32", precision="tf32"), 180, "16-bit rows"),
        (dataclasses.replace(LINE, inputs=(60_001,), outputs=35_800), 180, "32 bits"),
    ],
)
def test_linears_are_padded_where_rows_are_many_and_not_aligned(spec: Any, rows: int, why: str | None) -> None:
    found = linears.rejection(
        spec, LinearCatSize(rows), dataclasses.replace(PADDED_LINE, block_rows=16 if rows < 64 else 64)
    )
    assert found is None if why is None else why in str(found)


@pytest.mark.parametrize("form", ["padded", "padded_library"])
def test_steps_are_padded_where_rows_are_many_and_not_aligned(form: str) -> None:
    variant = PADDED_CELL if form == "padded" else dataclasses.replace(cells.gates_variant(675), form=form)
    assert cells.rejection(step(675), GruCellSize(180), variant) is None
    assert cells.rejection(GruCellSpec("bfloat16", 675, (64,)), GruCellSize(180), variant) is None
    assert "no multiples" in str(cells.rejection(step(672), GruCellSize(180), variant))
    assert "16-bit" in str(cells.rejection(step(675, "float32"), GruCellSize(180), variant))
    assert "does not pay" in str(cells.rejection(step(675), GruCellSize(16), variant))
    assert "in place" in str(cells.rejection(dataclasses.replace(step(675), inplace=True), GruCellSize(180), variant))


def test_many_rows_are_not_loaded_an_element_at_a_time_by_tensor_cores() -> None:
    tile, small = (dataclasses.replace(variant, form="tile") for variant in (PADDED_CELL, PADDED_LINE))
    assert cells.rejection(step(675), GruCellSize(256), tile) is None
    assert "copies once" in str(cells.rejection(step(675), GruCellSize(257), tile))
    assert "copies once" in str(linears.rejection(LINE, LinearCatSize(180), small))
    assert linears.rejection(dataclasses.replace(LINE, inputs=(600, 304)), LinearCatSize(180), small) is None


def test_all_that_is_copied_lies_apart_and_aligned() -> None:
    """Inputs go side by side; rows that a weight gets for the library's results repeat its last one."""
    x, y, weight, h, recurrent = (
        torch.empty(s, dtype=torch.float16) for s in ((3, 5), (3, 2), (21, 7), (3, 8), (21, 8))
    )
    sides = ((x, y), weight), ((h,), recurrent)
    plain, whole = pads_of(sides), pads_of(sides, results=True)
    assert plain.operands == [(Matrix(0, 3, 8), Matrix(24, 21, 8)), None]
    assert [(which, at, rows.columns, rows.y_row) for which, at, rows in plain.copies] == [
        (0, 0, 5, 8),
        (1, 5, 3, 8),
        (2, 24, 8, 8),
    ]
    assert plain.elements == 24 * 8
    assert whole.operands == [(Matrix(0, 3, 8), Matrix(24, 24, 8)), (Matrix(216, 3, 8), Matrix(240, 24, 8))]
    assert [(rows.rows, rows.held, rows.last) for _, _, rows in whole.copies[2::2]] == [(24, 24, 20)] * 2
    assert whole.elements == 54 * 8


def test_a_call_that_the_device_serves_quickly_is_not_padded_for_the_library() -> None:
    """It takes the host a launch more than PyTorch's own."""
    variant = dataclasses.replace(cells.gates_variant(675), form="padded_library")
    assert cells.spends(step(675), GruCellSize(180), variant) is not None
    assert cells.spends(step(675), GruCellSize(700), variant) is None
    assert cells.spends(step(672), GruCellSize(700), cells.gates_variant(672)) is not None


# What rows say --------------------------------------------------------------------------------------------------------


def test_mixed_loads_are_not_given_to_the_vector_form() -> None:
    """3 rows of 49 + 330 + 496 features took 61 us in a graph, PyTorch 10: 16 divides the stride of one input."""
    mixed, plain = (LinearCatSpec("bfloat16", (49, 330, last), 2476) for last in (496, 497))
    vector = LinearCatVariant("vector", 1, 4, 512)
    assert products.mixed_loads(mixed)
    assert "exchange" in str(linears.rejection(mixed, LinearCatSize(3), vector))
    assert linears.rejection(plain, LinearCatSize(3), vector) is None
    assert linears.rejection(mixed, LinearCatSize(2), vector) is None
    few = GruCellVariant("vector", 2, 4, 256)
    assert "exchange" in str(cells.rejection(GruCellSpec("bfloat16", 75, (64,)), GruCellSize(3), few))
    assert cells.rejection(step(75), GruCellSize(3), few) is None


def test_what_an_unaligned_row_takes_grows_with_the_work_of_a_multiprocessor() -> None:
    """33 rows of 209 and 1,102 took 94 us in a graph, PyTorch 22; the row of 675 and 675 takes 17."""
    spec, size = GruCellSpec("bfloat16", 1102, (209,)), GruCellSize(33)
    row = row_of("gru_cell", step(675), GruCellSize(30))
    assert cells.grows(row, spec, size) > 3
    assert cells.grows(row, row.spec, row.size) == 1
    assert CELL.choice_of(spec, size, H200, captured=True).rule == "eager"
    assert CELL.choice_of(spec, size, H200, captured=False).rule == "eager"
    aligned = row_of("gru_cell", step(384), GruCellSize(40))
    assert cells.grows(aligned, GruCellSpec("bfloat16", 1104, (208,)), size) == 1
    line = row_of("linear_cat", LinearCatSpec("float32", (150, 75), 450, precision="ieee"), LinearCatSize(180))
    assert linears.grows(line, LinearCatSpec("float32", (219, 167), 692, precision="ieee"), LinearCatSize(603)) > 3


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "captured", "called"),
    [
        ((512, 512), 512, 24, True, True),
        ((512, 512), 512, 64, True, True),
        ((512, 512), 512, 128, True, True),
        ((512, 512), 512, 192, False, False),
        ((1024, 512), 96, 9, False, True),
    ],
)
def test_what_aligned_rows_take_without_tensor_cores_grows_too(
    inputs: tuple[int, ...], outputs: int, rows: int, *, captured: bool, called: bool
) -> None:
    """24 rows lead by 2.7, but 192 have too much more work; and PyTorch's operator takes less for 9 than for 24."""
    spec = LinearCatSpec("float32", inputs, outputs, precision="ieee")
    for now, served in ((True, captured), (False, called)):
        assert (LINEAR.choice_of(spec, LinearCatSize(rows), H200, captured=now).variant is not None) is served


def test_in_16_bits_pytorch_may_take_half_as_long_where_rows_are_multiples_of_4_bytes() -> None:
    row = row_of("gru_cell", step(675), GruCellSize(30))
    odd, even = (cells.grows(row, GruCellSpec("bfloat16", hidden, (600,)), GruCellSize(30)) for hidden in (601, 602))
    assert even == 2 * odd


@pytest.mark.parametrize(
    ("inputs", "outputs", "times"),
    [((41, 345), 2302, 2.0), ((41, 344), 2302, 1.0), ((41, 345), 2301, 1.0), ((600, 302), 4500, 2.0)],
)
def test_pytorch_multiplies_rows_of_all_inputs_together(inputs: tuple[int, ...], outputs: int, times: float) -> None:
    """22 rows of 41 + 345 features and 2,302 outputs took PyTorch 7.0 us, a kernel 8.8: the 386 features are multiples of 4 bytes."""
    row = row_of("linear_cat", LINE, LinearCatSize(180))
    assert row.variant.pads
    assert linears.grows(row, LinearCatSpec("bfloat16", inputs, outputs), LinearCatSize(200)) == times


def test_what_a_padded_row_takes_grows_no_faster_than_pytorchs() -> None:
    row = row_of("linear_cat", LINE, LinearCatSize(180))
    assert linears.grows(row, dataclasses.replace(LINE, outputs=9001), LinearCatSize(360)) == 1
    found = LINEAR.choice_of(LinearCatSpec("bfloat16", (876, 94), 2153), LinearCatSize(244), H200, captured=True)
    assert found.variant is not None
    assert found.variant.pads


def test_a_lead_at_many_more_unaligned_rows_says_nothing() -> None:
    """11 rows of 549 features and 34 outputs took 7.0 us in a graph, PyTorch 6.5; 30 rows lead by 2.8."""
    row = row_of("linear_cat", LinearCatSpec("bfloat16", (601, 300), 45), LinearCatSize(30))
    few = LinearCatSpec("bfloat16", (48, 107, 394), 34)
    assert linears.lead(row, few, LinearCatSize(11)) == math.inf
    assert linears.lead(row, few, LinearCatSize(17)) is None
    assert LINEAR.choice_of(few, LinearCatSize(11), H200, captured=True).rule == "eager"
    assert LINEAR.choice_of(few, LinearCatSize(11), H200, captured=False).variant is not None, (
        "calls take the host's time"
    )


def test_an_unaligned_row_says_nothing_of_aligned_ones() -> None:
    """4 rows of 140 + 156 features to 4,133 took 25 us in a graph, PyTorch 6."""
    row = LinearCatSpec("float32", (150, 75), 450, precision="ieee")
    aligned = LinearCatSpec("float32", (140, 156), 4132, precision="ieee")
    assert "multiples of 16 bytes" in str(linears.doubt(row, aligned, LinearCatSize(4), 1.0))
    assert (
        linears.doubt(row, LinearCatSpec("float32", (141, 156), 450, precision="ieee"), LinearCatSize(4), 1.0) is None
    )


def test_kernels_serve_more_calls_of_the_releases_draw() -> None:
    """As calls 94 of 240 steps and linears before form "outer" and its rows, and 149 before form "padded" and its rows."""
    run = Path(__file__).parents[3] / "benchmarks" / "results" / "random" / "nvidia_h200-steps-26800357.json"
    drawn = json.loads(run.read_text())["rows"]
    assert sum(row["rule"] != "eager" for row in drawn) == 94
    served = 0
    for row in drawn:
        precision, rows = "ieee" if row["dtype"] == "float32" else "", row["rows"]
        if row["kind"] == "step":
            one = GruCellSpec(row["dtype"], row["outputs"], tuple(row["inputs"]), precision=precision)
            found = CELL.choice_of(one, GruCellSize(rows), H200, captured=False)
        else:
            line = LinearCatSpec(row["dtype"], tuple(row["inputs"]), row["outputs"], precision=precision)
            found = LINEAR.choice_of(line, LinearCatSize(rows), H200, captured=False)
        served += found.variant is not None
    assert served >= 170
