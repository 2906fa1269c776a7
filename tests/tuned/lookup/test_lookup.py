"""Which row serves a call: the order that tuned.dispatch documents, on tables made for it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import tuned.kernels
import tuned.lookup.lookup
import tuned.lookup.table
from generator.storage.record import write_record
from tests.support.records import winner
from tuned.families.choices import choices
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import default_variant as cell_default
from tuned.families.registry import FAMILIES
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, adapt, default_variant, distance, rejection, size_class
from tuned.lookup.lookup import Gpu, choose, near_rows, nearest, usable, variant_at
from tuned.lookup.record import METHOD
from tuned.lookup.table import Row, Table

if TYPE_CHECKING:
    from pathlib import Path

ROPE = FAMILIES["rope"]
SPEC = RopeSpec("bshd", "bfloat16", 32, 128, 128)
SMALL, LARGE = RopeSize(1, 128), RopeSize(2, 4096)
HERE = Gpu("here", 90, 132)


def row(
    spec: RopeSpec, size: RopeSize, stale: str | None = None, measured: dict[str, Any] | None = None, **knobs: Any
) -> Row:
    return Row(spec, size, RopeVariant(**knobs), stale, 1.0, "a table", measured or {})


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    made: dict[str, Table] = {}
    monkeypatch.setattr(tuned.lookup.lookup, "tables", lambda: made)
    monkeypatch.setattr(tuned.lookup.lookup, "rows_for", lambda *_: ())  # no portfolio
    return made


def table(device: str, *rows: Row, **properties: Any) -> Table:
    return Table(device, properties, {"rope": rows, "gru_cell": ()})


def test_the_winner_of_this_spec_and_size_comes_first(tables: dict[str, Table]) -> None:
    tables["here"] = table("here", row(SPEC, SMALL, num_warps=1), row(SPEC, LARGE, num_warps=2))
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert (choice.rule, choice.variant.num_warps) == ("winner", 2)


def test_the_nearest_size_comes_next_and_a_stale_row_is_only_a_neighbour(tables: dict[str, Table]) -> None:
    tables["here"] = table(
        "here",
        row(SPEC, SMALL, num_warps=1),
        row(SPEC, LARGE, "the source of k changed since it was measured", num_warps=2),
    )
    assert choose(ROPE, SPEC, RopeSize(2, 3000), HERE).variant.num_warps == 2
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert choice.rule == "nearest size"
    assert "this size, but the source of k changed since it was measured" in choice.why


def test_of_equally_near_rows_the_fresh_one_comes_before_the_stale_one(tables: dict[str, Table]) -> None:
    stale = row(SPEC, RopeSize(1, 8192), "the source of k changed since it was measured", num_warps=1)
    tables["here"] = table("here", stale, row(SPEC, LARGE, num_warps=2))
    assert choose(ROPE, SPEC, RopeSize(8, 1024), HERE).variant.num_warps == 2
    assert choose(ROPE, SPEC, RopeSize(1, 9000), HERE).variant.num_warps == 2


def test_the_closest_spec_comes_next_whatever_its_text(tables: dict[str, Table]) -> None:
    other = dataclasses.replace(SPEC, style="interleaved")
    near, far = dataclasses.replace(SPEC, heads=64), dataclasses.replace(SPEC, heads=8)
    tables["here"] = table("here", row(other, LARGE), row(far, LARGE, num_warps=1), row(near, LARGE, num_warps=2))
    wanted = dataclasses.replace(SPEC, heads=40)
    choice = choose(ROPE, wanted, LARGE, HERE)
    assert (choice.rule, choice.variant.num_warps) == ("closest spec", 2)
    assert 0 < distance(wanted, near) < distance(wanted, other) < distance(wanted, far)
    tables["here"] = table("here", row(other, LARGE, num_warps=1))
    assert choose(ROPE, wanted, LARGE, HERE).variant.num_warps == 1


def test_octaves_of_tokens_and_of_specs_count_alike(tables: dict[str, Table]) -> None:
    twice = dataclasses.replace(SPEC, heads=64)
    tables["here"] = table("here", row(SPEC, RopeSize(2, 512), num_warps=1), row(twice, LARGE, num_warps=2))
    assert choose(ROPE, SPEC, RopeSize(2, 4000), HERE).variant.num_warps == 2, "3 octaves of tokens, 1 of heads"
    assert choose(ROPE, SPEC, RopeSize(2, 600), HERE).variant.num_warps == 1


def test_a_row_that_is_far_serves_no_other_call(tables: dict[str, Table]) -> None:
    """50,790 tokens, served by a row of one token 18 octaves away, took 4.5 times the best variant's time."""
    tables["here"] = table("here", row(SPEC, RopeSize(2, 512), num_warps=2))
    near, far = RopeSize(2, 512 * 2), RopeSize(2, 512 * 3)
    assert choose(ROPE, SPEC, near, HERE).rule == "nearest size"
    for gpu in (HERE, dataclasses.replace(HERE, device="there")):
        choice = choose(ROPE, SPEC, far, gpu)
        assert (choice.rule, choice.variant) == ("default", ROPE.default_variant(SPEC, far))
    kept = near_rows(ROPE, SPEC, HERE)
    assert kept is not None
    assert variant_at(kept, ROPE, SPEC, near, HERE).num_warps == 2
    assert variant_at(kept, ROPE, SPEC, far, HERE) == ROPE.default_variant(SPEC, far)
    tables["there"] = table("there", row(SPEC, far, block_tokens=4, num_warps=4))
    assert choose(ROPE, SPEC, far, HERE).rule == "similar GPU"
    assert variant_at(kept, ROPE, SPEC, far, HERE) == choose(ROPE, SPEC, far, HERE).variant, "as tuned.explain says"


