"""RopeVariant: the ways to do a RoPE call that tuning chooses among, with their costs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from tuned.families.architecture import PDL_CAPABILITY
from tuned.families.choices import one_of
from tuned.families.launch import ceil_div, next_power_of_2
from tuned.families.rope.spec import COMPLETE, ITEM_SIZE, RopeSize, RopeSpec

# 64 float32 values and their angles: more than a quarter of a thread's 255 registers. Larger tiles were not measured.
MAX_PAIRS_PER_THREAD = 32
MIN_PAIRS_PER_THREAD = 2  # as many 16-bit features as a load of 4 bytes; tiles with one pair were never near the best
ADAPTED_HEADS = 8  # 2 x 16 on 4 warps was 80 percent slower than 4 x 8 with the same pairs (head_dim 64, H200)
# The knobs that decide a tile's size. At their defaults the other knobs exclude nothing: a tile that a rule excludes
# with them at their defaults is excluded with any of their values.
CORE_KNOBS = ("block_tokens", "block_heads", "num_warps", "whole_rows", "chunk_heads")
# Cache hints for L2, since each byte of x is used once: (loads' eviction policy, stores' cache modifier, angles' policy).
# Kernels of plain calls give no hint for angles. Kernels of complete calls do with "stream": that saved up to 3 percent
# in calls that read more of a table than the L2 holds. With the other two choices such a hint cost up to a tenth.
CACHE = {"stream": ("evict_first", ".cs", "evict_first"), "stream_stores": ("", ".cs", ""), "keep": ("", "", "")}
VECTOR_BYTES = 16  # of the widest load of a thread
BLOCK_TOKENS = (1, 2, 4, 8)
BLOCK_HEADS = (1, 2, 4, 8, 16)
NUM_WARPS = (1, 2, 4, 8)
RESIDENT = (0, 8, 12, 16)  # warps
CHUNK_HEADS = (0, 8, 16, 32)
LEAST_RESIDENT = 8
FEW_WARPS = 4  # of a program that normalises all heads of a token: fewer wait for each other than with eight
# Pairs of a thread in a chunk of heads, at least and at most; and in all chunks of a gradient, which holds them: with 32
# Triton 3.6 spills. GOOD_CHUNK: of a good chunk, in a forward and in a gradient. From CHUNKED_TOKENS tokens on chunks are
# the default: their weights come after the sums, which takes a single wave of programs longer. docs/decisions/0086.
LEAST_CHUNK, MOST_CHUNK, MOST_HELD = 4, 16, 24
GOOD_CHUNK, CHUNKED_TOKENS = ((8, 16), (8, 8)), 1024
MULTIPROCESSORS = 132  # of an H100 or H200; other GPUs get as many programs, in another number of waves
STAGES = 3  # tiles that a program has at a time if it takes tile after tile
STAGED_BYTES = 90 * 1024  # of shared memory, at most, for tiles that wait: sm_86 has 99 KB
# What follows is from landscapes of an H200: docs/decisions/0052.
# Tiles of whole rows are tried for rows of up to NARROW_BYTES. They are the default where they took less: from
# MANY_HEADS heads and LARGE_US of memory time on (docs/decisions/0083 and 0089).
NARROW_BYTES, MANY_HEADS, LARGE_US = 128, 8, 1.5
MOST_ROTATED = 2 / 3  # of the features, with a key
REACH = 1.5  # octaves: for a call further away than that, the default variant is a better guess than a row
# How much of x a thread of a good tile holds, as log2 of bytes. HELD: by bytes of an element. LESS_HELD: subtracted
# where a load takes only two bytes, since each load has an address of its own. LEAST_HELD: the least when a small call
# is spread over SPREAD threads, four warps a multiprocessor.
HELD = {2: 6.0, 4: 6.5}
LESS_HELD = 0.5
LEAST_HELD = 3.5
SPREAD = 2**14
# Sines of a thread: with more, tiles of one or two heads took 1.3 to 1.7 of the best one's time (docs/decisions/0087).
MANY_SINES = 4
# FEW_PROGRAMS: up to so many, packed calls stream. DEPENDENT_BYTES: a program that moves so many need not start fast.
FEW_PROGRAMS, DEPENDENT_BYTES = 1024, 8192
# In microseconds: from one program's start to the next, in an ordinary and in a dependent launch; what a dependent
# launch saves; and what a call takes at least. BYTES_PER_US: of an H200. From tiles of 58 calls on an H100, each timed
# both ways: docs/decisions/0074.
STARTED_US, DEPENDENT_STARTED_US, WAITED_US = 0.65e-3, 1.25e-3, 0.8
LEAST_US, BYTES_PER_US, LEAST_ROW_BYTES = 1.0, 4e6, 64  # LEAST_ROW_BYTES: what memory gives at a time
FEWEST_ROWS, MOST_ROWS = 2**10, 2**20
MANY = 64  # from so many positions or batch entries on, the empty part of the last tile does not count


@dataclasses.dataclass(frozen=True)
class RopeVariant:
    """How a program moves and rotates its tile. Costs are in bytes per program, besides the tile itself.

    All but ``whole_rows`` are numbers, constexpr and launch options, which do not change the kernel's text.
    """

    # Tokens whose angles one program holds: angle bytes are read once for block_heads rows.
    block_tokens: int = one_of(*BLOCK_TOKENS, default=2)
    # Rows of one position handled at a time; in sbhd rows run over batch and heads. Every tile of rows is a program of its
    # own, and each reads the angle rows again, from L2.
    block_heads: int = one_of(*BLOCK_HEADS, default=8)
    # Which programs run together. "heads": the tiles of one position first, so angle rows stay in L1 / L2;
    # "tokens": neighbouring positions first.
    order: str = one_of("heads", "tokens", default="heads")
    cache: str = one_of("stream", "stream_stores", "keep", default="stream")
    # Programmatic dependent launch (sm_90+): programs start while the previous kernel drains, and wait before they read.
    pdl: bool = one_of(False, True, default=False)  # noqa: FBT003 - the choices of a flag
    num_warps: int = one_of(*NUM_WARPS, default=4)
    # For a norm only. 0: a program has one tile. Else programs take tile after tile, and the next tiles are loaded to
    # shared memory while one is at work; the number is how many warps of such programs a multiprocessor has. A norm's
    # gradient always takes tile after tile: there 0 means LEAST_RESIDENT.
    resident: int = one_of(*RESIDENT, default=0, older=True)
    # The one text axis, for style half. True: a tile has the features of a row in order, and loads the other feature of
    # each pair too. False: a tile has the first and the second features of pairs; where these are not aligned, stores
    # write parts of sectors.
    whole_rows: bool = one_of(False, True, default=False, older=True)  # noqa: FBT003 - the choices of a flag

    # Where all heads of a token are normalised together: a program works on so many of them at a time, and reads them
    # again after it has the sums, or, in a gradient, holds them in 16 bits. 0: all are one tile, of float32 in registers.
    chunk_heads: int = one_of(*CHUNK_HEADS, default=0, older=True)

    @property
    def row_tiles(self) -> str:
        """The tiles of a token's rows, as kernel source. A tile of whole rows has rows of one tensor, others of both."""
        parts = ("HEADS", "KEY_HEADS") if self.whole_rows else ("rows_of_token",)
        return " + ".join(f"({rows} + BLOCK_HEADS - 1) // BLOCK_HEADS" for rows in parts)

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: within the noise the smaller one wins, so that two runs agree."""
        return (
            int(self.pdl),
            int(self.whole_rows),
            self.chunk_heads,
            self.resident,
            ("heads", "tokens").index(self.order),
            tuple(CACHE).index(self.cache),
            self.num_warps,
            self.block_tokens * self.block_heads,
            self.block_tokens,
        )


def rows_at_once(spec: RopeSpec, variant: RopeVariant) -> int:
    """Rows of one position that a program has: ``block_heads``; or all rows, padded, if they are normalised together."""
    if spec.norm != "all":
        return variant.block_heads
    if variant.chunk_heads:
        return ceil_div(spec.all_heads, variant.chunk_heads) * variant.chunk_heads
    return spec.norm_rows


def rows_of_tile(spec: RopeSpec, variant: RopeVariant) -> int:
    """Rows of one position in a tile of registers: ``rows_at_once``, or a part of them."""
    return variant.chunk_heads or rows_at_once(spec, variant)


def half_block(spec: RopeSpec) -> int:
    """Width of the register tile of one half row: the pairs that move, padded to a power of two."""
    return next_power_of_2(spec.moved_pairs)


def row_block(spec: RopeSpec) -> int:
    """Half of the padded features of a row that a tile holds: the pairs, the tail that is copied, and in MLA the value."""
    tail = spec.head_dim - spec.rotary_dim if spec.copies_tail else 0
    value = (next_power_of_2(spec.value_dim) + 1) // 2 if spec.splits else 0
    return half_block(spec) + (next_power_of_2(tail) + 1) // 2 + value if tail else half_block(spec)


def row_features(spec: RopeSpec) -> int:
    """Features of a row that a tile of whole rows holds: those that rotate, and those that are copied beside them."""
    return spec.head_dim if spec.moves_all else spec.rotary_dim


def half_row(spec: RopeSpec, whole_rows: bool) -> int:  # noqa: FBT001 - the knob
    """Half of the padded features of a row in a tile of whole rows; of pairs, ``row_block``."""
    return next_power_of_2(row_features(spec)) // 2 if whole_rows else row_block(spec)


def has_whole_rows(spec: RopeSpec) -> bool:
    """Whether a kernel with tiles of whole rows exists: for a rotation alone, of style half, of features in a row."""
    more = spec.normed or spec.appends or spec.splits or spec.deinterleaves or spec.angle_gradient
    return not (more or spec.interleaved or (spec.inplace and spec.rotated == "proportional"))


def takes_whole_rows(spec: RopeSpec, size: RopeSize | None = None) -> bool:
    """Whether the default is a tile of whole rows at this size; without a size, at any that is large enough.

    It is where such tiles are tried and enough rows share angles: the heads of a token, and in sbhd without a key those
    of a whole position. With a key most tiles of whole rows took longer, except where pairs copy many features beside
    them. In tiles of pairs, a half is parts of two sectors or three, and its store writes all of them. Small calls wait
    for loads, and whole rows have more loads: docs/decisions/0083 and 0089.
    """
    if spec.key_heads and spec.rotary_dim > MOST_ROTATED * spec.head_dim:
        return False
    batch = size.batch if size is not None and spec.merges_batch and not spec.key_heads else 1
    if spec.all_heads * batch < MANY_HEADS or _rows_rejection(spec, RopeVariant(whole_rows=True)):
        return False
    return size is None or _moved_us(spec, spec.all_heads * size.tokens) >= LARGE_US


def vector_bytes(spec: RopeSpec) -> int:
    """Bytes that one load of a thread takes at most from contiguous rows; both features of a pair are loaded alike."""
    item = ITEM_SIZE[spec.dtype]
    if spec.splits:  # most of a row is copied
        return item * math.gcd(spec.kept_dim, spec.value_dim, spec.head_dim, VECTOR_BYTES // item)
    return item * math.gcd(spec.head_dim, 0 if spec.interleaved else spec.pair_distance, VECTOR_BYTES // item)


def rejection(
    spec: RopeSpec,
    size: RopeSize | None,
    variant: RopeVariant,
    capability: int = 90,
    multiprocessors: int | None = None,
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, if given) on a compute capability (90 is 9.0), or None.

    A rule excludes what is impossible, what duplicates a variant that stays, or a tile that leaves most of
    its lanes empty or is larger than was tried.
    """
    del multiprocessors  # programs of a rotation do not wait for each other
    # Rows of one position: the heads; if the batch is merged, those of every batch entry.
    rows = spec.all_heads if not spec.merges_batch else None if size is None else spec.heads * size.batch
    positions = None if size is None else size.tokens if spec.layout == "thd" else size.seq
    at_once = rows_at_once(spec, variant)
    if spec.norm == "all" and variant.block_heads != ADAPTED_HEADS:
        return f"heads that are normalised together are one tile: block_heads says nothing, and is {ADAPTED_HEADS}"
    if rows is not None and at_once >= 2 * rows:
        return f"block_heads={variant.block_heads} would leave more than half of its rows empty with {rows} heads"
    if positions is not None and variant.block_tokens >= 2 * positions:
        return f"block_tokens={variant.block_tokens} would leave more than half of its rows empty with {positions} positions"
    if variant.order == "tokens" and (
        spec.gradient_of_norm
        or spec.takes_all_heads
        or (rows is not None and rows <= at_once)
        or (positions is not None and positions <= variant.block_tokens)
    ):
        return "order='tokens' with one tile of heads or of positions is the same grid as order='heads'"
    if variant.pdl and capability < PDL_CAPABILITY:
        return f"programmatic dependent launch needs compute capability 9.0, not {capability / 10}"
    return (
        _resident_rejection(spec, positions, variant)
        or _rows_rejection(spec, variant)
        or _chunk_rejection(spec, variant)
        or (None if variant.chunk_heads else _tile_rejection(spec, variant, variant.block_tokens * at_once))
    )


