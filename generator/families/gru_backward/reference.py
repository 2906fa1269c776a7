"""The gradient of a GRU over sequences as tuning checks and times it: inputs, the float64 reference, the baseline, bytes, work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import PTX_EXCHANGES, GruVariant
from tuned.families.gru_backward.launches import (
    PARTS,
    RecurrenceGradient,
    before,
    counters_needed,
    sequence,
)
from tuned.families.gru_backward.variant import pieces
from tuned.families.launch import Step, ceil_div

from ...problem import Problem
from ..amounts import TF32_ROUNDOFF, UNIT_ROUNDOFF, Work
from ..gru.reference import (
    FLIGHT_BYTES,
    GATES_PER_CLOCK,
    IEEE_UNIT,
    L2_BYTES_PER_CLOCK,
    PRODUCTS_PER_CLOCK,
    ROUND_US,
    SHARED_BYTES_PER_CLOCK,
    STEP_US,
    cut_before,
    lengths_of,
    resets_of,
    small,
    starts_of,
    tile,
    token_of,
)

__all__ = ["bytes_moved", "eager", "inputs", "interpreted", "reference", "small", "tensor_bytes", "tile", "work"]

UNITS = 6  # messages between programs are rounded once a step, and a step contracts errors
GRU_MODE = 3  # cuDNN's number for a GRU


def inputs(spec: GruSpec, size: GruSize, device: str, seed: int) -> RecurrenceGradient:
    """One set of random inputs; out is not filled. On the device "meta" nothing is allocated, which is enough to compile."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.normal_(std=scale, generator=generator)

    hidden, batch, sets = spec.hidden, size.batch, spec.directions
    lengths = lengths_of(spec, size)
    dense, scale = spec.layout == "dense", hidden**-0.5
    tokens = (size.seq, batch) if dense else (sum(lengths),)
    starts_type = torch.int64 if spec.layout == "packed" else torch.int32
    states = normal(sets, *tokens, hidden, scale=0.5)
    return RecurrenceGradient(
        gates=normal(sets, *tokens, 3 * hidden),
        hidden=normal(sets, *tokens, 3 * hidden),
        before=states if device == "meta" else states.clamp_(-1, 1),
        weight_hh=normal(sets, 3 * hidden, hidden, scale=scale),
        grad_out=normal(*tokens, sets * hidden),
        grad_h_n=normal(sets, batch, hidden),
        out=torch.empty((sets, *tokens, PARTS * hidden), dtype=dtype, device=device),
        grad_h_0=torch.empty((sets, batch, hidden), dtype=dtype, device=device),
        batch=batch,
        seq=size.seq,
        bias_ih=normal(sets, 3 * hidden, scale=scale) if spec.bias else None,
        bias_hh=normal(sets, 3 * hidden, scale=scale) if spec.bias else None,
        states=torch.empty((sets, batch, hidden), dtype=torch.float32, device=device),
        counters=torch.zeros(counters_needed(spec, batch), dtype=torch.int32, device=device),
        starts=None if dense else torch.tensor(starts_of(spec, lengths), device=device, dtype=starts_type),
        lengths=None if dense else torch.tensor(lengths, device=device, dtype=torch.int32),
        resets=resets_of(spec, tokens, device, seed),
    )


