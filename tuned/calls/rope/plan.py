"""Plans: what RoPE calls of known properties do, decided once per set of properties and kept as one closure."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tuned.calls.rope.arguments import (
    SUPPORTED,
    Given,
    Prepared,
    Settings,
    Sources,
    offset_limits,
    prepare,
    tokens_first,
)
from tuned.calls.rope.lengths import SizedLaunch, learn
from tuned.families.launch import Launch
from tuned.families.rope import FAMILY as ROPE
from tuned.families.rope.launches import RopeCall, launches
from tuned.families.rope.spec import RopeSpec
from tuned.launching.launcher import kernel, launch_public
from tuned.launching.overwrite import apart, bump_versions
from tuned.launching.plan import DirectLaunch, direct_launch, maker, maker_like, remember, specialisation
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, choose

capturing = torch.cuda.is_current_stream_capturing


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """What calls of one set of properties do.

    ``run(x, key, angles, sin, cu_seqlens, positions, offset, addresses, weights)`` serves a call; a faster function may
    replace it later. Its arguments:

    * angles: the tensor of the call's only source of angles (cos, if cos and sin are given).
    * positions: the tensor of positions, or the offset if that is a tensor, else None.
    * offset: the offset as an int; 0 if it is a tensor.
    * addresses: of x, angles, key, sin, positions, cu_seqlens and both weights, without those that are not given.
    * weights: of the norms of x and of the key, or None.
    """

    run: Callable[..., Any]
    serves: bool = True  # by a kernel, for which autograd needs a node of ours; eager PyTorch makes its own nodes


def choice_of(prepared: Prepared, bypassed: str | None) -> Choice:
    """Which variant a call gets, or why it runs in eager PyTorch (rule 4 of tuned.dispatch).

    ``bypassed`` is why a launch would bypass torch.func, tracing or dispatch modes, or lose a gradient; or None.
    """
    tensors = [t for t in (prepared.call.x, prepared.call.key) if t is not None]
    reasons = [why_eager(t, t.dtype in SUPPORTED) for t in tensors]
    if prepared.spec is None:
        reasons.append("q and k have different strides of head_dim, and kernels take one for both")
    reason = next(filter(None, [*reasons, bypassed]), None)
    if prepared.spec is None or reason is not None:
        return Choice("eager", reason or "", None)
    return choose(ROPE, prepared.spec, prepared.size, gpu_of(tensors[0].device))


class Ready(NamedTuple):
    """A checked call with its results allocated, and its launch."""

    spec: RopeSpec
    call: RopeCall
    part: Launch


def run_public(now: Ready) -> Any:
    """Run a call through Triton's public launcher; returns the compiled kernel."""
    with torch.cuda.device(now.call.x.device):
        return launch_public(kernel(now.part.kernel), now.part)


# (spec, variant, device, what Triton specialised on, constants) -> compiled kernel.
_COMPILED: dict[Any, Any] = {}


def sized_plan(found: SizedLaunch, x: torch.Tensor, key: torch.Tensor | None) -> Plan:
    """The plan of calls like that of x and key, which differ only in their lengths from a call that a kernel served."""
    known = found.known
    public = functools.partial(_public, known.spec, found.variant, known.settings, known.sources)
    makers = _makers(known.spec, x, key)
    return Plan(_run(known.spec, found.direct, x.get_device(), makers, known.sines, found.limits, found.beside, public))


