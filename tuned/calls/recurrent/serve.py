"""What serves a checked call, a kernel or PyTorch's own operators, and why no kernel does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tuned.calls.gru import eager, plan, run, training
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.calls.gru_cell import run as cell_run
from tuned.calls.gru_cell.arguments import checked_cell, reset_rows
from tuned.calls.linear_cat import run as linear_run
from tuned.calls.linear_cat import training as linear_training
from tuned.calls.linear_cat.arguments import check_linear_cat
from tuned.calls.products import autocast_dtype
from tuned.launching import left, library
from tuned.launching.plan import bypassed, left_alone, listeners
from tuned.launching.rehearsal import NotedError, note_left
from tuned.lookup.gpu import LAZY, PLAIN, why_eager, why_not_plain
from tuned.lookup.lookup import Choice

GRADIENT = "a gradient is needed, which PyTorch's own operators compute; if not, call under torch.no_grad()"


def why_torch(tensors: Sequence[torch.Tensor], *, gradients: bool = False) -> str | None:
    """Why PyTorch's operators serve these tensors, whatever kernels there are, or None. ``gradients``: kernels compute gradients."""
    reason = why_eager(tensors[0], supported_dtype=True)
    if reason is not None:
        return reason
    for t in tensors:
        if (reason := why_not_plain(t)) is not None:
            return reason
        if t.is_neg() or t.is_conj():
            return LAZY
    if not gradients and needs_gradient(tensors):
        return GRADIENT
    if autocast_dtype(tensors[0].device.type) is not None and any(t.dtype == torch.float64 for t in tensors):
        return "no kernel takes float64, and autocast does not cast it"
    return bypassed()


def needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd records what is computed of these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def by_operator(tensors: Sequence[torch.Tensor | None], *, reads: bool = False) -> bool:
    """Whether a checked call runs as an operator of torch.library: under torch.compile and under dispatch modes.

    A launch would bypass a mode, which would then record memory that nothing has written. Tensors on a CPU are served by
    PyTorch's own operators, unless ``reads``. So are calls under torch.export, whose programs run without this package, and calls
    under transforms of torch.func, which our operators do not support.

    ``reads``: PyTorch's operators read values, such as those of lengths and resets, which a tracer would take for constants. So the
    call runs as our operator on a CPU too.
    """
    if torch.compiler.is_dynamo_compiling():
        return not left_alone()
    if not listeners() or left_alone():
        return False
    return all(
        t is None or ((t.is_cuda or reads) and (type(t) in PLAIN or _stands_for_a_plain_one(t))) for t in tensors
    )