def _rows_rejection(spec: RopeSpec, variant: RopeVariant) -> str | None:
    """Why a tile of whole rows is not tried, or None."""
    if not variant.whole_rows:
        return None
    if not has_whole_rows(spec):
        return (
            "whole_rows is of style half, of rotations alone, of features in a row: there is no such kernel of others"
        )
    if vector_bytes(spec) == VECTOR_BYTES:
        return f"whole_rows would load each feature twice, and both halves of these rows are aligned to {VECTOR_BYTES} bytes"
    if (row := spec.head_dim * ITEM_SIZE[spec.dtype]) > NARROW_BYTES:
        return f"whole_rows took as long for rows of more than {NARROW_BYTES} bytes, and these have {row}"
    return None


def _chunk_rejection(spec: RopeSpec, variant: RopeVariant) -> str | None:
    """Why chunks of heads are not tried, or None."""
    if not variant.chunk_heads:
        return None
    each, threads = variant.block_tokens * row_block(spec), 32 * variant.num_warps
    chunk, held = variant.chunk_heads * each, rows_at_once(spec, variant) * each
    reason = None
    if spec.norm != "all":
        reason = "chunk_heads is of heads that are normalised together: a tile of others has block_heads of them"
    elif variant.chunk_heads >= spec.all_heads:
        reason = f"chunk_heads={variant.chunk_heads} holds all {spec.all_heads} heads: chunk_heads=0 does too"
    elif variant.resident and not spec.gradient_of_norm:
        reason = "heads that are read twice come from L1 the second time: no tile waits in shared memory"
    elif not LEAST_CHUNK * threads <= chunk <= MOST_CHUNK * threads:
        reason = (
            f"a chunk of {chunk} pairs on {variant.num_warps} warps is not {LEAST_CHUNK} to {MOST_CHUNK} per thread"
        )
    elif spec.gradient_of_norm and held > MOST_HELD * threads:
        reason = f"{held} pairs on {variant.num_warps} warps are more than {MOST_HELD} per thread: they are held"
    return reason


