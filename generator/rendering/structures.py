"""Every kernel text there can be: the product of the text axes of each family."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from generator.rendering.render import Kernel, render
from tuned.families.choices import choices
from tuned.families.gru.launches import kernel_name as gru_name
from tuned.families.gru.spec import LAYOUTS as GRU_LAYOUTS
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_cell.launches import gates_name
from tuned.families.gru_cell.launches import kernel_name as gru_cell_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat.launches import kernel_name as linear_cat_name
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.rope.launches import kernel_name as rope_name
from tuned.families.rope.spec import ANGLES, LAYOUTS, STYLES, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.launching.launcher import PROBE_KERNEL

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def gru_gates_specs() -> Iterator[GruCellSpec]:
    """One spec for each text of the gates after the library's products: bias, output."""
    for bias, inplace in itertools.product((True, False), (False, True)):
        yield GruCellSpec("bfloat16", 1024, (1024,), bias=bias, inplace=inplace)


# Form of a whole step in one kernel -> its template.
GRU_CELL_FORMS = {"split": "gru_cell", "tile": "gru_cell", "vector": "gru_cell_vector"}


def gru_texts() -> Iterator[tuple[GruSpec, GruVariant]]:
    """One spec and variant for each text of a recurrence: layout, a stack or one layer, form; of a stack one form."""
    for layout, layers, form in itertools.product(GRU_LAYOUTS, (1, 2), choices(GruVariant)["form"]):
        if layers > 1 and form != GruVariant.form:
            continue
        yield GruSpec("bfloat16", 512, layout=layout, layers=layers), GruVariant("persistent", form)


def texts() -> Iterator[tuple[str, str, Any, Any, bool]]:
    """Template, name, spec, variant, and whether a caller can be given it by default."""
    for rope_spec, rope_variant in itertools.product(rope_specs(), ROPE_SCHEDULES):
        yield "rope", rope_name(rope_spec, rope_variant), rope_spec, rope_variant, not rope_variant.loops_heads
    for call_spec, rope_variant in itertools.product(rope_call_specs(), ROPE_SCHEDULES):
        yield "rope_call", rope_name(call_spec, rope_variant), call_spec, rope_variant, not rope_variant.loops_heads
    yield "rope_table", PROBE_KERNEL, next(rope_specs()), RopeVariant(), True
    for gates in gru_gates_specs():
        yield "gru_gates", gates_name(bias=gates.bias, inplace=gates.inplace), gates, GruCellVariant("library"), True
    cell = GruCellSpec("bfloat16", 1024, (1024,))
    for form, template in GRU_CELL_FORMS.items():
        yield template, gru_cell_name(cell, GruCellVariant(form)), cell, GruCellVariant(form), True
    linear = LinearCatSpec("bfloat16", (512, 512), 1024)
    for linear_variant in (LinearCatVariant("tile"), LinearCatVariant("vector")):
        yield "linear_cat", linear_cat_name(linear, linear_variant), linear, linear_variant, True
    for gru_spec, gru_variant in gru_texts():
        default = gru_variant.form == GruVariant.form
        yield "gru", gru_name(gru_spec, gru_variant), gru_spec, gru_variant, default


@functools.cache
def structures() -> dict[str, Kernel]:
    """Every kernel by name, rendered from the templates as they are now."""
    return {name: render(template, name, spec, variant) for template, name, spec, variant, _ in texts()}


@functools.cache
def default_names() -> frozenset[str]:
    """The kernels that a call can get where no table says more: these are always committed."""
    return frozenset(name for _, name, _, _, default in texts() if default)
