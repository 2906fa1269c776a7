"""Launch kernels: through Triton's public launcher (``kernel[grid](...)``), or directly by the compiled kernel's launcher.

A public launch costs about 10 us of Python, most of it to find the compiled kernel, which a caller with a plan has found by
a dictionary lookup already. The compiled kernel's ``run`` costs less than 4 us. Its arguments differ between Triton
versions. So ``run`` is probed once per device, on a tiny kernel whose result is known; if the result is wrong, every launch
is public.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import tuned.kernels
from tuned.families.copying import INTEGERS
from tuned.families.launch import Copy, Fill, Launch, Product, Step
from tuned.launching.rehearsal import NotedError, listen, listening
from tuned.launching.uncompiled import refuse_known, remember_failure


@functools.cache
def kernel(name: str) -> Any:
    """The committed @triton.jit function ``name``.

    Raises:
        ModuleNotFoundError: if no such kernel ships with the package.
    """
    return getattr(importlib.import_module(f"tuned.kernels.{name}"), name)


@contextlib.contextmanager
def _offsets_of_64_bits() -> Iterator[None]:
    """Inside, Triton compiles for an AMD GPU as for tensors of any size.

    Otherwise Triton uses offsets of 32 bits where each storage has up to 2 GiB. The keys of repeated calls do not tell such
    kernels apart, and kernels that choose between two tensors do not compile with them: docs/decisions/0085.
    """
    import triton  # noqa: PLC0415 - a launch needs it anyway

    amd = triton.knobs.amd
    with amd.scope():
        amd.use_buffer_ops = False
        yield


def launch_public(function: Any, launch: Launch) -> Any:
    """Launch through Triton's public launcher; returns the compiled kernel.

    Raises:
        NotedError: this thread listens, and the launch was noted instead; or its kernel, one of this package, does not compile.
    """
    if (heard := listening()) is not None:
        heard.note(function, launch)
        raise NotedError
    ours = launch.kernel in tuned.kernels.DIGESTS
    if ours:
        refuse_known(launch)
    run = function[(launch.programs,)]
    try:
        if torch.version.hip is None:
            return run(*launch.arguments, **launch.constants, **launch.options)
        with _offsets_of_64_bits():
            return run(*launch.arguments, **launch.constants, **launch.options)
    except Exception as error:
        if ours:
            remember_failure(launch, error)
        raise


def _launch_committed(launch: Launch) -> Any:
    return launch_public(kernel(launch.kernel), launch)


def run_step(step: Step, launch: Callable[[Launch], Any] = _launch_committed) -> Any:
    """Run one step of a call on the current stream. ``launch`` launches kernels; by default the committed one, publicly.

    It does not synchronize with the GPU, allocate or compute gradients, so it can be captured in a CUDA graph. It returns
    what ``launch`` returns, or None for other steps.

    Raises:
        ModuleNotFoundError: the kernel does not ship with the package.
    """
    match step:
        case Launch():
            return launch(step)
        case Fill():
            as_integers(step.tensor).fill_(step.bits)
        case Product():
            torch.mm(step.a, step.b.t(), out=step.out)
        case Copy():
            step.out.copy_(step.x)
    return None


def run_steps(steps: Iterable[Step], launch: Callable[[Launch], Any] = _launch_committed) -> Any:
    """Run the steps of a call as ``run_step`` does; returns the last kernel that was launched."""
    compiled = None
    for step in steps:
        compiled = run_step(step, launch) or compiled
    return compiled


def run_publicly(steps: Iterable[Step], device: int) -> Any:
    """Run the steps of a call publicly on the current stream of a device; returns the last kernel that was launched."""
    with torch.cuda.device(device):
        return run_steps(steps)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor, of any strides, as integers of the same item size."""
    return tensor.view(INTEGERS[tensor.element_size()])


def direct_supported(device: int) -> bool:
    """Whether a direct launch does what a public launch does on a device; probed once per device.

    False if TUNED_DISPATCH=safe. Also False during CUDA graph capture, unless the device was probed before.
    """
    known = _PROBED.get(device)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _PROBED[device] = os.environ.get("TUNED_DISPATCH") != "safe" and _probe(device)
    return known


PROBE_KERNEL = "rope_table"  # small, and its result is easy to check
_PROBED: dict[int, bool] = {}


def probe_launch(device: torch.device | int | str) -> Launch:
    """The launch that ``direct_supported`` tries, with tensors on a device."""
    freqs = torch.arange(64, dtype=torch.float32, device=device)
    cos, sin = (torch.zeros(64, dtype=torch.float32, device=freqs.device) for _ in range(2))
    constants = {"WIDTH": 16, "BLOCK": 1024, "PDL": False}
    return Launch(PROBE_KERNEL, 1, (freqs, cos, sin, 4, 16, 1), constants, {"num_warps": 4})


