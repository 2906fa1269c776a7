"""Random shapes from a seed: whole numbers that are uniform in their logarithm, as the sizes of models are."""

from __future__ import annotations

import math
import random


def between(draw: random.Random, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``, log-uniform, not rounded to a multiple."""
    return min(most, max(least, round(math.exp(draw.uniform(math.log(least), math.log(most))))))


def segments(draw: random.Random, least: int, most: int) -> tuple[int, ...]:
    """The widths of one to four inputs; one input most often."""
    return tuple(between(draw, least, most) for _ in range(draw.choice((1, 1, 1, 2, 3, 4))))


def precision(draw: random.Random, dtype: str) -> str:
    """The precision of float32 products; other types have none."""
    return draw.choice(("tf32", "ieee")) if dtype == "float32" else ""
