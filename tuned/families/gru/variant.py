"""GruVariant: the ways to run the recurrence that tuning chooses among, with their costs."""

from __future__ import annotations

import dataclasses
import itertools

from tuned.families.architecture import LEAST_SHARED, shared_limit
from tuned.families.choices import choices, one_of
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.launch import ceil_div, next_power_of_2

CORE_KNOBS = ("strategy", "form", "block_hidden", "block_batch", "num_warps", "turns")
PTX_EXCHANGES = ("spin", "probe")
SPIN_CAPABILITY = {2: 90, 4: 70}  # item size in bytes -> capability: max.u16x2 needs sm_90, ld.relaxed sm_70
MAX_PIECES = 3  # pieces of the columns: WIDTH_0 to WIDTH_2
MIN_LOAD, MAX_LOAD = 4, 16  # bytes that a thread's PTX loads at a time
SMALLEST = 8  # units, and rows, of a tile
TILE_ROWS = 32  # a tile with fewer rows is one product of 16 rows, which every warp would compute
STEPS_UNITS = 16  # most units of a tile with strategy "steps"
FEWEST = 8  # no variant that used an eighth of the multiprocessors or less came near the best
TILE_BATCHES, TILE_WARPS = (8, 16, 32, 64, 128), (2, 4, 8)  # of forms "split" and "tile"
# Form "row": the units that a program has lanes for -> its warps, such that a thread holds at most 192 weights; and -> the programs
# that a multiprocessor has registers for.
ROW_WARPS = {32: 1, 64: 2, 128: 8}
ROW_RESIDENT = {32: 12, 64: 4, 128: 1}
ROW_ROUNDS = (
    2  # times that all multiprocessors may be filled: with more rows tiles are faster, since they read weights once
)
# Form "staged": the units, rows and warps of its tiles; the most columns and bytes of a piece; the units up to which form "split" is no
# slower.
STAGED_UNITS, STAGED_BATCHES, STAGED_WARPS = 16, (8, 16, 32, 64), 8
STAGE_COLUMNS, STAGE_BYTES, FEWEST_STAGED = 1024, 32 * 1024, 1024
# The most bytes of weights that such a program keeps in shared memory. If it reads the other weights at each step, through registers,
# a piece has at most READ_COLUMNS columns and READ_ELEMENTS elements of the state.
KEPT_BYTES, READ_COLUMNS, READ_ELEMENTS = 192 * 1024, 256, 4096
STAGED_ALIGNED = 16  # rows must be a multiple of so many bytes
WARPGROUP = 4  # warps that multiply together on Hopper
# From so many bytes of weights on, two warps read them for up to three times as long as more warps do: none of 196 variants came within
# an eighth of the best. For a stack of 540 units in float32 two warps took 11.6 us a step, where PyTorch's operator takes 8.7.
TWO_WARPS_BYTES = 64 * 1024
# A last tile has few rows if they are less than one in FEW_ROWS. If there are full tiles too, leaving out the tile's other rows takes
# less from MANY_READS reads of a row on: docs/decisions/0077.
FEW_ROWS, MANY_READS = 4, 384
MIN_PART = 16  # columns of a warp: the depth of a 16-bit tensor-core product
MAX_STATE_PER_THREAD = 128  # elements of the rows of h that a thread holds while it waits, 16 bits each
SMALL_GPU = 64  # multiprocessors


