"""The GRU over sequences as tuning checks and times it: inputs, the float64 reference, the baseline, bytes, work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tuned.families.gru.launches import Recurrence, counters_needed, launches, sequence
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import PTX_EXCHANGES, GruVariant, programs, widths
from tuned.families.gru.variant import alone as runs_alone
from tuned.families.launch import Launch, Step, ceil_div

from ...problem import Problem
from ..amounts import TF32_ROUNDOFF, UNIT_ROUNDOFF, Work

IEEE_UNIT = 64 * UNIT_ROUNDOFF["float32"]  # of a float32 sum of thousands of terms
UNITS = 6  # the state is rounded once a step, and a step contracts: two to three were measured, over 20,000 steps


def lengths_of(spec: GruSpec, size: GruSize) -> list[int]:
    """Steps of each sequence, falling from all to half; with cu_seqlens rising instead, since they need not be sorted."""
    if spec.layout == "dense":
        return [size.seq] * size.batch
    shortest = max(1, size.seq // 2)
    span = max(1, size.batch - 1)
    falling = [size.seq - row * (size.seq - shortest) // span for row in range(size.batch)]
    return falling if spec.layout == "packed" else falling[::-1]


def starts_of(spec: GruSpec, lengths: list[int]) -> list[int]:
    """Packed: first row of each step; "thd": first token of each sequence, and the end."""
    if spec.layout == "thd":
        return list(itertools.accumulate(lengths, initial=0))
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return list(itertools.accumulate(sizes[:-1], initial=0))


def inputs(spec: GruSpec, size: GruSize, device: str, seed: int) -> Recurrence:
    """One set of random inputs, as in torch.nn.GRU after the projection of its input; out is not filled.

    On the device "meta" nothing is allocated, which is enough to compile.
    """
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.normal_(std=scale, generator=generator)

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, batch, sets = spec.hidden, size.batch, spec.layers * spec.directions
    lengths = lengths_of(spec, size)
    tokens = (size.seq, batch) if spec.layout == "dense" else (sum(lengths),)
    dense, scale = spec.layout == "dense", hidden**-0.5
    starts_type = torch.int64 if spec.layout == "packed" else torch.int32
    return Recurrence(
        gates=normal(spec.directions, *tokens, 3 * hidden),
        weight_hh=normal(sets, 3 * hidden, hidden, scale=scale),
        h_0=normal(sets, batch, hidden),
        out=empty(*tokens, spec.directions * hidden),
        h_n=empty(sets, batch, hidden),
        batch=batch,
        seq=size.seq,
        weight_ih=normal(spec.layers - 1, 3 * hidden, hidden, scale=scale) if spec.stacked else None,
        between=empty(spec.layers - 1, *tokens, hidden) if spec.stacked else None,
        bias_ih=normal(sets, 3 * hidden, scale=scale) if spec.bias else None,
        bias_hh=normal(sets, 3 * hidden, scale=scale) if spec.bias else None,
        states=torch.empty((sets, batch, hidden), dtype=torch.float32, device=device),
        counters=torch.zeros(counters_needed(spec, batch), dtype=torch.int32, device=device),
        products=empty(batch, 3 * hidden) if dense and not spec.stacked else None,
        starts=None if dense else torch.tensor(starts_of(spec, lengths), device=device, dtype=starts_type),
        lengths=None if dense else torch.tensor(lengths, device=device, dtype=torch.int32),
        resets=resets_of(spec, tokens, device, seed),
    )


def resets_of(spec: GruSpec, tokens: tuple[int, ...], device: str, seed: int) -> torch.Tensor | None:
    """A mark for about one token in eight; None for a spec without resets."""
    if not spec.resets:
        return None
    marks = torch.empty(tokens, device=device)
    return (
        marks.bool()
        if device == "meta"
        else marks.uniform_(generator=torch.Generator(device).manual_seed(seed)) < 1 / 8
    )


def reference(spec: GruSpec, call: Recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in float64, and the largest error that may be left, per element.

    The bound: UNITS roundings of numbers up to 1, the range of a state, and one of the result.
    """
    tokens, there = token_of(spec, call, call.gates.device)
    x = call.gates.reshape(spec.directions, -1, 3 * spec.hidden)
    out = torch.empty(0)
    for layer in range(spec.layers):
        sets = slice(layer * spec.directions, (layer + 1) * spec.directions)
        states = _states(spec, call, sets, x, tokens, there)
        out = torch.zeros((x.shape[1], spec.directions * spec.hidden), dtype=torch.float64, device=x.device)
        for direction, part in enumerate(out.split(spec.hidden, -1)):
            part[tokens[direction][there]] = states[:, direction][there]
        if layer < spec.layers - 1:
            x = (out @ call.weight_ih[layer].double().t()).unsqueeze(0)
    wanted = out.view(call.out.shape)
    float32 = TF32_ROUNDOFF if spec.precision == "tf32" else IEEE_UNIT
    unit = float32 if spec.dtype == "float32" else UNIT_ROUNDOFF[spec.dtype]
    return wanted, unit * (wanted.abs() + UNITS)


