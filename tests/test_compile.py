"""Kernels compile for every architecture, no two to the same code, with accesses as wide as alignment allows: no GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from generator.problem import Problem
from generator.rendering.structures import default_names, rope_specs, structures
from tests import compiling, pairwise
from tuned.gru_cell.spec import GruCellSpec
from tuned.launcher import PROBE_KERNEL
from tuned.rope.launches import kernel_name
from tuned.rope.spec import ANGLES, ITEM_SIZE, STYLES, RopeSize, RopeSpec
from tuned.rope.variant import RopeVariant

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator

# Ampere, Ada, Blackwell (data centre and desktop) and AMD's CDNA 3, beside the sm_90 that every kernel is compiled for.
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
GRU_KERNELS = [name for name in structures() if name.startswith("gru_cell_")]


def text_axes() -> list[dict[str, Any]]:
    """The text axes of every kernel that rotates."""
    axes: dict[str, tuple[Any, ...]] = {"spec": tuple(rope_specs()), "heads": ("grid", "loop")}
    return [
        {"layout": s.layout, "output": s.output, "style": s.style, "angles": s.angles, "heads": row["heads"]}
        for row in pairwise.product(axes, bool)
        for s in (row["spec"],)
    ]


# Every two values of text axes that can meet are compiled together for every architecture.
COVERING = [
    *("rope_" + "_".join(row.values()) for row in pairwise.covering(text_axes())),
    PROBE_KERNEL,
    *GRU_KERNELS,
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[concurrent.futures.Executor]:
    """A process in which Triton compiles, whatever it does in this one."""
    with compiling.process() as process:
        yield process


def test_the_sample_for_other_architectures_covers_every_text_axis() -> None:
    assert set(COVERING) <= set(structures())
    for axis, values in {"layout": 3, "output": 3, "style": 2, "angles": 2, "heads": 2}.items():
        assert len({row[axis] for row in pairwise.covering(text_axes())}) == values, axis


@pytest.mark.parametrize("name", sorted(structures()))
def test_every_kernel_compiles_for_sm_90_without_a_spill(compiler: concurrent.futures.Executor, name: str) -> None:
    needs = compiler.submit(compiling.needs, name, "sm_90").result()
    assert 0 < needs.registers < 256
    assert needs.spill_bytes == 0


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("name", COVERING)
def test_a_sample_compiles_for_every_other_architecture(
    compiler: concurrent.futures.Executor, name: str, architecture: str
) -> None:
    needs = compiler.submit(compiling.needs, name, architecture).result()
    assert 0 < needs.registers <= 512  # AMD counts vector registers, of which a thread may have 512
    # A loop over heads is never what an untuned call gets, and tuning drops a variant that spills.
    assert needs.spill_bytes == 0 or name not in default_names()


# A key of Qwen2.5 1.5B, decoded: two heads, one token. Small enough to compile whole, and with every knob in it but
# order and tail, which need a batch and a partial rotation.
WHOLE = Problem("qwen2_1b_kv_decode", "rope", RopeSpec("bshd", "bfloat16", 2, 128, 128), RopeSize(batch=1, seq=1))
PARTS = 4  # so that two processes can share the work


@pytest.mark.parametrize("part", range(PARTS))
def test_every_legal_variant_of_a_problem_compiles_for_sm_90(compiler: concurrent.futures.Executor, part: int) -> None:
    count, failures = compiler.submit(compiling.pool_failures, WHOLE, part, PARTS).result()
    assert count > 1
    assert not failures


def test_no_two_kernels_compile_to_the_same_code(compiler: concurrent.futures.Executor) -> None:
    names_of: dict[str, list[str]] = {}
    for name, code in compiler.submit(compiling.code_digests, "sm_90").result().items():
        names_of.setdefault(code, []).append(name)
    assert sum(map(len, names_of.values())) == len(structures())
    assert not [names for names in names_of.values() if len(names) > 1]


# Width of loads and stores -------------------------------------------------------------------------------------------

DIMS = ((128, 128), (128, 64), (96, 48), (96, 24), (80, 32), (80, 20), (256, 64), (512, 512))  # head_dim, rotary_dim


def bits(spec: RopeSpec, *lengths: int) -> int:
    """The widest access that may begin and end at multiples of all these lengths in elements."""
    size = ITEM_SIZE[spec.dtype]
    if spec.head_dim % 16:  # Triton knows of a stride only whether it is a multiple of 16 elements
        return 8 * size
    return 8 * min(16, math.gcd(16, *(size * length for length in lengths)))


def rotated_bits(spec: RopeSpec) -> int:
    """Of the features that rotate: interleaved they are one run, else two halves."""
    return bits(spec, spec.rotary_dim if spec.interleaved else spec.rotary_dim // 2)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"d{d[0]}r{d[1]}")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_and_stores_are_as_wide_as_alignment_allows(
    compiler: concurrent.futures.Executor, dtype: str, style: str, dims: tuple[int, int], *, inplace: bool
) -> None:
    arguments = {"layout": "bshd", "dtype": dtype, "heads": 32, "head_dim": dims[0], "rotary_dim": dims[1]}
    arguments |= {"style": style, "inplace": inplace}
    spec = RopeSpec(**arguments)
    found = compiler.submit(compiling.widths, arguments, {}).result()
    allowed = {rotated_bits(spec)} | ({bits(spec, spec.rotary_dim, spec.head_dim)} if spec.copies_tail else set())
    assert set(found["STG"]) == allowed
    # What is stored was loaded, in the same pieces; angles are loaded besides.
    for width, stores in found["STG"].items():
        assert found["LDG"].get(width, 0) >= stores
    if (dims[1] // 2) * ITEM_SIZE[dtype] % 16 == 0:
        assert set(found["STG"]) == {128}


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_every_layout_moves_128_bits_at_a_time(compiler: concurrent.futures.Executor, layout: str, angles: str) -> None:
    arguments = {
        "layout": layout,
        "dtype": "bfloat16",
        "heads": 32,
        "head_dim": 128,
        "rotary_dim": 64,
        "angles": angles,
    }
    assert set(compiler.submit(compiling.widths, arguments, {}).result()["STG"]) == {128}


@pytest.mark.parametrize("dims", [(6, 2), (5, 4)], ids=lambda d: f"d{d[0]}r{d[1]}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_without_alignment_are_moved_an_element_at_a_time(
    compiler: concurrent.futures.Executor, dtype: str, dims: tuple[int, int]
) -> None:
    arguments = {"layout": "bshd", "dtype": dtype, "heads": 32, "head_dim": dims[0], "rotary_dim": dims[1]}
    assert set(compiler.submit(compiling.widths, arguments, {}).result()["STG"]) == {8 * ITEM_SIZE[dtype]}


def test_a_pointer_without_alignment_is_read_an_element_at_a_time(compiler: concurrent.futures.Executor) -> None:
    arguments = {"layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128}
    assert set(compiler.submit(compiling.widths, arguments, {}, 1).result()["STG"]) == {16}


# Programmatic dependent launch: an instruction that the interpreter has not ---------------------------------------------


def test_pdl_waits_before_it_reads(compiler: concurrent.futures.Executor) -> None:
    for name in (kernel_name(next(rope_specs()), RopeVariant()), PROBE_KERNEL):
        code = compiler.submit(compiling.code_with_pdl, name).result()
        waits = [line for line, text in enumerate(code) if "ACQBULK" in text]
        loads = [line for line, text in enumerate(code) if "LDG" in text]
        assert waits, f"{name} does not wait"
        assert waits[0] < loads[0], f"{name} reads before it waits"


def test_hidden_sizes_that_no_block_divides_compile(compiler: concurrent.futures.Executor) -> None:
    spec = GruCellSpec("float32", 65)
    assert compiler.submit(compiling.gru_needs, spec).result().spill_bytes == 0
