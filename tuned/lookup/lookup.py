"""Choose a variant for a call: which row serves it, and why."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tuned.families.family import BUILT_IN, Family, brought
from tuned.lookup import model
from tuned.lookup.portfolio import rows_for
from tuned.lookup.record import HARD, differences
from tuned.lookup.table import Row, Table, before, ships, tables, tables_of

MAX_HERE = 1024  # specs remembered: a model has a handful


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU of a call, as far as the choice depends on it."""

    device: str  # slug, which names its table
    capability: int  # 90 is 9.0
    multiprocessors: int
    name: str = ""  # the driver's name for it
    asked: bool = False  # tuned.explain asks what calls would get on this GPU; no call runs


@dataclasses.dataclass(frozen=True)
class Choice:
    """The variant of a call, and where it comes from."""

    rule: str  # "winner", "nearest size", "closest spec", "similar GPU", "model", "portfolio", "default" or "eager"
    why: str  # a sentence
    variant: Any
    row: Row | None = None  # the row that the choice comes from
    gpu: Gpu | None = (
        None  # the GPU of the call; None for eager, unless this GPU's rows or a model prefer PyTorch's operator
    )
    us: float = 0.0  # estimated microseconds of the call; 0 if there is no estimate


def has_rows(gpu: Gpu) -> bool:
    """Whether any row was measured on this exact model of GPU."""
    own = tables().get(gpu.device)
    return own is not None and _counts(own, gpu)


@functools.lru_cache
def _counts(table: Table, gpu: Gpu) -> bool:
    return any(not _elsewhere(row, gpu) for rows in table.rows.values() for row in rows)


def _elsewhere(row: Row, gpu: Gpu) -> list[str]:
    return differences(row.measured, {"device_name": gpu.name, "multiprocessors": gpu.multiprocessors}, HARD)


