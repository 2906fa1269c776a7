"""Copies of rows as templates/copy_rows.py.jinja makes them, and their results by loops over elements."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from typing import TYPE_CHECKING

import torch

from tests.support.run import DEVICE, run
from tuned.families.copying import Rows, copy_launch
from tuned.launching.launcher import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MARK = 77  # a value that no copy writes


@dataclasses.dataclass(frozen=True)
class Copied:
    """One copy: a flat x that starts at an odd element, and a flat y, some of which the copy leaves unchanged."""

    x: torch.Tensor
    y: torch.Tensor
    rows: Rows


def expected(one: Copied) -> torch.Tensor:
    """What y holds after the copy."""
    x, y, rows = one.x.tolist(), one.y.tolist(), one.rows
    for row in range(rows.rows):
        group, held = divmod(row, rows.group)
        for column in range(rows.columns):
            part, at = divmod(column, rows.width)
            has = held < rows.held and at < rows.given
            where = group * rows.x_group + min(held, rows.last) * rows.x_row + part * rows.given + at
            y[row * rows.y_row + column] = x[where] if has else rows.bits
    return torch.tensor(y, dtype=one.y.dtype, device=one.y.device)


def drawn(draw: random.Random, dtype: torch.dtype) -> Copied:
    """A random copy: rows may be padded, cut, filled or strided, and go into rows with gaps."""
    group, groups = draw.randint(1, 19), draw.randint(1, 4)
    width, given = draw.randint(1, 150), draw.choice((0, draw.randint(1, 150)))
    parts = draw.randint(1, 3)
    rows = Rows(
        group * groups,
        group,
        draw.randint(0, group + 2),
        draw.randint(0, group - 1),
        0,
        parts * given + draw.randint(0, 5),
        parts * width + draw.choice((0, 3)),
        parts * width,
        width,
        given,
        draw.choice((0, -1)),
    )
    rows = rows._replace(x_group=rows.held * rows.x_row + draw.randint(0, 4))
    return _copied(draw, rows, dtype)


def _copied(draw: random.Random, rows: Rows, dtype: torch.dtype) -> Copied:
    of_x = (rows.rows // rows.group + 1) * rows.x_group + (rows.held + 1) * rows.x_row + 8
    of_y = rows.rows * rows.y_row + 1
    top = torch.iinfo(dtype).max
    x = torch.tensor([draw.randint(-top, top) for _ in range(of_x + 1)], dtype=dtype, device=DEVICE)[1:]
    return Copied(x, torch.full((of_y,), MARK, dtype=dtype, device=DEVICE), rows)


def by_loops(every: Sequence[Rows], like: torch.Tensor) -> Callable[[tuple[int, ...]], None]:
    """Stands for ``tuned.launching.copies.launches_of``: a function that copies CPU tensors by loops."""
    dtype = INTEGERS[like.element_size()]

    def at(address: int, elements: int) -> torch.Tensor:
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def fire(addresses: tuple[int, ...]) -> None:
        for rows, of_x, of_y in zip(every, addresses[::2], addresses[1::2], strict=True):
            groups, parts = rows.rows // rows.group, rows.columns // rows.width
            last = (groups - 1) * rows.x_group + min(rows.group - 1, rows.last) * rows.x_row + parts * rows.given
            y = at(of_y, (rows.rows - 1) * rows.y_row + rows.columns)
            y.copy_(expected(Copied(at(of_x, max(last, 1)), y, rows)))

    return fire


def assert_right(copies: Sequence[Copied]) -> None:
    """One launch of up to six copies gives what loops give, and writes nothing else."""
    wanted = [expected(one) for one in copies]
    run([copy_launch([(one.x, one.y, one.rows) for one in copies])])
    for one, want in zip(copies, wanted, strict=True):
        assert torch.equal(one.y, want), one.rows


def check(seed: int) -> None:
    """``assert_right`` of one to six random copies."""
    draw = random.Random(seed)
    dtype = draw.choice((torch.int16, torch.int32))
    assert_right([drawn(draw, dtype) for _ in range(draw.randint(1, 6))])