def test_a_new_length_far_from_all_rows_is_not_held_against_each(tables: dict[str, Table]) -> None:
    """Comparing a new length with every row took the host a millisecond, and 14 us before rows had a reach."""
    tables["here"] = table("here", *(row(SPEC, RopeSize(n, 2), num_warps=1) for n in range(1, 200)))
    asked: list[Any] = []

    def counted(a: Any, b: Any) -> float:
        asked.append(a)
        return distance(a, b)

    family = dataclasses.replace(ROPE, distance=counted)
    assert choose(family, SPEC, RopeSize(2, 40_000), HERE).rule == "default"
    asked.clear()
    assert choose(family, SPEC, RopeSize(2, 40_001), HERE).rule == "default"
    assert not asked


def test_a_row_of_other_rows_gives_its_tile_rescaled(tables: dict[str, Table]) -> None:
    wide = dataclasses.replace(SPEC, head_dim=256, rotary_dim=256)
    tables["here"] = table("here", row(wide, LARGE, block_tokens=2, block_heads=4))
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert (choice.variant.block_tokens, choice.variant.block_heads) == (2, 8)


@pytest.mark.parametrize(
    ("eager_us", "at_the_row", "beside_it"),
    [
        (0.0, "winner", "nearest size"),
        (2.0, "winner", "nearest size"),
        (1.02, "winner", "eager"),
        (0.9, "eager", "eager"),
    ],
)
def test_a_row_that_hardly_beats_pytorch_stands_for_no_other_shape(
    tables: dict[str, Table], eager_us: float, at_the_row: str, beside_it: str
) -> None:
    tables["here"] = table("here", dataclasses.replace(row(SPEC, LARGE), eager_us=eager_us))
    for size, rule in ((LARGE, at_the_row), (RopeSize(2, 3000), beside_it)):
        choice = choose(ROPE, SPEC, size, HERE)
        assert choice.rule == rule
        assert (choice.variant is None) == (rule == "eager")
        assert ("PyTorch's own took" in choice.why) == (rule == "eager")
    elsewhere = choose(ROPE, SPEC, RopeSize(2, 3000), dataclasses.replace(HERE, device="there"))
    assert elsewhere.rule == ("eager" if beside_it == "eager" else "similar GPU")


@pytest.mark.parametrize(
    ("dim", "to", "tile", "wanted"),
    [
        (128, 128, (4, 4), (4, 4)),
        (128, 64, (4, 4), (4, 8)),  # narrower heads: more heads in a tile, up to 8,
        (128, 32, (4, 4), (8, 8)),  # then more tokens,
        (128, 32, (8, 8), (8, 8)),  # as many as there are
        (128, 96, (4, 4), (4, 4)),  # as wide when padded
        (128, 512, (4, 4), (1, 4)),  # wider heads: fewer tokens,
        (128, 512, (2, 4), (1, 2)),  # then fewer heads
        (64, 1024, (1, 4), (1, 1)),
    ],
)
def test_a_tile_keeps_its_pairs(dim: int, to: int, tile: tuple[int, int], wanted: tuple[int, int]) -> None:
    specs = [dataclasses.replace(SPEC, head_dim=d, rotary_dim=d) for d in (dim, to)]
    variant = adapt(RopeVariant(block_tokens=tile[0], block_heads=tile[1], num_warps=2, pdl=True), *specs)
    assert (variant.block_tokens, variant.block_heads) == wanted
    assert (variant.num_warps, variant.pdl) == (2, True)


