"""Storages: the file that many processes write at once, and what is said of a storage that cannot be used."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import JournalStorage
from optuna.study import StudyDirection

from generator.storage import backends as storage_module
from generator.storage.backends import StorageError, lost_storage, open_storage, opened_storage, without_password
from tests.support.ports import free_port
from tests.support.processes import BACKSTOP_SECONDS

# Not "fork": by now a test worker has threads of many libraries, and forked children may die of them.
CLEAN = multiprocessing.get_context("forkserver")


def names(storage: Any) -> list[str]:
    return [s.study_name for s in storage.get_all_studies()]


def add(storage: Any, name: str) -> int:
    study: int = storage.create_new_study([StudyDirection.MINIMIZE], name)
    return study


def test_without_a_url_it_is_the_file_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path))
    storage = open_storage(None, "test_gpu")
    assert isinstance(storage, JournalStorage)
    add(storage, "a")
    assert (tmp_path / "trials" / "test_gpu.log").stat().st_size > 0


def _write(path: Path, index: int) -> None:
    storage = open_storage(None, "test_gpu", path)
    for i in range(40):
        add(storage, f"{index}-{i}")


def test_many_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.log"
    processes = [CLEAN.Process(target=_write, args=(path, i)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(BACKSTOP_SECONDS)
    assert sorted(names(open_storage(None, "test_gpu", path))) == sorted(
        f"{i}-{j}" for i in range(3) for j in range(40)
    )
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_torn_last_line_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "trials.log"
    open_already = open_storage(None, "test_gpu", path)
    add(open_already, "whole")
    torn = b'{"op_code":0,"worker_id":"' + b"x" * 100_000
    with path.open("ab") as file:
        file.write(torn)
    assert names(open_storage(None, "test_gpu", path)) == ["whole"]
    with path.open("ab") as file:
        file.write(torn)
    add(open_already, "after")  # by a storage that was opened before
    assert names(open_storage(None, "test_gpu", path)) == names(open_already) == ["whole", "after"]
    path.write_bytes(b"torn from the start")
    assert names(open_storage(None, "test_gpu", path)) == []


def _hold_lock(path: Path, ready: Any) -> None:
    with storage_module._File(path)._locked():
        ready.set()
        signal.pause()


def test_a_killed_process_takes_its_lock_with_it(tmp_path: Path) -> None:
    path, ready = tmp_path / "trials.log", CLEAN.Event()
    process = CLEAN.Process(target=_hold_lock, args=(path, ready))
    process.start()
    assert ready.wait(BACKSTOP_SECONDS)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the lock is held
    add(open_storage(None, "test_gpu", path), "a")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://tuner:s3cret@db1/tuned", "postgresql://tuner:***@db1/tuned"),
        ("postgresql://tuner:s3c@ret@db1/tuned", "postgresql://tuner:***@db1/tuned"),
        ("postgresql://tuner@db1/tuned", "postgresql://tuner@db1/tuned"),
        ("postgresql:///tuned?host=/tmp&password=s3cret", "postgresql:///tuned?host=/tmp&password=***"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("url", ["postgresql//me:s3cret@db1/tuned", "me:s3cret@db1/tuned"])
def test_a_password_in_what_is_no_url_is_not_shown_either(url: str) -> None:
    with pytest.raises(StorageError, match="--storage must be ") as refused:
        open_storage(url, "test_gpu")
    assert "s3cret" not in str(refused.value)


def test_asking_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"there is no database .*none\.db yet: nothing was tuned with this --storage"
    ):
        open_storage(f"sqlite:///{tmp_path}/none.db", "test_gpu", reads=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", ["trials.db", "db1:5432", "", "redis", "nothing://db1/tuned", "sqlite://db1:port/tuned", "grpc://db1:13000"]
)
def test_what_is_no_storage_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=r"--storage must be postgresql://USER@HOST/DATABASE"):
        open_storage(url, "test_gpu")


def test_a_database_that_does_not_answer_is_said_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(
        StorageError, match=r"postgresql://tuner:\*\*\*@127.0.0.1:\d+/tuned cannot be used: .*refused"
    ) as e:
        open_storage(f"postgresql://tuner:s3cret@127.0.0.1:{free_port()}/tuned", "test_gpu")
    assert "s3cret" not in str(e.value)
    assert "without --storage a file on this host serves" in str(e.value)
    assert e.value.__cause__ is None, "the driver's own text may hold the password"


def test_a_driver_that_is_not_installed_is_said() -> None:
    with pytest.raises(StorageError, match=r"the driver of mysql\+nosuch.* is not installed|--storage must be"):
        open_storage("mysql+nosuch://tuner:s3cret@127.0.0.1/tuned", "test_gpu")
    with pytest.raises(StorageError, match=r"the driver of oracle://tuner:\*\*\*@.* is not installed"):
        open_storage("oracle://tuner:s3cret@127.0.0.1/tuned", "test_gpu")


def test_a_storage_that_goes_away_is_told_from_other_errors(tmp_path: Path) -> None:
    with opened_storage(f"sqlite:///{tmp_path}/trials.db", "test_gpu") as storage:
        study = add(storage, "a")
        (tmp_path / "trials.db").write_bytes(b"no database any more")
        with pytest.raises(Exception, check=lost_storage):  # noqa: B017 - of SQLAlchemy or Optuna, whatever they make of it
            storage.set_study_user_attr(study, "a", 1)
    assert not lost_storage(KeyError("a"))
