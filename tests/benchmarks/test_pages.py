"""The page of results of a device: the committed page is what the committed results give, pictures first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

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


# Rows that lack times


def page_of(
    folder: Path, rows: list[dict[str, Any]], *, of: str = "", runs: dict[str, list[dict[str, Any]]] | None = None
) -> str:
    """The page of a device with these rows in the folder ``of`` of results; ``runs``: name -> rows of random runs."""
    about = json.loads((RESULTS / f"{DEVICE}.json").read_text())["environment"]
    results = folder / "results"
    random = {results / "random" / f"a_gpu-{name}.json": found for name, found in (runs or {}).items()}
    for path, found in ({results / of / "a_gpu.json": rows} | random).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": about, "rows": found, "skipped": {}}))
    (page,) = pages.write(results, folder)
    return page.read_text()


def grus() -> list[dict[str, Any]]:
    """The rows of GRUs, sequences first."""
    rows = json.loads((RESULTS / "gru" / f"{DEVICE}.json").read_text())["rows"]
    return sorted(rows, key=lambda row: str(row["suite"]))


def pictures(folder: Path) -> list[str]:
    return sorted(path.stem.partition("-")[2] for path in (folder / "images").iterdir())


def test_a_gru_without_a_cuda_graph_is_left_out_of_the_picture_and_said(tmp_path: Path) -> None:
    rows = grus()
    number = sum(row["suite"] == "gru" for row in rows)
    refused = {"ours_in_a_graph": "RuntimeError: operation not permitted", "speedup_graph_over_graph": None}
    text = page_of(tmp_path, [rows[0] | refused, *rows[1:]], of="gru")
    assert f"{number - 1} GRUs over sequences" in text
    assert "Left out, because one of the four times is missing: 1." in text
    assert "is missing" not in page_of(tmp_path, rows, of="gru")


def test_a_device_with_nothing_but_grus_has_a_page(tmp_path: Path) -> None:
    text = page_of(tmp_path, grus(), of="gru")
    assert "## GRUs" in text
    assert "### GRU" in text
    assert "RoPE" not in text.partition("## GRUs")[2]
    assert pictures(tmp_path) == ["gru"]


def test_grus_of_which_none_has_a_graph_get_a_table_and_no_picture(tmp_path: Path) -> None:
    text = page_of(tmp_path, [row | {"speedup_graph_over_graph": None} for row in grus()], of="gru")
    assert "## GRUs" not in text
    assert "### GRU" in text


@pytest.mark.parametrize(
    ("change", "drawn"),
    [({"kind": "host"}, []), ({"peers": {}}, ["floor"]), ({"ours_over_floor": None}, ["peers"])],
    ids=["no device rows", "no peers", "no floor"],
)
def test_a_picture_that_no_row_has_the_times_for_is_left_out(
    change: dict[str, Any], drawn: list[str], tmp_path: Path
) -> None:
    rows = json.loads((RESULTS / f"{DEVICE}.json").read_text())["rows"]
    text = page_of(tmp_path, [row | change for row in rows if row["suite"] == "rope-qk"])
    assert pictures(tmp_path) == drawn
    assert text.count("![") == len(drawn)
    assert "### Complete calls of RoPE" in text


def test_a_sweep_of_another_shape_is_left_out(tmp_path: Path) -> None:
    rows = json.loads((RESULTS / f"{DEVICE}.json").read_text())["rows"]
    other = [row | {"sizes": row["sizes"] | {"batch": 77}} for row in rows if row["suite"] == "rope-sweep"]
    page_of(tmp_path, other)
    assert pictures(tmp_path) == ["floor", "peers"]


def test_a_random_run_of_packed_sequences_alone_is_left_out(tmp_path: Path) -> None:
    packed, timed = {"ours_graph_us": None, "theirs_graph_us": None}, {"ours_graph_us": 2.0, "theirs_graph_us": 3.0}
    served, trained = ("".join(pages.RANDOM[f"GRUs{text}, against nn.GRU"]) for text in ("", " in training"))
    text = page_of(tmp_path, grus(), of="gru", runs={served: [packed], trained: [timed, packed]})
    assert "GRUs in training, against nn.GRU: 1 shapes, 1.50 times as fast" in text
    assert "GRUs, against nn.GRU:" not in text
    text = page_of(tmp_path, grus(), of="gru", runs={served: [packed], trained: [packed]})
    assert "## Shapes that nothing was tuned for" not in text


def test_a_random_run_that_was_cut_says_so(tmp_path: Path) -> None:
    title, (_, cited) = "GRUs, against nn.GRU", pages.RANDOM["GRUs, against nn.GRU"]
    row = {"ours_graph_us": 2.0, "theirs_graph_us": 3.0}
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / f"a_gpu-{cited}.json").write_text(json.dumps({"cut": True, "rows": [row, row]}))
    runs = pages.read_random(tmp_path, "a_gpu")
    assert runs == {f"{title} (cut after 2 shapes)": [row, row]}
    said = pages.random_shapes(runs, pages.Figure().subplots())
    assert said.startswith(f"{title} (cut after 2 shapes): 2 shapes, 1.50 times as fast")


@pytest.mark.parametrize(
    ("graph", "end"),
    [
        ((2.0, 1.05), "CUDA graphs."),
        ((2.0, 0.9), "CUDA graphs; 1 is slower, by 10 percent."),
        ((0.8, 0.9), "CUDA graphs; 2 are slower, by 20 percent at most."),
    ],
)
def test_slower_calls_are_told_if_there_are_any(graph: tuple[float, float], end: str, tmp_path: Path) -> None:
    rows = {str(ratio): {"graph": ratio, "call": 2.0} for ratio in graph}
    said = pages._summary({"rows": rows}, tmp_path / "picture.svg")
    assert said.startswith("2 calls: ")
    assert said.endswith(end)


def test_results_without_a_row_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a_gpu.json").write_text('{"rows": []}')
    for folder, why in ((tmp_path / "none", "there is no folder"), (tmp_path, "no device has results in")):
        with pytest.raises(SystemExit) as end:
            pages.main(["--results", str(folder), "--docs", str(tmp_path / "docs")])
        assert end.value.code == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()
