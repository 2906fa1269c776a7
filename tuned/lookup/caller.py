"""The line of a user's code that a warning is about."""

from __future__ import annotations

import sys

ROOT = __name__.partition(".")[0]


def outside() -> int:
    """The ``stacklevel`` with which a warning of the caller names the line outside this package that made the call."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - the public ways list all frames
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == ROOT:
        level, frame = level + 1, frame.f_back
    return level
