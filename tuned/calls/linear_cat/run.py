"""Run a linear over segments with kernels.

A repeated call, one whose properties were seen before, costs building one key, one dictionary lookup of its plan and the
launch: ``known``. Plans keep none of the caller's tensors alive: they hold numbers, kernels and settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from tuned.calls.products import MAX_ELEMENTS, name_of, precision_of, rows_of, used, weight_of
from tuned.families.linear_cat import FAMILY as LINEAR_CAT
from tuned.families.linear_cat.launches import LinearCatCall, launches, pads_sides
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.padded import pads_of
from tuned.families.products import CALLED_ROWS, DTYPES, MAX_SEGMENTS, as_called, joined
from tuned.launching import alike, left
from tuned.launching.copies import padded_by
from tuned.launching.launcher import run_publicly
from tuned.launching.overwrite import apart
from tuned.launching.plan import (
    NO_KEY,
    DirectLaunch,
    capturing,
    current_device,
    listeners,
    maker,
    modes,
    of_calls_alone,
    run_and_keep,
    traits,
)
from tuned.launching.rehearsal import HERE, NotedError, note_left
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice

_PLANS: dict[Any, Any] = {}  # key of a call -> (addresses, inputs, weight, bias) -> y
HOST_US = 15.0  # host time of a cat and a linear by PyTorch; 19 to 34 on the hosts of H200s that were measured
MOMENTS = misses.Moments(LINEAR_CAT, as_called(LINEAR_CAT, HOST_US, CALLED_ROWS))
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_cat: Any = torch.cat  # of a list or a tuple
_linear = torch.nn.functional.linear


def why_not(inputs: Sequence[torch.Tensor], weight: torch.Tensor) -> str | None:
    """Why no kernel serves a checked call, or None."""
    reason = why_eager(weight, name_of(weight.dtype) in DTYPES)
    if reason is not None:
        return reason
    if weight.numel() == 0 or inputs[0].shape[:-1].numel() == 0:
        return "there is nothing to compute: an axis is empty"
    if len(used(inputs)) == 1:
        return "a linear over one segment is a plain GEMM, which the library serves"
    return None if weight.numel() < MAX_ELEMENTS else f"the kernels take weights of less than {MAX_ELEMENTS} elements"


def _spec_of(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: Any) -> tuple[LinearCatSpec, LinearCatSize]:
    widths = tuple(t.shape[-1] for t in used(inputs))
    spec = LinearCatSpec(name_of(weight.dtype), widths, weight.shape[0], bias is not None, precision_of(weight.dtype))
    return spec, LinearCatSize(inputs[0].shape[:-1].numel())


def choice_of(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: Any) -> tuple[Choice, LinearCatSpec]:
    """The choice for a call that ``why_not`` accepts, and its spec; nothing runs."""
    spec, size = _spec_of(inputs, weight, bias)
    return MOMENTS.choice_of(spec, size, gpu_of(weight.device), capturing(weight)), spec


def _key(inputs: Any, weight: Any, bias: Any) -> Any:
    """All that a compiled kernel, or the path to it, may depend on.

    None if a gradient may be needed, or if a launch would bypass torch.func, tracing or dispatch modes.
    """
    if _grad_enabled() and (  # _needs_gradient, written out
        weight.requires_grad or any(t.requires_grad for t in inputs) or (bias is not None and bias.requires_grad)
    ):
        return None
    mode = modes(weight.get_device())
    if mode is None:
        return None
    x = tuple([traits(t) for t in inputs])
    return mode, precision_of(weight.dtype), x, traits(weight), bias if bias is None else traits(bias)


def _needs_gradient(inputs: Any, weight: Any, bias: Any) -> bool:
    return _grad_enabled() and (
        weight.requires_grad or any(t.requires_grad for t in inputs) or (bias is not None and bias.requires_grad)
    )


def sizes(inputs: Any, bias: Any) -> tuple[Any, ...]:
    """The key, beside the weight, of a call that PyTorch's operators serve."""
    return bias if bias is None else (bias.shape, bias.dtype), tuple([(t.shape, t.dtype, t.device) for t in inputs])


def _is_left(inputs: Any, weight: Any, bias: Any) -> bool:
    of_call, alike_by = sizes(inputs, bias), (("linear", len(inputs), _grad_enabled()), (*inputs, weight, bias))
    if left.is_left(weight, of_call, *alike_by):
        return True
    return _needs_gradient(inputs, weight, bias) and left.is_left(weight, (left.GRADIENT, of_call), *alike_by)


def known(inputs: Any, weight: Any, bias: Any) -> Any:
    """The result, without checks, of a call with the properties of one that ``run_linear_cat`` served; None for any other."""
    try:
        was_left, count = left.LEFT.get(id(weight)), len(inputs)
        shape = inputs[0].shape  # a nested tensor fails here: at it, ``alike`` would end the process
        # ``_is_left`` and what follows, written out for speed.
        if was_left is not None and HERE.heard is None:
            for are_alike, captured in was_left.alike.get(("linear", count, _grad_enabled()), ()):
                if are_alike(*inputs, weight, bias) and (captured or not torch.cuda.is_current_stream_capturing()):
                    return _linear(inputs[0] if count == 1 else _cat(inputs, -1), weight, bias)
        device = weight.get_device()
        near = (
            count, shape, _autocast(), precision_of(weight.dtype), _grad_enabled(),
            device if device < 0 else current_device(), forward_ad._current_level, listeners(),  # noqa: SLF001
        )  # fmt: skip
        for are_alike, plan in _PLANS.get(near, ()):  # noqa: B007 - the plan is used below
            if addresses := are_alike(*inputs, weight, bias):
                break
        else:
            if was_left is not None and _is_left(inputs, weight, bias):
                return eager(inputs, weight, bias)
            plan = _PLANS.get(_key(inputs, weight, bias))
            if plan is None:
                return None
            alike.learn(_PLANS, near, (*inputs, weight, bias), plan)
            addresses = _addresses(inputs, weight, bias)
    except (*NO_KEY, LookupError):  # no segments
        return None
    return plan(addresses, inputs, weight, bias)


