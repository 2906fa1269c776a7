"""Imported by a fork server of tests: its children then have the pools that each would enumerate."""

from __future__ import annotations

from generator.selection import problem_named
from tests.broken.server import ranked

for name in ("gru_cell_dreamer_200_16", "gru_cell_1024_inplace_64"):
    ranked(problem_named(name))
