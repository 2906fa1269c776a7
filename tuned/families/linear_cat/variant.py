"""LinearCatVariant: the ways to do a linear over segments that tuning chooses among."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from tuned.families import padded, products
from tuned.families.architecture import LEAST_SHARED, PDL_CAPABILITY, shared_limit
from tuned.families.choices import one_of
from tuned.families.launch import ceil_div, next_power_of_2
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.padded import multiplied
from tuned.families.products import (
    ITEM_SIZE,
    MAX_VECTOR_BLOCKS,
    SLIM_ROWS,
    VECTOR_REGISTERS,
    VECTOR_ROWS,
    WARP,
    WAVE,
    OuterTile,
    lanes,
    late_loads,
    mixed_loads,
)

# What a tile's size depends on; the other knobs are free at their defaults.
CORE_KNOBS = ("form", "block_rows", "block_columns", "block_k", "num_stages", "num_warps")
FEWEST, MOST = 64, 1024  # programs of form "tile", if another tile gives more or fewer
# Results that are summed an element at a time, up to which a kernel takes less than PyTorch's operator. Of 92 such random calls
# on H200s that kernels served in graphs, the three with more took 1.00 to 1.29 of its time, the others 0.86 at most.
MOST_RESULTS = 10_500
# Up to VECTOR_ROWS rows: a row of so many octaves fewer rows says nothing of a call that reads so many bytes of weights, once for
# each row. 7 rows of 1,000 features to 5,430 took 13.6 us by the winner of one row, which has one a program, and PyTorch's operators 11.4.
OTHER_ROWS, READ_BYTES = 2.0, 32e6
TILES = "tile", "padded"  # forms
MOST_BLACKWELL = 8192  # rows x columns of form "padded"
MAX_POINTERS = 128  # of a thread, to elements that are loaded one by one
MOST_STAGES = 4  # of form "padded"
SINGLE_RESULTS = 2**17  # with more, form "padded" takes the place of form "tile" if rows are not aligned
MIN_IN_FLIGHT = 48 * 1024  # bytes of a program's loads; with fewer the memory is not kept busy


@dataclasses.dataclass(frozen=True)
class LinearCatVariant:
    """How it is done, and the tile of one program.

    Text (chooses what Jinja writes): ``form``. Numbers (constexpr and launch options): the rest.
    """

    # "tile": tensor cores; "padded": the same, after a copy of inputs and weight with padded rows; "vector": without tensor
    # cores, for a few rows; "outer": without, a thread's rows times its columns.
    form: str = one_of("tile", "padded", "vector", "outer", default="tile")
    block_rows: int = one_of(1, 2, 4, 8, 16, 32, 64, 128, default=16)
    block_columns: int = one_of(4, 8, 16, 32, 64, 128, default=32)
    block_k: int = one_of(32, 64, 128, 256, 512, 1024, default=128)
    num_stages: int = one_of(2, 3, 4, 5, 6, default=3)
    num_warps: int = one_of(2, 4, 8, default=4)
    # Which programs run together: those of neighbouring columns, or of neighbouring rows.
    order: str = one_of("columns", "rows", default="columns")
    # Programmatic dependent launch (sm_90+): programs start while the previous kernel drains, and wait before they read.
    pdl: bool = one_of(False, True, default=False)  # noqa: FBT003 - the choices of a flag

    @property
    def is_vector(self) -> bool:
        """Whether the variant multiplies without tensor cores."""
        return self.form == "vector"

    @property
    def pads(self) -> bool:
        """Inputs and weight are copied first, with padded rows."""
        return self.form == "padded"

    @property
    def is_outer(self) -> bool:
        """Whether a thread multiplies each of its rows by each of its columns, without tensor cores."""
        return self.form == "outer"

    @property
    def summary(self) -> str:
        """One sentence for the header of the generated module."""
        how = {
            "tile": "on tensor cores",
            "padded": "on tensor cores",  # the kernel of form "tile"
            "vector": "for a few rows, without tensor cores",
            "outer": "without tensor cores",
        }
        return f"a linear layer over several inputs, {how[self.form]}."

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: within the noise the smaller one wins, so that two runs agree."""
        return (
            ("vector", "outer", "tile", "padded").index(self.form),
            int(self.pdl),
            ("columns", "rows").index(self.order),
            self.num_warps,
            self.num_stages,
            self.block_rows * self.block_columns,
            self.block_k,
        )


def programs(spec: LinearCatSpec, variant: LinearCatVariant, rows: int) -> int:
    """Size of the grid."""
    return ceil_div(rows, variant.block_rows) * ceil_div(spec.outputs, variant.block_columns)


def stage_bytes(spec: LinearCatSpec, variant: LinearCatVariant) -> int:
    """Bytes of the operands of one turn of the loop over K."""
    return (variant.block_rows + variant.block_columns) * variant.block_k * ITEM_SIZE[spec.dtype]