def kernel_plan(  # noqa: PLR0913 - a call, and what is known of it
    x: Any,
    key: Any,
    prepared: Prepared,
    variant: Any,
    settings: Settings,
    sources: Sources,
    class_key: Any,
    first: threading.local,
) -> Plan:
    """The plan of calls with the properties of this one.

    If the kernel is already compiled, for calls that differ only in their sizes, the plan launches directly from the
    start. Otherwise its first run uses Triton's public launcher, which compiles; in this thread that run takes the call
    from ``first``. ``x`` and ``key`` are the caller's; ``class_key`` is the key of the call's shape class, or None.
    """
    spec = prepared.spec
    assert spec is not None
    public, makers = functools.partial(_public, spec, variant, settings, sources), _makers(spec, x, key)

    def run_first(*tensors: Any) -> Any:
        given = sources.given(*tensors)
        now = getattr(first, "prepared", None) or _checked(spec, variant, given, settings)
        compiled = run_public(now)
        # The direct launcher cannot be probed during CUDA graph capture: the next call decides how later ones launch.
        if not capturing():
            keep_kernel(variant, now, compiled)
            plan.run = upgrade(now, compiled) if alike and as_given(given, now.call) else public
        return _result(given, settings, now.call)

    def upgrade(now: Ready, compiled: Any) -> Callable[..., Any]:
        _, call, part = now
        direct = direct_launch(part, compiled, call.x.device.index)
        if direct is None:  # must use Triton's public launcher
            return public
        # With a cos_sin_cache or freqs_cis: bytes from its first cosine to its first sine.
        sines = 0 if spec.computes_sincos else call.sin.data_ptr() - call.cos.data_ptr()
        learn(class_key, spec, settings, sources, variant, call, part, direct, sines)
        limits = offset_limits(spec, settings, call.angle_rows, call.seq)
        return _run(spec, direct, call.x.get_device(), makers, sines, limits, beside(call.x, call.key), public)

    plan, now = Plan(run_first), Ready(spec, prepared.call, *launches(spec, variant, prepared.call))
    compiled = known_kernel(variant, now)
    alike = settings.inplace or made_alike(x, key, prepared.call, settings)
    if compiled is not None and not sources.copied and alike and not capturing():
        plan.run = upgrade(now, compiled)
    else:
        first.prepared = now
    return plan


def known_kernel(variant: Any, now: Ready) -> Any:
    """The kernel that a checked call needs, if it is compiled already, or None."""
    return _COMPILED.get(_code(variant, now))


def keep_kernel(variant: Any, now: Ready, compiled: Any) -> None:
    """Remember the kernel of a checked call."""
    remember(_COMPILED, _code(variant, now), compiled)


def _code(variant: Any, now: Ready) -> Any:
    """The key of a compiled kernel: all that its code depends on."""
    return now.spec, variant, now.call.x.device, specialisation(now.part), tuple(now.part.constants.values())


def _checked(spec: RopeSpec, variant: Any, given: Given, settings: Settings) -> Ready:
    """Check a call whose plan is known, and allocate its results."""
    call = prepare(given, settings, make_out=torch.empty_like).call
    return Ready(spec, call, *launches(spec, variant, call))


def _public(spec: RopeSpec, variant: Any, settings: Settings, sources: Sources, *tensors: Any) -> Any:
    """``Plan.run`` through the public launcher: check the call, run it and return its result."""
    given = sources.given(*tensors)
    now = _checked(spec, variant, given, settings)
    run_public(now)
    return _result(given, settings, now.call)


def _result(given: Given, settings: Settings, call: RopeCall) -> Any:
    """What the caller gets after the launch of a call."""
    if settings.inplace:
        bump_versions(given.x, given.key)
        out, key_out = given.x, given.key
    elif settings.k_dim:
        out, key_out = call.out, call.key_out
    else:
        out = apart(as_asked(call.out, given.x, settings))
        key_out = None if call.key_out is None else apart(tokens_first(call.key_out, settings))
    return out if given.key is None else (out, key_out)


def as_given(given: Given, call: RopeCall) -> bool:
    """Whether the launch read the caller's own tensors. If some were copied, every later call must copy them again."""
    angles = next(
        t for t in (given.freqs, given.cos_sin_cache, given.inv_freq, given.freqs_cis, given.cos) if t is not None
    )
    pairs = [(angles, call.cos), (given.sin, call.sin), (given.cu_seqlens, call.cu_seqlens)]
    pairs += [(given.weight, call.weight), (given.key_weight, call.key_weight)]
    return all(own is None or own.data_ptr() == read.data_ptr() for own, read in pairs)


