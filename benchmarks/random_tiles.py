"""What the default tile leaves to the best one of RoPE calls of random shapes: python -m benchmarks.random_tiles [FILE ...].

Of each call all legal tiles were timed on an H200, in CUDA graphs, with one cache hint and no dependent launch, beside the peers
that take the call: docs/decisions/0052. The rule by which a default is chosen was fitted to them. No GPU is needed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant

FILES = Path(__file__).parent / "results" / "random" / "tiles"
SHOWN = 10


def rows_of(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The calls of some files: spec, size, times of peers, and tiles as [tokens, heads, warps, microseconds]."""
    return [row for path in paths for row in json.loads(path.read_text())["rows"]]


def left(rows: Iterable[dict[str, Any]], rule: Any = default_variant) -> dict[str, float]:
    """Call -> the time of the rule's tile over that of the best; without those whose tile was not measured."""
    found = {}
    for row in rows:
        chosen: RopeVariant = rule(RopeSpec(**row["spec"]), RopeSize(**row["size"]))
        times = {tuple(tile): us for *tile, us in row["tiles"]}
        us = times.get((chosen.block_tokens, chosen.block_heads, chosen.num_warps))
        if us is not None:
            spec = row["spec"]
            name = f"{row['problem']} {spec['layout']} {spec['dtype']} {spec['style']} {spec['direction']}"
            found[name] = us / min(times.values())
    return found


def summary(found: dict[str, float]) -> str:
    """Of all calls, and those of which most is left."""
    mean, most = statistics.geometric_mean(found.values()), max(found.values())
    lines = [f"{len(found)} calls: the default's tile takes {mean:.3f} of the best one's time, {most:.3f} at most"]
    worst = sorted(found.items(), key=lambda one: -one[1])[:SHOWN]
    return "\n".join([*lines, *(f"    {ratio:.3f} {name}" for name, ratio in worst)])


if __name__ == "__main__":
    print(summary(left(rows_of([Path(name) for name in sys.argv[1:]] or sorted(FILES.glob("*.json"))))))