@dataclasses.dataclass(frozen=True)
class GruVariant:
    """Which kernels run a sequence, and the tile of one program.

    Text (chooses what Jinja writes): strategy, form. Numbers (constexpr and launch options): the rest.
    """

    # "persistent": all steps in one launch, weights on chip. "steps": the same kernel, launched for each step, which
    # reads them again. "library": for each step a library GEMM and a kernel for the gates.
    strategy: str = one_of("persistent", "steps", "library", default="library")
    # "split": units times rows, each warp multiplying its part of the columns: few rows. "tile": rows times units.
    # "row": one row a program, all units and their weights in registers, multiplied without tensor cores.
    # "staged": as "split", with a piece of the state at a time in shared memory, one direction after the other: many units. Weights
    # that do not fit there beside the piece are read at each step.
    form: str = one_of("split", "tile", "row", "staged", default="split")
    # Units per program: it reads, and keeps, 3 * block_hidden rows of weight_hh.
    block_hidden: int = one_of(8, 16, 32, 64, 128, default=16)
    # Rows of the batch per program: it reads their whole state at each step.
    block_batch: int = one_of(1, *TILE_BATCHES, default=16)
    # How a program learns that the others have written: see the template. In order of simplicity.
    exchange: str = one_of("counter", "poll", "spin", "probe", default="counter")
    # When x's part of the next step's gates is loaded: "early", before waiting for the state, or "late", after it.
    prefetch: str = one_of("early", "late", default="early")
    num_warps: int = one_of(1, *TILE_WARPS, default=4)
    # Tiles of rows that a program takes in turn at each step: as few as let all programs fit, see ``_turns_rejection``.
    turns: int = one_of(1, 2, 3, 4, 6, 8, default=1, older=True)

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: within the noise the smaller one wins, so that two runs agree."""
        return (
            ("library", "steps", "persistent").index(self.strategy),
            ("counter", "poll", "spin", "probe").index(self.exchange),
            ("early", "late").index(self.prefetch),
            self.turns,
            self.num_warps,
            self.block_hidden * self.block_batch,
            self.block_hidden,
        )

    @property
    def in_turn(self) -> bool:
        """A program takes several tiles of rows in turn; in a template."""
        return self.turns > 1

    @property
    def splits_columns(self) -> bool:
        """Each warp multiplies its own part of the columns."""
        return self.form in ("split", "staged")

    @property
    def staged(self) -> bool:
        """The state is in shared memory piece by piece, and a program has one direction after the other."""
        return self.form == "staged"

    @property
    def by_row(self) -> bool:
        """A program has one row, and its weights in registers."""
        return self.form == "row"

    @property
    def unit_axes(self) -> str:
        """The index that lays a vector of units along the units of a tile of results; in a template."""
        return ":, None" if self.splits_columns else "None, :"

    @property
    def row_axes(self) -> str:
        """As unit_axes, for a vector of rows."""
        return "None, :" if self.splits_columns else ":, None"

    @property
    def sums_shape(self) -> str:
        """The shape of the tile in which products are summed; in a template."""
        return "(SPLITS, BLOCK_HIDDEN, BLOCK_BATCH)" if self.splits_columns else "(BLOCK_BATCH, BLOCK_HIDDEN)"

    @property
    def splits(self) -> int:
        """The number of parts of the columns, each for one warp."""
        return self.num_warps if self.splits_columns else 1


def pieces(hidden: int, splits: int) -> tuple[int, int, int]:
    """The columns as up to three widths, powers of two of at least MIN_PART per split; 0 for an unused width.

    600 on 4 splits is 512 + 64 + 64, not 1024: padding costs shared memory and multiplications by 0.
    """
    least = MIN_PART * splits
    widths: list[int] = []
    left = hidden
    while left > 0:
        last = len(widths) == MAX_PIECES - 1
        width = next_power_of_2(left) if last or left <= least else 1 << (left.bit_length() - 1)
        widths.append(max(width, least))
        left -= widths[-1]
    if sum(widths) >= next_power_of_2(max(hidden, least)):
        widths = [next_power_of_2(max(hidden, least))]
    first, second, third = (*widths, 0, 0)[:MAX_PIECES]
    return first, second, third


def widths(spec: GruSpec, variant: GruVariant) -> tuple[int, ...]:
    """The columns as widths of the pieces that a program multiplies one after the other."""
    if variant.staged:
        width = stage_width(spec, variant)
        before = (spec.hidden - 1) // width
        last = max(next_power_of_2(spec.hidden - before * width), MIN_PART * variant.splits)
        return (*(width,) * before, last)
    return tuple(width for width in pieces(spec.hidden, variant.splits) if width)


def stage_width(spec: GruSpec, variant: GruVariant) -> int:
    """Columns of a piece of form "staged"."""
    most = min(STAGE_COLUMNS, STAGE_BYTES // (variant.block_batch * spec.item))
    if spec.hidden * _column_bytes(spec, variant) > KEPT_BYTES:
        most = min(most, READ_COLUMNS, READ_ELEMENTS // variant.block_batch)
    return most


def _column_bytes(spec: GruSpec, variant: GruVariant) -> int:
    """Bytes of a column of a program's weights."""
    return 3 * variant.block_hidden * spec.item


