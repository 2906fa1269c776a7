"""Operators of torch.library: ``tuned::gru``, ``tuned::gru_cell``, ``tuned::linear_cat``.

torch.compile and dispatch modes see these operators; other calls do not use them. On a CPU a mode sees ``tuned::gru`` alone,
and only where lengths or resets are given.

For one layer ``tuned::gru_backward`` computes gradients from the saved output, as a call that is not traced does. For several
layers in one operator it computes the recurrence again with PyTorch's own operators, and so does ``tuned::gru_cell_backward``. The backwards
have no gradient themselves. No operator draws random numbers: dropout is applied between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tuned.calls.gru import eager, run, training
from tuned.calls.gru.arguments import GruCall, check_gru
from tuned.calls.gru_cell import run as cell_run
from tuned.calls.gru_cell.arguments import checked_cell
from tuned.calls.linear_cat import training as linear_training
from tuned.calls.linear_cat.arguments import check_linear_cat
from tuned.calls.operators import define, save, saved
from tuned.calls.products import name_of
from tuned.calls.recurrent import serve
from tuned.families.products import DTYPES

_GRU = (
    "Tensor input, Tensor hx, Tensor[] weights, bool has_biases, int num_layers, bool bidirectional, bool batch_first, "
    "Tensor? batch_sizes, Tensor? cu_seqlens, SymInt? max_seqlen, Tensor? resets"
)
_CELL = "Tensor[] segments, Tensor h, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh"
_LINEAR = "Tensor[] inputs, Tensor weight, Tensor? bias"


def _gru_call(input: Any, hx: Any, weights: Any, *settings: Any) -> GruCall:  # noqa: A002
    """The checked call of the operator's arguments."""
    *others, resets = settings
    call = GruCall(input, hx, tuple(weights), *others, resets=resets)  # type: ignore[misc] # without dropout
    check_gru(call)
    return call


