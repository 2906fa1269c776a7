"""Write files whole or not at all, lock them, and say in a sentence why one cannot be written: a full or read-only disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .places import cache_folder

_UMASK = os.umask(0o022)
os.umask(_UMASK)  # put it back: Python can only read the umask by setting it

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
OTHER = (
    *(errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE),
)
TROUBLES = (  # errors, and what is said of the file
    (
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        (
            "{what} cannot be written: {why}. Make room there, or set TUNED_CACHE and --out (or --to, --write) to places "
            "that have some. "
            "What was written before is whole and kept: the same command goes on from there"
        ),
    ),
    (
        READ_ONLY,
        (
            "{what} cannot be written: {why}. Set TUNED_CACHE to a folder that can be, for trials and logs, and --out (or "
            "--to, --write) to a place for what a command writes"
        ),
    ),
    (
        OTHER,
        "{what} cannot be used: {why}. Name another place with TUNED_CACHE or --out (or --to, --write), or make this one usable",
    ),
)


def gzipped(data: bytes) -> bytes:
    """Data in gzip format, the same bytes for the same data: no time, and the header of Python 3.11, which others change."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def unzipped(path: Path, kind: str, schema: int) -> dict[str, Any] | None:
    """The object in a gzipped JSON file of ours; None if its ``format`` or ``schema`` is another.

    Raises:
        ValueError: the file cannot be read as gzipped JSON.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as gzipped JSON: {error}") from error
    ours = isinstance(content, dict) and (content.get("format"), content.get("schema")) == (kind, schema)
    return content if ours else None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; the old file stays until the new one is complete. Its mode and links to it are kept.

    Raises:
        OSError: it could not be written; the error names the file.
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
    """Write a file whole or not at all, unless it already has this text; True if it was written."""
    if path.exists() and path.read_bytes() == text.encode():
        return False
    write_whole(path, text.encode())
    return True


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name into any OSError of the block: an OSError from a write has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def put_between(path: Path, mark: str, text: str) -> None:
    """Write a text between the marks of a file, with the line ends of the file, and leave the rest alone.

    Raises:
        ValueError: as ``around``.
    """
    before, after = around(path, mark)
    end = "\r\n" if "\r\n" in before + after else "\n"
    write_whole(path, end.join((before, *text.split("\n"), after)).encode())


def around(path: Path, mark: str) -> tuple[str, str]:
    """The text of a file up to its first mark, and that from its second mark on; both with the mark.

    Raises:
        ValueError: the file does not have the marks, once each and in order, or is no text.
    """
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    try:
        text = path.read_bytes().decode()  # read_text would lose the line ends of Windows
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8 ({error})") from error
    parts = re.split(f"({begin}|{end})", text)
    if parts[1::2] != [begin, end]:
        raise ValueError(f"{path} must have the marks {begin} and {end}, once each and in this order")
    return parts[0] + begin, end + parts[-1]


def disk_trouble(error: OSError) -> str | None:
    """The sentence for an error of the file system, with the way out; None for any other kind of error."""
    if error.errno in OTHER and error.filename is None:
        return None
    words = {"what": error.filename or "a file", "why": error.strerror or str(error)}
    return next((text.format_map(words) for errors, text in TROUBLES if error.errno in errors), None)


# Locks between tuners: one at a time measures on a GPU, and one writes a folder of records. A lock ends with its
# process.

LOOK_SECONDS = 0.2  # how often a tuner that waits looks again


def gpu_identity(index: int) -> str:
    """A name for a GPU that does not depend on CUDA_VISIBLE_DEVICES: its UUID, or its index where torch gives no UUID."""
    import torch  # noqa: PLC0415 - the other locks do not need it

    try:
        return str(torch.cuda.get_device_properties(index).uuid)
    except (AttributeError, AssertionError, RuntimeError):  # an older torch, or one without CUDA
        return f"index-{index}"


@contextlib.contextmanager
def gpu_lock(identity: str, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold a GPU, so that no other tuner measures on it. While another tuner does, wait, and tell ``waiting`` once which.

    Ctrl-C ends the waiting.
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
            file.truncate(0)  # while the lock is still held, so that the next tuner does not read this process's id
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder of records and the files generated from it: other tuners wait while this one changes them.

    The folder itself is locked: tuners with different caches wait for each other, and no lock file stays in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS):
                raise
            # Network file systems lock only files that are open for writing, and a folder cannot be opened so.
            os.close(handle)
            name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
            handle = os.open(cache_folder("locks") / f"folder-{name}.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing would not release it while a fork of this process has it open
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
