"""Which properties of arguments make Triton compile another kernel, compared with Triton's own code."""

from __future__ import annotations

import itertools

import pytest
import torch

from tuned.launching.plan import kind_of

native = pytest.importorskip("triton._C.libtriton").native_specialize_impl

MEMORY = torch.zeros(64)
VALUES = (
    *(0, 1, 2, 7, 15, 16, 17, 32, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**40),
    *(1.0, 16.0, 3.5),
    *(MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.half(), MEMORY.bfloat16(), MEMORY.int()[1:], MEMORY.long()),
)


@pytest.mark.parametrize("specialised", [True, False])
def test_arguments_are_of_one_kind_where_triton_compiles_one_kernel(*, specialised: bool) -> None:
    from triton.backends.nvidia.compiler import CUDABackend  # noqa: PLC0415

    def tritons(value: object) -> object:
        return native(CUDABackend, value, False, specialised or isinstance(value, torch.Tensor), True)

    for a, b in itertools.combinations(VALUES, 2):
        ours = kind_of(a, specialised) == kind_of(b, specialised)
        assert ours == (tritons(a) == tritons(b)), (a, b)
