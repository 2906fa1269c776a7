"""Choose a variant for a call: which row serves it, and why."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from tuned.table import Row, Table, tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tuned.family import Family


@dataclasses.dataclass(frozen=True)
class Choice:
    """The variant of a call, and where it comes from."""

    rule: str  # "winner", "nearest size", "closest spec", "similar GPU" or "default"
    why: str  # a sentence
    variant: Any
    row: Row | None = None  # the row that it stands in


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU of a call, as far as the choice depends on it."""

    device: str  # file name of its table
    capability: int  # 90 is 9.0
    multiprocessors: int


def choose(family: Family, spec: Any, size: Any, gpu: Gpu) -> Choice:
    """The variant for a call, by the lookup order in tuned.dispatch."""
    own = tables().get(gpu.device)
    if own is not None and (found := _from_table(family, spec, size, gpu, own)) is not None:
        return found
    others = sorted((t for t in tables().values() if t.device != gpu.device), key=lambda t: _unlike(t, gpu))
    for table in others:
        if (found := _from_table(family, spec, size, gpu, table)) is not None:
            why = f"no row of {gpu.device} can serve; {table.device} is the most similar GPU that has one: {found.why}"
            return Choice("similar GPU", why, found.variant, found.row)
    why = f"no table has a {family.name} row that can stand in for this call"
    return Choice("default", why, family.default_variant(spec, size))


def _unlike(table: Table, gpu: Gpu) -> tuple[float, str]:
    # Another generation is further than any difference in size.
    capability = table.properties.get("capability", 0)
    processors = table.properties.get("multiprocessors") or 1
    return abs(capability - gpu.capability) * 10 + abs(math.log2(processors / gpu.multiprocessors)), table.device


def _from_table(family: Family, spec: Any, size: Any, gpu: Gpu, table: Table) -> Choice | None:
    rows = (dataclasses.replace(r, variant=family.fit(r.variant, gpu.capability)) for r in table.rows[family.name])
    legal = [r for r in rows if family.rejection(spec, size, r.variant, gpu.capability) is None]
    same = [r for r in legal if r.spec == spec]
    for row in same:
        if row.size == size and row.fresh:
            return Choice("winner", f"measured for this spec and size in {row.source}", row.variant, row)
    if same:
        row = min(same, key=lambda r: _size_distance(r, size))
        what = "an older text of the kernel" if row.size == size else f"{row.size}, the nearest size"
        return Choice("nearest size", f"{row.source} has this spec measured with {what}", row.variant, row)
    if near := list(_by_spec(family, spec, legal)):
        distance = min(d for d, _ in near)
        row = min((r for d, r in near if d == distance), key=lambda r: _size_distance(r, size))
        why = f"{row.source} has no row of this spec; the closest, at distance {distance:.2g}, is {row.spec} with {row.size}"
        return Choice("closest spec", why, row.variant, row)
    return None


def _by_spec(family: Family, spec: Any, rows: Iterable[Row]) -> Iterable[tuple[float, Row]]:
    for row in rows:
        distance = family.distance(spec, row.spec)
        if distance is not None:
            yield distance, row


def _size_distance(row: Row, size: Any) -> tuple[float, float]:
    """Octaves between the amounts of work, then a stale row after a fresh one."""
    return abs(math.log2(max(row.size.tokens, 1) / max(size.tokens, 1))), float(not row.fresh)