def reference(spec: GruSpec, call: RecurrenceGradient) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients in float64, and the largest error that may be left, per element.

    The bound: UNITS roundings of numbers as large as the largest result of that row and step, and one of the result.
    """
    wanted, _ = gradients(spec, call)
    largest = wanted.abs().amax(-1, keepdim=True)
    float32 = TF32_ROUNDOFF if spec.precision == "tf32" else IEEE_UNIT
    unit = float32 if spec.dtype == "float32" else UNIT_ROUNDOFF[spec.dtype]
    return wanted, unit * (wanted.abs() + UNITS * largest)


def gradients(spec: GruSpec, call: RecurrenceGradient) -> tuple[torch.Tensor, torch.Tensor]:
    """The right values of (``out``, ``grad_h_0``) in float64."""
    hidden = spec.hidden
    tokens, there = token_of(spec, call, call.out.device)
    zero = torch.zeros((), dtype=torch.float64, device=call.out.device)
    found, first = [], []
    for direction in range(spec.directions):
        x = call.gates[direction].reshape(-1, 3, hidden).double()
        h = call.hidden[direction].reshape(-1, 3, hidden).double()
        states = call.before[direction].reshape(-1, hidden).double()
        grads = call.grad_out.reshape(len(states), -1)[:, direction * hidden : (direction + 1) * hidden].double()
        weight = call.weight_hh[direction].double()
        b_r, b_z, b_x = call.bias_ih[direction].double().chunk(3) if spec.bias else (zero,) * 3
        c_r, c_z, b_h = call.bias_hh[direction].double().chunk(3) if spec.bias else (zero,) * 3
        d = call.grad_h_n[direction].double()
        wanted = x.new_zeros(len(states), PARTS, hidden)
        for step in reversed(range(call.seq)):
            now = there[step][:, None]
            # A last sequence without a token starts behind the end.
            at = tokens[direction][step].clamp(max=len(states) - 1)
            (x_r, x_z, x_n), (h_r, h_z, h_n) = x[at].unbind(1), h[at].unbind(1)
            r, z = torch.sigmoid(x_r + h_r + b_r + c_r), torch.sigmoid(x_z + h_z + b_z + c_z)
            n = torch.tanh(x_n + b_x + r * (h_n + b_h))
            all_d = d + grads[at]
            d_n = all_d * (1 - z) * (1 - n * n)
            d_z = all_d * (states[at] - n) * z * (1 - z)
            d_r, d_h = d_n * (h_n + b_h) * r * (1 - r), d_n * r
            wanted[at[now[:, 0]]] = torch.stack((d_h, d_r, d_z, d_n), 1)[now[:, 0]]
            d = torch.where(now, all_d * z + torch.cat((d_r, d_z, d_h), -1) @ weight, d)
            if spec.resets:
                d = d.masked_fill(cut_before(call, tokens[direction], there, step, direction), 0)
        found.append(wanted.reshape(call.out[direction].shape))
        first.append(d)
    return torch.stack(found), torch.stack(first)


def eager(spec: GruSpec, call: RecurrenceGradient) -> Any:
    """The gradient of torch.nn.GRU of the same shape, with an input as wide as the state.

    It is the gradient of all weights and the input, since cuDNN does not offer that of the recurrence alone. On a GPU
    the cuDNN operator is called, which a CUDA graph can capture; elsewhere autograd.
    """
    device, dtype = call.out.device, call.out.dtype
    module = torch.nn.GRU(
        spec.hidden, spec.hidden, bias=spec.bias, bidirectional=spec.directions > 1, device=device, dtype=dtype
    )
    x = torch.randn((*call.grad_out.shape[:-1], spec.hidden), device=device).to(dtype)
    sizes: list[int] = []
    if spec.layout != "dense":
        lengths = call.lengths.tolist()
        sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    allow_tf32 = spec.precision == "tf32"
    if device.type != "cuda":
        given: Any = torch.nn.utils.rnn.PackedSequence(x, torch.tensor(sizes)) if sizes else x
        out, h_n = module(given, call.grad_h_n)
        out = out.data if sizes else out
        wanted = list(module.parameters())
        return lambda: torch.autograd.grad((out, h_n), wanted, (call.grad_out, call.grad_h_n), retain_graph=True)
    weights = [w.detach() for w in module._flat_weights if isinstance(w, torch.Tensor)]  # noqa: SLF001 - as its forward does
    each = 4 if spec.bias else 2
    settings = (GRU_MODE, spec.hidden, 0, 1, False, 0.0, True, spec.directions > 1, sizes, None)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32):
        out, _, _, reserve, buffer = torch.ops.aten._cudnn_rnn(x, weights, each, None, call.grad_h_n, None, *settings)  # noqa: SLF001

    def run() -> Any:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32):
            return torch.ops.aten._cudnn_rnn_backward(  # noqa: SLF001 - what autograd calls
                x, weights, each, buffer, call.grad_h_n, None, out, call.grad_out, call.grad_h_n, None, *settings, reserve,
                [True, True, False, True],
            )[0]  # fmt: skip

    return run


def bytes_moved(spec: GruSpec, size: GruSize) -> int:
    """Bytes that must move: gates, states and gradients of a token, each weight read once, grad_h_n and grad_h_0."""
    tokens = sum(lengths_of(spec, size))
    entries = (6 + 2 + PARTS) * tokens + 3 * spec.hidden + 2 * size.batch + (6 if spec.bias else 0)
    return entries * spec.directions * spec.hidden * spec.item


def tensor_bytes(spec: GruSpec, size: GruSize) -> int:
    """Bytes of one set of inputs and outputs, with the states that turns keep."""
    return bytes_moved(spec, size) + 4 * spec.directions * size.batch * spec.hidden


def interpreted(spec: GruSpec, variant: GruVariant, call: RecurrenceGradient) -> Iterator[Step]:
    """The steps without PTX, which changes no result, and without waiting, since the interpreter runs programs in turn."""
    if variant.exchange in PTX_EXCHANGES:
        variant = dataclasses.replace(variant, exchange="poll")
    yield from before(variant, call)
    yield from (sequence(spec, variant, call, step, step + 1) for step in range(call.seq + 1))


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The work of all steps, as one launch: their chain decides, as in the forward recurrence; a unit has three values."""
    spec, size = problem.spec, problem.size
    units, rows, columns = variant.block_hidden, variant.block_batch, sum(pieces(spec, variant.splits))
    weights, message = units * columns * spec.item, rows * columns * spec.item
    arithmetic = spec.precision if spec.dtype == "float32" else spec.dtype
    clocks = variant.turns * (
        weights / SHARED_BYTES_PER_CLOCK
        + message / L2_BYTES_PER_CLOCK
        + units * max(rows, 16) * columns / (PRODUCTS_PER_CLOCK[arithmetic] * min(1.0, variant.num_warps / 4))
        + units * rows * (2 / GATES_PER_CLOCK + 2 * 4 * variant.splits / SHARED_BYTES_PER_CLOCK)
    )
    rounds = ceil_div(message, FLIGHT_BYTES * 32 * variant.num_warps)
    tiles = ceil_div(spec.hidden, units) * ceil_div(ceil_div(size.batch, rows), variant.turns) * spec.directions
    steps = size.seq + 1
    return (
        Work(
            programs=tiles,
            warps=variant.num_warps,
            memory_bytes=bytes_moved(spec, size),
            again_bytes=0.0,
            in_flight_bytes=min(message, 16 * 32 * variant.num_warps),
            elements=0.0,
            sines=0.0,
            pairs_per_thread=max(1.0, units * rows / (32 * variant.num_warps)),
            row_bytes=columns * spec.item,
            chain_us=steps * (STEP_US[variant.exchange] + ROUND_US * (rounds - 1)),
            chain_clocks=steps * clocks,
        ),
    )