def outer_tile(spec: LinearCatSpec, variant: LinearCatVariant) -> OuterTile:
    """What a warp of form "outer" computes."""
    columns = variant.block_columns // variant.num_warps
    return OuterTile(spec.dtype, spec.inputs, variant.block_rows, columns, weights=1, sums=1)


def blocks_of_k(spec: LinearCatSpec, variant: LinearCatVariant) -> int:
    """Blocks of K, each segment padded to whole ones."""
    return sum(ceil_div(width, variant.block_k) for width in multiplied(spec, variant).inputs)


def rejection(
    spec: LinearCatSpec,
    size: LinearCatSize | None,
    variant: LinearCatVariant,
    capability: int = 90,
    multiprocessors: int | None = None,
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, if given) on a compute capability (90 is 9.0), or None.

    A rule excludes what is impossible, what duplicates a variant that stays, or a tile that leaves most of
    its lanes empty or keeps too little in flight.
    """
    del multiprocessors  # programs do not wait for each other
    rules = {
        "tile": _tile_rejection,
        "padded": _padded_rejection,
        "vector": _vector_rejection,
        "outer": _outer_rejection,
    }
    if reason := rules[variant.form](spec, size, variant):
        return reason
    if variant.block_columns >= 2 * next_power_of_2(max(spec.outputs, 16)):
        return (
            f"block_columns={variant.block_columns} would leave more than half of its columns empty with {spec.outputs}"
        )
    if variant.pdl and capability < PDL_CAPABILITY:
        return f"programmatic dependent launch needs compute capability 9.0, not {capability / 10}"
    if capability != PDL_CAPABILITY and (reason := _too_large(spec, variant, capability)):
        return reason
    needed, limit = variant.num_stages * stage_bytes(spec, variant), shared_limit(capability)
    if variant.form in TILES and needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of this architecture: fewer stages are tried"
    return None


def _vector_rejection(  # noqa: PLR0911 - one return per rule
    spec: LinearCatSpec, size: LinearCatSize | None, variant: LinearCatVariant
) -> str | None:
    default = LinearCatVariant()
    if (variant.num_stages, variant.order) != (default.num_stages, default.order):
        return "form='vector' has no num_stages and no order: only their defaults are tried"
    if variant.block_rows > VECTOR_ROWS or (size is not None and size.batch > VECTOR_ROWS):
        return f"form='vector' is for at most {VECTOR_ROWS} rows: with more the tensor cores are faster"
    if size is not None and variant.block_rows >= 2 * size.batch:
        return f"block_rows={variant.block_rows} would leave more than half of its rows empty with {size.batch}"
    if size is not None and size.batch > SLIM_ROWS and mixed_loads(spec):
        return "threads of form='vector' exchange what wider loads than the others bring: those of form='outer' do not"
    columns = variant.block_columns // variant.num_warps
    if not 1 <= columns <= 4:  # noqa: PLR2004
        return f"{variant.block_columns} columns on {variant.num_warps} warps: one to four per warp are tried"
    steps = variant.block_k // lanes(spec)
    if steps < 1 or variant.block_k >= 2 * next_power_of_2(max(lanes(spec), *spec.inputs)):
        return f"block_k={variant.block_k} would leave more than half of its lanes empty with widths {spec.inputs}"
    if blocks_of_k(spec, variant) > MAX_VECTOR_BLOCKS:
        return f"{blocks_of_k(spec, variant)} blocks of K are written out, at most {MAX_VECTOR_BLOCKS}: larger ones are tried"
    per_lane = 16 // ITEM_SIZE[spec.dtype]
    registers = columns * (4 * steps + variant.block_rows * per_lane) + variant.block_rows * 4 * steps
    if registers > VECTOR_REGISTERS:
        return f"{registers} registers per thread for weights and sums are more than {VECTOR_REGISTERS}"
    return None


def _outer_rejection(spec: LinearCatSpec, size: LinearCatSize | None, variant: LinearCatVariant) -> str | None:
    default = LinearCatVariant()
    if (variant.block_k, variant.num_stages, variant.order) != (default.block_k, default.num_stages, default.order):
        return "form='outer' has no block_k, no num_stages and no order: only their defaults are tried"
    if not 1 <= variant.block_columns // variant.num_warps <= 4:  # noqa: PLR2004
        return f"{variant.block_columns} columns on {variant.num_warps} warps: one to four per warp are tried"
    return outer_tile(spec, variant).rejection(spec, size, ceil_div(spec.outputs, variant.block_columns))


def _no_padding(spec: LinearCatSpec, rows: int | None) -> str | None:
    return padded.rejection(ITEM_SIZE[spec.dtype], [(spec.inputs, spec.outputs)], rows)


def _padded_rejection(spec: LinearCatSpec, size: LinearCatSize | None, variant: LinearCatVariant) -> str | None:
    rows = None if size is None else size.batch
    if reason := _no_padding(spec, rows):
        return reason
    if variant.num_stages > MOST_STAGES:
        return f"{variant.num_stages} stages are not tried with form='padded': its operands come from the L2"
    return _tile_rejection(multiplied(spec, variant), size, variant)


def _tile_rejection(  # noqa: PLR0911, PLR0912 - one return per rule
    spec: LinearCatSpec, size: LinearCatSize | None, variant: LinearCatVariant
) -> str | None:
    rows, columns = variant.block_rows, variant.block_columns
    if rows < 16 or columns < 16:  # noqa: PLR2004 - what the tensor cores' smallest products have
        return f"a tile of {rows} x {columns} is not tried on tensor cores: 16 x 16 at least"
    if size is not None and rows >= 2 * max(size.batch, 16):
        return f"block_rows={rows} would leave more than half of its rows empty with {size.batch}"
    if size is not None and rows < 64 and size.batch >= 2 * rows:  # noqa: PLR2004
        return f"block_rows={rows} reads the weight several times for {size.batch} rows: larger tiles are tried"
    single = variant.form == "tile" and late_loads(spec)
    if (
        single
        and size is not None
        and size.batch * spec.outputs > SINGLE_RESULTS
        and _no_padding(spec, size.batch) is None
    ):
        return f"form='padded' copies once what form='tile' would load an element at a time for {size.batch * spec.outputs} results"
    row_bytes = variant.block_k * ITEM_SIZE[spec.dtype]
    # Rows that are loaded an element at a time are late: more of K at once, and more warps that load, make up for some of it.
    most_bytes, least = (1024, 32) if single else (256, 128)
    if not 128 <= row_bytes <= most_bytes:  # noqa: PLR2004
        return f"{row_bytes} bytes of a row for each turn: 128 to {most_bytes} are tried"
    if rows * columns > 4096 * variant.num_warps // 2 or rows * columns < least * variant.num_warps:
        return f"a tile of {rows} x {columns} is too large or too small for {variant.num_warps} warps"
    if spec.precision == "ieee" and rows * columns * variant.block_k > 2**17:
        return f"a tile of {rows} x {columns} x {variant.block_k} is too much without tensor cores, which IEEE products have not"
    blocks = blocks_of_k(spec, variant)
    if variant.num_stages > max(2, blocks):
        return f"{variant.num_stages} stages for {blocks} turns: no more than that can be in flight"
    if size is None:
        return None
    count = programs(spec, variant, size.batch)
    in_flight = variant.num_stages * stage_bytes(spec, variant)
    if in_flight < MIN_IN_FLIGHT and variant.num_stages < min(blocks, 6) and count < 4 * WAVE:
        return f"{in_flight} bytes in flight do not keep the memory busy: more stages are tried"
    if count < FEWEST and columns > 16:  # noqa: PLR2004 - the smallest
        return f"{count} programs are fewer than {FEWEST}: smaller tiles are tried"
    if count > MOST and columns < min(128, next_power_of_2(spec.outputs)) and spec.precision != "ieee":
        return f"{count} programs are more than {MOST}: larger tiles are tried"
    if variant.order == "rows" and (count <= WAVE or size.batch <= rows):
        return f"{count} programs that all run at once, or of one tile of rows: their order changes nothing"
    return None


def default_variant(spec: LinearCatSpec, size: LinearCatSize | None = None) -> LinearCatVariant:
    """A legal, decent variant for any spec and size, on any architecture."""
    rows = 16 if size is None else next_power_of_2(max(size.batch, 1))
    k = 128 // ITEM_SIZE[spec.dtype]
    tried = (
        LinearCatVariant(
            "vector", min(rows, 4), 4, 4 * k
        ),  # of 8 columns a long K spills, and was slower in 5 of 6 rows
        *((LinearCatVariant("outer", 8, 8),) if spec.precision == "ieee" else ()),
        *(
            LinearCatVariant(form, min(max(rows, 16), 64), columns, k, stages, warps)
            for form, columns, stages, warps in itertools.product(TILES, (128, 64, 32, 16), (4, 5, 6, 3, 2), (4, 2))
        ),
    )
    for variant in tried:
        fits = all(rejection(spec, size, variant, capability) is None for capability in LEAST_SHARED)
        if fits and (rows <= 4 or not variant.is_vector):  # noqa: PLR2004
            return variant
    raise ValueError(f"no default serves {spec} with {size}")  # never: the rules leave one for each call, as tests show


def distance(a: LinearCatSpec, b: LinearCatSpec) -> float:
    """The distance between two specs, in octaves.

    Octaves of the input size and of the outputs count 1 each, as do bytes per element; another number of segments, bias
    or precision half; which of the 16-bit types a tenth.
    """
    octaves = abs(math.log2(a.outputs / b.outputs)) + abs(math.log2(a.input_size / b.input_size))
    octaves += abs(math.log2(ITEM_SIZE[a.dtype] / ITEM_SIZE[b.dtype]))
    halves = (len(a.inputs) != len(b.inputs)) + (a.bias != b.bias) + (a.precision != b.precision)
    return octaves + 0.5 * halves + 0.1 * (a.dtype != b.dtype)


def doubt(row: LinearCatSpec, spec: LinearCatSpec, size: LinearCatSize, octaves: float) -> str | None:
    """Why a row's time does not say that a kernel is faster than PyTorch's operator at another shape, or None."""
    if not _replaceable(spec):
        return None
    rows_apart, read = octaves - distance(row, spec), size.batch * spec.weights * ITEM_SIZE[spec.dtype]
    if size.batch <= VECTOR_ROWS and rows_apart > OTHER_ROWS and read > READ_BYTES:
        return f"{rows_apart:.2g} octaves of rows are far where all weights may be read for each row"
    return products.doubt(row, spec, size, octaves, few=size.batch * spec.outputs <= MOST_RESULTS)


def _replaceable(spec: LinearCatSpec) -> bool:
    """Not one segment: it is a GRU's projection, in a precision that PyTorch's operator cannot be asked for."""
    return len(spec.inputs) > 1


def lead(row: Any, spec: LinearCatSpec, size: LinearCatSize) -> float | None:
    """The lead over PyTorch's operator that a row must have for each octave to another shape; None: the usual lead."""
    return math.inf if _replaceable(spec) and products.fewer_rows(row, spec, size) else None