def will_probe(device: int) -> bool:
    """Whether ``direct_supported`` has a launch to try on a device."""
    return device not in _PROBED and os.environ.get("TUNED_DISPATCH") != "safe"


def _probe(device: int) -> bool:
    launch = probe_launch(f"cuda:{device}")
    freqs, cos, sin, *numbers = launch.arguments
    # The mode helps users to find calls of their own that wait for the GPU. The probe waits once, within a call that has run.
    mode = torch.cuda.get_sync_debug_mode()
    if mode:  # to set the mode, even to what it is, warns that it is a prototype
        torch.cuda.set_sync_debug_mode(0)
    try:
        with listen(None):
            compiled = launch_public(kernel(launch.kernel), launch)
        wanted = torch.stack((cos, sin)).clone()
        cos.zero_()
        sin.zero_()
        direct_launcher(compiled, device)(
            1, (freqs.data_ptr(), cos.data_ptr(), sin.data_ptr(), *numbers, *launch.constants.values())
        )
        return bool(torch.equal(torch.stack((cos, sin)), wanted)) and bool(wanted.any())
    except (TypeError, ValueError, AttributeError, SystemError, ImportError):  # the launcher of another Triton version
        return False
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def direct_launcher(compiled: Any, device: int) -> Callable[[int, tuple[Any, ...]], None]:
    """A function ``launch(programs, values)`` that launches a compiled kernel on the current stream of ``device``.

    ``values`` are all arguments and constants in the order of the signature; a tensor may be given by its address. Nothing
    is checked: the values must match what the kernel was specialised on. Cooperative launch and programmatic dependent
    launch follow from the compile options, which ``run`` reads from the kernel (Triton 3.6, 3.7).
    """
    run, head = unwrapped(compiled)
    function, stream_of = compiled.function, raw_stream()

    def launch(programs: int, values: tuple[Any, ...]) -> None:
        run(programs, 1, 1, stream_of(device), function, *head, *values)

    return launch


class _StandIn:
    """Stands for ``self`` in a launcher's ``__call__``: it records the arguments of the C function instead of launching."""

    def __init__(self, genuine: Any) -> None:
        self._genuine = genuine
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._genuine, name)

    def launch(self, *arguments: Any) -> None:
        self.asked.append(arguments)


def unwrapped(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(run, head) such that ``run(programs, 1, 1, stream, compiled.function, *head, *values)`` launches a kernel.

    A compiled kernel's ``run`` is a Python object that adds arguments of its own and calls one C function. That takes more
    than a microsecond, and what it adds is the same each time. So it is called twice with a stand-in, with different
    grids, streams and values, to see what it would pass on. If it adds anything but constants, ``run`` itself is returned.
    """
    run, function = compiled.run, compiled.function
    head = (compiled.packed_metadata, None, None, None)
    wrapper = type(run).__call__
    scratch = (getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    if not inspect.isfunction(wrapper) or any(scratch):  # scratch memory is allocated for each launch
        return run, head
    stand_in, middles = _StandIn(run), []
    try:
        for grid, stream in ((3, 1 << 40), (5, 1 << 41)):
            values = tuple(object() for _ in range(4))
            wrapper(stand_in, grid, 1, 1, stream, function, *head, *values)
            start, last = stand_in.asked[-1][:5], stand_in.asked[-1][5:]
            spread = len(last) >= len(values) and all(map(operator.is_, last[-len(values) :], values))
            if start != (grid, 1, 1, stream, function) or not (spread or last[-1] == values):
                return run, head
            middles.append(last[: -len(values)] if spread else last[:-1])
    except (TypeError, AttributeError, IndexError, ValueError):
        return run, head
    if len(middles[0]) != len(middles[1]) or not all(map(operator.is_, *middles)):
        return run, head
    launch, middle = run.launch, middles[0]
    if spread:
        return launch, middle

    def gathered(programs: int, y: int, z: int, stream: int, function: Any, *values: Any) -> None:
        launch(programs, y, z, stream, function, *middle, values)

    return gathered, ()


@functools.cache
def raw_stream() -> Callable[[int], int]:
    """The function from a device index to the handle of its current stream, as Triton itself asks for it: 0.05 us.

    torch.cuda.current_stream().cuda_stream takes 3 us.
    """
    from triton.runtime import driver  # noqa: PLC0415 - Triton is imported at the first GPU call

    return driver.active.get_current_stream  # type: ignore[no-any-return]


@functools.cache
def hooks() -> tuple[Any, Any] | None:
    """Triton's chains of launch hooks (enter, exit), which profilers use; None if this Triton keeps them another way."""
    from triton import knobs  # noqa: PLC0415

    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return chains if all(hasattr(chain, "calls") for chain in chains) else None
