"""From the gradient of a recurrence and a Variant to what it launches."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tuned.families.gru.launches import counters_needed, token_strides
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, past, programs, repeated, sets_of
from tuned.families.gru_backward.variant import alone, pieces
from tuned.families.launch import Fill, Launch, Step, check_rows

__all__ = ["PARTS", "RecurrenceGradient", "counters_needed", "kernel_names", "launches"]

PARTS = 4  # gradients for each unit of a token: of r, of z, and two of n


@dataclasses.dataclass(frozen=True)
class RecurrenceGradient:
    """The tensors of one checked call. D = directions, or layers that are taken at once.

    Dense: the axes T and B may lie in any order in memory, with D between or beside them. Packed: one axis of tokens instead of T and
    B. ``gates``, ``hidden``, ``before`` and ``out`` have one order of axes, without gaps.
    """

    SCRATCH: ClassVar[tuple[str, ...]] = ("grad_h_0", "states", "counters")  # written besides out

    gates: Any  # [D, T, B, 3 * hidden] or [D, tokens, 3 * hidden]: x @ weight_ih.T
    hidden: Any  # the same of the state before each step: before @ weight_hh.T
    before: Any  # [D, T, B, hidden] or [D, tokens, hidden]: the state before each step
    weight_hh: Any  # [D, 3 * hidden, hidden], any first stride
    grad_out: Any  # [T, B, D * hidden] or [tokens, D * hidden], any strides but the last
    grad_h_n: Any  # [D, B, hidden]
    out: Any  # [D, T, B, 4 * hidden] or [D, tokens, 4 * hidden]: gradients of h_n, r, z and i_n, before their activations
    grad_h_0: Any  # [D, B, hidden]
    batch: int
    seq: int
    bias_ih: Any = None  # [D, 3 * hidden]
    bias_hh: Any = None
    states: Any = None  # float32 [D, B, hidden], for variants that take tiles in turn, and for launches of some steps
    counters: Any = None  # int32 [counters_needed(spec, batch)]
    starts: Any = None  # packed: int64 [T], first row of each step; thd: int32 [B + 1], first token of each sequence
    lengths: Any = None  # int32 [B]
    resets: Any = None  # bool [T, B] or [tokens], any strides: whether the state was 0 before a token's step


def kernel_name(spec: GruSpec, variant: GruVariant) -> str:
    """Module and function name: every text axis, in a fixed order."""
    return f"gru_{spec.layout}_backward_{variant.form}{'_resets' if spec.resets else ''}"


def kernel_names(spec: GruSpec, variant: GruVariant) -> tuple[str, ...]:
    """Every kernel that the variant launches."""
    return (kernel_name(spec, variant),)


def launches(spec: GruSpec, variant: GruVariant, call: RecurrenceGradient) -> tuple[Step, ...]:
    """All that runs for the call, in order.

    Raises:
        ValueError: a tensor does not have the strides that RecurrenceGradient requires.
    """
    _check(spec, call)
    return *before(variant, call), sequence(spec, variant, call, 0, call.seq + 1)


def before(variant: GruVariant, call: RecurrenceGradient) -> tuple[Fill, ...]:
    """The fills that programs need before they wait for each other."""
    if variant.exchange == "counter":
        return (Fill(call.counters, 0),)
    return (Fill(call.out, -1),)  # all bits set: readers poll until a value differs


def _check(spec: GruSpec, call: RecurrenceGradient) -> None:
    rows = (
        "gates",
        "hidden",
        "before",
        "weight_hh",
        "grad_out",
        "grad_h_n",
        "out",
        "grad_h_0",
        "bias_ih",
        "bias_hh",
        "starts",
        "lengths",
    )
    check_rows(**{name: getattr(call, name) for name in rows})
    if call.weight_hh.stride(-2) != spec.hidden:
        raise ValueError(
            f"each matrix of weight_hh must be contiguous, got shape {list(call.weight_hh.shape)} with strides "
            f"{list(call.weight_hh.stride())}"
        )
    tokens = _tokens_apart(spec, call.out, PARTS)
    for name, each in (("gates", 3), ("hidden", 3), ("before", 1), ("out", PARTS)):
        tensor = getattr(call, name)
        if _tokens_apart(spec, tensor, each) != tokens:
            raise ValueError(
                f"{name} must lie as out does, without gaps, got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )


def _tokens_apart(spec: GruSpec, tensor: Any, parts: int) -> tuple[float, ...]:
    """The strides of a tensor with so many parts of each unit, but the last, in tokens; a single cell's stride is all tokens."""
    apart = [stride / (parts * spec.hidden) for stride in tensor.stride()[:-1]]
    if len(tensor) == 1:
        apart[0] = float(tensor[0, ..., 0].numel())
    return tuple(apart)


