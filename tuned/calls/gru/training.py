"""A GRU over sequences that needs a gradient, by kernels: what one launch of the forward computes is one function of autograd.

The forward is the same as without a gradient. It keeps the outputs of all layers, and the product of its input and weights unless
the backward is to compute that again. The backward goes from the highest layer to the lowest, or takes several layers at once, a
chunk of steps apart (tuned.calls.gru.wavefront). For each layer, the library (cuBLAS) multiplies all states by weight_hh at once,
since all are known. One launch then computes the gradient of the recurrence, for both directions. The library multiplies its result
into the gradients of input and weights. Gradients of gradients come from PyTorch's operators without cuDNN, which has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tuned.calls.gru import eager, run, slower
from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.factors import Factor, multiplied, splits
from tuned.calls.gru.gradient import launch
from tuned.calls.gru.lengths import Lengths, lengths_of, neighbours
from tuned.calls.gru.plan import leave, settings_of, trained
from tuned.calls.gru.project import project
from tuned.calls.gru.weights import Grads, grad_weights
from tuned.calls.gru.wide import flat, narrowed, silence, widened, widening_us, width_of
from tuned.calls.products import name_of, precision_of, recurrent_precision
from tuned.families.gru.model import MARGIN, ONE_LAUNCH_HIDDEN, stays_on_chip
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru_backward import FAMILY as BACKWARD
from tuned.families.gru_backward.launches import PARTS, RecurrenceGradient, counters_needed
from tuned.families.products import DTYPES
from tuned.launching import library, residents
from tuned.launching.plan import transforms_active
from tuned.launching.rehearsal import NotedError, listening
from tuned.lookup import misses
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, Gpu, choose, usable

if TYPE_CHECKING:
    from tuned.calls.gru import wavefront  # which stacks alone import

# Products of a layer forward and backward, each as large as the product of its input. Padding costs twice: the forward pads, and the
# backward cuts.
PRODUCTS, BOTH_WAYS = 6, 2
# Time of nn.GRU forward and backward, as a multiple of its forward: at least, if rows are no multiple of 16 bytes, and at most, for
# others. Then time of a slow host: of a step of a layer and direction, and to decide a call that has no plan. docs/decisions/0075
NARROW_TRAINED, WIDE_TRAINED = 2.7, 3.0
SLOW_HOST_TRAINED_US, UNPLANNED_US = 60.0, 300.0


def why_not(call: GruCall) -> str | None:
    """Why no kernel can serve a checked call that needs a gradient, or None."""
    reason = run.why_not(_layer(call, 0), trained=True)
    begun = reason is not None and _begun_by_pytorch(call)
    if reason is not None and not begun:
        return f"a gradient is needed, and of the forward: {reason}"
    if run.is_empty(call):
        return "a gradient is needed, and there is no step to compute"
    if not run.capturing(call.input.device) and run.modelled_steps(_layer(call, 0)):
        # 142 steps of two layers, 33 rows of 1494 units: kernels 17.2 ms, nn.GRU 15.3; in a graph 10.0 and 13.3.
        return "a gradient is needed, and a launch for each step of the forward takes the host as long as all of PyTorch's own"
    choice, (spec, size) = _choice(call), run.spec_of(call, 1)
    reason = choice.why
    if choice.variant is not None:
        reason = slower.slower(call, spec, size, choice, functools.partial(_at_once_planned, call), begun=begun)
    return None if reason is None else f"a gradient is needed: {reason}{run.units_more(call)}"


def _begun_by_pytorch(call: GruCall) -> bool:
    """Whether torch.gru may compute the forward, where no kernel does, and kernels the gradient from its output alone.

    It may in a graph, for one layer whose forward cuDNN has in one launch. For other layers our products, without tensor cores, take
    longer than kernels save. Rows must be aligned, since others are copied for it.
    """
    if why_eager(call.input, name_of(call.input.dtype) in DTYPES) is not None or run.is_empty(call):
        return False
    one = call.num_layers == 1 and call.resets is None and slower.is_aligned(call)
    if not one or not run.capturing(call.input.device):
        return False
    spec, _ = run.spec_of(call, 1)
    return spec.dtype == "float32" and spec.dense and spec.hidden <= ONE_LAUNCH_HIDDEN[1]


def wide(call: GruCall) -> GruCall:
    """The call, with ``width`` set where kernels serve it only with padded rows, or where padding saves more than it takes."""
    hidden, features, item = call.hx.shape[2], call.input.shape[-1], call.input.element_size()
    wider = dataclasses.replace(call, width=width_of(hidden, item))
    if (wider.width == hidden and width_of(features, item) == features) or call.dropout:
        return call
    if why_not(wider) is not None:
        return wider if why_not(call) is not None and _pays_pytorch(call) else call
    spec, size = run.spec_of(call, 1)
    if why_not(call) is not None:
        return call if stays_on_chip(spec, size) else wider
    saved = PRODUCTS * run.narrow_us(spec, size, features if wider.width == hidden else hidden)
    # The saving of the recurrence is that of its forward, by the model: in nine trainings that were measured, forward and backward
    # together saved more than that (decision 77).
    narrow, broad = (run.kernels_us(_layer(one, 0), trained=True) for one in (call, wider))
    saved += call.num_layers * (narrow - broad) if narrow and broad else 0.0
    captured = run.capturing(call.input.device)
    cost = BOTH_WAYS * widening_us(spec, size, call.num_layers, captured=captured, autograd=True)
    return wider if saved > cost + (0.0 if captured else UNPLANNED_US) else call


def _pays_pytorch(call: GruCall) -> bool:
    """``run.pays_pytorch`` for a call that needs a gradient."""
    if why_eager(call.input, name_of(call.input.dtype) in DTYPES) is not None or run.is_empty(call) or _coarse(call):
        return False
    cudnn = torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    if not cudnn or not gpu_of(call.input.device).capability:
        return False
    (spec, size), captured, layers = run.spec_of(call, 1), run.capturing(call.input.device), call.num_layers
    if not run.multiplies_faster(spec):
        return False
    narrow, broad = run.narrow_and_wide_us(spec, size, layers)
    now, after = NARROW_TRAINED * narrow, WIDE_TRAINED * broad
    cost = BOTH_WAYS * widening_us(spec, size, layers, captured=captured, autograd=True)
    if not captured:
        after = max(after, size.seq * layers * spec.directions * SLOW_HOST_TRAINED_US)
        cost += UNPLANNED_US
    return after + cost < MARGIN * now


def pads_pytorch(call: GruCall) -> bool:
    """Whether torch.gru is to serve a call that ``wide`` returned, with padded tensors."""
    return call.width is not None and why_not(call) is not None


def padded_pytorch(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n), with its gradient, by torch.gru with padded tensors, for a call of which ``pads_pytorch`` is true."""
    return narrowed(call, *eager.gru(flat(widened(call, alike=True))))


