"""Two tuners at once, on one GPU or on one table: they wait for each other, and nothing is lost or torn."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from generator import commands
from generator.disk import folder_lock, gpu_identity, gpu_lock
from generator.publishing import files as committed
from generator.selection import problem_named
from generator.storage.record import read_record, save_winner
from tests.support.fakes import FakeCompiler, FakeWorker
from tests.support.locks import held
from tests.support.processes import end_all, forked, wait_for
from tests.support.records import winner
from tuned.families.gru_cell.spec import GruCellSize
from tuned.families.gru_cell.variant import default_variant
from tuned.lookup.record import load_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

ROWS = 50


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    yield
    end_all()


def hold(identity: str, file: Path) -> None:
    with gpu_lock(identity, lambda _: None):
        file.write_text(str(os.getpid()))
        signal.pause()


def test_the_second_tuner_of_a_gpu_says_who_has_it_and_waits_until_it_ends(tmp_path: Path) -> None:
    holder = forked(lambda: hold("GPU-1234", tmp_path / "held"))
    wait_for((tmp_path / "held").exists)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        os.kill(holder, signal.SIGKILL)  # a lock vanishes with its process, however the process ends
        os.waitpid(holder, 0)

    with gpu_lock("GPU-1234", tell):
        assert len(told) == 1
        assert f"process {holder} measures on GPU GPU-1234" in told[0]
    with gpu_lock("GPU-1234", pytest.fail), gpu_lock("GPU-5678", pytest.fail):
        pass  # the lock is free again, and another GPU has another lock


def test_ctrl_c_ends_the_waiting_for_a_gpu(tmp_path: Path) -> None:
    holder = forked(lambda: hold("GPU-1234", tmp_path / "held"))
    wait_for((tmp_path / "held").exists)

    def wait() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), gpu_lock("GPU-1234", lambda _: (tmp_path / "waits").touch()):
            raise AssertionError("two hold one GPU")

    waiter = forked(wait)
    wait_for((tmp_path / "waits").exists)
    os.kill(waiter, signal.SIGINT)
    assert os.waitpid(waiter, 0)[1] == 0
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)


def test_tuning_holds_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Worker", lambda _: FakeWorker(lambda _problem, _variant: 1.0))
    monkeypatch.setattr(commands, "CompilerPool", lambda _: FakeCompiler())

    def second() -> None:
        with gpu_lock(gpu_identity(99), (tmp_path / "told").write_text):
            (tmp_path / "taken").touch()

    with commands.on_gpu(99, 1, pytest.fail):
        waiter = forked(second)
        wait_for(lambda: (tmp_path / "told").exists() or (tmp_path / "taken").exists())
        assert not (tmp_path / "taken").exists()
    assert os.waitpid(waiter, 0)[1] == 0
    assert (tmp_path / "told").read_text().startswith(f"process {os.getpid()} measures on GPU index-99: ")
    assert (tmp_path / "taken").exists()


def test_a_gpu_without_a_uuid_is_named_by_its_index() -> None:
    assert gpu_identity(99) == "index-99"


def test_two_tuners_on_one_table_keep_every_row_and_no_reader_sees_a_torn_record(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    save_winner(winner(), folder)

    def write(first: int) -> None:
        for number in range(first, first + ROWS):
            if number == first + ROWS // 2:
                wait_for((tmp_path / "read").exists)
            problem = problem_named("gru_cell_512_64")
            size = GruCellSize(number)
            row = dataclasses.replace(
                winner("gru_cell_512_64", variant=default_variant(problem.spec, size)),
                name=f"row_{number}",
                size=size,
                spec=problem.spec,
            )
            save_winner(row, folder)

    writers = [forked(lambda first=first: write(first)) for first in (100, 100 + ROWS)]
    seen = []
    ended: dict[int, int] = {}
    while len(ended) < len(writers):
        seen.append(len(load_record(folder / "test_gpu.json")))
        if seen[-1] > 1:  # lets the writers write the rest, but only after each has written something
            (tmp_path / "read").touch()
        for pid in writers:
            if pid not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = status[1]
    assert set(ended.values()) == {0}
    seen.append(len(load_record(folder / "test_gpu.json")))
    assert seen == sorted(seen), "no row that was there is gone"
    assert seen[-1] > seen[0]
    assert {w.name for w in read_record("test_gpu", folder)} >= {f"row_{n}" for n in range(100, 100 + 2 * ROWS)}
    assert [p.name for p in folder.iterdir()] == ["test_gpu.json"]


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    save_winner(winner(), tmp_path)
    (tmp_path / ".test_gpu.json.x1y2").write_text('{"format": "tuned-win')
    save_winner(winner("study_16x512"), tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["test_gpu.json"]


def test_rendering_waits_for_whoever_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINNERS", "KERNELS", "TABLES"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(committed, name, tmp_path / name)
    locked = []
    monkeypatch.setattr(committed, "generated_files", lambda: locked.append(held(tmp_path / "WINNERS")) or {})
    committed.render_all()
    assert locked == [True], "and whoever writes a record waits for it"
    monkeypatch.setattr(committed, "generated_files", lambda: (tmp_path / "rendered").touch() or {})
    with folder_lock(tmp_path / "WINNERS"):
        renderer = forked(committed.render_all)
        time.sleep(0.2)
        assert not (tmp_path / "rendered").exists()
    assert os.waitpid(renderer, 0)[1] == 0
    assert (tmp_path / "rendered").exists()


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOSYS], ids=["NFS", "Lustre"])
def test_a_folder_that_cannot_be_locked_itself_is_locked_by_name(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl  # noqa: PLC0415 - replaced here

    as_it_is = fcntl.flock

    def network(handle: int, how: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112
            raise OSError(number, os.strerror(number))
        as_it_is(handle, how)

    monkeypatch.setattr(fcntl, "flock", network)
    with folder_lock(tmp_path / "records"):
        other = forked(lambda: lock_and_touch(tmp_path))
        time.sleep(0.2)
        assert not (tmp_path / "taken").exists()
    os.waitpid(other, 0)
    assert (tmp_path / "taken").exists()


def lock_and_touch(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "records"):
        (tmp_path / "taken").touch()