def _resident_rejection(spec: RopeSpec, positions: int | None, variant: RopeVariant) -> str | None:
    """Why programs that take tile after tile are not tried, or None."""
    if not variant.resident:
        return None
    reason = None
    if not spec.normed:
        reason = "resident programs are those of a norm: a rotation's wait for nothing but memory"
    elif spec.gradient_of_norm and variant.resident == LEAST_RESIDENT:
        reason = f"a norm's gradient has {LEAST_RESIDENT} resident warps anyway: resident=0 is the same"
    elif variant.resident % variant.num_warps:
        reason = f"resident={variant.resident} is no multiple of {variant.num_warps} warps"
    elif not spec.gradient_of_norm and stages(spec, variant) == 1:
        reason = f"tiles that wait in shared memory would take more than {STAGED_BYTES} bytes"
    elif positions is not None and positions < 2 * max(BLOCK_TOKENS):
        reason = f"with {positions} positions a program has one tile"
    return reason


def stages(spec: RopeSpec, variant: RopeVariant) -> int:
    """Tiles that a program has at a time: one at work, the others being loaded."""
    if not (variant.resident or spec.gradient_of_norm):
        return 1
    if spec.packed and spec.copies_tail:  # Triton 3.6 cannot compile some of these: its layouts come out of step
        return 1
    rows = variant.block_tokens * rows_at_once(spec, variant) * (2 if spec.gradient_of_norm else 1)
    waiting = (STAGES - 1) * rows * 2 * row_block(spec) * ITEM_SIZE[spec.dtype]
    return STAGES if waiting <= STAGED_BYTES else 1


