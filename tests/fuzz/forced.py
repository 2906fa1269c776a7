"""All variants that lookups can give, forced one after another for any call; and what was chosen."""

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

PROBE = "rope_table"  # a kernel that launchers are tried with; no lookup chooses it
SERVED: set[tuple[str, int]] = set()  # rows whose variant was given to a call
PLANS = (
    "_ONCE",
    "_PLANS",
    "_TRAINED",
    "_COMPILED",
    "_CLASSES",
    "_KNOWN",
    "LEFT",
)  # tables in which modules of tuned remember calls


@functools.cache
def rows(family: str, capability: int = 90) -> tuple[Any, ...]:
    """For each variant in a table or portfolio, its smallest row; and one row for each default kernel.

    Calls that no row is like get default kernels; few random calls need each of them.
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
    # Rows of a portfolio and of defaults were not measured: they get a time, since a measured time is above 0.
    return tuple(dataclasses.replace(row, median_us=row.median_us or 1.0) for row in (*found.values(), *defaults))


def _is_of(family: Family, name: str, spec: Any, variant: Any) -> bool:
    return isinstance(spec, family.spec_type) and name in family.kernel_names(spec, variant)


def _launching(family: Family, name: str, spec: Any, sizes: list[Any], variants: list[Any]) -> tuple[Any, Any]:
    """The first legal size and variant that launch a kernel, the smallest size first."""
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
    """(family, index of a row), for the rows of all families in turn."""
    return [(family, index) for family in FAMILIES for index in range(len(rows(family, capability)))]


def kernels_of(family: str, index: int) -> set[str]:
    """The kernels that a row's variant launches."""
    row = rows(family)[index]
    return set(FAMILIES[family].kernel_names(row.spec, row.variant))


_SEEN: list[str] = []  # names of all modules so far, in the order of their imports
_OURS: list[str] = []


def _modules() -> list[Any]:
    """The modules of tuned without the hundreds of generated ones, which contain only kernels and rows.

    Of thousands of imported modules it looks only at those at the end, which were imported since the last call.
    """
    names = list(sys.modules)
    if names[: len(_SEEN)] != _SEEN:  # a module has gone
        _SEEN.clear()
        _OURS.clear()
    new = names[len(_SEEN) :]
    _SEEN.extend(new)
    generated = ("tuned.kernels.", "tuned.tables.")
    _OURS.extend(name for name in new if name.startswith("tuned.") and not name.startswith(generated))
    return [module for name in _OURS if (module := sys.modules.get(name)) is not None]


@contextlib.contextmanager
def forced(family: str, index: int) -> Iterator[None]:
    """Inside, a family's lookups give one row's variant wherever its kernels can serve; no earlier call is known."""
    genuine, row = tuned.lookup.lookup.choose, rows(family)[index]

    def choose(of: Any, spec: Any, size: Any, gpu: Any) -> Choice:
        if family == "gru_backward" and of.name == "gru":  # a gradient by kernels needs a forward by kernels
            one_launch = [r for r in rows("gru") if r.variant.strategy == "persistent"]
            found = nearest(of, spec, size, one_launch, gpu.capability, gpu.multiprocessors)
            if found is not None:
                return Choice("winner", "for the gradient that the fuzz forced", found[2], None, gpu)
        if of.name == family:
            near = dataclasses.replace(of, reach=math.inf)
            found = nearest(near, spec, size, [row], gpu.capability, gpu.multiprocessors)
            if found is not None:
                SERVED.add((family, index))
                # A launch for each step serves a call only if it is known to take less time.
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
        # Stacks run layers at once, whatever that takes, in chunks of one step or more.
        replaced("CALLED_PAYS", wavefront.CALLED_PAYS, math.inf),
        replaced("CALLED_DIAGONAL_US", wavefront.CALLED_DIAGONAL_US, (0.01, 1.0, 10.0)[index % 3]),
        # Forwards with a launch for each step train too: for some sizes there is no other forward.
        replaced("modelled_steps", gru_run.modelled_steps, lambda _call: False),
        replaced("_least_steps", slower._least_steps, lambda *_, **__: 0),
        replaced("choose", genuine, choose),
        replaced("near_rows", tuned.lookup.lookup.near_rows, lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def replaced(name: str, genuine: Any, other: Any) -> Iterator[None]:
    """Replaces a function of tuned in every module that has it."""
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
    """Inside, no earlier call is known; and afterwards no call that was made inside is known."""
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
    """Whether it is a cache of choices, by spec, size and GPU."""
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


# What was chosen ------------------------------------------------------------------------------------------------------


class Came:
    """The choices of lookups, as (family, variant), and the kernels that were launched."""

    def __init__(self) -> None:
        self.variants: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, choices are recorded."""
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
        """The kernels whose modules were imported, which a launch does."""
        return {n.removeprefix("tuned.kernels.") for n in sys.modules if n.startswith("tuned.kernels.")} - {PROBE}


def all_kernels() -> set[str]:
    """All kernels that ship and that a lookup can choose."""
    return set(tuned.kernels.DIGESTS) - {PROBE}
