"""Cells of Markdown tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A Markdown table whose first columns are text and the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def microseconds(value: float | None) -> str:
    """At least three digits, or a dash."""
    if value is None:
        return "-"
    integral_digits = len(str(int(value)))
    return f"{value:.{max(0, 3 - integral_digits)}f}"


def ratio(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"
