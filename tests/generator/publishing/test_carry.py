"""Rows whose kernels changed in text but not in machine code stay; all others are reported with the reason."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
import triton
from typer.testing import CliRunner

from generator import command_line
from generator.measuring import compile as compiling
from generator.places import ROOT
from generator.publishing import carry as carrying
from generator.publishing import codes
from generator.publishing.carry import CarryError, carry, checked_out, codes_of
from generator.rendering.structures import digests, fresh
from generator.storage.record import read_record, save_winner, write_record
from tuned.families import registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tuned.lookup.record import Winner

HERE = triton.__version__.split("+")[0]
OLD = "0" * 12


def stale(number: int = 2) -> list[Winner]:
    """Rows of today's kernels with the digests of other texts, measured with this Triton."""
    rows = [w for w in read_record("nvidia_h200") if w.family == "rope" and not w.spec.packed][:number]
    return [
        dataclasses.replace(w, digests=dict.fromkeys(w.digests, OLD), environment={**w.environment, "triton": HERE})
        for w in rows
    ]


def asked(**of: Any) -> Callable[[Path, list[Winner]], Any]:
    """A stand-in that answers for every row: the older tree with OLD and ``before``, this tree with its digests and ``now``."""

    def ask(tree: Path, winners: list[Winner]) -> Any:
        here = tree == ROOT
        known = {n: digests()[n] if here else OLD for w in winners for n in w.digests}
        answer = {"code": of["now" if here else "before"], **of.get("more", {})}
        return {w.name: {"digests": {n: known[n] for n in w.digests}, **answer} for w in winners}

    return ask


CODE = [["abc", 128, 1, 0]]


def test_a_row_whose_machine_code_is_the_same_is_kept_with_todays_digests() -> None:
    rows = stale()
    found = carry(rows, "HEAD", asked(before=CODE, now=CODE))
    assert found.kept == [w.name for w in rows]
    assert not found.changed
    for before, after in zip(rows, found.winners, strict=True):
        assert fresh(after.digests)
        assert len(after.environment["carried"]) == 12
        unchanged = {"digests": before.digests, "environment": before.environment}
        assert dataclasses.replace(after, **unchanged) == before, "what was measured stays as it is"


@pytest.mark.parametrize("other", [[["abd", 128, 1, 0]], [["abc", 64, 1, 0]], [["abc", 128, 2, 0]], [*CODE, *CODE]])
def test_a_row_with_other_code_or_another_grid_is_not(other: list[Any]) -> None:
    rows = stale()
    found = carry(rows, "HEAD", asked(before=CODE, now=other))
    assert (found.kept, found.winners) == ([], rows)
    assert set(found.changed.values()) == {"its machine code is another"}


def test_a_row_of_another_revision_or_triton_or_that_does_not_compile_is_not() -> None:
    of_another, with_another = stale()
    of_another = dataclasses.replace(of_another, digests=dict.fromkeys(of_another.digests, "1" * 12))
    with_another = dataclasses.replace(with_another, environment={**with_another.environment, "triton": "3.0.0"})
    found = carry([of_another, with_another], "HEAD", asked(before=CODE, now=CODE))
    assert found.winners == [of_another, with_another]
    assert "not measured with the kernels of HEAD" in found.changed[of_another.name]
    assert "measured with Triton 3.0.0, and this is" in found.changed[with_another.name]
    broken = carry(stale(1), "HEAD", asked(before=CODE, now=CODE, more={"error": "no room"}))
    assert list(broken.changed.values()) == ["its kernels do not compile: no room"]


def test_rows_that_count_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(carrying, "checked_out", never)
    rows = [w for w in read_record("nvidia_h200") if fresh(w.digests)][:3]
    assert carry(rows, "HEAD", never) == carrying.Carried(rows, [], {})
    with pytest.raises(CarryError, match="git has no revision 'no-such-revision' here"):
        carry(rows, "no-such-revision", never)


