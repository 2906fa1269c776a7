"""Run one GRU step with kernels.

A repeated step, one whose properties were seen before, costs building one key, one dictionary lookup of its plan and the
launch: ``known``. Plans keep none of the caller's tensors alive: they hold numbers, kernels and settings.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tuned.calls.products import MAX_ELEMENTS, name_of, precision_of, rows_of, used, weight_of
from tuned.families.gru_cell import FAMILY as GRU_CELL
from tuned.families.gru_cell.launches import GruCellCall, copies_of
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import spends
from tuned.families.padded import Pads
from tuned.families.products import DTYPES, MAX_SEGMENTS, as_called, joined
from tuned.launching import alike, left
from tuned.launching.copies import padded_by
from tuned.launching.launcher import run_publicly
from tuned.launching.overwrite import bump_versions
from tuned.launching.plan import (
    NO_KEY,
    DirectLaunch,
    capturing,
    current_device,
    listeners,
    maker,
    of_calls_alone,
    run_and_keep,
    tracing,
    traits,
    transforms_active,
)
from tuned.launching.rehearsal import HERE, NotedError, note_left
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice

_PLANS: dict[Any, Any] = {}  # key of a call -> (addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh) -> h'
_FLOAT32 = torch.float32
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_cat: Any = torch.cat
_gru_cell = torch.gru_cell  # not torch._VF's: that is what tuned.nn.patched replaces, and it would call back here
_linear = torch.nn.functional.linear
HOST_US = 25.0  # host time of torch.gru_cell; 35 to 64 on the hosts of H200s that were measured
MOMENTS = misses.Moments(GRU_CELL, dataclasses.replace(as_called(GRU_CELL, HOST_US), spends=spends))


def _spec_of(
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    bias: Any,
    inplace: bool,  # noqa: FBT001
) -> tuple[GruCellSpec, GruCellSize]:
    widths = tuple(t.shape[1] for t in used(segments))
    spec = GruCellSpec(name_of(h.dtype), h.shape[1], widths, bias is not None, inplace, precision_of(h.dtype))
    return spec, GruCellSize(h.shape[0])


def why_not(segments: Sequence[torch.Tensor], h: torch.Tensor) -> str | None:
    """Why no kernel serves a checked step, or None."""
    reason = why_eager(h, name_of(h.dtype) in DTYPES)
    if reason is None and (h.numel() == 0 or not used(segments)):
        return "there is nothing to compute: an axis is empty"
    if reason is None and 3 * h.shape[1] * max(h.shape[1], sum(t.shape[1] for t in segments)) >= MAX_ELEMENTS:
        return f"the kernels take weights of less than {MAX_ELEMENTS} elements"
    return reason


def choice_of(
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    bias: Any,
    inplace: bool,  # noqa: FBT001
) -> tuple[Choice, GruCellSpec]:
    """The choice for a step that ``why_not`` accepts, and its spec; nothing runs."""
    spec, size = _spec_of(segments, h, bias, inplace)
    return MOMENTS.choice_of(spec, size, gpu_of(h.device), capturing(h)), spec


def prepared(  # noqa: PLR0913 - the tensors of the public call
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
    inplace: bool,  # noqa: FBT001
) -> GruCellCall:
    """The arguments of the kernels: tensors with contiguous rows, copied if needed, and an output that is not filled."""
    biases = () if bias_ih is None or bias_hh is None else (bias_ih.contiguous(), bias_hh.contiguous())
    state = h if inplace else rows_of(h)  # in place, form "library" takes any strides
    out = h if inplace else torch.empty_like(h, memory_format=torch.contiguous_format)
    x = tuple(map(rows_of, used(segments)))
    return GruCellCall.of(x, state, weight_of(weight_ih), weight_of(weight_hh), out, *biases)


def _key(  # noqa: PLR0913
    x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any, inplace: Any
) -> tuple[Any, tuple[int, ...]] | None:
    """(all that a compiled kernel, or the path to it, may depend on; the addresses of the tensors given).

    None if a gradient may be needed, or if a launch would bypass torch.func, tracing or dispatch modes. x is a tensor, or
    a tuple of several.
    """
    if forward_ad._current_level >= 0 or transforms_active() or tracing() is not None or listeners():  # noqa: SLF001
        return None
    biased = bias_ih is not None
    if not biased and bias_hh is not None:
        return None
    segments = x if type(x) is tuple else (x,)
    tensors = (*segments, h, weight_ih, weight_hh, *((bias_ih, bias_hh) if biased else ()))
    if _grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    device, precise = h.get_device(), h.dtype is _FLOAT32 and precision_of(_FLOAT32)
    place = device if device < 0 else current_device()
    addresses = tuple([t.data_ptr() for t in tensors])
    key = inplace, _autocast(), place, precise, len(segments), *map(traits, tensors)
    return key, addresses


def sizes(x: Any, inplace: Any, h: Any, *weights: Any) -> tuple[Any, ...]:
    """The key of a step that torch.gru_cell serves."""
    # With layouts: torch.gru_cell takes a sparse x and sparse weights, which we refuse.
    of_x = (
        tuple([(t.shape, t.dtype, t.device, t.layout) for t in x]) if type(x) is tuple else (x.shape, x.dtype, x.layout)
    )
    # In place with its strides: an h whose elements share memory is refused.
    of_h = (h.shape, h.stride()) if inplace else h.shape
    return of_x, inplace, of_h, h.dtype, *[w if w is None else (w.shape, w.dtype, w.layout) for w in weights]


def is_left(x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any) -> bool:  # noqa: PLR0913
    """Whether torch.gru_cell served a step of these sizes before, of one segment and not in place, and so serves this one."""
    given = h, weight_ih, weight_hh, bias_ih, bias_hh
    was_left = left.LEFT.get(id(weight_ih))
    if was_left is None:
        return False
    if HERE.heard is None:
        for are_alike, captured in was_left.alike.get(("cell", 1, _grad_enabled()), ()):
            if are_alike(x, h, weight_ih, weight_hh, bias_ih, bias_hh) and (
                captured or not torch.cuda.is_current_stream_capturing()
            ):
                return True
    return left.is_left(weight_ih, sizes(x, False, *given), ("cell", 1, _grad_enabled()), (x, *given))  # noqa: FBT003


def _needs_gradient(x: Any, others: tuple[Any, ...]) -> bool:
    segments = x if type(x) is tuple else (x,)
    return _grad_enabled() and any(t is not None and t.requires_grad for t in (*others, *segments))


def _is_left(x: Any, given: tuple[Any, ...], inplace: bool) -> bool:  # noqa: FBT001
    weight_ih, of_call = given[1], sizes(x, inplace, *given)
    segments = x if type(x) is tuple else (x,)
    # Comparing tensors does not tell whether the step is in place.
    alike_by = (None, ()) if inplace else (("cell", len(segments), _grad_enabled()), (*segments, *given))
    if left.is_left(weight_ih, of_call, *alike_by):
        return True
    return _needs_gradient(x, given) and left.is_left(weight_ih, (left.GRADIENT, of_call), *alike_by)


def known(  # noqa: PLR0913 - the arguments of the public call
    x: Any,
    h: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
    inplace: bool,  # noqa: FBT001
) -> Any:
    """The next state, without checks, of a step with the properties of one that ``run_cell`` served; None for any other."""
    try:
        if type(x) is tuple and len(x) == 1:
            x = x[0]
        segments = x if type(x) is tuple else (x,)
        count, was_left = len(segments), None if inplace and _grad_enabled() else left.LEFT.get(id(weight_ih))
        shape = segments[0].shape  # a nested tensor fails here: at it, ``alike`` would end the process
        # ``_is_left`` and what follows, written out for speed.
        if was_left is not None and not inplace and HERE.heard is None:
            for are_alike, captured in was_left.alike.get(("cell", count, _grad_enabled()), ()):
                if are_alike(*segments, h, weight_ih, weight_hh, bias_ih, bias_hh) and (
                    captured or not torch.cuda.is_current_stream_capturing()
                ):
                    return _gru_cell(x if count == 1 else _cat(segments, -1), h, weight_ih, weight_hh, bias_ih, bias_hh)
        device, given = h.get_device(), (h, weight_ih, weight_hh, bias_ih, bias_hh)
        near = (
            shape, count, inplace, _autocast(), h.dtype is _FLOAT32 and precision_of(_FLOAT32), _grad_enabled(),
            device if device < 0 else current_device(), forward_ad._current_level, listeners(),  # noqa: SLF001
        )  # fmt: skip
        for are_alike, plan in _PLANS.get(near, ()):  # noqa: B007 - the plan is used below
            if addresses := are_alike(*segments, h, weight_ih, weight_hh, bias_ih, bias_hh):
                break
        else:
            if was_left is not None and _is_left(x, given, inplace):
                return _by_torch(segments, given, inplace)
            found = _key(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
            plan = None if found is None else _PLANS.get(found[0])
            if plan is None or found is None:
                return None
            alike.learn(_PLANS, near, (*segments, *given), plan)
            addresses = found[1]
    except (*NO_KEY, LookupError):  # no segments
        return None
    return plan(addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh)


def eager(segments: Sequence[torch.Tensor], *others: Any) -> torch.Tensor:
    """One step by PyTorch's own operators, differentiable; ``others`` are h, the weights and the biases."""
    return _gru_cell(joined(segments), *others)


