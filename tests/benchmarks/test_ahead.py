"""Compiling ahead of a benchmark of random calls: each shape in another process, and none for longer than allowed."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import ahead, random_gru
from benchmarks.ahead import compile_ahead, processes_here

if TYPE_CHECKING:
    from pathlib import Path


def leaves_a_file(path: Path) -> None:
    path.write_text(str(os.getpid()))


def fails_once(path: Path) -> None:
    if path.name == "1":
        raise ValueError("no such kernel\nand more")
    leaves_a_file(path)


def sleeps(_: Any) -> None:
    time.sleep(0.5)


@pytest.mark.processes
def test_each_shape_is_served_by_another_process(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(4)]
    told = compile_ahead(paths, leaves_a_file, 2, 60.0)
    assert told.startswith("4 of 4 shapes compiled ahead in ")
    assert str(os.getpid()) not in {path.read_text() for path in paths}


@pytest.mark.processes
def test_what_fails_is_said_and_the_others_are_served(tmp_path: Path) -> None:
    told = compile_ahead([tmp_path / str(i) for i in range(3)], fails_once, 1, 60.0)
    assert told.startswith("2 of 3 shapes compiled ahead in ")
    assert told.endswith("; ValueError: no such kernel")
    assert (tmp_path / "2").exists()


@pytest.mark.processes
def test_after_the_time_that_is_allowed_no_shape_is_begun() -> None:
    begun = time.monotonic()
    told = compile_ahead(range(200), sleeps, 1, 1.0)
    assert int(told.split()[0]) < 10
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("cores", "processes"), [(64, ahead.MOST_PROCESSES), (8, 7), (1, 1)])
def test_a_core_is_left_for_what_measures(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert processes_here() == processes


def test_what_is_compiled_ahead_is_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same shapes in the same order, none twice; a shape with nothing to compare with leaves no row."""
    options = random_gru.argparse.Namespace(seed=7, seconds=60.0, shapes=5)
    given: list[Any] = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda shapes, *_: given.extend(shapes) or "told")
    rows: list[dict[str, Any]] = []
    random_gru.measure(rows, options, lambda draw: draw.random(), None, lambda x: {"x": x} if x > 0.2 else None)
    assert len(given) == len(set(given)) == 5
    assert [row["x"] for row in rows] == [x for x in given if x > 0.2]
    assert 0 < len(rows) < 5
    assert capsys.readouterr().out == "told\n"
    rows.clear()
    options.seconds = 0.0
    random_gru.measure(rows, options, lambda draw: draw.random(), None, lambda x: {"x": x})
    assert rows == []
