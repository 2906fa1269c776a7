"""A variant for each form of a step."""

from __future__ import annotations

import dataclasses

from tuned.families.gru_cell.variant import GruCellVariant

SPLIT = GruCellVariant("split", 16, 16, 64, k_parts=2, num_stages=2, num_warps=2)

TILE = GruCellVariant("tile", 64, 32, 64, k_parts=1, num_stages=2)

PADDED = dataclasses.replace(TILE, form="padded")

VECTOR = GruCellVariant("vector", 4, 4, 256)

OUTER = GruCellVariant("outer", 4, 8)

LIBRARY = GruCellVariant("library", 2, 64, num_warps=2)

PADDED_LIBRARY = dataclasses.replace(LIBRARY, form="padded_library")

FORMS = {
    "split": SPLIT,
    "tile": TILE,
    "padded": PADDED,
    "vector": VECTOR,
    "outer": OUTER,
    "library": LIBRARY,
    "padded_library": PADDED_LIBRARY,
}