def as_asked(out: torch.Tensor, x: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The call's result with the axes of the caller's x."""
    return out.transpose(1, 2) if settings.tensor_format == "bhsd" else out.view(x.shape)


def made_alike(x: torch.Tensor, key: torch.Tensor | None, call: RopeCall, settings: Settings) -> bool:
    """Whether the call's results have the strides of ``empty_like`` of x and of the key, which a direct launch writes to.

    The results are made like views: of a packed qkv with one axis of heads, of "bhsd" with tokens before heads. If
    elements share memory, a tensor made like x or the key itself can have other strides.
    """
    if settings.k_dim:
        return True  # contiguous always
    pairs = [(x, as_asked(call.out, x, settings))]
    if key is not None and call.key_out is not None:
        pairs.append((key, as_asked(call.key_out, key, settings)))
    return all(
        n < 2 or a == b  # noqa: PLR2004
        for given, out in pairs
        for n, a, b in zip(given.shape, out.stride(), torch.empty_like(given, device="meta").stride(), strict=True)
    )


def _run(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    direct: DirectLaunch,
    device: int,
    makers: Sequence[Callable[[], torch.Tensor]],
    sines: int,
    limits: tuple[int, int],
    apart: tuple[int, int, int],
    public: Callable[..., Any],
) -> Callable[..., Any]:
    """The ``run`` of a plan that launches directly, with results that ``makers`` make.

    Call it only with tensors that have the dtype, shape, strides, device and 16-byte alignment of the call it was made
    for: the compiled code depends on all of them.
    """
    if spec.plain:
        return _plain(spec, direct, device, makers, sines, public)
    if spec.splits:
        return _split(spec, direct, device, makers, sines, limits, public)
    return _complete(spec, direct, device, makers, sines, limits, apart, public)


def _makers(spec: RopeSpec, x: torch.Tensor, key: torch.Tensor | None) -> tuple[Callable[[], torch.Tensor], ...]:
    """Functions that make the results of calls like that of x and key, without keeping these; none in place."""
    if spec.inplace:
        return ()
    if spec.splits:
        return tuple(maker(shape, x) for shape in spec.split_shapes(tuple(x.shape)))
    return tuple(maker_like(t) for t in (x, key) if t is not None)


def beside(x: torch.Tensor, key: torch.Tensor | None) -> tuple[int, int, int]:
    """(checked, nearest, furthest), in bytes from x to the key.

    At ``checked`` the two were found not to overlap. At other distances strictly between ``nearest`` and ``furthest``
    they may. Without a key: zeros.
    """
    if key is None:
        return 0, 0, 0
    spans = [
        (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size() for t in (x, key)
    ]
    return key.data_ptr() - x.data_ptr(), -spans[1], spans[0]


def _plain(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    direct: DirectLaunch,
    device: int,
    makers: Sequence[Callable[[], torch.Tensor]],
    sines: int,
    public: Callable[..., Any],
) -> Callable[..., Any]:
    run, function, head, programs, rest, stream_of, enter, leave = direct
    inplace, computes_sincos, packed = spec.inplace, spec.computes_sincos, spec.packed
    make: Any = makers[0] if makers else None

    def plan(  # noqa: PLR0913 - the arguments of Plan.run
        x: Any,
        key: Any,
        angles: Any,
        sin: Any,
        cu_seqlens: Any,
        positions: Any,
        offset: Any,
        addresses: tuple[int, ...],
        weights: Any = None,
    ) -> Any:
        if enter.calls or leave.calls:  # a profiler has hooks: only the public launcher calls them
            return public(x, key, angles, sin, cu_seqlens, positions, offset, addresses, weights)
        x_ptr, angles_ptr, *_ = addresses
        pointers: tuple[int, ...]
        if inplace:
            out = x
            pointers = (x_ptr, angles_ptr)
        else:
            out = make()
            pointers = (x_ptr, out.data_ptr(), angles_ptr)
        if not computes_sincos:
            pointers = (*pointers, angles_ptr + sines if sin is None else sin.data_ptr())
        if packed:
            pointers = (*pointers, cu_seqlens.data_ptr())
        run(programs, 1, 1, stream_of(device), function, *head, *pointers, *rest)
        if inplace:
            bump_versions(x)
        return out

    return plan


def _complete(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    direct: DirectLaunch,
    device: int,
    makers: Sequence[Callable[[], torch.Tensor]],
    sines: int,
    limits: tuple[int, int],
    apart: tuple[int, int, int],
    public: Callable[..., Any],
) -> Callable[..., Any]:
    run, function, head, programs, (_, *numbers), stream_of, enter, leave = direct
    rest, (low, high), (checked, nearest, furthest) = tuple(numbers), limits, apart
    inplace, two, computes_sincos = spec.inplace, spec.key_heads > 0, spec.computes_sincos
    make: Any = makers[0] if makers else None
    make_key: Any = makers[-1] if makers else None

    def plan(  # noqa: PLR0913 - the arguments of Plan.run
        x: Any,
        key: Any,
        angles: Any,
        sin: Any,
        cu_seqlens: Any,
        positions: Any,
        offset: Any,
        addresses: tuple[int, ...],
        weights: Any = None,
    ) -> Any:
        if enter.calls or leave.calls or not low <= offset <= high:
            return public(x, key, angles, sin, cu_seqlens, positions, offset, addresses, weights)
        x_ptr, angles_ptr, *others = addresses
        key_ptr = others[0] if two else x_ptr
        outs: tuple[int, ...] = ()
        key_outs: tuple[int, ...] = ()
        if not inplace:
            out = make()
            key_out = make_key() if two else out
            outs, key_outs = (out.data_ptr(),), (key_out.data_ptr(),)
        elif two and nearest < key_ptr - x_ptr < furthest and key_ptr - x_ptr != checked:
            # They may overlap: ``public`` checks.
            return public(x, key, angles, sin, cu_seqlens, positions, offset, addresses, weights)
        of_norm: tuple[int, ...] = ()
        if weights is not None:
            of_norm = others[-2 if two else -1], others[-1]
        sines_ptr = () if computes_sincos else (angles_ptr + sines if sin is None else sin.data_ptr(),)
        run(
            programs, 1, 1, stream_of(device), function, *head, x_ptr, *outs, angles_ptr, *sines_ptr,
            angles_ptr if cu_seqlens is None else cu_seqlens.data_ptr(), key_ptr, *key_outs,
            angles_ptr if positions is None else positions.data_ptr(), *of_norm, offset, *rest,
        )  # fmt: skip
        if inplace:
            bump_versions(x, key)
            return (x, key) if two else x
        return (out, key_out) if two else out

    return plan


def _split(  # noqa: PLR0913 - what the closure holds
    spec: RopeSpec,
    direct: DirectLaunch,
    device: int,
    makers: Sequence[Callable[[], torch.Tensor]],
    sines: int,
    limits: tuple[int, int],
    public: Callable[..., Any],
) -> Callable[..., Any]:
    """``_run`` of MLA: always out of place, and the results have other shapes than x and the key."""
    run, function, head, programs, (_, *numbers), stream_of, enter, leave = direct
    rest, (low, high), (make, make_key), computes_sincos = tuple(numbers), limits, makers, spec.computes_sincos

    def plan(  # noqa: PLR0913 - the arguments of Plan.run
        x: Any,
        key: Any,
        angles: Any,
        sin: Any,
        cu_seqlens: Any,
        positions: Any,
        offset: Any,
        addresses: tuple[int, ...],
        weights: Any = None,
    ) -> Any:
        if enter.calls or leave.calls or not low <= offset <= high:
            return public(x, key, angles, sin, cu_seqlens, positions, offset, addresses, weights)
        x_ptr, angles_ptr, key_ptr, *others = addresses
        out, key_out = make(), make_key()
        sines_ptr = () if computes_sincos else (angles_ptr + sines if sin is None else others[0],)
        run(
            programs, 1, 1, stream_of(device), function, *head, x_ptr, out.data_ptr(), angles_ptr, *sines_ptr,
            angles_ptr if cu_seqlens is None else cu_seqlens.data_ptr(), key_ptr, key_out.data_ptr(),
            angles_ptr if positions is None else positions.data_ptr(), offset, *rest,
        )  # fmt: skip
        return out, key_out

    return plan
