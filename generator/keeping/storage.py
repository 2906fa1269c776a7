"""Open the Optuna storage that keeps trials and claims: a journal file, a database, or a proxy in front of one."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import random
import re
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from generator.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from optuna.storages import BaseStorage

CONNECT_SECONDS = 10
# Several tuners that start on an empty database all create Optuna's tables; all but one fail, and find them made.
CREATE_ATTEMPTS = 6
EXTRA = "pip install -c constraints.txt -e '.[tune,hosts]'"
# What a URL without a driver means: the ones that the extra "hosts" installs.
DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
SCHEMES = (
    "postgresql://USER@HOST/DATABASE, sqlite:///FILE (one host only), grpc://HOST:PORT, or another URL of SQLAlchemy"
)

LOST_STORAGE = "the storage was lost. Every trial until then is kept: the same command goes on from there."


class StorageError(Exception):
    """The storage cannot be used; the message says which, why and the way out, and holds no password."""


def journal_path(device: str) -> Path:
    """Where the journal file of a device lies; optuna-dashboard opens it."""
    return cache_folder("trials") / f"{device}.log"


def open_storage(url: str | None, device: str, path: Path | None = None) -> BaseStorage:
    """The storage of ``url``; without one the journal file of a device, in ``path`` or in the cache.

    Raises:
        StorageError: it cannot be reached, its driver is not installed, or the URL is none.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None:
        return JournalStorage(_File(path or journal_path(device)))
    match = re.match(r"([a-z][a-z0-9+]*)://", url)
    if match is None:
        raise StorageError(f"--storage must be {SCHEMES}, got {without_password(url)!r}")
    if match[1] == "grpc":
        return _proxy(url)
    return _database(DRIVERS.get(match[1], match[1]) + url[match.end(1) :], url)


def close_storage(storage: BaseStorage) -> None:
    """Give its connections back."""
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        storage.engine.dispose()
    elif isinstance(storage, optuna.storages.GrpcStorageProxy):
        storage.close()


@contextlib.contextmanager
def opened_storage(url: str | None, device: str, path: Path | None = None) -> Iterator[BaseStorage]:
    """``open_storage`` for the length of a block."""
    storage = open_storage(url, device, path)
    try:
        yield storage
    finally:
        close_storage(storage)


def without_password(url: str) -> str:
    """The URL as it may be printed."""
    shown = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)  # greedy: a password may hold an @
    return re.sub(r"(?i)(password=)[^&]*", r"\1***", shown)


def _proxy(url: str) -> BaseStorage:
    where = urllib.parse.urlsplit(url)
    try:
        port = where.port
    except ValueError:
        port = None
    if not where.hostname or port is None:
        raise StorageError(
            f"--storage grpc:// needs a host and a port, as in grpc://db1:13000, got {without_password(url)!r}"
        )
    if importlib.util.find_spec("grpc") is None:
        raise StorageError(f"--storage grpc:// needs grpcio: {EXTRA}")
    storage = optuna.storages.GrpcStorageProxy(host=where.hostname, port=port)
    try:
        storage.wait_server_ready(CONNECT_SECONDS)
    except ConnectionError as error:
        storage.close()
        raise StorageError(
            f"no gRPC proxy answered at {where.hostname}:{port} in {CONNECT_SECONDS} s: start one there, as the README says "
            "under Many hosts, and let this host reach the port"
        ) from error
    return storage


def _database(url: str, given: str) -> BaseStorage:
    import sqlalchemy.exc  # noqa: PLC0415 - takes half a second, and the journal file needs none of it

    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("postgresql"):
        options["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    shown = without_password(given)
    for attempt in range(CREATE_ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except ImportError as error:
            raise StorageError(
                f"the driver of {shown} is not installed ({error.__cause__ or error}): {EXTRA}"
            ) from None
        except (sqlalchemy.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
            raise StorageError(f"--storage must be {SCHEMES}, got {shown!r}") from None
        except (sqlalchemy.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
            if attempt == CREATE_ATTEMPTS - 1 or not _created_by_another(error):
                raise StorageError(_unreachable(shown, error)) from None  # the cause's text may hold the password
        time.sleep(0.1 * 2**attempt * random.random())  # noqa: S311 - so that tuners started together part
    raise AssertionError("the last attempt returns or raises")


def _created_by_another(error: Exception) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in ("already exists", "duplicate key", "unique constraint", "locked"))


def _unreachable(shown: str, error: Exception) -> str:
    first = (str(getattr(error, "orig", None) or error).strip().splitlines() or [""])[0]
    return (
        f"the storage {shown} cannot be used: {first}. Check that the server runs, that this host may connect, and that "
        "the database exists and may be written by this user; without --storage a file on this host serves"
    )


class _File(JournalFileBackend):
    """Optuna's journal file, made for many small appends by processes that may be killed.

    Optuna's own waits for the disk at each append, which took longer than measuring; and a killed process leaves its lock
    behind for 30 s. Here the system's cache is enough (it outlives the process, not a power cut), and the lock is the
    kernel's, which goes with the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        with self._locked():
            pass  # a torn line goes before the first read

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open and locked, its end the end of a line."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut_torn_line(file)
            yield file
        finally:
            os.close(file)  # which gives the lock back

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append in one write."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._locked() as file:
            while text:
                text = text[os.write(file, text) :]


def _cut_torn_line(file: int) -> None:
    """Drop what a process or machine that went down left of its last line; Optuna refuses the whole file for it."""
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
    """Whether an error says that a storage, which could be opened, does not answer any more."""
    packages = {type(e).__module__.split(".")[0] for e in (error, error.__cause__) if e is not None}
    return isinstance(error, optuna.exceptions.StorageInternalError) or bool(
        packages & {"sqlalchemy", "psycopg", "grpc"}
    )
