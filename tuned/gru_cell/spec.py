"""GruCellSpec: what a caller of one GRU step asks for, and nothing that tuning may change."""

from __future__ import annotations

import dataclasses

DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes


@dataclasses.dataclass(frozen=True)
class GruCellSpec:
    """The gates of one GRU step, whatever the batch; the two GEMMs before them are the library's."""

    dtype: str
    hidden: int
    bias: bool = True
    inplace: bool = False  # h is overwritten: safe, since both GEMMs have read it before the gates start

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")

    @property
    def summary(self) -> str:
        """One sentence for the head of the generated module."""
        place = "over h, in place" if self.inplace else "out of place"
        return f"the gates of a GRU cell {'with' if self.bias else 'without'} bias, {place}."

    def bytes_per_row(self) -> int:
        """Bytes that must be read and written for one row of the batch: six gate rows, h and h'."""
        return 8 * self.hidden * ITEM_SIZE[self.dtype]


@dataclasses.dataclass(frozen=True)
class GruCellSize:
    """How much of it: what a kernel serves at run time without being compiled again."""

    batch: int

    @property
    def tokens(self) -> int:
        """Rows of the call."""
        return self.batch
