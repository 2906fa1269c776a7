"""Every text of a kernel of RoPE: the product of the text axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.rope.launches import kernel_name
from tuned.families.rope.spec import ANGLES, LAYOUTS, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.launching.launcher import PROBE_KERNEL

from ..text import Text


def rope_specs() -> Iterator[RopeSpec]:
    """One spec for each combination of text axes. Plain calls: layout, in place, style, angles; complete ones: the last three."""
    axes = list(itertools.product((False, True), STYLES, ANGLES))
    for layout, (inplace, style, angles) in itertools.product(LAYOUTS, axes):
        if angles != "inv_freq":
            yield RopeSpec(layout, "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace)
    for inplace, style, angles in axes:
        yield RopeSpec("bshd", "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace, key_heads=8)


def texts() -> Iterator[Text]:
    """The rotations, and the table that a launcher is probed with."""
    for spec in rope_specs():
        yield "rope", kernel_name(spec, RopeVariant()), spec, RopeVariant(), True
    yield "rope_table", PROBE_KERNEL, next(rope_specs()), RopeVariant(), True
