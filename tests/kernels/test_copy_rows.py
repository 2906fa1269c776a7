"""The kernel that pads, cuts and fills, compared with loops over elements."""

from __future__ import annotations

import pytest
import torch

from tests.support.copies import Copied, assert_right, check
from tests.support.run import DEVICE, run
from tuned.families.copying import COLUMNS, MOST, ROWS, copy_launch, filled, padded

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("seed", range(12))
def test_any_copies_are_made_in_one_launch(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_padded_with_zeros(dtype: torch.dtype, parts: int) -> None:
    x = torch.randint(1, 100, (2, 3 * ROWS + 1, parts * 5), dtype=dtype, device=DEVICE).transpose(0, 1)
    y = torch.full((x.shape[0] * x.shape[1], parts * 8), 9, dtype=dtype, device=DEVICE)
    run([copy_launch([(x, y, padded(x.shape, x.stride(), 8, parts))])])
    assert torch.equal(y, torch.nn.functional.pad(x.reshape(-1, parts, 5), (0, 3)).view(y.shape))


@pytest.mark.parametrize("bits", [0, -1])
def test_what_is_filled_is_filled_to_its_end_and_no_further(bits: int) -> None:
    y = torch.full((2 * ROWS * (COLUMNS + 7) + 3,), 5, dtype=torch.int16, device=DEVICE)
    inside = filled(ROWS + 1, 7, bits)._replace(y_row=COLUMNS + 7)
    assert_right([Copied(y, y[COLUMNS:], inside), *[Copied(y, y.clone(), filled(1, 1, bits))] * (MOST - 1)])
    assert int((y != 5).sum()) == 7 * (ROWS + 1)


def test_as_many_programs_are_launched_as_there_are_tiles() -> None:
    y = torch.zeros(1, dtype=torch.int16)
    copies = [(y, y, filled(ROWS + 1, COLUMNS, 0)), (y, y, filled(1, COLUMNS + 1, 0)), (y, y, filled(0, 1, 0))]
    assert copy_launch(copies).programs == 2 + 2


def test_rows_gigabytes_apart_are_found() -> None:
    """The last of three rows lies 2^31 elements after the first, in memory that nothing else touches."""
    x = torch.arange(6, dtype=torch.int16, device=DEVICE).view(3, 2)
    y = torch.empty(2**32 + 2, dtype=torch.int16, device=DEVICE)[2**31 :]  # wrong offsets would lead in front of it
    run([copy_launch([(x, y, padded((1, 3, 2), (0, 2), 2)._replace(y_row=2**30))])])
    assert [y[at : at + 2].tolist() for at in (0, 2**30, 2**31)] == [[0, 1], [2, 3], [4, 5]]