def token_of(spec: GruSpec, call: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each direction, step and row, [directions, seq, batch]; and whether there is one, [seq, batch]."""
    step = torch.arange(call.seq, device=device)[:, None]
    row = torch.arange(call.batch, device=device)[None, :]
    dense = spec.layout == "dense"
    length = torch.full_like(row, call.seq) if dense else call.lengths.long()[None, :]
    last = (length - 1).clamp(min=0)
    found = []
    for direction in range(spec.directions):
        t = (last - step if direction else step).clamp(min=0).minimum(last)
        if dense:
            found.append(t * call.batch + row)
        elif spec.layout == "packed":
            found.append(call.starts[t] + row)
        else:
            found.append(call.starts[:-1].long()[None, :] + t)
    return torch.stack(found), step < length


def cut_before(call: Any, tokens: torch.Tensor, there: torch.Tensor, step: int, direction: int) -> torch.Tensor:
    """[batch, 1]: whether the state is reset before a step of a direction; ``tokens`` and ``there`` are from ``token_of``."""
    marked = step - direction  # in the reverse direction, the token that is left has the mark
    if marked < 0:
        return torch.zeros_like(there[0][:, None])
    marks = call.resets.reshape(-1)
    at = tokens[marked].clamp(max=max(len(marks) - 1, 0))
    return (marks[at] & there[step])[:, None]


def _states(  # noqa: PLR0913 - one layer of the call
    spec: GruSpec, call: Recurrence, sets: slice, x: torch.Tensor, tokens: torch.Tensor, there: torch.Tensor
) -> torch.Tensor:
    """[seq, directions, batch, hidden] in float64: the state after each step; an ended sequence keeps its last state."""
    weight = call.weight_hh[sets].double().transpose(1, 2)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    bias_ih = call.bias_ih[sets, None].double() if spec.bias else zero
    bias_hh = call.bias_hh[sets, None].double() if spec.bias else zero
    each = torch.arange(spec.directions, device=x.device)[:, None]
    state = call.h_0[sets].double()
    states = state.new_empty((call.seq, *state.shape))
    for step in range(call.seq):
        if spec.resets:
            cut = [cut_before(call, tokens[direction], there, step, direction) for direction in range(spec.directions)]
            state = state.masked_fill(torch.stack(cut), 0)
        x_r, x_z, x_n = (x[each, tokens[:, step]].double() + bias_ih).chunk(3, -1)
        h_r, h_z, h_n = (state @ weight + bias_hh).chunk(3, -1)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        after = n + torch.sigmoid(x_z + h_z) * (state - n)
        state = torch.where(there[step][None, :, None], after, state)
        states[step] = state
    return states


def eager(spec: GruSpec, call: Recurrence) -> Any:
    """torch.nn.GRU of the same shape, with an input as wide as the state: its time includes the input projection.

    cuDNN does not offer the recurrence alone. Layouts are torch's; with cu_seqlens the input is a PackedSequence.
    """
    module = torch.nn.GRU(
        spec.hidden,
        spec.hidden,
        spec.layers,
        bias=spec.bias,
        bidirectional=spec.directions > 1,
        device=call.gates.device,
        dtype=call.gates.dtype,
    ).requires_grad_(requires_grad=False)
    x: Any = torch.randn((*call.out.shape[:-1], spec.hidden), device=call.gates.device).to(call.gates.dtype)
    if spec.layout != "dense":
        lengths = call.lengths.tolist()
        sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
        x = torch.nn.utils.rnn.PackedSequence(x, torch.tensor(sizes))
    allow_tf32 = spec.precision == "tf32"

    def run() -> Any:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allow_tf32):
            return module(x, call.h_0)[0]

    return run


def bytes_moved(spec: GruSpec, size: GruSize) -> int:
    """Bytes that must move: the gates of the input read, the output written, each weight read once, h_0 and h_n."""
    sets = spec.layers * spec.directions
    tokens = sum(lengths_of(spec, size))
    matrices = sets + spec.layers - 1
    entries = 4 * tokens * spec.directions + 3 * spec.hidden * matrices + 2 * size.batch * sets
    entries += 6 * sets if spec.bias else 0
    return entries * spec.hidden * spec.item


def tensor_bytes(spec: GruSpec, size: GruSize) -> int:
    """Bytes of one set of inputs and outputs, with the states between the layers of a stack and those that turns keep."""
    between = (spec.layers - 1) * sum(lengths_of(spec, size)) * spec.hidden * spec.item
    products = 0 if spec.stacked else 3 * size.batch * spec.hidden * spec.item
    states = 4 * spec.layers * spec.directions * size.batch * spec.hidden
    return bytes_moved(spec, size) + between + products + states


def small(size: GruSize, _variant: GruVariant) -> GruSize:
    """A size with so few steps and rows that the interpreter takes under a second."""
    return dataclasses.replace(size, batch=min(size.batch, 3), seq=min(size.seq, 4))


def interpreted(spec: GruSpec, variant: GruVariant, call: Recurrence) -> Iterator[Step]:
    """The steps without PTX, which changes no result, and without waiting, since the interpreter runs programs in turn."""
    if variant.exchange in PTX_EXCHANGES:
        variant = dataclasses.replace(variant, exchange="poll")
    for step in launches(spec, variant, call):
        if isinstance(step, Launch) and step.options.get("launch_cooperative_grid"):
            yield from (sequence(spec, variant, call, time, time + 1) for time in range(call.seq))
        else:
            yield step


# The work of a variant: programs, bytes, sines, threads; and the tile of a program.

# Microseconds of a time step of the recurrence besides the work of a program in it, measured on an H200.
STEP_US = {"alone": 0.2, "spin": 1.2, "probe": 1.2, "poll": 1.5, "counter": 1.8, "steps": 2.0, "library": 4.0}
# Bytes that a processor reads a clock, from shared memory (CUDA C++ Programming Guide) and from L2 (by published
# microbenchmarks).
SHARED_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 40
# Multiplications of a processor a clock: about half of what a data sheet says for large tiles.
PRODUCTS_PER_CLOCK = {"float16": 1024, "bfloat16": 1024, "tf32": 512, "ieee": 64}
FLIGHT_BYTES, ROUND_US = 128, 0.6  # a thread has eight loads of 16 bytes in flight, and waits 0.6 us for L2
LANES = 128  # float32 multiplications a clock of a processor, without tensor cores: form "row"
GATES_PER_CLOCK = 2  # elements of the state a clock: each takes some 60 instructions, on 128 lanes


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The work of all steps of a sequence, as one launch.

    The chain of steps decides the time. In each step a program waits for the states of the others, reads the state of
    its rows from L2 and its weights from where they are, multiplies, and computes its gates.
    """
    spec, size = problem.spec, problem.size
    library = variant.strategy == "library"
    persistent = variant.strategy == "persistent"
    alone = persistent and runs_alone(spec, variant)
    how = "alone" if alone else variant.exchange if persistent else variant.strategy
    # The library's tile is not known: one processor reads about this much of the weights.
    units, rows = (32, min(64, size.batch)) if library else (variant.block_hidden, variant.block_batch)
    columns = spec.hidden if library else sum(widths(spec, variant))
    sets = 2 if spec.stacked else 1
    weights = 3 * units * columns * spec.item * sets
    state = rows * columns * spec.item * sets
    arithmetic = spec.precision if spec.dtype == "float32" else spec.dtype
    multiplied = 3 * units * max(rows, 16) * columns * sets
    clocks = (
        weights / (SHARED_BYTES_PER_CLOCK if persistent else L2_BYTES_PER_CLOCK)
        + state / (SHARED_BYTES_PER_CLOCK if alone else L2_BYTES_PER_CLOCK)
        + multiplied / (PRODUCTS_PER_CLOCK[arithmetic] * min(1.0, variant.num_warps / 4))
    )
    if persistent and variant.by_row:  # weights are in registers, and each warp reads the state
        clocks = 3 * units * units / LANES + variant.num_warps * 4 * units / SHARED_BYTES_PER_CLOCK
    clocks += units * rows * (1 / GATES_PER_CLOCK + 2 * 4 * variant.splits / SHARED_BYTES_PER_CLOCK)
    rounds = 1 if alone or library else ceil_div(state, FLIGHT_BYTES * 32 * variant.num_warps)
    tiles = ceil_div(spec.hidden, units) * ceil_div(size.batch, rows) * spec.layers * spec.directions
    steps = size.seq + spec.layers - 1
    if variant.staged:  # one direction after the other
        tiles, steps = programs(spec, size, variant), steps * spec.directions
    sets_bytes = spec.layers * spec.directions * 3 * spec.hidden * spec.hidden * spec.item
    return (
        Work(
            programs=tiles,
            warps=variant.num_warps,
            memory_bytes=sets_bytes + 4 * size.seq * size.batch * spec.directions * spec.hidden * spec.item,
            again_bytes=0.0,
            in_flight_bytes=min(state, 16 * 32 * variant.num_warps),
            elements=0.0,
            sines=0.0,
            pairs_per_thread=max(1.0, units * rows / (32 * variant.num_warps)),
            row_bytes=columns * spec.item,
            chain_us=steps * (STEP_US[how] + ROUND_US * (rounds - 1)),
            chain_clocks=steps * clocks,
        ),
    )


def tile(_spec: GruSpec, variant: GruVariant) -> tuple[int, int]:
    """Rows of the batch, and units of each row, that a program takes at a time."""
    return variant.block_batch, variant.block_hidden
