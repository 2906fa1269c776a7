"""What a variant does: programs, bytes, sines, threads; what a program takes at a time."""

from __future__ import annotations

from typing import Any

from tuned.families.launch import ceil_div
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.rope.spec import ITEM_SIZE

from ...problem import Problem
from ..counting import Work
from .reference import bytes_moved


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The one launch of a linear over segments."""
    spec, size = problem.spec, problem.size
    item, columns, rows = ITEM_SIZE[spec.dtype], variant.block_columns, variant.block_rows
    count = ceil_div(size.batch, rows) * ceil_div(spec.outputs, columns)
    operands = (rows + columns) * spec.input_size * item
    stages = 2 if variant.is_vector else variant.num_stages
    moved = bytes_moved(spec, size)
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=moved,
            again_bytes=max(0.0, count * operands - moved),
            in_flight_bytes=min(operands, stages * (rows + columns) * variant.block_k * item),
            elements=count * rows * columns,
            sines=0.0,
            pairs_per_thread=max(1.0, rows * columns / (32 * variant.num_warps)),
        ),
    )


def tile(_spec: LinearCatSpec, variant: LinearCatVariant) -> tuple[int, int]:
    """Rows, and columns of each, that a program takes at a time."""
    return variant.block_rows, variant.block_columns
