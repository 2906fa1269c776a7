"""Every text of a kernel of the GRU step: the product of the text axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.gru_cell.launches import gates_name, kernel_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant

from ..text import Text


def gru_gates_specs() -> Iterator[GruCellSpec]:
    """One spec for each text of the gates after the library's products: bias, output."""
    for bias, inplace in itertools.product((True, False), (False, True)):
        yield GruCellSpec("bfloat16", 1024, (1024,), bias=bias, inplace=inplace)


# Form of a whole step in one kernel -> its template.
GRU_CELL_FORMS = {"split": "gru_cell", "tile": "gru_cell", "vector": "gru_cell_vector"}


def texts() -> Iterator[Text]:
    """The gates after the library's products, then each form of a whole step in one kernel."""
    for gates in gru_gates_specs():
        yield "gru_gates", gates_name(bias=gates.bias, inplace=gates.inplace), gates, GruCellVariant("library"), True
    cell = GruCellSpec("bfloat16", 1024, (1024,))
    for form, template in GRU_CELL_FORMS.items():
        yield template, kernel_name(cell, GruCellVariant(form)), cell, GruCellVariant(form), True
