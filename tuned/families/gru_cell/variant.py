"""GruCellVariant: the ways to do one GRU step that tuning chooses among."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tuned.families import padded, products
from tuned.families.architecture import LEAST_SHARED, PDL_CAPABILITY, shared_limit
from tuned.families.choices import one_of
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.launch import ceil_div, next_power_of_2
from tuned.families.padded import multiplied
from tuned.families.products import (
    ITEM_SIZE,
    MAX_VECTOR_BLOCKS,
    SLIM_ROWS,
    VECTOR_REGISTERS,
    VECTOR_ROWS,
    WAVE,
    OuterTile,
    lanes,
    late_loads,
    mixed_loads,
    slow_loads,
)

# What a tile's size depends on; the other knobs are free at their defaults.
CORE_KNOBS = ("form", "block_batch", "block_hidden", "block_k", "k_parts", "num_stages", "num_warps", "schedule")
MAX_SUMS = 4096  # rows x units of each of the four accumulators, on architectures before Hopper
FEWEST, MOST = 96, 320  # programs of a tensor-core form, if another tile gives more or fewer
LARGE_TILE = 4096  # rows x units
MAX_LOPSIDED = 3.0  # a tile reads block_batch + 3 * block_hidden rows of K: with more of one, it reads too much
MIN_IN_FLIGHT = 64 * 1024  # bytes of loads in flight; with fewer, memory bandwidth was not saturated (H200)
MAX_IEEE = 2**15  # products per turn, which without tensor cores are written out one by one
# The capability from which warpgroups multiply, and the fewest columns with which they do.
WARPGROUPS, WARPGROUP_UNITS = 90, 16
AMD_COLUMNS = 16  # columns of a product of AMD's matrix cores
CACHED_BYTES = 2**25  # of weights that stay in the L2 from one row to the next: with 55 MB a step took twice as long
# Rows times the weights of a gate, from which on the device takes some 90 us, as slow hosts do for PyTorch's operator. The first is
# for float32's own precision, by the rows of the H100; the second for tensor cores, from their peak, which nobody measured.
DEVICE_PRODUCTS, FAST_PRODUCTS = 2**29, 2**33
# In float32's own precision: the lead that a row must have, for calls of more than SINGLE_LEAST of its products. With 1.05, 5 of 9
# random steps took up to 1.05 of PyTorch's time in a graph. With less than two thirds of the products, kernels led by 1.48 to 6.8.
SINGLE_LEAD, SINGLE_LEAST = 1.33, 2 / 3
TILES, TENSOR_CORES = ("tile", "padded"), ("split", "tile", "padded")  # forms
SINGLE_ROWS = 256  # with more, form "padded" takes the place of form "tile" if rows are not aligned
MAX_POINTERS = 2**14  # units x elements of a row in a turn, before Hopper
GATES_PER_THREAD = 8  # elements, eight float32 values each: two 16-byte loads of each tensor


@dataclasses.dataclass(frozen=True)
class GruCellVariant:
    """How a step is done, and the tile of one program.

    Text (chooses what Jinja writes): ``form``. Numbers (constexpr and launch options): the rest.
    """

    # "split": one kernel, tensor cores, K split over the warps; "tile": the same without a split; "padded": the same as
    # "tile", after a copy of inputs and weights with padded rows; "vector": one kernel without tensor cores; "outer": the
    # same, a thread's rows times its units; "library": two GEMMs of the library, and a kernel for the gates;
    # "padded_library": the same after such a copy.
    form: str = one_of("split", "tile", "padded", "vector", "outer", "library", "padded_library", default="split")
    block_batch: int = one_of(1, 2, 4, 8, 16, 32, 64, 128, default=16)
    block_hidden: int = one_of(2, 4, 8, 16, 32, 64, 128, 256, default=8)
    block_k: int = one_of(64, 128, 256, 512, 1024, 2048, default=256)
    k_parts: int = one_of(1, 2, 4, 8, default=4)  # parts of block_k, each for its own warps
    num_stages: int = one_of(2, 3, 4, 5, 6, 8, default=4)  # blocks of K in flight
    num_warps: int = one_of(2, 4, 8, default=4)
    # "two": a loop over x, then one over h; "one": a single loop over both; "joint": a block of each per turn.
    schedule: str = one_of("two", "one", "joint", default="two")
    stacked: bool = one_of(False, True, default=False)  # noqa: FBT003 - one product for the gates r and z
    # Which programs run together: those of neighbouring units, or of neighbouring rows.
    order: str = one_of("units", "batch", default="units")
    # Programmatic dependent launch (sm_90+): programs start while the previous kernel drains, and wait before they read.
    pdl: bool = one_of(False, True, default=False)  # noqa: FBT003

    @property
    def splits(self) -> bool:
        """K is split over the warps."""
        return self.form == "split"

    @property
    def pads(self) -> bool:
        """Inputs and weights are copied first, with padded rows."""
        return self.form in ("padded", "padded_library")

    @property
    def by_library(self) -> bool:
        """The library makes the products, and a kernel the gates."""
        return self.form in ("library", "padded_library")

    @property
    def state_columns(self) -> str:
        """In the text of a kernel, the columns of h and of weight_hh: with the padding, which is 0, if rows are padded."""
        return "-(-HIDDEN // ALIGN) * ALIGN" if self.pads else "HIDDEN"

    @property
    def summary(self) -> str:
        """One sentence for the header of the generated module."""
        how = {
            "split": "on tensor cores, K split over the warps",
            "tile": "on tensor cores, all of K in every warp",
            "padded": "on tensor cores, all of K in every warp, of rows that are padded to 16 bytes",
            "vector": "for a few rows, without tensor cores",
            "outer": "without tensor cores",
        }
        return f"one step of a GRU in one kernel, {how[self.form]}."

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: within the noise the smaller one wins, so that two runs agree."""
        return (
            ("vector", "outer", "split", "tile", "padded", "library", "padded_library").index(self.form),
            int(self.pdl),
            ("two", "joint", "one").index(self.schedule),
            int(self.stacked),
            ("units", "batch").index(self.order),
            self.num_warps,
            self.num_stages,
            self.block_batch * self.block_hidden,
            self.block_k,
        )


