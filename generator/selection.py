"""Choose problems by family, by name or by pattern."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING

from generator.workload import WORKLOADS, default_problems

if TYPE_CHECKING:
    from generator.problem import Problem

# One of each kind: a prefill of a common model, a decode batch, partial rotation in place, and the other family.
REPRESENTATIVE = ("llama3_8b_2x4096", "llama3_8b_decode_64x1", "half_rotary_inplace_bshd_4x4096", "gru_cell_1024_64")


class SelectionError(ValueError):
    """A family or problem that is not there; the message says what is, and what may have been meant."""


def select(family: str | None, names: str | None, *, representative: bool = False) -> list[Problem]:
    """The default problems of a family, those that ``names`` lists (commas, patterns with *), in their own order.

    Without names, and with ``representative``, a few of them: one of each kind.

    Raises:
        SelectionError: a name or pattern that matches nothing.
    """
    if family is not None and family not in WORKLOADS:
        raise SelectionError(_unknown("family", family, list(WORKLOADS)))
    problems = default_problems(family)
    if names == "all" or (names is None and not representative):
        return problems
    wanted = REPRESENTATIVE if names is None else [n.strip() for n in names.split(",") if n.strip()]
    known = [p.name for p in problems]
    chosen: set[str] = set()
    for pattern in wanted:
        found = fnmatch.filter(known, pattern)
        if not found and names is not None:
            raise SelectionError(_unknown("problem", pattern, known))
        chosen.update(found)
    return [p for p in problems if p.name in chosen]


def problem_named(name: str) -> Problem:
    """The default problem of this name.

    Raises:
        SelectionError: there is none.
    """
    problems = {p.name: p for p in default_problems()}
    if name not in problems:
        raise SelectionError(_unknown("problem", name, list(problems)))
    return problems[name]


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"no {what} {name!r}.{hint} There are: {', '.join(known)}"
