"""Variants that lookups can give: all of them, one after another, whatever the call; and what came up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import tuned.families.family
import tuned.kernels
import tuned.lookup.lookup
from generator.rendering.structures import texts
from tuned.calls.gru import run as gru_run
from tuned.calls.gru import slower, wavefront
from tuned.families.family import Family
from tuned.families.registry import FAMILIES
from tuned.lookup.lookup import Choice, nearest, usable
from tuned.lookup.misses import Moments
from tuned.lookup.portfolio import rows_for
from tuned.lookup.table import Row, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE = "rope_table"  # launched to try a launcher, chosen by nothing
SERVED: set[tuple[str, int]] = set()  # rows whose variant was given to a call
PLANS = (
    "_ONCE",
    "_PLANS",
    "_TRAINED",
    "_COMPILED",
    "_CLASSES",
    "_KNOWN",
    "LEFT",
)  # what modules of tuned remember of calls


@functools.cache
def rows(family: str, capability: int = 90) -> tuple[Any, ...]:
    """One row for each variant that some row of a table or a portfolio has: of those the smallest. And one a default kernel.

    The kernels of defaults are what calls get that no row is like; few calls drawn at random ask for each.
    """
    found: dict[Any, Any] = {}
    everything = [row for table in tables().values() for row in table.rows[family]] + list(rows_for(family, capability))
    for row in sorted(everything, key=_weight):
        found.setdefault((row.variant, FAMILIES[family].kernel_names(row.spec, row.variant)), row)
    named = {name for _, names in found for name in names}
    sizes = sorted({row.size for row in everything}, key=lambda one: (one.tokens, repr(one)))
    defaults = [
        Row(spec, *_launching(FAMILIES[family], name, spec, sizes, [variant, *(v for v, _ in found)]), None, 0.0, "")
        for _, name, spec, variant, default in texts()
        if default and name not in named and name != PROBE and _is_of(FAMILIES[family], name, spec, variant)
    ]
    # A row is of a measurement, and no kernel takes no time; those of a portfolio and of defaults are of none.
    return tuple(dataclasses.replace(row, median_us=row.median_us or 1.0) for row in (*found.values(), *defaults))


def _is_of(family: Family, name: str, spec: Any, variant: Any) -> bool:
    return isinstance(spec, family.spec_type) and name in family.kernel_names(spec, variant)


def _launching(family: Family, name: str, spec: Any, sizes: list[Any], variants: list[Any]) -> tuple[Any, Any]:
    """The first size and variant, the smallest size first, that are legal together and launch a kernel."""
    found = itertools.product(sizes, [v for v in variants if name in family.kernel_names(spec, v)])
    return next((size, v) for size, v in found if usable(family, spec, size, v, 90, 132))


def _weight(row: Any) -> tuple[float, str]:
    spec = row.spec
    size = (
        getattr(spec, "hidden", 0)
        + getattr(spec, "outputs", 0)
        + getattr(spec, "heads", 0) * getattr(spec, "head_dim", 0)
    )
    return size * getattr(spec, "layers", 1), repr(spec)


def every_row(capability: int = 90) -> list[tuple[str, int]]:
    """(family, which of its rows), of all families in turn."""
    return [(family, index) for family in FAMILIES for index in range(len(rows(family, capability)))]


def kernels_of(family: str, index: int) -> set[str]:
    """Those that the variant of a row launches."""
    row = rows(family)[index]
    return set(FAMILIES[family].kernel_names(row.spec, row.variant))


_SEEN: list[str] = []  # of all modules in the order of their imports, so far
_OURS: list[str] = []


def _modules() -> list[Any]:
    """Those of tuned but generated ones, which are hundreds and have only kernels and rows.

    Of thousands that are imported only those are looked at that came since the last time, which are at the end.
    """
    names = list(sys.modules)
    if names[: len(_SEEN)] != _SEEN:  # one has gone
        _SEEN.clear()
        _OURS.clear()
    new = names[len(_SEEN) :]
    _SEEN.extend(new)
    generated = ("tuned.kernels.", "tuned.tables.")
    _OURS.extend(name for name in new if name.startswith("tuned.") and not name.startswith(generated))
    return [module for name in _OURS if (module := sys.modules.get(name)) is not None]


@contextlib.contextmanager
def forced(family: str, index: int) -> Iterator[None]:
    """Inside, lookups of a family give the variant of one row wherever its kernels can do the call; nothing else is known."""
    genuine, row = tuned.lookup.lookup.choose, rows(family)[index]

    def choose(of: Any, spec: Any, size: Any, gpu: Any) -> Choice:
        if family == "gru_backward" and of.name == "gru":  # a gradient by kernels is of a forward by kernels
            one_launch = [r for r in rows("gru") if r.variant.strategy == "persistent"]
            found = nearest(of, spec, size, one_launch, gpu.capability, gpu.multiprocessors)
            if found is not None:
                return Choice("winner", "for the gradient that the fuzz forced", found[2], None, gpu)
        if of.name == family:
            near = dataclasses.replace(of, reach=math.inf)
            found = nearest(near, spec, size, [row], gpu.capability, gpu.multiprocessors)
            if found is not None:
                SERVED.add((family, index))
                # A launch for each step serves a call only where it is known to take less.
                us = 1e-3 if family == "gru" and found[2].strategy == "library" else 0.0
                return Choice("winner", "forced by the fuzz", found[2], row, gpu, us)
        return genuine(of, spec, size, gpu)

    def pays(*_: Any, **__: Any) -> bool:  # every other row of calls that can be widened, whatever it takes
        return family == "gru" and index % 2 == 1

    with (
        fresh(),
        replaced("pays", gru_run.pays, pays),
        replaced("pays_for_input", gru_run.pays_for_input, pays),
        replaced("PACKED_US", gru_run.PACKED_US, -1e9),
        replaced("CALLED_STEP_US", gru_run.CALLED_STEP_US, 1e-6),
        replaced("slow_host_us", gru_run.slow_host_us, lambda *_: 0.0),
        # Stacks run layers at once, whatever it takes, in chunks of one step or more.
        replaced("CALLED_PAYS", wavefront.CALLED_PAYS, math.inf),
        replaced("CALLED_DIAGONAL_US", wavefront.CALLED_DIAGONAL_US, (0.01, 1.0, 10.0)[index % 3]),
        # Forwards of a launch for each step train too: of some sizes there is no other.
        replaced("modelled_steps", gru_run.modelled_steps, lambda _call: False),
        replaced("_least_steps", slower._least_steps, lambda *_, **__: 0),
        replaced("choose", genuine, choose),
        replaced("near_rows", tuned.lookup.lookup.near_rows, lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def replaced(name: str, genuine: Any, other: Any) -> Iterator[None]:
    """A function of tuned replaced in every module that has it."""
    holders = [m for m in _modules() if vars(m).get(name) is genuine]
    for module in holders:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, name, genuine)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Inside, nothing of earlier calls is known, and nothing of what happens inside is known after."""
    plans = [(m, name, vars(m)[name]) for m in _modules() for name in PLANS if isinstance(vars(m).get(name), dict)]
    kept = [(table, dict(table)) for _, _, table in plans]
    values = [value for m in _modules() for value in vars(m).values()]
    values += [decided for value in values if isinstance(value, Moments) for decided in value.variants]
    decisions = {id(f): f for f in values if _decides(f)}.values()
    try:
        for table, _ in kept:
            table.clear()
        for decided in decisions:
            decided.cache_clear()
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)
        for decided in decisions:
            decided.cache_clear()