def test_a_tile_of_more_heads_than_there_are_takes_more_tokens() -> None:
    one = dataclasses.replace(SPEC, layout="bshd", heads=1)
    assert adapt(RopeVariant(block_tokens=2, block_heads=4), SPEC, one) == RopeVariant(block_tokens=8, block_heads=1)
    assert adapt(RopeVariant(block_tokens=4, block_heads=8), SPEC, one) == RopeVariant(block_tokens=8, block_heads=1)
    three = dataclasses.replace(one, heads=3)
    assert adapt(RopeVariant(block_tokens=1, block_heads=8), SPEC, three) == RopeVariant(block_tokens=2, block_heads=4)
    batched = dataclasses.replace(one, layout="sbhd")
    assert adapt(RopeVariant(block_tokens=2, block_heads=4), batched, batched).block_heads == 4, "the batch adds rows"


def test_few_heads_are_served_by_no_row_of_far_more_tokens() -> None:
    """Rows with more heads in a tile were passed over; one 14 octaves away served, in 3 times flash-attention's."""
    gpu = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
    for layout, heads, tokens in itertools.product(("bshd", "thd"), (1, 2, 3), (512, 4096, 32_768)):
        spec = dataclasses.replace(SPEC, layout=layout, heads=heads)
        choice = choose(FAMILIES["rope"], spec, RopeSize(1, tokens), gpu)
        assert choice.variant is not None
        if choice.row is not None:
            assert abs(math.log2(choice.row.size.tokens / tokens)) <= ROPE.reach, (layout, heads, tokens, choice.why)


def test_a_tail_that_is_copied_counts_as_much_as_what_rotates() -> None:
    """A tile of 8 x 16 rows, of 4 features that rotate and 176 that are copied, took 10 times the floor."""
    few = dataclasses.replace(SPEC, head_dim=180, rotary_dim=4, inplace=False)
    much = dataclasses.replace(SPEC, head_dim=128, rotary_dim=64, inplace=False)
    found = adapt(RopeVariant(block_tokens=4, block_heads=4, num_warps=2), much, few)
    assert (found.block_tokens, found.block_heads) == (2, 4)
    in_place = [dataclasses.replace(spec, inplace=True) for spec in (much, few)]
    found = adapt(RopeVariant(block_tokens=1, block_heads=2), *in_place)
    assert (found.block_tokens, found.block_heads) == (4, 8), "in place the tail is not touched"
    tile = RopeVariant(block_tokens=8, block_heads=16, num_warps=2)
    assert "features" in (rejection(few, None, tile) or "")
    assert rejection(few, None, dataclasses.replace(tile, block_tokens=2, block_heads=2, num_warps=1)) is None


def test_every_small_call_has_a_legal_default() -> None:
    """An sbhd call of one token and two heads had no default: the formula took 34 us where a kernel takes 2."""
    specs = [
        dataclasses.replace(SPEC, layout=layout, heads=heads, head_dim=dim, rotary_dim=rotary, inplace=False)
        for layout in ("sbhd", "bshd", "thd")
        for heads in (1, 2, 3, 64)
        for dim, rotary in ((2, 2), (22, 2), (180, 4), (512, 2), (512, 512))
    ]
    for spec, batch, seq in itertools.product(specs, (1, 2, 5), (1, 3, 4096)):
        if spec.layout != "thd" or batch == 1:
            size = RopeSize(batch, seq)
            assert rejection(spec, size, default_variant(spec, size)) is None, (spec, size)


def test_a_tile_of_few_heads_grows_in_tokens() -> None:
    specs = [dataclasses.replace(SPEC, heads=2, head_dim=d, rotary_dim=d) for d in (128, 64)]
    variant = adapt(RopeVariant(block_tokens=1, block_heads=2), *specs)
    assert (variant.block_tokens, variant.block_heads) == (2, 2)


