"""The way of a RoPE call: what its properties are, the plan that was made for them, and the node autograd sees.

A call whose properties were seen before costs one key, one dictionary hit and the launch. Nothing of a caller's is kept
alive: plans hold numbers, kernels and settings, no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tuned import misses
from tuned.overwrite import bump_version, refuse_overwrite
from tuned.rope.arguments import prepare
from tuned.rope.plan import ROPE, choice_of, public_plan, run_eager, run_public, upgraded_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuned.lookup import Choice

MAX_PLANS = 4096  # properties remembered: a decode loop needs a handful, each new length one more


class Settings(NamedTuple):
    """The arguments of a call that are no tensors."""

    tensor_format: str
    interleaved: bool
    inplace: bool
    rotary_dim: int | None
    angle_entries: str | None
    max_seqlen: int | None
    direction: str


class Plan:
    """What calls of one set of properties do. ``run(x, angles, sin, cu_seqlens)`` may be replaced by a faster one."""

    __slots__ = ("run",)

    def __init__(self, run: Any = None) -> None:
        self.run = run


_PLANS: dict[Any, Plan] = {}
_grad_enabled = torch.is_grad_enabled
_capturing = torch.cuda.is_current_stream_capturing
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # noqa: SLF001 - 0.05 us, the public one 0.2


def _traits(t: torch.Tensor) -> tuple[Any, ...]:
    """All of one tensor that a compiled kernel, or the way to it, may depend on."""
    return t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.get_device(), t.requires_grad, type(t)


def call(  # noqa: PLR0913 - the tensors of the public call
    x: Any, freqs: Any, cos: Any, sin: Any, cu_seqlens: Any, settings: tuple[Any, ...]
) -> Any:
    """Run RoPE; ``settings`` are those of Settings, in order. See tuned.dispatch.rope for the arguments and errors."""
    if torch.compiler.is_dynamo_compiling():
        # A launch cannot be traced; the formula can, whole, and the compiler fuses it.
        prepared = prepare(x, freqs, cos, sin, cu_seqlens, *settings, make_out=torch.empty_like)
        return run_eager(prepared.eager_spec, prepared.call)
    angles = cos if freqs is None else freqs
    key: Any
    try:
        # All that a compiled kernel, or the way to it, may depend on; written out, since a call of a function that
        # did it for one tensor would cost as much again.
        key = (
            settings,
            type(x), x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device(), x.requires_grad,
            type(angles), angles.dtype, angles.shape, angles.stride(), angles.data_ptr() & 15, angles.get_device(),
            angles.requires_grad, freqs is None, cos is None,
            sin if sin is None else _traits(sin),
            cu_seqlens if cu_seqlens is None else _traits(cu_seqlens),
            _grad_enabled(), _current_device(),
        )  # fmt: skip
        plan = _PLANS.get(key)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no plain tensor: the checks say what is wrong, or eager takes it
        key = plan = None
    if plan is None:
        plan = _decide(x, freqs, cos, sin, cu_seqlens, Settings(*settings))
        if key is not None:
            if len(_PLANS) >= MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    return plan.run(x, angles, sin, cu_seqlens)


def _decide(  # noqa: PLR0913
    x: Any, freqs: Any, cos: Any, sin: Any, cu_seqlens: Any, settings: Settings
) -> Plan:
    """Check everything and choose what calls like this one do. Nothing is launched, nothing written."""
    prepared = prepare(x, freqs, cos, sin, cu_seqlens, *settings, make_out=lambda t: t)
    if settings.inplace:
        refuse_overwrite(x)
    given = [t for t in (freqs, cos, sin) if t is not None]
    choice = choice_of(prepared, given)
    if choice.variant is None:
        return Plan(_eager_run(settings, freqs is not None))
    if x.numel() == 0:
        plan = Plan(lambda x, *_: x if settings.inplace else torch.empty_like(x))
    else:
        misses.note(ROPE, prepared.spec, prepared.size, choice)
        plan = _kernel_plan(prepared.spec, choice.variant, settings, freqs is not None)
    if torch.is_grad_enabled() and x.requires_grad:
        return Plan(_Node(settings, freqs is not None, plan).run)
    return plan


def _eager_run(settings: Settings, takes_freqs: bool) -> Any:  # noqa: FBT001
    def run(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        if settings.inplace:
            refuse_overwrite(x)
        freqs, cos = (angles, None) if takes_freqs else (None, angles)
        prepared = prepare(x, freqs, cos, sin, cu_seqlens, *settings, make_out=lambda t: t)
        return run_eager(prepared.eager_spec, prepared.call)

    return run


def _kernel_plan(spec: Any, variant: Any, settings: Settings, takes_freqs: bool) -> Plan:  # noqa: FBT001
    plan = Plan()

    def first(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        """Launch publicly, which compiles; from the second call on, by the compiled kernel's own launcher."""
        freqs, cos = (angles, None) if takes_freqs else (None, angles)
        prepared = prepare(x, freqs, cos, sin, cu_seqlens, *settings, make_out=torch.empty_like)
        compiled = run_public(spec, variant, prepared.call)
        used = [t.data_ptr() for t in (prepared.call.cos, prepared.call.sin) if t is not None]
        # While a graph is captured nothing can be tried out: the next call decides how the later ones launch.
        if used == [t.data_ptr() for t in (angles, sin) if t is not None] and not _capturing():
            later = upgraded_plan(spec, variant, prepared.call, compiled) or public_plan(spec, variant, prepared.call)
            plan.run = _counting(later) if settings.inplace else later
        # else cos and sin had to be copied to a common layout, which every call must do again
        if settings.inplace:
            bump_version(x)
        return prepared.call.out

    plan.run = first
    return plan


