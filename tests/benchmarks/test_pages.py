"""The page of results of a device: the committed page is what the committed results give, pictures first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks import pages
from benchmarks.session import RESULTS

DEVICE = "nvidia_h200"
PICTURES = {
    "nvidia_h100_80gb_hbm3": ("calls", "floor", "peers", "sweep", "gru", "random"),
    "nvidia_h200": ("calls", "floor", "peers", "sweep", "gru", "random"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    docs = tmp_path_factory.mktemp("docs")
    assert pages.write(RESULTS, docs) == [docs / f"results-{device}.md" for device in PICTURES]
    return docs


@pytest.mark.parametrize("device", PICTURES)
def test_the_committed_page_is_what_the_results_give(device: str, written: Path) -> None:
    name = f"results-{device}.md"
    assert (written / name).read_text() == (pages.DOCS / name).read_text(), "python -m benchmarks.pages writes it again"
    for picture in PICTURES[device]:
        assert (pages.DOCS / "images" / f"{device}-{picture}.svg").exists()


@pytest.mark.parametrize("device", PICTURES)
def test_pictures_come_first_and_are_there(device: str, written: Path) -> None:
    text = (written / f"results-{device}.md").read_text()
    before, _, after = text.partition("## Tables")
    shown = re.findall(r"!\[.+\]\(images/(.+)\)", before)
    assert shown == [f"{device}-{picture}.svg" for picture in PICTURES[device]]
    assert sorted(path.name for path in (written / "images").glob(f"{device}-*")) == sorted(shown)
    assert "| --- |" not in before
    assert after.count("| --- |") > 5
    assert "![" not in after


def test_a_picture_is_the_same_each_time(written: Path, tmp_path: Path) -> None:
    pages.write(RESULTS, tmp_path)
    for path in (written / "images").iterdir():
        assert (tmp_path / "images" / path.name).read_bytes() == path.read_bytes()


def test_figures_are_those_of_the_rows(written: Path) -> None:
    text = (written / f"results-{DEVICE}.md").read_text()
    rows = json.loads((RESULTS / f"{DEVICE}.json").read_text())["rows"]
    on_device = [row for row in rows if row["kind"] == "device" and row["peers"]]
    slower = sum(min(row["peers"].values()) < row["ours"] for row in on_device)
    assert f"{len(on_device)} calls of RoPE: " in text
    assert f"in {slower} a peer is faster" in text
    calls = json.loads((RESULTS / "summary" / f"{DEVICE}.json").read_text())["rows"]
    assert f"{len(calls)} calls: " in text
    for name in calls:
        assert f"| {name} |" in text


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(RESULTS / f"{DEVICE}.json", results / "another_gpu.json")
    (page,) = pages.write(results, tmp_path)
    assert page.name == "results-another_gpu.md"
    text = page.read_text()
    assert "## RoPE and the floor" in text
    for absent in ("## GRUs", "## The calls of the README", "### GRU"):
        assert absent not in text
    drawn = sorted(p.name for p in (tmp_path / "images").iterdir())
    assert drawn == [f"another_gpu-{name}.svg" for name in ("floor", "peers", "sweep")]


def test_a_random_row_is_held_against_its_best_peer() -> None:
    assert pages.ratio_of({"graph_us": {"ours": 2.0, "a": 3.0, "b": 4.0}}) == 1.5
    assert pages.ratio_of({"graph_us": {"ours": 2.0}}) is None
    assert pages.ratio_of({"ours_graph_us": 2.0, "theirs_graph_us": 5.0}) == 2.5
    assert pages.ratio_of({"ours_graph_us": None, "theirs_graph_us": 5.0}) is None


def test_random_runs_are_those_of_the_release_if_there_was_one(tmp_path: Path) -> None:
    (tmp_path / "random").mkdir()
    (tmp_path / "release").mkdir()
    cited, seed = pages.RANDOM["GRUs, against nn.GRU"][1], str(0x1234567)
    (tmp_path / "random" / f"a_gpu-{cited}.json").write_text(json.dumps({"rows": [1]}))
    assert pages.read_random(tmp_path, "a_gpu") == {"GRUs, against nn.GRU": [1]}
    (tmp_path / "release" / "a_gpu.json").write_text(json.dumps({"commit": "1234567890ab"}))
    assert pages.read_random(tmp_path, "a_gpu") == {"GRUs, against nn.GRU": [1]}, "it has none of its own"
    (tmp_path / "random" / f"a_gpu-{seed}.json").write_text(json.dumps({"rows": [2]}))
    assert pages.read_random(tmp_path, "a_gpu") == {"GRUs, against nn.GRU": [2]}
    (tmp_path / "random" / f"a_gpu-{0xABCDEF0}.json").write_text(json.dumps({"rows": [3]}))
    assert pages.read_random(tmp_path, "a_gpu", "abcdef0123") == {"GRUs, against nn.GRU": [3]}, (
        "of one that has not ended"
    )
