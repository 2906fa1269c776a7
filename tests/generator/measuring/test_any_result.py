"""Results of any shape and dtype, as families from outside may have, can be guarded, poisoned and compared with a copy."""

from __future__ import annotations

import pytest
import torch

from generator.measuring.check import guard, guarded, intact, poison
from generator.measuring.stage import is_copy_of

KINDS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_result_of_any_kind_is_guarded(dtype: torch.dtype) -> None:
    out = guarded((3, 5), dtype, "cpu")
    assert (out.shape, out.dtype) == ((3, 5), dtype)
    assert bool(intact(out))
    around = out.as_strided((out.numel() + 1,), (1,), out.storage_offset() - 1)
    around[:1] = around[1:2] if dtype.is_floating_point else torch.zeros(1, dtype=dtype) + poison(dtype)
    assert not bool(intact(out)), "one element before its start is another"
    guard(out)
    assert bool(intact(out))


@pytest.mark.parametrize(
    ("x", "out", "wanted"),
    [
        ((32, 64), (32, 64), True),
        ((32, 96), (32, 64), True),  # the output takes the first features of x
        ((1, 32, 64), (32, 64), False),
        ((32, 64), (64, 32), False),  # a transpose
        ((2, 32, 64), (32, 64), False),  # a gate
        ((32, 2, 64), (32, 64), False),  # a sum of pairs
        ((32, 32), (32, 64), False),
        ((), (), False),
    ],
)
def test_the_floor_is_a_copy_of_an_input_where_that_is_one(
    x: tuple[int, ...], out: tuple[int, ...], *, wanted: bool
) -> None:
    assert is_copy_of(torch.empty(out), torch.empty(x)) is wanted
    assert not is_copy_of(torch.empty(out), torch.empty(x, dtype=torch.bfloat16))
    assert not is_copy_of(torch.empty(out), torch.empty(x, dtype=torch.int64))
    assert not is_copy_of(torch.empty(out), None)
    if wanted:
        torch.empty(out).copy_(torch.empty(x)[..., : out[-1]])
