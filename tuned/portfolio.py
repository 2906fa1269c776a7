"""A few variants that serve every measured problem of a family well, by kind of architecture: tuned/tables/_portfolio.py."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tuned.family import FAMILIES
from tuned.table import Row

ANY = "any"  # the portfolio from all architectures, for one that has none of its own


def architecture_of(capability: int) -> str:
    """The kind of architecture of a compute capability: 90 is "sm_9x", 120 is "sm_12x", 0 is AMD's "gfx"."""
    return f"sm_{capability // 10}x" if capability else "gfx"


@functools.cache
def _variants() -> dict[tuple[str, str], tuple[Any, ...]]:
    module = importlib.import_module("tuned.tables._portfolio")
    return {
        (architecture, family): tuple(FAMILIES[family].variant_type(**v) for v in variants)
        for architecture, family, variants in module.VARIANTS
    }


@functools.cache
def _best() -> dict[tuple[str, str], tuple[Row, ...]]:
    module = importlib.import_module("tuned.tables._portfolio")
    rows: dict[tuple[str, str], list[Row]] = {key: [] for key in _variants()}
    for architecture, name, spec, size, index in module.BEST:
        family, key = FAMILIES[name], (architecture, name)
        variant = _variants()[key][index]
        source = f"the portfolio of {architecture}"
        rows[key].append(Row(family.spec_type(**spec), family.size_type(**size), variant, None, 0.0, source))
    return {key: tuple(found) for key, found in rows.items()}


def variants_for(family: str, capability: int) -> tuple[Any, ...]:
    """The portfolio of a family on an architecture, of all architectures where it has none; empty where nothing is known."""
    known = _variants()
    return known.get((architecture_of(capability), family)) or known.get((ANY, family), ())


def rows_for(family: str, capability: int) -> tuple[Row, ...]:
    """The measured problems of a family, each with the portfolio's best variant for it."""
    known = _best()
    return known.get((architecture_of(capability), family)) or known.get((ANY, family), ())
