"""Made-up landscapes: every variant has a time."""

from __future__ import annotations

import functools
import math

from generator.problem import Problem
from generator.searching.pool import legal_pool
from generator.storage.landscape import Landscape
from tests.support.fakes import ENVIRONMENT
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant


def landscape(problem: Problem, best: GruCellVariant) -> Landscape:
    """A made-up landscape: each octave of a tile's side or of warps away from the best costs an eighth more."""

    def cost(variant: GruCellVariant) -> float:
        names = ("block_batch", "block_hidden", "num_warps")
        return 8.0 + sum(abs(math.log2(getattr(variant, n) / getattr(best, n))) for n in names)

    times = {v: cost(v) for v in legal_pool(problem, 90).variants}
    return Landscape(problem, ENVIRONMENT, {}, 5.0, 6.0, times, {}, dict.fromkeys(times, 32))


def cell(batch: int, hidden: int = 1024, dtype: str = "bfloat16") -> Problem:
    return Problem(
        f"cell_{hidden}_{batch}_{dtype}",
        "gru_cell",
        GruCellSpec(dtype, hidden, (hidden,), inplace=True),
        GruCellSize(batch),
    )


# Steps in place have the library's form only, whose tile has these three knobs.
SMALL, LARGE = GruCellVariant("library", 1, 64, num_warps=2), GruCellVariant("library", 4, 256, num_warps=8)


@functools.cache
def made() -> list[Landscape]:
    """Landscapes of two small problems and two large ones; each takes half a second to make."""
    return [
        landscape(cell(8), SMALL),
        landscape(cell(16), SMALL),
        landscape(cell(4096), LARGE),
        landscape(cell(8192), LARGE),
    ]