def _decides(value: Any) -> bool:
    """Whether it is a cache of what was chosen: kept by spec, size and GPU."""
    names = (
        "variant_of",
        "_variant_of",
        "_choose",
        "_projection",
        "_here",
        "_best_kernel",
        "_modelled",
        "_by_steps",
        "planned",
    )
    return hasattr(value, "cache_clear") and getattr(value, "__name__", "") in names


# What came up -----------------------------------------------------------------------------------------------------------


class Came:
    """What lookups chose, as (family, variant), and which kernels were launched."""

    def __init__(self) -> None:
        self.variants: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, choices are noted."""
        genuine = tuned.lookup.lookup.usable

        def usable(family: Any, spec: Any, size: Any, variant: Any, *rest: Any) -> bool:
            found = genuine(family, spec, size, variant, *rest)
            if found:
                self.variants.add((family.name, repr(variant)))
            return found

        with replaced("usable", genuine, usable):
            yield

    @property
    def kernels(self) -> set[str]:
        """The kernels that were imported, which launching does."""
        return {n.removeprefix("tuned.kernels.") for n in sys.modules if n.startswith("tuned.kernels.")} - {PROBE}


def all_kernels() -> set[str]:
    """All that ship and can be chosen."""
    return set(tuned.kernels.DIGESTS) - {PROBE}
