"""tuned.warm in a process where Triton compiles: CPU tensors take the code path of GPU tensors, and no launch is made.

Tests submit these functions by name to a process of ``tests.support.compiling``. It forks a child for each, which has compiled
nothing yet, like a new process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def in_a_child(deed: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a forked child of this process and return its result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            theirs.send(deed(*given))
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
            raise

    child = context.Process(target=run)
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join()


def lazily_imported() -> bool:
    """Whether importing tuned imports nothing that only warming needs."""
    import sys  # noqa: PLC0415

    import tuned  # noqa: PLC0415

    before = {"tuned.warming", "tuned.launching.ahead"} & set(sys.modules)
    return not before and tuned.warm.__module__ == "tuned.warming"


def _stand_in() -> list[bool]:
    """Put stand-ins in the place of a GPU. Returns a list that gets an entry for each compilation: True for a cache hit."""
    import torch  # noqa: PLC0415
    from triton import knobs  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver  # noqa: PLC0415

    import tuned.calls.gru_cell.run as cell  # noqa: PLC0415
    import tuned.launching.plan as known  # noqa: PLC0415
    from tuned import warming  # noqa: PLC0415
    from tuned.calls.recurrent import serve  # noqa: PLC0415
    from tuned.calls.rope import call, plan  # noqa: PLC0415
    from tuned.launching import launcher  # noqa: PLC0415
    from tuned.launching.compiling import Driver  # noqa: PLC0415
    from tuned.launching.rehearsal import listening  # noqa: PLC0415
    from tuned.lookup.lookup import Gpu  # noqa: PLC0415

    stand_in: Any = Driver(GPUTarget("cuda", 90, 32), 0)
    stand_in.get_current_stream = lambda _device: 0
    stand_in.launcher_cls = lambda _source, _metadata: "launcher"
    limits = {"max_shared_mem": 2**20}
    stand_in.utils = types.SimpleNamespace(
        load_binary=lambda *_: (1, 2, 3, 0, 1024), get_device_properties=lambda _: limits
    )
    driver.set_active(stand_in)
    genuine = launcher.launch_public

    def launch_public(function: Any, launch: Any) -> Any:
        if listening() is not None:
            return genuine(function, launch)
        return function.warmup(*launch.arguments, grid=(launch.programs,), **launch.constants, **launch.options)

    changes: dict[Any, dict[str, Any]] = {
        launcher: {"launch_public": launch_public},
        known: {"_capturing": lambda: False, "direct_supported": lambda _: False},
        plan: {
            "launch_public": launch_public,
            "capturing": lambda: False,
            "why_eager": lambda *_: None,
            "direct_launch": lambda *_: None,
        },
        call: {"current_device": lambda: -1},
        serve: {"why_eager": lambda *_, **__: None},
        cell: {"why_eager": lambda *_: None},
        warming: {"will_probe": lambda _: False},
        torch.cuda: {"device": lambda _: contextlib.nullcontext(), "current_device": lambda: 0},
    }
    changes[cell.MOMENTS] = {"variant_of": lambda spec, size, *_: (cell.GRU_CELL.default_variant(spec, size), True)}
    for module in (plan, cell):
        changes[module]["gpu_of"] = lambda _: Gpu("some_gpu", 90, 132, "Some GPU")
    for module, values in changes.items():
        for name, value in values.items():
            setattr(module, name, value)
    events: list[bool] = []
    knobs.compilation.listener = lambda **given: events.append(given["cache_hit"])
    return events


def _warmed(cache: str, processes: int) -> dict[str, Any]:
    """Warm a rotation and a GRU step: what tuned.warm reports, what this process compiled, and what the calls compile later."""
    import torch  # noqa: PLC0415
    from triton import knobs  # noqa: PLC0415

    import tuned  # noqa: PLC0415
    from tuned.dispatch import gru_cell, rope  # noqa: PLC0415

    os.environ["TRITON_CACHE_DIR"] = cache
    events = _stand_in()
    x, freqs = torch.randn(4097)[1:].view(2, 8, 4, 64), torch.randn(8, 1, 1, 64)  # x is not aligned
    h, weights = torch.randn(2, 16), (torch.randn(48, 16), torch.randn(48, 16))

    def model() -> None:
        rope(x, freqs)
        gru_cell(h, h, *weights)

    hooks = [knobs.runtime.jit_cache_hook]
    done = tuned.warm(model, processes=processes)
    hooks.append(knobs.runtime.jit_cache_hook)
    here = events.count(False)
    events.clear()
    with torch.no_grad():
        model()
    return {
        "compiled": done.compiled,
        "found": done.found,
        "here": here,
        "later": len(events),
        "hook": hooks[-1] == hooks[0],
    }


def _lost(cache: str) -> dict[str, Any]:
    """``_warmed``, but the process that should compile ends at once."""
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from tuned.launching import ahead  # noqa: PLC0415

    ahead._started = lambda: subprocess.Popen(
        [sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    return _warmed(cache, 1)


def warmed(cache: str, processes: int) -> Any:
    """``_warmed`` in a new process."""
    return in_a_child(_warmed, cache, processes)


def warmed_although_a_compiler_is_lost(cache: str) -> Any:
    """``_lost`` in a new process."""
    return in_a_child(_lost, cache)
