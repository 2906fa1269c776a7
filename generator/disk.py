"""Write files whole or not at all, lock them, and say in a sentence why they cannot be written: a full disk, a read-only one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from .places import cache_folder

_UMASK = os.umask(0o022)
os.umask(_UMASK)  # there is no other way to ask

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
OTHER = (
    *(errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE),
)
TROUBLES = (  # errors, and what is said of the file
    (
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        (
            "{what} cannot be written: {why}. Make room there, or set TUNED_CACHE and --out to folders that have some. "
            "What was written before is whole and kept: the same command goes on from there"
        ),
    ),
    (
        READ_ONLY,
        (
            "{what} cannot be written: {why}. Set TUNED_CACHE to a folder that can be, for trials and logs, and --out to "
            "one for the record"
        ),
    ),
    (OTHER, "{what} cannot be used: {why}. Name another place with TUNED_CACHE or --out, or make this one usable"),
)


def gzipped(data: bytes) -> bytes:
    """What gzip reads; of the same data the same bytes, without a time and with the header of Python 3.11, which others change."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what was there stays until then, and so do its mode and a link to it.

    Raises:
        OSError: it could not be written; the error names it.
    """
    with naming(path):
        path = Path(os.path.realpath(path))
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_UMASK
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, mode)  # noqa: PTH101 - mkstemp makes 0600
            os.replace(temporary, path)  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise


def write_if_different(path: Path, text: str) -> bool:
    """Write a file whole or not at all, and not when it already says this; True if it was written."""
    if path.exists() and path.read_bytes() == text.encode():
        return False
    write_whole(path, text.encode())
    return True


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have any OSError of a block name the file that it was about, which that of a write does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def put_between(path: Path, mark: str, text: str) -> None:
    """Write a text between the marks of a file, and leave the rest alone.

    Raises:
        ValueError: the file does not have them, once each and in order.
    """
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    parts = re.split(f"({begin}|{end})", path.read_text(encoding="utf-8"))
    if parts[1::2] != [begin, end]:
        raise ValueError(f"{path} must have the marks {begin} and {end}, once each")
    write_whole(path, f"{parts[0]}{begin}\n{text}\n{end}{parts[-1]}".encode())


def disk_trouble(error: OSError) -> str | None:
    """The sentence for an error of the file system, with the way out; None if it is another kind of error."""
    if error.errno in OTHER and error.filename is None:
        return None
    words = {"what": error.filename or "a file", "why": error.strerror or str(error)}
    return next((text.format_map(words) for errors, text in TROUBLES if error.errno in errors), None)


# Locks between tuners: one measures on a GPU at a time, one writes a folder of records. Each vanishes with its process.

LOOK_SECONDS = 0.2  # how often a tuner that waits looks again


def gpu_identity(index: int) -> str:
    """What names the GPU of an index, whatever CUDA_VISIBLE_DEVICES says: its UUID; the index where there is none."""
    import torch  # noqa: PLC0415 - the other locks do not need it

    try:
        return str(torch.cuda.get_device_properties(index).uuid)
    except (AttributeError, AssertionError, RuntimeError):  # an older torch, or one without CUDA
        return f"index-{index}"


@contextlib.contextmanager
def gpu_lock(identity: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold a GPU, so that no other tuner measures there; wait while one does, and tell ``waiting`` who, once.

    Ctrl-C ends the waiting as it ends anything else.
    """
    path = cache_folder("locks") / f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', identity)}.lock"
    with path.open("a+") as file:
        told = None
        while not _taken(file.fileno()):
            holder = path.read_text().strip()
            if holder and holder != told:
                told = holder
                waiting(
                    f"process {holder} measures on GPU {identity}: times of two tuners at once would mean nothing, so this "
                    "one waits until it ends (Ctrl-C gives up)"
                )
            time.sleep(LOOK_SECONDS)
        path.write_text(str(os.getpid()))
        try:
            yield
        finally:
            file.truncate(0)  # while it is still held: the next one does not read this one's name
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder of records and what is generated from it: read, change and write while other tuners wait.

    The folder itself is locked, so that tuners with different caches wait for each other, and no file stays in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS):
                raise
            # Network file systems lock only what is open for writing, which no folder is.
            os.close(handle)
            name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
            handle = os.open(cache_folder("locks") / f"folder-{name}.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing would not do if a fork of this process has it open as well
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