@pytest.mark.compiler
@pytest.mark.processes
def test_a_tree_says_what_its_rows_come_to(tmp_path: Path) -> None:
    first, second = stale()
    other = dataclasses.replace(second, name="other", variant=dataclasses.replace(second.variant, num_warps=2))
    unknown = dataclasses.replace(first, name="unknown", environment={**first.environment, "capability": 1})
    found = codes_of(ROOT, [first, second, other, unknown])
    assert found[first.name]["digests"] == {name: digests()[name] for name in first.digests}
    assert found[second.name]["code"] != found["other"]["code"]
    assert "error" in found["unknown"]
    with pytest.raises(CarryError, match="could not be compiled"):
        codes_of(tmp_path, [first])


def test_a_commit_is_unpacked_by_a_python_that_has_no_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python 3.11.2 is such a Python: its tarfile has no extraction filters."""
    extract: Any = tarfile.TarFile.extractall
    named = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # a newer Python warns if no filter is given
    monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def extractall(tree: tarfile.TarFile, path: Path) -> None:
        extract(tree, path, **named)

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    checked_out("HEAD", tmp_path)
    assert (tmp_path / "tune.py").exists()


def test_a_row_saved_while_the_kernels_were_compiled_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = stale(3)
    write_record(tmp_path / "nvidia_h200.json", "nvidia_h200", rows[:2])
    answers = asked(before=CODE, now=CODE)
    again = dataclasses.replace(rows[1], median_us=1.0)

    def ask(tree: Path, winners: list[Winner]) -> Any:
        if tree == ROOT:  # meanwhile a tuner measures one of them again, and another problem
            save_winner(again, tmp_path)
            save_winner(rows[2], tmp_path)
        return answers(tree, winners)

    monkeypatch.setattr(carrying.carry, "__defaults__", (ask,))
    assert CliRunner().invoke(command_line.app, ["--out", str(tmp_path), "carry", "HEAD"]).exit_code == 0
    found = {w.name: w for w in read_record("nvidia_h200", tmp_path)}
    assert set(found) == {w.name for w in rows}
    assert fresh(found[rows[0].name].digests)
    assert [found[w.name] for w in rows[1:]] == [again, rows[2]], "as the tuner saved them"


@pytest.mark.parametrize("option", codes.AT_LAUNCH)
def test_a_launch_with_other_options_is_not_the_same(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programmatic dependent and cooperative launches have the machine code of others, and not their time."""
    family = registry.FAMILIES["rope"]
    row = dataclasses.asdict(stale(1)[0])
    launches = family.launches

    def with_option(*given: Any) -> Any:
        return tuple(
            dataclasses.replace(one, options={**one.options, option: not one.options.get(option)})
            for one in launches(*given)
        )

    monkeypatch.setattr(compiling, "distinct", lambda steps: [(one, 1) for one in steps])  # nothing is compiled here
    monkeypatch.setattr(compiling, "resources", lambda *_: compiling.Resources(32, 0, 0, "code"))
    before = codes.code_of(row, "generator")
    monkeypatch.setattr(registry, "FAMILIES", {"rope": dataclasses.replace(family, launches=with_option)})
    assert codes.code_of(row, "generator")["code"] != before["code"]
    assert codes.AT_LAUNCH == compiling.AT_LAUNCH


def test_the_command_writes_what_it_kept_and_tells_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stale()
    write_record(tmp_path / "nvidia_h200.json", "nvidia_h200", rows)
    answers = asked(before=CODE, now=CODE)

    def ask(tree: Path, winners: list[Winner]) -> Any:
        found = answers(tree, winners)
        if tree == ROOT:
            found[rows[1].name]["code"] = []
        return found

    monkeypatch.setattr(carrying.carry, "__defaults__", (ask,))
    done = CliRunner().invoke(command_line.app, ["--out", str(tmp_path), "carry", "HEAD"])
    assert done.exit_code == 1
    assert (
        f"nvidia_h200: 1 rows kept, whose machine code is what it was at HEAD\n    {rows[1].name}: its" in done.output
    )
    written = json.loads((tmp_path / "nvidia_h200.json").read_text())["winners"]
    assert {w["name"]: fresh(w["digests"]) for w in written} == {rows[0].name: True, rows[1].name: False}
    assert CliRunner().invoke(command_line.app, ["--out", str(tmp_path), "carry", "no-such-revision"]).exit_code == 2
    assert CliRunner().invoke(command_line.app, ["--out", str(tmp_path / "none"), "carry", "HEAD"]).exit_code == 2
