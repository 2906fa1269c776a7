"""Compile the kernels of random calls before any is measured: nothing compiles beside a measurement, and more are measured.

Each process makes a few of the calls on the same GPU, once as a call and once in a CUDA graph. The kernels are then in
Triton's cache.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_PROCESSES = 12  # each holds a CUDA context and the tensors of a call


def processes_here() -> int:
    """How many processes this machine has cores for, besides the process that measures."""
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))


def compile_ahead(shapes: Sequence[Any], serve: Callable[[Any], Any], processes: int, seconds: float) -> str:
    """Call ``serve``, a function of a module, on each shape in other processes. No shape is begun after ``seconds``.

    Returns:
        How many shapes were served in how long, and the first error: a shape that fails here fails again when measured.
    """
    begun, done, complaint = time.monotonic(), 0, ""
    # They are forked from a server that has imported their modules, and no CUDA context, with which it could not fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tuned.nn", "triton"])
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_leave_ctrl_c)
    try:
        waiting = [pool.submit(_served, serve, shape) for shape in shapes]
        for future in concurrent.futures.as_completed(waiting, seconds):
            error = future.exception()
            done += error is None
            complaint = complaint or ("" if error is None else f"; {type(error).__name__}: {error}".splitlines()[0])
    except concurrent.futures.TimeoutError:
        pass
    finally:
        pool.shutdown(cancel_futures=True)
    return f"{done} of {len(shapes)} shapes compiled ahead in {time.monotonic() - begun:.0f} s{complaint}"


def _served(serve: Callable[[Any], Any], shape: Any) -> None:
    try:
        serve(shape)
    finally:
        torch.cuda.empty_cache()  # the others need the memory


def _leave_ctrl_c() -> None:
    """Leave Ctrl-C to the parent, which waits for the calls under way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
