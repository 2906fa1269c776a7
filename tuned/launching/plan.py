"""What plans share: the modes and tensor traits that a call's key holds, and direct launches of one C call each.

A plan is the function that a repeated call runs without checks; it is kept under the call's key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tuned.families.launch import Launch, Step
from tuned.launching.launcher import (
    direct_launcher,
    direct_supported,
    hooks,
    kernel,
    launch_public,
    raw_stream,
    run_publicly,
    unwrapped,
)
from tuned.launching.rehearsal import listening

ALIGNED_BYTES = 16  # Triton specialises on whether this divides an address
# Errors of building a call's key from something that is no plain tensor: the checks say what is wrong, or eager takes it.
NO_KEY = (AttributeError, RuntimeError, TypeError)
MAX_PLANS = 4096  # plans per table: a decode loop needs a handful, and one more for each new length


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # noqa: SLF001 - 0.05 us, the public one 0.2
_autocast = torch.is_autocast_enabled
# Number of active dispatch modes, which a launch would bypass: FakeTensorMode, tracers, FlopCounterMode.
listeners: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
_capturing = torch.cuda.is_current_stream_capturing
tracing: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001 - of torch.jit


def modes(device: int) -> tuple[Any, ...] | None:
    """What a call depends on besides its arguments; None if a launch would bypass torch.func, tracing or dispatch modes.

    ``device`` is ``get_device()`` of its tensors. If they are not on a GPU, the current device is not asked for: that
    would initialise CUDA, which forked children of this process could then not use.
    """
    if forward_ad._current_level >= 0 or transforms_active() or tracing() is not None or listeners():  # noqa: SLF001
        return None
    return _autocast(), device if device < 0 else current_device()


def bypassed() -> str | None:
    """Why a launch would bypass torch.func, forward-mode AD or torch.jit tracing, in words; or None.

    ``modes`` tests the same for repeated calls, and dispatch modes too. It has the tests written out, since calling a
    function would cost time.
    """
    if transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001
        return "a transform of torch.func or forward-mode differentiation is active"
    return "torch.jit is tracing" if tracing() is not None else None


def left_alone() -> bool:
    """Whether torch.export is active, or ``bypassed`` has a reason. torch.compile asks once, and keeps the answer in its graph.

    Code that torch.compile traces may not call torch.compiler.is_exporting() itself: with torch 2.11 it is always true there.
    """
    return torch.compiler.is_exporting() or bypassed() is not None


left_alone._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001 - torch.compiler's decorator does no more, and imports all of Dynamo


def traits(t: torch.Tensor) -> tuple[Any, ...]:
    """All properties of a tensor that a compiled kernel, or the path to it, may depend on if no gradient is needed."""
    return type(t), t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.get_device()


def may_be_negative(t: torch.Tensor) -> bool:
    """Whether a tensor's strides could be those of the imaginary part of a conjugated tensor, which PyTorch negates lazily.

    Kernels read memory as it is. Calling ``is_neg()`` for every tensor of every call would cost more than calling it only
    for those with such strides.
    """
    return all(step % 2 == 0 for step, length in zip(t.stride(), t.shape, strict=True) if length > 1)


def unless_negative(plan: Callable[..., Any], tensors: Iterable[torch.Tensor | None], given: Callable[..., Any]) -> Any:
    """``plan``; if one of ``tensors`` may have the negative bit, a plan that returns None when one has it.

    ``given(*arguments)`` are the tensors among the arguments of the plan.
    """
    if not any(t is not None and may_be_negative(t) for t in tensors):
        return plan

    def asked(*arguments: Any) -> Any:
        return None if any(t is not None and t.is_neg() for t in given(*arguments)) else plan(*arguments)

    return asked


class DirectLaunch(NamedTuple):
    """All that a direct launch takes except the stream and the pointers; it holds no tensors.

    Launch with ``run(programs, 1, 1, stream_of(device), function, *head, *pointers, *rest)``. The pointers are in the
    order of the kernel's signature, which has them all before its numbers, and must have the 16-byte alignment of those
    that the kernel was compiled for. If a profiler has launch hooks (``enter.calls or leave.calls``), launch publicly.
    """

    run: Callable[..., None]
    function: Any
    head: tuple[Any, ...]
    programs: int
    rest: tuple[Any, ...]  # numbers, then constants
    stream_of: Callable[[int], int]
    enter: Any
    leave: Any


def direct_launch(launch: Launch, compiled: Any, device: int) -> DirectLaunch | None:
    """The direct launch of a kernel that a public launch compiled; None if it must use Triton's public launcher."""
    chains = hooks()
    if chains is None or torch.cuda.current_device() != device or not direct_supported(device):
        return None
    numbers = (v for v in launch.arguments if not isinstance(v, torch.Tensor))
    rest = (*numbers, *launch.constants.values())
    run, head = unwrapped(compiled)
    return DirectLaunch(run, compiled.function, head, launch.programs, rest, raw_stream(), *chains)


# What Triton specialises a kernel on for one argument, with another compiled kernel for each kind: the dtype of a tensor, "i32"
# or "i64", or the Python type of anything else; whether it is the integer 1, which becomes a constant; whether 16 divides the
# address or the integer. A plain tuple: a class would triple the time, and every launch of a long GRU asks for 20.
Kind = tuple[Any, bool, bool]


def kind_of(value: Any, specialised: bool = True) -> Kind:  # noqa: FBT001, FBT002 - mapped over arguments
    """The kind of an argument; of an integer whose parameter is do_not_specialize, the code depends on the width alone."""
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return (width, value == 1, not value % ALIGNED_BYTES) if specialised else (width, False, False)
    if isinstance(value, torch.Tensor):
        return value.dtype, False, not value.data_ptr() % ALIGNED_BYTES
    return type(value), False, False


