"""Variants of RoPE that hold every pair of choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support import pairwise
from tuned.families.choices import choices
from tuned.families.rope.spec import RopeSpec
from tuned.families.rope.variant import RopeVariant, rejection

if TYPE_CHECKING:
    from collections.abc import Callable


def spec_for(knobs: dict[str, Any]) -> RopeSpec:
    """A plain spec that fits a variant: two tiles of heads, the last with one head, and a tail of features to copy."""
    return RopeSpec(
        layout="bshd",
        dtype="float32",
        heads=knobs["block_heads"] + 1,
        # A rule rejects whole_rows if halves are aligned or rows are wide.
        head_dim=30 if knobs["whole_rows"] else 48,
        rotary_dim=22 if knobs["whole_rows"] else 32,
    )


def numbers(spec_of: Callable[[dict[str, Any]], RopeSpec]) -> list[dict[str, Any]]:
    """Variants that hold every pair of choices that no rule rejects for their specs, at any size.

    pdl=True is left out: the interpreter lacks griddepcontrol, an instruction of sm_90. tests/kernels/test_compile.py
    compiles it and tests/gpu runs it.
    """
    axes = {**choices(RopeVariant), "pdl": (False,)}
    legal = pairwise.product(axes, lambda knobs: rejection(spec_of(knobs), None, RopeVariant(**knobs)) is None)
    return pairwise.covering(legal)


def spec_of(row: dict[str, Any]) -> RopeSpec:
    """The spec of a row of arguments."""
    return RopeSpec(
        row["layout"],
        row["dtype"],
        row["heads"],
        *row["dims"],
        style=row["style"],
        angles=row["angles"][0],
        angle_dtype=row["angles"][1],
        angle_entries=row["entries"],
        inplace=row["use"] == "inplace",
        direction="backward" if row["use"] == "backward" else "forward",
    )


def many_bounds(sequences: int, tokens: int) -> tuple[int, ...]:
    """Random bounds within the tokens: most sequences are empty, and tokens on both sides are in no sequence."""
    cuts = torch.randint(1, tokens - 1, (sequences + 1,), generator=torch.Generator().manual_seed(sequences))
    return tuple(sorted(cuts.tolist()))