def _counting(run: Any) -> Any:
    """In place: tell autograd that x has changed."""

    def counted(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        run(x, angles, sin, cu_seqlens)
        bump_version(x)
        return x

    return counted


class _Node:
    """A differentiable call: the plan of its forward, and the settings of its backward."""

    def __init__(self, settings: Settings, takes_freqs: bool, forward: Plan) -> None:  # noqa: FBT001
        self.settings, self.takes_freqs, self.forward = settings, takes_freqs, forward
        turned = "backward" if settings.direction == "forward" else "forward"
        self.transposed = tuple(settings._replace(inplace=False, direction=turned))

    def run(self, x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        if self.settings.inplace:
            refuse_overwrite(x)
        if _transforms_active():  # torch.func: its own way into a Function
            return _Rope.apply(x, angles, sin, cu_seqlens, self)
        return _apply(x, angles, sin, cu_seqlens, self)

    def backward(self, grad: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        freqs, cos = (angles, None) if self.takes_freqs else (None, angles)
        return call(grad, freqs, cos, sin, cu_seqlens, self.transposed)


class _Rope(torch.autograd.Function):
    """The kernel as a node of the graph. Its backward is the transposed call, and so differentiable again."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Any, angles: Any, sin: Any, cu_seqlens: Any, node: _Node
    ) -> Any:
        """Rotate; keep the angles, not x."""
        ctx.save_for_backward(angles, sin, cu_seqlens)
        ctx.node = node
        if node.settings.inplace:
            ctx.mark_dirty(x)
        return node.forward.run(x, angles, sin, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradient, out of place: it may be shared."""
        return ctx.node.backward(grads[0], *ctx.saved_tensors), None, None, None, None


# What Function.apply ends in when no transform of torch.func is active; the checks before cost 1.5 us a call.
_transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)  # noqa: SLF001
_apply: Any = super(torch.autograd.Function, _Rope).apply


def explain(  # noqa: PLR0913
    x: Any, freqs: Any, cos: Any, sin: Any, cu_seqlens: Any, settings: Settings
) -> tuple[Choice, Any]:
    """The choice for a call, and its spec; nothing runs."""
    prepared = prepare(x, freqs, cos, sin, cu_seqlens, *settings, make_out=lambda t: t)
    return choice_of(prepared, [t for t in (freqs, cos, sin) if t is not None]), prepared.spec
