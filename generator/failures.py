"""The error that ends a run; which failures of a variant are facts about it, and which may pass: busy machine, full disk.

A variant whose failure may pass is tried again, at the end of the same search and in the next run. The failure is a
fact once it came often enough in processes that tried nothing else: a variant that really hangs is tried three times in
all.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130  # the exit code of Ctrl-C, as a shell gives it
LOST_WORKER = "lost the worker: "  # how the search begins the reason when a variant ended its worker
LOST_COMPILER = "the compiler was lost: "  # how generator.processes.compiler begins it when its process was lost
AGAIN = 2  # failures until a crash is a fact: it came again in a process that tried nothing else
LOADED = 3  # the same for a failure that a busy machine or a neighbour can cause
# Parts of the messages of generator.processes.forkserver and of the system.
BY_LOAD = (
    *("it hung, and was killed", "half an answer came", "killed by SIGKILL", "the process that starts others died"),
    *("out of memory", "OutOfMemoryError", "MemoryError", "Cannot allocate memory", "ALLOC_FAILED"),
    *("No space left on device", "Disk quota exceeded", "Read-only file system", "Permission denied"),
    *("Too many open files", "Resource temporarily unavailable", "Input/output error", "Interrupted system call"),
)


class TuningError(Exception):
    """Nothing could be tuned; the message says why, and the way out."""


def not_installed(module: str | None) -> str:
    """The sentence for a module that tuning needs and this Python lacks."""
    return (
        f"{module} is not installed for {sys.executable}. In a checkout make tune sets up .venv, which . .venv/bin/activate "
        "chooses; elsewhere pip install '.[tune]' brings it"
    )


def times_to_be_a_fact(reason: str) -> int:
    """How often a variant must have failed, this time for ``reason``, until the failure is a fact about it."""
    if any(sign in reason for sign in BY_LOAD):
        return LOADED
    return AGAIN if LOST_WORKER in reason or LOST_COMPILER in reason else 1
