"""Operands whose rows are copied before they are multiplied, padded to a multiple of 16 bytes: form "padded".

Tensor cores are fed by asynchronous loads of 4 to 16 bytes, which need rows that start at such multiples. Where rows are not, one
launch (tuned.families.copying) copies the inputs, side by side, and the weights; padding is 0, which adds nothing to a product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tuned.families.copying import INTEGERS, MOST, Rows, copy_launch, padded
from tuned.families.launch import Launch, ceil_div
from tuned.families.products import ALIGNED_BYTES, ITEM_SIZE

SERVED = 2  # bytes of an element: rows of float32 are loaded 4 bytes at a time, which is asynchronous too
PADDED_ROWS = 16  # with as few rows, copying the weights takes longer than loading them an element at a time
MAX_ELEMENTS = 2**31  # of a padded weight: the kernels compute offsets in it in 32 bits

# Inputs that are multiplied side by side, each [rows, width], and their weight [columns, all widths].
Side = tuple[Any, Any]


class Matrix(NamedTuple):
    """An operand with padded rows."""

    offset: int  # in the memory of all, elements
    rows: int
    columns: int

    def of(self, memory: Any) -> Any:
        """The operand as a view of the memory of all."""
        return memory.as_strided((self.rows, self.columns), (self.columns, 1), self.offset)


class Pads:
    """The copies of a call, and where they go in one memory."""

    def __init__(
        self, copies: list[tuple[int, int, Rows]], operands: list[tuple[Matrix, Matrix] | None], elements: int
    ) -> None:
        self.copies = copies  # (which of the tensors of all sides, its offset, its rows)
        self.operands = operands  # of each side the input and the weight; None: as they are
        self.elements = elements

    def launches(self, memory: Any, sides: Sequence[Side]) -> tuple[Launch, ...]:
        """The launches that make all copies: one makes up to six."""
        integer, given = INTEGERS[memory.element_size()], [t for inputs, weight in sides for t in (*inputs, weight)]
        to = memory.view(integer)
        every = [(given[i].view(integer), to[at:], rows) for i, at, rows in self.copies]
        return tuple(copy_launch(every[begin : begin + MOST]) for begin in range(0, len(every), MOST))

    def padded(self, memory: Any, sides: Sequence[Side]) -> list[Side]:
        """The sides with what was copied in the place of what it was copied from."""
        found = []
        for operands, side in zip(self.operands, sides, strict=True):
            found.append(side if operands is None else ((operands[0].of(memory),), operands[1].of(memory)))
        return found


def padded_widths(widths: tuple[int, ...], item: int) -> tuple[int, ...]:
    """The widths of inputs of elements of ``item`` bytes as they are multiplied: if one is not aligned, all are joined and padded."""
    elements = ALIGNED_BYTES // item
    aligned = all(width % elements == 0 for width in widths)
    return widths if aligned else (_up(sum(widths), elements),)


def multiplied(spec: Any, variant: Any) -> Any:
    """The spec with the inputs as the kernel of a variant multiplies them: one that ``pads`` has joined them."""
    if not variant.pads:
        return spec
    return dataclasses.replace(spec, inputs=padded_widths(spec.inputs, ITEM_SIZE[spec.dtype]))


def _up(elements: int, to: int) -> int:
    return ceil_div(elements, to) * to


def pads_of(sides: Sequence[Side], *, results: bool = False) -> Pads:
    """Where the operands of each side go; the last strides of all tensors are 1.

    ``results``: weights get more rows, so that rows of the products are aligned too; these repeat the last one.
    """
    copies: list[tuple[int, int, Rows]] = []
    operands: list[tuple[Matrix, Matrix] | None] = []
    position = elements = 0
    for inputs, weight in sides:
        widths, multiple = tuple(t.shape[1] for t in inputs), ALIGNED_BYTES // weight.element_size()
        rows = _up(weight.shape[0], multiple) if results else weight.shape[0]
        if padded_widths(widths, weight.element_size()) == widths and rows == weight.shape[0]:
            operands.append(None)
            position += len(inputs) + 1
            continue
        columns, start = _up(sum(widths), multiple), 0
        x = Matrix(elements, inputs[0].shape[0], columns)
        w = Matrix(elements + x.rows * columns, rows, columns)
        for t, width in zip(inputs, widths, strict=True):
            last = start + width == sum(widths)
            copies.append((position, x.offset + start, _rows(t, columns - start if last else width, columns)))
            position, start = position + 1, start + width
        of_weight = _rows(weight, columns, columns)._replace(rows=rows, group=rows, held=rows)
        copies.append((position, w.offset, of_weight))
        position, elements = position + 1, w.offset + w.rows * columns
        operands.append((x, w))
    return Pads(copies, operands, elements)


def _rows(t: Any, width: int, columns: int) -> Rows:
    """The rows of a tensor, each padded to ``width`` elements of a row of ``columns``."""
    return padded((1, *t.shape), (0, t.stride(0)), width)._replace(y_row=columns)


def rejection(item: int, sides: Sequence[tuple[tuple[int, ...], int]], rows: int | None) -> str | None:
    """Why form "padded" is not tried for sides of (widths of the inputs, rows of the weight), or None."""
    copied = [(widths, columns) for widths, columns in sides if padded_widths(widths, item) != widths]
    if item != SERVED or not copied:
        return f"form='padded' is for 16-bit rows that are no multiples of {ALIGNED_BYTES} bytes"
    if rows is not None and rows <= PADDED_ROWS:
        return f"form='padded' copies all weights, which does not pay for {rows} rows: it takes more than {PADDED_ROWS}"
    if max(columns * padded_widths(widths, item)[0] for widths, columns in copied) >= MAX_ELEMENTS:
        return f"a padded weight would have {MAX_ELEMENTS} elements or more, which are not addressed in 32 bits"
    return None
