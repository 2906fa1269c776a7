"""Which row serves a call: the order that tuned.dispatch documents, on tables made for it."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import tuned.lookup
import tuned.table
from generator.record import write_record
from tests.test_record import winner
from tuned.family import FAMILIES
from tuned.lookup import Gpu, choose
from tuned.rope.spec import RopeSize, RopeSpec
from tuned.rope.variant import RopeVariant, default_variant, distance
from tuned.table import Row, Table

if TYPE_CHECKING:
    from pathlib import Path

ROPE = FAMILIES["rope"]
SPEC = RopeSpec("bshd", "bfloat16", 32, 128, 128)
SMALL, LARGE = RopeSize(1, 128), RopeSize(2, 4096)
HERE = Gpu("here", 90, 132)


def row(spec: RopeSpec, size: RopeSize, fresh: bool = True, **knobs: Any) -> Row:
    return Row(spec, size, RopeVariant(**knobs), fresh, 1.0, "a table")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    made: dict[str, Table] = {}
    monkeypatch.setattr(tuned.lookup, "tables", lambda: made)
    return made


def table(device: str, *rows: Row, **properties: Any) -> Table:
    return Table(device, properties, {"rope": rows, "gru_cell": ()})


def test_the_winner_of_this_spec_and_size_comes_first(tables: dict[str, Table]) -> None:
    tables["here"] = table("here", row(SPEC, SMALL, num_warps=1), row(SPEC, LARGE, num_warps=2))
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert (choice.rule, choice.variant.num_warps) == ("winner", 2)


def test_the_nearest_size_comes_next_and_a_stale_row_is_only_a_neighbour(tables: dict[str, Table]) -> None:
    tables["here"] = table("here", row(SPEC, SMALL, num_warps=1), row(SPEC, LARGE, fresh=False, num_warps=2))
    assert choose(ROPE, SPEC, RopeSize(2, 3000), HERE).variant.num_warps == 2
    choice = choose(ROPE, SPEC, LARGE, HERE)
    assert choice.rule == "nearest size"
    assert "older text" in choice.why


def test_the_closest_spec_may_differ_in_heads_dims_and_dtype_only(tables: dict[str, Table]) -> None:
    other = dataclasses.replace(SPEC, style="interleaved")
    near, far = dataclasses.replace(SPEC, heads=64), dataclasses.replace(SPEC, heads=8)
    tables["here"] = table("here", row(other, LARGE), row(far, LARGE, num_warps=1), row(near, LARGE, num_warps=2))
    wanted = dataclasses.replace(SPEC, heads=40)
    choice = choose(ROPE, wanted, LARGE, HERE)
    assert (choice.rule, choice.variant.num_warps) == ("closest spec", 2)
    assert distance(wanted, other) is None


def test_a_row_that_is_not_legal_for_the_call_is_passed_over(tables: dict[str, Table]) -> None:
    tables["here"] = table("here", row(SPEC, LARGE, block_tokens=32, block_heads=1))
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


def test_records_of_a_folder_stand_in_front_and_a_broken_one_is_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = winner()
    device = made.environment["device"]
    write_record(tmp_path / f"{device}.json", device, [made])
    (tmp_path / "torn.json").write_text('{"format": "tuned-winners", "sch')
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path))
    tuned.table.tables.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"torn.json is not whole JSON"):
            found = tuned.table.tables()
        assert [r.variant for r in found[device].rows[made.family]] == [made.variant]
        assert "torn" not in found
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            tuned.table.tables()
    finally:
        tuned.table.tables.cache_clear()


def test_every_shipped_row_is_fresh_and_legal() -> None:
    tuned.table.tables.cache_clear()
    for found in tuned.table.tables().values():
        for name, rows in found.rows.items():
            record = json.loads(
                (tuned.table.Path(tuned.__file__).parent / "winners" / f"{found.device}.json").read_text()
            )
            assert len(rows) == sum(w["family"] == name for w in record["winners"])
            assert all(r.fresh for r in rows), "the template changed since this was measured: tune again"
