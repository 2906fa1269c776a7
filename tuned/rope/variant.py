"""RopeVariant: the ways to do a RoPE call that tuning chooses among, with their costs."""

from __future__ import annotations

import dataclasses
import math

from tuned.choices import one_of
from tuned.launch import ceil_div, next_power_of_2
from tuned.rope.spec import ITEM_SIZE, RopeSize, RopeSpec

# 64 float32 values and their angles, a quarter of a thread's 255 registers and more. Larger tiles were not measured.
MAX_PAIRS_PER_THREAD = 32
PDL_CAPABILITY = 90  # griddepcontrol: PTX ISA, sm_90 and up
# What a tile's size depends on. Every other knob is free at its default: a core that a rule excludes there is excluded anywhere.
CORE_KNOBS = ("block_tokens", "block_heads", "heads", "head_steps", "num_warps", "num_stages")
MIN_PAIRS_PER_WARP = 32  # below one pair a lane, part of each warp does nothing


@dataclasses.dataclass(frozen=True)
class RopeVariant:
    """How a program moves and rotates its tile. Costs are in bytes a program, besides the tile itself.

    Text (chooses what Jinja writes): ``heads``, ``sine``. Numbers (constexpr and launch options): the rest.
    """

    # Tokens whose angles one program holds: angle bytes are read once for block_heads (* head_steps) rows.
    block_tokens: int = one_of(1, 2, 4, 8, 16, 32, default=2)
    # Rows of one position handled at a time; in sbhd rows run over batch and heads.
    block_heads: int = one_of(1, 2, 4, 8, 16, 32, 64, default=8)
    # "grid": every tile of heads is a program of its own, each reading the angle rows again, from L2.
    # "loop": one program walks over head_steps tiles with its angles in registers: 1 / head_steps of those reads.
    heads: str = one_of("grid", "loop", default="grid")
    head_steps: int = one_of(1, 2, 3, 4, 5, 8, default=1)  # 5: 10 and 40 heads without a rest; 3: 24
    # Which programs run together. "heads": the tiles of one position first, so angle rows stay in L1 / L2;
    # "tokens": neighbouring positions first; "batch": heads, then batch, then positions, so a row of angles is
    # read from memory once for the whole batch.
    order: str = one_of("heads", "tokens", "batch", default="heads")
    # "whole": the features past rotary_dim as one tile padded to a power of two (masked lanes move nothing);
    # "chunks": as tiles of the width of a half row, with less padding and more instructions.
    tail: str = one_of("whole", "chunks", default="whole")
    # "inline": sine and cosine in every program. "table": a first launch writes cos and sin, float32: 12 bytes a pair entry
    # and position more (4 read, 8 written), then 8 instead of 4 a program.
    sine: str = one_of("inline", "table", default="inline")
    # Each byte of x is used once: tell the L2 not to keep it ("evict_first"), for loads and for stores (".cs").
    load_evict: str = one_of("", "evict_first", default="evict_first")
    store_cache: str = one_of("", ".cs", default=".cs")
    # Programmatic dependent launch (sm_90+): programs start while the kernel before still drains, and wait before they read.
    pdl: bool = one_of(False, True, default=False)  # noqa: FBT003 - the choices of a flag
    num_warps: int = one_of(1, 2, 4, 8, default=4)
    # Loads in flight in the loop over heads; without a loop there is nothing to overlap.
    num_stages: int = one_of(1, 2, default=1)

    @property
    def loops_heads(self) -> bool:
        """One program walks over several tiles of heads."""
        return self.heads == "loop"

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: inside the noise, the smaller wins, so that two runs agree."""
        return (
            int(self.sine == "table"),
            int(self.pdl),
            int(self.loops_heads),
            self.head_steps,
            self.num_stages,
            int(self.tail == "chunks"),
            ("heads", "tokens", "batch").index(self.order),
            int(self.load_evict == ""),
            int(self.store_cache == ""),
            self.num_warps,
            self.block_tokens * self.block_heads,
            self.block_tokens,
        )


def half_block(spec: RopeSpec) -> int:
    """Width of the register tile of one half row: rotary_dim / 2 padded to a power of two."""
    return next_power_of_2(spec.rotary_dim // 2)


def rejection(  # noqa: PLR0911, PLR0912 - one return a rule
    spec: RopeSpec, size: RopeSize | None, variant: RopeVariant, capability: int = 90
) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, if given) on a compute capability (90 is 9.0), or None.

    A rule excludes what is impossible, what is another spelling of a variant that stays, or a tile that leaves most of
    its lanes empty or is larger than was tried.
    """
    if variant.loops_heads != (variant.head_steps > 1):
        return f"heads={variant.heads!r} with head_steps={variant.head_steps}: a loop has two steps or more, a grid has one"
    if not variant.loops_heads and variant.num_stages > 1:
        return f"num_stages={variant.num_stages} without a loop over heads compiles to the same code as 1"
    if not spec.merges_batch and variant.block_heads >= 2 * spec.heads:
        return f"block_heads={variant.block_heads} would leave more than half of its rows empty with {spec.heads} heads"
    if not spec.merges_batch and variant.loops_heads and variant.block_heads * (variant.head_steps - 1) >= spec.heads:
        return (
            f"{variant.head_steps} steps of {variant.block_heads} heads: the last would find none of {spec.heads} left"
        )
    if size is not None and not spec.packed and variant.block_tokens >= 2 * size.seq:
        return f"block_tokens={variant.block_tokens} would leave more than half of its rows empty with {size.seq} positions"
    if size is not None and variant.order == "batch" and size.batch == 1:
        return "order='batch' with one batch entry is the same grid as order='heads'"
    if variant.order == "batch" and spec.layout != "bshd":
        return f"order='batch' is for bshd: in {spec.layout} no other batch entry shares a program's positions"
    if (
        variant.order == "tokens"
        and not spec.merges_batch
        and ceil_div(spec.heads, variant.block_heads * variant.head_steps) == 1
    ):
        return "order='tokens' with all heads in one program is the same grid as order='heads'"
    if variant.tail == "chunks" and not spec.copies_tail:
        return "tail='chunks' needs a tail to copy"
    if variant.tail == "chunks" and ceil_div(spec.head_dim - spec.rotary_dim, half_block(spec)) == 1:
        return "tail='chunks' with a tail no wider than a half row is one chunk, the same as 'whole'"
    if variant.sine == "table" and not spec.takes_sine:
        return "sine='table' needs freqs: cos and sin are given already"
    if variant.pdl and capability < PDL_CAPABILITY:
        return f"programmatic dependent launch needs compute capability 9.0, not {capability / 10}"
    pairs = variant.block_tokens * variant.block_heads * half_block(spec)
    if pairs > MAX_PAIRS_PER_THREAD * 32 * variant.num_warps:
        return f"a tile of {pairs} pairs on {variant.num_warps} warps is more than {MAX_PAIRS_PER_THREAD} a thread; larger tiles are not tried"
    if pairs < MIN_PAIRS_PER_WARP * variant.num_warps and variant.num_warps > 1:
        return f"a tile of {pairs} pairs leaves threads of {variant.num_warps} warps without work"
    return None


