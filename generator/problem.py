"""A Problem, as families declare it, and the error for a family or problem that does not exist."""

from __future__ import annotations

from tuned.families.family import Problem

__all__ = ["Problem", "SelectionError"]


class SelectionError(ValueError):
    """A family or problem that does not exist; the message says which exist, and which may have been meant."""