def blocks_of_k(spec: GruCellSpec, variant: GruCellVariant) -> tuple[int, int]:
    """(blocks of K over x, each segment padded to whole blocks; blocks of K over h)."""
    inputs = multiplied(spec, variant).inputs
    return sum(ceil_div(w, variant.block_k) for w in inputs), ceil_div(spec.hidden, variant.block_k)


def outer_tile(spec: GruCellSpec, variant: GruCellVariant) -> OuterTile:
    """What a warp of form "outer" computes: of a unit the sums of r, z, and of n over x and over h."""
    units = variant.block_hidden // variant.num_warps
    return OuterTile(spec.dtype, spec.widths, variant.block_batch, units, weights=3, sums=4)


def programs(spec: GruCellSpec, variant: GruCellVariant, batch: int) -> int:
    """Size of the grid."""
    return ceil_div(batch, variant.block_batch) * ceil_div(spec.hidden, variant.block_hidden)


def stage_bytes(spec: GruCellSpec, variant: GruCellVariant) -> int:
    """Bytes of the operands of one iteration of the loop over K."""
    rows = variant.block_batch + 3 * variant.block_hidden
    return rows * variant.block_k * ITEM_SIZE[spec.dtype] * (2 if variant.schedule == "joint" else 1)


def _in_registers(variant: GruCellVariant, capability: int) -> int:
    """Stages that are not in shared memory: the one being multiplied is not, if the tensor cores read it from registers."""
    return int(variant.form == "split" or capability < PDL_CAPABILITY)  # Hopper's read shared memory