def default_variant(spec: RopeSpec, size: RopeSize | None = None) -> RopeVariant:
    """A legal, decent variant for any spec (and size): about 16 pairs a thread, as many warps as that fills, no loop."""
    half = half_block(spec)
    heads = 8 if spec.merges_batch else min(8, next_power_of_2(spec.heads))
    tokens = 2 if size is None or spec.packed else min(2, next_power_of_2(max(size.seq, 1)))
    while tokens * heads * half > MAX_PAIRS_PER_THREAD * 32 * 4 and (tokens > 1 or heads > 1):
        tokens, heads = (1, heads) if tokens > 1 else (1, heads // 2)
    warps = 4
    # At least 16 bytes a thread: with fewer elements Triton makes narrower loads and stores.
    while warps > 1 and tokens * heads * half < 32 * warps * (16 // ITEM_SIZE[spec.dtype]):
        warps //= 2
    return RopeVariant(block_tokens=tokens, block_heads=heads, num_warps=warps)


def distance(a: RopeSpec, b: RopeSpec) -> float | None:
    """How unlike two specs are for the choice of a variant, or None if they may not stand in for each other.

    They may differ in heads, dims and dtype only. Octaves of heads and of padded half rows count 1 each: both scale the
    tile that a program should take. Bytes a feature count 1 an octave (float32 against 16 bits), which of the 16-bit
    types 0.1, another share of rotated features 0.5.
    """
    same = ("layout", "style", "angles", "angle_entries", "inplace", "direction")
    if any(getattr(a, name) != getattr(b, name) for name in same) or a.copies_tail != b.copies_tail:
        return None
    octaves = abs(math.log2(a.heads / b.heads)) + abs(math.log2(half_block(a) / half_block(b)))
    size = abs(math.log2(ITEM_SIZE[a.dtype] / ITEM_SIZE[b.dtype]))
    share = 0.5 if a.rotary_dim * b.head_dim != b.rotary_dim * a.head_dim else 0.0
    return octaves + size + 0.1 * (a.dtype != b.dtype) + share + 0.1 * (a.angle_dtype != b.angle_dtype)


def fit(variant: RopeVariant, capability: int) -> RopeVariant:
    """The variant as another architecture can run it: without what only newer ones have."""
    return variant if capability >= PDL_CAPABILITY else dataclasses.replace(variant, pdl=False)
