"""What families that multiply inputs by weights share: dtypes, precisions, segments side by side, and limits of tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes
PRECISIONS = ("ieee", "tf32")  # of float32 products
MAX_SEGMENTS = 4  # inputs that the kernels take side by side
WAVE = 132  # programs that start together: the multiprocessors of an H200
VECTOR_ROWS = 8  # with more rows the tensor cores are faster, even if most of their rows are empty
VECTOR_REGISTERS = 168  # per thread for weights and sums, of 255
MAX_VECTOR_BLOCKS = 64  # blocks of K, which are unrolled


FAR = 4.0  # octaves: a row says nothing of calls that are further away
ALIGNED_BYTES = 16  # rows of weights or inputs that are no multiple of this are loaded an element at a time
SLIM_ROWS, SLIM_WIDTH = 2, 128  # with at most so many rows, or so wide, loads of single elements cost little
CALLED_PRODUCTS = (
    2**23
)  # rows times weights, up to which a kernel ends before the host is done with a call of PyTorch's operator
CALLED_ROWS = 4  # in float32, whose products do not use tensor cores: with more rows, deep ones take up to 220 us


def doubt(row: Any, spec: Any, size: Rows, octaves: float, *, few: bool = True) -> str | None:
    """Why a row's time does not say that a kernel is faster than PyTorch's operator at another shape, or None.

    This is for CUDA graphs, where only the device's time counts. Specs have ``dtype``, ``precision``, ``inputs`` and ``widths``.
    ``few``: whether the results are so few that loads of single elements may cost little.
    The rules are from 210 random shapes on an H200: docs/decisions/0050.
    """
    if _precision(row) != _precision(spec):
        return "products of another precision take another time"
    if octaves > FAR:
        return f"{octaves:.2g} octaves are far"
    if slow_loads(spec) and not slow_loads(row) and not (few and _slim(spec, size)):
        return f"rows that are no multiples of {ALIGNED_BYTES} bytes are loaded an element at a time"
    return None


def slow_loads(spec: Any) -> bool:
    """Whether rows of weights or inputs are no multiples of 16 bytes, and so are loaded an element at a time."""
    return any(width * ITEM_SIZE[spec.dtype] % ALIGNED_BYTES for width in spec.widths)


def _slim(spec: Any, size: Rows) -> bool:
    return size.batch <= SLIM_ROWS or max(spec.widths) <= SLIM_WIDTH


def as_called(family: Any, host_us: float, float32_rows: float = math.inf) -> Any:
    """The family for calls outside of CUDA graphs, where PyTorch's operator takes the host ``host_us`` at least.

    Small calls (CALLED_PRODUCTS) trust every row of their precision. ``float32_rows``: in float32, calls of more rows do not.
    """
    doubts = family.doubt

    def small(spec: Any, size: Rows, rows: float) -> bool:
        return size.batch * spec.weights <= CALLED_PRODUCTS and (ITEM_SIZE[spec.dtype] == 2 or size.batch <= rows)  # noqa: PLR2004

    def doubt_as_called(row: Any, spec: Any, size: Rows, octaves: float) -> str | None:
        if _precision(row) == _precision(spec) and small(spec, size, float32_rows):
            return None
        return doubts(row, spec, size, octaves)  # type: ignore[no-any-return]

    def least(spec: Any, size: Rows) -> float:
        return host_us if small(spec, size, CALLED_ROWS) else 0.0

    return dataclasses.replace(family, doubt=doubt_as_called, least_us=least)


def _precision(spec: Any) -> tuple[int, str]:
    return ITEM_SIZE[spec.dtype], spec.precision


@dataclasses.dataclass(frozen=True)
class Rows:
    """The size of a call, which a kernel takes at run time without being compiled again."""

    batch: int

    @property
    def tokens(self) -> int:
        """Rows of the call, which its time depends on."""
        return self.batch


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of an input, 2D tensors of last stride 1, which the kernels read side by side; None where there is none."""

    x0: Any  # [rows, widths[0]]
    x1: Any
    x2: Any
    x3: Any

    @property
    def segments(self) -> tuple[Any, ...]:
        """The segments that exist."""
        return tuple(x for x in (self.x0, self.x1, self.x2, self.x3) if x is not None)

    @classmethod
    def of(cls, segments: tuple[Any, ...], *tensors: Any) -> Self:
        """The call of 1 to 4 segments, and the other tensors in the order of the fields."""
        return cls(*segments, *(None,) * (MAX_SEGMENTS - len(segments)), *tensors)


def check_products(dtype: str, widths: tuple[int, ...], precision: str) -> None:
    """Check fields of GruCellSpec or LinearCatSpec: raise ValueError unless products over such inputs have kernels."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")
    if not 1 <= len(widths) <= MAX_SEGMENTS or min(widths) < 1:
        raise ValueError(f"inputs must be 1 to {MAX_SEGMENTS} widths of at least 1, got {widths}")
    allowed = PRECISIONS if dtype == "float32" else ("",)
    if precision not in allowed:
        raise ValueError(f"precision must be one of {allowed} for {dtype}, got {precision!r}")


def widths_of(inputs: tuple[int, ...]) -> dict[str, int]:
    """The widths of the segments as the kernels' constants; 0 for a segment that does not exist."""
    return {f"WIDTH{index}": width for index, width in enumerate((*inputs, *(0,) * (MAX_SEGMENTS - len(inputs))))}


def alignment(dtype: str, *tensors: Any) -> int:
    """The largest power of two, in elements and at most 16 bytes, that divides the row strides of all tensors."""
    return math.gcd(16 // ITEM_SIZE[dtype], *(t.stride(0) for t in tensors))


def lanes(spec: Any) -> int:
    """Elements along K that a warp of the vector form reads at once: 16 bytes per lane."""
    return 32 * 16 // ITEM_SIZE[spec.dtype]


def joined(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    """The segments concatenated in the last axis, for PyTorch's own operators; a single one as it is."""
    return segments[0] if len(segments) == 1 else torch.cat(tuple(segments), -1)
