"""Compile launches ahead of calls: side by side in processes, into Triton's cache, then into this process' kernels.

Triton's compiler holds the GIL nearly all the time: two threads take as long as one. So compiler processes (``compiling``) and
this process share out the kernels that Triton's cache lacks; this process then reads them from the cache. Triton itself says
which kernel a launch needs: it hands its hook ``jit_cache_hook`` what its ``preload`` compiles.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tuned.launching import compiling
from tuned.launching.rehearsal import Noted

MOST_PROCESSES = 32  # a model has a handful of kernels


class Compiled(NamedTuple):
    """Names of the kernels of some launches, one for each specialisation."""

    compiled: tuple[str, ...]  # that Triton's cache lacked
    found: tuple[str, ...]  # that were in Triton's cache
    ready: tuple[str, ...]  # that this process had compiled before


class _Task(NamedTuple):
    """A kernel that this process has not compiled yet."""

    noted: Noted
    asked: dict[str, Any]  # what Triton's hook says of it
    target: Any

    @property
    def data(self) -> str:
        """What JITFunction.preload takes."""
        return str(self.asked["specialization_data"])


def compile_ahead(noted: Iterable[Noted], processes: int | None = None) -> Compiled:
    """Compile the kernels of launches, so that the launches compile nothing, and load the kernels on their GPUs.

    Args:
        noted: the launches.
        processes: at most how many processes compile beside this one; by default as many as there are other cores, and MOST_PROCESSES at most.

    Raises:
        Exception: what the launch itself would raise, of Triton's compiler or of a kernel that does not fit the GPU.
    """
    from triton.runtime import JITFunction  # noqa: PLC0415 - Triton is imported at the first GPU call

    tasks, ready = _asked(one for one in noted if isinstance(one.function, JITFunction))
    missing = [task for task in tasks if not _is_cached(task)]
    if processes is None:
        processes = min(_cores() - 1, MOST_PROCESSES)
    each = {(task.data, str(task.target)): task for task in missing}  # GPUs of one model need the same kernel
    _compile(list(each.values()), processes)
    kernels = [(task.noted.device, _warmed(task.noted)) for task in tasks]
    _load(kernels)
    names = tuple(task.noted.launch.kernel for task in missing)
    kept = {id(task) for task in missing}
    return Compiled(names, tuple(t.noted.launch.kernel for t in tasks if id(t) not in kept), ready)


def _cores() -> int:
    """The cores that this process may use; 1 where a process cannot be ended together with those that it started."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _on(device: int) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device >= 0 else contextlib.nullcontext()


def _warmed(one: Noted) -> Any:
    """The compiled kernel of a launch, as Triton's launcher will find it; None if a hook keeps Triton from compiling."""
    launch = one.launch
    with _on(one.device):
        return one.function.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants, **launch.options)


def _asked(noted: Iterable[Noted]) -> tuple[list[_Task], tuple[str, ...]]:
    """(the kernels that launches need and this process lacks, each once; the names of those that it has)."""
    from triton import knobs  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    here, before = threading.get_ident(), knobs.runtime.jit_cache_hook
    found: dict[Any, _Task] = {}
    ready: dict[Any, str] = {}
    asking: list[Noted] = []

    def hook(**given: Any) -> Any:
        if threading.get_ident() != here:  # a launch of another thread
            return before(**given) if before is not None else None
        one, asked = asking[-1], given["compile"]
        found.setdefault(
            (one.device, id(one.function), given["key"]), _Task(one, asked, driver.active.get_current_target())
        )
        return True  # Triton compiles nothing

    knobs.runtime.jit_cache_hook = hook
    try:
        for one in noted:
            asking.append(one)
            if (kernel := _warmed(one)) is not None:
                ready[one.device, id(kernel)] = one.launch.kernel
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found.values()), tuple(ready.values())


def _is_cached(task: _Task) -> bool:
    """Whether Triton's cache has a kernel. False if this Triton cannot be asked: ``_compile`` then compiles or finds it."""
    try:
        from triton.compiler import ASTSource, make_backend  # noqa: PLC0415
        from triton.runtime.cache import get_cache_key, get_cache_manager  # noqa: PLC0415
        from triton.runtime.jit import get_cache_invalidating_env_vars  # noqa: PLC0415

        source = ASTSource(
            task.noted.function, task.asked["signature"], task.asked["constants"], task.asked["configs"][0]
        )
        told = json.loads(task.data)["options"]
        backend = make_backend(task.target)
        options = backend.parse_options({k: tuple(v) if isinstance(v, list) else v for k, v in told.items()})
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return manager.get_group(f"{source.name[:150]}.json") is not None  # as triton.compile names it
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return False


def _compile(missing: list[_Task], processes: int) -> None:
    """Compile kernels into Triton's cache, in processes and here. What a process fails to compile is left out."""
    waiting = collections.deque(missing)
    with _compilers(min(processes, len(missing) - 1)) as compilers:
        threads = [threading.Thread(target=_ask, args=(one, waiting), daemon=True) for one in compilers]
        for thread in threads:
            thread.start()
        while waiting:
            with contextlib.suppress(IndexError):  # the last one may be taken by now
                _warmed(waiting.pop().noted)
        for thread in threads:
            thread.join()


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - a file of this package
        [sys.executable, "-I", str(Path(compiling.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process alone, which ends the compilers and their ptxas
    )


@contextlib.contextmanager
def _compilers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compile; they and what they started are gone when the block is left."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count if sys.executable else 0):
            started.append(_started())  # noqa: PERF401 - one by one: if one fails to start, those before it are ended
        yield started
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        for one in started:
            one.wait()
            for pipe in (one.stdin, one.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _ask(compiler: subprocess.Popen[bytes], waiting: collections.deque[_Task]) -> None:
    """Have a process compile the waiting kernels one after the other, until none is left or the process is lost."""
    requests, answers = compiler.stdin, compiler.stdout
    assert requests is not None
    assert answers is not None
    # If it is lost (OSError, EOFError), or ended by Ctrl-C while it is asked (ValueError), this process compiles its kernel.
    with contextlib.suppress(OSError, EOFError, ValueError, pickle.UnpicklingError):
        pickle.dump(sys.path, requests)
        while True:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            function, target = task.noted.function.fn, task.target
            file, name = inspect.getsourcefile(function), function.__qualname__
            kind = (target.backend, target.arch, target.warp_size)
            pickle.dump((function.__module__, file, name, task.data, kind, task.noted.device), requests)
            requests.flush()
            pickle.load(answers)  # noqa: S301 - of our own process


def _load(kernels: list[tuple[int, Any]]) -> None:
    """Make compiled kernels ready to launch, side by side: Triton 3.6 has a C compiler build a launcher for each signature."""

    def load(given: tuple[int, Any]) -> None:
        device, kernel = given
        if kernel is not None:
            with _on(device):
                _ = kernel.run

    if kernels:
        with concurrent.futures.ThreadPoolExecutor(min(len(kernels), MOST_PROCESSES)) as pool:
            list(pool.map(load, kernels))
