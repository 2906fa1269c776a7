"""The space of another project's kernel, in Kernel Tuner's format, loads, and the search of tune.py searches it."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from generator import commands
from generator.evaluation import comparing, foreign, replay
from generator.searching.search import TRIALS
from generator.storage.landscape import LandscapeError
from tests.support.command_line import call
from tuned.families.choices import choices

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS = {
    "block": [256, 16, 32, 64, 128],
    "tile": [1, 2, 3, 4, 5],
    "unroll": [0, 1],
    "mode": ["a", "b", "c"],
    "n": [7],
}


def content(*, slower: float = 1.0) -> dict[str, Any]:
    """A space with a restriction and failures; times in milliseconds."""
    rows = {}
    for values in itertools.product(*PARAMETERS.values()):
        row = dict(zip(PARAMETERS, values, strict=True))
        if row["block"] * row["tile"] > 1024 and row["unroll"]:
            continue
        ms = slower * (1 + abs(row["block"] - 64) / 100 + abs(row["tile"] - 3) / 4 + 0.1 * (row["mode"] != "b"))
        row["time"] = "RuntimeFailedConfig" if row["block"] == 256 and row["mode"] == "c" else ms
        row["times"] = [ms] * 4
        rows[",".join(map(str, values))] = row
    return {"device_name": "Some GPU", "kernel_name": "k", "tune_params": PARAMETERS, "cache": rows}


def write(folder: Path, name: str, **options: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content(**options)).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def test_a_cache_file_is_a_landscape(tmp_path: Path) -> None:
    one = foreign.load_foreign(write(tmp_path, "gpu.json.gz"))
    assert one.problem.name == "gpu"
    assert choices(one.space.variant_type) == {
        "block": (16, 32, 64, 128, 256),
        "tile": (1, 2, 3, 4, 5),
        "unroll": (0, 1),
        "mode": ("a", "b", "c"),
    }, "numbers by size, and no knob of one value"
    rows = content()["cache"]
    assert len(one.times) + len(one.failed) == len(rows) == len(one.space.pool.variants)
    assert set(one.failed.values()) == {"RuntimeFailedConfig"}
    assert {v.mode for v in one.failed} == {"c"}
    best = one.space.variant_type(block=64, tile=3, unroll=0, mode="b")
    assert one.regret(best) == 0
    assert one.best_us == pytest.approx(1000)
    assert one.gpu_s[best] == pytest.approx(4e-3), "of all its launches"
    assert (one.space.default.block, one.space.default.tile, one.space.default.mode) == (64, 3, "b")
    plain = foreign.load_foreign(write(tmp_path, "gpu.json"))
    assert list(plain.times.values()) == list(one.times.values())


def test_all_strategies_begin_with_one_variant_and_measure_as_many(tmp_path: Path) -> None:
    one = foreign.load_foreign(write(tmp_path, "gpu.json"))
    first = one.space.default
    tpe = optuna.samplers.TPESampler(seed=0, multivariate=True)
    found = [replay.searched(one, 0), replay.at_random(one, 0), replay.pooled(one, tpe, 0)]
    for run in found:
        assert len(run.regrets) == TRIALS == 96
        assert run.regrets[0] == one.regret(first)
        assert run.gpu_s > 0
        assert list(run.regrets) == sorted(run.regrets, reverse=True)
    again = replay.searched(one, 0)
    assert (again.regrets, again.variant, again.gpu_s) == (found[0].regrets, found[0].variant, found[0].gpu_s)


def test_figures_have_intervals_and_are_the_same_again(tmp_path: Path) -> None:
    write(tmp_path, "a/one.json.gz")
    write(tmp_path, "a/two.json", slower=3.0)
    (tmp_path / "a" / "two_T4.json").write_text("the same in another format")
    landscapes = foreign.load_folder(tmp_path)
    assert [one.problem.name for one in landscapes] == ["a/one", "a/two"]
    found = comparing.compare(landscapes, 2, slow=False)
    assert list(found) == ["tune.py", "random, none twice", "Optuna TPE over the pool"]
    ours = found["tune.py"]
    assert (comparing.figures(ours, ours).more, len(comparing.figures(ours, ours).more_between)) == (0, 2)
    for searches in found.values():
        assert [len(one) for one in searches] == [2, 2]
        got = comparing.figures(searches, ours)
        assert got == comparing.figures(searches, ours)
        assert got.more == pytest.approx(got.mean - comparing.figures(ours, ours).mean)
        assert got.searches == 4
        assert got.mean_between[0] <= got.mean <= got.mean_between[1] <= got.worst
        assert got.median_between[0] <= got.median <= got.median_between[1]
    text = comparing.comparison_markdown(landscapes, found)
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    table = comparing.comparison_table(landscapes, found)
    assert (table.row_count, len(table.columns)) == (len(comparing.HEADS), 1 + 3)
    assert comparing.landscape_table(landscapes, found).row_count == 2


BROKEN = {
    "no JSON": (b"{", "JSON"),
    "no object": (b"[]", "JSON"),
    "no cache": (b'{"tune_params": {}}', "it lacks 'cache'"),
    "no rows": (b'{"tune_params": {"a": [1]}, "cache": {}}', "no parameter has two values"),
    "a parameter is missing": (b'{"tune_params": {"a": [1]}, "cache": {"1": {"time": 1}}}', "it lacks 'a'"),
    "texts and numbers": (
        b'{"tune_params": {"a": [1, "x"]}, "cache": {"1": {"a": 1, "time": 1}, "x": {"a": "x", "time": 1}}}',
        "numbers and texts",
    ),
    "a time below zero": (
        b'{"tune_params": {"a": [1, 2]}, "cache": {"1": {"a": 1, "time": 1}, "2": {"a": 2, "time": -1}}}',
        "must be positive",
    ),
    "all failed": (
        b'{"tune_params": {"a": [1, 2]}, "cache": {"1": {"a": 1, "time": 1e20}, "2": {"a": 2, "time": "x"}}}',
        "no row of it has a time",
    ),
}


@pytest.mark.parametrize(("bytes_", "why"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_none_says_so_in_one_sentence(tmp_path: Path, bytes_: bytes, why: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(bytes_)
    with pytest.raises(LandscapeError, match=r"gpu\.json cannot be read as a cache file of Kernel Tuner") as caught:
        foreign.load_foreign(path)
    assert why in str(caught.value)
    path.with_suffix(".json.gz").write_bytes(gzip.compress(bytes_)[:10] + b"\xff" * 20)
    with pytest.raises(LandscapeError, match=r"gpu\.json\.gz cannot be read as a cache file of Kernel Tuner"):
        foreign.load_foreign(path.with_suffix(".json.gz"))
    assert commands.refusal(caught.value) == (str(caught.value), 1)


def test_the_command_prints_and_writes_both_tables(tmp_path: Path) -> None:
    folder, page = tmp_path / "found", tmp_path / "page.md"
    write(folder, "one.json")
    page.write_text("<!-- foreign:begin -->\n<!-- foreign:end -->\n")
    done = call("replay", "--foreign", str(folder), "--seeds", "1", "--no-plain", "--write", str(page))
    assert done.exit_code == 0, done.output
    assert "after 96 evaluations, 1 landscapes" in " ".join(done.output.split())
    assert "| one | " in page.read_text()
    (folder / "two.json").write_text("{")
    done = call("replay", "--foreign", str(folder))
    assert done.exit_code == 1
    assert "two.json cannot be read" in " ".join(done.output.split())


def test_a_folder_without_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(LandscapeError, match=r"no \.json and \.json\.gz files"):
        foreign.load_folder(tmp_path / "none")
