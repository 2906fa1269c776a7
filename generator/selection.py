"""Choose problems by family, by name, by pattern or from a file of what models ran."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path

from tuned.lookup.record import load_record

from .problem import Problem, SelectionError
from .storage.misses import read_misses
from .storage.record import WINNERS
from .workload import WORKLOADS, default_problems


def select(
    family: str | None, names: str | None, *, representative: bool = False, folder: Path | None = None
) -> list[Problem]:
    """The default problems of a family, those that ``names`` lists (commas, patterns with *), in their own order.

    A name that ends in .jsonl is a file that TUNED_RECORD wrote: its problems follow, in its order. Without names, and
    with ``representative``, a few of the default ones: one of each kind. A name that is no default problem's may be that of
    a row in a record, of the package or in ``folder``.

    Raises:
        SelectionError: a name or pattern that matches nothing, or a file that cannot be read.
    """
    if family is not None and family not in WORKLOADS:
        raise SelectionError(_unknown("family", family, list(WORKLOADS)))
    problems = default_problems(family)
    if names == "all" or (names is None and not representative):
        return problems
    if names is None:
        wanted = [name for work in WORKLOADS.values() for name in work.representative]
    else:
        wanted = [n.strip() for n in names.split(",") if n.strip()]
    known = [p.name for p in problems]
    chosen: set[str] = set()
    others: dict[str, Problem] = {}
    for pattern in wanted:
        if pattern.endswith(".jsonl"):
            others.update((p.name, p) for p in read_misses(Path(pattern)) if family in (None, p.family))
            continue
        found = fnmatch.filter(known, pattern)
        measured = {} if found or names is None else _measured(pattern, family, folder)
        if not found and not measured and names is not None:
            raise SelectionError(_unknown("problem", pattern, known))
        chosen.update(found)
        others.update(measured)
    return [p for p in problems if p.name in chosen] + [p for n, p in others.items() if n not in chosen]


def _measured(pattern: str, family: str | None, folder: Path | None) -> dict[str, Problem]:
    """Name -> problem of the rows that match, in the records there are: once recorded by a model, then tuned."""
    rows = (row for path in sorted((folder or WINNERS).glob("*.json")) for row in load_record(path))
    return {
        row.name: Problem(row.name, row.family, row.spec, row.size)
        for row in rows
        if family in (None, row.family) and fnmatch.fnmatchcase(row.name, pattern)
    }


def problem_named(name: str, folder: Path | None = None) -> Problem:
    """The default problem of this name, or that of a row in a record, of the package or in ``folder``.

    Raises:
        SelectionError: there is none.
    """
    problems = {p.name: p for p in default_problems()}
    found = problems.get(name) or _measured(name, None, folder).get(name)
    if found is None:
        raise SelectionError(_unknown("problem", name, list(problems)))
    return found


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"no {what} {name!r}.{hint} There are: {', '.join(known)}"