def run_cell(  # noqa: PLR0913 - the tensors of the public call
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
    *,
    inplace: bool,
) -> torch.Tensor:
    """One checked step that needs no gradient: the next state, or h itself in place. ``known`` serves later steps like it."""
    given = (h, weight_ih, weight_hh, bias_ih, bias_hh)
    x = segments[0] if len(segments) == 1 else tuple(segments)
    key, addresses = _key(x, *given, inplace) or (None, None)
    variant, always, reason = None, True, why_not(segments, h)
    if reason is None:
        spec, size = _spec_of(segments, h, bias_ih, inplace)
        variant, always = MOMENTS.variant_of(spec, size, gpu_of(h.device), capturing(h))
    if variant is None:
        note_left("gru_cell", h, reason or "PyTorch's own is thought to take less")
        if always:
            left.leave(weight_ih, sizes(x, inplace, *given))
        return _by_torch(segments, given, inplace)
    call = prepared(segments, *given, inplace)
    public = functools.partial(_public, spec, variant)
    make: Any = functools.partial(_library_plan if variant.form == "library" else _fused_plan, call, public)
    if variant.pads:
        plan = _padded_library_plan if variant.by_library else _padded_plan
        make = functools.partial(plan, copies_of(variant, call), call, public)
    if not always:
        make, public = of_calls_alone(make, public)
    taken = (*call.segments, call.h, call.weight_ih, call.weight_hh, call.bias_ih, call.bias_hh)
    steps = GRU_CELL.launches(spec, variant, call)
    try:
        run_and_keep(steps, _PLANS, key, make, public, taken, _tensors, addresses, x, *given)
    except NotedError:
        return _by_torch(segments, given, inplace)
    return call.out  # type: ignore[no-any-return]


