"""Processes of a test: forked, so that they start at once, and waited for with a time limit."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from generator.processes.forkserver import Child


STARTED: list[int] = []


def forked(function: Callable[[], object]) -> int:
    """Fork a process that only calls ``function``; its exit code is 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must not return into the tests
            traceback.print_exc()
        finally:
            os._exit(code)
    STARTED.append(pid)
    return pid


def end_all() -> None:
    """End the processes that a failed test left behind."""
    for pid in STARTED:
        with contextlib.suppress(ChildProcessError):  # the test has waited for it
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    STARTED.clear()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody has waited for, does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# What a CUDA build of PyTorch logs where there is a compiler and no GPU.
NO_RUNTIME = re.compile(r"^.*No CUDA runtime is found, using CUDA_HOME=.*\n", re.MULTILINE)


def complaints(stderr: str) -> str:
    """What a program wrote to stderr, without the line that depends on this machine."""
    return NO_RUNTIME.sub("", stderr)


BACKSTOP_SECONDS = 600.0  # a wait of this length never ends: no load on the machine decides a test
HUNG = "hung on purpose"  # what a process of a test prints before it hangs


def only_the_hung_are_out_of_time(child: Child) -> float:
    """In place of Child.now: time stands still until the process has printed that it hangs, and then is over."""
    return math.inf if HUNG in child.tail() else 0.0


def hang() -> None:
    """Give no answer."""
    os.write(1, HUNG.encode())
    signal.pause()


def wait_for(condition: Callable[[], object], seconds: float = BACKSTOP_SECONDS) -> None:
    """Wait until ``condition`` holds.

    Raises:
        AssertionError: it never did.
    """
    until, pause = time.monotonic() + seconds, 0.001
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(pause)
        # A wait of seconds must not check thousands of times: many conditions read files.
        pause = min(1.5 * pause, 0.1)
