"""GRUs over sequences of any shape, drawn from a seed: for cards that nobody measured."""

from __future__ import annotations

import random

from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.products import DTYPES, PRECISIONS

from ...problem import Problem
from ..drawing import between

HIDDEN, BATCH, STEPS = (16, 2048), (1, 512), (1, 2048)
MOST_LAYERS = 3


def any_shape(draw: random.Random) -> Problem:
    """A layer, both directions of one, or a stack; sizes log-uniform."""
    directions, layers = draw.choice(((1, 1), (1, 1), (2, 1), (1, draw.randint(2, MOST_LAYERS))))
    spec = GruSpec(
        draw.choice(DTYPES),
        between(draw, *HIDDEN),
        draw.choice((LAYOUTS[0], *LAYOUTS)),
        directions,
        layers,
        bias=draw.random() < 0.9,  # noqa: PLR2004 - nearly all have
        precision=draw.choice(PRECISIONS),
    )
    return Problem("drawn", "gru", spec, GruSize(between(draw, *BATCH), between(draw, *STEPS)))
