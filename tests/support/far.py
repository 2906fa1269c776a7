"""Tensors whose elements lie gigabytes apart in address space; the pages between them are never touched.

The storage begins far before the first element, so that an offset that wraps around reads or writes zeros there instead of
ending the process.
"""

from __future__ import annotations

import mmap

import pytest
import torch

FAR = 2**30  # elements: from index 2 on, index * FAR does not fit into 32 bits
BEFORE = 3 * 2**31  # elements: three 32-bit products can lead this far before the first element
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python has the name from 3.13 on


def far(values: torch.Tensor, axis: int = 0, apart: int = FAR) -> torch.Tensor:
    """The values, in a storage where neighbours along ``axis`` are ``apart`` elements apart."""
    near = torch.empty(values.shape[:axis] + values.shape[axis + 1 :]).stride()
    strides = (*near[:axis], apart, *near[axis:])
    elements = BEFORE + sum((n - 1) * step for n, step in zip(values.shape, strides, strict=True)) + 1
    size = values.element_size() * elements
    try:
        space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError:
        pytest.skip(f"no {size} bytes of address space here")
    whole = torch.frombuffer(space, dtype=values.dtype, count=elements)
    return whole.as_strided(values.shape, strides, BEFORE).copy_(values)