def grows(row: Any, spec: LinearCatSpec, size: LinearCatSize) -> float:
    """How many times as long as at a row its kernel takes at a call, at least."""
    return products.grows(row, spec, size, work) if _replaceable(spec) else 1.0


def work(spec: LinearCatSpec, rows: int, variant: LinearCatVariant) -> float:
    """The work of a multiprocessor, on a scale of a form's own: waves of programs, times the blocks of K of one."""
    turns = outer_tile(spec, variant).turns(spec) if variant.is_outer else blocks_of_k(spec, variant)
    return products.waves(programs(spec, variant, rows), variant) * turns


def adapt(variant: LinearCatVariant, _spec: LinearCatSpec, _to: LinearCatSpec) -> LinearCatVariant:
    """A variant that was tuned for one spec, for another: unchanged."""
    return variant


def _too_large(spec: LinearCatSpec, variant: LinearCatVariant, capability: int) -> str | None:
    """Why a tile spills on architectures other than Hopper, or None."""
    results = variant.block_rows * variant.block_columns
    elements = (variant.block_rows + variant.block_columns) * variant.block_k // (WARP * variant.num_warps)
    if variant.form == "tile" and late_loads(spec) and elements > MAX_POINTERS:
        return f"pointers to {elements} elements take more registers than a thread has: more warps are tried"
    if variant.pads and capability > PDL_CAPABILITY and results > MOST_BLACKWELL:
        return f"{results} results are more than {MOST_BLACKWELL}: smaller tiles are tried"
    if variant.pads and capability > PDL_CAPABILITY and variant.num_warps > 4 and results <= MOST_BLACKWELL // 2:  # noqa: PLR2004
        return f"{results} results on {variant.num_warps} warps: fewer warps are tried"
    return None


