"""What a hot path holds of a compiled kernel: decided once, then one C call a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tuned.launching.launcher import bare_supported, hooks, kernel, raw_stream, unwrapped

if TYPE_CHECKING:
    from tuned.families.launch import Launch

MAX_PLANS = 4096  # properties of calls remembered: a decode loop needs a handful, each new length one more


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # noqa: SLF001 - 0.05 us, the public one 0.2
_autocast = torch.is_autocast_enabled
# What listens to operators, and would miss a launch: FakeTensorMode, tracers, FlopCounterMode.
listeners: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
tracing: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001 - of torch.jit


def modes(device: int) -> tuple[Any, ...] | None:
    """What a call depends on beside its arguments; None where something follows operators and would miss a launch.

    ``device`` is that of its tensors, as ``get_device()`` gives it: where they are on no GPU, none is asked for, which
    would initialise CUDA and keep the children of this process from using it.
    """
    if forward_ad._current_level >= 0 or transforms_active() or tracing() is not None or listeners():  # noqa: SLF001
        return None
    return _autocast("cuda"), device if device < 0 else current_device()


def traits(t: torch.Tensor) -> tuple[Any, ...]:
    """All of one tensor that a compiled kernel, or the way to it, may depend on where no gradient is needed."""
    return type(t), t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.get_device()


def may_be_negative(t: torch.Tensor) -> bool:
    """Whether a tensor with these strides may be the imaginary part of a conjugate: PyTorch negates it when it reads.

    Kernels read memory as it is. To ask every tensor of every call takes longer than to ask those that may be.
    """
    return all(step % 2 == 0 for step, length in zip(t.stride(), t.shape, strict=True) if length > 1)


def unless_negative(plan: Callable[..., Any], tensors: Iterable[torch.Tensor | None], given: Callable[..., Any]) -> Any:
    """The plan of a call of these tensors; if one may be negative, a plan that gives None where one is.

    ``given(*arguments)`` are the tensors of a call of the plan.
    """
    if not any(t is not None and may_be_negative(t) for t in tensors):
        return plan

    def asked(*arguments: Any) -> Any:
        return None if any(t is not None and t.is_neg() for t in given(*arguments)) else plan(*arguments)

    return asked


class Bare(NamedTuple):
    """All that a launch by the compiled kernel's own launcher takes, but the stream and the pointers; no tensors.

    ``run(programs, 1, 1, stream_of(device), function, *head, *pointers, *rest)``: the pointers in the order of the
    kernel's signature, which has them all before its numbers. They must be aligned as those of the launch were, and while
    a profiler listens (``enter.calls or leave.calls``) the launch should be public instead.
    """

    run: Callable[..., None]
    function: Any
    head: tuple[Any, ...]
    programs: int
    rest: tuple[Any, ...]  # numbers, then constants
    stream_of: Callable[[int], int]
    enter: Any
    leave: Any


def bare_launch(launch: Launch, compiled: Any, device: int) -> Bare | None:
    """The bare launch of a kernel that was compiled by a public one, or None where this Triton or device has none."""
    listening = hooks()
    if listening is None or torch.cuda.current_device() != device or not bare_supported(device):
        return None
    numbers = (v for v in launch.arguments if not isinstance(v, torch.Tensor))
    rest = (*numbers, *launch.constants.values())
    run, head = unwrapped(compiled)
    return Bare(run, compiled.function, head, launch.programs, rest, raw_stream(), *listening)


def specialisation(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel anew for, of a launch's arguments: types, 16-byte alignment, and numbers' kinds.

    A number of a parameter that is not specialised tells its width alone; of any other also whether it is 1, and
    whether 16 divides it.
    """
    kinds: list[Any] = []
    for value, specialised in zip(launch.arguments, _specialised(launch.kernel), strict=False):
        if isinstance(value, torch.Tensor):
            kinds.append((value.dtype, not value.data_ptr() % 16))
        elif isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            kinds.append((wide, value == 1, not value % 16) if specialised else wide)
        else:
            kinds.append(type(value))
    return tuple(kinds)


@functools.cache
def _specialised(name: str) -> tuple[bool, ...]:
    return tuple(not parameter.do_not_specialize for parameter in kernel(name).params)


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan; a table that grew to MAX_PLANS starts anew."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
