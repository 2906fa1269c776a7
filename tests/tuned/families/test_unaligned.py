"""Steps and linears of rows that are no multiple of 16 bytes: form "outer", and what rows of a table say of other calls."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tuned.calls.gru_cell.run import MOMENTS as CELL
from tuned.calls.linear_cat.run import MOMENTS as LINEAR
from tuned.families import products
from tuned.families.gru_cell import variant as cells
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat import variant as linears
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
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
    """As calls 94 of 240 steps and linears before form "outer" and its rows."""
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
    assert served >= 149
