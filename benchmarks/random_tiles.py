"""How much slower the default tile is than the best, on RoPE calls of random shapes: python -m benchmarks.random_tiles [FILE ...].

Several tiles of each call were timed in CUDA graphs, with one cache hint, beside the peers that take the call: on an
H200 all legal tiles, without dependent launch (docs/decisions/0052); on an H100 the tiles that the rule likes best,
with and without it (0074). The rule that chooses the default was fitted to these calls, except to those that were
picked afterwards because they are slow (0075, 0087). No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments
from tuned.families.rope.spec import RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant, default_variant

FILES = Path(__file__).parent / "results" / "random" / "tiles"
SHOWN = 10


def rows_of(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The calls of some files: spec, size, times of peers, and tiles as [tokens, heads, warps, microseconds]."""
    return [row for path in paths for row in json.loads(path.read_text())["rows"]]


def times_of(row: dict[str, Any]) -> dict[tuple[Any, ...], float]:
    """(tokens, heads, warps, whether with dependent launch) -> microseconds."""
    launches = {False: row["tiles"], True: row.get("dependent", ())}
    return {(*tile, dependent): us for dependent, tiles in launches.items() for *tile, us in tiles}


def left(rows: Iterable[dict[str, Any]], rule: Any = default_variant) -> dict[str, float]:
    """Call -> time of the rule's tile over that of the best; without tiles that were not measured, as those of whole rows."""
    found = {}
    for row in rows:
        spec = RopeSpec(**row["spec"])
        chosen: RopeVariant = rule(spec, RopeSize(**row["size"]))
        times = times_of(row)
        tile = chosen.block_tokens, chosen.block_heads, chosen.num_warps
        us = None if chosen.whole_rows else times.get((*tile, chosen.pdl and "dependent" in row))
        if us is not None:
            name = f"{row['problem']} {spec.layout} {spec.dtype} {spec.style} {spec.direction}"
            found[name] = us / min(times.values())
    return found


def summary(found: dict[str, float]) -> str:
    """The mean over all calls, and the calls with the largest ratios."""
    mean, most = statistics.geometric_mean(found.values()), max(found.values())
    lines = [f"{len(found)} calls: the default's tile takes {mean:.3f} of the best one's time, {most:.3f} at most"]
    worst = sorted(found.items(), key=lambda one: -one[1])[:SHOWN]
    return "\n".join([*lines, *(f"    {ratio:.3f} {name}" for name, ratio in worst)])


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = sorted(FILES.glob("*.json"))
    parser.add_argument("files", nargs="*", type=arguments.results("tiles"), default=default, metavar="FILE")
    found = left(rows_of(parser.parse_args(given).files))
    if not found:
        parser.error("the default tile of no call was measured in these files")
    print(summary(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