def _addresses(inputs: Any, weight: Any, bias: Any) -> tuple[int, ...]:
    return tuple([t.data_ptr() for t in (*inputs, weight, *(() if bias is None else (bias,)))])


def eager(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear over all segments by PyTorch's own operators, differentiable: ``[..., n]``."""
    return torch.nn.functional.linear(joined(inputs), weight, bias)


def run_linear_cat(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A checked call that needs no gradient: inputs ``[..., k_i]`` to ``[..., outputs]``. ``known`` serves later calls like it."""
    variant, always, reason = None, True, why_not(inputs, weight)
    if reason is None:
        spec, size = _spec_of(inputs, weight, bias)
        variant, always = MOMENTS.variant_of(spec, size, gpu_of(weight.device), capturing(weight))
    if variant is None:
        note_left("linear_cat", inputs[0], reason or "PyTorch's own is thought to take less")
        if always:
            left.leave(weight, sizes(inputs, bias))
        return eager(inputs, weight, bias)
    call = prepared(inputs, weight, bias)
    public = functools.partial(_public, spec, variant)
    made = maker((*inputs[0].shape[:-1], spec.outputs), weight)
    make: Any = functools.partial(_direct_plan, made, spec, weight.device.index, public)
    if variant.pads:
        make = functools.partial(_padded_plan, made, call, public)
    if not always:
        make, public = of_calls_alone(make, public)
    taken = (*call.segments, call.weight, call.bias)
    steps, key = launches(spec, variant, call), _key(inputs, weight, bias)
    try:
        run_and_keep(steps, _PLANS, key, make, public, taken, _tensors, (), inputs, weight, bias)
    except NotedError:
        return eager(inputs, weight, bias)
    return apart(call.out.view(*inputs[0].shape[:-1], spec.outputs))


def _tensors(_addresses: Any, inputs: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    """The tensors among the arguments of a plan."""
    return (*inputs, weight, bias)


def prepared(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> LinearCatCall:
    """The arguments of the kernel: 2D tensors with contiguous rows, copied if needed, and an output that is not filled."""
    segments = tuple(rows_of(t.reshape(-1, t.shape[-1])) for t in used(inputs))
    out = weight.new_empty((segments[0].shape[0], weight.shape[0]))
    return LinearCatCall.of(segments, weight_of(weight), out, *(() if bias is None else (bias.contiguous(),)))


def _public(spec: LinearCatSpec, variant: Any, _addresses: Any, inputs: Any, weight: Any, bias: Any) -> Any:
    """The plan of a call that must use Triton's public launcher."""
    call = prepared(inputs, weight, bias)
    try:
        run_publicly(launches(spec, variant, call), weight.get_device())
    except NotedError:
        return eager(inputs, weight, bias)
    return apart(call.out.view(*inputs[0].shape[:-1], spec.outputs))


def _direct_plan(
    made: Callable[[], torch.Tensor], spec: LinearCatSpec, device: int, public: Any, direct: DirectLaunch
) -> Any:
    """A plan like ``public`` that launches directly; ``made()`` is a result that is not filled."""
    run, function, head, programs, rest, stream_of, enter, leave = direct
    segments, missing = len(spec.inputs), MAX_SEGMENTS - len(spec.inputs)

    def plan(addresses: Any, inputs: Any, weight: Any, bias: Any) -> Any:
        if enter.calls or leave.calls:  # a profiler has hooks: only the public launcher calls them
            return public(addresses, inputs, weight, bias)
        out = made()
        p_weight = addresses[segments]
        run(
            programs, 1, 1, stream_of(device), function, *head,
            *addresses[:segments], *(p_weight,) * missing, p_weight, addresses[-1], out.data_ptr(), *rest,
        )  # fmt: skip
        return out

    return plan


def _padded_plan(made: Callable[[], torch.Tensor], call: LinearCatCall, public: Any, direct: DirectLaunch) -> Any:
    """A plan like ``_direct_plan``'s that first copies inputs and weight, with padded rows."""
    run, function, head, programs, rest, stream_of, enter, leave = direct
    device, biased = call.weight.device.index, call.bias is not None
    found = padded_by(pads_of(pads_sides(call)), call.weight)
    if found is None:
        return public
    pad, (places,) = found
    assert places is not None
    at_x, at_weight = places

    def plan(addresses: Any, inputs: Any, weight: Any, bias: Any) -> Any:
        if enter.calls or leave.calls:
            return public(addresses, inputs, weight, bias)
        out = made()
        memory = pad(addresses)
        base = memory.data_ptr()
        p_weight = base + at_weight
        run(
            programs, 1, 1, stream_of(device), function, *head,
            base + at_x, *(p_weight,) * MAX_SEGMENTS, addresses[-1] if biased else p_weight, out.data_ptr(), *rest,
        )  # fmt: skip
        return out

    return plan