def _coarse(call: GruCall) -> bool:
    """Whether torch's settings make the library's products less precise than a GRU's are to be."""
    return (
        call.input.dtype == torch.float32 and recurrent_precision() == "ieee" and precision_of(torch.float32) == "tf32"
    )


def remember_eager(call: GruCall) -> None:
    """Let torch.gru serve later calls like one that ``why_not`` refused, without deciding again, unless a setting was the reason."""
    if not run.is_empty(call) and not _coarse(call) and run.may_learn(call.input.device):
        leave(call, captured=False, gradient=True)


def choice_of(call: GruCall) -> tuple[Choice, tuple[str, ...]]:
    """The choice for the gradient of a call that ``why_not`` accepts; and the modules of tuned.kernels of forward and backward."""
    together = run.in_one_launch(call)
    choice, (first, forward) = _choice(call), run.choice_of(call if together else _layer(call, 0), trained=True)
    why = f"of the gradient, {choice.why}; the forward has its own, {first.rule}: {first.why}"
    wave = None if call.recompute or not together else _wave(call, [True] * (2 + len(call.weights)))
    if wave is not None:
        why += f"; of the gradient {wave.layers} layers run at once, each {wave.steps} steps behind the one above"
    return dataclasses.replace(choice, why=why), (
        *forward,
        *BACKWARD.kernel_names(run.spec_of(call, 1)[0], choice.variant),
    )