def _by_torch(segments: Sequence[torch.Tensor], given: tuple[Any, ...], inplace: bool) -> torch.Tensor:  # noqa: FBT001
    """``run_cell`` by PyTorch's own operators."""
    out = eager(segments, *given)
    return given[0].copy_(out) if inplace else out  # type: ignore[no-any-return]


def _tensors(_addresses: Any, x: Any, *others: Any) -> tuple[Any, ...]:
    """The tensors among the arguments of a plan."""
    return (*(x if isinstance(x, tuple) else (x,)), *others)


def _public(  # noqa: PLR0913
    spec: GruCellSpec,
    variant: Any,
    _addresses: Any,
    x: Any,
    h: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
) -> Any:
    """The plan of a step that must use Triton's public launcher."""
    segments, given = x if isinstance(x, tuple) else (x,), (h, weight_ih, weight_hh, bias_ih, bias_hh)
    call = prepared(segments, *given, spec.inplace)
    try:
        run_publicly(GRU_CELL.launches(spec, variant, call), h.get_device())
    except NotedError:
        return _by_torch(segments, given, spec.inplace)
    if spec.inplace:
        bump_versions(h)
    return call.out


def _fused_plan(call: GruCellCall, public: Any, direct: DirectLaunch) -> Any:
    device = call.h.device.index
    run, function, head, programs, rest, stream_of, enter, leave = direct
    fresh = maker(call.h.shape, call.h)
    # The kernel's signature has all segments and both biases, given or not.
    at, biased = len(call.segments), call.bias_ih is not None
    order = (
        *range(at),
        *(at,) * (MAX_SEGMENTS - at),
        at,
        at + 1,
        at + 2,
        *((at + 3, at + 4) if biased else (at + 1, at + 2)),
    )
    ordered = operator.itemgetter(*order)

    def plan(  # noqa: PLR0913
        addresses: Any, x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
    ) -> Any:
        if enter.calls or leave.calls:  # a profiler has hooks: only the public launcher calls them
            return public(addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh)
        out = fresh()
        run(programs, 1, 1, stream_of(device), function, *head, *ordered(addresses), out.data_ptr(), *rest)
        return out

    return plan