def _tile_rejection(spec: RopeSpec, variant: RopeVariant, rows: int) -> str | None:
    """Why a tile of so many rows is not tried with the variant's warps, or None."""
    # In MLA all features count, since pairs are the smallest part of a row.
    of_row = half_row(spec, variant.whole_rows)
    pairs, threads = rows * (of_row if spec.splits or variant.whole_rows else half_block(spec)), 32 * variant.num_warps
    # A gradient that reads the forward's input holds two inputs and a sum.
    most = MAX_PAIRS_PER_THREAD // (2 if spec.reads_given else 1)
    if spec.angle_gradient and spec.angle_entries == "feature":  # four sums: with 16 pairs a thread most tiles spill
        most //= 2
    # If all heads are normalised together, a tile of one token is tried whatever its size.
    if spec.norm == "all" and variant.block_tokens == 1 and variant.num_warps == max(NUM_WARPS):
        return None
    if pairs > most * threads:
        return (
            f"a tile of {pairs} pairs on {variant.num_warps} warps is more than {most} per thread;"
            " larger tiles are not tried"
        )
    features = rows * of_row
    if features > 2 * most * threads:
        return (
            f"a tile of {2 * features} features, those that are copied among them, on {variant.num_warps} warps is more than "
            f"{4 * most} per thread; larger tiles are not tried"
        )
    # More warps only for larger tiles: small tiles of many warps never came first.
    least = max(MIN_PAIRS_PER_THREAD, variant.num_warps if spec.norm != "all" else 0)
    if variant.num_warps > 1 and pairs < least * threads:
        return f"a tile of {pairs} pairs on {variant.num_warps} warps is fewer than {least} per thread; fewer warps are tried"
    return None


