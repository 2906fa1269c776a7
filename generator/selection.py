"""Choose problems by family, by name, by pattern or from a file of what models ran, which TUNED_RECORD wrote."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from pathlib import Path
from typing import Any

from tuned.lookup.misses import recorded
from tuned.lookup.record import RecordError

from .places import TUNE
from .problem import Problem, SelectionError
from .storage.record import read_record, recorded_devices
from .workload import WORKLOADS, default_problems


def select(
    family: str | None, names: str | None, *, representative: bool = False, folder: Path | None = None
) -> list[Problem]:
    """The default problems of a family that ``names`` lists (with commas, patterns with *), in the default order.

    A name that ends in .jsonl is a file that TUNED_RECORD wrote: the file's problems follow, in the file's order.
    Without names all are chosen; with ``representative``, a few: one of each kind. A name that no default problem has
    may be that of a row in a record, of the package or in ``folder``.

    Raises:
        SelectionError: a name or pattern that matches nothing, or a file that cannot be read.
    """
    if family is not None and family not in WORKLOADS:
        raise SelectionError(_unknown("family", family, list(WORKLOADS)))
    problems = default_problems(family)
    if names == "all" or (names is None and not representative):
        return problems
    few = [name for work in WORKLOADS.values() for name in work.representative]
    wanted = few if names is None else [n.strip() for n in names.split(",") if n.strip()]
    known = [p.name for p in problems]
    if not wanted and names is not None:
        raise SelectionError(f"--problems names none, got {names!r}: leave it out for all, or see {TUNE} --list")
    chosen: set[str] = set()
    others: dict[str, Problem] = {}
    for pattern in wanted:
        if pattern.endswith(".jsonl"):
            others.update((p.name, p) for p in read_misses(Path(pattern)) if family in (None, p.family))
            continue
        found = fnmatch.filter(known, pattern)
        measured = {} if found or names is None else _measured(pattern, family, folder)
        if not found and not measured and names is not None:
            raise SelectionError(_unknown("problem", pattern, known, family=family))
        chosen.update(found)
        others.update(measured)
    return [p for p in problems if p.name in chosen] + [p for n, p in others.items() if n not in chosen]


def _measured(pattern: str, family: str | None, folder: Path | None) -> dict[str, Problem]:
    """Name -> problem of the matching rows of all records: models recorded these problems, then they were tuned."""
    rows = (row for device in recorded_devices(folder) for row in read_record(device, folder))
    return {
        row.name: Problem(row.name, row.family, row.spec, row.size)
        for row in rows
        if family in (None, row.family) and fnmatch.fnmatchcase(row.name, pattern)
    }


def problem_named(name: str, folder: Path | None = None) -> Problem:
    """The default problem of this name, or the problem of a row of this name in a record, of the package or in ``folder``.

    Raises:
        SelectionError: no problem has this name.
    """
    problems = {p.name: p for p in default_problems()}
    found = problems.get(name) or _measured(name, None, folder).get(name)
    if found is None:
        raise SelectionError(_unknown("problem", name, list(problems), patterns=False))
    return found


LISTED = 12  # a message lists at most so many names


def _unknown(what: str, name: str, known: list[str], *, family: str | None = None, patterns: bool = True) -> str:
    """A message with the nearest names, and with all names, or where they are listed.

    ``family``: the only one that was looked into. ``patterns``: a pattern may stand where the name stands.
    """
    plain = name.replace("*", "")
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    close += [one for one in known if plain and plain in one and one not in close][: 3 - len(close)]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    of, option = ("", "") if family is None else (f" of family {family}", f" --family {family}")
    if len(known) <= LISTED:
        return f"no {what} {name!r}{of}.{hint} There are: {', '.join(known)}"
    rule = "a * stands for any letters" if patterns else "give one name, without a pattern"
    return f"no {what} {name!r}{of}.{hint} {TUNE} --list{option} names all {len(known)}; {rule}"


MAX_BYTES = 2**40  # of one set of tensors: no GPU has more memory, so no run can have recorded a larger size


class MissesError(SelectionError):
    """A file of recorded problems cannot be read; the message says which line, what is wrong and what is allowed."""


def read_misses(path: Path) -> list[Problem]:
    """The problems of a file that TUNED_RECORD wrote, in its order, each once; empty lines are skipped.

    A default problem keeps its name; others are named after their spec and size, so the name is the same in every run.

    Raises:
        MissesError: the file cannot be read, or a line of it is not a problem.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MissesError(
            f"{path} cannot be read ({error}): a model that runs on a GPU with TUNED_RECORD={path} "
            "writes it, unless each of its problems has a row"
        ) from error
    known = {(p.family, p.spec, p.size): p.name for p in default_problems()}
    found: dict[Any, Problem] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            key = _problem(line, f"{path.name} line {number}")
            found.setdefault(key, Problem(known.get(key) or name_of(*key), *key))
    return list(found.values())


def _problem(line: str, where: str) -> tuple[str, Any, Any]:
    try:
        family, spec, size = recorded(line, where)
    except RecordError as error:
        raise MissesError(str(error)) from error
    needed = WORKLOADS[family].tensor_bytes(spec, size)
    if needed > MAX_BYTES:
        raise MissesError(f"{where}: {size} takes {needed / 2**40:.1f} TiB, more than any GPU has; delete the line")
    return family, spec, size


def name_of(family: str, spec: Any, size: Any) -> str:
    """A problem's name from its spec and size: the fields that differ from the spec's defaults, then the sizes."""
    words = [_word(f, getattr(spec, f.name)) for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default]
    return "_".join([family, *words, "x".join(str(n) for n in dataclasses.astuple(size))])


def _word(field: dataclasses.Field[Any], value: Any) -> str:
    if isinstance(value, bool):
        return field.name if value else f"no_{field.name}"
    if isinstance(value, tuple):  # with the commas of a tuple the name would be two for --problems
        return field.name + "x".join(map(str, value))
    # A string is enough where every name has one of this field. Of a field that may be left out, it needs the field's
    # name too: another field may have the same values.
    return value if isinstance(value, str) and field.default is dataclasses.MISSING else f"{field.name}{value}"
