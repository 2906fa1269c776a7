"""The plots of the sweep: where they are written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks import plot, table

DEVICE = "nvidia_h200"
NAMES = [f"{DEVICE}-study.png", f"{DEVICE}-llama-3-8b.png"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for benchmarks/results, with the results of one device."""
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(plot.RESULTS / f"{DEVICE}.json", folder)
    monkeypatch.setattr(plot, "RESULTS", folder)
    monkeypatch.setattr(table, "RESULTS", folder)
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> list[Path]:
    return [Path(line) for line in capsys.readouterr().out.splitlines()]


def test_plots_of_the_committed_results_go_where_the_page_shows_them(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [results / "sweep" / name for name in NAMES]
    assert plot.main([]) == 0
    assert told(capsys) == expected
    monkeypatch.chdir(results)
    assert plot.main([f"{DEVICE}.json"]) == 0
    assert told(capsys) == expected
    assert sorted(path.name for path in results.rglob("*.png")) == sorted(NAMES)


def test_plots_of_another_file_go_beside_it(results: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A release draws the results of its own folder, and copies the plots from there."""
    other = tmp_path / "release" / f"{DEVICE}.json"
    other.parent.mkdir()
    shutil.copy(results / f"{DEVICE}.json", other)
    assert plot.main([str(other)]) == 0
    assert told(capsys) == [other.with_name(name) for name in NAMES]


def test_the_page_shows_plots_of_the_default_folder() -> None:
    page = (plot.RESULTS.parents[1] / "docs" / "results.md").read_text()
    assert all(f"benchmarks/results/sweep/{name}" in page for name in NAMES)
    assert not list(plot.RESULTS.glob("*.png"))