def size_class(spec: RopeSpec, size: RopeSize) -> tuple[int, int]:
    """(positions, rows) of a size, each capped where ``rejection`` no longer tells larger values apart."""
    positions = size.tokens if spec.layout == "thd" else size.seq
    rows = spec.heads * size.batch if spec.merges_batch else 0
    return min(positions, 2 * max(BLOCK_TOKENS)), min(rows, 2 * max(BLOCK_HEADS))


def default_variant(spec: RopeSpec, size: RopeSize | None = None) -> RopeVariant:
    """The variant of a call that has no row nearby: the legal tile that costs least by a rule of thumb, ``_cost``.

    The rule was fitted to 169 landscapes of H200s and 58 of H100s: docs/decisions/0052 and 0074.
    """
    positions = MANY if size is None else size.tokens if spec.layout == "thd" else size.seq
    batch = MANY if size is None else size.batch
    whole = size is not None and takes_whole_rows(spec, size)
    each = 2 * half_row(spec, whole) * ITEM_SIZE[spec.dtype]
    narrow = not whole and vector_bytes(spec) == 2  # noqa: PLR2004 - bytes
    held = HELD[ITEM_SIZE[spec.dtype]] - (LESS_HELD if narrow else 0.0)
    if spec.gradient_of_norm and spec.interleaved:  # its pairs are split in registers: Triton 3.6 spills larger tiles
        held -= 1.0
    if spec.angle_gradient:  # two inputs and two sums
        held -= 1.0
    if size is not None:
        held = min(held, max(LEAST_HELD, math.log2(max(1, spec.all_heads * size.tokens * each) / SPREAD)))
    capped = RopeSize(min(batch, MANY) if spec.merges_batch else 1, max(1, min(positions, MANY)))
    # Below FEWEST_ROWS programs do not wait to start; above MOST_ROWS the share of starts in the time is constant.
    # ``rows`` and ``held`` are rounded to quarters of octaves, so that few cases are told apart.
    rows = FEWEST_ROWS if size is None else max(FEWEST_ROWS, min(spec.all_heads * size.tokens, MOST_ROWS))
    variant = _default(spec, capped, round(4 * held) / 4, round(4 * math.log2(rows)) / 4, whole)
    entries = 1 if spec.layout == "thd" else batch
    if size is None:  # a variant that compiles for every GPU
        return variant
    if spec.norm == "all":
        chunked = _in_chunks(spec, variant) if size.tokens >= CHUNKED_TOKENS else variant
        if spec.reads_given or chunked != variant:
            return chunked
        return _of_all_heads(spec, variant, positions)
    if spec.reads_given:
        return variant
    count = programs(spec, variant, positions, entries)
    cache = "stream" if count <= FEW_PROGRAMS and spec.packed else "keep"
    return dataclasses.replace(variant, cache=cache, pdl=_starts_dependently(spec, size, count))


