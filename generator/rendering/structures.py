"""Every kernel text there can be: the product of the text axes of each family."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from generator.rendering.render import Kernel, render
from tuned.gru_cell.launches import kernel_name as gru_cell_name
from tuned.gru_cell.spec import GruCellSpec
from tuned.gru_cell.variant import GruCellVariant
from tuned.launcher import PROBE_KERNEL
from tuned.rope.launches import kernel_name as rope_name
from tuned.rope.spec import ANGLES, LAYOUTS, STYLES, RopeSpec
from tuned.rope.variant import RopeVariant

if TYPE_CHECKING:
    from collections.abc import Iterator

ROPE_SCHEDULES = (RopeVariant(), RopeVariant(head_steps=2, block_heads=4))


def rope_specs() -> Iterator[RopeSpec]:
    """One spec for each combination of a caller's text axes: layout, output, style, angles."""
    outputs = (("copy", 128, False), ("copytail", 64, False), ("inplace", 128, True))
    for layout, (_, rotary, inplace), style, angles in itertools.product(LAYOUTS, outputs, STYLES, ANGLES):
        yield RopeSpec(layout, "bfloat16", 32, 128, rotary, style=style, angles=angles, inplace=inplace)


def gru_cell_specs() -> Iterator[GruCellSpec]:
    """One spec for each combination of a caller's text axes: bias, output."""
    for bias, inplace in itertools.product((True, False), (False, True)):
        yield GruCellSpec("bfloat16", 1024, bias=bias, inplace=inplace)


def _texts() -> Iterator[tuple[str, str, Any, Any, bool]]:
    """Template, name, spec, variant, and whether a caller can be given it by default."""
    for rope_spec, rope_variant in itertools.product(rope_specs(), ROPE_SCHEDULES):
        yield "rope", rope_name(rope_spec, rope_variant), rope_spec, rope_variant, not rope_variant.loops_heads
    yield "rope_table", PROBE_KERNEL, next(rope_specs()), RopeVariant(), True
    for gru_spec in gru_cell_specs():
        gru_variant = GruCellVariant()
        yield "gru_cell", gru_cell_name(gru_spec, gru_variant), gru_spec, gru_variant, True


@functools.cache
def structures() -> dict[str, Kernel]:
    """Every kernel by name, rendered from the templates as they are now."""
    return {name: render(template, name, spec, variant) for template, name, spec, variant, _ in _texts()}


@functools.cache
def default_names() -> frozenset[str]:
    """The kernels that a call can get where no table says more: these are always committed."""
    return frozenset(name for _, name, _, _, default in _texts() if default)
