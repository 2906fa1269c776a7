"""Rules of a recurrence's variants: each excludes what it names and nothing else; the variants of calls are legal."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from generator.families.gru.problems import problems
from tests.support.pairwise import sample
from tuned.families.choices import choices
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import (
    MIN_PART,
    TILE_BATCHES,
    TILE_WARPS,
    GruVariant,
    adapt,
    alone,
    default_variant,
    distance,
    fit,
    kept,
    pieces,
    programs,
    rejection,
    row_variant,
    shared_bytes,
    widths,
)
from tuned.families.products import DTYPES, PRECISIONS

PERSISTENT = GruVariant("persistent", exchange="spin")
BF16, SMALL = GruSpec("bfloat16", 512), GruSpec("bfloat16", 60)
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120, 0)
HIDDEN = (1, 2, 7, 8, 20, 63, 64, 100, 128, 192, 256, 257, 384, 512, 600, 800, 896, 1024, 1536, 2048, 4096)


def v(**knobs: Any) -> GruVariant:
    return dataclasses.replace(PERSISTENT, **knobs)


# For each rule: its message, what it excludes, and the nearest variant that stays legal.
RULES: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    (
        "takes one layer of sequences of one length",
        (GruSpec("bfloat16", 512, "packed"), None, GruVariant()),
        (BF16, None, GruVariant()),
    ),
    (
        "takes one layer of sequences of one length",
        (GruSpec("bfloat16", 512, layers=2), None, GruVariant()),
        (BF16, None, GruVariant()),
    ),
    (
        "may allow TF32",
        (GruSpec("float32", 512, precision="ieee"), None, GruVariant()),
        (GruSpec("float32", 512, precision="tf32"), None, GruVariant()),
    ),
    ("has no other knobs", (BF16, None, GruVariant(block_hidden=8)), (BF16, None, GruVariant("steps", block_hidden=8))),
    (
        "strategy='steps' takes one layer",
        (GruSpec("bfloat16", 512, layers=2), None, GruVariant("steps")),
        (BF16, None, GruVariant("steps")),
    ),
    (
        "would leave more than half of its units empty",
        (GruSpec("bfloat16", 24), None, v(block_hidden=128)),
        (GruSpec("bfloat16", 24), None, v(block_hidden=32)),
    ),
    (
        "is not tried for a stack",
        (GruSpec("bfloat16", 512, layers=2), None, v(form="tile", block_batch=32)),
        (BF16, None, v(form="tile", block_batch=32)),
    ),
    (
        "form='tile' with fewer than 32 rows",
        (BF16, None, v(form="tile", block_batch=16)),
        (BF16, None, v(form="tile", block_batch=32)),
    ),
    (
        "too few elements for its warps",
        (BF16, None, v(form="tile", block_batch=32, block_hidden=16, num_warps=8)),
        (BF16, None, v(form="tile", block_batch=64, block_hidden=16, num_warps=8)),
    ),
    (
        "shared memory that a program can have",
        (GruSpec("bfloat16", 2048), None, v(block_hidden=32, block_batch=8, num_warps=8)),
        (GruSpec("bfloat16", 2048), None, v(block_hidden=16, block_batch=8, num_warps=8)),
    ),
    (
        "more than a thread's registers hold",
        (BF16, None, v(block_batch=32, num_warps=2)),
        (BF16, None, v(block_batch=16, num_warps=2)),
    ),
    ("waits for nothing", (SMALL, None, v(block_hidden=64)), (SMALL, None, GruVariant("persistent", block_hidden=64))),
    ("waits for nothing", (BF16, None, GruVariant("steps", prefetch="late")), (BF16, None, v(prefetch="late"))),
    ("exchange='poll' stops all warps", (BF16, None, v(exchange="poll")), (BF16, None, v(exchange="poll"), 80)),
    (
        "exchange='poll' stops all warps",
        (GruSpec("bfloat16", 104), None, v(exchange="poll")),
        (GruSpec("bfloat16", 100), None, v(exchange="poll")),
    ),
    ("needs compute capability 9.0, not 8.0", (BF16, None, v(), 80), (BF16, None, v(), 90)),
    (
        "needs compute capability 7.0",
        (GruSpec("float32", 64), None, v(), 60),
        (GruSpec("float32", 64), None, v(), 75),
    ),
    (
        "an AMD GPU may show a look what it saw before",
        (GruSpec("bfloat16", 100), None, v(exchange="poll"), 0),
        (GruSpec("bfloat16", 100), None, v(exchange="counter"), 0),
    ),
    ("reads 16 bytes at a time", (GruSpec("bfloat16", 100), None, v()), (GruSpec("bfloat16", 104), None, v())),
    (
        "would leave half of its rows empty",
        (BF16, GruSize(16, 8), v(block_batch=32)),
        (BF16, GruSize(17, 8), v(block_batch=32)),
    ),
    (
        "128 programs wait for each other, and 127 multiprocessors",
        (BF16, GruSize(64, 8), v(), 90, 127),
        (BF16, GruSize(64, 8), v(), 90, 128),
    ),
    (
        "only up to 16 units are tried",
        (BF16, None, GruVariant("steps", block_hidden=32)),
        (BF16, None, GruVariant("steps")),
    ),
    (
        "leave most of 128 multiprocessors idle",
        (BF16, GruSize(16, 8), v(block_hidden=32), 90, 128),
        (BF16, GruSize(16, 8), v(block_hidden=32), 90, 127),
    ),
]


@pytest.mark.parametrize(("sentence", "excluded", "kept"), RULES, ids=lambda r: r if isinstance(r, str) else None)
def test_every_rule_says_why_and_leaves_its_neighbour(
    sentence: str, excluded: tuple[Any, ...], kept: tuple[Any, ...]
) -> None:
    assert sentence in str(rejection(*excluded))
    assert rejection(*kept) is None, rejection(*kept)


def test_only_programs_that_wait_have_to_be_there_at_once() -> None:
    size = GruSize(4096, 8)
    for variant in (GruVariant("steps"), GruVariant()):
        assert rejection(BF16, size, variant, 90, 1) is None
    own = GruVariant("persistent", block_hidden=64)
    assert alone(SMALL, own)
    assert rejection(SMALL, size, own, 90, 1) is None


def random_rows(count: int) -> list[tuple[GruSpec, GruSize, GruVariant, int]]:
    """Specs, sizes, variants and architectures, combined at random."""
    axes = {
        "dtype": DTYPES,
        "hidden": HIDDEN,
        "layout": LAYOUTS,
        "shape": ((1, 1), (2, 1), (1, 2), (1, 6)),
        "bias": (True, False),
        "precision": PRECISIONS,
        "batch": (1, 3, 16, 17, 128, 1024),
        "seq": (1, 2, 512),
        "capability": CAPABILITIES,
        **choices(GruVariant),
        # Form "row" is not drawn: each size has only one such variant, which a random draw hardly meets.
        "form": ("split", "tile"),
        "block_batch": TILE_BATCHES,
        "num_warps": TILE_WARPS,
    }
    found = []
    for row in sample(axes, lambda _: True, count):
        directions, layers = row["shape"]
        spec = GruSpec(row["dtype"], row["hidden"], row["layout"], directions, layers, row["bias"], row["precision"])
        variant = GruVariant(**{name: row[name] for name in choices(GruVariant)})
        found.append((spec, GruSize(row["batch"], row["seq"]), variant, row["capability"]))
    return found


def test_a_rule_without_a_size_holds_for_every_size() -> None:
    for spec, size, variant, capability in random_rows(4000):
        if (reason := rejection(spec, None, variant, capability)) is not None:
            assert rejection(spec, size, variant, capability, 132) == reason


def test_every_choice_of_a_knob_is_legal_somewhere() -> None:
    free = {name: set(values) for name, values in choices(GruVariant).items()}
    plain = GruSpec("bfloat16", 512), GruSize(16, 16), GruVariant(), 90  # "library": no draw of all knobs meets it
    row = GruSpec("bfloat16", 20), GruSize(16, 16), row_variant(20), 90  # likewise
    many = (
        GruSpec("bfloat16", 1536),
        GruSize(16, 16),
        GruVariant("persistent", "staged", 16, 16, "spin", num_warps=8),
        90,
    )
    for spec, size, variant, capability in (plain, row, many, *random_rows(30_000)):
        if rejection(spec, size, variant, capability) is None:
            for name, values in free.items():
                values.discard(getattr(variant, name))
    free["block_hidden"].discard(256)  # so many rows of weights fit in no present shared memory
    assert not any(free.values()), free


# Pieces -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_pieces_hold_all_columns_in_powers_of_two(splits: int) -> None:
    for hidden in (*range(1, 700), *HIDDEN):
        widths = pieces(hidden, splits)
        used = [width for width in widths if width]
        assert len(widths) == 3
        assert list(widths) == used + [0] * (3 - len(used)), "a width of 0 is no piece"
        assert all(width & (width - 1) == 0 and width >= MIN_PART * splits for width in used)
        assert sum(used) >= hidden > sum(used[:-1]), "a piece lies past the end"
        smallest = max(MIN_PART * splits, 1 << (hidden - 1).bit_length())
        assert sum(used) <= smallest, "more room than one power of two takes"


def test_pieces_are_few_and_spare_room() -> None:
    assert pieces(600, 4) == (512, 64, 64)
    assert pieces(512, 4) == (512, 0, 0)
    assert pieces(384, 4) == (256, 128, 0)
    assert pieces(20, 4) == (64, 0, 0)
    assert pieces(896, 8) == (512, 256, 128)
    assert pieces(1000, 4) == (1024, 0, 0)


# What calls are given -----------------------------------------------------------------------------------------------


def specs() -> list[GruSpec]:
    shapes = ((1, 1), (2, 1), (1, 2), (1, 6))
    return [
        GruSpec(dtype, hidden, layout, directions, layers)
        for dtype, hidden, layout, (directions, layers) in itertools.product(DTYPES, HIDDEN, LAYOUTS, shapes)
    ]


@pytest.mark.parametrize("processors", [24, 132])
@pytest.mark.parametrize("batch", [1, 16, 300])
def test_a_call_without_a_row_gets_the_default(batch: int, processors: int) -> None:
    size = GruSize(batch, 100)
    for spec in specs():
        if spec.stacked or spec.hidden > 1024:
            continue  # if a stack does not fit, its layers run one by one
        reason = rejection(spec, size, default_variant(spec, size), 90, processors)
        assert reason is None, f"{spec}: {reason}"


def test_a_stack_gets_a_default_where_its_weights_fit() -> None:
    for dtype, hidden, layout in itertools.product(DTYPES, (64, 128, 256), LAYOUTS):
        spec = GruSpec(dtype, hidden, layout, layers=2)
        assert rejection(spec, GruSize(16, 100), default_variant(spec, GruSize(16, 100)), 90, 132) is None


def test_what_every_gpu_can_run_is_the_default_of_sequences_of_one_length() -> None:
    for dtype, hidden, directions in itertools.product(DTYPES, HIDDEN, (1, 2)):
        spec = GruSpec(dtype, hidden, directions=directions)  # and of TF32: the library follows the setting of GEMMs
        for batch, capability in itertools.product((1, 16, 5000), CAPABILITIES):
            size = GruSize(batch, 100)
            assert rejection(spec, size, default_variant(spec, size), capability, 1) is None


def test_a_neighbours_variant_is_legal_or_not_taken() -> None:
    rows = random_rows(6000)
    known = [(spec, variant) for spec, _, variant, _ in rows if rejection(spec, None, variant) is None]
    taken = 0
    for (spec, variant), (to, _, _, _) in zip(known, rows, strict=False):
        found = fit(adapt(variant, spec, to), to, 90)
        for name in ("strategy", "form", "num_warps"):
            assert getattr(found, name) == getattr(variant, name), "adapting changes tiles and what cannot be"
        assert found.block_batch == variant.block_batch or variant.strategy == "steps", "only that has smaller tiles"
        assert found.block_batch <= variant.block_batch
        assert found.block_hidden <= variant.block_hidden
        taken += rejection(to, None, found) is None
    assert taken > len(known) / 10


ROW = GruSpec("bfloat16", 64)


def test_form_row_has_one_variant_for_each_size() -> None:
    for hidden in (1, 32, 33, 64, 65, 128):
        variant = row_variant(hidden)
        assert variant is not None
        assert 3 * variant.block_hidden**2 <= 192 * 32 * variant.num_warps, "a thread has registers for 192 weights"
        spec = GruSpec("float32", hidden, precision="ieee")
        legal = [one for one in every(GruVariant) if one.by_row and rejection(spec, None, one) is None]
        assert legal == [variant]
    assert row_variant(129) is None
    assert fit(GruVariant("persistent", "row", 32, 1, num_warps=1), ROW, 80) == row_variant(64)


def test_form_row_is_for_one_layer_of_few_rows() -> None:
    variant = row_variant(64)
    assert variant is not None
    assert alone(ROW, variant)
    assert rejection(ROW, GruSize(2 * 4 * 132, 9), variant, 90, 132) is None
    assert "more than 1056" in str(rejection(ROW, GruSize(2 * 4 * 132 + 1, 9), variant, 90, 132))
    assert "more than 1056" in str(rejection(dataclasses.replace(ROW, directions=2), GruSize(529, 9), variant, 90, 132))
    assert "one layer" in str(rejection(dataclasses.replace(ROW, layers=2), None, variant))
    assert "up to 128 units" in str(rejection(BF16, None, variant))
    assert "resets" in str(rejection(GruSpec("bfloat16", 64, "packed", resets=True), None, variant))
    assert rejection(GruSpec("bfloat16", 64, resets=True), None, variant) is None
    assert "tensor cores" in str(rejection(ROW, None, GruVariant("persistent", block_batch=1)))
    assert "tensor cores" in str(rejection(ROW, None, GruVariant("persistent", num_warps=1)))


def every(variant_type: type) -> list[GruVariant]:
    knobs = choices(variant_type)
    return [GruVariant(**dict(zip(knobs, values, strict=True))) for values in itertools.product(*knobs.values())]


def test_a_variant_fits_specs_of_other_widths_with_fewer_units() -> None:
    tuned = v(block_hidden=32)
    assert rejection(BF16, None, tuned) is None
    wide = GruSpec("bfloat16", 2048)
    found = fit(dataclasses.replace(tuned, num_warps=8, block_batch=8), wide, 90)
    assert found.block_hidden == 16
    assert rejection(wide, None, found) is None
    assert fit(tuned, GruSpec("bfloat16", 100), 90).exchange == "poll", "rows that are no multiple of 16 bytes"
    assert fit(v(block_hidden=64), SMALL, 90) == GruVariant("persistent", block_hidden=64)
    assert fit(GruVariant(), wide, 90) == GruVariant()
    assert fit(tuned, BF16, 90) == tuned
    assert fit(dataclasses.replace(tuned, block_hidden=16), GruSpec("bfloat16", 1024), 80).block_hidden == 16
    assert fit(dataclasses.replace(tuned, block_hidden=16), GruSpec("bfloat16", 1024), 86).block_hidden == 8


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_variant_brings_instructions_that_an_architecture_lacks(capability: int) -> None:
    for exchange in choices(GruVariant)["exchange"]:
        spec = GruSpec("bfloat16", 128)
        found = fit(v(exchange=exchange, block_batch=8), spec, capability)
        reason = rejection(spec, None, found, capability)
        assert reason is None or found.exchange == exchange == "poll", (exchange, capability)
        assert found.exchange == exchange or capability < 90


def test_a_grid_is_one_program_a_tile_and_cell() -> None:
    variant = v(block_hidden=16, block_batch=16)
    assert programs(BF16, GruSize(16, 5), variant) == 32
    assert programs(BF16, GruSize(17, 5), variant) == 64
    assert programs(GruSpec("bfloat16", 513), GruSize(1, 5), variant) == 33
    assert programs(GruSpec("bfloat16", 512, directions=2), GruSize(16, 5), variant) == 64
    assert programs(GruSpec("bfloat16", 512, layers=3), GruSize(16, 5), variant) == 96


def test_distance_is_symmetric_and_nothing_to_itself() -> None:
    some = specs()[::7]
    for a, b in itertools.product(some, some[::5]):
        assert distance(a, b) == distance(b, a)
        assert (distance(a, b) == 0) == (a == b) or a.hidden != b.hidden
    assert distance(BF16, GruSpec("bfloat16", 1024)) > distance(BF16, GruSpec("float16", 512))


def test_architectures_with_little_shared_memory_have_a_limit() -> None:
    wide = GruSpec("bfloat16", 1024)
    variant = v(block_hidden=32, block_batch=8, num_warps=8, exchange="counter")
    assert rejection(wide, None, variant, 90) is None
    for capability in (86, 89, 120, 121):
        assert "101376" in str(rejection(wide, None, variant, capability))


# 3 * hidden**2 weights, and for each tile a state as wide: 132 multiprocessors of 227 KiB hold no more than this.
TOO_LARGE = ("fp32_512x960", "x2048", "fp32_64x1001", "fp32_48x1280")
FITS = [p for p in problems() if not p.name.endswith(TOO_LARGE) or p.name.endswith(("bf16_2x2048", "bf16_8x2048"))]


@pytest.mark.parametrize("problem", FITS, ids=lambda p: p.name)
def test_every_default_problem_has_a_kernel_that_fits_an_h200(problem: Any) -> None:
    declared = choices(GruVariant)
    names = ("form", "block_hidden", "block_batch", "num_warps", "turns")
    fitting = [
        knobs
        for values in itertools.product(*(declared[name] for name in names))
        for knobs in [dict(zip(names, values, strict=True))]
        for exchange in ("spin", "counter")
        if rejection(problem.spec, problem.size, GruVariant("persistent", exchange=exchange, **knobs), 90, 132) is None
    ]
    assert fitting


# A piece of the state at a time ---------------------------------------------------------------------------------------

STAGED = GruVariant("persistent", "staged", 16, 32, "spin", num_warps=8)


def test_the_columns_of_a_staged_state_are_pieces_of_one_width_and_a_last_one() -> None:
    assert widths(GruSpec("bfloat16", 1536), STAGED) == (512, 512, 512)
    assert widths(GruSpec("bfloat16", 1184), STAGED) == (512, 512, 256)
    assert widths(GruSpec("bfloat16", 1672), STAGED) == (512, 512, 512, 256)
    assert widths(GruSpec("bfloat16", 1032), STAGED) == (512, 512, 128)
    assert widths(GruSpec("bfloat16", 2048), dataclasses.replace(STAGED, block_batch=64)) == (256,) * 8


def test_a_staged_program_has_both_directions() -> None:
    both, size = GruSpec("bfloat16", 1536, directions=2), GruSize(40, 10)
    assert programs(both, size, STAGED) == programs(dataclasses.replace(both, directions=1), size, STAGED) == 192
    assert rejection(both, GruSize(32, 10), STAGED, 90, 132) is None  # 96 programs
    assert "192 programs wait for each other" in str(rejection(both, size, STAGED, 90, 132))


def test_one_piece_of_a_staged_state_is_in_shared_memory() -> None:
    spec = GruSpec("bfloat16", 1536)
    assert shared_bytes(spec, STAGED) == 3 * 16 * 1536 * 2 + 32 * 512 * 2
    whole = dataclasses.replace(STAGED, form="split")
    assert "of shared memory that a program can have" in str(rejection(spec, None, whole))
    assert rejection(spec, None, STAGED) is None


@pytest.mark.parametrize(
    ("dtype", "hidden", "rows", "pieces", "held"),
    [
        ("bfloat16", 2048, 32, (512,) * 4, 4),
        ("float32", 1056, 8, (256,) * 4 + (128,), 4),
        ("float32", 1536, 16, (256,) * 6, 4),
        ("float32", 2048, 32, (128,) * 16, 8),
    ],
)
def test_weights_that_have_no_room_are_read_piece_by_piece(
    dtype: str, hidden: int, rows: int, pieces: tuple[int, ...], held: int
) -> None:
    spec, variant = GruSpec(dtype, hidden), dataclasses.replace(STAGED, block_batch=rows)
    assert widths(spec, variant) == pieces
    assert kept(spec, variant) == held
    beside = max(rows, 0 if held == len(pieces) else 16) * pieces[0] * spec.item  # a piece of the state, or of a gate
    assert shared_bytes(spec, variant) == 3 * 16 * sum(pieces[:held]) * spec.item + beside
    assert rejection(spec, GruSize(rows, 10), variant, 90, 132) is None
    assert spec.item == 2 or "of shared memory" in str(rejection(spec, GruSize(rows, 10), variant, 80, 108))


@pytest.mark.parametrize(
    ("hidden", "knobs", "reason"),
    [
        (1024, {}, "for more than 1024 units"),
        (1536, {"turns": 2, "prefetch": "early"}, "one tile of rows a program"),
        (1536, {"strategy": "steps"}, "whatever the tile"),
        (1536, {"block_hidden": 32}, "is tried with"),
        (1536, {"num_warps": 4}, "is tried with"),
        (1536, {"block_batch": 128}, "is tried with"),
        (1536, {"exchange": "probe"}, "never came before"),
        (1053, {"exchange": "counter"}, "rows of 1053 units are no multiple of them"),
        (2056, {}, "of float32 alone"),
    ],
)
def test_what_is_not_staged(hidden: int, knobs: dict[str, Any], reason: str) -> None:
    found = rejection(GruSpec("bfloat16", hidden), None, dataclasses.replace(STAGED, **knobs))
    assert reason in str(found)


def test_of_float32_few_rows_are_staged_and_with_tf32_alone() -> None:
    spec = GruSpec("float32", 1536)
    assert "leaves no registers" in str(rejection(spec, None, dataclasses.replace(STAGED, block_batch=64)))
    assert "without TF32" in str(rejection(dataclasses.replace(spec, precision="ieee"), None, STAGED))
