"""RoPE calls of any shape, drawn from a seed: for cards that nobody measured."""

from __future__ import annotations

import random

from tuned.families.rope.spec import ANGLE_ENTRIES, ANGLES, DIRECTIONS, DTYPES, LAYOUTS, STYLES, RopeSize, RopeSpec

from ...problem import Problem
from ..drawing import between

HEADS, PAIRS, TOKENS = (1, 128), (4, 256), (1, 131_072)
COMMON_DIMS = (64, 80, 96, 128, 256)


def any_shape(draw: random.Random) -> Problem:
    """A call of one tensor, or of a query and a key; sizes log-uniform, half of the head sizes those of models."""
    dim = draw.choice(COMMON_DIMS) if draw.random() < 0.5 else 2 * between(draw, *PAIRS)  # noqa: PLR2004
    direction = draw.choice(DIRECTIONS)
    tokens, heads = between(draw, *TOKENS), between(draw, *HEADS)
    batch = between(draw, 1, tokens)
    with_key = draw.random() < 0.5  # noqa: PLR2004
    spec = RopeSpec(
        draw.choice(LAYOUTS),
        draw.choice(DTYPES),
        heads,
        dim,
        draw.choice((dim, dim, 2 * between(draw, 1, dim // 2))),
        draw.choice(STYLES),
        draw.choice(ANGLES),
        angle_entries=draw.choice(ANGLE_ENTRIES),
        inplace=direction == DIRECTIONS[0] and draw.random() < 0.4,  # noqa: PLR2004
        direction=direction,
        key_heads=between(draw, 1, heads) if with_key else 0,
        positions=draw.choice(("order", "ids", "starts")) if with_key else "order",
    )
    return Problem("drawn", "rope", spec, RopeSize(batch, max(1, tokens // batch)))