def _order_of_sides(segments: int) -> Any:
    """A function from the addresses of a step's tensors to those of what is copied, in the order of ``pads_sides``."""
    return operator.itemgetter(*range(segments), segments + 1, segments, segments + 2)


def _padded_plan(pads: Pads, call: GruCellCall, public: Any, direct: DirectLaunch) -> Any:
    device, fresh, at, biased = (
        call.h.device.index,
        maker(call.h.shape, call.h),
        len(call.segments),
        call.bias_ih is not None,
    )
    run, function, head, programs, rest, stream_of, enter, leave = direct
    found = padded_by(pads, call.h)
    if found is None:
        return public
    pad, (of_x, of_h) = found
    in_order = _order_of_sides(at)

    def plan(  # noqa: PLR0913
        addresses: Any, x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
    ) -> Any:
        if enter.calls or leave.calls:
            return public(addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh)
        out, memory = fresh(), pad(in_order(addresses))
        base = memory.data_ptr()
        segments, p_ih = (addresses[:at], addresses[at + 1]) if of_x is None else ((base + of_x[0],), base + of_x[1])
        p_h, p_hh = (addresses[at], addresses[at + 2]) if of_h is None else (base + of_h[0], base + of_h[1])
        biases = addresses[at + 3 : at + 5] if biased else (p_ih, p_hh)
        run(
            programs, 1, 1, stream_of(device), function, *head,
            *segments, *(p_h,) * (MAX_SEGMENTS - len(segments)), p_h, p_ih, p_hh, *biases, out.data_ptr(), *rest,
        )  # fmt: skip
        return out

    return plan


def _library_plan(call: GruCellCall, public: Any, direct: DirectLaunch) -> Any:
    device, inplace = call.h.device.index, call.out is call.h
    run, function, head, programs, rest, stream_of, enter, leave = direct
    single, biased, cat, fresh = call.x1 is None, call.bias_ih is not None, torch.cat, maker(call.h.shape, call.h)

    def plan(  # noqa: PLR0913
        addresses: Any, x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
    ) -> Any:
        if enter.calls or leave.calls:
            return public(addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh)
        out = h if inplace else fresh()
        of_x, of_h = _linear(x if single else cat(x, -1), weight_ih), _linear(h, weight_hh)
        biases = addresses[-2:] if biased else ()
        states = (h.data_ptr(),) if inplace else (h.data_ptr(), out.data_ptr())
        addresses = (of_x.data_ptr(), of_h.data_ptr(), *biases, *states)
        run(programs, 1, 1, stream_of(device), function, *head, *addresses, *rest)
        if inplace:
            bump_versions(h)
        return out

    return plan


def _padded_library_plan(pads: Pads, call: GruCellCall, public: Any, direct: DirectLaunch) -> Any:
    """A plan like ``_library_plan``'s, out of place, that first copies inputs and weights, with padded rows."""
    run, function, head, programs, rest, stream_of, enter, leave = direct
    device, fresh, at, biased = (
        call.h.device.index,
        maker(call.h.shape, call.h),
        len(call.segments),
        call.bias_ih is not None,
    )
    found = padded_by(pads, call.h)
    if found is None:
        return public
    pad, (of_x, of_h) = found[0], pads.operands
    in_order = _order_of_sides(at)

    def plan(  # noqa: PLR0913
        addresses: Any, x: Any, h: Any, weight_ih: Any, weight_hh: Any, bias_ih: Any, bias_hh: Any
    ) -> Any:
        if enter.calls or leave.calls:
            return public(addresses, x, h, weight_ih, weight_hh, bias_ih, bias_hh)
        out, memory = fresh(), pad(in_order(addresses))
        if of_x is None:
            gates_x = _linear(x if at == 1 else _cat(x, -1), weight_ih)
        else:
            gates_x = _linear(of_x[0].of(memory), of_x[1].of(memory))
        gates_h = _linear(h, weight_hh) if of_h is None else _linear(of_h[0].of(memory), of_h[1].of(memory))
        biases = addresses[-2:] if biased else ()
        run(
            programs, 1, 1, stream_of(device), function, *head,
            gates_x.data_ptr(), gates_h.data_ptr(), *biases, addresses[at], out.data_ptr(), *rest,
        )  # fmt: skip
        return out

    return plan
