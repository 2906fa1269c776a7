"""The amounts by which a recurrence's time is estimated, and the variants offered to a call without a row."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tuned.families.gru import FAMILY
from tuned.families.gru.model import (
    HOST_STEP_US,
    L2_BYTES,
    MARGIN,
    MARGIN_BOTH_FLOAT32,
    MARGIN_MANY_FLOAT32,
    MARGIN_NARROW,
    MARGIN_NARROW_FLOAT32,
    MARGIN_ON_CHIP,
    MARGIN_ROW,
    MARGIN_ROW_FAR,
    MOST_REGISTERS,
    MOST_SPLIT_REGISTERS,
    alike,
    called_us,
    candidates,
    handicap,
    kernels,
    library,
    margin,
    margin_of_device,
    octaves,
    products_of_input,
    projection,
    registers,
    spills,
)
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, alone, programs, rejection, row_variant
from tuned.lookup.lookup import Gpu
from tuned.lookup.model import pick, weighted, weights_of

BF16 = GruSpec("bfloat16", 512)
CARDS = {"H200": (90, 132), "A100": (80, 108), "RTX 4090": (89, 128), "a part of one": (90, 16)}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_are_legal_and_take_no_more_turns_than_needed(dtype: str, layout: str, card: str) -> None:
    capability, multiprocessors = CARDS[card]
    for hidden, batch in ((33, 1), (96, 512), (640, 24), (768, 100), (1001, 64)):
        spec, size = GruSpec(dtype, hidden, layout), GruSize(batch, 100)
        for variant in candidates(spec, size, capability, multiprocessors):
            assert rejection(spec, size, variant, capability, multiprocessors) is None
            assert variant.strategy == "persistent"
            if not alone(spec, variant):
                assert programs(spec, size, variant) <= multiprocessors
            if variant.in_turn:
                fewer = dataclasses.replace(variant, turns=1)
                assert programs(spec, size, fewer) > multiprocessors


def test_a_batch_that_fits_in_no_other_way_is_taken_in_turns() -> None:
    """128 rows of 960 units: with one tile for each program, every multiprocessor would need six programs."""
    found = candidates(GruSpec("bfloat16", 960), GruSize(128, 100), 90, 132)
    assert found
    assert all(variant.in_turn for variant in found)
    assert not candidates(GruSpec("float32", 2120), GruSize(8, 100), 90, 132), "more units than programs have"


def test_tiles_that_spill_are_offered_on_other_cards_only_if_there_is_nothing_else() -> None:
    spec, size = GruSpec("float16", 274, "thd"), GruSize(401, 164)
    tile = GruVariant("persistent", "split", 64, 32, "counter", "late", 4)
    assert spills(spec, tile), "37,302 bytes a thread on an A100"
    assert spills(dataclasses.replace(spec, hidden=272), tile), "1,876, of 16 bytes at a time"
    assert spills(spec, dataclasses.replace(tile, block_batch=16))
    assert not spills(spec, dataclasses.replace(tile, block_hidden=32, block_batch=16))
    many = dataclasses.replace(tile, block_hidden=16)
    assert spills(spec, many)
    assert not spills(dataclasses.replace(spec, hidden=272), many), "of 16 bytes at a time"
    assert not [v for v in candidates(spec, size, 80, 108) if spills(spec, v)]
    roomy = dataclasses.replace(tile, block_batch=16, num_warps=8)
    assert spills(spec, roomy)
    assert roomy in candidates(spec, size, 90, 132), "measured there"


def test_tiles_without_room_in_registers_are_offered_only_where_a_layer_has_nothing_else() -> None:
    stack, size = GruSpec("bfloat16", 448, "packed", layers=2), GruSize(151, 312)
    crowded = GruVariant("persistent", "split", 32, 64, "spin", "late", 4)
    assert rejection(stack, size, crowded, 90, 132) is None
    assert registers(stack, crowded) > MOST_REGISTERS, "60,996 bytes a thread spilled"
    assert not candidates(stack, size, 90, 132), "its layers are launched one by one"
    packed, large = GruSpec("bfloat16", 376, "packed"), GruVariant("persistent", "split", 64, 32, "spin", "late", 4)
    assert registers(packed, large) > MOST_REGISTERS, "29,168 bytes a thread: it took 118 us a step, and nn.GRU 20"
    assert large not in candidates(packed, GruSize(506, 101), 90, 132)
    both, sums = GruSpec("bfloat16", 136, "packed", 2), GruVariant("persistent", "split", 128, 16, "spin", "early", 4)
    assert rejection(both, GruSize(482, 49), sums, 90, 132) is None
    assert registers(both, sums) > MOST_SPLIT_REGISTERS, (
        "18,246 bytes a thread: it took 75 us a step, and nn.GRU 57 as a call"
    )
    assert sums not in candidates(both, GruSize(482, 49), 90, 132)
    row = GruVariant("persistent", "row", 128, 1, "counter", "early", 8)
    assert row in candidates(GruSpec("bfloat16", 128), GruSize(64, 49), 90, 132), "which spills none"
    layer, many = GruSpec("bfloat16", 448), GruSize(280, 312)
    for card, processors, room in ((90, 132, True), (80, 16, False)):
        found = candidates(layer, many, card, processors)
        assert found, "one launch is offered wherever one fits"
        assert all((registers(layer, one) <= MOST_REGISTERS) is room for one in found)


@pytest.mark.parametrize(
    ("hidden", "form", "tile", "spilled"),  # bytes a thread on sm_86, where programs can wait in no other way
    [
        (384, "tile", (32, 32, 8), 64),
        (384, "split", (32, 32, 4), 504),
        (256, "split", (16, 64, 4), 280),
        (256, "split", (32, 16, 2), 0),
        (256, "split", (16, 32, 4), 0),
        (256, "tile", (16, 64, 8), 0),
    ],
)
def test_other_cards_are_offered_nothing_that_spills(
    hidden: int, form: str, tile: tuple[int, int, int], spilled: int
) -> None:
    units, rows, warps = tile
    variant = GruVariant("persistent", form, units, rows, "poll", "late", warps)
    assert spills(GruSpec("bfloat16", hidden), variant) is (spilled > 0)
    layer, size = GruSpec("bfloat16", hidden), GruSize(256, 100)
    assert all(not spills(layer, one) for one in candidates(layer, size, 86, 82))


def test_two_warps_are_not_offered_what_they_read_for_long() -> None:
    stack, size = GruSpec("float32", 540, layers=2), GruSize(3, 800)
    starving = GruVariant("persistent", "split", 16, 8, "spin", "late", 2)
    assert "never came near the best" in str(rejection(stack, size, starving, 90, 132))
    assert rejection(GruSpec("float32", 272), size, starving, 90, 132) is None
    assert registers(stack, starving) < MOST_REGISTERS
    assert not candidates(stack, size, 90, 132), "it took 11.6 us a step, and nn.GRU 8.7 in a graph"
    few = candidates(GruSpec("bfloat16", 256), GruSize(3, 800), 90, 132)
    assert min(one.num_warps for one in few if not one.by_row) == 2


def test_amounts_grow_with_what_they_count() -> None:
    variant = GruVariant("persistent", "split", 32, 16, "spin", turns=2)
    short, long = (kernels(GruSpec("bfloat16", 960), GruSize(128, seq), variant) for seq in (10, 20))
    assert short["call"] == long["call"] == 1
    assert all(long[name] == 2 * amount for name, amount in short.items() if name != "call")
    once = kernels(BF16, GruSize(16, 10), GruVariant("persistent", "split", 16, 16, "spin"))
    assert once["turns"] == 0
    assert once["spin"] == 10
    assert kernels(BF16, GruSize(16, 10), GruVariant("persistent", "split", 16, 16, "counter"))["counter"] == 10


def test_narrow_rows_need_more_loads_and_a_wider_margin() -> None:
    variant = GruVariant("persistent", "split", 16, 16, "counter")
    wide, narrow = (kernels(GruSpec("bfloat16", hidden), GruSize(16, 10), variant) for hidden in (512, 511))
    assert narrow["loads"] == 8 * wide["loads"], "2 bytes at a time, not 16"
    assert margin(GruSpec("bfloat16", 511), variant) < margin(GruSpec("bfloat16", 512), variant) < 1
    assert margin(GruSpec("float32", 4), variant) == margin(BF16, variant)


def test_the_library_has_a_kernel_of_its_own_for_small_float32_layers() -> None:
    kinds = {
        (dtype, h): library(GruSpec(dtype, h), GruSize(64, 9))[0]
        for dtype in ("float32", "float16")
        for h in (96, 192, 256)
    }
    assert kinds == {
        ("float32", 96): "library_small_float32",
        ("float32", 192): "library_middle_float32",
        ("float32", 256): "library_float32",
        ("float16", 96): "library",
        ("float16", 192): "library",
        ("float16", 256): "library",
    }
    assert library(GruSpec("float32", 96, "packed"), GruSize(64, 9))[0] == "library_middle_float32", (
        "not of packed sequences"
    )
    one, stack = (library(GruSpec("bfloat16", 512, layers=layers), GruSize(16, 100))[1]["step"] for layers in (1, 3))
    assert one < stack < 3 * one, "layers run side by side"
    assert projection(BF16, GruSize(8, 10))["products"] == 10 * 8 * 512**2 / 1e9


def test_where_the_model_errs_by_more_a_kernel_must_lead_by_more() -> None:
    margins = [
        margin_of_device(GruSpec("float32", hidden, directions=directions), GruSize(batch, 99), GruVariant())
        for hidden, directions, batch in (
            (96, 1, 64),
            (256, 1, 256),
            (256, 1, 257),
            (256, 2, 128),
            (256, 2, 129),
            (257, 1, 1),
        )
    ]
    assert margins == [
        MARGIN_ON_CHIP,
        MARGIN,
        MARGIN_MANY_FLOAT32,
        MARGIN,
        MARGIN_BOTH_FLOAT32,
        MARGIN_NARROW_FLOAT32,
    ]
    thd, both = GruSpec("float32", 96, "thd"), GruSpec("bfloat16", 257, directions=2)
    assert margin_of_device(thd, GruSize(500, 9), GruVariant()) == math.inf, "nothing else does that"
    assert margin_of_device(both, GruSize(500, 9), GruVariant()) == MARGIN_NARROW
    row = row_variant(97)
    assert row is not None
    assert (
        margin_of_device(GruSpec("float32", 97), GruSize(1, 9), row)
        == margin(GruSpec("bfloat16", 97), row)
        == MARGIN_ROW
    )
    within, beyond = (GruSize(100, int(L2_BYTES / (3 * 97 * 4 * 100)) + more) for more in (0, 1))
    assert margin_of_device(GruSpec("float32", 97), within, row) == MARGIN_ROW
    assert margin_of_device(GruSpec("float32", 97), beyond, row) == MARGIN_ROW_FAR, "its gates come from memory"
    assert margin_of_device(GruSpec("float32", 97, directions=2), within, row) == MARGIN_ROW_FAR, "gates of both"
    assert margin_of_device(GruSpec("bfloat16", 97), GruSize(100, 9999), row) == MARGIN_ROW


def test_form_row_takes_turns_where_multiprocessors_are_full() -> None:
    def amounts(hidden: int, batch: int) -> dict[str, float]:
        variant = row_variant(hidden)
        assert variant is not None
        return kernels(GruSpec("float32", hidden), GruSize(batch, 10), variant)

    one, full, over = (amounts(128, batch) for batch in (1, 132, 133))
    assert one["row"] == full["row"] == 10
    assert over["row"] == 20
    assert full["row_shared"] == 0
    assert amounts(64, 133)["row"] == 10
    assert amounts(64, 133)["row_shared"] == pytest.approx(10 * 64**2 / 1e6), (
        "two programs of a multiprocessor share its lanes"
    )
    assert one["row_start"] == over["row_start"] == 128**2 / 1e6, "weights are loaded once"
    assert handicap(row_variant(64), {}) == 1 < handicap(GruVariant(), {})


def test_as_a_call_pytorchs_own_takes_the_host_some_time_for_each_step_unless_it_has_one_launch() -> None:
    one = called_us(BF16, GruSize(16, 100))
    assert one == 100 * HOST_STEP_US
    assert called_us(dataclasses.replace(BF16, layers=3), GruSize(16, 100)) == 3 * one
    assert called_us(dataclasses.replace(BF16, directions=2), GruSize(16, 100)) == 2 * one
    for spec, batch, one_launch in (
        (GruSpec("float32", 128), 500, True),
        (GruSpec("float32", 192), 256, True),
        (GruSpec("float32", 192), 257, False),
        (GruSpec("float32", 193), 1, False),
        (GruSpec("float32", 64, "packed"), 1, False),
        (GruSpec("float16", 64), 1, False),
    ):
        assert (called_us(spec, GruSize(batch, 100)) == 0) is one_launch, spec


def test_narrow_rows_of_an_input_take_longer_the_narrower_they_are() -> None:
    amounts = [products_of_input(BF16, GruSize(16, 100), features) for features in (256, 260, 258, 257)]
    assert amounts[0]["products_narrow"] == 0
    assert [round(a["products_narrow"] / a["products"]) for a in amounts[1:]] == [1, 2, 3]
    wide, narrow = (library(GruSpec("bfloat16", hidden), GruSize(16, 9))[1] for hidden in (512, 510))
    assert not any(name.endswith(("_narrow", "_narrower")) for name in wide)
    assert narrow["products_narrower"] == narrow["products_narrow"] == narrow["products"]


def test_a_row_helps_its_neighbours_the_nearer_the_more() -> None:
    variant, other = GruVariant("persistent"), GruVariant("persistent", num_warps=8)
    here, near, far = (handicap(variant, {variant: away}) for away in (0.0, 1.0, 9.0))
    assert 1 == here < near < far == handicap(other, {variant: 0.0})
    assert octaves(BF16, GruSize(16, 1), BF16, GruSize(16, 900)) == 0, "steps are alike"
    assert octaves(BF16, GruSize(16, 1), GruSpec("bfloat16", 1024), GruSize(32, 1)) == 3
    assert math.isclose(octaves(BF16, GruSize(16, 1), GruSpec("float32", 512, directions=2), GruSize(16, 1)), 3)


def test_lengths_are_alike_up_to_a_power_of_two() -> None:
    assert [alike(GruSize(3, seq)).seq for seq in (1, 33, 64, 65)] == [1, 64, 64, 128]
    assert FAMILY.model is not None
    assert FAMILY.model.covers(GruVariant("persistent"))
    assert not FAMILY.model.covers(GruVariant())


# A state taken piece by piece -----------------------------------------------------------------------------------------


def test_a_staged_step_is_counted_by_its_pieces_and_directions() -> None:
    variant = GruVariant("persistent", "staged", 16, 32, "spin", num_warps=8)
    one, size = GruSpec("bfloat16", 1672), GruSize(32, 10)
    found = kernels(one, size, variant)
    assert found["staged"] == 10
    assert found["staged_pieces"] == 40  # 512, 512, 512 and 256 columns, ten times
    assert found["staged_state"] == pytest.approx(10 * 32 * 1792 * 2 / 1e6)
    assert found["staged_message"] == pytest.approx(105 * found["staged_state"] / 1e3)
    both = kernels(dataclasses.replace(one, directions=2), size, variant)
    assert {name: both[name] / found[name] for name in found if found[name] and name != "call"} == {
        name: 2 for name in found if found[name] and name != "call"
    }


@pytest.mark.parametrize(("hidden", "batch", "directions"), [(1536, 20, 1), (2048, 32, 1), (2048, 16, 2), (1592, 8, 2)])
def test_many_units_of_16_bits_are_offered_a_staged_state(hidden: int, batch: int, directions: int) -> None:
    spec, size = GruSpec("bfloat16", hidden, directions=directions), GruSize(batch, 100)
    assert [one for one in candidates(spec, size, 90, 132) if one.staged and one.exchange == "spin"]
    found = pick(FAMILY, spec, size, Gpu("NVIDIA H200", 90, 132), ())
    assert found is not None
    assert found.wins
    assert found.variant.staged


@pytest.mark.parametrize(
    ("hidden", "batch", "directions", "us"),
    [(1060, 1, 1, 3.86), (1280, 8, 1, 4.59), (1120, 8, 2, 8.09), (2048, 8, 1, 9.72)],
)
def test_float32_weights_of_many_units_are_read_at_each_step(
    hidden: int, batch: int, directions: int, us: float
) -> None:
    """Measured microseconds a step on H100s; nn.GRU took 2.0 to 2.7 times as long."""
    spec, size = GruSpec("float32", hidden, directions=directions), GruSize(batch, 64)
    found = pick(FAMILY, spec, size, Gpu("NVIDIA H200", 90, 132), ())
    assert found is not None
    assert found.wins
    assert found.variant.staged
    thought = weighted(kernels(spec, size, found.variant), weights_of(FAMILY)["kernels"]) / size.seq
    assert thought == pytest.approx(us, rel=0.2)


def test_weights_are_read_at_each_step_where_registers_have_room_for_them() -> None:
    def rows(dtype: str, batch: int, precision: str = "tf32") -> set[int]:
        found = candidates(GruSpec(dtype, 1536, precision=precision), GruSize(batch, 100), 90, 132)
        return {one.block_batch for one in found if one.staged}

    assert rows("float32", 32) == {32}, "two tiles of 96 programs are more than there is room for"
    assert rows("float32", 16) == {16}
    assert not rows("float32", 64)
    assert 64 in rows("bfloat16", 64), "all are kept"
    assert not rows("float32", 16, "ieee"), "no product of tensor cores"
