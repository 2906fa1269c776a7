"""What a variant does: programs, bytes, sines, threads; what a program takes at a time."""

from __future__ import annotations

import math
from typing import Any

from tuned.families.rope.launches import programs
from tuned.families.rope.spec import ITEM_SIZE, RopeSpec
from tuned.families.rope.variant import RopeVariant, half_block

from ...problem import Problem
from ..counting import Work
from .reference import angle_row_bytes, angle_rows, bytes_moved


def work(problem: Problem, variant: Any) -> tuple[Work, ...]:
    """The one launch of the rotation."""
    spec, size = problem.spec, problem.size
    item, half = ITEM_SIZE[spec.dtype], half_block(spec)
    entries_per_pair = 2 if spec.angle_entries == "feature" else 1
    angle_row = angle_row_bytes(spec)
    seq, batch = (size.tokens, 1) if spec.layout == "thd" else (size.seq, size.batch)
    count = programs(spec, variant, seq, batch)
    tile_rows = variant.block_tokens * variant.block_heads
    return (
        Work(
            programs=count,
            warps=variant.num_warps,
            memory_bytes=bytes_moved(spec, size),
            again_bytes=max(0.0, count * variant.block_tokens * angle_row - angle_rows(spec, size) * angle_row),
            in_flight_bytes=tile_rows * spec.rotary_dim * item + variant.block_tokens * angle_row,
            elements=count * tile_rows * 2 * half,
            sines=count * variant.block_tokens * half * 2 * entries_per_pair if spec.computes_sincos else 0,
            pairs_per_thread=tile_rows * half / (32 * variant.num_warps),
            row_bytes=half * item,
            early=variant.pdl,
        ),
    )


def features(variant: RopeVariant) -> tuple[int, ...]:
    """What a model of the time should see beside the knobs, in octaves: rows of a tile, and rows a warp."""
    rows = variant.block_tokens * variant.block_heads
    return round(math.log2(rows)), round(math.log2(rows / variant.num_warps))


def tile(spec: RopeSpec, variant: RopeVariant) -> tuple[int, int]:
    """Rows of the tensor, and features of each that rotate, which a program takes at a time."""
    return variant.block_tokens * variant.block_heads, spec.rotary_dim
