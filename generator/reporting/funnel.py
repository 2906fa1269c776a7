"""How many variants were left after each step of a search."""

from __future__ import annotations

import dataclasses

from ..searching.search import Outcome

COMPILER = ("does not compile", "spills ", "needs ")  # how generator.processes.compiler.hopeless begins its reasons


@dataclasses.dataclass(frozen=True)
class Funnel:
    """Counts of variants, of one problem or of many."""

    declared: int = 0  # the product of all choices
    legal: int = 0  # no rule rejects them
    tried: int = 0  # proposed by the search, now or in an earlier run
    compiled: int = 0  # without spills and within shared memory
    right: int = 0  # equal to the reference; these were measured

    def __add__(self, other: Funnel) -> Funnel:
        """Both together."""
        return Funnel(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __str__(self) -> str:
        """The steps in order."""
        steps = " -> ".join(f"{n:,} {name}" for name, n in dataclasses.asdict(self).items())
        return f"{steps} and measured"


def funnel_of(outcome: Outcome) -> Funnel:
    """The funnel of one problem."""
    tried = outcome.measured + len(outcome.failed)
    hopeless = sum(reason.startswith(COMPILER) for reason in outcome.failed.values())
    return Funnel(outcome.declared, outcome.pool, tried, tried - hopeless, outcome.measured)
