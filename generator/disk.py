"""Write files whole or not at all, and say in a sentence why that cannot be done: a full disk, a read-only checkout."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what was there stays until then.

    Raises:
        OSError: it could not be written; the error names it.
    """
    with naming(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # noqa: PTH101 - mkstemp makes 0600; what is committed must be readable
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
    parts = re.split(f"({begin}|{end})", path.read_text())
    if parts[1::2] != [begin, end]:
        raise ValueError(f"{path} must have the marks {begin} and {end}, once each")
    path.write_text(f"{parts[0]}{begin}\n{text}\n{end}{parts[-1]}")


def disk_trouble(error: OSError) -> str | None:
    """The sentence for an error of the file system, with the way out; None if it is another kind of error."""
    if error.errno in OTHER and error.filename is None:
        return None
    words = {"what": error.filename or "a file", "why": error.strerror or str(error)}
    return next((text.format_map(words) for errors, text in TROUBLES if error.errno in errors), None)
