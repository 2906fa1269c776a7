"""Read the problems that a model ran and that no row was measured for: what TUNED_RECORD wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tuned.lookup.misses import recorded
from tuned.lookup.record import RecordError

from ..problem import Problem, SelectionError
from ..workload import WORKLOADS, default_problems

MAX_BYTES = 2**40  # of one set of tensors: no GPU has more, so such a size was not recorded by a run


class MissesError(SelectionError):
    """A file of recorded problems cannot be read; the message says which line, what is wrong and what it must be."""


def read_misses(path: Path) -> list[Problem]:
    """The problems of a file that TUNED_RECORD wrote, in its order, each once; empty lines are skipped.

    A default problem keeps its name; others are named after their spec and size, the same in every run.

    Raises:
        MissesError: the file cannot be read, or a line of it is not a problem.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MissesError(f"{path} cannot be read ({error}): a model run with TUNED_RECORD={path} writes it") from error
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
    """A problem's name from its spec and size: what differs from the spec's defaults, then the sizes."""
    words = [
        _word(f.name, getattr(spec, f.name)) for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default
    ]
    return "_".join([family, *words, "x".join(str(n) for n in dataclasses.astuple(size))])


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return value if isinstance(value, str) else f"{name}{value}"
