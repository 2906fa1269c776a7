"""Compile variants in a process pool, before a GPU is asked to run them."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import functools
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from generator.compile import Resources, resources, target_of
from generator.workload import WORKLOADS, empty_like_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from generator.problem import Problem

# CUDA C++ Programming Guide, technical specifications: shared memory a block may opt in to; 0 is AMD's CDNA 3, the LDS of
# a workgroup.
MAX_SHARED_BYTES = {0: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
COMPILE_SECONDS = 120.0  # a variant takes 0.3 s; past this its compiler hangs


def compile_variant(problem: Problem, variant: Any, architecture: str) -> tuple[Resources, ...] | str:
    """What each launch of the variant needs, or the compiler's complaint. Runs in a pool process; touches no GPU."""
    try:
        launches = WORKLOADS[problem.family].family.launches(
            problem.spec, variant, _meta_call(problem), empty_like_call("meta")
        )
        return tuple(resources(launch, target_of(architecture)) for launch in launches)
    except Exception as error:  # noqa: BLE001 - a variant that does not compile is data
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"


@functools.lru_cache(maxsize=8)
def _meta_call(problem: Problem) -> Any:
    return WORKLOADS[problem.family].inputs(problem.spec, problem.size, "meta", 0)


def hopeless(needs: tuple[Resources, ...] | str, capability: int) -> str | None:
    """Why the compiler's report rules a variant out, or None."""
    if isinstance(needs, str):
        return f"does not compile: {needs}"
    for need in needs:
        if need.spill_bytes:
            return f"spills {need.spill_bytes} bytes a thread"
        if need.shared_bytes > MAX_SHARED_BYTES.get(capability, 232_448):
            return f"needs {need.shared_bytes} bytes of shared memory a program"
    return None


def compiled(future: concurrent.futures.Future[Any]) -> tuple[Resources, ...] | str:
    """What a submitted compile_variant came to; a compiler that crashed or hangs is data as well."""
    try:
        return future.result(COMPILE_SECONDS)  # type: ignore[no-any-return]
    except concurrent.futures.process.BrokenProcessPool:
        return "the compiler crashed, with this variant or with one beside it"
    except concurrent.futures.TimeoutError:
        return f"the compiler took more than {COMPILE_SECONDS:g} s"


class CompilerPool(concurrent.futures.Executor):
    """A process pool for compile_variant that outlives a compiler which crashes.

    Its processes import Triton once, from a common parent, and ignore Ctrl-C.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers or os.cpu_count() or 1
        self._pool = self._start()

    def _start(self) -> concurrent.futures.ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["generator.compiler"])
        return concurrent.futures.ProcessPoolExecutor(self._workers, context, initializer=_ignore_interrupt)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """As any executor; a broken pool is replaced first."""
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except concurrent.futures.process.BrokenProcessPool:
            self._pool = self._start()
            return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as inherited
        """As any executor."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)


def pool_of_processes(workers: int | None = None) -> CompilerPool:
    """A process pool for compile_variant, by default with one process a core."""
    return CompilerPool(workers)


def _ignore_interrupt() -> None:
    import signal  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
