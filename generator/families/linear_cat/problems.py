"""Default problems of the linear over segments, most common first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.products import PRECISIONS

from ...problem import Problem

# A grid: between these widths of two segments, outputs and rows the nearest row serves. In float32 it has one row and
# those that form "outer" is for: more and wider ones are PyTorch's operator's.
GRID_INPUTS = ((256, 128), (1024, 512))
GRID_OUTPUTS = (96, 768, 6144)
GRID_ROWS = (1, 24, 400)
SMALL_OUTPUTS, SMALL_ROWS = (96, 768), (1, 24)
# Of rows that are no multiple of 16 bytes, in bfloat16 and float32's own precision.
UNALIGNED = (((150, 75), 45), ((150, 75), 450), ((601, 300), 45))
UNALIGNED_ROWS = (5, 30, 180)
UNALIGNED_LARGE, LARGE_ROWS = ((601, 300), 450), 5
# More and wider ones in bfloat16, which form "padded" is for; in float32 they are PyTorch's operator's.
PADDED = (
    *itertools.product((((601, 300), 450), ((150, 75), 4500), ((601, 300), 4500)), (30, 180)),
    *itertools.product((*UNALIGNED, UNALIGNED_LARGE, ((150, 75), 4500), ((601, 300), 4500)), (700,)),
)


def problems() -> Iterator[Problem]:
    """The default problems.

    A seq2seq decoder's output layer, over hidden state, context and embedding; a GRU's projection; and a grid.

    The projection is a float32 call under torch's default settings, which allow TF32 in a GRU but not in GEMMs.
    """
    spec = LinearCatSpec("bfloat16", (512, 512, 256), 10_000)
    for rows in (1, 128):
        yield Problem(f"linear_cat_decoder_{rows}", "linear_cat", spec, LinearCatSize(rows))
    projection = LinearCatSpec("float32", (512,), 1536, bias=False, precision="tf32")
    yield Problem("gru_projection_tf32_8192", "linear_cat", projection, LinearCatSize(8192))
    for inputs, outputs, rows in itertools.product(GRID_INPUTS, GRID_OUTPUTS, GRID_ROWS):
        name = f"linear_cat_grid_bf16_{rows}x{sum(inputs)}x{outputs}"
        yield Problem(name, "linear_cat", LinearCatSpec("bfloat16", inputs, outputs), LinearCatSize(rows))
    for inputs, outputs, rows, precision in itertools.product(GRID_INPUTS, SMALL_OUTPUTS, SMALL_ROWS, PRECISIONS):
        name = f"linear_cat_grid_{precision}_{rows}x{sum(inputs)}x{outputs}"
        small = LinearCatSpec("float32", inputs, outputs, precision=precision)
        yield Problem(name, "linear_cat", small, LinearCatSize(rows))
    for (inputs, outputs), rows in (*itertools.product(UNALIGNED, UNALIGNED_ROWS), (UNALIGNED_LARGE, LARGE_ROWS)):
        bf16 = LinearCatSpec("bfloat16", inputs, outputs)
        for short, spec in (("bf16", bf16), ("fp32", LinearCatSpec("float32", inputs, outputs, precision="ieee"))):
            name = f"linear_cat_unaligned_{short}_{rows}x{sum(inputs)}x{outputs}"
            yield Problem(name, "linear_cat", spec, LinearCatSize(rows))
    for (inputs, outputs), rows in PADDED:
        name = f"linear_cat_unaligned_bf16_{rows}x{sum(inputs)}x{outputs}"
        yield Problem(name, "linear_cat", LinearCatSpec("bfloat16", inputs, outputs), LinearCatSize(rows))