def specialisation(launch: Launch) -> tuple[Kind, ...]:
    """The kinds of a launch's arguments, on which Triton specialises the kernel."""
    return tuple(map(kind_of, launch.arguments, _specialised(launch.kernel)))


@functools.cache
def _specialised(name: str) -> tuple[bool, ...]:
    return tuple(not parameter.do_not_specialize for parameter in kernel(name).params)


def properties(device: int, launch: Launch) -> tuple[Any, ...]:
    """All that the compiled code of a launch depends on."""
    return (device, launch.kernel, *launch.constants.values(), *launch.options.items(), *specialisation(launch))


_KNOWN: dict[Any, Any] = {}  # properties of a launch -> (compiled kernel, its direct launcher); no tensors


def maker(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
    """A function that makes contiguous tensors of a shape on the device of ``like``, in a third of the time of ``new_empty``.

    Their dtype is that of ``like`` unless ``dtype`` is given. Call the function only where that device is the current one and no
    mode or transform is active: it consults none of them.
    """
    return _maker(tuple(shape), torch.empty(tuple(shape), device="meta").stride(), like.device, dtype or like.dtype)


def maker_like(t: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that does what ``empty_like(t)`` does, in half of its time. Call it only where that of ``maker`` may be called."""
    strides = t.stride() if t.is_contiguous() else torch.empty_like(t, device="meta").stride()
    return _maker(tuple(t.shape), strides, t.device, t.dtype)


def _maker(
    shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    quick = _quick_empty(device.type)
    if quick is not None:
        return functools.partial(quick, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


@functools.cache
def _quick_empty(kind: str) -> Callable[..., torch.Tensor] | None:
    """The private function by which torch.compile's code makes tensors, in half the time of ``torch.empty_strided``.

    None if this torch has no such function, or one that does something else.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001
    quick: Callable[..., torch.Tensor] | None = getattr(guards, f"_empty_strided_{kind}", None)
    if quick is None:
        return None
    try:
        made = quick((2, 3), (3, 1), torch.float16)
    except (TypeError, ValueError, RuntimeError, SystemError):
        return None
    right = (type(made), made.dtype, made.shape, made.stride(), made.device.type)
    return quick if right == (torch.Tensor, torch.float16, (2, 3), (3, 1), kind) else None


def launch_known(device: int, launch: Launch) -> Any:
    """Launch on the current stream: publicly the first time, which compiles, then directly.

    Returns the compiled kernel; None if this thread listens, and the launch was noted instead.
    """
    function = kernel(launch.kernel)
    if (heard := listening()) is not None:
        heard.note(function, launch)
        return None
    chains = hooks()
    key = properties(device, launch)
    known = _KNOWN.get(key)
    if known is not None and chains is not None and not chains[0].calls and not chains[1].calls:
        compiled, run = known
        run(launch.programs, (*launch.arguments, *launch.constants.values()))
        return compiled
    compiled = launch_public(function, launch)
    # The direct launcher cannot be probed during CUDA graph capture: the next launch decides for the later ones.
    if not _capturing() and chains is not None and direct_supported(device):
        remember(_KNOWN, key, (compiled, direct_launcher(compiled, device)))
    return compiled


def compiled_before(device: int, launch: Launch) -> Any:
    """The compiled kernel of a launch like one that ``launch_known`` made; None if there was none, or launches are public."""
    known = _KNOWN.get(properties(device, launch))
    return None if known is None else known[0]


def capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph captures what is done with x."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def outside_of_graphs(plan: Any) -> Any:
    """The same plan, but it returns None for a call that a CUDA graph captures, so that this call is decided again."""

    def plan_of_a_call(*given: Any) -> Any:
        return None if _capturing() else plan(*given)

    return plan_of_a_call


def of_calls_alone(make: Callable[[DirectLaunch], Any], public: Any) -> tuple[Any, Any]:
    """``make`` and ``public`` of ``run_and_keep``, for plans that are ``outside_of_graphs``."""
    return (lambda direct: outside_of_graphs(make(direct))), outside_of_graphs(public)


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan; a table that has MAX_PLANS is emptied first."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def keep(plans: dict[Any, Any], key: Any, make: Callable[[], Any], given: Callable[..., Any], *arguments: Any) -> None:
    """Remember under ``key`` the plan that ``make`` gives, for later calls like this one; not if the key or the plan is None.

    ``arguments`` are what the plan would take for this call, and ``given(*arguments)`` the tensors among them.
    """
    # The direct launcher cannot be probed during CUDA graph capture: the next call decides how later ones launch.
    if key is None or _capturing() or (plan := make()) is None:
        return
    remember(plans, key, unless_negative(plan, given(*arguments), given))


def run_and_keep(  # noqa: PLR0913 - a call, as the kernel took it and as it was given
    steps: Iterable[Step],
    plans: dict[Any, Any],
    key: Any,
    make: Callable[[DirectLaunch], Any],
    public: Any,
    taken: Iterable[torch.Tensor | None],
    given: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Run the steps of a call publicly, and ``keep`` its plan: ``make(its last direct launch)``, or ``public`` if it can have none."""
    addresses = [
        [(t.data_ptr(), t.get_device()) for t in tensors if t is not None] for tensors in (given(*arguments), taken)
    ]
    device = addresses[0][0][1]
    compiled = run_publicly(steps, device)

    def plan() -> Any:
        if addresses[0] != addresses[1]:
            return public  # a tensor was copied, or segments were concatenated, and every call must do so again
        launch = [step for step in steps if isinstance(step, Launch)][-1]
        direct = direct_launch(launch, compiled, device)
        return public if direct is None else make(direct)

    keep(plans, key, plan, given, *arguments)
