"""Every text of a kernel of the GRU over sequences: the product of the text axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.choices import choices
from tuned.families.gru.launches import kernel_name
from tuned.families.gru.spec import LAYOUTS, GruSpec
from tuned.families.gru.variant import GruVariant

from ..text import Text


def gru_texts() -> Iterator[tuple[GruSpec, GruVariant]]:
    """One spec and variant for each text of a recurrence: layout, a stack or one layer, form, turns; of a stack one."""
    for layout, layers, form, turns in itertools.product(LAYOUTS, (1, 2), choices(GruVariant)["form"], (1, 2)):
        if ((layers > 1 or turns > 1) and form != GruVariant.form) or layers > 1 < turns:
            continue
        yield GruSpec("bfloat16", 512, layout=layout, layers=layers), GruVariant("persistent", form, turns=turns)


def template(spec: GruSpec, variant: GruVariant) -> str:
    """The template of a recurrence."""
    return "gru_stack" if spec.stacked else "gru_turns" if variant.in_turn else "gru_layer"


def texts() -> Iterator[Text]:
    """One for each of gru_texts; a caller is given the first form untuned."""
    for spec, variant in gru_texts():
        yield template(spec, variant), kernel_name(spec, variant), spec, variant, variant.form == GruVariant.form
