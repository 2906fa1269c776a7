"""Linear layers over segments of any shape, drawn from a seed: for cards that nobody measured."""

from __future__ import annotations

import random

from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.products import DTYPES

from ...problem import Problem
from ..drawing import between, precision, segments

WIDTH, OUTPUTS, ROWS = (1, 2048), (1, 65_536), (1, 8192)


def any_shape(draw: random.Random) -> Problem:
    """A layer over one to four inputs; sizes log-uniform."""
    dtype = draw.choice(DTYPES)
    inputs, outputs = segments(draw, *WIDTH), between(draw, *OUTPUTS)
    spec = LinearCatSpec(dtype, inputs, outputs, bias=draw.random() < 0.5, precision=precision(draw, dtype))  # noqa: PLR2004
    return Problem("drawn", "linear_cat", spec, LinearCatSize(between(draw, *ROWS)))