def exchange(spec: GruSpec, variant: GruVariant) -> str:
    """How programs wait: as the variant says, but for packed rows they poll instead of spinning.

    A thread that spins looks at elements of several rows, and waits for all of them or for none. Packed rows end at different steps,
    and a row that has ended has nothing to wait for. If such a row was a thread's last one, the thread waited for none of its rows,
    and took values of the others that were not there yet.
    """
    return "poll" if spec.layout == "packed" and variant.exchange == "spin" else variant.exchange


def _past(spec: GruSpec, batch: int, variant: GruVariant) -> str:
    """As ``past``, but all rows are read if there is more than one: leaving loads out takes longer then."""
    return past(spec, batch, variant) if batch == 1 else repeated(batch, variant)


def sequence(spec: GruSpec, variant: GruVariant, call: RecurrenceGradient, begin: int, end: int) -> Launch:
    """The launch of the steps in [begin, end) of seq + 1. If that is one step, its programs do not wait."""
    waits = end - begin > 1
    counts = waits and variant.exchange == "counter"
    whole = begin == 0 and end == call.seq + 1
    biases = (call.bias_ih, call.bias_hh) if spec.bias else ()
    first, second, third = pieces(spec, variant.splits)
    size = GruSize(call.batch, call.seq)
    dense = spec.layout == "dense"
    cell, *token = map(int, _tokens_apart(spec, call.out, PARTS))
    return Launch(
        kernel=kernel_name(spec, variant),
        programs=programs(spec, size, variant),
        arguments=(
            call.gates,
            call.hidden,
            call.before,
            call.weight_hh,
            *(biases or (call.grad_h_n, call.grad_h_n)),
            call.grad_out,
            call.grad_h_n,
            call.out,
            call.grad_h_0,
            call.grad_h_n if whole and not variant.in_turn else call.states,
            call.counters if counts else call.grad_h_n,
            *((call.grad_h_n, call.grad_h_n) if dense else (call.starts, call.lengths)),
            cell,
            call.batch,
            call.seq,
            sets_of(size, variant),
            begin,
            end,
            *(token if dense else (token[0], 0)),
            call.weight_hh.stride(0),
            *(tuple(bias.stride(0) for bias in biases) or (0, 0)),
            *token_strides(spec, call.grad_out),
            *call.grad_h_n.stride()[:2],
            *call.grad_h_0.stride()[:2],
            *((call.resets, *token_strides(spec, call.resets)) if spec.resets else ()),
        ),
        constants={
            "HIDDEN": spec.hidden,
            "DIRECTIONS": spec.directions,
            "BIAS": spec.bias,
            "PRECISION": spec.precision if spec.dtype == "float32" else "ieee",
            "BLOCK_HIDDEN": variant.block_hidden,
            "BLOCK_BATCH": variant.block_batch,
            "SPLITS": variant.splits,
            "WIDTH_0": first,
            "WIDTH_1": second,
            "WIDTH_2": third,
            "EXCHANGE": exchange(spec, variant) if waits else "none",
            "EARLY": variant.prefetch == "early",
            "IN_TURN": variant.in_turn,
            "THREADS": 32 * variant.num_warps,
            "PAST": _past(spec, call.batch, variant),
        },
        options={"num_warps": variant.num_warps, "num_stages": 1}
        | ({"launch_cooperative_grid": True} if waits and not alone(spec, variant) else {}),
    )
