"""The variants tried for each problem on one device: from the journal of searches, or from recorded landscapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from ..problem import Problem
from ..rendering.structures import digests_of
from ..storage.journal import Journal
from ..storage.landscape import load_landscapes


@dataclasses.dataclass(frozen=True)
class History:
    """The variants of one problem that were tried."""

    problem: Problem
    times: dict[Any, float]  # variant -> microseconds
    failed: dict[Any, str]  # variant -> the reason
    whole: bool = False  # every legal variant was tried; otherwise a search chose some
    fresh: bool = True  # measured with today's kernels

    @property
    def best_us(self) -> float:
        """The least time measured."""
        return min(self.times.values())

    @property
    def tried(self) -> int:
        """Variants measured or failed."""
        return len(self.times) + len(self.failed)


def from_journal(journal: Journal, asked: Iterable[tuple[Problem, dict[str, Any]]]) -> list[History]:
    """The trials of problems in their environments, measured with today's kernels; problems without trials are left out."""
    found = []
    for problem, environment in asked:
        results = journal.remembered(problem, environment, functools.partial(digests_of, problem))
        times = {v: r[0] for v, r in results.items() if not isinstance(r, str)}
        failed = {v: r for v, r in results.items() if isinstance(r, str)}
        if results:
            found.append(History(problem, times, failed))
    return found


def from_landscapes(device: str) -> list[History]:
    """The recorded landscapes of a device; none is no error."""
    return [History(s.problem, s.times, s.failed, whole=True, fresh=s.fresh) for s in load_landscapes(device)]
