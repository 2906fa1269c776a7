"""Gradients of GRUs of any shape, drawn from a seed: for cards that nobody measured."""

from __future__ import annotations

import dataclasses
import random

from ...problem import Problem
from ..gru.shapes import any_shape as any_forward


def any_shape(draw: random.Random) -> Problem:
    """A shape as for the forward recurrence, with one layer."""
    drawn = any_forward(draw)
    return dataclasses.replace(drawn, family="gru_backward", spec=dataclasses.replace(drawn.spec, layers=1))