def turns(spec: GruCellSpec, variant: GruCellVariant) -> int:
    """Iterations of the longest loop over K."""
    of_x, of_h = blocks_of_k(spec, variant)
    return of_x + of_h if variant.schedule == "one" else max(of_x, of_h)


def rejection(  # noqa: PLR0911 - one return per rule
    spec: GruCellSpec,
    size: GruCellSize | None,
    variant: GruCellVariant,
    capability: int = 90,
    multiprocessors: int | None = None,
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, if given) on a compute capability (90 is 9.0), or None.

    A rule excludes what is impossible, what duplicates a variant that stays, or a tile that leaves most of
    its lanes empty or was never near the best.
    """
    del multiprocessors  # programs of a step do not wait for each other
    own = {
        "library": _library_rejection,
        "padded_library": _padded_library_rejection,
        "vector": _vector_rejection,
        "outer": _outer_rejection,
        "padded": _padded_rejection,
    }
    rules = own.get(variant.form, _tensor_core_rejection)
    if reason := rules(spec, size, variant):
        return reason
    if spec.inplace and variant.form != "library":
        return "h may not be overwritten while other programs read it: in place, only form='library' is right"
    if variant.stacked and variant.block_hidden < WARPGROUP_UNITS and capability >= WARPGROUPS:
        return (
            f"stacked with {variant.block_hidden} units multiplies r and z by warpgroups and n by warps: Triton 3.6 and 3.7 keep one "
            "buffer of rows too few for both, and overwrite what a warpgroup still reads"
        )
    if variant.pdl and capability < PDL_CAPABILITY:
        return f"programmatic dependent launch needs compute capability 9.0, not {capability / 10}"
    if capability < PDL_CAPABILITY and (reason := _too_large(spec, variant)):
        return reason
    kept = variant.num_stages - _in_registers(variant, capability)
    needed, limit = kept * stage_bytes(spec, variant), shared_limit(capability)
    if variant.form in TENSOR_CORES and capability == 0 and variant.block_hidden < AMD_COLUMNS:
        return f"block_hidden={variant.block_hidden} is less than the {AMD_COLUMNS} columns of AMD's matrix cores"
    if variant.form in TENSOR_CORES and needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of this architecture: fewer stages are tried"
    return None


def _too_large(spec: GruCellSpec, variant: GruCellVariant) -> str | None:
    """Why a tile spills without warpgroups, or None."""
    if variant.pads and variant.schedule == "joint" and variant.block_batch * variant.block_hidden >= MAX_SUMS:
        return (
            f"a turn with two of {variant.block_batch} x {variant.block_hidden} takes more registers than a thread has"
        )
    if variant.splits and late_loads(spec) and variant.block_hidden * variant.block_k >= MAX_POINTERS:
        return f"pointers to {variant.block_hidden} x {variant.block_k} elements of each gate take more registers than a thread has"
    return None


def _unused(variant: GruCellVariant, *names: str) -> str | None:
    """A knob that the form does not have must be at its default: otherwise it duplicates a variant."""
    for name in names:
        if getattr(variant, name) != getattr(GruCellVariant, name):  # the class has each field's default
            return f"form={variant.form!r} has no {name}: only its default is tried"
    return None


def _empty_rows(size: GruCellSize | None, variant: GruCellVariant, least: int) -> str | None:
    if size is not None and variant.block_batch >= 2 * max(size.batch, least):
        return f"block_batch={variant.block_batch} would leave more than half of its rows empty with a batch of {size.batch}"
    return None


def _library_rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant) -> str | None:
    elements = variant.block_batch * variant.block_hidden
    if reason := _unused(variant, "block_k", "k_parts", "num_stages", "schedule", "stacked", "order", "pdl"):
        return reason
    if not 64 <= variant.block_hidden < 2 * next_power_of_2(max(spec.hidden, 64)) or variant.block_batch > 8:  # noqa: PLR2004
        return f"a tile of {variant.block_batch} x {variant.block_hidden} is not tried for the gates of {spec.hidden} units"
    if elements > GATES_PER_THREAD * 32 * variant.num_warps:
        return f"{elements} elements on {variant.num_warps} warps are more than {GATES_PER_THREAD} per thread; larger tiles are not tried"
    if elements < 32 * variant.num_warps:
        return f"{elements} elements on {variant.num_warps} warps are fewer than 1 per thread; fewer warps are tried"
    return _empty_rows(size, variant, 1)


def _vector_rejection(  # noqa: PLR0911 - one return per rule
    spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant
) -> str | None:
    if reason := _unused(variant, "k_parts", "num_stages", "schedule", "stacked", "order"):
        return reason
    if variant.block_batch > VECTOR_ROWS or (size is not None and size.batch > VECTOR_ROWS):
        return f"form='vector' is for at most {VECTOR_ROWS} rows: with more the tensor cores are faster"
    if reason := _empty_rows(size, variant, 1):
        return reason
    if size is not None and size.batch > SLIM_ROWS and mixed_loads(spec):
        return "threads of form='vector' exchange what wider loads than the others bring: those of form='outer' do not"
    if not variant.num_warps <= variant.block_hidden <= 2 * variant.num_warps:
        return f"{variant.block_hidden} units on {variant.num_warps} warps: one or two per warp are tried"
    steps = variant.block_k // lanes(spec)
    if steps < 1 or variant.block_k >= 2 * next_power_of_2(max(lanes(spec), spec.hidden, *spec.inputs)):
        return f"block_k={variant.block_k} would leave more than half of its lanes empty with widths {spec.inputs}, {spec.hidden}"
    if sum(blocks_of_k(spec, variant)) > MAX_VECTOR_BLOCKS:
        return f"{sum(blocks_of_k(spec, variant))} blocks of K are written out, at most {MAX_VECTOR_BLOCKS}: larger ones are tried"
    units = variant.block_hidden // variant.num_warps
    sums = 4 * variant.block_batch * (16 // ITEM_SIZE[spec.dtype])
    registers = units * (3 * 4 * steps + sums + variant.block_batch * 4 * steps)
    if registers > VECTOR_REGISTERS:
        return f"{registers} registers per thread for weights and sums are more than {VECTOR_REGISTERS}"
    return None


def _outer_rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant) -> str | None:
    if reason := _unused(variant, "block_k", "k_parts", "num_stages", "schedule", "stacked", "order"):
        return reason
    if not variant.num_warps <= variant.block_hidden <= 2 * variant.num_warps:
        return f"{variant.block_hidden} units on {variant.num_warps} warps: one or two per warp are tried"
    return outer_tile(spec, variant).rejection(spec, size, ceil_div(spec.hidden, variant.block_hidden))


def _padded_rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant) -> str | None:
    return _no_padding(spec, size) or _tensor_core_rejection(multiplied(spec, variant), size, variant)


def _padded_library_rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant) -> str | None:
    return _no_padding(spec, size) or _library_rejection(spec, size, variant)


def _no_padding(spec: GruCellSpec, size: GruCellSize | None) -> str | None:
    sides = [(widths, 3 * spec.hidden) for widths in (spec.inputs, (spec.hidden,))]
    return padded.rejection(ITEM_SIZE[spec.dtype], sides, None if size is None else size.batch)


def _tensor_core_rejection(  # noqa: PLR0911, PLR0912 - one return per rule
    spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant
) -> str | None:
    rows, units = variant.block_batch, variant.block_hidden
    if rows < 16 or not 8 <= units <= 64:  # noqa: PLR2004 - what the tensor cores' smallest products have
        return f"a tile of {rows} rows and {units} units is not tried on tensor cores: 16 rows at least, 8 to 64 units"
    if reason := _empty_rows(size, variant, 16):
        return reason
    if variant.form == "tile" and late_loads(spec) and size is not None and size.batch > SINGLE_ROWS:
        return f"form='padded' copies once what form='tile' would load an element at a time for every {rows} of {size.batch} rows"
    if size is not None and size.batch <= SLIM_ROWS and slow_loads(spec):
        return (
            f"{size.batch} rows that are loaded an element at a time took tensor cores twice as long as form='vector'"
        )
    if units >= 2 * next_power_of_2(max(spec.hidden, 8)):
        return f"block_hidden={units} would leave more than half of its columns empty with {spec.hidden}"
    if max(rows, 3 * units) > MAX_LOPSIDED * min(rows, 3 * units):
        return f"a tile of {rows} rows and 3 x {units} weights reads more than a squarer one"
    bytes_of_k = variant.block_k // variant.k_parts * ITEM_SIZE[spec.dtype]
    if bytes_of_k not in (128, 256):
        return f"{bytes_of_k} bytes of a row for each part of K: 128 and 256 are tried"
    if variant.block_k > next_power_of_2(max(64, spec.hidden, *spec.inputs)):
        return f"block_k={variant.block_k} is longer than any row of {spec.inputs}, {spec.hidden}"
    if variant.form == "split":
        if rows > 64 or variant.k_parts == 1 or variant.num_warps not in (variant.k_parts, 2 * variant.k_parts):  # noqa: PLR2004
            return "form='split' takes at most 64 rows, 2 parts at least, and 1 or 2 warps per part"
        if variant.num_warps != variant.k_parts and rows * units < 1024:  # noqa: PLR2004
            return f"2 warps for each part of a tile of {rows} x {units} would do the same products"
        if reason := _unused(variant, "stacked", "order"):
            return reason
    elif variant.k_parts != 1 or rows < 64 or variant.num_warps != rows // 16:  # noqa: PLR2004
        return (
            f"form={variant.form!r} takes 64 or 128 rows, 4 warps for each 64, which share an instruction, and no parts"
        )
    if spec.precision == "ieee" and rows * units * variant.block_k > MAX_IEEE:
        return f"a tile of {rows} x {units} x {variant.block_k} is too much without tensor cores, which IEEE products have not"
    blocks = turns(spec, variant)
    if rows > 16 and variant.num_stages in (5, 8):  # noqa: PLR2004
        return f"{variant.num_stages} stages are tried with 16 rows only: more have larger ones"
    if variant.num_stages > max(2, blocks):
        return f"{variant.num_stages} stages for {blocks} turns: no more than that can be in flight"
    in_flight = variant.num_stages * stage_bytes(spec, variant)
    if in_flight < MIN_IN_FLIGHT and variant.num_stages < min(blocks, 6) and size is not None:
        return f"{in_flight} bytes in flight do not keep the memory busy: more stages are tried"
    return _grid_rejection(spec, size, variant)


def _grid_rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant) -> str | None:
    if size is None:
        return None
    count = programs(spec, variant, size.batch)
    if count < FEWEST and variant.block_hidden > 16:  # noqa: PLR2004 - the smallest that every GPU has
        return f"{count} programs are fewer than {FEWEST}: smaller tiles are tried"
    if count > MOST and variant.block_hidden * variant.block_batch < LARGE_TILE:
        return f"{count} programs are more than {MOST}: larger tiles are tried"
    if variant.order == "batch" and count <= WAVE:
        return f"{count} programs all run at once: their order changes nothing"
    return None


def default_variant(spec: GruCellSpec, size: GruCellSize | None = None) -> GruCellVariant:
    """A legal, decent variant for any spec and size, on any architecture that it is ``fit`` to."""
    rows = next_power_of_2(16 if size is None else size.batch)
    row = 512 // ITEM_SIZE[spec.dtype]  # elements of 512 bytes
    short = min(row, next_power_of_2(max(64, spec.hidden, *spec.inputs)))
    # Triton 3.6 spills 32 to 2,000 bytes for tiles of 16 units with 16 or 32 rows; for all but the smallest tile if rows start
    # at any element, so that each has a pointer; and for products without tensor cores. It also gives the steps of a longer
    # block of the vector form to different warps. The library serves what remains.
    vector = GruCellVariant("vector", min(rows, 2), 4, row)
    smallest = (
        GruCellVariant("split", 16, 8, 2 * row, k_parts=8, num_stages=2, num_warps=8),
        *(GruCellVariant("split", 16, 8, row, num_stages=stages) for stages in (4, 3, 2)),
        GruCellVariant("split", 16, 8, short, k_parts=short * 4 // row, num_stages=2, num_warps=short * 4 // row),
    )
    larger = (
        *(GruCellVariant("tile", 64, 32, row // 4, k_parts=1, num_stages=stages) for stages in (4, 3, 2)),
        *(GruCellVariant("tile", 128, 32, row // 4, k_parts=1, num_stages=n, num_warps=8) for n in (3, 2)),
        *(GruCellVariant("split", 32, 8, row, num_stages=stages) for stages in (3, 2)),
        *smallest,
        *(GruCellVariant("tile", 64, 16, row // 4, k_parts=1, num_stages=stages) for stages in (4, 3, 2)),
    )
    aligned = all(width * ITEM_SIZE[spec.dtype] % 16 == 0 for width in (*spec.inputs, spec.hidden))
    products = () if spec.precision == "ieee" else larger if aligned else smallest
    tried = (vector, *products)
    for variant in tried:
        fits = all(
            rejection(spec, size, fit(variant, spec, capability), capability) is None for capability in LEAST_SHARED
        )
        if fits and (rows <= 2 or variant.form != "vector"):  # noqa: PLR2004
            return variant
    return gates_variant(spec.hidden)


def spends(spec: GruCellSpec, size: GruCellSize, variant: GruCellVariant) -> str | None:
    """Why a call takes the host longer with a variant than with PyTorch's operator, which launches as much; or None.

    None in place, where PyTorch's operator launches one copy more, and for so many products that the device takes longer than the
    host.
    """
    own = DEVICE_PRODUCTS if spec.precision == "ieee" else FAST_PRODUCTS
    own = (
        DEVICE_PRODUCTS if variant.pads else own
    )  # PyTorch's own takes the device so long, or longer, where rows are not aligned
    if not variant.by_library or spec.inplace or size.batch * spec.weights > own:
        return None
    return "two products of the library and a kernel for the gates take the host longer than PyTorch's own"


def gates_variant(hidden: int) -> GruCellVariant:
    """Form "library" with a decent tile for the gates kernel: one row, two elements per thread."""
    block = min(256, next_power_of_2(max(hidden, 64)))
    return GruCellVariant(form="library", block_batch=1, block_hidden=block, num_warps=max(2, block // 64))


def distance(a: GruCellSpec, b: GruCellSpec) -> float:
    """The distance between two specs, in octaves.

    Octaves of the hidden size, the input size and the bytes per element count 1 each; in place counts 4; another number of
    segments, bias or precision half; which of the 16-bit types a tenth.
    """
    octaves = abs(math.log2(a.hidden / b.hidden)) + abs(math.log2(a.input_size / b.input_size))
    octaves += abs(math.log2(ITEM_SIZE[a.dtype] / ITEM_SIZE[b.dtype])) + 4 * (a.inplace != b.inplace)
    halves = (len(a.inputs) != len(b.inputs)) + (a.bias != b.bias) + (a.precision != b.precision)
    return octaves + 0.5 * halves + 0.1 * (a.dtype != b.dtype)


def doubt(row: GruCellSpec, spec: GruCellSpec, size: GruCellSize, octaves: float) -> str | None:
    """Why a row's time does not say that a kernel is faster than PyTorch's operator at another shape, or None."""
    if spec.inplace:  # in place the library multiplies, as PyTorch does
        return None
    weights = 3 * spec.weights * ITEM_SIZE[spec.dtype]
    if spec.precision == "ieee" and size.batch > SLIM_ROWS and weights > CACHED_BYTES:
        return f"{weights} bytes of weights do not stay in the L2, and without tensor cores each row reads them again"
    return products.doubt(row, spec, size, octaves)


def lead(row: Any, spec: GruCellSpec, size: GruCellSize) -> float | None:
    """The lead over PyTorch's operator that a row must have for each octave to another shape; None: the usual lead.

    Without tensor cores a kernel's time grows with its products, while the time of the library's tiles grows in steps.
    """
    as_many = size.batch * spec.weights > SINGLE_LEAST * row.size.batch * row.spec.weights
    if products.fewer_rows(row, spec, size):
        return math.inf
    return SINGLE_LEAD if spec.precision == "ieee" and size.batch > VECTOR_ROWS and as_many else None


def grows(row: Any, spec: Any, size: GruCellSize) -> float:
    """How many times as long as at a row its kernel takes at a call, at least."""
    return products.grows(row, spec, size, work)


def work(spec: GruCellSpec, batch: int, variant: GruCellVariant) -> float:
    """The work of a multiprocessor, on a scale of a form's own: waves of programs, times the blocks of K of one."""
    turns = sum(blocks_of_k(spec, variant))
    if variant.form == "outer":
        turns = outer_tile(spec, variant).turns(spec)
    return products.waves(programs(spec, variant, batch), variant) * turns