def _starts_dependently(spec: RopeSpec, size: RopeSize, count: int) -> bool:
    """Whether ``count`` programs take less in a dependent launch: it starts them half as fast, but saves WAITED_US."""
    moved_us = _moved_us(spec, spec.all_heads * size.tokens)
    return max(DEPENDENT_STARTED_US * count, moved_us) < WAITED_US + max(STARTED_US * count, moved_us)


def _moved_us(spec: RopeSpec, rows: float) -> float:
    """About the microseconds that memory takes for so many rows. The time to start many programs is compared with it."""
    features = spec.rotary_dim if spec.inplace else spec.head_dim
    each = max(features * ITEM_SIZE[spec.dtype], LEAST_ROW_BYTES)
    return LEAST_US + 2 * rows * each / BYTES_PER_US


def _of_all_heads(spec: RopeSpec, variant: RopeVariant, positions: int) -> RopeVariant:
    """The default if all heads are normalised together: tile after tile, by few warps a program if these hold a token."""
    few = dataclasses.replace(variant, block_tokens=1, num_warps=FEW_WARPS)
    fewer = few if _tile_rejection(spec, few, rows_at_once(spec, few)) is None else variant
    looped = dataclasses.replace(fewer, cache="stream", resident=LEAST_RESIDENT)
    return variant if _resident_rejection(spec, positions, looped) else looped


def _in_chunks(spec: RopeSpec, variant: RopeVariant) -> RopeVariant:
    """The variant with chunks of GOOD_CHUNK pairs a thread and few empty rows; as it is if none are possible."""
    for warps in (FEW_WARPS, 2 * FEW_WARPS):
        least, most = (pairs * 32 * warps for pairs in GOOD_CHUNK[spec.gradient_of_norm])
        possible = [n for n in CHUNK_HEADS[1:] if n < spec.all_heads and least <= n * row_block(spec) <= most]
        if not possible:
            continue
        chunk = min(possible, key=lambda n: (ceil_div(spec.all_heads, n) * n, -n))
        found = dataclasses.replace(
            variant, block_tokens=1, num_warps=warps, chunk_heads=chunk, resident=0, cache="stream"
        )
        if _chunk_rejection(spec, found) is None:
            return found
    return variant


def _row_tiles(spec: RopeSpec, variant: RopeVariant, rows: int) -> int:
    """Tiles of so many rows at one position. A tile of whole rows has rows of one tensor, x or the key."""
    if variant.whole_rows:
        return ceil_div(rows - spec.key_heads, variant.block_heads) + ceil_div(spec.key_heads, variant.block_heads)
    return ceil_div(rows, rows_at_once(spec, variant))