def test_a_variant_whose_kernel_does_not_ship_is_passed_over(
    tables: dict[str, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, family = GruCellSpec("bfloat16", 1024, (256, 1024)), FAMILIES["gru_cell"]
    size, other = GruCellSize(256), GruCellSize(128)
    best, second = cell_default(spec, size), cell_default(spec, other)
    rows = [Row(spec, of, v, None, 1.0, "a table", {}) for of, v in ((size, best), (other, second))]
    tables["here"] = Table("here", {}, {"rope": (), "gru_cell": tuple(rows)})
    assert choose(family, spec, size, HERE).variant == best
    assert family.kernel_names(spec, best) != family.kernel_names(spec, second)
    monkeypatch.setattr(tuned.kernels, "DIGESTS", dict.fromkeys(family.kernel_names(spec, second), ""))
    choice = choose(family, spec, size, HERE)
    assert (choice.rule, choice.variant) == ("nearest size", second)


def test_a_row_measured_on_other_multiprocessors_is_a_neighbour(tables: dict[str, Table]) -> None:
    whole = {"multiprocessors": 132, "device_name": "Here"}
    tables["here"] = table("here", row(SPEC, LARGE, measured=whole))
    assert choose(ROPE, SPEC, LARGE, dataclasses.replace(HERE, name="Here")).rule == "winner"
    slice_of_it = Gpu("here", 90, 16, "Here")
    choice = choose(ROPE, SPEC, LARGE, slice_of_it)
    assert choice.rule == "nearest size"
    assert "multiprocessors was 132, here it is 16" in choice.why


def test_a_row_that_is_not_legal_for_the_call_is_passed_over(tables: dict[str, Table]) -> None:
    tables["here"] = table("here", row(SPEC, LARGE, block_tokens=8, block_heads=1))
    assert choose(ROPE, SPEC, RopeSize(64, 1), HERE).rule == "default"


def test_another_gpu_serves_without_what_this_one_lacks(tables: dict[str, Table]) -> None:
    tables["far"] = table("far", row(SPEC, LARGE, num_warps=1), capability=70, multiprocessors=80)
    tables["near"] = table("near", row(SPEC, LARGE, num_warps=2, pdl=True), capability=90, multiprocessors=132)
    choice = choose(ROPE, SPEC, LARGE, Gpu("unknown", 86, 84))
    assert (choice.rule, choice.variant.num_warps, choice.variant.pdl) == ("similar GPU", 2, False)


def test_with_no_table_the_default_serves(tables: dict[str, Table]) -> None:
    assert tables == {}
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert (choice.rule, choice.variant) == ("default", default_variant(SPEC, LARGE))


def test_a_default_that_does_not_fit_the_gpu_leaves_the_call_to_eager(tables: dict[str, Table]) -> None:
    assert tables == {}
    gru = dataclasses.replace(FAMILIES["gru"], model=None)
    spec, size = GruSpec("bfloat16", 512, layers=2), GruSize(batch=64, seq=8)
    unfit = GruVariant("persistent", block_hidden=8, block_batch=8)
    for family in (gru, dataclasses.replace(gru, default_variant=lambda *_: unfit)):
        default = family.default_variant(spec, size)
        reason = family.rejection(spec, size, default, 90, 8)
        choice = choose(family, spec, size, Gpu("small", 90, 8))
        assert reason is not None
        assert (choice.rule, choice.variant, choice.gpu) == ("eager", None, None)
        assert choice.why.endswith(reason)


def test_a_row_whose_programs_do_not_fit_the_gpu_together_is_passed_over(
    tables: dict[str, Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    gru = dataclasses.replace(FAMILIES["gru"], model=None)
    spec, size = GruSpec("bfloat16", 512), GruSize(batch=16, seq=8)
    many, few = (GruVariant("persistent", block_hidden=units, block_batch=16) for units in (8, 32))
    names = {name: "" for v in (many, few) for name in gru.kernel_names(spec, v)}
    monkeypatch.setattr(tuned.kernels, "DIGESTS", names)
    rows = Row(spec, size, many, None, 1.0, "t"), Row(spec, GruSize(4, 8), few, None, 1.0, "t")
    tables["here"] = Table("here", {}, {"gru": rows})
    assert choose(gru, spec, size, HERE).variant == many
    small = choose(gru, spec, size, Gpu("here", 90, 16))
    assert (small.rule, small.variant) == ("nearest size", few)


def test_records_of_a_folder_stand_in_front_and_a_broken_one_is_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = winner()
    device = made.environment["device"]
    write_record(tmp_path / f"{device}.json", device, [made])
    (tmp_path / "torn.json").write_text('{"format": "tuned-winners", "sch')
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path))
    tuned.lookup.table.tables.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"torn.json is not whole JSON"):
            found = tuned.lookup.table.tables()
        assert [r.variant for r in found[device].rows[made.family]] == [made.variant]
        assert "torn" not in found
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            tuned.lookup.table.tables()
    finally:
        tuned.lookup.table.tables.cache_clear()


@pytest.mark.parametrize("variable", ["TUNED_TABLES", "XDG_DATA_HOME"])
def test_a_record_under_a_name_that_is_not_its_device_is_told_of(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood for a device of that name, so no call found it, and nothing was said."""
    made = winner()
    folder = tmp_path if variable == "TUNED_TABLES" else tmp_path / "tuned-kernels" / "winners"
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "mine.json", "test_gpu", [made])
    monkeypatch.setenv(variable, str(tmp_path))
    tuned.lookup.table.tables.cache_clear()
    try:
        said = r"^mine\.json must have the name of its device, 'test_gpu', by .*: rename it to test_gpu\.json; it is not used"
        with pytest.warns(RuntimeWarning, match=said):
            assert not {"mine", "test_gpu"} & set(tuned.lookup.table.tables())
        (folder / "mine.json").rename(folder / "test_gpu.json")
        tuned.lookup.table.tables.cache_clear()
        (found,) = tuned.lookup.table.tables()["test_gpu"].rows[made.family]
        assert found.variant == made.variant
    finally:
        tuned.lookup.table.tables.cache_clear()


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_home_that_may_not_be_entered_has_no_records(
    error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user is not the owner of HOME: no model may stop because of it."""
    stat = os.stat

    def refused(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise error(13 if error is PermissionError else 36, "refused", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "stat", refused)
        assert tuned.lookup.table.tables.__wrapped__()


def test_a_row_timed_another_way_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = winner()
    old = dataclasses.replace(made, environment={**made.environment, "method": "wall clock"})
    write_record(tmp_path / "test_gpu.json", "test_gpu", [old])
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path))
    tuned.lookup.table.tables.cache_clear()
    try:
        (found,) = tuned.lookup.table.tables()["test_gpu"].rows[made.family]
        assert found.stale == f"the timing method was wall clock, here it is {METHOD}"
        gpu = Gpu("test_gpu", 90, 132, "Test GPU")
        assert choose(FAMILIES[made.family], made.spec, made.size, gpu).rule == "nearest size"
    finally:
        tuned.lookup.table.tables.cache_clear()


def test_every_shipped_row_is_fresh_and_legal() -> None:
    tuned.lookup.table.tables.cache_clear()
    for found in tuned.lookup.table.tables().values():
        for name, rows in found.rows.items():
            record = json.loads(
                (tuned.lookup.table.Path(tuned.__file__).parent / "winners" / f"{found.device}.json").read_text()
            )
            assert len(rows) == sum(w["family"] == name for w in record["winners"])
            assert not [r.stale for r in rows if r.stale], "the template changed since this was measured: tune again"


def test_rows_that_are_left_out_would_never_have_been_nearest() -> None:
    family, table = FAMILIES["rope"], tuned.lookup.table.tables()["nvidia_h200"]
    rows, gpu = table.rows["rope"], Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
    draw = random.Random(0)
    for _ in range(60):
        spec = draw.choice(rows).spec
        if draw.random() < 0.6:
            spec = dataclasses.replace(
                spec, heads=draw.choice([9, 16, 40, 64]), dtype=draw.choice(["bfloat16", "float32"])
            )
        kept = near_rows(family, spec, gpu)
        assert 0 < len(kept.near) < len(rows)
        for size in (RopeSize(draw.choice([1, 2, 7]), draw.randint(1, 200_000)) for _ in range(8)):
            chosen = variant_at(kept._replace(measured={}), family, spec, size, gpu)
            if usable(family, spec, size, chosen, gpu.capability, gpu.multiprocessors):
                found = nearest(family, spec, size, rows, gpu.capability, gpu.multiprocessors)
                assert chosen == (family.default_variant(spec, size) if found is None else found[2])


def test_sizes_of_one_class_are_alike_to_every_rule() -> None:
    draw = random.Random(0)
    variants = [RopeVariant(**{n: draw.choice(c) for n, c in choices(RopeVariant).items()}) for _ in range(60)]
    for layout, heads in itertools.product(("bshd", "sbhd", "thd"), (1, 3, 32)):
        spec = RopeSpec(layout, "bfloat16", heads, 128, 128)
        classes: dict[Any, Any] = {}
        for batch, seq in itertools.product((1, 2, 3, 5, 40, 200), (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 500)):
            size = RopeSize(batch, seq)
            verdicts = [rejection(spec, size, v) is None for v in variants]
            assert classes.setdefault(size_class(spec, size), verdicts) == verdicts