def _with_registers(variant: LinearCatVariant, spec: LinearCatSpec, capability: int) -> LinearCatVariant:
    """The variant for an architecture other than Hopper, without what is ``_too_large`` there."""
    if _too_large(spec, variant, capability) is None:
        return variant
    if not variant.pads:
        return dataclasses.replace(variant, num_warps=8)
    if variant.block_rows * variant.block_columns > MOST_BLACKWELL:
        return dataclasses.replace(variant, block_columns=MOST_BLACKWELL // variant.block_rows)
    return dataclasses.replace(variant, num_warps=4)


def fit(variant: LinearCatVariant, spec: LinearCatSpec, capability: int) -> LinearCatVariant:
    """The variant for another architecture: without what only newer ones have, and with no more stages than fit."""
    if variant.form in TILES:
        while (
            2 * stage_bytes(spec, variant) > shared_limit(capability) and variant.block_k > 128 // ITEM_SIZE[spec.dtype]
        ):
            variant = dataclasses.replace(variant, block_k=variant.block_k // 2)
        stages = max(2, shared_limit(capability) // stage_bytes(spec, variant))
        variant = dataclasses.replace(variant, num_stages=min(stages, variant.num_stages))
    if capability != PDL_CAPABILITY:
        variant = _with_registers(variant, spec, capability)
    return variant if capability >= PDL_CAPABILITY else dataclasses.replace(variant, pdl=False)
