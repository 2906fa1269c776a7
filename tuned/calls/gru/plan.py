"""The path of a repeated GRU call: one key, one dictionary lookup of its plan, and one launch after the library's GEMM.

Sequences of one length, and packed ones, have plans if all layers run in one persistent launch, or each layer in one. So has strategy
"library" (a library product and a kernel for the gates at each step) if all steps are one compiled kernel. Every other call takes the
long path (tuned.calls.gru.run). Plans keep none of the caller's tensors alive: they hold numbers, kernels and settings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tuned.calls.gru import eager
from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.lengths import MAX_LENGTHS, known_sizes, packed_tensors, sizes_of
from tuned.calls.gru.padding import Padding, padding_of
from tuned.calls.gru.project import by_library, of_both, product_of, project
from tuned.calls.products import precision_of, recurrent_precision
from tuned.families.copying import Rows, filled, padded
from tuned.families.gru.launches import Recurrence, counters_needed, gates_of_step, sequence, state_of_step
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant, alone, steps_are_alike
from tuned.families.launch import ceil_div
from tuned.launching import alike, left, residents
from tuned.launching.copies import launches_of
from tuned.launching.launcher import as_integers
from tuned.launching.plan import (
    ALIGNED_BYTES,
    NO_KEY,
    compiled_before,
    current_device,
    direct_launch,
    keep,
    kind_of,
    listeners,
    maker,
    modes,
    outside_of_graphs,
    traits,
)

MOST_FILLED = 2**21  # the most elements that our own launch fills; PyTorch fills more than these faster
Result = tuple[torch.Tensor, torch.Tensor]

# Key of a call -> its plan: a function (input, hx, weights) -> (output, h_n, gates, outputs of the lower layers of a stack or None),
# which returns None if it cannot serve. For calls that need no gradient, and for the forwards of those that do.
_PLANS: dict[Any, Any] = {}
_TRAINED: dict[Any, Any] = {}
_ONCE: dict[Any, bool] = {}  # keys of packed calls that were seen once; emptied when it is full
_grad_enabled = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_FLOAT32 = torch.float32


def _needs_gradient(x: Any, hx: Any, weights: Sequence[Any]) -> bool:
    return x.requires_grad or hx.requires_grad or any(w.requires_grad for w in weights)


def _key(  # noqa: PLR0913 - what identifies a call
    x: Any, hx: Any, weights: Sequence[Any], settings: tuple[Any, ...], resets: Any, sizes: bytes | None
) -> Any:
    """All that a compiled kernel, or the path to it, may depend on besides gradients; None if a plan may not serve the call."""
    mode = modes(x.get_device())
    if mode is None or mode[0]:  # under autocast the kernels get other tensors: casts of these
        return None
    precision = x.dtype is _FLOAT32 and (precision_of(_FLOAT32), recurrent_precision())
    return (
        settings,
        sizes,
        mode,
        residents.place(x.get_device()),
        precision,
        traits(x),
        traits(hx),
        None if resets is None else traits(resets),
        tuple([traits(w) for w in weights]),
    )


def _tensors(x: Any, hx: Any, weights: Sequence[Any], resets: Any = None, *_: Any) -> tuple[Any, ...]:
    """All tensors of a call, given what a plan takes."""
    return (x, hx, *weights) if resets is None else (x, hx, resets, *weights)


def _sizes(  # noqa: PLR0913 - what identifies a call
    x: Any,
    steps: Any,
    hx: Any,
    weights: Sequence[Any],
    settings: tuple[Any, ...],
    gradient: bool,  # noqa: FBT001
) -> tuple[Any, ...]:
    """The key of a call that torch.gru serves; ``steps``: of packed sequences, whose states are not part of it."""
    return (
        gradient,
        settings,
        residents.place(x.get_device()),
        x.shape,
        x.dtype,
        steps,
        None if steps else (hx.shape, hx.dtype),
        *[w.shape for w in weights],  # torch.gru would take a bias of another shape
    )


def is_left(  # noqa: PLR0913 - what identifies a call
    x: Any, hx: Any, weights: Sequence[Any], settings: tuple[Any, ...], steps: int = 0, *, gradient: bool = False
) -> bool:
    """Whether torch.gru served a call of these sizes before, and so serves this one.

    ``settings``: as in ``known``; ``steps``: of packed sequences, whose data is x; ``gradient``: a gradient is needed.
    """
    return id(weights[0]) in left.LEFT and left.is_left(weights[0], _sizes(x, steps, hx, weights, settings, gradient))


def known(  # noqa: PLR0913 - what identifies a call
    x: Any, hx: Any, weights: Any, settings: tuple[Any, ...], resets: Any = None, batch_sizes: Any = None
) -> Result | None:
    """The result of a call with the properties of one served before, without checks; None for any other call.

    ``settings``: has_biases, num_layers, bidirectional, batch_first, of a call without dropout.
    """
    try:
        gradient = _grad_enabled() and _needs_gradient(x, hx, weights)
        sizes = None if batch_sizes is None else known_sizes(batch_sizes)
        if batch_sizes is not None and sizes is None:
            return None
        if (
            resets is None  # torch.gru has none
            and sizes is None  # of packed sequences tuned.nn asks ``is_left`` itself
            and id(weights[0]) in left.LEFT
            and is_left(x, hx, weights, settings, gradient=gradient)
            and all(t.is_contiguous() for t in (hx, *weights))
        ):
            return _by_torch(x, hx, weights, settings)
        plan = None if gradient else _found(_PLANS, x, hx, weights, settings, resets, sizes)
    except (*NO_KEY, LookupError):  # no weights, or weights by name
        return None
    made = None if plan is None else plan(x, hx, weights, resets)
    return None if made is None else made[:2]


def trained(x: Any, hx: Any, weights: Any, settings: tuple[Any, ...], resets: Any = None) -> Any:
    """The plan for the forward of a call that needs a gradient; None if the call needs none, or has no plan."""
    try:
        gradient = _grad_enabled() and _needs_gradient(x, hx, weights)
        return _found(_TRAINED, x, hx, weights, settings, resets, None) if gradient else None
    except (*NO_KEY, LookupError):
        return None


def _found(  # noqa: PLR0913 - what identifies a call
    plans: dict[Any, Any],
    x: Any,
    hx: Any,
    weights: Sequence[Any],
    settings: tuple[Any, ...],
    resets: Any,
    sizes: bytes | None,
) -> Any:
    """The plan of a call among ``plans``, or None; ``sizes``: of packed sequences, what ``sizes_of`` returns."""
    device = x.get_device()
    near = (
        x.shape, resets is None, len(weights), settings, sizes, residents.place(device), _autocast(), listeners(),
        x.dtype is _FLOAT32 and (precision_of(_FLOAT32), recurrent_precision()), forward_ad._current_level,  # noqa: SLF001
        device if device < 0 else current_device(),
    )  # fmt: skip
    tensors = _tensors(x, hx, weights, resets)
    for are_alike, plan in plans.get(near, ()):
        if are_alike(*tensors):
            return plan
    plan = plans.get(_key(x, hx, weights, settings, resets, sizes))
    if plan is not None:
        alike.learn(plans, near, tensors, plan)
    return plan


def _by_torch(x: Any, hx: Any, weights: Any, settings: tuple[Any, ...]) -> Result:
    has_biases, layers, bidirectional, batch_first = settings
    train = _grad_enabled() and any(t.requires_grad for t in (x, hx, *weights))
    return torch.gru(x, hx, weights, has_biases, layers, 0.0, train, bidirectional, batch_first)


def kept_shape(spec: GruSpec, rows: int) -> tuple[int, ...]:
    """The shape of the products of an input and its weights that a launch keeps for its gradient.

    It is the same with a plan and without one: activation checkpointing compares what a forward keeps with what the forward that
    it runs again keeps, and only the second of them may find a plan.
    """
    shape = (rows, 3 * spec.hidden)  # what torch.mm gives, so that a plan needs no view of it
    return shape if spec.directions == 1 else (spec.directions, *shape)


def of_cell(gates: torch.Tensor, cell: int) -> torch.Tensor:
    """Of products in their ``kept_shape`` those of one direction."""
    return gates if gates.dim() == 2 else gates[cell]  # noqa: PLR2004


class Launched(NamedTuple):
    """One launch: the part of a call that it computed, and how; ``compiled`` is its kernel, or None."""

    call: GruCall
    spec: GruSpec
    variant: GruVariant
    recurrence: Recurrence
    compiled: Any

    @property
    def has_plan(self) -> bool:
        """Whether equal calls need only products of the input and this launch, or the launches of all steps."""
        if self.compiled is None or self.spec.thd:
            return False
        return self.variant.strategy == "persistent" or (self.variant.strategy == "library" and not self.copied)

    @property
    def copied(self) -> bool:
        """Whether hx was copied, since it was not contiguous or not aligned: every equal call must copy it again."""
        return bool(self.recurrence.h_0.data_ptr() != self.call.hx.data_ptr())

    def plan(self) -> Any:
        """The plan of equal calls; None if they must be launched publicly."""
        if self.variant.strategy == "library":
            return _plan_by_library(self.call, self.spec, self.recurrence, self.compiled)
        launch = sequence(self.spec, self.variant, self.recurrence, 0, self.recurrence.seq)
        direct = direct_launch(launch, self.compiled, self.call.input.device.index)
        return None if direct is None else _plan(self, direct)


def learn(call: GruCall, launched: Sequence[Launched], *, captured: bool, gradient: bool) -> None:
    """Remember how a call was served, if equal calls need only library GEMMs of the input and these launches.

    ``captured``: the plan serves in a CUDA graph too; ``gradient``: the call was the forward of one that needs a gradient.
    """
    sizes = None if call.batch_sizes is None else sizes_of(call.batch_sizes)
    key = _key(call.input, call.hx, call.weights, settings_of(call), call.resets, sizes)
    if (
        (sizes is not None and gradient)
        or key is None
        or not all(part.has_plan for part in launched)
        or (gradient and len(launched) > 1)
        or (sizes is not None and not _again(key))
    ):
        return

    def make() -> Any:
        plans = [part.plan() for part in launched]
        if None in plans:
            return None
        plan = (
            plans[0] if len(plans) == 1 else _in_turn(plans, [len(part.call.hx) for part in launched], call.has_biases)
        )
        if call.width is not None:
            padding = padding_of(call, places=all(part.variant.strategy == "persistent" for part in launched))
            if padding is None:
                return None
            plan = _of_wide(plan, padding)
        return plan if captured else outside_of_graphs(plan)

    keep(
        _TRAINED if gradient else _PLANS,
        key,
        make,
        _tensors,
        call.input,
        call.hx,
        call.weights,
        call.resets,
    )


def _again(key: Any) -> bool:
    """Whether a call of packed sequences with these lengths was seen before. Most never recur, and a plan takes longer than a call."""
    if _ONCE.pop(key, False):  # one operation, since several threads may call
        return True
    if len(_ONCE) >= MAX_LENGTHS:
        _ONCE.clear()
    _ONCE[key] = True
    return False


def learn_library(call: GruCall, *, captured: bool) -> None:
    """Remember how torch.gru served a call that has a ``width``, with padded tensors; ``captured``: in a CUDA graph too."""
    sizes = None if call.batch_sizes is None else sizes_of(call.batch_sizes)

    # The plan has its own copy of batch_sizes: the caller's may change.
    bare = dataclasses.replace(
        call,
        input=None,  # type: ignore[arg-type]
        hx=None,  # type: ignore[arg-type]
        weights=(),
        width=None,
        batch_sizes=None if call.batch_sizes is None else call.batch_sizes.clone(),
    )

    def by_torch(x: Any, hx: Any, weights: Sequence[Any], _resets: Any) -> Result:
        return eager.gru(dataclasses.replace(bare, input=x, hx=hx, weights=tuple(weights)))

    def make() -> Any:
        padding = padding_of(call, flat=True)
        if padding is None:
            return None
        plan = _of_wide(by_torch, padding)
        return plan if captured else outside_of_graphs(plan)

    key = _key(call.input, call.hx, call.weights, settings_of(call), call.resets, sizes)
    if sizes is not None and not _again(key):
        return
    keep(_PLANS, key, make, _tensors, call.input, call.hx, call.weights, call.resets)


def _in_turn(plans: Sequence[Any], cells: Sequence[int], biased: bool) -> Any:  # noqa: FBT001
    """The plan of layers that are launched one after another; ``cells``: how many cells each of ``plans`` computes."""
    ends = list(itertools.accumulate(cells))
    each = 4 if biased else 2
    parts = [
        (plan, slice(end - count, end), slice((end - count) * each, end * each))
        for plan, count, end in zip(plans, cells, ends, strict=True)
    ]

    def plan(x: Any, hx: Any, weights: Any, resets: Any = None) -> Any:
        h_n = torch.empty_like(hx, memory_format=torch.contiguous_format)
        for one, states, of_states in parts:
            made = one(x, hx[states], weights[of_states], resets, h_n[states])
            if made is None:
                return None
            x = made[0]
        return x, h_n, None, None

    return plan


def _of_wide(plan: Any, padding: Padding) -> Any:
    """The plan of a call that is to be padded, given the plan of the padded call."""
    pad, cut = padding

    def wide(x: Any, hx: Any, weights: Any, resets: Any = None) -> Any:
        made = plan(*pad(x, hx, weights), resets)
        return None if made is None else (*cut(*made[:2]), None, None)

    return wide


def settings_of(call: GruCall) -> tuple[Any, ...]:
    """The ``settings`` of ``known``."""
    return call.has_biases, call.num_layers, call.bidirectional, call.batch_first


def leave(call: GruCall, *, captured: bool, gradient: bool = False) -> None:
    """Remember that torch.gru serves calls of these sizes; ``captured``: in a CUDA graph too; ``gradient``: if they need one."""
    settings = settings_of(call)
    if call.cu_seqlens is None and call.resets is None and (gradient or not call.dropout):
        steps = 0 if call.batch_sizes is None else call.batch_sizes.numel()
        left.leave(
            call.weights[0], _sizes(call.input, steps, call.hx, call.weights, settings, gradient), captured=captured
        )


def _plan(launched: Launched, direct: Any) -> Callable[..., Any] | None:  # noqa: PLR0915 - one thing after another
    call, spec, variant, recurrence, _ = launched
    run, function, head, programs, rest, stream_of, enter, leave = direct
    # ``rest`` is numbers, then constants. The last two numbers are the strides of resets, and resets itself goes before them.
    marked = len(rest) - len(sequence(spec, variant, recurrence, 0, recurrence.seq).constants) - 2 if spec.resets else 0
    device = call.input.device
    tokens, hidden, each = call.input.shape[:-1], spec.hidden, 4 if spec.bias else 2
    width, item, index = spec.directions * hidden, spec.item, device.index
    counted = counters_needed(spec, recurrence.batch)
    counts = variant.exchange == "counter" and not alone(spec, variant)
    in_turn, by_row, copied = variant.in_turn, variant.by_row, launched.copied
    prepare = _preparation(launched)
    if prepare is None:
        return None
    sizes = None if call.batch_sizes is None else sizes_of(call.batch_sizes)
    addresses = _stacks(launched)
    rows, features = tokens.numel(), call.input.shape[-1]
    library = by_library(rows, call.weights[0], spec.precision)
    of_direction = rows * 3 * hidden * item  # bytes from the products of one direction to those of the other
    flat_gates = recurrence.gates.as_strided((spec.directions, rows, 3 * hidden), (rows * 3 * hidden, 3 * hidden, 1))
    products = [
        product_of(
            call.input.reshape(rows, features), call.weights[direction * each], flat_gates[direction], spec.precision
        )
        for direction in range(spec.directions)
    ]

    make_out, make_between = (
        maker((*tokens, width), call.input),
        maker((spec.layers - 1, *tokens, width), call.input),
    )
    make_counters = maker((counted,), call.input, torch.int32)
    make_gates, make_h_n = maker(kept_shape(spec, rows), call.input), maker(call.hx.shape, call.hx)
    make_states = maker((spec.directions, recurrence.batch, hidden), call.input, _FLOAT32)

    def plan(x: Any, hx: Any, weights: Any, resets: Any = None, h_n: Any = None) -> Any:
        if enter.calls or leave.calls:  # a profiler has hooks: only the public launcher calls them
            return None
        found = addresses(weights)
        if found is None:
            return None
        pointers, _copies = found  # keeps the copies alive until all is launched
        flat = x.reshape(rows, features)
        gates: Any = None
        if library:
            gates = torch.mm(flat, weights[0].t()) if spec.directions == 1 else of_both(flat, weights[::each])
        if gates is None:
            gates = make_gates()
            for direction, product in enumerate(products):
                if library:
                    torch.mm(flat, weights[direction * each].t(), out=gates[direction])
                elif product is not None:
                    product(flat, weights[direction * each], gates.data_ptr() + direction * of_direction)
                else:
                    project(flat, weights[direction * each], of_cell(gates, direction), spec.precision)
        states_0 = hx.clone(memory_format=torch.contiguous_format) if copied else hx
        out, p_h = make_out(), states_0.data_ptr()
        h_n = make_h_n() if h_n is None else h_n
        between = make_between() if spec.stacked else None
        states = make_states() if in_turn else None
        counters = make_counters() if counts else None
        prepare(out, between, counters)
        bounds = () if not in_turn else (p_h, p_h)
        if sizes is not None:
            starts, lengths = packed_tensors(sizes, device)
            bounds = (starts.data_ptr(), lengths.data_ptr())
        numbers = rest if resets is None else (*rest[:marked], resets.data_ptr(), *rest[marked:])
        try:
            run(
                programs, 1, 1, stream_of(index), function, *head,
                gates.data_ptr(), *pointers, *(() if spec.bias else (p_h, p_h)), p_h, out.data_ptr(),
                *(() if between is None else (between.data_ptr(),)), h_n.data_ptr(),
                *(() if states is None else (states.data_ptr(),)),
                *(() if by_row else (p_h if counters is None else counters.data_ptr(),)), *bounds, *numbers,
            )  # fmt: skip
        except RuntimeError as error:  # a context with fewer multiprocessors: the long path finds what fits
            if not residents.too_large(error):
                raise
            return None
        return out, h_n, gates, between

    return plan


class _Stack(NamedTuple):
    """The weights of one kind, such as weight_hh, of all cells that a launch reads."""

    where: slice  # among the weights of a call
    step: int  # bytes from one cell's weights to the next's, as the kernel was compiled for
    as_given: bool  # whether the caller's tensors may be read where they lie
    size: int  # bytes of one cell's weights
    offset: int  # bytes from the start of the memory of copies


def _stacks(launched: Launched) -> Callable[[Sequence[Any]], tuple[list[int], Any] | None]:
    """A function of the weights of a call -> (for each kind of weights the address of the first cell's, copies to keep alive).

    It returns None if neither the cells' tensors nor copies of them lie as far apart as the kernel was compiled for.
    """
    call, spec, _, recurrence, _ = launched
    each, item = 4 if spec.bias else 2, spec.item
    upper = [(0, 1, recurrence.weight_ih)] if spec.stacked else []
    biases = [(2, 0, recurrence.bias_ih), (3, 0, recurrence.bias_hh)] if spec.bias else []
    stacks: list[_Stack] = []
    copied: list[Rows] = []
    elements = 0
    for kind, first, stack in (*upper, (1, 0, recurrence.weight_hh), *biases):
        where = slice(first * each + kind, None, each)
        tensors = call.weights[where]
        count, columns = tensors[0].numel(), tensors[0].shape[-1]
        # If the kernel was compiled for a copy, which is contiguous and aligned, the caller's tensors must be so too.
        aligned = stack.data_ptr() == tensors[0].data_ptr() or not tensors[0].data_ptr() % ALIGNED_BYTES
        as_given = aligned and all(t.is_contiguous() for t in tensors)
        stacks.append(_Stack(where, stack.stride(0) * item, as_given, count * item, elements * item))
        copied += [padded((1, count // columns, columns), (0, columns), columns)] * len(tensors)
        elements += ceil_div(len(tensors) * count, ALIGNED_BYTES) * ALIGNED_BYTES
    fire, make = launches_of(copied, call.input), maker((elements,), call.input)

    def addresses(weights: Sequence[Any]) -> tuple[list[int], Any] | None:
        found = []
        for where, step, as_given, _, _ in stacks:
            given = weights[where]
            at = given[0].data_ptr()
            even = as_given and all(w.data_ptr() == at + cell * step for cell, w in enumerate(given))
            found.append(at if even else 0)
        if 0 not in found:
            return found, None
        if fire is None or any(not at and one.step != one.size for at, one in zip(found, stacks, strict=True)):
            return None
        memory = make()
        base = memory.data_ptr()
        held = [[weight.contiguous() for weight in weights[one.where]] for one in stacks]
        of_copies = [
            at
            for one, tensors in zip(stacks, held, strict=True)
            for cell, weight in enumerate(tensors)
            for at in (weight.data_ptr(), base + one.offset + cell * one.size)
        ]
        fire(tuple(of_copies))
        return [at or base + one.offset for at, one in zip(found, stacks, strict=True)], (memory, held)

    return addresses


def _preparation(launched: Launched) -> Callable[..., None] | None:
    """A function that prepares (out, between, counters) for a launch; None if launches must be public.

    Readers of a state poll until it is no longer all bits set, or until a counter, which starts at 0, says that it is written.
    """
    call, spec, variant, recurrence, _ = launched
    rows, width = call.input.shape[:-1].numel(), spec.directions * spec.hidden
    todo: dict[int, Rows] = {}  # the place of a tensor -> how our launch fills it
    by_torch: list[int] = []  # the places of tensors so large that the host's time does not count: PyTorch fills them
    if not alone(spec, variant) and variant.exchange == "counter":
        todo = {2: filled(1, counters_needed(spec, recurrence.batch) * 4 // spec.item, 0)}
    elif not alone(spec, variant):
        each = {0: rows, **({1: rows * (spec.layers - 1)} if spec.stacked else {})}
        if sum(each.values()) * width <= MOST_FILLED:
            todo = {which: filled(count, width, -1) for which, count in each.items()}
        else:
            by_torch = list(each)
    fire = launches_of(list(todo.values()), call.input) if todo else None
    if todo and fire is None:
        return None

    def prepare(*tensors: Any) -> None:
        for which in by_torch:
            as_integers(tensors[which]).fill_(-1)
        if fire is not None:
            fire(tuple([at for which in todo for at in (tensors[which].data_ptr(),) * 2]))

    return prepare


def _plan_by_library(call: GruCall, spec: GruSpec, recurrence: Recurrence, compiled: Any) -> Callable[..., Any] | None:
    """The plan of strategy "library", with little host work at a step; None if steps are several compiled kernels."""
    index, each, directions, hidden, seq = (
        call.input.device.index, 4 if spec.bias else 2, spec.directions, spec.hidden, recurrence.seq,
    )  # fmt: skip
    biases = [b for start in range(2, len(call.weights), each) for b in call.weights[start : start + each - 2]]
    if not steps_are_alike(spec) or any(not b.is_contiguous() or b.data_ptr() % ALIGNED_BYTES for b in biases):
        return None
    # The first step of a direction reads hx, whose strides differ from those of later states: it may be another compiled kernel.
    firsts = [gates_of_step(spec, recurrence, cell, 0, recurrence.h_0[cell]) for cell in range(directions)]
    laters = [
        gates_of_step(spec, recurrence, cell, 0, state_of_step(spec, recurrence, cell, 0)) for cell in range(directions)
    ]
    if any(len({tuple(map(kind_of, launch.arguments)) for launch in like}) > 1 for like in (firsts, laters)):
        return None
    compiled_first = compiled_before(index, firsts[0])
    begun = None if compiled_first is None else direct_launch(firsts[0], compiled_first, index)
    direct = direct_launch(laters[0], compiled, index)
    if begun is None or direct is None:
        return None
    programs, stream_of, enter, leave = direct.programs, direct.stream_of, direct.enter, direct.leave
    first, later = ((one.run, one.function, one.head, one.rest) for one in (begun, direct))
    apart = recurrence.gates.stride(1) * spec.item  # bytes from the gates of one step to those of the next
    rows, features, turned = call.input.shape[:-1].numel(), call.input.shape[-1], call.batch_first
    make_out = maker((*call.input.shape[:-1], directions * hidden), call.input)
    make_gates = maker(kept_shape(spec, rows), call.input)
    make_products, make_h_n = maker((recurrence.batch, 3 * hidden), call.input), maker(call.hx.shape, call.hx)

    def plan(x: Any, hx: Any, weights: Any, _resets: Any = None, h_n: Any = None) -> Any:
        if enter.calls or leave.calls:  # a profiler has hooks: only the public launcher calls them
            return None
        flat, out, gates, products = x.reshape(rows, features), make_out(), make_gates(), make_products()
        h_n = make_h_n() if h_n is None else h_n
        stream, p_products = stream_of(index), products.data_ptr()
        by_time = out.transpose(0, 1) if turned else out
        for cell in range(directions):
            w_ih, w_hh, *biases = weights[cell * each : (cell + 1) * each]
            own = of_cell(gates, cell)
            project(flat, w_ih, own, spec.precision)
            given, columns = (p_products, *[b.data_ptr() for b in biases]), w_hh.t()
            states = by_time[..., cell * hidden : (cell + 1) * hidden].unbind(0)
            order, p_gates = range(seq), own.data_ptr()
            state, (fire, function, head, rest) = hx[cell], first
            for t in reversed(order) if cell else order:
                torch.mm(state, columns, out=products)
                before, state = state, states[t]
                fire(
                    programs, 1, 1, stream, function, *head,
                    p_gates + t * apart, *given, before.data_ptr(), state.data_ptr(), *rest,
                )  # fmt: skip
                fire, function, head, rest = later
            h_n[cell].copy_(state)
        return out, h_n, gates, None

    return plan
