"""From a recurrence and a Variant to what it launches."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, alone, kept, past, pieces, programs, sets_of, widths
from tuned.families.gru_cell.launches import GruCellCall, gates_launch, gates_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import gates_variant
from tuned.families.launch import Copy, Fill, Launch, Product, Step, check_rows

WORD = 8  # bytes of weights that a thread of form "row" loads at a time, where they are aligned
ALIGNED = 16  # Triton specialises a kernel on whether this divides an address or a stride
COUNTER_STRIDE = 32  # int32 elements, 128 bytes: each counter has its own cache line


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The tensors of one checked call. G = layers * directions, C = directions * hidden.

    Dense tensors may have any strides except the last, which is 1. Packed tensors have one axis of tokens where dense ones
    have time and batch.
    """

    SCRATCH: ClassVar[tuple[str, ...]] = ("h_n", "between", "states", "counters", "products")  # written besides out

    gates: Any  # [directions, T, B, 3 * hidden] or [directions, tokens, 3 * hidden]: x @ weight_ih.T
    weight_hh: Any  # [G, 3 * hidden, hidden], any first stride
    h_0: Any  # [G, B, hidden]
    out: Any  # [T, B, C] or [tokens, C], contiguous in some order of T and B
    h_n: Any  # [G, B, hidden]
    batch: int
    seq: int
    weight_ih: Any = None  # [layers - 1, 3 * hidden, hidden] of a stack
    between: Any = None  # [layers - 1, T, B, hidden] of a stack
    bias_ih: Any = None  # [G, 3 * hidden]
    bias_hh: Any = None
    states: Any = None  # float32 [G, B, hidden], for variants that take tiles in turn
    counters: Any = None  # int32 [COUNTER_STRIDE * rows of programs]
    products: Any = None  # [B, 3 * hidden], for strategy "library"
    starts: Any = None  # packed: int64 [T], first row of each step; thd: int32 [B + 1], first token of each sequence
    lengths: Any = None  # int32 [B]
    resets: Any = None  # bool [T, B] or [tokens], any strides: whether the state is 0 before a token's step


