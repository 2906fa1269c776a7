"""The variants that a search would try: problem by problem, or on one page by family."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from ..figures import figures
from ..problem import Problem
from ..searching.pool import Pool

FEW = 3  # up to so many problems are listed one by one
RULES = 5  # rules listed for a problem, or for a family on the page, unless all are asked for
WIDTH = 64  # characters of a rule on the page


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a search would do with one problem."""

    problem: Problem
    pool: Pool
    trials: int


def facts(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "name": plan.problem.name,
        "family": plan.problem.family,
        "declared": plan.pool.declared,
        "legal": len(plan.pool.variants),
        "to_measure": plan.trials,
        "rejected_tiles": plan.pool.rejected,
    }


def lines(plan: Plan, *, details: bool) -> Iterator[str]:
    """The funnel of a problem, and the rules that rejected most tiles; with ``details`` all rules."""
    pool = plan.pool
    yield f"{plan.problem.name}: {pool.declared} declared -> {len(pool.variants)} legal -> {plan.trials} to measure"
    rules = list(pool.rejected.items())
    shown = rules if details else rules[:RULES]
    yield from (f"    {count:5} tiles: {rule}" for rule, count in shown)
    if left := len(rules) - len(shown):
        yield f"    {sum(count for _, count in rules[len(shown) :]):5} tiles: {left} more rules, which --details lists"


def table(plans: Sequence[Plan], device: str) -> Table:
    """A row a family, and all together."""
    found = figures(f"Variants to try on {device}", "family", "problems", "declared", "legal", "to measure")
    families = list(dict.fromkeys(plan.problem.family for plan in plans))
    for family in families:
        found.add_row(family, *_sums([plan for plan in plans if plan.problem.family == family]))
    if len(families) > 1:
        found.add_section()
        found.add_row("all", *_sums(plans))
    return found


def _sums(plans: Sequence[Plan]) -> list[str]:
    counts = (
        len(plans),
        sum(plan.pool.declared for plan in plans),
        sum(len(plan.pool.variants) for plan in plans),
        sum(plan.trials for plan in plans),
    )
    return [f"{count:,}" for count in counts]


def reasons(plans: Sequence[Plan]) -> Iterator[str]:
    """The rules that rejected most tiles of each family; rules that differ only in numbers count as one."""
    for family in dict.fromkeys(plan.problem.family for plan in plans):
        kinds: Counter[str] = Counter()
        for plan in plans:
            if plan.problem.family == family:
                for rule, count in plan.pool.rejected.items():
                    kinds[re.sub(r"\d+", "N", rule)] += count
        if kinds:
            yield f"{family}: {kinds.total():,} tiles are not tried"
        for kind, count in kinds.most_common(RULES):
            text = kind if len(kind) <= WIDTH else f"{kind[: WIDTH - 3]}..."
            yield f"    {count:7,}  {text}"
