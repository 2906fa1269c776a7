"""What a variant does: programs, bytes, sines, threads; what a program takes at a time."""

from __future__ import annotations

from typing import Any

from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.launch import ceil_div
from tuned.families.rope.spec import ITEM_SIZE

from ...problem import Problem
from ..counting import Work
from .reference import bytes_moved, weight_bytes


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """A step in one launch; the library's products and the kernel of its gates as one too."""
    spec, size = problem.spec, problem.size
    item, units, rows = ITEM_SIZE[spec.dtype], variant.block_hidden, variant.block_batch
    count = ceil_div(size.batch, rows) * ceil_div(spec.hidden, units)
    width = spec.input_size + spec.hidden
    library = variant.form == "library"
    # Of the library's tiles nothing is known; the gates read and write seven rows of the hidden size besides.
    operands = (rows + 3 * units) * width * item if not library else 0
    gates = 12 * size.batch * spec.hidden * item if library else 0
    stages = 2 if variant.form == "vector" else variant.num_stages
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=bytes_moved(spec, size) + gates,
            again_bytes=max(0.0, count * operands - weight_bytes(spec) - size.batch * width * item),
            in_flight_bytes=min(operands, stages * (rows + 3 * units) * variant.block_k * item)
            or 8 * rows * units * item,
            elements=8 * count * rows * units,
            sines=0.5 * count * rows * units,  # an exponential and a division are about a quarter of a sine
            pairs_per_thread=max(1.0, 4 * rows * units / (32 * variant.num_warps)),
        ),
    )


def tile(_spec: GruCellSpec, variant: GruCellVariant) -> tuple[int, int]:
    """Rows, and units of each, that a program takes at a time."""
    return variant.block_batch, variant.block_hidden