def forward(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) of a call that ``why_not`` accepts, with its gradient."""
    if call.width is not None:
        return narrowed(call, *forward(widened(call)))
    library.set_up_recurrences(call.input.device, gradients=True)  # a graph of it may be left to PyTorch's own
    parts = [call] if run.in_one_launch(call) else [_layer(call, layer) for layer in range(call.num_layers)]
    plain = call.batch_sizes is None and call.cu_seqlens is None
    x, states = call.input, []
    for index, part in enumerate(parts):
        if index and call.dropout:
            x = torch.nn.functional.dropout(x, call.dropout)
        found = None
        if plain and call.units is None:
            found = known(x, part.hx, part.weights, settings_of(part), part.resets, recompute=part.recompute)
        if found is None:
            settings = dataclasses.replace(part, input=None, hx=None, weights=(), resets=None)  # type: ignore[arg-type]
            found = _Part.apply(settings, None, part.resets, x, part.hx, *part.weights)  # type: ignore[no-untyped-call]
        x, h_n = found
        states.append(h_n)
    return x, states[0] if len(states) == 1 else torch.cat(states)


def known(  # noqa: PLR0913 - what identifies a call
    x: Any, hx: Any, weights: Any, settings: tuple[Any, ...], resets: Any = None, *, recompute: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``plan.known`` for a call that needs a gradient; None for any other. A call in a CUDA graph is decided each time."""
    plan = trained(x, hx, weights, settings, resets)
    if plan is None or listening() is not None or run.capturing(x.device):
        return None
    return _Part.apply(_bare(settings, recompute=recompute), plan, resets, x, hx, *weights)  # type: ignore[no-any-return, no-untyped-call]


@functools.lru_cache(maxsize=256)
def _bare(settings: tuple[Any, ...], *, recompute: bool) -> GruCall:
    """A call without its tensors."""
    biases, layers, bidirectional, batch_first = settings
    return GruCall(None, None, (), biases, layers, bidirectional, batch_first, recompute=recompute)  # type: ignore[arg-type]


def _layer(call: GruCall, layer: int) -> GruCall:
    """One layer of a call; its input is still that of the lowest layer."""
    if call.num_layers == 1:
        return call
    directions = 2 if call.bidirectional else 1
    each = len(call.weights) // call.num_layers
    return dataclasses.replace(
        call,
        hx=call.hx[layer * directions : (layer + 1) * directions],
        weights=call.weights[layer * each : (layer + 1) * each],
        num_layers=1,
        dropout=0.0,
        units=None if layer else call.units,
    )


