"""What families that multiply inputs by weights share: dtypes, precisions, segments side by side, and limits of tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tuned.families.launch import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

DTYPES = ("float32", "float16", "bfloat16")
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes
PRECISIONS = ("ieee", "tf32")  # of float32 products
MAX_SEGMENTS = 4  # inputs that the kernels take side by side
WARP = 32  # threads, which lie along K in the forms without tensor cores
WAVE = 132  # programs that start together: the multiprocessors of an H200
VECTOR_ROWS = 8  # with more rows the tensor cores are faster, even if most of their rows are empty
VECTOR_REGISTERS = 168  # per thread for weights and sums, of 255
MAX_VECTOR_BLOCKS = 64  # blocks of K, which are unrolled
OUTER_REGISTERS = 128  # per thread for a block and the sums, of 255: the loads of the blocks after it are in flight
OUTER_ROWS = 64  # with more rows the tensor cores are faster, even if rows are loaded an element at a time
OUTER_PROGRAMS = 64 * WAVE  # where there are no tensor cores


FAR = 4.0  # octaves: a row says nothing of calls that are further away
ALIGNED_BYTES = 16  # rows of weights or inputs that are no multiple of this are loaded an element at a time
SLIM_ROWS, SLIM_WIDTH = 2, 128  # with at most so many rows, or so wide, loads of single elements cost little
TOGETHER = {"outer": 16, "vector": 8}  # warps of a multiprocessor that run side by side, by the times of 138 such calls
# Of a row's, by bytes an element: with fewer PyTorch's operator takes so much less that a kernel's lead there says nothing.
FEWER_ROWS = {2: 0.55, 4: 0.4}
CALLED_PRODUCTS = (
    2**23
)  # rows times weights, up to which a kernel ends before the host is done with a call of PyTorch's operator
# The same for tensor cores: rows of form "padded" take 8.9 us at most below it, and 12.1 at 2^26.1. More is asked of the rows than of small calls.
CALLED_FAST = 2**26
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
    if slow_loads(row) and not slow_loads(spec):
        return f"PyTorch's operator takes less where rows are multiples of {ALIGNED_BYTES} bytes"
    return None


def slow_loads(spec: Any) -> bool:
    """Whether rows of weights or inputs are no multiples of 16 bytes, and so are loaded an element at a time."""
    return _aligned(spec) * ITEM_SIZE[spec.dtype] < ALIGNED_BYTES


def late_loads(spec: Any) -> bool:
    """Whether tensor cores wait for loads: those of 16-bit rows that are not aligned, which cannot be asynchronous."""
    return ITEM_SIZE[spec.dtype] == 2 and slow_loads(spec)  # noqa: PLR2004


def mixed_loads(spec: Any) -> bool:
    """Whether rows are loaded an element at a time, but those of which Triton sees that 16 elements divide them are not."""
    return slow_loads(spec) and any(width % 16 == 0 for width in spec.widths)


def _aligned(spec: Any) -> int:
    """The largest power of two, in elements and at most 16 bytes, that divides all rows of weights and inputs."""
    return math.gcd(ALIGNED_BYTES // ITEM_SIZE[spec.dtype], *spec.widths)


def _joined(spec: Any) -> int:
    """The largest power of two that divides rows and results of PyTorch's longest product, in elements and at most 16 bytes."""
    return math.gcd(ALIGNED_BYTES // ITEM_SIZE[spec.dtype], *max(spec.products))


def _slim(spec: Any, size: Rows) -> bool:
    return size.batch <= SLIM_ROWS or max(spec.widths) <= SLIM_WIDTH


def fewer_rows(row: Any, spec: Any, size: Rows) -> bool:
    """Whether an unaligned row, or one of form "outer", has many more rows than a call: PyTorch's operator takes less there."""
    least = FEWER_ROWS[ITEM_SIZE[spec.dtype]] * row.size.batch
    return (slow_loads(row.spec) or single_elements(row)) and size.batch < least


def single_elements(row: Any) -> bool:
    """Whether a row's kernel loads or multiplies an element at a time, so that its time grows with its work."""
    return row.variant.form == "outer" or (slow_loads(row.spec) and not row.variant.pads)


def grows(row: Any, spec: Any, size: Rows, work: Callable[[Any, int, Any], float]) -> float:
    """How many times its time at a row of ``single_elements`` a kernel takes at a call, while PyTorch's operator takes as long.

    ``work`` is that of a multiprocessor: such a row's lead says nothing of more. In 16 bits PyTorch's operator takes down to half as
    long where rows and results of its longest product, of inputs side by side, are multiples of 4 bytes.
    """
    wider = ITEM_SIZE[spec.dtype] == 2 and slow_loads(row.spec) and _joined(spec) > _joined(row.spec)  # noqa: PLR2004
    more = work(spec, size.batch, row.variant) / work(row.spec, row.size.batch, row.variant)
    return (max(1.0, more) if single_elements(row) else 1.0) * (2.0 if wider else 1.0)


def waves(programs: int, variant: Any) -> float:
    """How often all multiprocessors are filled by programs of a variant; one of tensor cores is taken to fill a multiprocessor."""
    together = TOGETHER.get(variant.form)
    return (
        math.ceil(programs / WAVE) if together is None else max(1.0, programs * variant.num_warps / (WAVE * together))
    )


def as_called(family: Any, host_us: float, float32_rows: float = math.inf) -> Any:
    """The family for calls outside of CUDA graphs, where PyTorch's operator takes the host ``host_us`` at least.

    Small calls (CALLED_PRODUCTS) trust every row of their precision, up to CALLED_FAST 16-bit ones those without a ``doubt``. ``float32_rows``: in float32, calls of more rows do not.
    """
    doubts = family.doubt

    def small(spec: Any, size: Rows, rows: float) -> bool:
        return size.batch * spec.weights <= CALLED_PRODUCTS and (ITEM_SIZE[spec.dtype] == 2 or size.batch <= rows)  # noqa: PLR2004

    def doubt_as_called(row: Any, spec: Any, size: Rows, octaves: float) -> str | None:
        if _precision(row) == _precision(spec) and small(spec, size, float32_rows):
            return None
        return doubts(row, spec, size, octaves)  # type: ignore[no-any-return]

    def least(spec: Any, size: Rows) -> float:
        most = CALLED_FAST if ITEM_SIZE[spec.dtype] == 2 else CALLED_PRODUCTS  # noqa: PLR2004
        return host_us if size.batch * spec.weights <= most else 0.0

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


class OuterTile(NamedTuple):
    """What a warp of form "outer" computes: ``rows`` times ``columns`` of ``sums``, from ``weights`` rows of weights for each column."""

    dtype: str
    widths: tuple[int, ...]  # of the inputs that are multiplied, each padded to whole blocks of K
    rows: int
    columns: int
    weights: int
    sums: int

    def blocks(self, elements: int) -> int:
        """Blocks of K, if a lane reads so many elements of a row at a time."""
        return sum(ceil_div(width, WARP * elements) for width in self.widths)

    def registers(self, elements: int) -> int:
        """Registers per thread for a block and the sums."""
        return elements * (self.columns * (self.weights + self.sums * self.rows) + self.rows)

    def elements(self, align: int) -> int:
        """Elements of a row that a lane reads at a time, if ``align`` divides rows: at most 16 bytes, and no more than registers allow."""
        elements = min(align, ALIGNED_BYTES // ITEM_SIZE[self.dtype])
        while elements > 1 and self.registers(elements) > OUTER_REGISTERS:
            elements //= 2
        return elements

    def turns(self, spec: Any) -> int:
        """Elements of a row that a thread multiplies, one after another."""
        elements = self.elements(_aligned(spec))
        return self.blocks(elements) * elements

    def constants(self, spec: Any, align: int) -> dict[str, int]:
        """BLOCK_K and ALIGN of a call whose strides ``align`` divides."""
        elements = self.elements(min(align, _aligned(spec)))
        return {"BLOCK_K": WARP * elements, "ALIGN": elements}

    def rejection(self, spec: Any, size: Rows | None, columns: int) -> str | None:
        """Why form "outer" is not tried, with so many tiles of columns, or None."""
        elements = self.elements(_aligned(spec))
        if self.registers(elements) > OUTER_REGISTERS:
            return f"{self.registers(elements)} registers per thread for a block and the sums are more than {OUTER_REGISTERS}"
        if self.blocks(elements) > MAX_VECTOR_BLOCKS:
            return f"{self.blocks(elements)} blocks of K follow each other, at most {MAX_VECTOR_BLOCKS} are tried"
        if elements * ITEM_SIZE[self.dtype] < min(4, _aligned(spec) * ITEM_SIZE[self.dtype]):
            return "so many sums leave a lane 2 bytes of a row at a time: smaller tiles are tried"
        return None if size is None else self._rows_rejection(spec, size.batch, columns)

    def _rows_rejection(  # noqa: PLR0911 - one return per rule
        self, spec: Any, rows: int, columns: int
    ) -> str | None:
        if rows == 1 and not slow_loads(spec):
            return "form='outer' takes several rows: for one, form='vector' does the same"
        if rows > VECTOR_ROWS and spec.precision != "ieee" and not slow_loads(spec):
            return f"form='outer' is for at most {VECTOR_ROWS} rows, where tensor cores and wide loads are to be had"
        if self.rows >= 2 * rows:
            return f"a tile of {self.rows} rows would leave more than half of them empty with {rows}"
        if rows > VECTOR_ROWS and 4 * self.rows <= VECTOR_ROWS:
            return f"tiles of {self.rows} rows read the weights too often for {rows} rows: larger ones are tried"
        if spec.precision != "ieee" and rows > OUTER_ROWS:
            return f"form='outer' is for at most {OUTER_ROWS} rows: with more the tensor cores are faster"
        programs = ceil_div(rows, self.rows) * columns
        if programs > OUTER_PROGRAMS:
            return f"{programs} programs are more than {OUTER_PROGRAMS}: larger tiles are tried"
        return None


def joined(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    """The segments concatenated in the last axis, for PyTorch's own operators; a single one as it is."""
    return segments[0] if len(segments) == 1 else torch.cat(tuple(segments), -1)
