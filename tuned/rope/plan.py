"""What a RoPE call of known properties does: decided once, then one closure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tuned.family import FAMILIES
from tuned.gpu import gpu_of, why_eager
from tuned.launcher import kernel, launch_public
from tuned.lookup import Choice, choose
from tuned.plan import Bare, bare_launch
from tuned.rope.eager import rotate
from tuned.rope.launches import launches

if TYPE_CHECKING:
    from tuned.rope.arguments import Prepared
    from tuned.rope.launches import RopeCall
    from tuned.rope.spec import RopeSpec

ROPE = FAMILIES["rope"]


def choice_of(prepared: Prepared, angles: list[torch.Tensor]) -> Choice:
    """Which variant a call gets, or why it runs in eager PyTorch: rule 4 of tuned.dispatch."""
    x = prepared.call.x
    reason = why_eager(x, prepared.spec is not None)
    if reason is None and torch.is_grad_enabled() and any(t.requires_grad for t in angles):
        reason = "the angles need a gradient, which the kernels do not give"
    if prepared.spec is None or reason is not None:
        return Choice("eager", reason or "", None)
    return choose(ROPE, prepared.spec, prepared.size, gpu_of(x.device))


def run_eager(spec: RopeSpec, call: RopeCall) -> torch.Tensor:
    """The call in eager PyTorch; in place, x is overwritten."""
    out = rotate(spec, call)
    return call.x.copy_(out) if spec.inplace else out


def run_public(spec: RopeSpec, variant: Any, call: RopeCall) -> list[Any]:
    """The call through Triton's public launch; returns the compiled kernels."""
    device = call.x.device
    with torch.cuda.device(device):
        parts = launches(spec, variant, call)
        return [launch_public(kernel(part.kernel), part) for part in parts]


def upgraded_plan(spec: RopeSpec, variant: Any, call: RopeCall, compiled: list[Any]) -> Any:
    """A closure (x, angles, sin, cu_seqlens) -> result that launches the compiled kernel by its own launcher, or None.

    It may be called with tensors that have the dtype, shape, strides, device and 16-byte alignment of the call's, and
    with these alone: the compiled code depends on all of them.
    """
    (part,) = launches(spec, variant, call)
    bare = bare_launch(part, compiled[0], call.x.device.index)
    return None if bare is None else _bare_plan(spec, call.x.device.index, bare, public_plan(spec, variant, call))


def public_plan(spec: RopeSpec, variant: Any, call: RopeCall) -> Any:
    """A closure (x, angles, sin, cu_seqlens) -> result that launches publicly, for calls with these properties."""
    # Without its tensors: a plan keeps nothing of the caller's alive.
    template = dataclasses.replace(call, x=None, out=None, cos=None, sin=None, cu_seqlens=None)

    def plan(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        out = x if spec.inplace else torch.empty_like(x)
        again = dataclasses.replace(template, x=x, out=out, cos=angles, sin=sin, cu_seqlens=cu_seqlens)
        run_public(spec, variant, again)
        return out

    return plan


def _bare_plan(spec: RopeSpec, device: int, bare: Bare, public: Any) -> Any:
    run, function, metadata, programs, rest, stream_of, enter, leave = bare
    inplace, takes_sine, packed, empty_like = spec.inplace, spec.takes_sine, spec.packed, torch.empty_like

    def plan(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        pointers: tuple[int, ...]
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
