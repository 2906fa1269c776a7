"""tune.py explain: what serves a problem, how good it is, and what each choice is worth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from generator import command_line
from generator.reporting import explain as module
from generator.reporting.explain import explain, table
from generator.reporting.history import History
from generator.searching.pool import legal_pool
from generator.selection import problem_named
from generator.storage.backends import journal_path, open_storage
from generator.storage.journal import Journal
from generator.storage.record import save_winner
from tests.support.fakes import ENVIRONMENT
from tests.support.records import winner
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.lookup.lookup import Choice
from tuned.lookup.table import tables

PROBLEM = problem_named("gru_cell_1024_inplace_64")
DEFAULT = winner(PROBLEM.name).variant  # the library's form, block_batch=1, block_hidden=256, num_warps=4
BEST = dataclasses.replace(DEFAULT, block_batch=2)


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    yield
    tables.cache_clear()


def call(*arguments: str) -> Any:
    return CliRunner().invoke(command_line.app, list(arguments), catch_exceptions=False)


def words(done: Any) -> str:
    return " ".join(done.output.split())


def cost(variant: Any) -> float:
    """Two rows are the best block; each other knob adds its own cost."""
    rows = {1: 1.1, 2: 1.0, 4: 1.3, 8: 2.0}[variant.block_batch]
    return 10.0 * rows + abs(variant.num_warps - 4) + abs(variant.block_hidden - 256) / 64


def test_a_winner_is_told_with_its_time_its_origin_and_what_its_choices_are_worth(tmp_path: Path) -> None:
    save_winner(
        winner(PROBLEM.name, variant=BEST, median_us=10.0, default_us=11.0, floor_us=9.5, eager_us=95), tmp_path
    )
    journal = Journal(open_storage(None, "test_gpu", journal_path("test_gpu")))
    for variant in legal_pool(PROBLEM, 90).variants:
        journal.add(PROBLEM, ENVIRONMENT, variant, (cost(variant), 0.5), winner(PROBLEM.name).digests)
    done = call("--out", str(tmp_path), "explain", PROBLEM.name)
    text = words(done)
    assert done.exit_code == 0
    for said in (
        "gru_cell_1024_inplace_64: gru_cell bfloat16 hidden=1024 inputs=(1024,) inplace batch=64",
        "on test_gpu, winner: measured for this spec and size in",
        "kernel gru_gates_bias_inplace",
        "time 10.00 us +- 0.10, 95.0% of the floor (9.50 us), 1.10 x as fast as the default, 9.5 x as fast as eager PyTorch; 72",
        "with Test GPU (132 multiprocessors), driver 1.2.3, torch 2.11.0, Triton 3.6.0",
        "runner-up 11.00 us, +10.0%: block_batch=1 instead of 2",
        "block_batch 2 1 1 +10.0% / +10.0%; 4 +30.0% / +30.0%",
        "num_warps 4 same 2 +20.0% / +20.0%; 8 +40.0% / +40.0%",
    ):
        assert said in text, said
    assert "stale" not in text


def test_a_landscape_is_preferred_to_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_winner(winner(PROBLEM.name), tmp_path)
    pool = legal_pool(PROBLEM, 90).variants
    whole = History(PROBLEM, {v: cost(v) for v in pool}, {}, whole=True)
    monkeypatch.setattr(module, "from_landscapes", lambda _device: [whole])
    text = words(call("--out", str(tmp_path), "explain", PROBLEM.name))
    assert "of every legal variant" in text
    assert "faster 10.00 us, -9.1%: block_batch=2 instead of 1" in text, "the row is not the best of the landscape"


def test_what_was_not_tried_has_no_price() -> None:
    few = History(PROBLEM, {BEST: 10.0, dataclasses.replace(BEST, num_warps=2): 12.0}, {})
    lines = list(table(PROBLEM, Choice("winner", "", BEST), few))
    assert lines[0] == "runner-up  12.00 us, +20.0%: num_warps=2 instead of 4"
    told = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert told["block_batch"] == ["block_batch", "2", "1"]
    assert told["block_hidden"] == ["block_hidden", "256", "same"]
    assert told["num_warps"] == ["num_warps", "4", "same", "2", "+20.0%", "/", "+20.0%"]
    knobs = len(dataclasses.fields(BEST))
    assert len(list(table(PROBLEM, Choice("winner", "", BEST), None))) == knobs + 1


def test_a_row_that_does_not_count_says_why(tmp_path: Path) -> None:
    stale = dict.fromkeys(winner(PROBLEM.name).digests, "0123456789ab")
    save_winner(winner(PROBLEM.name, digests=stale), tmp_path)
    text = words(call("--out", str(tmp_path), "explain", PROBLEM.name))
    assert "on test_gpu, nearest size:" in text
    assert "state stale, it does not count: the source of gru_gates_bias_inplace changed since it was measured" in text
    other = {**ENVIRONMENT, "method": "by the clock on the wall"}
    save_winner(winner(PROBLEM.name, environment=other), tmp_path)
    assert "stale, it does not count: the timing method was by the clock" in words(
        call("--out", str(tmp_path), "explain", PROBLEM.name)
    )


def test_a_problem_without_a_row_is_told_what_stands_in(tmp_path: Path) -> None:
    both = GruCellVariant("split", 16, 16, 256, num_stages=3)  # a tile that fits both 16 and 64 rows
    apart = winner().environment | {"multiprocessors": 108}  # another number than GPUs with shipped tables have
    save_winner(winner("gru_cell_1024_16", variant=both, environment=apart), tmp_path)
    text = words(call("--out", str(tmp_path), "explain", "gru_cell_1024_64"))
    assert "on test_gpu, nearest size:" in text
    assert "not measured: python tune.py --problems gru_cell_1024_64" in text
    assert "trials none" in text


def test_a_device_without_a_record_is_told_by_its_data_sheet() -> None:
    done = call("explain", PROBLEM.name, "--device", "nvidia_geforce_rtx_4090")
    assert done.exit_code == 0
    assert "on nvidia_geforce_rtx_4090, " in done.output
    assert "not measured" in done.output


def test_the_committed_record_is_explained() -> None:
    done = call("explain", "llama3_8b_2x4096")
    assert done.exit_code == 0
    assert "on nvidia_h200, " in done.output
    assert "% of the floor" in done.output
    assert "NVIDIA H200 (132 multiprocessors)" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "gru_cell_512_65"), "Did you mean gru_cell_512_64"),
        (("explain", PROBLEM.name, "--device", "h300"), "no single target 'h300'"),
    ],
)
def test_a_name_that_is_not_there_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert said in words(done)


def test_the_tables_in_front_are_taken_away_again(tmp_path: Path) -> None:
    save_winner(winner(PROBLEM.name), tmp_path)
    list(explain(PROBLEM, "test_gpu", tmp_path, None))
    assert "test_gpu" not in tables()
