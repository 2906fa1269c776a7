"""Imported by a fork server of tests: its children then share the pools, which each would have to enumerate."""

from __future__ import annotations

from tests.broken.server import COPY, INPLACE, ranked

for problem in (COPY, INPLACE):
    ranked(problem)
