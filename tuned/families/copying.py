"""The launch that copies up to six tensors into rows of another width, or fills them: templates/copy_rows.py.jinja."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tuned.families.launch import Launch, ceil_div

KERNEL, MOST = "copy_rows", 6
INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # item size in bytes -> dtype that shows the bits
ROWS, COLUMNS = 16, 128  # of a program's tile


class Rows(NamedTuple):
    """How the rows of y are made from those of x; all in elements. Strides of a last axis are 1.

    Row i of y is row ``min(i % group, last)`` of group ``i // group`` of x, if ``i % group`` is below ``held``. A row of y is parts
    of ``width`` elements, of which x has the first ``given``. What y does not get from x is 0, or has all bits set if ``bits`` is -1.
    """

    rows: int
    group: int
    held: int
    last: int
    x_group: int  # stride of groups
    x_row: int  # stride of rows
    y_row: int
    columns: int  # of y
    width: int
    given: int
    bits: int = 0

    @property
    def programs(self) -> int:
        """Programs that make the rows of y."""
        return ceil_div(self.rows, ROWS) * ceil_div(self.columns, COLUMNS)


NOTHING = Rows(0, 1, 0, 0, 0, 0, 0, 1, 1, 0)


def padded(shape: Sequence[int], strides: Sequence[int], width: int, parts: int = 1) -> Rows:
    """Rows that copy a tensor ``[groups, rows, features]`` to contiguous rows, each of its ``parts`` to one of another width."""
    groups, rows, features = shape
    return Rows(
        groups * rows,
        rows,
        rows,
        rows - 1,
        strides[0],
        strides[1],
        parts * width,
        parts * width,
        width,
        features // parts,
    )


def filled(rows: int, columns: int, bits: int) -> Rows:
    """Rows that fill a contiguous tensor of so many rows with equal bits."""
    return Rows(rows, 1, 0, 0, 0, 0, columns, columns, columns, 0, bits)


def copy_launch(copies: Sequence[tuple[Any, Any, Rows]]) -> Launch:
    """The launch of up to six copies (x, y, rows), of integers of one item size; where nothing is read of x, y stands for it."""
    assert 0 < len(copies) <= MOST
    every = (*copies, *((*copies[0][:2], NOTHING),) * (MOST - len(copies)))
    return Launch(
        kernel=KERNEL,
        programs=sum(rows.programs for _, _, rows in every),
        arguments=(*(t for x, y, _ in every for t in (x, y)), *(number for _, _, rows in every for number in rows)),
        constants={"ROWS": ROWS, "COLUMNS": COLUMNS},
        options={"num_warps": 4},
    )
