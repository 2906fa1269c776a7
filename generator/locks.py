"""Locks between tuners: one measures on a GPU at a time, one writes a folder of records. Each vanishes with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .places import cache_folder

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
            if error.errno not in (errno.EBADF, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
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
