"""A time as people type it: 90s, 10m, 1h."""

from __future__ import annotations

import re

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """A time such as 90s, 10m or 1h in seconds.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"a time is a number above 0 with s, m or h, as in 90s, 10m or 1h, got {text!r}")
    return float(match[1]) * UNITS[match[2]]
