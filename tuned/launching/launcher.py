"""Launch compiled kernels: through Triton's public call, or by the compiled kernel's own C launcher.

A public launch costs about 10 us of Python, most of it to find out again what a dictionary hit has told already. The
compiled kernel's ``run`` costs under 4. Its arguments differ between Triton versions, so it is tried once, on a tiny
kernel whose result is known; where it does not do what it should, every launch is public.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
from typing import TYPE_CHECKING, Any

import torch

from tuned.families.launch import Copy, Fill, Launch, Product

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuned.families.launch import Step

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> as what bits are seen


@functools.cache
def kernel(name: str) -> Any:
    """The committed @triton.jit function ``name``.

    Raises:
        ModuleNotFoundError: if no such kernel ships with the package.
    """
    return getattr(importlib.import_module(f"tuned.kernels.{name}"), name)


def launch_public(function: Any, launch: Launch) -> Any:
    """Launch through Triton's public call; returns the compiled kernel."""
    return function[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


def run_step(step: Step, launch: Callable[[Launch], Any] | None = None) -> None:
    """Run one step of a call on the current stream, a kernel by ``launch``: by default the committed one, publicly.

    None of it waits, allocates or gives a gradient, so all of it can be captured in a CUDA graph.

    Raises:
        ModuleNotFoundError: the kernel does not ship with the package.
    """
    match step:
        case Launch():
            if launch is None:
                launch_public(kernel(step.kernel), step)
            else:
                launch(step)
        case Fill():
            as_integers(step.tensor).fill_(step.bits)
        case Product():
            torch.mm(step.a, step.b.t(), out=step.out)
        case Copy():
            step.out.copy_(step.x)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor of any strides, as integers of its width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def bare_supported(device: int) -> bool:
    """Whether a compiled kernel's own launcher does here what a public launch does; tried once a device.

    False when TUNED_DISPATCH=safe, and, until it was tried, while a CUDA graph is captured.
    """
    known = _PROBED.get(device)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _PROBED[device] = os.environ.get("TUNED_DISPATCH") != "safe" and _probe(device)
    return known


PROBE_KERNEL = "rope_table"  # small, and its result is known
_PROBED: dict[int, bool] = {}


def _probe(device: int) -> bool:
    freqs = torch.arange(64, dtype=torch.float32, device=f"cuda:{device}")
    cos, sin = (torch.zeros(64, dtype=torch.float32, device=freqs.device) for _ in range(2))
    arguments = (freqs, cos, sin, 4, 16, 1)
    constants = {"WIDTH": 16, "BLOCK": 1024, "PDL": False}
    try:
        function = kernel(PROBE_KERNEL)
        compiled = function[(1,)](*arguments, **constants, num_warps=4)
        wanted = torch.stack((cos, sin)).clone()
        cos.zero_()
        sin.zero_()
        bare(compiled, device)(
            1, (freqs.data_ptr(), cos.data_ptr(), sin.data_ptr(), *arguments[3:], *constants.values())
        )
        return bool(torch.equal(torch.stack((cos, sin)), wanted)) and bool(wanted.any())
    except (TypeError, ValueError, AttributeError, SystemError, ImportError):  # another version's launcher
        return False


def bare(compiled: Any, device: int) -> Callable[[int, tuple[Any, ...]], None]:
    """``launch(programs, values)`` of a compiled kernel on the current stream of ``device``.

    ``values`` are all arguments and constants in the order of the signature; tensors may be given by address. Nothing
    is checked: the values must be of the kind that the kernel was compiled for. Whether the launch is cooperative, and
    whether it depends on the one before, is what the kernel was compiled with: ``run`` reads it there (Triton 3.6, 3.7).
    """
    run, head = unwrapped(compiled)
    function, stream_of = compiled.function, raw_stream()

    def launch(programs: int, values: tuple[Any, ...]) -> None:
        run(programs, 1, 1, stream_of(device), function, *head, *values)

    return launch


class _StandIn:
    """What a launcher's Python is asked with in place of itself: it has all that it has, and keeps what it would launch."""

    def __init__(self, genuine: Any) -> None:
        self._genuine = genuine
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._genuine, name)

    def launch(self, *arguments: Any) -> None:
        self.asked.append(arguments)


def unwrapped(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(run, head) such that ``run(programs, 1, 1, stream, compiled.function, *head, *values)`` launches a kernel.

    A compiled kernel's ``run`` is an object of Python, which adds what it knows of the kernel to its arguments and calls
    one function of C. That takes more than a microsecond, and adds the same each time; so it is asked twice, with another
    grid, stream and values, what it would call. Where it adds anything else than constants, ``run`` is what there is.
    """
    run, function = compiled.run, compiled.function
    head = (compiled.packed_metadata, None, None, None)
    wrapper = type(run).__call__
    scratch = (getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    if not inspect.isfunction(wrapper) or any(scratch):  # which it allocates for each launch
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
    """Device -> handle of its current stream, the way Triton itself asks: 0.05 us.

    torch.cuda.current_stream().cuda_stream takes 3.
    """
    from triton.runtime import driver  # noqa: PLC0415 - Triton is imported at the first GPU call

    return driver.active.get_current_stream  # type: ignore[no-any-return]


@functools.cache
def hooks() -> tuple[Any, Any] | None:
    """The chains of functions that listen to launches (profilers); None where this Triton keeps them another way."""
    from triton import knobs  # noqa: PLC0415

    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return chains if all(hasattr(chain, "calls") for chain in chains) else None
