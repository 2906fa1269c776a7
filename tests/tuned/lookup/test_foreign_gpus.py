"""A winner of one GPU, adapted as dispatch does for another GPU, compiles there within registers and shared memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from generator.estimating.targets import TARGETS
from generator.problem import Problem
from generator.processes.compiler import compile_variant, hopeless
from generator.storage.record import WINNERS
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.registry import FAMILIES
from tuned.lookup.lookup import LEAD, Gpu, choose
from tuned.lookup.record import load_record

if TYPE_CHECKING:
    import concurrent.futures
    from pathlib import Path

    from tuned.lookup.record import Winner

pytestmark = pytest.mark.compiler

RECORDS = sorted(WINNERS.glob("*.json"))
# Cards that are not at hand: consumer Ampere, Ada and Blackwell; data centre Ampere and Blackwell.
TARGETS_BY_CAPABILITY = {t.capability: t for t in TARGETS.values() if t.capability}
FOREIGN = (86, 89, 120, 80, 100)
MAX_REGISTERS = 255  # a thread, all of these architectures (CUDA C++ Programming Guide)
LARGEST = 6  # winners, half of them for each GPU: each GPU gets one with 100 KiB of shared memory, and one with more
OTHERS = 3  # further winners for each GPU: 0.4 s each if the compiler's cache has none of them


def sample(winners: list[Winner], capability: int) -> list[Winner]:
    """Every other one of those with the largest tiles for their warps, no text twice; and some evenly spaced others."""

    def tile(winner: Winner) -> float:
        knobs = (n for n in FAMILIES[winner.family].core_knobs if n.startswith("block_"))
        elements = math.prod(getattr(winner.variant, n) for n in knobs) * getattr(winner.spec, "rotary_dim", 1)
        return elements / winner.variant.num_warps

    ordered = sorted(winners, key=lambda w: (-tile(w), w.name))
    texts = {FAMILIES[w.family].kernel_names(w.spec, w.variant): w for w in reversed(ordered)}
    largest = sorted(texts.values(), key=ordered.index)[:LARGEST]
    rest = [w for w in ordered if w not in largest]
    step, at = max(1, -(-len(rest) // OTHERS)), FOREIGN.index(capability)
    return largest[at % 2 :: 2] + rest[step * at // len(FOREIGN) :: step]


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.stem)
def test_programs_on_an_amd_gpu_count_messages(record: Path) -> None:
    """Triton compiles their volatile loads to plain loads, which need not see what another multiprocessor stores."""
    gpu = Gpu("amd_instinct_mi300x", 0, 304)
    found = [
        choice.variant.exchange
        for winner in load_record(record)
        if hasattr(winner.variant, "exchange")
        and (choice := choose(FAMILIES[winner.family], winner.spec, winner.size, gpu)).variant is not None
    ]
    assert set(found) == {"counter"}
    assert len(found) > 20


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("capability", FOREIGN, ids=lambda c: f"sm_{c}")
@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.stem)
def test_winners_fit_a_card_that_is_not_at_hand(
    compiler: concurrent.futures.Executor, record: Path, capability: int
) -> None:
    target = TARGETS_BY_CAPABILITY[capability]
    gpu = Gpu(target.device, capability, target.processors)
    for winner in sample(load_record(record), capability):
        choice = choose(FAMILIES[winner.family], winner.spec, winner.size, gpu)
        if choice.variant is None:  # a model or the row says that PyTorch is faster, or no tile has room
            family = FAMILIES[winner.family]
            fitted = family.fit(winner.variant, winner.spec, capability)
            fits = family.rejection(winner.spec, winner.size, fitted, capability, gpu.multiprocessors) is None
            decided = choice.row or winner  # where the winner does not fit, the nearest row that does
            lead = (family.lead and choice.row and family.lead(choice.row, winner.spec, winner.size)) or LEAD
            led = decided.eager_us < lead * decided.median_us
            assert family.model is not None or led or (family.name == "gru_backward" and not fits), winner.name
            continue
        # the last two where no tile has room
        assert choice.rule in ("similar GPU", "model", "portfolio", "default"), winner.name
        problem = Problem(winner.name, winner.family, winner.spec, winner.size)
        needs = compiler.submit(compile_variant, problem, choice.variant, target.architecture).result()
        assert hopeless(needs, capability) is None, winner.name
        assert all(need.registers <= MAX_REGISTERS for need in needs)


STEP, LINE = GruCellSpec("bfloat16", 675, (675,)), LinearCatSpec("bfloat16", (150, 75), 450)
# Tiles of an H200 that spill 16 to 288 bytes on another card: (spec, size, variant, capability).
SPILL = {
    "padded, two in a turn": (
        STEP,
        GruCellSize(700),
        GruCellVariant("padded", 128, 32, 64, k_parts=1, num_stages=3, num_warps=8, schedule="joint", stacked=True),
        80,
    ),
    "single elements of 1,024 columns": (
        GruCellSpec("bfloat16", 2025, (2025,)),
        GruCellSize(30),
        GruCellVariant("split", 32, 16, 1024, k_parts=8, num_stages=2, num_warps=8, schedule="one"),
        80,
    ),
    "single elements on four warps": (
        LINE,
        LinearCatSize(180),
        LinearCatVariant("tile", 64, 16, 256, num_stages=2),
        100,
    ),
    "padded, 128 x 128": (
        LinearCatSpec("bfloat16", (601, 300), 4500),
        LinearCatSize(700),
        LinearCatVariant("padded", 128, 128, 64, num_stages=4, num_warps=8),
        100,
    ),
    "padded, few results on eight warps": (
        LINE,
        LinearCatSize(700),
        LinearCatVariant("padded", 128, 32, 64, num_warps=8),
        120,
    ),
}


@pytest.mark.parametrize("name", SPILL)
def test_a_tile_that_spills_on_another_card_is_made_smaller_there(
    compiler: concurrent.futures.Executor, name: str
) -> None:
    spec, size, variant, capability = SPILL[name]
    family = FAMILIES["gru_cell" if isinstance(spec, GruCellSpec) else "linear_cat"]
    assert family.rejection(spec, size, variant, 90) is None
    assert family.rejection(spec, size, variant, capability) is not None
    fitted = family.fit(variant, spec, capability)
    assert family.rejection(spec, size, fitted, capability) is None
    architecture = TARGETS_BY_CAPABILITY[capability].architecture
    needs = compiler.submit(compile_variant, Problem("", family.name, spec, size), fitted, architecture).result()
    assert hopeless(needs, capability) is None
