"""What a RoPE call of known properties does: decided once, then one closure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tuned.family import FAMILIES
from tuned.gpu import gpu_of, why_eager
from tuned.launcher import bare_supported, hooks, kernel, launch_public, raw_stream
from tuned.lookup import Choice, choose
from tuned.rope.eager import rotate

if TYPE_CHECKING:
    from tuned.rope.launches import RopeCall
    from tuned.rope.spec import RopeSize, RopeSpec

ROPE = FAMILIES["rope"]


def choice_of(spec: RopeSpec | None, size: RopeSize, call: RopeCall) -> Choice:
    """Which variant a call gets, or why it runs in eager PyTorch: rule 4 of tuned.dispatch."""
    reason = why_eager(call.x, spec is not None)
    if spec is None or reason is not None:
        return Choice("eager", reason or "", None)
    return choose(ROPE, spec, size, gpu_of(call.x.device))


def run_eager(spec: RopeSpec, call: RopeCall) -> torch.Tensor:
    """The call in eager PyTorch; in place, x is overwritten."""
    out = rotate(spec, call)
    return call.x.copy_(out) if spec.inplace else out


def run_public(spec: RopeSpec, variant: Any, call: RopeCall) -> list[Any]:
    """The call through Triton's public launch; returns the compiled kernels."""
    device = call.x.device
    with torch.cuda.device(device):
        parts = ROPE.launches(spec, variant, call, lambda shape: _table(shape, device))
        return [launch_public(kernel(part.kernel), part) for part in parts]


def _table(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def plan_of(spec: RopeSpec, variant: Any, call: RopeCall, compiled: list[Any], given: tuple[Any, ...]) -> Any:
    """A closure (x, angles, sin, cu_seqlens) -> result for calls with the properties of this one.

    It may be called with tensors that have the dtype, shape, strides, device and 16-byte alignment of the call's, and
    with these alone: the compiled code depends on all of them. ``given`` are the caller's angles and sin.
    """
    if (call.cos, call.sin) != given and [t is not None and t.data_ptr() for t in (call.cos, call.sin)] != [
        t is not None and t.data_ptr() for t in given
    ]:
        return None  # cos and sin had to be copied to a common layout: each call must
    public = _public_plan(spec, variant, call)
    device = call.x.device.index
    if len(compiled) != 1 or hooks() is None or not bare_supported(device) or torch.cuda.current_device() != device:
        return public
    return _bare_plan(spec, variant, call, compiled[0], public)


def _public_plan(spec: RopeSpec, variant: Any, call: RopeCall) -> Any:
    # Without its tensors: a plan keeps nothing of the caller's alive.
    template = dataclasses.replace(call, x=None, out=None, cos=None, sin=None, cu_seqlens=None)

    def plan(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        out = x if spec.inplace else torch.empty_like(x)
        again = dataclasses.replace(template, x=x, out=out, cos=angles, sin=sin, cu_seqlens=cu_seqlens)
        run_public(spec, variant, again)
        return out

    return plan


def _bare_plan(spec: RopeSpec, variant: Any, call: RopeCall, code: Any, public: Any) -> Any:
    (part,) = ROPE.launches(spec, variant, call, lambda shape: _table(shape, call.x.device))
    numbers = (v for v in part.arguments if not isinstance(v, torch.Tensor))
    # The order of the signature: pointers first, cu_seqlens the last of them.
    rest = (*numbers, *part.constants.values())
    run, function, metadata, programs = code.run, code.function, code.packed_metadata, part.programs
    stream_of, empty_like, device = raw_stream(), torch.empty_like, call.x.device.index
    inplace, takes_sine, packed = spec.inplace, spec.takes_sine, spec.packed
    enter, leave = hooks() or (None, None)

    def plan(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        if enter.calls or leave.calls:  # a profiler listens: the public launch tells it what it wants to know
            return public(x, angles, sin, cu_seqlens)
        if inplace:
            out = x
            pointers = (x.data_ptr(), angles.data_ptr())
        else:
            out = empty_like(x)
            pointers = (x.data_ptr(), out.data_ptr(), angles.data_ptr())
        if not takes_sine:
            pointers = (*pointers, sin.data_ptr())
        if packed:
            pointers = (*pointers, cu_seqlens.data_ptr())
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *pointers, *rest)
        return out

    return plan