def counters_needed(spec: GruSpec, batch: int) -> int:
    """Elements of ``counters`` that suffice for every variant."""
    return COUNTER_STRIDE * spec.layers * spec.directions * -(-batch // 8)


def kernel_name(spec: GruSpec, variant: GruVariant) -> str:
    """Module and function name: every text axis, in a fixed order."""
    body = "stack" if spec.stacked else "turns" if variant.in_turn else "layer"
    return f"gru_{spec.layout}_{body}_{variant.form}{'_resets' if spec.resets else ''}"


def kernel_names(spec: GruSpec, variant: GruVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches."""
    library = variant.strategy == "library"
    return (gates_name(bias=spec.bias, inplace=False) if library else kernel_name(spec, variant),)


def launches(spec: GruSpec, variant: GruVariant, call: Recurrence) -> tuple[Step, ...]:
    """All that runs for the call, in order.

    Raises:
        ValueError: a tensor does not have the strides that Recurrence requires.
    """
    _check(call)
    if variant.strategy == "library":
        return _library(spec, call)
    if variant.strategy == "steps":
        return tuple(sequence(spec, variant, call, step, step + 1) for step in range(call.seq))
    before: list[Step] = []
    if not alone(spec, variant):
        if variant.exchange == "counter":
            before.append(Fill(call.counters, 0))
        else:  # all bits set: readers poll until a value differs
            before += [Fill(tensor, -1) for tensor in (call.out, call.between) if tensor is not None]
    return (*before, sequence(spec, variant, call, 0, call.seq))


def _check(call: Recurrence) -> None:
    rows = (
        "gates",
        "weight_hh",
        "weight_ih",
        "h_0",
        "out",
        "h_n",
        "between",
        "bias_ih",
        "bias_hh",
        "starts",
        "lengths",
    )
    check_rows(**{name: getattr(call, name) for name in rows})
    for name in ("weight_hh", "weight_ih"):
        weights = getattr(call, name)
        if weights is not None and weights.stride(-2) != weights.shape[-1]:
            raise ValueError(
                f"each matrix of {name} must be contiguous, got shape {list(weights.shape)} with strides "
                f"{list(weights.stride())}"
            )


def sequence(spec: GruSpec, variant: GruVariant, call: Recurrence, begin: int, end: int) -> Launch:
    """The launch of the steps in [begin, end); all of them for form "row". The programs of one step of one layer do not wait."""
    assert not variant.by_row or (begin, end) == (0, call.seq), f"form='row' has all {call.seq} steps in a launch"
    waits = spec.stacked or (end - begin > 1 and not alone(spec, variant))
    numbers = (
        _numbers_of_row(spec, variant, call) if variant.by_row else _numbers(spec, variant, call.batch, waits=waits)
    )
    counts = waits and variant.exchange == "counter"
    biases = (call.bias_ih, call.bias_hh) if spec.bias else ()
    turns = variant.in_turn
    size = GruSize(call.batch, call.seq)
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, size, variant),
        arguments=(
            call.gates,
            *((call.weight_ih,) if spec.stacked else ()),
            call.weight_hh,
            *(biases or (call.h_0, call.h_0)),
            call.h_0,
            call.out,
            *((call.between,) if spec.stacked else ()),
            call.h_n,
            *((call.states,) if turns else ()),
            *(() if variant.by_row else (call.counters if counts else call.h_0,)),
            *((call.starts, call.lengths) if not spec.dense else (call.h_0, call.h_0) if turns else ()),
            call.batch,
            call.seq,
            *((sets_of(size, variant),) if turns else ()),
            *(() if variant.by_row else (begin, end)),
            call.gates.stride(0),
            *token_strides(spec, call.gates[0]),
            *((call.weight_ih.stride(0),) if spec.stacked else ()),
            call.weight_hh.stride(0),
            *((call.weight_hh.stride(-1),) if variant.by_row else ()),
            *(tuple(bias.stride(0) for bias in biases) or (0, 0)),
            *call.h_0.stride()[:2],
            *token_strides(spec, call.out),
            *((call.between.stride(0), *token_strides(spec, call.between[0])) if spec.stacked else ()),
            *call.h_n.stride()[:2],
            *((call.resets, *token_strides(spec, call.resets)) if spec.resets else ()),
        ),
        constants=numbers,
        options={"num_warps": variant.num_warps, "num_stages": 1}
        | ({"launch_cooperative_grid": True} if waits else {}),
    )


def _numbers(spec: GruSpec, variant: GruVariant, batch: int, *, waits: bool) -> dict[str, Any]:
    """The numbers that a kernel of tiles is compiled for."""
    if variant.staged:
        each = widths(spec, variant)
        columns = {"WIDTH": each[0], "LAST": each[-1], "STAGES": len(each), "KEPT": kept(spec, variant)}
    else:
        columns = dict(zip(("WIDTH_0", "WIDTH_1", "WIDTH_2"), pieces(spec.hidden, variant.splits), strict=True))
    return {
        "HIDDEN": spec.hidden,
        "DIRECTIONS": spec.directions,
        **({} if variant.in_turn or variant.staged else {"LAYERS": spec.layers}),
        "BIAS": spec.bias,
        "PRECISION": spec.precision if spec.dtype == "float32" else "ieee",
        "BLOCK_HIDDEN": variant.block_hidden,
        "BLOCK_BATCH": variant.block_batch,
        "SPLITS": variant.splits,
        **columns,
        "EXCHANGE": variant.exchange if waits else "none",
        "EARLY": variant.prefetch == "early",
        "THREADS": 32 * variant.num_warps,
        "PAST": past(spec, batch, variant),
    }


def _numbers_of_row(spec: GruSpec, variant: GruVariant, call: Recurrence) -> dict[str, Any]:
    """The numbers that a kernel of form "row" is compiled for."""
    weights = call.weight_hh
    # Of addresses and strides, use only what Triton specialises on: a cached launch serves all calls that are alike in that.
    aligned = not weights.data_ptr() % ALIGNED and (spec.directions == 1 or not weights.stride(0) % ALIGNED)
    words = aligned and not spec.hidden * spec.item % WORD
    return {
        "HIDDEN": spec.hidden,
        "DIRECTIONS": spec.directions,
        "BIAS": spec.bias,
        "BLOCK_HIDDEN": variant.block_hidden,
        "PACK": WORD // spec.item if words else 1,
    }


def token_strides(spec: GruSpec, tensor: Any) -> tuple[int, int]:
    """Strides of a tensor of tokens: (time, batch) if dense, otherwise (token, 0)."""
    return tensor.stride()[:2] if spec.dense else (tensor.stride(0), 0)


def _library(spec: GruSpec, call: Recurrence) -> tuple[Step, ...]:
    """For each step and direction: a GEMM of the state, and the gates kernel."""
    steps: list[Step] = []
    for direction in range(spec.directions):
        state = call.h_0[direction]
        for step in range(call.seq):
            gates = gates_of_step(spec, call, direction, step, state)
            steps += [Product(state, call.weight_hh[direction], call.products), gates]
            state = state_of_step(spec, call, direction, step)
        steps.append(Copy(state, call.h_n[direction]))
    return tuple(steps)


def state_of_step(spec: GruSpec, call: Recurrence, direction: int, step: int) -> Any:
    """Where a step of a direction writes its state, a part of ``out``."""
    t = call.seq - 1 - step if direction else step
    return call.out[t, :, direction * spec.hidden : (direction + 1) * spec.hidden]


def gates_of_step(spec: GruSpec, call: Recurrence, direction: int, step: int, state: Any) -> Launch:
    """The launch of strategy "library" that makes a step's state from the one before and its products."""
    hidden, precision = spec.hidden, spec.precision if spec.dtype == "float32" else ""
    cell = GruCellSpec(spec.dtype, hidden, (hidden,), spec.bias, precision=precision)
    bias = (call.bias_ih[direction], call.bias_hh[direction]) if spec.bias else ()
    weight, out = call.weight_hh[direction], state_of_step(spec, call, direction, step)
    t = call.seq - 1 - step if direction else step
    one = GruCellCall.of((state,), state, weight, weight, out, *bias)
    return gates_launch(cell, gates_variant(hidden), one, (call.gates[direction, t], call.products))
