"""A Problem, as families declare it, and the error for one that is not there."""

from __future__ import annotations

from tuned.families.family import Problem

__all__ = ["Problem", "SelectionError"]


class SelectionError(ValueError):
    """A family or problem that is not there; the message says what is, and what may have been meant."""
