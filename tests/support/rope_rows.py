"""A covering set of complete RoPE calls, as specs and cases: it has every pair of argument values that can occur together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.support import pairwise
from tests.support.rope_case import RopeCase
from tuned.calls.rope.arguments import Given, Settings
from tuned.families.rope.spec import LAYOUTS, ROTATED, STYLES, RopeSpec

if TYPE_CHECKING:
    from tests.support.rope_case import Built

# Bounds of the sequences among the tokens of one rank. Lengths are even, since a rank has two chunks of each.
PACKED = (2, 2, 6, 6, 12)
PACKED_SEQ = 14  # two tokens lie before the first bound and two past the last
PACKED_SEQUENCES = len(PACKED) - 1
DIMS = ((12, 12), (20, 12), (24, 8), (6, 2), (5, 4))  # head_dim, rotary_dim
HEADS = ((3, 0, 0), (5, 2, 0), (4, 1, 0), (1, 3, 0), (6, 0, 2), (1, 1, 0))  # heads of x, of the key, copied
ANGLES = (
    ("freqs", "float32"),
    ("inv_freq", "float32"),
    ("cos_sin", "float32"),
    ("cos_sin", "bfloat16"),
    ("cos_sin", "float64"),
)
# Views of x, of the key, and of their results. In x and the key features are equally far apart.
VIEWS = (
    ("contiguous", "contiguous", "contiguous", "contiguous"),
    ("qkv", "swapped", "contiguous", "offset"),
    ("swapped", "swapped", "swapped", "swapped"),
    ("contiguous", "packed", "contiguous", ""),
    ("swapped", "packed", "offset", ""),
    ("transposed", "packed", "transposed", ""),
    ("thirds", "thirds", "thirds", "thirds"),
    ("offset", "qkv", "swapped", "contiguous"),
    ("expanded", "expanded", "contiguous", "qkv"),
)
AXES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "dtype": ("float32", "float16", "bfloat16"),
    "dims": DIMS,
    "heads": HEADS,
    "style": STYLES,
    "angles": ANGLES,
    "entries": ("pair", "feature"),
    "use": ("forward", "inplace", "backward"),
    "places": ("order", "shifted", "offset", "starts", "ids", "shared ids"),
    "index_dtype": ("int32", "int64"),
    "ranks": ((1, 0), (2, 0), (2, 1), (3, 1), (4, 3)),  # cp_size, cp_rank
    "rotated": ROTATED,
    "conjugate": (False, True),
    "scaling": (1.0, 1.4),
    "per_batch": (False, True),
    "views": VIEWS,
    "angle_view": ("contiguous", "strided", "transposed", "halves"),
    "rows": ("enough", "more", "too few"),
    "size": ((1, 1), (7, 2), (6, 3)),  # tokens of a sequence, and batch; packed calls use PACKED instead
}


def possible(row: dict[str, Any]) -> bool:
    """Whether a caller can ask for the row, and the call is no plain one."""
    _, key_heads, copied = row["heads"]
    head_dim, rotary_dim = row["dims"]
    ids, parallel, thd = "ids" in row["places"], row["ranks"][0] > 1, row["layout"] == "thd"
    inplace = row["use"] == "inplace"
    refused = (
        (inplace and (copied or "expanded" in row["views"])),
        ("packed" in row["views"] and not key_heads),
        (row["rotated"] != "first" and rotary_dim == head_dim),
        (row["rotated"] == "proportional" and (row["style"] == "interleaved" or head_dim % 2)),
        (row["scaling"] != 1.0 and row["angles"][0] == "cos_sin"),
        (row["per_batch"] and (thd or row["angles"][0] != "cos_sin")),
        (row["angle_view"] == "halves" and (row["per_batch"] or row["angles"][0] != "cos_sin")),
        (row["angle_view"] == "halves" and row["entries"] == "feature"),
        (row["angles"][0] == "inv_freq" and row["rows"] != "enough"),
        (row["places"] == "shared ids" and thd),
        (ids and parallel),
        (parallel and not thd and row["size"][0] % 2),
        (thd and row["size"] != (7, 2)),
    )
    return not any(refused) and not spec_of(row).plain


def spec_of(row: dict[str, Any]) -> RopeSpec:
    """The spec of a row."""
    heads, key_heads, copied = row["heads"]
    return RopeSpec(
        row["layout"],
        row["dtype"],
        heads,
        *row["dims"],
        style=row["style"],
        angles=row["angles"][0],
        angle_dtype=row["angles"][1],
        angle_entries=row["entries"],
        inplace=row["use"] == "inplace",
        direction="backward" if row["use"] == "backward" else "forward",
        key_heads=key_heads,
        copied_heads=copied if row["use"] != "inplace" else 0,
        positions="ids" if "ids" in row["places"] else row["places"],
        context_parallel=row["ranks"][0] > 1,
        rotated=row["rotated"],
        conjugate=row["conjugate"],
        scaled=row["scaling"] != 1.0,
        angles_per_batch=row["per_batch"],
    )


def case_of(row: dict[str, Any], times: int = 1) -> RopeCase:
    """A call of a few tokens, or ``times`` as many; their number fills no tile, and the layout "thd" is packed."""
    spec, draw = spec_of(row), random.Random(0)
    (seq, batch), (cp_size, cp_rank) = row["size"], row["ranks"]
    seq *= times
    if spec.layout == "thd":
        seq, batch = PACKED_SEQ * times, 1
    reach = 6 * times * cp_size if spec.packed else seq * cp_size
    starts: tuple[int, ...] | int = 0
    ids = None
    if spec.positions in ("shifted", "offset"):
        starts = 5
    elif spec.positions == "starts":
        starts = tuple(draw.randrange(6) for _ in range(PACKED_SEQUENCES if spec.packed else batch))
    elif spec.positions == "ids":
        reach, entries = 20, 1 if row["places"] == "shared ids" else batch
        ids = tuple(tuple(draw.randrange(reach) for _ in range(entries)) for _ in range(seq))
    reach += starts if isinstance(starts, int) else max(starts)
    x_view, key_view, out_view, key_out_view = row["views"]
    return RopeCase(
        spec,
        seq=seq,
        batch=batch,
        angle_rows=max(0, reach + {"enough": 0, "more": 3, "too few": -3}[row["rows"]]),
        x_view=x_view,
        out_view=out_view,
        angle_view=row["angle_view"],
        cu_seqlens=tuple(cp_size * times * bound for bound in PACKED) if spec.packed else None,
        key_view=key_view,
        key_out_view=key_out_view,
        starts=starts,
        ids=ids,
        index_dtype=row["index_dtype"],
        cp_size=cp_size,
        cp_rank=cp_rank,
        scaling=row["scaling"],
    )


def given_of(built: Built) -> Given:
    """The arguments that a caller would pass for the call."""
    case, spec, call = built.case, built.case.spec, built.call
    angles: dict[str, Any] = {"cos": call.cos, "sin": call.sin}
    if spec.angles == "inv_freq":
        angles = {"inv_freq": call.cos[0]}
    elif spec.angles == "freqs":
        angles = {"freqs": call.cos}
    elif case.angle_view == "halves":
        angles = {"cos_sin_cache": built.bases["angles 0"]}
    places: dict[str, Any] = {"positions": call.positions} if spec.positions == "ids" else {}
    if spec.positions == "shifted":
        places = {"offset": call.offset}
    elif spec.positions in ("offset", "starts"):
        places = {"offset": call.positions}
    return Given(call.x, call.key, cu_seqlens=call.cu_seqlens, **angles, **places)


def settings_of(built: Built) -> Settings:
    """The settings that a caller would pass for the call."""
    case, spec = built.case, built.case.spec
    return Settings(
        tensor_format=spec.layout,
        interleaved=spec.interleaved,
        inplace=spec.inplace,
        rotary_dim=spec.rotary_dim,
        angle_entries=spec.angle_entries,
        attention_scaling=case.scaling,
        cp_size=case.cp_size,
        cp_rank=case.cp_rank,
        rotated=spec.rotated,
        conjugate=spec.conjugate,
        kv_heads=spec.copied_heads or None,
        direction=spec.direction,
    )


def row_id(row: dict[str, Any]) -> str:
    """A test id that distinguishes the row from most others."""
    words = [row["layout"], row["dtype"], row["style"], row["angles"][0], row["use"], row["places"], row["rotated"]]
    return "-".join([*words, *map(str, row["dims"]), "h" + "_".join(map(str, row["heads"])), row["views"][0]])


# 4,000 draws hold practically every pair of values that can occur together: the rarest is drawn ten times.
ROWS = pairwise.covering(pairwise.sample(AXES, possible, 4000))
