"""The linear over segments as tuning checks and times it: inputs, the float64 reference, the baseline, bytes, work."""

from __future__ import annotations

from typing import Any

import torch

from tuned.families.launch import ceil_div
from tuned.families.linear_cat.launches import LinearCatCall
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import TILES, LinearCatVariant
from tuned.families.products import ITEM_SIZE

from ...problem import Problem
from ..amounts import SMALLEST, UNIT_ROUNDOFF, Work, product_error


def inputs(spec: LinearCatSpec, size: LinearCatSize, device: str, seed: int) -> LinearCatCall:
    """One set of random inputs, the weight as torch.nn.Linear draws it; out not filled."""
    dtype = getattr(torch, spec.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor if generator is None else tensor.uniform_(-scale, scale, generator=generator)

    scale = spec.input_size**-0.5
    segments = tuple(drawn(size.batch, width, scale=1.7) for width in spec.inputs)  # of variance 1
    weight = drawn(spec.outputs, spec.input_size, scale=scale)
    out = torch.empty((size.batch, spec.outputs), dtype=dtype, device=device)
    return LinearCatCall.of(segments, weight, out, *((drawn(spec.outputs, scale=scale),) if spec.bias else ()))


def reference(spec: LinearCatSpec, call: LinearCatCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the largest error that may be left: half a unit in the last place, and that of the sums."""
    x = torch.cat([segment.double() for segment in call.segments], -1)
    weight = call.weight.double()
    out, sizes = x @ weight.T, x.abs() @ weight.abs().T
    if spec.bias:
        out, sizes = out + call.bias.double(), sizes + call.bias.double().abs()
    return out, product_error(spec, sizes) + out.abs() * UNIT_ROUNDOFF[spec.dtype] + SMALLEST[spec.dtype]


def eager(_spec: LinearCatSpec, call: LinearCatCall) -> Any:
    """The baseline: concatenate the segments, then torch.nn.functional.linear."""
    return lambda: torch.nn.functional.linear(torch.cat(call.segments, -1), call.weight, call.bias)


def bytes_moved(spec: LinearCatSpec, size: LinearCatSize) -> int:
    """Bytes that must move: the weight and the inputs read, the result written."""
    weight = spec.outputs * (spec.input_size + int(spec.bias))
    return (weight + size.batch * (spec.input_size + spec.outputs)) * ITEM_SIZE[spec.dtype]


# The work of a variant: programs, bytes, sines, threads; and the tile of a program.


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The work of the one launch of a linear over segments."""
    spec, size = problem.spec, problem.size
    item, columns, rows = ITEM_SIZE[spec.dtype], variant.block_columns, variant.block_rows
    count = ceil_div(size.batch, rows) * ceil_div(spec.outputs, columns)
    operands = (rows + columns) * spec.input_size * item
    stages = variant.num_stages if variant.form in TILES else 2
    moved = bytes_moved(spec, size)
    copied = 2 * (spec.outputs + size.batch) * spec.input_size * item if variant.pads else 0  # read and written first
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=moved + copied,
            again_bytes=max(0.0, count * operands - moved),
            in_flight_bytes=min(operands, stages * (rows + columns) * variant.block_k * item),
            elements=count * rows * columns,
            sines=0.0,
            pairs_per_thread=max(1.0, rows * columns / (32 * variant.num_warps)),
        ),
    )


def tile(_spec: LinearCatSpec, variant: LinearCatVariant) -> tuple[int, int]:
    """Rows, and columns of each row, that a program takes at a time."""
    return variant.block_rows, variant.block_columns
