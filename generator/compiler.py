"""Compile variants in a process pool, before a GPU is asked to run them."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from generator.compile import Resources, resources, target_of
from generator.workload import WORKLOADS, empty_like_call

if TYPE_CHECKING:
    from generator.problem import Problem

MAX_SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # CUDA C++ Programming Guide, technical specifications: shared memory a block may opt in to


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


def pool_of_processes(workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """A process pool for compile_variant; its processes import Triton once, from a common parent, and ignore Ctrl-C."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["generator.compiler"])
    return concurrent.futures.ProcessPoolExecutor(workers or os.cpu_count() or 1, context, initializer=_ignore_interrupt)


def _ignore_interrupt() -> None:
    import signal  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