def _gru(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        output, h_n = serve.gru(_gru_call(*args))
    return output.contiguous(), h_n.contiguous()


def _gru_fake(input: Any, hx: Any, _weights: Any, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
    directions = 2 if settings[2] else 1
    return input.new_empty((*input.shape[:-1], directions * hx.shape[2])), hx.new_empty(hx.shape)


def _gru_backward(grad_output: Any, grad_h_n: Any, wanted: list[bool], output: Any, *args: Any) -> list[torch.Tensor]:
    input, hx, weights, *settings = args  # noqa: A001
    call, given = _gru_call(*args), (grad_output, grad_h_n)
    if output is not None and _kernels_may(call):
        with _autograd():
            found = training.gradients(call, output, wanted, given)
        return _apart(found, call.tensors, wanted, [output, *serve.present(*given)])

    def again(input: Any, hx: Any, *weights: Any) -> Any:  # noqa: A002
        return eager.gru(_gru_call(input, hx, weights, *settings))

    return _recomputed(again, [input, hx, *weights], wanted, given)


def _kernels_may(call: GruCall) -> bool:
    """Whether there may be kernels for the gradients of a call: ``training.gradients`` asks whether they are faster."""
    if serve.why_torch(call.tensors, gradients=True) is not None or name_of(call.input.dtype) not in DTYPES:
        return False
    return bool(call.hx.shape[2]) and not run.is_empty(call)


def _cell(segments: Any, h: Any, *weights: Any) -> torch.Tensor:
    given: tuple[Any, ...] = (tuple(segments), h, *weights, False)
    checked_cell(*given)
    with torch.no_grad():
        return serve.gru_cell(segments, h, *weights, inplace=False).contiguous()


def _cell_backward(grad: Any, wanted: list[bool], segments: Any, *others: Any) -> list[torch.Tensor]:
    count, present = len(segments), [t is not None for t in others]

    def again(*tensors: Any) -> Any:
        rest = iter(tensors[count:])
        others: list[Any] = [next(rest) if there else None for there in present]
        return cell_run.eager(tensors[:count], *others)

    return _recomputed(again, [*segments, *serve.present(*others)], wanted, [grad])


def _linear(inputs: Any, weight: Any, bias: Any) -> torch.Tensor:
    check_linear_cat(inputs, weight, bias)
    with torch.no_grad():
        return serve.linear_cat(inputs, weight, bias).contiguous()


def _autograd() -> Any:
    """A context in which autograd records; the dispatcher turns that off inside an operator."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)  # noqa: FBT003, SLF001


def _recomputed(
    function: Callable[..., Any], tensors: Sequence[Any], wanted: Sequence[bool], grads: Sequence[Any]
) -> list[torch.Tensor]:
    """Gradients of ``function(*tensors)`` for the wanted tensors, and an empty tensor for each other."""
    with _autograd(), torch.enable_grad():
        leaves = [t.detach().requires_grad_(asked) for t, asked in zip(tensors, wanted, strict=True)]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # An output that depends on no input, such as one without rows, has no gradient to pass on.
        pairs = zip(outputs, grads, strict=True)
        reached = [(out, grad) for out, grad in pairs if out.requires_grad and grad is not None]
        asked = [t for t in leaves if t.requires_grad]
        outs, given = [out for out, _ in reached], [grad for _, grad in reached]
        found = iter(torch.autograd.grad(outs, asked, given, allow_unused=True))
    return _apart([next(found) if w else None for w in wanted], tensors, wanted, given)


def _apart(
    found: Sequence[Any], tensors: Sequence[torch.Tensor], wanted: Sequence[bool], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients as an operator returns them: zeros for None, an empty tensor where none is wanted, and none shares memory.

    Autograd may give one tensor to two leaves, or pass on a tensor that it was given: such tensors are copied, and so are parts.
    """
    taken = {t.untyped_storage().data_ptr() for t in (*tensors, *given)}
    grads = []
    for tensor, grad, want in zip(tensors, found, wanted, strict=True):
        if not want:
            made = tensor.new_empty(0)
        elif grad is None:
            made = tensor.new_zeros(tensor.shape)
        elif grad.storage_offset() or grad.untyped_storage().data_ptr() in taken:
            made = grad.clone(memory_format=torch.contiguous_format)
        else:
            made = grad.contiguous()
        taken.add(made.untyped_storage().data_ptr())
        grads.append(made)
    return grads


def _grads_fake(tensors: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) if w else t.new_empty(0) for t, w in zip(tensors, wanted, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all arguments of an operator."""
    del output
    save(ctx, inputs)


def _gru_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all arguments of an operator, and for one layer also the output, from which its gradients are computed."""
    save(ctx, (output[0] if inputs[4] == 1 else None, *inputs))
    ctx.set_materialize_grads(False)


def _gru_grads(ctx: Any, grad_output: Any, grad_h_n: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], *needs[2]]
    if grad_output is None and grad_h_n is None:
        return None, None, [None] * len(needs[2]), *(None,) * (len(needs) - 3)
    found = gru_backward(grad_output, grad_h_n, wanted, *saved(ctx))
    first, second, *weights = (g if w else None for g, w in zip(found, wanted, strict=True))
    return first, second, weights, *(None,) * (len(needs) - 3)


def _cell_grads(ctx: Any, grad: Any) -> tuple[Any, ...]:
    segments, *others = saved(ctx)
    needs = ctx.needs_input_grad
    wanted = [*needs[0], *(n for n, t in zip(needs[1:], others, strict=True) if t is not None)]
    found = gru_cell_backward(grad, wanted, segments, *others)
    grads = [g if w else None for g, w in zip(found, wanted, strict=True)]
    rest = iter(grads[len(segments) :])
    return grads[: len(segments)], *(None if t is None else next(rest) for t in others)


def _linear_grads(ctx: Any, grad: Any) -> tuple[Any, ...]:
    inputs, weight, bias = saved(ctx)
    of_inputs, of_weight, of_bias = ctx.needs_input_grad
    # Joined, since tracers want functions, and not writes into parts of a tensor.
    return linear_training.gradients(
        grad, inputs, weight, of_inputs, of_weight, bias is not None and of_bias, joined=True
    )


gru = define("gru", f"({_GRU}) -> (Tensor, Tensor)", _gru, _gru_fake, _gru_grads, _gru_setup)
gru_backward = define(
    "gru_backward",
    f"(Tensor? grad_output, Tensor? grad_h_n, bool[] wanted, Tensor? output, {_GRU}) -> Tensor[]",
    _gru_backward,
    lambda _g, _h, wanted, _output, input, hx, weights, *_: _grads_fake([input, hx, *weights], wanted),  # noqa: A006
)
gru_cell = define(
    "gru_cell",
    f"({_CELL}) -> Tensor",
    _cell,
    lambda _segments, h, *_: h.new_empty(h.shape),
    _cell_grads,
    _setup,
)
gru_cell_backward = define(
    "gru_cell_backward",
    f"(Tensor grad, bool[] wanted, {_CELL}) -> Tensor[]",
    _cell_backward,
    lambda _grad, wanted, segments, *others: _grads_fake([*segments, *serve.present(*others)], wanted),
)
linear_cat = define(
    "linear_cat",
    f"({_LINEAR}) -> Tensor",
    _linear,
    lambda inputs, weight, _bias: inputs[0].new_empty((*inputs[0].shape[:-1], weight.shape[0])),
    _linear_grads,
    _setup,
)


# What FlopCounterMode counts: two FLOPs per multiply-add of a matrix product, as for PyTorch's own operators. A backward
# computes the products of the forward again, by kernels for all steps at once, and two products for each of them.


def _gru_flops(input: Any, hx: Any, weights: Any, *_: Any, **__: Any) -> int:  # noqa: A002
    del hx
    rows = math.prod(input[:-1])
    return 2 * rows * sum(math.prod(shape) for shape in weights if len(shape) == 2)  # noqa: PLR2004 - no biases


def _cell_flops(segments: Any, h: Any, weight_ih: Any, weight_hh: Any, *_: Any, **__: Any) -> int:
    del segments
    return 2 * h[0] * (math.prod(weight_ih) + math.prod(weight_hh))  # type: ignore[no-any-return]


def _linear_flops(inputs: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(inputs[0][:-1]) * math.prod(weight)


_FORMULAS: dict[Any, Any] = {
    torch.ops.tuned.gru: _gru_flops,
    torch.ops.tuned.gru_cell: _cell_flops,
    torch.ops.tuned.linear_cat: _linear_flops,
    torch.ops.tuned.gru_backward: lambda _g, _h, _wanted, _output, *args, **named: 3 * _gru_flops(*args, **named),
    torch.ops.tuned.gru_cell_backward: lambda _grad, _wanted, *args, **named: 3 * _cell_flops(*args, **named),
}


def _register_flops() -> None:
    """Register the formulas, also with counters that are active: each copied the registry when it was made."""
    for operator, formula in _FORMULAS.items():
        register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update({operator: flop_registry[operator] for operator in _FORMULAS})


_register_flops()
