"""Choose where kernels run before Triton is imported: on the GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from generator.measuring.mended import patched_once
from generator.measuring.quick import quick_interpreter
from tests.support import compiling

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Generator, Iterator

# Functions that tests replace, to launch without a GPU or to watch what is launched: module, function.
REPLACED = (
    ("tuned.calls.gru.run", "launch_known"),
    ("tuned.calls.rope.plan", "run_public"),
    ("tuned.calls.rope.saved", "run_steps"),
    ("tuned.launching.launcher", "launch_public"),
    ("tuned.launching.plan", "direct_launch"),
    ("tuned.lookup.lookup", "choose"),
)

# @triton.jit reads this when a kernel is defined, so it must be set before any test module imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Lookups also read the tables that a user of this machine tuned: keep those out of the tests.
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.gettempdir()) / "tuned-tests" / "share")


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    """Triton's interpreter runs in less than half the time with the same results, as tests/kernels/test_quick.py shows."""
    with contextlib.ExitStack() as stack:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
            stack.enter_context(patched_once())
            stack.enter_context(quick_interpreter())
        yield


@pytest.fixture(scope="session")
def compiler() -> Iterator[concurrent.futures.Executor]:
    """A process in which Triton compiles, even if it interprets in this one. One for all tests: its imports take seconds."""
    with compiling.process() as process:
        yield process


def pytest_configure(config: pytest.Config) -> None:
    """Make workers, and the processes that they start, compute with one thread each.

    With a thread for each core the workers would wait for each other: NumPy's small products take a hundred times as long on
    16 cores. This is set in the process that starts the workers, since their plugins may import NumPy before any conftest.
    Inductor would start as many compiling processes for each worker as there are cores; once a worker waited for one for ever.
    """
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip or drop marked tests that this machine does not run: see the markers in pyproject.toml."""
    if not torch.cuda.is_available():
        for item in items:
            if any(item.get_closest_marker(name) for name in ("gpu", "gpu_sample", "sanitizer")):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))
        return
    left_out = _thinned(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Freeze the objects that collecting made: they live as long as the process, and each garbage collection saves 0.4 s.

    Without a GPU garbage is also collected less often: with this threshold five files took a twelfth less time and 4 percent
    more memory. With a GPU it is not: garbage may hold GPU memory, which processes share.
    """
    gc.collect()
    gc.freeze()
    if not torch.cuda.is_available():
        gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Check that a test restored the launch functions that it replaced: in some orders later tests would call the stand-ins.

    Also forget the repeated calls that PyTorch's operators serve, since the id of a weight identifies them. A weight of the next
    test may get the id of a freed one, depending on the allocator, and a call that should be refused would be served.
    """
    result = yield
    if (left := sys.modules.get("tuned.launching.left")) is not None:
        left.LEFT.clear()
    for module, name in REPLACED:
        if (found := sys.modules.get(module)) is not None:
            home = getattr(found, name).__module__
            assert not home.startswith("tests."), f"{item.nodeid} leaves something of {home} as {module}.{name}"
    return result


def _thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that a GPU leaves out: in a function marked ``thinned_on_gpu(every=n)``, all but the first and each nth after."""
    seen: dict[str, int] = {}
    left_out = []
    for item in items:
        marker = item.get_closest_marker("thinned_on_gpu")
        if marker is not None:
            function = item.nodeid.partition("[")[0]
            number = seen[function] = seen.get(function, -1) + 1
            if number % marker.kwargs["every"]:
                left_out.append(item)
    return left_out