class _Part(torch.autograd.Function):
    """The layers that one launch of the forward computes."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, settings: GruCall, plan: Any, resets: Any, x: Any, hx: Any, *weights: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = None if plan is None else plan(x, hx, weights, resets)
        if made is None:
            kept: list[run.Kept] = []
            call = dataclasses.replace(settings, input=x, hx=hx, weights=weights, resets=resets)
            output, h_n = run.forward(call, kept)
            gates, between = kept[0] if kept else (None, None)  # nothing is kept if torch.gru served after all
        else:
            output, h_n, gates, between = made
        ctx.save_for_backward(output, None if settings.recompute else gates, between, resets, x, hx, *weights)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return output, h_n

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_h_n: Any) -> tuple[Any, ...]:  # type: ignore[override]
        output, gates, between, resets, x, hx, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        nothing = None, None, None
        if grad_output is None and grad_h_n is None:
            return *nothing, *(None,) * len(wanted)
        call = dataclasses.replace(ctx.settings, input=x, hx=hx, weights=tuple(weights), resets=resets)
        given = grad_output, grad_h_n
        if torch.is_grad_enabled() or _are_more_than_memory(given):
            return *nothing, *_without_cudnn(call, wanted, given)
        if call.num_layers > 1 and between is None:
            return *nothing, *_by_torch(call, wanted, given)
        return *nothing, *_stack(call, [*(() if between is None else between), output], gates, wanted, given)


def _stack(
    call: GruCall, outputs: Sequence[torch.Tensor], gates: Any, wanted: Sequence[bool], given: tuple[Any, Any]
) -> Grads:
    """Gradients of all tensors of a call, from its highest layer to its lowest. ``outputs``: of its layers."""
    wave = None if gates is None else _wave(call, wanted)
    if wave is not None and (found := _at_once(call, wave, outputs, gates, wanted, given)) is not None:
        return found
    each, cells = len(call.weights) // call.num_layers, len(call.hx) // call.num_layers
    grad, grad_h_n = given
    grad_hx: Grads = [None] * call.num_layers
    grad_weights: Grads = [None] * len(call.weights)
    for layer in reversed(range(call.num_layers)):
        one = dataclasses.replace(_layer(call, layer), input=outputs[layer - 1]) if layer else _layer(call, 0)
        weights = slice(layer * each, (layer + 1) * each)
        below = wanted[0] or bool(layer and (wanted[1] or any(wanted[2 : 2 + weights.start])))
        own = [below, wanted[1], *wanted[2 + weights.start : 2 + weights.stop]]
        last = None if grad_h_n is None else grad_h_n[layer * cells : (layer + 1) * cells]
        grad, grad_hx[layer], *grad_weights[weights] = gradients(
            one, outputs[layer], own, (grad, last), None if layer else gates
        )
        if not below:
            break
    hx = torch.cat(grad_hx) if wanted[1] and len(grad_hx) > 1 else grad_hx[0]  # type: ignore[arg-type]
    return [grad, hx, *grad_weights]


def _at_once(  # noqa: PLR0913 - a stack, what it kept and its gradients
    call: GruCall, wave: wavefront.Wave, outputs: Sequence[torch.Tensor], gates: Any, wanted: Sequence[bool],
    given: tuple[Any, Any],
) -> Grads | None:  # fmt: skip
    """The gradients of a stack whose layers run at once; None if they must run one by one, which takes the memory of one layer."""
    device = call.input.device
    launched = functools.partial(launch, device.index, filled=True)
    try:
        from tuned.calls.gru import wavefront  # noqa: PLC0415 - a first call may import it, ``import tuned`` need not

        return _attempted(device, lambda: wavefront.gradients(call, wave, outputs, gates, wanted, given, launched))
    except torch.OutOfMemoryError:
        if run.capturing(device):  # what a graph has captured so far would be replayed
            raise
    return None


def _are_more_than_memory(given: tuple[Any, Any]) -> bool:
    """Whether a kernel, which reads memory, would lose a part of these gradients, or find none in memory.

    Gradients have tangents in forward mode. They are several at once with ``is_grads_batched``, and under torch.vmap.
    """
    if forward_ad._current_level >= 0 or transforms_active():  # noqa: SLF001
        return True
    try:
        for grad in given:
            if grad is not None:
                grad.data_ptr()
    except RuntimeError:
        return True
    return False


def _without_cudnn(call: GruCall, wanted: Sequence[bool], given: tuple[Any, Any]) -> Grads:
    """Gradients that have gradients or tangents, or several at once: by PyTorch's operators, which have them without cuDNN."""
    # Under torch.func no tensor can be set to need a gradient, as a graph of its own would do.
    create_graph = torch.is_grad_enabled() or transforms_active()
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        return _by_torch(call, wanted, given, create_graph=create_graph)