def adapt(variant: GruCellVariant, _spec: GruCellSpec, _to: GruCellSpec) -> GruCellVariant:
    """A variant that was tuned for one spec, for another: unchanged, since its tile is in rows and units."""
    return variant


def fit(variant: GruCellVariant, spec: GruCellSpec, capability: int) -> GruCellVariant:
    """The variant for another architecture: without what only newer ones have, or what Triton compiles for Hopper alone."""
    if capability == 0 and variant.form in TENSOR_CORES and variant.block_hidden < AMD_COLUMNS:
        # The same bytes in flight, in iterations of twice the bytes.
        variant = dataclasses.replace(variant, block_hidden=AMD_COLUMNS, num_stages=max(2, variant.num_stages // 2))
    if capability < PDL_CAPABILITY:
        variant = dataclasses.replace(variant, pdl=False)
        if variant.form in TILES:  # without warpgroups all accumulators are in a warp's registers: larger tiles spill
            units = min(variant.block_hidden, max(8, MAX_SUMS // variant.block_batch))
            variant = dataclasses.replace(variant, block_hidden=units)
        if _too_large(spec, variant) is not None:
            variant = dataclasses.replace(variant, **({"schedule": "one"} if variant.pads else {"block_hidden": 8}))
    if variant.form in TILES and capability > PDL_CAPABILITY:
        # Blackwell's tensor memory: Triton 3.7 cannot compile accumulators that a loop sets aside, and takes more shared memory.
        joint, variant = variant.schedule == "joint", dataclasses.replace(variant, schedule="two")
        if joint and variant.num_stages * stage_bytes(spec, variant) < MIN_IN_FLIGHT:
            # A turn now loads a block of x or of h, not of both.
            variant = dataclasses.replace(variant, num_stages=min(2 * variant.num_stages, 6))
        if variant.num_stages > (
            most := max(2, turns(spec, variant))
        ):  # two loops are shorter than the one that they replace
            variant = dataclasses.replace(variant, num_stages=min(most, 4))
    if variant.form not in TENSOR_CORES:
        return variant
    limit, kept = shared_limit(capability), 2 - _in_registers(variant, capability)
    if kept * stage_bytes(spec, variant) > limit and variant.schedule == "joint":
        variant = dataclasses.replace(variant, schedule="two")
    while kept * stage_bytes(spec, variant) > limit and variant.block_k * ITEM_SIZE[spec.dtype] > 128 * variant.k_parts:
        variant = dataclasses.replace(variant, block_k=variant.block_k // 2)
    stages = max(2, limit // stage_bytes(spec, variant) + _in_registers(variant, capability))
    return dataclasses.replace(variant, num_stages=min(stages, variant.num_stages))
