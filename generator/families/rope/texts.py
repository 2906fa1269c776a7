"""Every text of a kernel of RoPE: the product of the text axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.rope.launches import kernel_name
from tuned.families.rope.spec import ANGLES, LAYOUTS, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.launching.launcher import PROBE_KERNEL

from ..text import Text

ROPE_SCHEDULES = (RopeVariant(), RopeVariant(head_steps=2, block_heads=4))


def rope_specs() -> Iterator[RopeSpec]:
    """One spec for each combination of a plain call's text axes: layout, output, style, angles."""
    outputs = (("copy", 128, False), ("copytail", 64, False), ("inplace", 128, True))
    tables = [angles for angles in ANGLES if angles != "inv_freq"]
    for layout, (_, rotary, inplace), style, angles in itertools.product(LAYOUTS, outputs, STYLES, tables):
        yield RopeSpec(layout, "bfloat16", 32, 128, rotary, style=style, angles=angles, inplace=inplace)


def rope_call_specs() -> Iterator[RopeSpec]:
    """One spec for each combination of a complete call's text axes: in place, style, angles."""
    for inplace, style, angles in itertools.product((False, True), STYLES, ANGLES):
        yield RopeSpec("bshd", "bfloat16", 32, 128, 128, style=style, angles=angles, inplace=inplace, key_heads=8)


def texts() -> Iterator[Text]:
    """Both templates, and the table that a launcher is probed with."""
    for template, specs in (("rope", rope_specs()), ("rope_call", rope_call_specs())):
        for spec, variant in itertools.product(specs, ROPE_SCHEDULES):
            yield template, kernel_name(spec, variant), spec, variant, not variant.loops_heads
    yield "rope_table", PROBE_KERNEL, next(rope_specs()), RopeVariant(), True
