"""What the default leaves to the best tiles of random calls, as they were measured."""

from __future__ import annotations

import math
import statistics

from benchmarks.random_tiles import FILES, left, rows_of, summary
from tuned.families.rope.variant import RopeVariant

ROWS = rows_of(sorted(FILES.glob("*.json")))


def test_the_default_is_near_the_best_tile_of_random_calls() -> None:
    found = left(ROWS)
    assert len(found) >= 0.95 * len(ROWS)
    assert statistics.geometric_mean(found.values()) <= 1.05
    assert max(found.values()) <= 1.4


def test_another_rule_leaves_more() -> None:
    found = left(ROWS, lambda _spec, _size: RopeVariant())
    assert statistics.geometric_mean(found.values()) > 1.1
    assert all(ratio >= 1 for ratio in found.values())


def test_the_worst_are_told() -> None:
    said = summary({"a": 1.0, "b": math.e})
    assert said.splitlines() == [
        "2 calls: the default's tile takes 1.649 of the best one's time, 2.718 at most",
        "    2.718 b",
        "    1.000 a",
    ]