def _stands_for_a_plain_one(t: torch.Tensor) -> bool:
    """Whether a tensor is of a class that tracers use in place of plain tensors."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415 - private modules, which only this needs
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

    return type(t) in (FakeTensor, FunctionalTensor)


def _as_cast(call: GruCall) -> tuple[GruCall, bool]:
    """(the call with its tensors cast as PyTorch's autocast casts them, whether autocast is on)."""
    dtype = autocast_dtype(call.input.device.type)
    if dtype is None:
        return call, False
    weights = tuple(w.to(dtype) for w in call.weights)
    return dataclasses.replace(call, input=call.input.to(dtype), hx=call.hx.to(dtype), weights=weights), True


def gru(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) of a checked call."""
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces PyTorch's operators
        return eager.gru(call)
    reason = why_torch(call.tensors, gradients=True)
    if reason is None:
        library.set_up(call.input.device, gradients=needs_gradient(call.tensors))
        cast, casts = _as_cast(call)
        by: Any = training if needs_gradient(call.tensors) else run
        cast = by.wide(cast)
        reason = by.why_not(cast)
        # The tensors are cast: autocast must not cast them again inside.
        autocast = torch.autocast(call.input.device.type, enabled=False) if casts else contextlib.nullcontext()
        if reason is None:
            with contextlib.suppress(NotedError), autocast:
                return by.forward(cast)  # type: ignore[no-any-return]
        elif by.pads_pytorch(cast):
            note_left("gru", call.input, reason)
            with autocast:
                return by.padded_pytorch(cast)  # type: ignore[no-any-return]
        elif not casts:
            by.remember_eager(call)
    elif why_eager(call.input, supported_dtype=True) is not None:
        for gradient in (False, True):
            plan.leave(call, captured=True, gradient=gradient)
    if reason is not None:
        note_left("gru", call.input, reason)
    return eager.gru(call)


def gru_cell(  # noqa: PLR0913 - the arguments of the public call
    segments: Sequence[torch.Tensor],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None,
    bias_hh: torch.Tensor | None,
    *,
    inplace: bool,
) -> torch.Tensor:
    """One checked step: the next state ``[batch, hidden]``, or h itself in place."""
    tensors = present(*segments, h, weight_ih, weight_hh, bias_ih, bias_hh)
    dtype = autocast_dtype(h.device.type)
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces PyTorch's operators
        out = cell_run.eager(segments, h, weight_ih, weight_hh, bias_ih, bias_hh)
    elif (reason := why_torch(tensors)) is not None:
        note_left("gru_cell", h, reason)
        inputs = segments[0] if len(segments) == 1 else tuple(segments)
        of_call = cell_run.sizes(inputs, inplace, h, weight_ih, weight_hh, bias_ih, bias_hh)
        if why_eager(h, supported_dtype=True) is not None:
            left.leave(weight_ih, of_call)
        elif reason is GRADIENT:
            left.leave(weight_ih, (left.GRADIENT, of_call))
        out = cell_run.eager(segments, h, weight_ih, weight_hh, bias_ih, bias_hh)
    else:
        library.set_up(h.device)
        if dtype is None:
            return cell_run.run_cell(segments, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace=inplace)
        x = [t.to(dtype) for t in segments]
        others: list[Any] = [None if t is None else t.to(dtype) for t in (h, weight_ih, weight_hh, bias_ih, bias_hh)]
        with torch.autocast(h.device.type, enabled=False):  # the tensors are cast: autocast must not cast them again
            out = cell_run.run_cell(x, *others, inplace=False)
    return h.copy_(out) if inplace else out


def linear_cat(inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear over all segments, ``[..., n]``."""
    if torch.compiler.is_dynamo_compiling():  # Dynamo traces PyTorch's operators
        return linear_run.eager(inputs, weight, bias)
    tensors = present(*inputs, weight, bias)
    if (reason := why_torch(tensors, gradients=linear_training.pays(weight))) is not None:
        note_left("linear_cat", inputs[0], reason)
        if why_eager(weight, supported_dtype=True) is not None:
            left.leave(weight, linear_run.sizes(inputs, bias))
        elif reason is GRADIENT:  # in a CUDA graph a kernel may still serve
            left.leave(weight, (left.GRADIENT, linear_run.sizes(inputs, bias)), captured=False)
        return linear_run.eager(inputs, weight, bias)
    library.set_up(weight.device, gradients=needs_gradient(tensors))
    dtype = autocast_dtype(weight.device.type)
    by: Any = _linear_with_gradient if needs_gradient(tensors) else linear_run.run_linear_cat
    if dtype is None:
        return by(inputs, weight, bias)  # type: ignore[no-any-return]
    with torch.autocast(weight.device.type, enabled=False):  # the tensors are cast: autocast must not cast them again
        cast = [t.to(dtype) for t in inputs]
        return by(cast, weight.to(dtype), None if bias is None else bias.to(dtype))


def _linear_with_gradient(
    inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if (reason := linear_training.why_not(inputs, weight, bias)) is None:
        return linear_training.forward(inputs, weight, bias)
    note_left("linear_cat", inputs[0], reason)
    return linear_run.eager(inputs, weight, bias)


def present(*tensors: Any) -> list[torch.Tensor]:
    """The tensors that are not None."""
    return [t for t in tensors if t is not None]


def explain_gru(*args: Any, **kwargs: Any) -> tuple[Choice, tuple[str, ...]]:
    """The choice for a call of tuned.dispatch.gru with these arguments, and the kernels that it would launch; nothing runs."""
    call = gru_call(*args, **kwargs)
    reason = why_torch(call.tensors, gradients=True)
    cast = call if reason else _as_cast(call)[0]
    by: Any = training if needs_gradient(call.tensors) else run
    cast = cast if reason else by.wide(cast)
    reason = reason or by.why_not(cast)
    return (Choice("eager", reason, None), ()) if reason else by.choice_of(cast)


def explain_gru_cell(*args: Any, **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of tuned.dispatch.gru_cell with these arguments, and its spec; no kernel runs."""
    names = ("x", "h", "weight_ih", "weight_hh", "bias_ih", "bias_hh")
    given = {**dict.fromkeys(names), "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    resets = given.pop("resets", None)
    segments, (h, *weights) = checked_cell(**given)
    if resets is not None:
        reset_rows(h, resets)
    dtype = autocast_dtype(h.device.type)
    state = h if dtype is None else h.to(dtype)
    if reason := why_torch(present(*segments, h, *weights)) or cell_run.why_not(segments, state):
        return Choice("eager", reason, None), None
    over = given["inplace"] and dtype is None and resets is None  # else the result is copied over h
    return cell_run.choice_of(segments, state, given["bias_ih"], over)


def explain_linear_cat(inputs: Any, weight: Any, bias: Any = None) -> tuple[Choice, Any]:
    """The choice for a call of tuned.dispatch.linear_cat with these arguments, and its spec; no kernel runs."""
    check_linear_cat(inputs, weight, bias)
    dtype = autocast_dtype(weight.device.type)
    cast = weight if dtype is None else weight.to(dtype)
    reason = why_torch(present(*inputs, weight, bias), gradients=linear_training.pays(weight))
    if reason := reason or linear_run.why_not(inputs, cast):
        return Choice("eager", reason, None), None
    return linear_run.choice_of(inputs, cast, bias)
