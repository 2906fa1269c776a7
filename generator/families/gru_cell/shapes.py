"""GRU steps of any shape, drawn from a seed: for cards that nobody measured."""

from __future__ import annotations

import random

from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.products import DTYPES

from ...problem import Problem
from ..drawing import between, precision, segments

HIDDEN, WIDTH, BATCH = (16, 2048), (1, 2048), (1, 4096)


def any_shape(draw: random.Random) -> Problem:
    """A step over one to four inputs; sizes log-uniform."""
    dtype = draw.choice(DTYPES)
    spec = GruCellSpec(
        dtype,
        between(draw, *HIDDEN),
        segments(draw, *WIDTH),
        bias=draw.random() < 0.9,  # noqa: PLR2004 - nearly all have
        inplace=draw.random() < 0.3,  # noqa: PLR2004
        precision=precision(draw, dtype),
    )
    return Problem("drawn", "gru_cell", spec, GruCellSize(between(draw, *BATCH)))
