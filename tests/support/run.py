"""Run launches of the kernels as the templates render them now, and record every address that they touch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton

from generator.rendering.structures import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tuned.families.launch import Launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def run(launches: Iterable[Launch]) -> None:
    """Run every launch in order through Triton's public call; the interpreter ignores the compile options."""
    # Infinities and NaN are inputs like any other; NumPy, which the interpreter computes with, would warn of them.
    with np.errstate(invalid="ignore", over="ignore"):
        for launch in launches:
            load(launch.kernel)[(launch.programs,)](*launch.arguments, **launch.constants, **launch.options)


@contextlib.contextmanager
def triton_calls_itself(version: str) -> Iterator[None]:
    """Inside the block, kernels that look at Triton's version when they are imported see this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "__version__", version)
        load.cache_clear()
        try:
            yield
        finally:
            load.cache_clear()


def truncates(dtype: str) -> bool:
    """Whether a store of float32 to ``dtype`` drops the bits that do not fit, instead of rounding to nearest.

    Triton's interpreter does so for bfloat16 (``cast_impl`` calls ``_convert_float`` without a rounding mode); for
    float16 it takes NumPy's conversion, and a GPU rounds both to nearest even.
    """
    return INTERPRETED and dtype == "bfloat16"


def addresses(tensor: Any) -> np.ndarray:
    """The address of each element of a tensor, in its shape, whatever its strides."""
    size = tensor.element_size()
    offsets = np.zeros((), dtype=np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(length) * stride
    return offsets * size + tensor.data_ptr()


def among(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which of ``values`` are known addresses: as numpy.isin, which also removes duplicates and takes ten times as long."""
    if not len(known):
        return np.zeros(values.shape, dtype=bool)
    known = np.sort(known)
    return known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values


@dataclasses.dataclass
class Traffic:
    """Every element that programs loaded and stored, as rows of address, program and order."""

    loads: list[np.ndarray] = dataclasses.field(default_factory=list)
    stores: list[np.ndarray] = dataclasses.field(default_factory=list)
    clock: int = 0

    def note(self, kind: list[np.ndarray], pointers: np.ndarray, mask: np.ndarray, program: int) -> None:
        """Add what one load or store of a program touches."""
        self.clock += 1
        touched = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)].astype(np.int64).ravel()
        rows = np.empty((len(touched), 3), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = touched, program, self.clock
        kind.append(rows)

    def loaded(self) -> np.ndarray:
        """[loads, 3]: address, program, order."""
        return np.concatenate([np.empty((0, 3), dtype=np.int64), *self.loads])

    def stored(self) -> np.ndarray:
        """[stores, 3]: address, program, order."""
        return np.concatenate([np.empty((0, 3), dtype=np.int64), *self.stores])


@contextlib.contextmanager
def watched() -> Iterator[Traffic]:
    """Record the addresses that kernels touch inside. It shows races, which the interpreter hides: it runs programs in turn."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only where kernels are interpreted

    builder, traffic = interpreter.interpreter_builder, Traffic()
    load_as_is, store_as_is = builder.create_masked_load, builder.create_masked_store

    def masked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.note(traffic.loads, pointers.data, mask.data, builder.grid_idx[0])
        return load_as_is(pointers, mask, *rest)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.note(traffic.stores, pointers.data, mask.data, builder.grid_idx[0])
        return store_as_is(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store  # the methods of the class show again


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A float64 copy; every value of the 16-bit types is exact in it."""
    return tensor.detach().to("cpu", torch.float64).numpy().copy()