def _by_torch(call: GruCall, wanted: Sequence[bool], given: tuple[Any, Any], *, create_graph: bool = False) -> Grads:
    with torch.enable_grad():
        # Each argument gets a separate tensor: even if one is given twice, or computed from another, each needs its own gradient.
        pairs = zip(call.tensors, wanted, strict=True)
        own = [t.view_as(t) if create_graph else t.detach().requires_grad_(asked) for t, asked in pairs]
        call = dataclasses.replace(call, input=own[0], hx=own[1], weights=tuple(own[2:]))
        reached = [(out, grad) for out, grad in zip(eager.gru(call), given, strict=True) if grad is not None]
        asked = [t for t, want in zip(call.tensors, wanted, strict=True) if want]
        outputs, grads = zip(*reached, strict=True)
        found = iter(torch.autograd.grad(outputs, asked, grads, create_graph=create_graph, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def gradients(
    call: GruCall, output: torch.Tensor, wanted: Sequence[bool], given: tuple[Any, Any], gates: Any = None
) -> Grads:
    """The gradients of one layer's input, first states and weights, None where they are not wanted.

    Args:
        call: a checked call of one layer.
        output: of the forward.
        wanted: whether the gradient of input, of first states and of each weight is wanted.
        given: gradients of output and of h_n, None for none.
        gates: the input times its weights, ``3 * H`` for each direction and token; None if they were not kept.
    """
    device = call.input.device
    spec, size = run.spec_of(call, 1)
    choice = _choice(call)
    if choice.variant is not None:
        found = _attempted(device, lambda: _by_kernels(call, spec, size, choice.variant, output, wanted, given, gates))
        if found is not None:
            return found
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _by_torch(call, wanted, given)


def _attempted(device: torch.device, by_kernels: Callable[[], Grads]) -> Grads | None:
    """The gradients by kernels on a device; None if launches were noted instead, do not compile, or have too many programs for it."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            casts = torch.is_autocast_enabled(device.type)  # entering a context that changes nothing takes 10 us
            with torch.no_grad(), torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext():
                return by_kernels()
        except NotedError:  # this thread listens, or a kernel does not compile
            pass
        except RuntimeError as error:
            if not residents.too_large(error):
                raise
            residents.forbid(device.index or 0)  # the driver allows fewer resident programs than it said
    return None


def _by_kernels(  # noqa: PLR0913 - a layer, its variant, what it kept and its gradients
    call: GruCall, spec: GruSpec, size: GruSize, variant: Any, output: torch.Tensor, wanted: Sequence[bool],
    given: tuple[Any, Any], gates: Any,
) -> Grads:  # fmt: skip
    hidden, each = spec.hidden, 4 if spec.bias else 2
    weights = [call.weights[cell * each : (cell + 1) * each] for cell in range(spec.directions)]
    lengths = lengths_of(call)
    rows = call.input.reshape(-1, call.input.shape[-1])
    before = _before(call, output, lengths)
    if call.resets is not None:
        before.masked_fill_(_cut(call, call.resets, lengths, len(rows))[..., None], 0)
    given_gates, shape = gates, (spec.directions, len(rows), 3 * hidden)
    gates = rows.new_empty(shape) if given_gates is None else given_gates.view(shape)
    states = rows.new_empty(shape)
    for cell, (w_ih, w_hh, *_) in enumerate(weights):
        if given_gates is None:
            project(rows, w_ih, gates[cell], spec.precision)
        project(before[cell], w_hh, states[cell], spec.precision)
    if given_gates is None:
        silence(gates, call.units)
    shape = (spec.directions, len(rows), PARTS * hidden)
    # Rows that belong to no sequence have no gradient.
    grads = rows.new_zeros(shape) if spec.thd else rows.new_empty(shape)
    grad_h_0 = torch.empty_like(call.hx, memory_format=torch.contiguous_format)
    gradient = _tensors(call, spec, size, variant, (gates, states, before, grads), grad_h_0, given, lengths)
    launch(call.input.device.index, spec, variant, gradient)
    del gates, states, gradient  # frees memory for the products
    split = splits(spec, rows)
    factors, given_rows = [Factor.of(of_cell, split=split) for of_cell in grads], Factor.of(rows, split=split)
    found: Grads = [_grad_input(call, weights, factors) if wanted[0] else None, grad_h_0 if wanted[1] else None]
    for cell, (of_cell, states_before) in enumerate(zip(factors, before, strict=True)):
        asked = wanted[2 + cell * each : 2 + (cell + 1) * each]
        found += grad_weights(of_cell, given_rows, states_before, hidden, asked)
    return found


def _tensors(  # noqa: PLR0913 - what a launch takes
    call: GruCall,
    spec: GruSpec,
    size: GruSize,
    variant: Any,
    of_tokens: tuple[torch.Tensor, ...],
    grad_h_0: torch.Tensor,
    given: tuple[Any, Any],
    lengths: Lengths,
) -> RecurrenceGradient:
    """The tensors of a layer as its kernel takes them. ``of_tokens``: gates of x and of h, states before, gradients."""
    turned = call.batch_first and spec.dense
    # A kernel reads memory, where a negative view has the other sign.
    grad_output, grad_h_n = (None if grad is None else grad.resolve_neg() for grad in given)
    width = spec.directions * spec.hidden
    shape = (*call.input.shape[:-1], width)
    if grad_output is None:  # one row of zeros for all tokens
        grad_output = grad_h_0.new_zeros(width).expand(shape)
    elif grad_output.stride(-1) != 1 and width > 1:
        grad_output = grad_output.contiguous()
    if grad_h_n is None:
        grad_h_n = torch.zeros_like(grad_h_0)

    if spec.dense:
        of_tokens = tuple(t.view(spec.directions, *call.input.shape[:2], t.shape[-1]) for t in of_tokens)
    gates, hidden, before, out = (t.transpose(1, 2) if turned else t for t in of_tokens)

    each = 4 if spec.bias else 2
    return RecurrenceGradient(
        gates=gates,
        hidden=hidden,
        before=before,
        weight_hh=run.stack(call.weights[1::each]),
        grad_out=grad_output.transpose(0, 1) if turned else grad_output,
        grad_h_n=grad_h_n.contiguous(),
        out=out,
        grad_h_0=grad_h_0,
        batch=size.batch,
        seq=size.seq,
        bias_ih=run.stack(call.weights[2::each]) if spec.bias else None,
        bias_hh=run.stack(call.weights[3::each]) if spec.bias else None,
        states=grad_h_0.new_empty(grad_h_0.shape, dtype=torch.float32) if variant.in_turn else None,
        counters=grad_h_0.new_empty(counters_needed(spec, size.batch), dtype=torch.int32)
        if variant.exchange == "counter"
        else None,
        starts=lengths.starts,
        lengths=lengths.lengths,
        resets=run.marks_of(call),
    )


def _before(call: GruCall, output: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """The state before each token's step, ``[directions, tokens, hidden]``, tokens in the order of the input."""
    hidden = call.hx.shape[2]
    if lengths.layout == "dense":
        time = 1 if call.batch_first else 0
        steps = output.shape[time] - 1
        first = call.hx.transpose(0, 1) if call.batch_first else call.hx
        if len(call.hx) == 1:
            return torch.cat((first, output.narrow(time, 0, steps)), time).view(1, -1, hidden)
        before = output.new_empty((2, *output.shape[:-1], hidden))
        one, other = output.split(hidden, -1)
        begins, ends = first.split(1, time)
        torch.cat((begins, one.narrow(time, 0, steps)), time, out=before[0])
        torch.cat((other.narrow(time, 1, steps), ends), time, out=before[1])
        return before.view(2, -1, hidden)
    found = []
    ways = neighbours(lengths, len(output))
    for hx, out, (sequence, first, previous) in zip(call.hx, output.split(hidden, -1), ways, strict=False):
        found.append(torch.where(first[:, None], hx.index_select(0, sequence), out.index_select(0, previous)))
    before = torch.stack(found)
    if call.cu_seqlens is not None:  # rows that belong to no sequence may hold anything
        beyond = torch.arange(len(output), device=output.device) >= call.cu_seqlens[-1]
        before.masked_fill_(beyond[:, None], 0)
    return before


def _cut(call: GruCall, resets: torch.Tensor, lengths: Lengths, tokens: int) -> torch.Tensor:
    """Whether the state before each token's step is reset, ``[directions, tokens]``, tokens in the order of the input."""
    forward = resets.reshape(-1)
    if not call.bidirectional:
        return forward[None]
    if lengths.layout == "dense":  # against the order of tokens, the next token has the mark; the last token has none
        time = 1 if call.batch_first else 0
        backward = torch.zeros_like(resets)
        steps = resets.shape[time] - 1
        backward.narrow(time, 0, steps).copy_(resets.narrow(time, 1, steps))
        return torch.stack((forward, backward.reshape(-1)))
    _, (_, last, after) = neighbours(lengths, tokens)
    return torch.stack((forward, forward.index_select(0, after) & ~last))


def _grad_input(call: GruCall, weights: Any, grads: Sequence[Factor]) -> torch.Tensor:
    found = None
    for of_cell, (w_ih, *_) in zip(grads, weights, strict=True):
        weight = Factor.of(w_ih, split=of_cell.parts is not None)
        found = multiplied(of_cell.columns(call.hx.shape[2]), weight, to=found)
    assert found is not None, "there is one direction at least"
    return found.view(call.input.shape)


def _wave(call: GruCall, wanted: Sequence[bool]) -> wavefront.Wave | None:
    """How the layers of a stack run at once; None if they run one by one, which takes no memory for all of them at once."""
    each = len(call.weights) // call.num_layers
    # With no gradient wanted of the lowest layer, the backward ends above it.
    if call.num_layers == 1 or call.units is not None or not any(wanted[: 2 + each]):
        return None
    return _planned(call, *run.spec_of(call, 1), _choice(call))


def _at_once_planned(call: GruCall) -> wavefront.Wave | None:
    """How the layers of a call would run at once, or None."""
    if not run.in_one_launch(call) or call.recompute:
        return None
    return _planned(call, *run.spec_of(call, 1), _choice(call))


def _planned(call: GruCall, spec: GruSpec, size: GruSize, choice: Choice) -> wavefront.Wave | None:
    row, variant = choice.row, choice.variant
    if row is None or variant is None or call.num_layers == 1:
        return None
    device, step_us = call.input.device, row.median_us / (row.size.seq + 1)
    gpu = gpu_of(device)
    most = next(iter(run.limit_of(device)), None) or gpu.multiprocessors
    from tuned.calls.gru import wavefront  # noqa: PLC0415 - as above

    return wavefront.planned(
        spec, size, call.num_layers, variant, step_us, gpu.capability, most, captured=run.capturing(device)
    )


def _choice(call: GruCall) -> Choice:
    if _coarse(call):
        why = (
            "its products would be TensorFloat-32, as torch.backends.cuda.matmul allows; those of a GRU are not to be: "
            "torch.backends.cudnn.allow_tf32 is False"
        )
        return Choice("eager", why, None)
    return _choose(*run.spec_of(call, 1), gpu_of(call.input.device), *run.limit_of(call.input.device))


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _choose(spec: GruSpec, size: GruSize, gpu: Gpu, limit: int | None = None) -> Choice:
    """The choice, made once for all equal calls; ``limit`` is the number of programs that may wait for each other."""
    if spec.resets:
        plain = dataclasses.replace(spec, resets=False)
        return _with_resets(
            _choose(plain, size, gpu, limit), spec, size, gpu, gpu.multiprocessors if limit is None else limit
        )
    choice = choose(BACKWARD, spec, size, gpu if limit is None else dataclasses.replace(gpu, multiprocessors=limit))
    if limit is None:
        misses.note(BACKWARD, spec, size, choice)
    return proven(choice)


def _with_resets(choice: Choice, spec: GruSpec, size: GruSize, gpu: Gpu, multiprocessors: int) -> Choice:
    """The choice made without resets; if that is torch.gru, which has to cut sequences at resets, the default variant if it fits."""
    if choice.variant is not None:
        return choice
    default = BACKWARD.fit(BACKWARD.default_variant(spec, size), spec, gpu.capability)
    default = default if BACKWARD.sized is None else BACKWARD.sized(default, spec, size, multiprocessors)
    if not usable(BACKWARD, spec, size, default, gpu.capability, multiprocessors):
        return choice
    return Choice("default", f"PyTorch's own has no resets; {choice.why}", default, gpu=gpu)


def proven(choice: Choice) -> Choice:
    """The choice; torch.gru instead, if the choice is the default variant."""
    if choice.rule == "default":
        why = "no row of this GPU says that a kernel is faster than PyTorch's own"
        return dataclasses.replace(choice, rule="eager", why=why, variant=None)
    return choice
