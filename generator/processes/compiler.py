"""Compile variants in a process pool, before a GPU is asked to run them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from tuned.families.architecture import shared_limit

from ..failures import LOST_COMPILER
from ..measuring.compile import Resources, distinct, resources, target_of
from ..places import GENERATOR, OUTSIDE, cache_folder
from ..problem import Problem
from ..rendering.structures import structures
from ..workload import WORKLOADS
from .forkserver import Child, LostError, fork_server

COMPILE_SECONDS = 20.0  # a variant takes 0.3 s; one that spills thousands of bytes takes 30 s, and is not wanted


def compile_variant(problem: Problem, variant: Any, architecture: str) -> tuple[Resources, ...] | str:
    """What each kernel that the variant launches needs (none if it launches none), or the compiler's complaint.

    Runs in a pool process; touches no GPU.
    """
    try:
        steps = WORKLOADS[problem.family].family.launches(problem.spec, variant, _meta_call(problem))
        return tuple(resources(launch, target_of(architecture), count) for launch, count in distinct(steps))
    except Exception as error:  # noqa: BLE001 - a variant that does not compile is data
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"


@functools.lru_cache(maxsize=8)
def _meta_call(problem: Problem) -> Any:
    return WORKLOADS[problem.family].inputs(problem.spec, problem.size, "meta", 0)


def prepare() -> None:
    """Read the templates and take the digest of Triton itself: 0.4 s that each compiler would else spend before its first kernel.

    Nothing is called in a family from outside: it may hang or crash, and the fork server with it.
    """
    with contextlib.suppress(ImportError, AttributeError):  # this Triton has the function elsewhere
        importlib.import_module("triton.runtime.cache").triton_key()
    if not OUTSIDE:
        structures()


def hopeless(needs: tuple[Resources, ...] | str, capability: int) -> str | None:
    """Why the compiler's report rules a variant out, or None."""
    if isinstance(needs, str):
        return f"does not compile: {needs}"
    for need in needs:
        if need.spill_bytes:
            return f"spills {need.spill_bytes} bytes a thread"
        if need.shared_bytes > shared_limit(capability):
            return f"needs {need.shared_bytes} bytes of shared memory a program"
    return None


def compiled(future: concurrent.futures.Future[Any]) -> tuple[Resources, ...] | str:
    """The result of a submitted compile_variant; that a compiler crashed or hung is a result as well."""
    try:
        return future.result()  # type: ignore[no-any-return] # the pool limits the wait
    except CompilerError as error:
        return str(error)


class CompilerError(Exception):
    """A compiler crashed, or was ended because it took too long; the message says which."""


class CompilerPool(concurrent.futures.Executor):
    """A process pool for compile_variant. A compiler that crashes or hangs is ended and replaced; the others go on."""

    def __init__(self, workers: int | None = None, *, seconds: float = COMPILE_SECONDS) -> None:
        """``workers`` processes, by default one for each core, which have ``seconds`` for each task."""
        self._seconds = seconds
        fork_server()  # it imports while this process goes on
        # One thread for each process: it asks the process and waits.
        self._threads = concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count() or 1, "compiler")
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}  # by the thread that asks each
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """As for any executor; the future of a task whose process crashed or took too long raises CompilerError."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as inherited
        """As for any executor, but without ``wait`` the compilers are killed at their work."""
        if not wait:
            with self._lock:
                self._closed = True
                for child in self._children.values():
                    child.kill()  # a thread that waits for the child sees that
        self._threads.shutdown(cancel_futures=cancel_futures)
        for child in self._children.values():
            child.stop()
        self._children.clear()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            _, outcome, value = self._compiler().ask((0, "call", (fn, args, kwargs)), self._seconds)
        except LostError as error:
            with self._lock:
                self._children.pop(threading.get_ident(), None)
            raise CompilerError(f"{LOST_COMPILER}{error}") from None
        if outcome != "done":
            raise CompilerError(value)
        return value

    def _compiler(self) -> Child:
        """The process of this thread; a new one if there is none or it was lost."""
        with self._lock:
            if self._closed:
                raise LostError("the pool is shut down")
            child = self._children.get(threading.get_ident())
            if child is None:
                log = tempfile.TemporaryFile(dir=cache_folder("logs"))  # noqa: SIM115 - its child closes it
                child = fork_server().fork(f"{GENERATOR}.processes.serve:Caller", (), log)
                self._children[threading.get_ident()] = child
            return child