def choose(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice:
    """The variant for a call, by the lookup order in tuned.dispatch."""
    found = _choose(family, spec, size, gpu)
    if found.variant is not None and family.spends is not None:
        why = family.spends(spec, size, found.variant)
        found = found if why is None else Choice("eager", why, None)
    return found if found.variant is None else dataclasses.replace(found, gpu=gpu)


def _choose(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice:
    known = tables() if family.home == BUILT_IN else tables_of(family)
    if (found := _by_model(family, spec, size, gpu, known)) is not None:
        return found
    unsaid = None
    for table in _nearest_first(known, gpu):
        found = _from_table(family, spec, size, gpu, table)
        if found is None:
            continue
        if table.device != gpu.device:
            found = _of_another(
                found, f"no row of {gpu.device} can serve; {table.device} is the most similar GPU that has one"
            )
        elif found.row is not None and not any(found.row is row for row in known[gpu.device].rows[family.name]):
            found = _of_another(found, f"no row of {gpu.device} is as near as one of a GPU that is like it")
        if found.variant is not None or found.row is not None:
            return found
        unsaid = unsaid or found  # this table's rows say nothing of such a call; those of another GPU may
    if unsaid is not None:
        return unsaid
    rows = rows_for(family.name, gpu.capability) if family.home == BUILT_IN else ()
    if found_rows := nearest(family, spec, size, rows, gpu.capability, gpu.multiprocessors):
        away, row, variant = found_rows
        why = f"no table has a row that can serve; {row.source}'s best for {row.spec} with {row.size}, {away:.2g} octaves away"
        return Choice("portfolio", why, variant)
    within = "" if family.reach == math.inf else f" within {family.reach:g} octaves"
    why = f"neither a table nor a portfolio has a {family.name} variant{within} that can stand in for this call"
    default = family.fit(family.default_variant(spec, size), spec, gpu.capability)
    reason = family.rejection(spec, size, default, gpu.capability, gpu.multiprocessors)
    if reason is not None:
        return Choice("eager", f"{why}, nor can the default variant: {reason}", None)
    return Choice("default", why, default)


def _by_model(family: Family, spec: Any, size: Any, gpu: Gpu, known: Mapping[str, Table]) -> Choice | None:
    """The choice for a family that has a model: a row, else the model's pick, or PyTorch's operator if it takes less."""
    if model.weights_of(family) is None or not gpu.capability:
        return None
    found = _by_row(family, spec, size, gpu, known)
    if found is None:
        return _modelled(family, spec, size, gpu, known)
    row, longer = found.row, size.seq / found.row.size.seq
    if 0 < row.eager_us * longer < found.us:
        why = f"with {row.size} PyTorch's own took {row.eager_us:.4g} us in {row.source}, the best kernel and what is beside it {found.us / longer:.4g}"
        return Choice("eager", why, None, row, gpu, row.eager_us * longer)
    return found


def _by_row(family: Family, spec: Any, size: Any, gpu: Gpu, known: Mapping[str, Table]) -> Any:
    """The choice by this GPU's row with as many tokens a step, whatever PyTorch's operator takes; None if there is none."""
    own = known.get(gpu.device)
    row = _of_so_many(family, spec, size, gpu, own) if own is not None else None
    if row is None or not usable(family, spec, size, row.variant, gpu.capability, gpu.multiprocessors):
        return None
    us, longer = row.median_us + model.beside_us(family, spec, row.size), size.seq / row.size.seq
    rule = "winner" if row.size == size else "nearest size"
    what = "and size in" if row.size == size else f"with {row.size}, whose steps are alike, in"
    return Choice(rule, f"measured for this spec {what} {row.source}", row.variant, row, us=us * longer)


def modelled(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice | None:
    """What a family's model picks for a call, even if there is a row: for callers that cannot use the row's variant."""
    if model.weights_of(family) is None or not gpu.capability:
        return None
    found = _modelled(family, spec, size, gpu, tables())
    return found and dataclasses.replace(found, gpu=gpu)


def best_kernel(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice | None:
    """The fastest variant of one launch, by a row or else by the family's model, whatever PyTorch's operator takes."""
    if model.weights_of(family) is None or not gpu.capability:
        return None
    assert family.model is not None, f"{family.name} has no model"
    found = _by_row(family, spec, size, gpu, tables())
    if found is None or not family.model.covers(found.variant):
        thought = _thought(family, spec, size, gpu, tables())
        found = thought and thought[0]
    return found and dataclasses.replace(found, gpu=gpu)


def by_steps(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice | None:
    """The variant with a launch for each step, and the model's estimate; None if there is none, or none was measured."""
    if "steps" not in (model.weights_of(family) or ()) or not gpu.capability:
        return None
    assert family.model is not None, f"{family.name} has no model"
    found = family.model.steps(spec, size)
    if found is None or not usable(family, spec, size, found[0], gpu.capability, gpu.multiprocessors):
        return None
    us = model.us_of(family, "steps", found[1]) + model.beside_us(family, spec, size)
    why = f"the model of {family.name} thinks that a product and a kernel for each step take {us:.4g} us"
    return Choice("model", why, found[0], gpu=gpu, us=us)


def _modelled(family: Family, spec: Any, size: Any, gpu: Gpu, known: Mapping[str, Table]) -> Choice | None:
    found = _thought(family, spec, size, gpu, known)
    if found is None:
        return None
    choice, picked = found
    if not picked.wins:
        why = f"{choice.why}, and PyTorch's own {picked.library_us:.4g}"
        return Choice("eager", why, None, None, gpu, picked.library_us)
    return choice


def _thought(
    family: Family, spec: Any, size: Any, gpu: Gpu, known: Mapping[str, Table]
) -> tuple[Choice, model.Pick] | None:
    """The choice of the kernel that the model thinks fastest, and the pick, which also has PyTorch's estimated time."""
    nearest_first = sorted(known.values(), key=lambda t: _unlike(t, gpu))
    picked = _picked(family, spec, size, gpu, nearest_first[0] if nearest_first else None)
    if picked is None:
        return None
    why = f"of all variants that fit, the model of {family.name} thinks this one takes least, {picked.us:.4g} us"
    return Choice("model", why, picked.variant, us=picked.us), picked


def _picked(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table | None) -> model.Pick | None:
    """What the model picks. Lengths that are alike share one cached pick, so a new length takes almost no time."""
    assert family.model is not None, f"{family.name} has no model"
    alike = family.model.alike(size)
    found = _pick(family, spec, alike, gpu, table)
    return found and found._replace(
        us=found.us * size.seq / alike.seq, library_us=found.library_us * size.seq / alike.seq
    )


@functools.lru_cache(MAX_HERE)
def _pick(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table | None) -> model.Pick | None:
    rows = [] if table is None else [(r.spec, r.size, r.variant) for r in table.rows[family.name]]
    return model.pick(family, spec, size, gpu, rows)


def _of_so_many(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table) -> Row | None:
    """The row of a spec with as many tokens as a size, the nearest in length if there are several; None if there is none."""
    measured = _here(family, spec, gpu, table).measured
    if size in measured:
        return measured[size]
    alike = [row for row in measured.values() if row.size.tokens == size.tokens]
    return min(alike, key=lambda row: abs(math.log(row.size.seq / max(size.seq, 1))), default=None)


def _of_another(found: Choice, why: str) -> Choice:
    return Choice("eager" if found.variant is None else "similar GPU", f"{why}: {found.why}", found.variant, found.row)


def _nearest_first(known: Mapping[str, Table], gpu: Gpu) -> list[Table]:
    """The table of a GPU, if there is one, then others, the most similar first.

    Tables of equal GPUs (one capability, as many multiprocessors) become one, the first table's rows before the others': on an
    H100 a row of an H200 takes 0 to 1.4 percent more than the H100's own would, and a row that is octaves away takes more than
    that (docs/decisions/0071).
    """
    equals: dict[Any, list[Table]] = {}
    for table in sorted(known.values(), key=lambda t: (t.device != gpu.device, *_unlike(t, gpu))):
        facts = table.properties.get("capability"), table.properties.get("multiprocessors")
        equals.setdefault(facts if all(facts) else table.device, []).append(table)
    return [_behind_each_other(*some) for some in equals.values()]


@functools.lru_cache(MAX_HERE)  # the same object each time: ``_here`` caches by the table's identity
def _behind_each_other(first: Table, *others: Table) -> Table:
    return functools.reduce(before, others, first)


def _unlike(table: Table, gpu: Gpu) -> tuple[float, str]:
    # Another generation is further away than any difference in size.
    capability = table.properties.get("capability", 0)
    processors = table.properties.get("multiprocessors") or 1
    return abs(capability - gpu.capability) * 10 + abs(math.log2(processors / gpu.multiprocessors)), table.device


def _from_table(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table) -> Choice | None:
    here = _here(family, spec, gpu, table)
    row = here.measured.get(size)
    if row is not None:
        variant = family.fit(row.variant, spec, gpu.capability)
        if usable(family, spec, size, variant, gpu.capability, gpu.multiprocessors):
            if 0 < _theirs_us(family, row, spec, size) < row.median_us:
                return _left_to_pytorch(row, gpu, "")
            return Choice("winner", f"measured for this spec and size in {row.source}", variant, row)
    rows = table.rows[family.name]
    found = None
    if family.doubt is None:
        found = _nearest_of(here.near, size)
        if found is not None and found[0] > family.reach:
            found, rows = None, ()  # no other row is within reach either
    elif rows and not (rows := _trusted(family, spec, size, rows)):
        return _unsaid(family, spec, size, gpu, table)
    if found is None or not usable(family, spec, size, found[2], gpu.capability, gpu.multiprocessors):
        found = nearest(family, spec, size, rows, gpu.capability, gpu.multiprocessors)
    if found is None:
        # As a small call (``least_us``) any kernel saves host time, so the search goes on. Where the device decides, a
        # kernel that no row speaks of does not count as faster.
        small = family.least_us is not None and family.least_us(spec, size) > 0
        unsaid = bool(rows) and not small and _replaceable(family, rows[0], spec, size)
        return _unsaid(family, spec, size, gpu, table) if unsaid else None
    away, row, variant = found
    lead = LEAD
    if _device_decides(family, row, spec, size):
        lead = ((family.lead and family.lead(row, spec, size)) or LEAD) ** (1 + away)
    if family.grows is not None:
        lead *= family.grows(row, spec, size)
    if 0 < _theirs_us(family, row, spec, size) < lead * row.median_us:
        return _left_to_pytorch(row, gpu, f", {away:.2g} octaves away,", lead)
    return _neighbour(spec, size, gpu, found)


def _neighbour(spec: Any, size: Any, gpu: Gpu, found: tuple[float, Row, Any]) -> Choice:
    """The choice of the variant of a row that has another shape, or that does not count here."""
    away, row, variant = found
    if row.spec != spec:
        why = f"the closest row of {row.source}, {away:.2g} octaves away, is of {row.spec} with {row.size}"
        return Choice("closest spec", why, variant, row)
    what = f"{row.size}, the nearest size"
    if row.size == size:
        what = f"this size, but {'; '.join([*([row.stale] if row.stale else []), *_elsewhere(row, gpu)])}"
    return Choice("nearest size", f"{row.source} has this spec measured with {what}", variant, row)


def _trusted(family: Family, spec: Any, size: Any, rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows that say whether a kernel is faster than PyTorch's operator at a shape."""
    assert family.doubt is not None, f"{family.name} trusts every row"
    near = tuple(r for r in rows if family.doubt(r.spec, spec, size, _octaves(family, r, spec, size)) is None)
    return near if family.least_us else tuple(r for r in near if not _says_nothing(family, r, spec, size))


def _says_nothing(family: Family, row: Row, spec: Any, size: Any) -> bool:
    """Whether no lead of a row is large enough to be one at this shape in a graph."""
    return family.lead is not None and family.lead(row, spec, size) == math.inf


def _unsaid(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table) -> Choice:
    """The choice of PyTorch's operator, since no row says that a kernel is faster."""
    assert family.doubt is not None, f"{family.name} trusts every row"
    row = min(table.rows[family.name], key=lambda r: _octaves(family, r, spec, size))
    why = family.doubt(row.spec, spec, size, _octaves(family, row, spec, size))
    if why is None and _says_nothing(family, row, spec, size):
        why = "PyTorch's operator takes much less for so few rows"
    why = why or "no variant of a row that is near fits"
    return Choice("eager", f"no row of {row.source} says that a kernel is faster: {why}", None, None, gpu)


def _device_decides(family: Family, row: Row, spec: Any, size: Any) -> bool:
    """Whether the device's time alone decides between a kernel and PyTorch's operator.

    It does not for calls whose host time counts (``least_us``), nor where PyTorch's operator cannot stand in.
    """
    return family.least_us is None and _replaceable(family, row, spec, size)


def _replaceable(family: Family, row: Row, spec: Any, size: Any) -> bool:
    """Whether PyTorch's operator can stand in: not where rows are trusted at any distance."""
    return family.doubt is not None and family.doubt(row.spec, spec, size, math.inf) is not None


def _theirs_us(family: Family, row: Row, spec: Any, size: Any) -> float:
    """What PyTorch's operator takes by a row; 0 if the row does not say."""
    return max(row.eager_us, family.least_us(spec, size)) if row.eager_us and family.least_us else row.eager_us


def _left_to_pytorch(row: Row, gpu: Gpu, away: str, lead: float = 1.0) -> Choice:
    """The choice of PyTorch's operator: a row's kernel is not faster, or leads by too little to lead at another shape too.

    The choice has no ``us``: the time of the row is not that of the call, which may have other steps and another size.
    """
    took = f"PyTorch's own took {row.eager_us:.4g} us, the best kernel {row.median_us:.4g}"
    if row.median_us < row.eager_us < lead * row.median_us:
        took += f", and a kernel must lead by {lead:.3g} times there to serve here"
    return Choice("eager", f"in {row.source}{away} with {row.size} {took}", None, row, gpu)


def near_rows(family: Family, spec: Any, gpu: Gpu) -> NearRows | None:
    """The rows for a spec in the table of exactly this GPU, for ``variant_at``; None if there is no such table."""
    known = tables()
    return _here(family, spec, gpu, _nearest_first(known, gpu)[0]) if gpu.device in known else None


def variant_at(rows: NearRows, family: Family, spec: Any, size: Any, gpu: Gpu) -> Any:
    """The variant that ``choose`` gives at a size, provided that it is ``usable`` there, which is not checked."""
    row = rows.measured.get(size)
    if row is not None:
        return family.fit(row.variant, row.spec, gpu.capability)
    found = _nearest_of(rows.near, size)
    return choose(family, spec, size, gpu).variant if found is None or found[0] > family.reach else found[2]


class _Near(NamedTuple):
    """A row, with the numbers that decide how near it is to a size."""

    away: float  # octaves between its spec and the call's
    octave: float  # log2 of its tokens
    stale: bool
    row: Row
    variant: Any  # its variant, adapted to the call


class NearRows(NamedTuple):
    """What a table has for one spec on one GPU, for all sizes. Computed once, since new lengths come all the time."""

    measured: dict[Any, Row]  # size -> its winner, if that counts on this GPU
    near: tuple[_Near, ...]  # the rows that can be nearest to some size


@functools.lru_cache(MAX_HERE)
def _here(family: Family, spec: Any, gpu: Gpu, table: Table) -> NearRows:
    rows = table.rows[family.name]
    measured: dict[Any, Row] = {}
    for row in rows:
        if row.spec == spec and row.stale is None and not _elsewhere(row, gpu):
            measured.setdefault(row.size, row)
    return NearRows(measured, _undominated(family, spec, gpu, rows))


def _undominated(family: Family, spec: Any, gpu: Gpu, rows: Sequence[Row]) -> tuple[_Near, ...]:
    """The rows that are nearest to some size. A row is left out if another row is nearer at every size.

    By the triangle inequality another row is nearer everywhere if its spec is closer by more octaves than lie between the two
    rows' numbers of tokens. Of equally near rows a fresh one comes before a stale one, then an earlier one before a later one.
    """
    away = [family.distance(row.spec, spec) for row in rows]
    octave = [_octave(row.size) for row in rows]
    stale = [row.stale is not None for row in rows]

    def beats(i: int, k: int) -> bool:
        least = away[i] + abs(octave[i] - octave[k])
        first = (stale[i], i) < (stale[k], k)  # who wins a tie
        return least < away[k] - TIE or (first and least <= away[k])

    kept: list[int] = []
    # Nearer specs first: a row that beats another comes before it. It is kept, or was beaten by a kept row that beats both.
    for k in sorted(range(len(rows)), key=lambda k: (away[k], stale[k], k)):
        if not any(beats(i, k) for i in kept):
            kept.append(k)
    return tuple(
        _Near(away[k], octave[k], stale[k], row, brought(family, row.variant, row.spec, spec, gpu.capability))
        for k, row in enumerate(rows)
        if k in kept
    )


# How many times as fast as PyTorch's operator a row's kernel must be to serve a shape that was not measured. Where the device
# decides, the factor applies again for each octave: from 2.3 octaves on, the kernel of a row that led by 1.08 ran at 0.46 to
# 0.60 of PyTorch's speed.
LEAD = 1.05
TIE = 1e-9  # octaves: equally near rows may differ by less than this, by rounding


def _octaves(family: Family, row: Row, spec: Any, size: Any) -> float:
    return family.distance(row.spec, spec) + abs(_octave(row.size) - _octave(size))


def _octave(size: Any) -> float:
    return math.log2(max(size.tokens, 1))


def _nearest_of(near: Iterable[_Near], size: Any) -> tuple[float, Row, Any] | None:
    """The row that ``nearest`` would choose, provided that its variant is usable."""
    octave = _octave(size)
    best, least = None, (math.inf, True)
    for one in near:
        away = one.away + abs(one.octave - octave), one.stale
        if away < least:
            best, least = one, away
    return None if best is None else (least[0], best.row, best.variant)


def nearest(  # noqa: PLR0913 - the call, the rows and the GPU
    family: Family,
    spec: Any,
    size: Any,
    rows: Iterable[Row],
    capability: int,
    multiprocessors: int | None = None,
) -> tuple[float, Row, Any] | None:
    """The usable row nearest to a call: (distance in octaves, row, its variant adapted to the call), or None.

    The distance is the octaves between the numbers of tokens plus the family's distance between the specs, at most the
    family's reach. Of equally near rows a fresh one comes before a stale one. The rule was chosen by leave-one-out regret:
    ``tune.py regret``.
    """
    octave = _octave(size)
    # Where the reach is short, comparing tokens alone excludes most rows, at a tenth of the cost of comparing specs.
    like = [row for row in rows if abs(_octave(row.size) - octave) <= family.reach]
    away = [one for row in like if (one := (_octaves(family, row, spec, size), row))[0] <= family.reach]
    for distance, row in sorted(away, key=lambda one: (one[0], one[1].stale is not None)):
        variant = brought(family, row.variant, row.spec, spec, capability)
        if family.sized is not None and multiprocessors is not None:
            variant = family.sized(variant, spec, size, multiprocessors)
        if usable(family, spec, size, variant, capability, multiprocessors):
            return distance, row, variant
    return None


def usable(  # noqa: PLR0913 - as nearest
    family: Family, spec: Any, size: Any, variant: Any, capability: int, multiprocessors: int | None = None
) -> bool:
    """Whether a variant is legal for a call on a GPU, and the package ships the kernels that it launches."""
    rejected = family.rejection(spec, size, variant, capability, multiprocessors) is not None
    return not rejected and ships(family, spec, variant)