def programs(spec: RopeSpec, variant: RopeVariant, seq: int, batch: int) -> int:
    """Size of the grid; a packed call has one batch entry.

    Programs that take tile after tile: at most as many as MULTIPROCESSORS hold, divided evenly among the tiles of rows.
    """
    if spec.takes_all_heads:
        return ceil_div(seq, variant.block_tokens) * batch
    rows = spec.all_heads * (batch if spec.merges_batch else 1)
    row_tiles, token_tiles = _row_tiles(spec, variant, rows), ceil_div(seq, variant.block_tokens)
    token_tiles *= 1 if spec.merges_batch else batch
    if spec.gradient_of_norm or stages(spec, variant) > 1:
        held = variant.resident or LEAST_RESIDENT
        most = MULTIPROCESSORS * max(1, held // variant.num_warps)
        token_tiles = min(token_tiles, max(1, most // row_tiles))
    return row_tiles * token_tiles


@functools.lru_cache(1024)
def _default(spec: RopeSpec, size: RopeSize, held: float, rows: float, whole: bool) -> RopeVariant:  # noqa: FBT001 - the knob
    tiles = itertools.product(BLOCK_TOKENS, BLOCK_HEADS, NUM_WARPS)
    one_of_each = RopeVariant(cache="keep", whole_rows=whole)
    variants = [
        dataclasses.replace(one_of_each, block_tokens=tokens, block_heads=heads, num_warps=warps)
        for tokens, heads, warps in tiles
    ]
    legal = [one for one in variants if rejection(spec, size, one) is None]
    least = dataclasses.replace(one_of_each, block_tokens=1, block_heads=1, num_warps=1)
    return min(legal, key=lambda one: _cost(spec, size, one, held, rows), default=least)


def _cost(spec: RopeSpec, size: RopeSize, variant: RopeVariant, held: float, rows_of_all: float) -> float:
    """An estimate of how far a tile's time is from the best one's, in octaves.

    ``held``: log2 of the bytes that a thread should hold. ``rows_of_all``: log2 of the rows of all tokens; ``size`` is
    capped. Every weight was fitted to landscapes: docs/decisions/0052 and 0074.
    """
    tokens, warps, item = variant.block_tokens, variant.num_warps, ITEM_SIZE[spec.dtype]
    rows = spec.heads * size.batch if spec.merges_batch else spec.all_heads
    together = rows_at_once(spec, variant)
    heads = min(together, rows)
    padded = tokens * together  # rows of the tile
    whole_rows, of_row = variant.whole_rows, half_row(spec, variant.whole_rows)
    too_much = math.log2(padded * 2 * of_row * item / (32 * warps)) - held
    vector = item * math.gcd(spec.head_dim, VECTOR_BYTES // item) if whole_rows else vector_bytes(spec)
    at_once = padded * item / (32 * warps)
    at_once *= 2 * of_row if whole_rows else (2 if spec.interleaved else 1) * half_block(spec)
    # Bytes of a token's angles, or what their sines cost; and sines that a thread computes.
    of_token = 2 * of_row if whole_rows else half_block(spec)
    angles = (16 if spec.computes_sincos else 8) * of_token
    sines = tokens * of_token / (32 * warps) if spec.computes_sincos else 0.0
    empty = _row_tiles(spec, variant, rows) * together / rows
    empty *= ceil_div(size.seq, tokens) * tokens / size.seq
    # Rows are aligned and enough for all multiprocessors: from DEPENDENT_BYTES on a dependent launch is possible.
    whole = vector_bytes(spec) == VECTOR_BYTES and held >= HELD[item]
    all_rows = 2.0**rows_of_all
    started = STARTED_US * all_rows * empty / padded / _moved_us(spec, all_rows)
    return (
        (0.8 * too_much if too_much > 0 else -1.3 * too_much)
        + 0.6 * max(0.0, math.log2(vector / at_once))  # loads are narrower than they could be
        + 2 * math.log2(empty)
        + 0.3 * math.log2(1 + angles / (2 * item * heads * of_row))  # all heads share the angles of a token
        + max(0.0, math.log2(max(1.0, sines / MANY_SINES)))
        # In place, one warp moves parts of many rows.
        + (2 * max(0.0, math.log2(padded / warps / 16)) if spec.inplace and not whole_rows else 0.0)
        + 0.25 * max(0.0, math.log2(started))  # programs wait for earlier ones to start
        + (0.7 if whole and 4 * padded * of_row * item < DEPENDENT_BYTES else 0.0)
        + 0.4 * math.log2(tokens)
        + 0.05 * math.log2(max(BLOCK_HEADS) / heads)
        + (
            0.0 if spec.angle_gradient else 0.2 * math.log2(warps)
        )  # a gradient of angles takes fewer turns the more heads it has at a time
    )


def distance(a: RopeSpec, b: RopeSpec) -> float:
    """The distance between two specs for the choice of a variant, in octaves.

    * 1: each octave of heads (of both tensors), of padded half rows and of bytes per feature. Also each difference in
      the kernel's text: layout, style, kind of angles, in place, tail, plain or complete, deinterleaved. The layout
      counts for complete calls too, although it does not change their text. Also a cache of another dtype.
    * 2: a norm, since a row without one does not tell how a tile with a sum over each row does. Also MLA's kv, its
      transpose, a cache, gradients of the angles, and tiles of whole rows.
    * A half: each octave of what one load can take. Also direction, entries of the angles and the other fields of
      complete calls, since they change little of what is moved.
    * A tenth: each of the two dtypes, and what changes an instruction or two: zero-centered weights, rounding, sections,
      the layout of a cache, whether the key is in place.
    """
    octaves = abs(math.log2(a.all_heads / b.all_heads)) + abs(math.log2(half_block(a) / half_block(b)))
    octaves += abs(math.log2(ITEM_SIZE[a.dtype] / ITEM_SIZE[b.dtype]))
    octaves += abs(math.log2(vector_bytes(a) / vector_bytes(b))) / 2
    texts = sum(
        getattr(a, n) != getattr(b, n)
        for n in ("layout", "style", "angles", "inplace", "copies_tail", "plain", "deinterleaves")
    )
    halves = sum(getattr(a, n) != getattr(b, n) for n in ("direction", "angle_entries", *COMPLETE[2:-1]))
    tenths = sum(
        getattr(a, n) != getattr(b, n)
        for n in ("dtype", "angle_dtype", "zero_centered", "rounding", "sections", "cache_layout", "key_inplace")
    )
    octaves += 2 * (a.norm != b.norm) + 2 * ((a.splits, a.sums_heads) != (b.splits, b.sums_heads))
    octaves += 2 * (takes_whole_rows(a) != takes_whole_rows(b))  # other things count in tiles of whole rows
    octaves += 2 * (a.appends != b.appends) + (a.cache != b.cache) + 2 * (a.angle_gradient != b.angle_gradient)
    if a.splits and b.splits:
        octaves += abs(math.log2(row_block(a) / row_block(b)))
    return octaves + texts + 0.5 * halves + 0.1 * tenths


def adapt(variant: RopeVariant, spec: RopeSpec, to: RopeSpec) -> RopeVariant:
    """A variant that was tuned for ``spec``, adapted to ``to``: about as many features per program, copied ones included.

    Narrower rows get more heads, up to ADAPTED_HEADS, then more tokens. Wider rows get fewer tokens, then fewer heads.
    If ``to`` has fewer heads than a tile holds, the tile gets fewer heads and more tokens.
    """
    tokens, heads = variant.block_tokens, variant.block_heads
    if not to.normed:
        variant = dataclasses.replace(variant, resident=0)
    if variant.whole_rows and _rows_rejection(to, variant):
        variant = dataclasses.replace(variant, whole_rows=False)
    if to.norm == "all":  # a program has all heads
        variant = dataclasses.replace(variant, block_heads=ADAPTED_HEADS)
        return variant if _chunk_rejection(to, variant) is None else dataclasses.replace(variant, chunk_heads=0)
    variant = dataclasses.replace(variant, chunk_heads=0)
    while not to.merges_batch and heads >= 2 * to.all_heads:
        tokens, heads = min(2 * tokens, max(BLOCK_TOKENS)), heads // 2
    have, wanted = float(half_row(to, variant.whole_rows)), half_row(spec, variant.whole_rows)
    while 3 * have <= 2 * wanted and (heads < min(ADAPTED_HEADS, to.all_heads) or tokens < max(BLOCK_TOKENS)):
        tokens, heads = (tokens, 2 * heads) if heads < min(ADAPTED_HEADS, to.all_heads) else (2 * tokens, heads)
        have *= 2
    while 2 * have >= 3 * wanted and tokens * heads > 1:
        tokens, heads = (tokens // 2, heads) if tokens > 1 else (tokens, heads // 2)
        have /= 2
    return dataclasses.replace(variant, block_tokens=tokens, block_heads=heads)


def fit(variant: RopeVariant, _spec: RopeSpec, capability: int) -> RopeVariant:
    """The variant for another architecture: without dependent launch if that is older than PDL_CAPABILITY."""
    return variant if capability >= PDL_CAPABILITY else dataclasses.replace(variant, pdl=False)
