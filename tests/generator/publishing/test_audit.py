"""`tune.py --check` tells apart rows that do not count, rows worth tuning again, and rows that cannot be compared here."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from generator import command_line
from generator.measuring.bench import TIMING
from generator.publishing import audit
from generator.publishing.audit import Here, findings
from generator.selection import problem_named
from generator.storage.landscape import load_landscapes
from generator.storage.record import save_winner
from generator.workload import default_problems
from tests.support.fakes import ENVIRONMENT
from tests.support.records import winner
from tuned.lookup.record import METHOD, SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

ONE = "gru_cell_512_64"
VERSIONS = {name: ENVIRONMENT[name] for name in ("torch", "triton", "driver")}
BOARD = {name: ENVIRONMENT[name] for name in ("device_name", "multiprocessors")}
HERE = Here(VERSIONS, {"test_gpu": BOARD})
ELSEWHERE = Here({**VERSIONS, "driver": "unknown"}, {})


def found(folder: Path, here: Here = HERE) -> list[tuple[str, str]]:
    return [(f.kind, f.text) for f in findings([problem_named(ONE)], "test_gpu", folder, here)]


def measured(folder: Path, **changes: Any) -> None:
    save_winner(winner(ONE, environment={**ENVIRONMENT, **changes}), folder)


def test_a_row_of_this_machine_as_it_is_has_no_finding(tmp_path: Path) -> None:
    measured(tmp_path)
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"multiprocessors": 16}, "multiprocessors was 16, here it is 132"),
        ({"device_name": "Test GPU MIG"}, "the device was Test GPU MIG"),
        ({"method": "wall-clock"}, "the timing method was wall-clock, here it is "),
    ],
)
def test_a_hard_mismatch_does_not_count(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    measured(tmp_path, **changes)
    (only,) = found(tmp_path)
    assert only[0] == "hard"
    assert only[1].startswith(f"test_gpu: {ONE} does not count: {said}")
    assert only[1].endswith(f"python tune.py --problems {ONE} --out {tmp_path}")


def test_another_text_of_the_kernel_is_hard(tmp_path: Path) -> None:
    made = winner(ONE)
    save_winner(winner(ONE, digests=dict.fromkeys(made.digests, "0123456789ab")), tmp_path)
    ((kind, text),) = found(tmp_path)
    assert kind == "hard"
    assert f"the source of {next(iter(made.digests))} changed since it was measured" in text


@pytest.mark.parametrize("name", ["torch", "triton", "driver"])
def test_another_version_is_soft(tmp_path: Path, name: str) -> None:
    measured(tmp_path, **{name: "0.0.1"})
    ((kind, text),) = found(tmp_path)
    assert kind == "soft"
    assert f"was 0.0.1, here it is {VERSIONS[name]}: {ONE}: python tune.py --problems {ONE}" in text


@pytest.mark.parametrize("before", [{}, {"timing": "by hand/3"}])
def test_a_row_that_was_timed_another_way_counts_and_is_worth_tuning_again(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "timing"} | before
    save_winner(winner(ONE, environment=environment), tmp_path)
    ((kind, text),) = found(tmp_path)
    assert kind == "soft"
    assert f"it was timed by {before.get('timing', METHOD)!r}, here by {TIMING!r}: {ONE}: python tune.py" in text


def test_a_quick_row_is_soft(tmp_path: Path) -> None:
    measured(tmp_path, search="quick")
    ((kind, text),) = found(tmp_path)
    assert (kind, "--quick" in text) == ("soft", True)


def test_many_rows_with_one_difference_are_one_line(tmp_path: Path) -> None:
    problems = default_problems()[:6]
    for problem in problems:
        save_winner(winner(problem.name, environment={**ENVIRONMENT, "triton": "3.5.0"}), tmp_path)
    (only,) = findings(problems, "test_gpu", tmp_path, HERE)
    assert only.text == (
        "test_gpu: worth tuning again, Triton was 3.5.0, here it is 3.6.0: every row: "
        f"python tune.py --gpu auto --out {tmp_path}"
    )


def test_without_that_gpu_only_what_can_be_compared_is_and_it_says_so(tmp_path: Path) -> None:
    measured(tmp_path, multiprocessors=16, driver="0.0.1", triton="0.0.1")
    kinds = found(tmp_path, ELSEWHERE)
    assert [kind for kind, _ in kinds] == ["soft", "note"]
    assert "Triton was 0.0.1" in kinds[0][1]
    assert "test_gpu is not in this machine: its name, multiprocessors and driver were not compared" in kinds[1][1]


def test_another_schema_is_hard_and_the_other_records_are_still_looked_at(tmp_path: Path) -> None:
    measured(tmp_path)
    other = json.loads((tmp_path / "test_gpu.json").read_text()) | {"schema": SCHEMA + 1}
    (tmp_path / "old_gpu.json").write_text(json.dumps(other))
    (tmp_path / "test_gpu.json").unlink()
    measured(tmp_path, torch="2.0")
    kinds = [(f.kind, f.text) for f in findings([problem_named(ONE)], None, tmp_path, HERE)]
    assert [kind for kind, _ in kinds] == ["hard", "soft"]
    assert f"old_gpu.json has schema {SCHEMA + 1}" in kinds[0][1]


def test_rows_of_no_default_problem_are_looked_at_with_all(tmp_path: Path) -> None:
    size = type(winner(ONE).size)(batch=77)
    row = dataclasses.replace(winner(ONE), name="gru_cell_77", size=size, environment={**ENVIRONMENT, "method": "old"})
    save_winner(row, tmp_path)
    texts = [f.text for f in findings(default_problems(), "test_gpu", tmp_path, HERE)]
    assert any("gru_cell_77 does not count" in text for text in texts)
    assert not any("gru_cell_77" in text for _, text in found(tmp_path))


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"triton": "0.0.1"}, 0), ({"timing": "old"}, 0), ({"method": "old"}, 1)]
)
def test_the_exit_code_is_of_the_hard_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(audit, "this_machine", lambda: HERE)
    measured(tmp_path, **changes)
    done = CliRunner().invoke(command_line.app, ["--check", "--out", str(tmp_path), "--problems", ONE])
    assert done.exit_code == code
    counts = f"{code} to do, {int(bool(changes) and not code)} worth doing"
    assert (counts if changes else "up to date") in done.output


def test_this_machine_can_be_asked() -> None:
    here = audit.this_machine()
    assert set(here.versions) == {"torch", "triton", "driver"}
    assert all(set(board) == set(BOARD) for board in here.gpus.values())


def test_landscapes_of_another_text_are_worth_recording_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path)
    before = found(tmp_path)
    one = dataclasses.replace(next(x for x in load_landscapes("nvidia_h200")), digests={})  # no digests: fits any text
    stale = dataclasses.replace(one, digests={"rope_bshd_copy_half_freqs": "another"})
    monkeypatch.setattr(audit, "load_landscapes", lambda _: [one, stale])
    (new,) = [finding for finding in found(tmp_path) if finding not in before]
    assert new[0] == "soft"
    assert new[1].endswith(f"python tune.py landscape {one.problem.name}")


def test_an_installed_package_that_is_damaged_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There --render is refused."""
    monkeypatch.setattr(audit, "HOME", tmp_path)
    monkeypatch.setattr(audit, "INSTALLED", True)
    found = list(audit._files())
    assert found
    assert all(text.endswith(": install this package again") for text in found)
