"""README's table: its rows, what each tells, its picture, and that README agrees with the committed results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import call as calls
from benchmarks import random_rope, summary, table
from benchmarks.rope import OUR_ERROR, check

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "NVIDIA Test", "torch": "9.9", "triton": "8.8"}
ROW = {"ours_us": 1.234, "peer_us": 12.34, "peer": "a peer", "graph": 10.0, "call": 4.25, "floor": 1.02}
DOCUMENT: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "rows": {"a rotation": ROW, "a GRU": {**ROW, "floor": None, "ours_us": 2000.4, "peer_us": 20004.0}},
}


def test_a_row_is_told_with_what_it_replaces() -> None:
    text = summary.table(DOCUMENT)
    assert text.startswith(
        "Microseconds in a CUDA graph on one NVIDIA Test, bfloat16 where nothing else is said; PyTorch 9.9"
    )
    assert "| a rotation | 1.23 | 12.3 | a peer | 10.00 | 4.2 | 1.02 |" in text
    assert "| a GRU | 2,000 | 20,004 | a peer | 10.00 | 4.2 |  |" in text


def test_the_picture_and_the_table_go_where_they_are_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results.json").write_text(json.dumps(DOCUMENT))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- summary:begin -->\nold\n<!-- summary:end -->\nz\n")
    picture = tmp_path / "picture.png"
    given = ["--results", str(tmp_path / "results.json"), "--write", str(page), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["summary", *given])
    summary.main()
    assert page.read_text() == f"a\n<!-- summary:begin -->\n{summary.table(DOCUMENT)}\n<!-- summary:end -->\nz\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_the_marks_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as end:
        summary.main(["--write", str(page)])
    assert end.value.code == 2
    assert "must have the marks <!-- summary:begin -->" in capsys.readouterr().err
    assert page.read_text() == "no marks"


def test_a_slow_row_has_a_bar_and_a_number_in_the_picture() -> None:
    pytest.importorskip("matplotlib")
    for slowest, left in ((0.5, 0.4), (0.81, 0.648), (0.95, 0.8), (3.0, 0.8)):
        figure = summary.figure_of({"rows": {"slow": {**ROW, "graph": slowest}, "fast": ROW}})
        axes = figure.axes[0]
        assert axes.get_xlim()[0] == pytest.approx(left), "ticks must not widen the axis"
        assert axes.get_xlim()[1] >= 20
        assert axes.get_xlim()[0] < min(bar.get_width() for bar in axes.patches)


def test_the_committed_picture_is_what_the_results_give(tmp_path: Path) -> None:
    mpl = pytest.importorskip("matplotlib")
    committed = ROOT / "docs" / "images" / "speedups.png"
    if f"Matplotlib version{mpl.__version__},".encode() not in committed.read_bytes():
        pytest.skip("another matplotlib drew it")
    (newest,) = table.newest(ROOT / "benchmarks" / "results" / "summary")
    summary.draw(json.loads(newest.read_text()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes() == committed.read_bytes()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["summary"])
    with pytest.raises(SystemExit, match="torch sees none here: --results FILE shows an earlier run"):
        summary.main()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list of what the rows ask to measure; fake times are returned."""
    found: list[Any] = []

    def rope(call: calls.Call, peers: Any) -> dict[str, Any]:
        found.append((call, peers))
        return {
            "graph_us": {"ours": 2.0, "b": 6.0, "a": 5.0},
            "call_us": {"ours": 4.0, "b": 6.0, "a": 9.0},
            "floor_us": 1.6,
        }

    def gru(*given: Any) -> dict[str, Any]:
        found.append(given)
        return {"ours_us": 1.0, "theirs_us": 3.0, "ours_graph_us": 2.0, "theirs_graph_us": 5.0}

    monkeypatch.setattr(random_rope, "compared", rope)
    monkeypatch.setattr(summary.random_gru, "compared", gru)
    monkeypatch.setattr(summary.training, "compared", gru)
    yield found
    found.clear()


def test_each_row_measures_what_it_is_named_after_beside_the_best_of_all(asked: list[Any]) -> None:
    rows = {name: measured() for name, measured in summary.ROWS.items()}
    rotations = [row for row in rows.values() if row["floor"] is not None]
    assert all((row["peer"], row["graph"], row["call"], row["floor"]) == ("a", 2.5, 1.5, 1.25) for row in rotations)
    assert all((row["graph"], row["call"]) == (2.5, 3.0) for row in rows.values() if row["floor"] is None)
    calls_asked = [given[0] for given in asked if isinstance(given[0], calls.Call)]
    assert len(calls_asked) == len(rotations) == 6
    for call in calls_asked:
        small = calls.dataclasses.replace(call, batch=min(call.batch, 2), seq=max(4, call.sequences), heads=4)
        tensors = calls.make_tensors(small, 1, "cpu")[0]
        expected = calls.expected(small, calls.probe(small, tensors))
        check(calls.ours(small, [calls.probe(small, tensors)])[0], expected, OUR_ERROR[small.dtype])


def test_readme_has_the_table_of_the_committed_results() -> None:
    (newest,) = table.newest(ROOT / "benchmarks" / "results" / "summary")
    document = json.loads(newest.read_text())
    assert list(document["rows"]) == list(summary.ROWS)
    page = (ROOT / "README.md").read_text()
    shown = re.search("<!-- summary:begin -->\n(.*?)\n<!-- summary:end -->", page, re.DOTALL)
    assert shown is not None
    assert shown[1] == summary.table(document)
