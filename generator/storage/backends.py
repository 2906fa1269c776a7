"""Open the Optuna storage that keeps trials: a journal file, or a database."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection

from ..disk import READ_ONLY, naming
from ..places import SHELF, cache_path

CONNECT_SECONDS = 10
EXTRA = "pip install -c constraints.txt -e '.[tune,hosts]'"
# Scheme of a URL without a driver -> the same with the driver that the extra "hosts" installs.
DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
SCHEMES = "postgresql://USER@HOST/DATABASE, sqlite:///FILE, or another URL of SQLAlchemy"

LOST_STORAGE = "the storage was lost. Every trial until then is kept: the same command goes on from there."


class StorageError(Exception):
    """The storage cannot be used; the message says which, why and the way out, and holds no password."""


def journal_path(device: str) -> Path:
    """The path of a device's journal file, which optuna-dashboard can open."""
    return cache_path(*SHELF, "trials", f"{device}.log")


def open_storage(url: str | None, device: str, path: Path | None = None, *, reads: bool = False) -> BaseStorage:
    """The storage at ``url``; without a URL the journal file of a device, at ``path`` or in the cache.

    ``reads``: nothing will be written, so a read-only journal file will do.

    Raises:
        StorageError: the storage cannot be reached, its driver is not installed, or the URL is malformed.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None:
        path = path or journal_path(device)
        if not reads:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, reads=reads)
        try:
            return JournalStorage(file)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise StorageError(
                f"the journal {path} cannot be read: {type(error).__name__}: {error}. Move it away: the problems are then "
                "measured again"
            ) from error
    match = re.match(r"([a-z][a-z0-9+]*)://", url)
    if match is None:
        raise StorageError(f"--storage must be {SCHEMES}, got {without_password(url)!r}")
    database = re.match(r"sqlite(?:\+\w+)?:///(.+)", url)
    if reads and database is not None and not Path(database[1]).exists():  # connecting would create it
        raise StorageError(f"there is no database {database[1]} yet: nothing was tuned with this --storage")
    return _database(DRIVERS.get(match[1], match[1]) + url[match.end(1) :], url)


@contextlib.contextmanager
def opened_storage(
    url: str | None, device: str, path: Path | None = None, *, reads: bool = False
) -> Iterator[BaseStorage]:
    """``open_storage`` for the length of a block."""
    storage = open_storage(url, device, path, reads=reads)
    try:
        yield storage
    finally:  # close its connections
        if isinstance(storage, optuna.storages.RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


def without_password(url: str) -> str:
    """The URL as it may be printed."""
    user = r"(://[^:/@]*)" if "://" in url else "()"  # what has no scheme is refused, and shown
    shown = re.sub(user + ":.*@", r"\1:***@", url)  # greedy: a password may hold an @
    return re.sub(r"(?i)(password=)[^&]*", r"\1***", shown)


def _database(url: str, given: str) -> BaseStorage:
    import sqlalchemy.exc  # noqa: PLC0415 - takes half a second, and the journal file needs none of it

    limits = {"connect_timeout": CONNECT_SECONDS} if url.startswith("postgresql") else {}
    shown = without_password(given)
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": limits})
    except ImportError as error:
        raise StorageError(f"the driver of {shown} is not installed ({error.__cause__ or error}): {EXTRA}") from None
    except (sqlalchemy.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        raise StorageError(f"--storage must be {SCHEMES}, got {shown!r}") from None
    except (sqlalchemy.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
        raise StorageError(_unreachable(shown, error)) from None  # the cause's text may hold the password


def _unreachable(shown: str, error: Exception) -> str:
    first = (str(getattr(error, "orig", None) or error).strip().splitlines() or [""])[0]
    return (
        f"the storage {shown} cannot be used: {first}. Check that the server runs, that this host may connect, and that "
        "the database exists and may be written by this user; without --storage a file on this host serves"
    )


def study_named(storage: BaseStorage, name: str) -> int | None:
    """The study of a name, or None if there is none."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


