"""A few variants per architecture that serve every measured problem of a family well: tuned/tables/_portfolio.py."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from tuned.families.registry import FAMILIES
from tuned.lookup.caller import outside
from tuned.lookup.table import Row

ANY = "any"  # the portfolio made from all architectures, for one that has none of its own


def architecture_of(capability: int) -> str:
    """The architecture of a compute capability: 90 is "sm_9x", 120 is "sm_12x", 0 is AMD's "gfx"."""
    return f"sm_{capability // 10}x" if capability else "gfx"


Variants = dict[tuple[str, str], tuple[Any, ...]]  # (architecture, family) -> its variants
Best = dict[tuple[str, str], tuple[Row, ...]]  # (architecture, family) -> its rows


@functools.cache
def _known() -> tuple[Variants, Best]:
    """The contents of the generated module. If it cannot be used: nothing, and one warning, since a model must not stop."""
    if FAMILIES.outside is not None:  # a family from outside has no portfolio
        return {}, {}
    try:
        return _imported()
    except Exception as error:  # noqa: BLE001 - a truncated file, or one of another version, may raise anything
        text = (
            f"tuned/tables/_portfolio.py cannot be used ({type(error).__name__}: {error}): restore it from version control, "
            "or write it again with python tune.py --render; it is not used"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=outside())
        return {}, {}


def _imported() -> tuple[Variants, Best]:
    module = importlib.import_module("tuned.tables._portfolio")
    variants = {
        (architecture, family): tuple(FAMILIES[family].variant_type(**v) for v in knobs)
        for architecture, family, knobs in module.VARIANTS
    }
    rows: dict[tuple[str, str], list[Row]] = {key: [] for key in variants}
    for architecture, name, spec, size, index in module.BEST:
        family, key = FAMILIES[name], (architecture, name)
        made = family.spec_type(**spec), family.size_type(**size), variants[key][index]
        rows[key].append(Row(*made, stale=None, median_us=0.0, source=f"the portfolio of {architecture}"))
    return variants, {key: tuple(found) for key, found in rows.items()}


def variants_for(family: str, capability: int) -> tuple[Any, ...]:
    """The portfolio of a family on an architecture, or else that of all architectures; may be empty."""
    known, _ = _known()
    return known.get((architecture_of(capability), family)) or known.get((ANY, family), ())


def rows_for(family: str, capability: int) -> tuple[Row, ...]:
    """The measured problems of a family as rows, each with the portfolio's best variant for it."""
    _, known = _known()
    return known.get((architecture_of(capability), family)) or known.get((ANY, family), ())