def kept(spec: GruSpec, variant: GruVariant) -> int:
    """How many of the pieces, from the first on, have weights that a program of form "staged" keeps in shared memory."""
    each = widths(spec, variant)
    if sum(each) * _column_bytes(spec, variant) <= KEPT_BYTES:
        return len(each)
    return min(len(each), KEPT_BYTES // (each[0] * _column_bytes(spec, variant)))


def programs(spec: GruSpec, size: GruSize, variant: GruVariant) -> int:
    """Programs of one launch: ``sets_of`` for each tile of units, layer and direction.

    A program of form "staged" takes both directions.
    """
    cells = spec.layers * (1 if variant.staged else spec.directions)
    return ceil_div(spec.hidden, variant.block_hidden) * sets_of(size, variant) * cells


def sets_of(size: GruSize, variant: GruVariant) -> int:
    """Programs that share out the tiles of rows, for each tile of units, layer and direction."""
    return ceil_div(ceil_div(size.batch, variant.block_batch), variant.turns)


def past(spec: GruSpec, batch: int, variant: GruVariant) -> str:
    """What the rows of a tile past the end of the batch are: PAST in the template.

    If they repeat other rows, the few rows of a last tile are read many times, by as many programs as there are tiles of units, and
    all wait for the programs that write them. So a step of 65 rows of 1056 units in tiles of 64 took twice as long as one that reads
    each row once. Leaving loads out needs registers, and makes full tiles a little slower.
    """
    last = batch % variant.block_batch
    if 0 < FEW_ROWS * last < variant.block_batch:
        reads = ceil_div(spec.hidden, variant.block_hidden) * variant.block_batch / last  # of a row, at each step
        if batch < variant.block_batch or reads >= MANY_READS:
            return "unread"
    return repeated(batch, variant)


def repeated(batch: int, variant: GruVariant) -> str:
    """``past`` where all rows of a tile are read."""
    return "last" if variant.in_turn or not batch % variant.block_batch else "others"


def alone(spec: GruSpec, variant: GruVariant) -> bool:
    """Whether one program has all units of its rows, and so waits for no other: ALONE in the template."""
    if variant.by_row:
        return True
    only = widths(spec, variant)
    return not variant.staged and not spec.stacked and only == (variant.block_hidden,)


def steps_are_alike(spec: GruSpec) -> bool:
    """Whether strategy "library" launches one compiled kernel at all steps: the rows of all tokens have the same alignment."""
    return spec.hidden * spec.item % MAX_LOAD == 0


def weight_bytes(spec: GruSpec, variant: GruVariant) -> int:
    """Bytes of the weights of a program's units; in a stack also of their weights for the layer below."""
    return 3 * variant.block_hidden * sum(widths(spec, variant)) * spec.item * (2 if spec.stacked else 1)


def shared_bytes(spec: GruSpec, variant: GruVariant) -> int:
    """Bytes of shared memory per program: weights, the rows of h, and accumulators that change layout."""
    columns = stage_width(spec, variant) if variant.staged else sum(widths(spec, variant))
    weights = weight_bytes(spec, variant)
    tile = variant.block_hidden * variant.block_batch
    state = variant.block_batch * columns * spec.item
    if variant.staged and (held := kept(spec, variant)) < len(widths(spec, variant)):
        weights = held * columns * _column_bytes(spec, variant)
        state = max(state, columns * variant.block_hidden * spec.item)  # one gate of a piece that is read at each step
    return weights + (state + tile * spec.item if variant.form == "tile" else max(state, 4 * variant.splits * tile))


def rejection(  # noqa: PLR0911 - one return per rule
    spec: GruSpec,
    size: GruSize | None,
    variant: GruVariant,
    capability: int = 90,
    multiprocessors: int | None = None,
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, on so many multiprocessors, if given), or None.

    A rule excludes what is impossible, what would hang, what duplicates a variant that stays, or a tile
    that leaves most of its lanes empty.
    """
    if variant.strategy == "library":
        return _library_rejection(spec, variant)
    if variant.by_row:
        return _row_rejection(spec, size, variant, multiprocessors)
    if (reason := products_rejection(variant)) is not None:
        return reason
    if variant.strategy == "steps" and spec.stacked:
        return "strategy='steps' takes one layer: the layers of a stack wait for each other in one launch"
    if variant.strategy == "steps" and not (
        variant.splits_columns and variant.block_hidden <= STEPS_UNITS and variant.num_warps == GruVariant.num_warps
    ):
        return f"strategy='steps' reads its weights at each step, whatever the tile: only up to {STEPS_UNITS} units are tried"
    if (reason := _tile_rejection(spec, variant, capability)) is not None:
        return reason
    waits = variant.strategy == "persistent" and not alone(spec, variant)
    if variant.in_turn and (spec.stacked or not waits):
        return f"turns={variant.turns} are for one layer whose programs wait for each other"
    if variant.in_turn and (variant.exchange == "probe" or variant.prefetch == "late"):
        return "turns: other tiles are computed while one is waited for, so how it is waited for matters little"
    if variant.in_turn and variant.form == "tile":
        return "form='tile' in turns needs more registers than there are, or has few rows, where form='split' is faster"
    if not waits and (variant.exchange, variant.prefetch) != (GruVariant.exchange, GruVariant.prefetch):
        return "a program that has all units of its rows waits for nothing"
    if waits and (reason := exchange_rejection(spec, variant, capability, widths(spec, variant))) is not None:
        return reason
    if size is None:
        return None
    held = None if variant.strategy == "steps" else multiprocessors  # a launch a step may have any number of programs
    return size_rejection(spec, size, variant, held, waits=not alone(spec, variant))


def _library_rejection(spec: GruSpec, variant: GruVariant) -> str | None:
    if spec.layout != "dense" or spec.stacked:
        return "strategy='library' takes one layer of sequences of one length"
    if spec.resets:
        return "strategy='library' has no resets"
    if spec.dtype == "float32" and spec.precision == "ieee":
        return "strategy='library' follows the setting of GEMMs, which may allow TF32"
    rest = dataclasses.replace(variant, strategy=GruVariant.strategy)
    return None if rest == GruVariant() else "strategy='library' has no other knobs"


def row_variant(hidden: int) -> GruVariant | None:
    """The variant of form "row": for each size one is fast, that with as few warps as hold the weights. None if none do."""
    units = max(min(ROW_WARPS), next_power_of_2(hidden))
    return GruVariant("persistent", "row", units, 1, num_warps=ROW_WARPS[units]) if units in ROW_WARPS else None


def products_rejection(variant: GruVariant) -> str | None:
    """Why tensor cores do not multiply tiles of a variant, or None."""
    if variant.block_batch not in TILE_BATCHES or variant.num_warps not in TILE_WARPS:
        return f"block_batch={variant.block_batch} with num_warps={variant.num_warps} is for form='row': tensor cores multiply {SMALLEST} rows at least"
    return None


def _row_rejection(  # noqa: PLR0911 - one return per rule
    spec: GruSpec, size: GruSize | None, variant: GruVariant, multiprocessors: int | None
) -> str | None:
    only = row_variant(spec.hidden)
    if only is None:
        return f"form='row' holds the weights of up to {max(ROW_WARPS)} units in registers, not of {spec.hidden}"
    if spec.stacked:
        return "form='row' takes one layer: its programs wait for nothing, and layers for each other"
    if spec.resets and not spec.dense:
        return "form='row' has resets for sequences of one length alone: of others there are few"
    units = only.block_hidden
    if variant != only:
        return f"form='row' of {spec.hidden} units has strategy='persistent', block_hidden={units}, block_batch=1, num_warps={only.num_warps} and no other knobs"
    if size is None or multiprocessors is None:
        return None
    count, room = programs(spec, size, variant), ROW_ROUNDS * ROW_RESIDENT[units] * multiprocessors
    if count > room:
        return f"{count} rows are more than {room}, {ROW_ROUNDS} times what {multiprocessors} multiprocessors hold: tiles read weights once for several"
    return None


def sees_stores(capability: int) -> bool:
    """Whether a volatile load sees what another multiprocessor stored: on NVIDIA. On AMD (capability 0) Triton makes it a plain load."""
    return capability > 0


def exchange_rejection(spec: GruSpec, variant: GruVariant, capability: int, of_pieces: tuple[int, ...]) -> str | None:
    """Why a variant's programs cannot wait in its way for messages in pieces of such widths, or None."""
    if variant.exchange != GruVariant.exchange and not sees_stores(capability):
        return f"exchange={variant.exchange!r} looks at messages again and again, and an AMD GPU may show a look what it saw before: docs/decisions/0085"
    threads, narrowest = 32 * variant.num_warps, min(width for width in of_pieces if width)
    each = variant.block_batch * narrowest * spec.item // threads
    spins = capability >= SPIN_CAPABILITY[spec.item] and each >= MIN_LOAD and spec.hidden * spec.item % MAX_LOAD == 0
    if variant.exchange == "poll" and spins:
        return "exchange='poll' stops all warps at each look: it never came before 'spin' where that can be"
    if variant.exchange in PTX_EXCHANGES:
        if capability < SPIN_CAPABILITY[spec.item]:
            return f"exchange={variant.exchange!r} with {spec.dtype} needs compute capability {SPIN_CAPABILITY[spec.item] / 10}, not {capability / 10}"
        if each < MIN_LOAD:
            return f"exchange={variant.exchange!r} needs {MIN_LOAD} bytes per thread: {variant.block_batch} rows of {narrowest} on {variant.num_warps} warps have {each}"
        if spec.hidden * spec.item % MAX_LOAD:
            return f"exchange={variant.exchange!r} reads {MAX_LOAD} bytes at a time, and rows of {spec.hidden} {spec.dtype} are no multiple of that"
    return None


def size_rejection(
    spec: GruSpec, size: GruSize, variant: GruVariant, multiprocessors: int | None, *, waits: bool
) -> str | None:
    """Why a tile is not tried at a size, on so many multiprocessors if given, or None; ``waits``: programs wait for each other."""
    if variant.block_batch > max(SMALLEST, next_power_of_2(size.batch)):
        return f"block_batch={variant.block_batch} would leave half of its rows empty with a batch of {size.batch}"
    if multiprocessors is None:
        return None
    count = programs(spec, size, variant)
    if variant.in_turn and (reason := _turns_rejection(spec, size, variant, multiprocessors)) is not None:
        return reason
    if count > multiprocessors and waits:
        return f"{count} programs wait for each other, and {multiprocessors} multiprocessors may hold no more than one each"
    if count * FEWEST <= multiprocessors and max(variant.block_hidden, variant.block_batch) > SMALLEST:
        return f"{count} programs leave most of {multiprocessors} multiprocessors idle, and smaller tiles are more"
    return None


def _turns_rejection(spec: GruSpec, size: GruSize, variant: GruVariant, multiprocessors: int) -> str | None:
    """Why a variant has too many turns, or None: more than needed leave multiprocessors without a program."""
    fewer = max(turns for turns in choices(GruVariant)["turns"] if turns < variant.turns)
    count = programs(spec, size, dataclasses.replace(variant, turns=fewer))
    if count <= multiprocessors:
        return f"turns={variant.turns} are more than are needed: with {fewer} there are {count} programs for {multiprocessors} multiprocessors"
    return None


def _staged_rejection(spec: GruSpec, variant: GruVariant) -> str | None:  # noqa: PLR0911
    if variant.strategy != "persistent" or spec.stacked or variant.in_turn:
        return "form='staged' has all steps of one layer in one launch, and one tile of rows a program"
    if spec.resets and not spec.dense:
        return "form='staged' has resets for sequences of one length alone: of others there are few"
    if (
        variant.block_hidden != STAGED_UNITS
        or variant.block_batch not in STAGED_BATCHES
        or variant.num_warps != STAGED_WARPS
    ):
        return f"form='staged' is tried with {STAGED_UNITS} units, {STAGED_BATCHES} rows and {STAGED_WARPS} warps"
    if variant.exchange == "probe":
        return "exchange='probe' with form='staged' took 1.1 to 1.8 us a step more, and never came before 'spin'"
    if spec.hidden <= FEWEST_STAGED:
        return (
            f"form='staged' is for more than {FEWEST_STAGED} units: of fewer, form='split' has room for the whole state"
        )
    if spec.hidden * spec.item % STAGED_ALIGNED:
        return (
            f"form='staged' loads {STAGED_ALIGNED} bytes at a time, and rows of {spec.hidden} units are no multiple of them: of "
            "others a step took 30 times as long; calls are padded"
        )
    if spec.dtype == "float32" and spec.precision == "ieee":
        return "form='staged' multiplies on tensor cores, which have no float32 without TF32"
    if spec.dtype != "float32" and kept(spec, variant) < len(widths(spec, variant)):
        return f"form='staged' reads weights at each step of float32 alone: of {spec.hidden} units of 16 bits it was not measured"
    if stage_width(spec, variant) < MIN_PART * variant.splits:
        return f"block_batch={variant.block_batch} leaves no registers for weights that are read at each step"
    return None


def _tile_rejection(spec: GruSpec, variant: GruVariant, capability: int) -> str | None:  # noqa: PLR0911
    threads = 32 * variant.num_warps
    if variant.staged and (reason := _staged_rejection(spec, variant)) is not None:
        return reason
    if (
        variant.block_hidden >= 2 * next_power_of_2(max(spec.hidden, 8))
        and variant.block_hidden > MIN_PART * variant.splits
    ):
        return f"block_hidden={variant.block_hidden} would leave more than half of its units empty with {spec.hidden}"
    if variant.form == "tile" and spec.stacked:
        return "form='tile' is not tried for a stack: two sets of weights leave no room for so many rows"
    if variant.form == "tile" and variant.block_batch < TILE_ROWS:
        return f"form='tile' with fewer than {TILE_ROWS} rows took twice as long as form='split'"
    if (
        variant.form == "tile"
        and variant.num_warps > WARPGROUP
        and variant.block_batch * variant.block_hidden < 128 * threads // 32
    ):
        return "form='tile' has too few elements for its warps, which would all compute the same"
    limit = shared_limit(capability)
    if (needed := shared_bytes(spec, variant)) > limit:
        return f"{needed} bytes of weights and state are more than the {limit} of shared memory that a program can have"
    if variant.num_warps == min(TILE_WARPS) and (weights := weight_bytes(spec, variant)) >= TWO_WARPS_BYTES:
        return f"num_warps={variant.num_warps} with {TWO_WARPS_BYTES} bytes of weights or more, here {weights}, never came near the best"
    columns = max(widths(spec, variant))
    if variant.block_batch * columns * spec.item > 2 * MAX_STATE_PER_THREAD * threads:
        return f"{variant.block_batch} rows of {columns} on {variant.num_warps} warps are more than a thread's registers hold"
    return None


def default_variant(spec: GruSpec, size: GruSize | None = None) -> GruVariant:
    """A legal variant for any spec and size, if one fits a small GPU.

    It is "library" if that is legal. Otherwise it is "steps", whose programs do not wait for each other; for a stack it is
    "persistent", with about as many programs as a small GPU holds.
    """
    variant = GruVariant()
    if rejection(spec, size, variant) is None:
        return variant
    strategy = "persistent" if spec.stacked else "steps"
    tiles = itertools.product((16, 32, 64, 128, 8), (16, 8, 32, 64))
    tried = [GruVariant(strategy, block_hidden=units, block_batch=rows) for units, rows in tiles]
    here = [v for v in tried if rejection(spec, size, v) is None]
    legal = [v for v in here if all(rejection(spec, size, v, capability) is None for capability in LEAST_SHARED)]
    if size is None or not spec.stacked or not legal:
        return (legal or here or tried)[0]
    # As many programs as a small GPU holds; if even the largest tiles give too many, the fewest.
    return max(legal, key=lambda v: min(programs(spec, size, v), 2 * SMALL_GPU - programs(spec, size, v)))


def distance(a: GruSpec, b: GruSpec) -> float:
    """The distance between two specs, in octaves.

    Octaves of the hidden size count 2 each, octaves of layers * directions 1; another item size counts 1. Resets count
    nothing; each other difference counts a half.
    """
    octaves = abs(next_power_of_2(a.hidden).bit_length() - next_power_of_2(b.hidden).bit_length())
    sets = abs((a.layers * a.directions).bit_length() - (b.layers * b.directions).bit_length())
    others = (
        a.layout != b.layout,
        a.stacked != b.stacked,
        a.bias != b.bias,
        a.dtype != b.dtype,
        a.precision != b.precision,
    )
    return 2 * octaves + sets + float(a.item != b.item) + 0.5 * sum(others)


def adapt(variant: GruVariant, _spec: GruSpec, _to: GruSpec) -> GruVariant:
    """A variant that was tuned for one spec, for another: unchanged. ``fit`` knows the GPU, which the rules depend on."""
    return variant


def fit(variant: GruVariant, spec: GruSpec, capability: int) -> GruVariant:
    """The variant for a spec on another architecture: no inline PTX where it is impossible, and smaller tiles until it fits."""
    if variant.strategy == "library":
        return variant
    if variant.by_row:
        return row_variant(spec.hidden) or variant
    lacks = capability < SPIN_CAPABILITY[spec.item] or spec.hidden * spec.item % MAX_LOAD
    if variant.exchange in PTX_EXCHANGES and lacks:
        variant = dataclasses.replace(variant, exchange="poll" if sees_stores(capability) else GruVariant.exchange)
    if variant.strategy == "persistent" and alone(spec, variant):
        variant = dataclasses.replace(variant, exchange=GruVariant.exchange, prefetch=GruVariant.prefetch)
    while rejection(spec, None, variant, capability) is not None and (smaller := _smaller(variant)) is not None:
        variant = smaller
    return variant


def _smaller(variant: GruVariant) -> GruVariant | None:
    """The variant with half of its units; with strategy "steps", whose programs do not wait, then half of its rows. Or None."""
    if variant.block_hidden > SMALLEST:
        return dataclasses.replace(variant, block_hidden=variant.block_hidden // 2)
    if variant.strategy == "steps" and variant.block_batch > SMALLEST:
        return dataclasses.replace(variant, block_batch=variant.block_batch // 2)
    return None