class _File(BaseJournalBackend):
    """A journal file in Optuna's format, made for many small appends by processes that may be killed.

    Optuna's backend waits for the disk at each append, which took longer than measuring; a killed process leaves its
    lock behind for 30 s; and one broken line costs the whole file. Here a write ends in the system's cache (which
    outlives the process, but not a power cut), the lock is the kernel's and ends with the process, and a broken line
    costs only itself.
    """

    def __init__(self, path: Path, *, reads: bool = False) -> None:
        self._path = path
        self._offsets = [0]  # where each line that was read begins, and where the last ends
        try:
            with self._locked():
                pass  # this cuts off a torn line before the first read
        except OSError as error:
            if not reads or error.errno not in READ_ONLY:
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open and locked, and ending with a whole line."""
        with naming(self._path):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                _cut_torn_line(file)
                yield file
            finally:
                os.close(file)  # this releases the lock

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The log of every line from this number on; a broken line gives a harmless stand-in."""
        start = min(log_number_from, len(self._offsets) - 1)
        with naming(self._path), self._path.open("rb") as file:
            file.seek(self._offsets[start])
            for number, line in enumerate(file, start):
                if not line.endswith(b"\n"):  # another process is writing it
                    return
                if number + 1 == len(self._offsets):
                    self._offsets.append(self._offsets[number] + len(line))
                if number >= log_number_from:
                    yield self._said(number, line)

    def _said(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            log = json.loads(line)
        except (ValueError, RecursionError):
            log = None
        kind = log.get("op_code") if isinstance(log, dict) else None
        if type(kind) is int and kind in FIELDS and set(log) >= {*FIELDS[kind], "worker_id"}:
            return log
        warnings.warn(
            f"line {number + 1} of the journal {self._path} is broken and left out: what it said is measured again if it is "
            "asked for",
            RuntimeWarning,
            stacklevel=2,
        )
        # Later lines name a study by its number, so a broken line that made one is replaced by one that makes another.
        lost_study = b'"op_code":0,' in line
        return {**(LOST_STUDY if lost_study else NOTHING), "study_name": f"lost in line {number + 1}"}

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append in one write, whole or not at all."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._locked() as file:
            end = os.fstat(file).st_size
            try:
                while text:
                    text = text[os.write(file, text) :]
            except OSError:
                os.ftruncate(file, end)
                raise


# Operation code of Optuna's journal -> the fields that its line must have; 4 makes a trial, 5 to 9 change it.
FIELDS = {
    0: ("study_name", "directions"),
    1: ("study_id",),
    2: ("study_id", "user_attr"),
    3: ("study_id", "system_attr"),
    4: ("study_id", "datetime_start"),
    5: ("trial_id", "param_name", "param_value_internal", "distribution"),
    6: ("trial_id", "state", "values"),
    7: ("trial_id", "step", "intermediate_value"),
    8: ("trial_id", "user_attr"),
    9: ("trial_id", "system_attr"),
}
LOST_STUDY = {"op_code": 0, "worker_id": "", "directions": [int(StudyDirection.MINIMIZE)]}
NOTHING = {"op_code": 1, "worker_id": "", "study_id": -1}  # deletes a study that nobody has


def _cut_torn_line(file: int) -> None:
    """Cut off the last line if a process or machine went down while writing it: Optuna would refuse the whole file."""
    end = size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return
    while end > 0:
        start = max(0, end - 65536)
        whole = os.pread(file, end - start, start).rfind(b"\n")
        if whole >= 0:
            os.ftruncate(file, start + whole + 1)
            return
        end = start
    os.ftruncate(file, 0)


def lost_storage(error: BaseException) -> bool:
    """Whether an error says that a storage that could be opened does not answer any more."""
    packages = {type(e).__module__.split(".")[0] for e in (error, error.__cause__) if e is not None}
    return isinstance(error, optuna.exceptions.StorageInternalError) or bool(packages & {"sqlalchemy", "psycopg"})
