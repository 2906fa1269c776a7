"""Full disks, read-only checkouts, journals with a broken line: one sentence as error, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from generator import command_line, commands, disk, gpu
from generator.disk import disk_trouble, put_between, write_whole
from generator.gpu import Facts
from generator.selection import problem_named
from generator.storage.backends import StorageError, journal_path, open_storage
from generator.storage.journal import Journal
from generator.storage.record import read_record, save_winner
from tests.support.command_line import ONE, call, gru_cost
from tests.support.fakes import ENVIRONMENT, FakeCompiler, FakeWorker
from tests.support.records import winner
from tuned.families.gru_cell.variant import GruCellVariant

if TYPE_CHECKING:
    from collections.abc import Callable

TROUBLES = pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
DIGESTS = {"gru_cell_bias_copy": "0123456789ab"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with one GPU, a fake of both."""
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(commands, "Worker", lambda _: FakeWorker(gru_cost))
    monkeypatch.setattr(commands, "CompilerPool", lambda _: FakeCompiler())
    monkeypatch.setattr(gpu, "gather", lambda: Facts("2.11.0", "12.8", names=("Test GPU",)))


def failing(number: int, real: Callable[..., Any], after: int, half: bool = False) -> Callable[..., Any]:
    """``real`` until call number ``after``, from which on it fails; with ``half`` it writes half of the bytes first."""
    calls = iter(range(10**9))

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) < after:
            return real(*arguments, **named)
        if half and len(arguments[1]) > 2:
            return real(arguments[0], arguments[1][: len(arguments[1]) // 2])
        raise OSError(number, os.strerror(number))

    return fail


def said(done: Any, number: int, name: str) -> None:
    """Check that the command ended with one sentence about the file."""
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    text = " ".join(done.output.split())
    assert text.count("tune.py: ") == 1
    assert f"{name} cannot be written: {os.strerror(number)}. " in text
    assert "TUNED_CACHE" in text
    assert "--out" in text


@TROUBLES
@pytest.mark.usefixtures("machine")
def test_a_journal_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    asked = ("--problems", ONE, "--out", str(tmp_path / "out"))
    real = os.write
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", failing(number, real, after=5, half=True))
        said(call(*asked), number, "test_gpu.log")
    lines = journal_path("test_gpu").read_text()
    assert lines.endswith("\n")
    assert all(isinstance(json.loads(line), dict) for line in lines.splitlines()), "nothing is half written"
    assert len(lines.splitlines()) == 5
    assert not list((tmp_path / "out").glob("*"))
    done = call(*asked)
    assert done.exit_code == 0
    assert "(4 before)" in done.output, "what was kept before is not measured again"


@TROUBLES
@pytest.mark.usefixtures("machine")
def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    folder = tmp_path / "out"
    save_winner(winner(), folder)
    before = (folder / "test_gpu.json").read_bytes()
    for name in ("replace", "fdopen", "chmod"):
        with monkeypatch.context() as broken:
            broken.setattr(disk.os, name, failing(number, getattr(os, name), after=0))
            said(call("--problems", ONE, "--out", str(folder)), number, "test_gpu.json")
        assert (folder / "test_gpu.json").read_bytes() == before
        assert [p.name for p in folder.iterdir()] == ["test_gpu.json"], "no temporary file stays"
    assert call("--problems", ONE, "--out", str(folder)).exit_code == 0
    assert len(read_record("test_gpu", folder)) == 2


@pytest.mark.usefixtures("machine")
def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def fail(self: Path, *arguments: Any, **named: Any) -> None:
        if self.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        real(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", fail)
    asked = ("--problems", ONE, "--out", str(tmp_path / "out"))
    done = call(*asked)
    said(done, errno.EROFS, "locks")
    save_winner(winner(ONE), tmp_path / "out")
    for question in (("--list",), ("--dry-run",), ("show", ONE), ("explain", ONE)):  # these write nothing and work
        options = () if question[0][0] != "-" else ("--problems", ONE)
        assert call("--out", str(tmp_path / "out"), *options, *question).exit_code == 0, question


def test_a_report_or_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    save_winner(winner(ONE), tmp_path / "out")
    for command in (("report",), ("show", ONE)):
        place = tmp_path / "no folder" / "file"
        done = call("--out", str(tmp_path / "out"), *command, "--out", str(place))
        assert done.exit_code == 1
        assert f"{place} cannot be used: No such file or directory" in " ".join(done.output.split())
        place = tmp_path / "file"
        place.write_text("as it was")
        with monkeypatch.context() as broken:
            broken.setattr(disk.os, "replace", failing(errno.ENOSPC, os.replace, after=0))
            said(call("--out", str(tmp_path / "out"), *command, "--out", str(place)), errno.ENOSPC, str(place))
        assert place.read_text() == "as it was"
        assert {p.name for p in tmp_path.iterdir()} - {"cache"} == {"file", "out"}


def test_a_journal_in_a_read_only_place_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.log"
    problem = problem_named("gru_cell_512_64")
    Journal(open_storage(None, "test_gpu", path)).add(problem, ENVIRONMENT, GruCellVariant(), (4.0, 0.1), DIGESTS)
    real = os.open

    def refuse(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return real(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    known = Journal(open_storage(None, "test_gpu", path, reads=True)).remembered(
        problem, ENVIRONMENT, lambda _: DIGESTS
    )
    assert list(known) == [GruCellVariant()]
    with pytest.raises(OSError, match="Read-only") as caught:
        open_storage(None, "test_gpu", path)
    assert "cannot be written" in str(disk_trouble(caught.value))


def test_what_is_written_whole_can_be_read_by_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"b")
    assert (tmp_path / "a").read_bytes() == b"b"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_other_errors_are_not_of_the_disk() -> None:
    assert disk_trouble(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
    assert disk_trouble(OSError("something else")) is None
    assert disk_trouble(FileNotFoundError(errno.ENOENT, "No such file or directory")) is None


def test_options_before_a_command_are_of_their_own_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions of Typer keep paths as strings in the context: options must still be paths."""
    asked: list[Any] = []
    monkeypatch.setattr(commands, "explain", lambda *arguments: asked.append(arguments[2]) or 0)
    command = typer.main.get_command(command_line.app)
    context = command.make_context("tune.py", ["--out", str(tmp_path), "explain", ONE])
    real, context.params = context.params, _Strings(context.params)
    assert real["out"] == tmp_path or real["out"] == str(tmp_path)
    with pytest.raises(BaseException) as ended, context:  # noqa: PT011 - of the Click that this Typer has, whatever its name
        command.invoke(context)
    assert getattr(ended.value, "exit_code", None) == 0
    assert asked == [tmp_path]


class _Strings(dict[str, Any]):
    """The parameters of a context as earlier versions show them: subscripting gives strings, calls still get paths."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return str(value) if isinstance(value, Path) else value


# --- broken lines ---------------------------------------------------------------------------------------------------

A, B, C = (GruCellVariant(num_warps=w) for w in (2, 4, 8))
PROBLEM, OTHER = problem_named("gru_cell_512_64"), problem_named("gru_cell_1024_64")
BROKEN = {
    "truncated": lambda line: line[: len(line) // 2],
    "garbled": lambda line: bytes(255 - c for c in line if c != 255 - 10),
    "zeros": lambda line: bytes(len(line)),
    "empty": lambda _line: b"",
    "another value": lambda _line: b"17",
    "no operation": lambda _line: b'{"op_code": 99, "worker_id": "x"}',
    "a list for an operation": lambda _line: b'{"op_code": [], "worker_id": "x"}',
    "lacks fields": lambda _line: b'{"op_code":4,"worker_id":"x"}',
    "nested": lambda _line: b"[" * 100_000,
    "long number": lambda _line: b'{"op_code":' + b"9" * 5000 + b"}",
}


def filled(path: Path) -> list[bytes]:
    """The lines of a journal: a study, two trials, another study, a trial."""
    journal = Journal(open_storage(None, "test_gpu", path))
    for problem, variant in ((PROBLEM, A), (PROBLEM, B), (OTHER, C)):
        journal.add(problem, ENVIRONMENT, variant, (4.0, 0.1), DIGESTS)
    return path.read_bytes().splitlines()


def known(path: Path) -> list[list[Any]]:
    journal = Journal(open_storage(None, "test_gpu", path))
    return [list(journal.remembered(p, ENVIRONMENT, lambda _: DIGESTS)) for p in (PROBLEM, OTHER)]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_line_in_the_middle_costs_that_line(tmp_path: Path, how: str) -> None:
    path = tmp_path / "trials.log"
    lines = filled(path)
    assert len(lines) == 5
    lines[1] = BROKEN[how](lines[1])  # the trial of variant A
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.warns(RuntimeWarning, match=r"line 2 of the journal .*trials.log is broken and left out"):
        found = known(path)
    assert found == [[B], [C]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        journal = Journal(open_storage(None, "test_gpu", path))
        journal.add(PROBLEM, ENVIRONMENT, A, (5.0, 0.1), DIGESTS)
        assert known(path) == [[B, A], [C]], "and it can be written again"


@pytest.mark.parametrize("how", BROKEN)
def test_a_lost_study_gives_none_of_its_trials_to_another(tmp_path: Path, how: str) -> None:
    path = tmp_path / "trials.log"
    lines = filled(path)
    lines[0] = BROKEN[how](lines[0])
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.warns(RuntimeWarning, match="line 1 of the journal"):
        first, second = known(path)
    assert set(first) <= {A, B}
    assert set(second) <= {C}
    if how == "truncated":  # half a line still shows that it was a study, so the numbers of other studies do not change
        assert (first, second) == ([], [C])


def test_a_journal_that_makes_no_sense_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trials.log"
    filled(path)
    with path.open("a") as file:
        file.write('{"op_code":0,"worker_id":"x","study_name":"s","directions":["up"]}\n')
    with pytest.raises(StorageError, match=r"trials.log cannot be read: .*Move it away"):
        open_storage(None, "test_gpu", path)


def test_what_is_written_keeps_a_link_and_a_mode(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "not yet")
    for path in (link, dangling):
        write_whole(path, b"after")
        assert path.is_symlink()
        assert path.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "not yet").stat().st_mode & 0o777 == 0o666 & ~disk._UMASK


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_line_ends_of_a_file_stay_where_a_text_is_put_into_it(tmp_path: Path, end: bytes) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(end.join((b"# Title", b"<!-- a:begin -->", b"old", b"<!-- a:end -->", b"the rest", b"")))
    put_between(page, "a", "one\ntwo")
    wanted = (b"# Title", b"<!-- a:begin -->", b"one", b"two", b"<!-- a:end -->", b"the rest", b"")
    assert page.read_bytes() == end.join(wanted)


def test_what_is_put_between_marks_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    before = "<!-- a:begin -->\nold\n<!-- a:end -->\n" + "\N{SNOWMAN}" * 100
    page.write_text(before, encoding="utf-8")
    put_between(page, "a", "new")
    assert page.read_text(encoding="utf-8") == before.replace("old", "new")

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        put_between(page, "a", "newer")
    assert page.read_text(encoding="utf-8") == before.replace("old", "new")
    assert list(tmp_path.iterdir()) == [page]
