"""What ends a run; and which failures of a variant are facts about it, and which may pass: a busy machine, a full disk.

A failure that may pass is tried again, at the end of the same search and in the next run, and is a fact once it came so
often in processes that tried nothing else: a variant that really hangs is tried three times in all.
"""

from __future__ import annotations

INTERRUPTED = 130  # the exit code of Ctrl-C, as a shell gives it
LOST_WORKER = "lost the worker: "  # how the search begins the reason of what ended its worker
LOST_COMPILER = "the compiler was lost: "  # how generator.processes.compiler says that a compiler's process was lost
AGAIN = 2  # of a crash: it came again in a process that tried nothing else
LOADED = 3  # of what a busy machine or a neighbour can cause
# Of the texts of generator.processes.forkserver and of the system.
BY_LOAD = (
    *("it hung, and was killed", "half an answer came", "killed by SIGKILL", "the process that starts others died"),
    *("out of memory", "OutOfMemoryError", "MemoryError", "Cannot allocate memory", "ALLOC_FAILED"),
    *("No space left on device", "Disk quota exceeded", "Read-only file system", "Permission denied"),
    *("Too many open files", "Resource temporarily unavailable", "Input/output error", "Interrupted system call"),
)


class TuningError(Exception):
    """Nothing could be tuned; the message says why, and the way out."""


def times_to_be_a_fact(reason: str) -> int:
    """How often a variant must have failed, this time for ``reason``, for that to be a fact about it."""
    if any(sign in reason for sign in BY_LOAD):
        return LOADED
    return AGAIN if LOST_WORKER in reason or LOST_COMPILER in reason else 1
