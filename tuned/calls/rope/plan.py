"""What a RoPE call of known properties does: decided once, then one closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tuned.calls.rope.arguments import SUPPORTED, Given, Sources, offset_limits, prepare
from tuned.calls.rope.lengths import learn
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import launches
from tuned.launching.launcher import kernel, launch_public
from tuned.launching.overwrite import bump_versions
from tuned.launching.plan import Bare, bare_launch, remember, specialisation
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, choose

if TYPE_CHECKING:
    from tuned.calls.rope.arguments import Prepared, Settings
    from tuned.calls.rope.lengths import Sized
    from tuned.families.launch import Launch
    from tuned.families.rope.launches import RopeCall
    from tuned.families.rope.spec import RopeSpec

capturing = torch.cuda.is_current_stream_capturing


class Plan:
    """What calls of one set of properties do.

    ``run(x, key, angles, sin, cu_seqlens, place, number, here, table)`` may be replaced by a faster one. Angles are those
    of the one source that the call has; place is its tensor of positions, or its offset where that is a tensor, and
    number its offset where it is an int; here and table are the addresses of x and of the angles.
    """

    __slots__ = ("run", "serves")

    def __init__(self, run: Callable[..., Any], *, serves: bool = True) -> None:
        self.run = run
        self.serves = serves  # a kernel does: autograd must be told, which it sees by itself of eager PyTorch


def choice_of(prepared: Prepared, followed: str | None) -> Choice:
    """Which variant a call gets, or why it runs in eager PyTorch: rule 4 of tuned.dispatch.

    ``followed`` is why a launch would be missed by what follows PyTorch's operators, or None.
    """
    x = prepared.call.x
    reason = why_eager(x, x.dtype in SUPPORTED)
    if reason is None and prepared.call.key is not None:
        reason = why_eager(prepared.call.key, x.dtype in SUPPORTED)
    if reason is None and prepared.spec is None:
        reason = "the features of q and k lie apart by different steps, and kernels take one for both"
    reason = reason or followed
    if prepared.spec is None or reason is not None:
        return Choice("eager", reason or "", None)
    return choose(ROPE, prepared.spec, prepared.size, gpu_of(x.device))


def run_public(spec: RopeSpec, variant: Any, call: RopeCall) -> tuple[Launch, Any]:
    """The call through Triton's public launch; returns the launch and the compiled kernel."""
    with torch.cuda.device(call.x.device):
        (part,) = launches(spec, variant, call)
        return part, launch_public(kernel(part.kernel), part)


# Launches of kernels that are compiled: (spec, variant, device, what Triton specialised on) -> compiled kernel.
_COMPILED: dict[Any, Any] = {}


def sized_plan(found: Sized) -> Plan:
    """The plan of calls that differ in their lengths alone from one that was served."""
    spec, settings, sources = found.spec, found.settings, found.sources

    def public(*tensors: Any) -> Any:
        return _public(spec, found.variant, sources.given(*tensors), settings)[0]

    return Plan(_run(spec, found.two, found.bare, found.device, found.sines, found.limits, found.beside, public))


def kernel_plan(prepared: Prepared, variant: Any, settings: Settings, sources: Sources, klass: Any) -> Plan:
    """The plan of calls with the properties of this one, whose class of lengths is ``klass``.

    Where the kernel was compiled for calls that differ in their sizes alone, it is launched at once by its own launcher.
    Else the first call launches publicly, which compiles.
    """
    spec = prepared.spec
    assert spec is not None

    def public(*tensors: Any) -> Any:
        return _public(spec, variant, sources.given(*tensors), settings)[0]

    def first(*tensors: Any) -> Any:
        given = sources.given(*tensors)
        result, call, part, compiled = _public(spec, variant, given, settings)
        # While a graph is captured nothing can be tried out: the next call decides how the later ones launch.
        if not capturing():
            remember(_COMPILED, _code(spec, variant, call, part), compiled)
            plan.run = upgrade(call, part, compiled) if as_given(given, call) else public
        return result

    def upgrade(call: RopeCall, part: Launch, compiled: Any) -> Callable[..., Any]:
        bare = bare_launch(part, compiled, call.x.device.index)
        if bare is None:  # this Triton or device has no other launcher
            return public
        learn(klass, spec, settings, sources, variant, call, part, bare)
        # Of one cache: how many bytes after its cosines the sines begin.
        sines = 0 if spec.takes_sine else call.sin.data_ptr() - call.cos.data_ptr()
        limits = offset_limits(spec, settings, call.angle_rows, call.seq)
        beside = _beside(call.x, call.key)
        return _run(spec, call.key is not None, bare, call.x.device.index, sines, limits, beside, public)

    plan = Plan(first)
    (part,) = launches(spec, variant, prepared.call)
    compiled = _COMPILED.get(_code(spec, variant, prepared.call, part))
    if compiled is not None and not sources.copied and not capturing():
        plan.run = upgrade(prepared.call, part, compiled)
    return plan


def _code(spec: RopeSpec, variant: Any, call: RopeCall, part: Launch) -> Any:
    """All that a compiled kernel depends on."""
    return spec, variant, call.x.device, specialisation(part), tuple(part.constants.values())


