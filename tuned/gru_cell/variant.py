"""GruCellVariant: the ways to compute the gates that tuning chooses among."""

from __future__ import annotations

import dataclasses

from tuned.choices import one_of
from tuned.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.launch import next_power_of_2

CORE_KNOBS = ("block_batch", "block_hidden", "num_warps")  # all there are
MAX_ELEMENTS_PER_THREAD = 16  # eight float32 values an element; larger tiles were not measured


@dataclasses.dataclass(frozen=True)
class GruCellVariant:
    """The tile of one program. Bytes moved are the same for all: what differs is how many are in flight."""

    block_batch: int = one_of(1, 2, 4, 8, default=1)
    block_hidden: int = one_of(64, 128, 256, 512, 1024, default=256)
    num_warps: int = one_of(1, 2, 4, 8, default=4)

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key: inside the noise, the smaller wins, so that two runs agree."""
        return (self.num_warps, self.block_batch * self.block_hidden, self.block_batch)


def rejection(spec: GruCellSpec, size: GruCellSize | None, variant: GruCellVariant, capability: int = 90) -> str | None:
    """Why ``variant`` is not tried for ``spec`` (at ``size``, if given) on a compute capability, or None."""
    del capability  # nothing here depends on the architecture
    elements = variant.block_batch * variant.block_hidden
    if variant.block_hidden >= 2 * next_power_of_2(max(spec.hidden, 64)):
        return f"block_hidden={variant.block_hidden} would leave more than half of its columns empty with {spec.hidden}"
    if size is not None and variant.block_batch >= 2 * size.batch:
        return f"block_batch={variant.block_batch} would leave more than half of its rows empty with a batch of {size.batch}"
    if elements > MAX_ELEMENTS_PER_THREAD * 32 * variant.num_warps:
        return f"{elements} elements on {variant.num_warps} warps are more than {MAX_ELEMENTS_PER_THREAD} a thread; larger tiles are not tried"
    if elements < 32 * variant.num_warps:
        return f"{elements} elements leave threads of {variant.num_warps} warps without work"
    return None


def default_variant(spec: GruCellSpec, size: GruCellSize | None = None) -> GruCellVariant:
    """A legal, decent variant for any spec and size: one row of the batch, two elements a thread."""
    del size  # one row is legal for all
    block = min(256, next_power_of_2(max(spec.hidden, 64)))
    return GruCellVariant(block_hidden=block, num_warps=max(1, block // 64))


def distance(a: GruCellSpec, b: GruCellSpec) -> float:
    """How unlike two specs are, in octaves: of the hidden size, plus 1 for another dtype and half for bias or in place."""
    octaves = abs(next_power_of_2(a.hidden).bit_length() - next_power_of_2(b.hidden).bit_length())
    return octaves + float(a.dtype != b.dtype) + 0.5 * ((a.bias != b.bias) + (a.inplace != b.inplace))


def adapt(variant: GruCellVariant, spec: GruCellSpec, to: GruCellSpec) -> GruCellVariant:
    """A variant that was tuned for ``spec`` as ``to`` should take it: as it is, its tile does not depend on the spec."""
    del spec, to
    return variant


def fit(variant: GruCellVariant, capability: int) -> GruCellVariant:
    """The variant as another architecture can run it: as it is."""
    del capability
    return variant