def _public(spec: RopeSpec, variant: Any, given: Given, settings: Settings) -> tuple[Any, RopeCall, Launch, Any]:
    """Check, launch publicly, and give the result as the caller wants it; and what was launched."""
    prepared = prepare(given, settings, make_out=torch.empty_like)
    call = prepared.call
    part, compiled = run_public(spec, variant, call)
    if settings.inplace:
        bump_versions(given.x, given.key)
        out, key_out = given.x, given.key
    else:
        out, key_out = call.out.view(given.x.shape), call.key_out
    return (out if given.key is None else (out, key_out)), call, part, compiled


def as_given(given: Given, call: RopeCall) -> bool:
    """Whether the launch took the caller's own tensors. Where some had to be copied, every call must do so again."""
    if given.cu_seqlens is not None and given.cu_seqlens.data_ptr() != call.cu_seqlens.data_ptr():
        return False
    taken = next(t for t in (given.freqs, given.cos_sin_cache, given.inv_freq, given.cos) if t is not None)
    return taken.data_ptr() == call.cos.data_ptr() and (
        given.sin is None or given.sin.data_ptr() == call.sin.data_ptr()
    )


def _run(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    two: bool,  # noqa: FBT001
    bare: Bare,
    device: int,
    sines: int,
    limits: tuple[int, int],
    beside: tuple[int, int, int],
    public: Callable[..., Any],
) -> Callable[..., Any]:
    """The ``run`` of a plan by the compiled kernel's own launcher.

    It may be called with tensors that have the dtype, shape, strides, device and 16-byte alignment of the call's, and
    with these alone: the compiled code depends on all of them.
    """
    if spec.plain:
        return _plain(spec, bare, device, sines, public)
    return _complete(spec, two, bare, device, sines, limits, beside, public)


def _beside(x: torch.Tensor, key: torch.Tensor | None) -> tuple[int, int, int]:
    """How far from x, in bytes, a key was found not to overlap it; and the distances between which others may."""
    if key is None:
        return 0, 0, 0
    spans = [
        (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size() for t in (x, key)
    ]
    return key.data_ptr() - x.data_ptr(), -spans[1], spans[0]


def _plain(spec: RopeSpec, bare: Bare, device: int, sines: int, public: Callable[..., Any]) -> Callable[..., Any]:
    run, function, head, programs, rest, stream_of, enter, leave = bare
    inplace, takes_sine, packed, empty_like = spec.inplace, spec.takes_sine, spec.packed, torch.empty_like

    def plan(  # noqa: PLR0913 - those of Plan.run
        x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, place: Any, number: Any, here: int, table: int
    ) -> Any:
        if enter.calls or leave.calls:  # a profiler listens: the public launch tells it what it wants to know
            return public(x, key, angles, sin, cu_seqlens, place, number, here, table)
        pointers: tuple[int, ...]
        if inplace:
            out = x
            pointers = (here, table)
        else:
            out = empty_like(x)
            pointers = (here, out.data_ptr(), table)
        if not takes_sine:
            pointers = (*pointers, table + sines if sin is None else sin.data_ptr())
        if packed:
            pointers = (*pointers, cu_seqlens.data_ptr())
        run(programs, 1, 1, stream_of(device), function, *head, *pointers, *rest)
        if inplace:
            bump_versions(x)
        return out

    return plan


def _complete(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    two: bool,  # noqa: FBT001
    bare: Bare,
    device: int,
    sines: int,
    limits: tuple[int, int],
    beside: tuple[int, int, int],
    public: Callable[..., Any],
) -> Callable[..., Any]:
    run, function, head, programs, (_, *numbers), stream_of, enter, leave = bare
    rest, (low, high), (checked, nearest, furthest) = tuple(numbers), limits, beside
    inplace, takes_sine, empty_like = spec.inplace, spec.takes_sine, torch.empty_like

    def plan(  # noqa: PLR0913 - those of Plan.run
        x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, place: Any, number: Any, here: int, table: int
    ) -> Any:
        if enter.calls or leave.calls or not low <= number <= high:
            return public(x, key, angles, sin, cu_seqlens, place, number, here, table)
        pointers: tuple[int, ...]
        there = key.data_ptr() if two else here
        if inplace:
            if two and nearest < there - here < furthest and there - here != checked:
                return public(x, key, angles, sin, cu_seqlens, place, number, here, table)  # may overlap: it checks
            pointers = (here, there)
        else:
            out = empty_like(x)
            key_out = empty_like(key) if two else out
            pointers = (here, there, out.data_ptr(), key_out.data_ptr())
        if not takes_sine:
            pointers = (*pointers, table, table + sines if sin is None else sin.data_ptr())
        else:
            pointers = (*pointers, table)
        run(
            programs, 1, 1, stream_of(device), function, *head, *pointers,
            table if cu_seqlens is None else cu_seqlens.data_ptr(), table if place is None else place.data_ptr(),
            number, *rest,
        )  # fmt: skip
        if inplace:
            bump_versions(x, key)
            return (x, key) if two else x
        return (out, key_out) if two else out

    return plan
