"""Kernels compile for every architecture, no two to one code, with accesses as wide as alignment allows: no GPU."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from generator.families.gru.texts import gru_texts
from generator.families.rope.texts import (
    angle_gradient_specs,
    append_specs,
    mla_specs,
    norm_specs,
    rope_specs,
    row_specs,
)
from generator.problem import Problem
from generator.processes.compiler import compile_variant, hopeless
from generator.rendering.structures import default_names, structures
from generator.searching.pool import legal_pool
from generator.workload import default_problems
from tests.support import compiling, pairwise
from tuned.families.copying import KERNEL as COPY
from tuned.families.gru.launches import kernel_name as gru_name
from tuned.families.gru.spec import LAYOUTS as GRU_LAYOUTS
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant, default_variant, fit, rejection
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.rope.launches import WEIGHTS, kernel_name
from tuned.families.rope.spec import ANGLES, ITEM_SIZE, STYLES, RopeSize, RopeSpec
from tuned.families.rope.variant import RopeVariant
from tuned.launching.launcher import PROBE_KERNEL

if TYPE_CHECKING:
    import concurrent.futures

pytestmark = pytest.mark.compiler

# Ampere, Ada, Blackwell (data centre and desktop) and AMD's CDNA 3, besides sm_90, for which every kernel is compiled.
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
PRODUCTS = [n for n in structures() if n.startswith(("gru_cell_", "linear_cat_"))]
GATES = [n for n in structures() if n.startswith("gru_gates_")]  # of the library's products: they multiply no matrix

RECURRENCES = [gru_name(*text) for text in gru_texts()]
GRADIENTS = [f"gru_{layout}_backward_split{cut}" for layout in GRU_LAYOUTS for cut in ("", "_resets")]
MAX_STRAY_SPILL = 16  # bytes a thread outside the loop of the steps: ptxas spills a word or two on some architectures


PLAIN = [
    {name: getattr(spec, name) for name in ("layout", "inplace", "style", "angles")}
    for spec in rope_specs()
    if spec.plain
]
PLAIN_ROWS = [axes for axes in PLAIN if axes["style"] == "half"]
WHOLE_ROWS = RopeVariant(whole_rows=True)
SHAPE = {"dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128}
NORMS = [
    {name: getattr(spec, name) for name in ("layout", "inplace", "direction", "style", "angles")}
    for spec in norm_specs()
]
CACHES = [{name: getattr(spec, name) for name in ("norm", "style", "angles")} for spec in append_specs()]
# For every architecture, every two values of text axes that can meet are compiled together in some kernel.
COVERING = [
    *(kernel_name(RopeSpec(**SHAPE, **axes), RopeVariant()) for axes in pairwise.covering(PLAIN)),
    *(kernel_name(spec, RopeVariant()) for spec in rope_specs() if not spec.plain),
    *(kernel_name(RopeSpec(**SHAPE, **axes), WHOLE_ROWS) for axes in pairwise.covering(PLAIN_ROWS)),
    *(kernel_name(spec, WHOLE_ROWS) for spec in row_specs() if not spec.plain),
    *(
        kernel_name(RopeSpec(**SHAPE, key_heads=8, norm="head", **axes), RopeVariant())
        for axes in pairwise.covering(NORMS)
    ),
    *(kernel_name(spec, RopeVariant()) for spec in mla_specs() if spec.angles == "cos_sin"),
    *(kernel_name(spec, RopeVariant()) for spec in angle_gradient_specs() if spec.angles == "freqs"),
    *(
        kernel_name(dataclasses.replace(next(append_specs()), **axes), RopeVariant())
        for axes in pairwise.covering(CACHES)
    ),
    WEIGHTS,
    PROBE_KERNEL,
    COPY,
    *GATES,
    *PRODUCTS,
    *RECURRENCES,
    *GRADIENTS,
]


# Matrix products compile in another way on each of these; other kernels compile alike: each is compiled for one.
PATHS = ("sm_80", "sm_100", "sm_120", "gfx942")
ROTATING = [name for name in COVERING if name not in {*PRODUCTS, *RECURRENCES, *GRADIENTS}]
CHOSEN = {"bias", "nobias", "copy", "inplace", "half", "interleaved", "freqs", "cos", "sin", "inv", "freq"}
STRUCTURES = ("layer_row", "layer_split", "layer_tile", "stack_split", "turns_split")
# Each layout and each structure of a recurrence on each path, and each text on one.
RECURRING = pairwise.covering(
    pairwise.product({"layout": GRU_LAYOUTS, "structure": STRUCTURES, "architecture": PATHS}, lambda _: True)
)


def kind(name: str) -> str:
    """The words of a kernel's name without the choices of its text."""
    return "_".join(word for word in name.split("_") if word not in CHOSEN)


def on_one_each(names: list[str]) -> list[tuple[str, str]]:
    """Each for the architecture that met fewest words of its name; one of each kind for AMD, the other compiler."""
    met: collections.Counter[tuple[str, str]] = collections.Counter()
    found = []
    for name in names:
        words = name.split("_")
        architecture = min(OTHERS, key=lambda o: (-sum(not met[w, o] for w in words), sum(met[w, o] for w in words)))
        met.update((word, architecture) for word in words)
        found.append((name, architecture))
    have = {kind(name) for name, architecture in found if architecture == "gfx942"}
    first = {kind(name): name for name in reversed(names)}
    return [*found, *((name, "gfx942") for which, name in first.items() if which not in have)]


ELSEWHERE = [
    *((name, architecture) for name in PRODUCTS for architecture in PATHS),
    *((f"gru_{row['layout']}_{row['structure']}", row["architecture"]) for row in RECURRING),
    *(
        (name, PATHS[at % 4])
        for at, name in enumerate(n for n in RECURRENCES if n.endswith("_resets") and "staged" not in n)
    ),
    *zip(
        (n for n in RECURRENCES if "staged" in n), ("sm_80", "sm_100", "sm_100", "sm_80"), strict=True
    ),  # the staged form has no room on other architectures
    *zip(GRADIENTS, ("sm_80", "sm_100", "sm_120", "gfx942", "gfx942", "sm_80"), strict=True),
    *on_one_each(ROTATING),
]


def test_the_sample_for_other_architectures_covers_every_text_axis() -> None:
    assert set(COVERING) <= set(structures())
    for axis, values in {"layout": 3, "inplace": 2, "style": 2, "angles": 2}.items():
        assert len({row[axis] for row in pairwise.covering(PLAIN)}) == values, axis
    assert {name for name, _ in ELSEWHERE} == set(COVERING)
    rotating = [(name, architecture) for name, architecture in ELSEWHERE if name in ROTATING]
    for word in ("copy", "inplace", "half", "interleaved", "freqs", "cos", "inv"):
        assert {architecture for name, architecture in rotating if word in name.split("_")} == set(OTHERS), word
    assert {kind(name) for name, architecture in rotating if architecture == "gfx942"} == set(map(kind, ROTATING))
    counts = collections.Counter(architecture for _, architecture in rotating)
    assert min(counts.values()) >= len(ROTATING) // 8


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("name", sorted(structures()))
def test_every_kernel_compiles_for_sm_90_without_a_spill(compiler: concurrent.futures.Executor, name: str) -> None:
    needs = compiler.submit(compiling.needs, name, "sm_90").result()
    assert 0 < needs.registers < 256
    assert needs.spill_bytes == 0


@pytest.mark.thinned_on_gpu(every=6)
@pytest.mark.parametrize(("name", "architecture"), ELSEWHERE)
def test_a_sample_compiles_for_every_other_architecture(
    compiler: concurrent.futures.Executor, name: str, architecture: str
) -> None:
    needs = compiler.submit(compiling.needs, name, architecture).result()
    assert 0 < needs.registers <= 512  # AMD counts vector registers, of which a thread may have 512
    # An untuned call never gets a loop over heads, and tuning drops variants that spill.
    stray = MAX_STRAY_SPILL if name in RECURRENCES else 0
    assert needs.spill_bytes <= stray or name not in default_names()


# A decoded key of Qwen2.5 1.5B has two heads and one token: small enough to compile all of its pool, with every knob
# but order and tail. Those need a batch and a partial rotation.
WHOLE = Problem("qwen2_1b_kv_decode", "rope", RopeSpec("bshd", "bfloat16", 2, 128, 128), RopeSize(batch=1, seq=1))
PARTS = 4  # so that two processes can share the work


@pytest.mark.thinned_on_gpu(every=2)
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

# Each of these kernels has accesses of other widths; together they have all.
OF_EVERY_WIDTH = (
    "rope_mla_half_cos_sin",
    "rope_norm_backward_half_freqs",
    "rope_norm_backward_interleaved_cos_sin",
    "gru_packed_backward_split_resets",
)


def test_accesses_are_those_that_the_disassembler_writes(compiler: concurrent.futures.Executor) -> None:
    """It takes a fifth of a second for each kernel, so the tests below read the bits of instructions themselves."""
    met: set[int] = set()
    for name in OF_EVERY_WIDTH:
        found, text = compiler.submit(compiling.accesses_and_instructions, name).result()
        written: dict[str, collections.Counter[int]] = {kind: collections.Counter() for kind in found}
        for line in text:
            if access := re.search(r"\b(LDGSTS|LDG|STG)\.E(\.[A-Z0-9.]+)?", line):
                moved = re.search(r"\.(?:U|S)?(8|16|64|128)\b", access[2] or "")
                written[access[1]][int(moved[1]) if moved else 32] += 1
        assert found == written
        met.update(*found.values())
    assert met == set(compiling.MOVED)


DIMS = (  # head_dim, rotary_dim
    (128, 128), (128, 64), (96, 48), (96, 24), (80, 20), (512, 512), (72, 72), (140, 140), (34, 34),
)  # fmt: skip


def bits(spec: RopeSpec, *lengths: int) -> int:
    """The widest access that may start and end at multiples of all these lengths, given in elements."""
    size = ITEM_SIZE[spec.dtype]
    if (
        spec.head_dim % 16
    ):  # Triton knows only whether a stride is a multiple of 16 elements; the kernel is told of other divisors
        lengths = (*lengths, spec.head_dim, 0 if spec.interleaved else spec.pair_distance)
    return 8 * min(16, math.gcd(16, *(size * length for length in lengths)))


def rotated_bits(spec: RopeSpec) -> int:
    """The widest access to the rotated features: interleaved they are one run, else two halves."""
    return bits(spec, spec.rotary_dim if spec.interleaved else spec.rotary_dim // 2)


WIDE = pairwise.covering(
    pairwise.product(
        {"dims": DIMS, "style": STYLES, "dtype": ("bfloat16", "float32"), "inplace": (False, True)}, lambda _: True
    )
)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("case", WIDE, ids=lambda c: "-".join(map(str, c.values())))
def test_loads_and_stores_are_as_wide_as_alignment_allows(
    compiler: concurrent.futures.Executor, case: dict[str, Any]
) -> None:
    dims, dtype = case["dims"], case["dtype"]
    arguments = {"layout": "bshd", "dtype": dtype, "heads": 32, "head_dim": dims[0], "rotary_dim": dims[1]}
    arguments |= {"style": case["style"], "inplace": case["inplace"]}
    spec = RopeSpec(**arguments)
    found = compiler.submit(compiling.widths, arguments, {"whole_rows": False}).result()
    allowed = {rotated_bits(spec)} | ({bits(spec, spec.rotary_dim, spec.head_dim)} if spec.copies_tail else set())
    assert set(found["STG"]) == allowed
    # What is stored was loaded in the same pieces; the angles are loaded in addition.
    for width, stores in found["STG"].items():
        assert found["LDG"].get(width, 0) >= stores
    if (dims[1] // 2) * ITEM_SIZE[dtype] % 16 == 0:
        assert set(found["STG"]) == {128}


@pytest.mark.thinned_on_gpu(every=3)
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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_a_norm_moves_128_bits_at_a_time(compiler: concurrent.futures.Executor, norm: str, direction: str) -> None:
    arguments = {
        "layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128, "angles": "cos_sin",
        "key_heads": 8, "norm": norm, "direction": direction,
    }  # fmt: skip
    found = compiler.submit(compiling.widths, arguments, {}).result()
    tensors = 2 if direction == "backward" else 1
    assert found["LDG"].get(128, 0) + found["LDGSTS"].get(128, 0) >= 2 * tensors  # both halves of the rows
    assert found["STG"][128] >= 2
    assert direction == "backward" or set(found["STG"]) == {128}  # the parts of the weights' gradients are one row each


@pytest.mark.parametrize("key_heads", [0, 8])
def test_the_gradient_of_a_norm_of_all_heads_waits_for_other_warps_once_a_token(
    compiler: concurrent.futures.Executor, key_heads: int
) -> None:
    arguments = {
        "layout": "bshd", "dtype": "bfloat16", "heads": 40, "head_dim": 128, "rotary_dim": 128, "angles": "cos_sin",
        "key_heads": key_heads, "norm": "all", "direction": "backward",
    }  # fmt: skip
    tile = {"block_tokens": 1, "block_heads": 8, "num_warps": 8}
    ptx = compiler.submit(compiling.rope_ptx, arguments, tile).result()
    loop = ptx[ptx.index("$L__BB0_2:") : ptx.index("bra \t$L__BB0_2;")]
    assert "cp.async" in loop
    # One barrier for a tile that has arrived; two for sums, which warps exchange.
    assert loop.count("bar.sync") == 3


# (heads of the query, of the key, head_dim, features that rotate, style) of a norm of all heads
CHUNKED = [(40, 8, 128, 128, "half"), (32, 32, 128, 64, "half"), (20, 4, 96, 96, "interleaved")]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("shape", CHUNKED)
def test_heads_in_chunks_leave_registers_for_other_programs(
    compiler: concurrent.futures.Executor, shape: tuple[int, int, int, int, str], direction: str
) -> None:
    """Of a forward, three programs of four warps have room and more; a gradient holds two tensors and its sums."""
    heads, key_heads, head_dim, rotary_dim, style = shape
    arguments = {
        "layout": "bshd", "dtype": "bfloat16", "heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim,
        "angles": "cos_sin", "key_heads": key_heads, "norm": "all", "direction": direction, "style": style,
    }  # fmt: skip
    chunk, needs = compiler.submit(compiling.rope_needs, arguments, "sm_90").result()
    assert 0 < chunk < heads + key_heads
    assert needs.spill_bytes == 0
    assert needs.registers <= (128 if direction == "forward" else 255)


@pytest.mark.parametrize("style", STYLES)
def test_the_gradient_of_angles_moves_128_bits_at_a_time(compiler: concurrent.futures.Executor, style: str) -> None:
    arguments = {
        "layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128, "key_heads": 8,
        "style": style, "direction": "backward", "angle_gradient": True,
    }  # fmt: skip
    found = compiler.submit(compiling.widths, arguments, {}).result()
    assert found["LDG"][128] >= 4  # both halves of the rows of the gradient and of the forward's input
    assert found["STG"][128] >= 2


@pytest.mark.parametrize(("dims", "norm"), [((80, 40), "head"), ((256, 64), "all")])
def test_the_gradient_of_packed_norms_compiles(
    compiler: concurrent.futures.Executor, norm: str, dims: tuple[int, int]
) -> None:
    """One warp, features that do not rotate, a search for sequences: Triton 3.6 fails if tiles come ahead as well."""
    arguments = {
        "layout": "thd", "dtype": "float32", "heads": 3, "head_dim": dims[0], "rotary_dim": dims[1], "angles": "cos_sin",
        "key_heads": 1, "norm": norm, "direction": "backward",
    }  # fmt: skip
    found = compiler.submit(compiling.widths, arguments, {"block_tokens": 1, "block_heads": 2, "num_warps": 1}).result()
    assert found["STG"]


@pytest.mark.parametrize("deinterleaves", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_key_and_value_of_mla_move_128_bits_at_a_time(
    compiler: concurrent.futures.Executor, direction: str, deinterleaves: bool
) -> None:
    arguments = {
        "layout": "sbhd", "dtype": "bfloat16", "heads": 128, "head_dim": 192, "rotary_dim": 64, "angles": "cos_sin",
        "rotated": "last", "value_dim": 128, "direction": direction, "deinterleaves": deinterleaves,
    }  # fmt: skip
    found = compiler.submit(compiling.widths, arguments, {"block_tokens": 1, "block_heads": 8, "num_warps": 2}).result()
    # Eight heads of 128 and 128 features on 64 threads make four accesses of 16 bytes each way; and the pairs.
    assert found["STG"][128] >= 4
    assert found["LDG"][128] >= 4
    narrow = {width: count for width, count in found["STG"].items() if width < 64}
    assert sum(narrow.values()) <= (2 if direction == "backward" else 0), "the shared head's gradient, once a token"


@pytest.mark.parametrize("cache", ["same", "float8"])
def test_a_cache_is_written_128_bits_at_a_time(compiler: concurrent.futures.Executor, cache: str) -> None:
    arguments = {
        "layout": "thd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128, "angles": "cos_sin",
        "key_heads": 8, "inplace": True, "positions": "ids", "cache": cache,
    }  # fmt: skip
    found = compiler.submit(compiling.widths, arguments, {}).result()
    assert found["LDG"][128] >= 2
    assert set(found["STG"]) == {128}


@pytest.mark.parametrize("dims", [(6, 2), (5, 4)], ids=lambda d: f"d{d[0]}r{d[1]}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_without_alignment_are_moved_an_element_at_a_time(
    compiler: concurrent.futures.Executor, dtype: str, dims: tuple[int, int]
) -> None:
    arguments = {"layout": "bshd", "dtype": dtype, "heads": 32, "head_dim": dims[0], "rotary_dim": dims[1]}
    pairs = {"whole_rows": False}
    assert set(compiler.submit(compiling.widths, arguments, pairs).result()["STG"]) == {8 * ITEM_SIZE[dtype]}


def test_a_pointer_without_alignment_is_read_an_element_at_a_time(compiler: concurrent.futures.Executor) -> None:
    arguments = {"layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128}
    assert set(compiler.submit(compiling.widths, arguments, {}, 1).result()["STG"]) == {16}


# Complete calls have separate pointers to query and key; each row takes one of them. Below are the other features that
# a call may have, several at once if one kernel has them: if one made accesses narrower, the test would fail.
CALLS: dict[str, dict[str, Any]] = {
    "backward-per-batch": {"direction": "backward", "angles": "cos_sin", "angles_per_batch": True},
    "shifted-low-precision": {"positions": "shifted", "angles": "cos_sin", "angle_dtype": "bfloat16"},
    "offset-scaled": {"positions": "offset", "scaled": True, "conjugate": True},
    "starts-inplace-one-key-head": {"positions": "starts", "inplace": True, "heads": 8, "key_heads": 1},
    "ids": {"positions": "ids", "layout": "thd", "angles": "cos_sin", "inplace": True},
    "packed-ranks": {"layout": "thd", "context_parallel": True, "positions": "starts"},
    "rates": {"angles": "inv_freq", "positions": "ids"},
    "last": {"rotary_dim": 64, "rotated": "last"},
    "last-interleaved-inplace": {"rotary_dim": 64, "rotated": "last", "style": "interleaved", "inplace": True},
    "proportional-copied-heads": {
        "rotary_dim": 32, "rotated": "proportional", "heads": 48, "key_heads": 0, "copied_heads": 8,
    },
    "proportional-inplace": {"rotary_dim": 32, "rotated": "proportional", "inplace": True},
    "heads-of-no-power-of-two": {"heads": 28, "key_heads": 4, "style": "interleaved"},
}  # fmt: skip


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize("name", CALLS)
def test_complete_calls_move_query_and_key_128_bits_at_a_time(compiler: concurrent.futures.Executor, name: str) -> None:
    whole = {"layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128, "key_heads": 8}
    arguments = {**whole, **CALLS[name]}
    spec = RopeSpec(**arguments)
    assert not spec.plain
    found = compiler.submit(compiling.widths, arguments, {}).result()
    assert set(found["STG"]) == {128}
    assert found["LDG"].get(128, 0) >= found["STG"][128]


def test_a_key_without_alignment_is_not_read_128_bits_at_a_time(compiler: concurrent.futures.Executor) -> None:
    # Otherwise the widths above would not show anything about the key.
    arguments = {"layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": 128, "rotary_dim": 128, "key_heads": 8}
    found = compiler.submit(compiling.widths, arguments, {}, 0, 1).result()
    assert set(found["STG"]) == {16}


CALL_DIMS = ((128, 64), (96, 24), (80, 20), (6, 2))  # head_dim, rotary_dim


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("rotated", ["first", "last"])
@pytest.mark.parametrize("dims", CALL_DIMS, ids=lambda d: f"d{d[0]}r{d[1]}")
def test_complete_calls_are_as_wide_as_alignment_allows(
    compiler: concurrent.futures.Executor, dims: tuple[int, int], rotated: str
) -> None:
    arguments = {"layout": "bshd", "dtype": "bfloat16", "heads": 32, "head_dim": dims[0], "rotary_dim": dims[1]}
    arguments |= {"key_heads": 8, "rotated": rotated}
    spec = RopeSpec(**arguments)
    found = compiler.submit(compiling.widths, arguments, {"whole_rows": False}).result()
    tail = dims[0] - dims[1]
    turned = bits(spec, dims[1] // 2, *([tail] if rotated == "last" else []))
    assert set(found["STG"]) == {turned, bits(spec, tail, *([dims[1]] if rotated == "first" else []))}


ROWS = {  # head_dim, rotary_dim, dtype; the contiguous bits of a row, and of its halves
    "d18": (18, 18, "bfloat16", 32, 16),
    "d36": (36, 36, "bfloat16", 64, 32),
    "d34r2": (34, 2, "bfloat16", 32, 16),
    "d20": (20, 20, "float32", 128, 64),
}


@pytest.mark.parametrize("key_heads", [0, 8])
@pytest.mark.parametrize("name", ROWS)
def test_whole_rows_are_stored_as_wide_as_the_row_allows_and_not_its_halves(
    compiler: concurrent.futures.Executor, name: str, key_heads: int
) -> None:
    head_dim, rotary_dim, dtype, of_row, of_half = ROWS[name]
    arguments = {"layout": "bshd", "dtype": dtype, "heads": 9, "head_dim": head_dim, "rotary_dim": rotary_dim}
    arguments |= {"key_heads": key_heads}
    for whole, bits_at_once in ((True, of_row), (False, of_half)):
        tile = {"block_tokens": 2, "block_heads": 8, "num_warps": 1, "whole_rows": whole}
        stored = compiler.submit(compiling.widths, arguments, tile).result()["STG"]
        assert min(stored) == bits_at_once, whole
        assert set(stored) == {of_row} or not whole


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("key_heads", [0, 8])
def test_whole_rows_in_place_are_read_by_all_threads_before_one_writes(
    compiler: concurrent.futures.Executor, key_heads: int, warps: int
) -> None:
    # The interpreter reads a whole tile before it writes any of it, so it cannot test this.
    arguments = {"layout": "bshd", "dtype": "bfloat16", "heads": 16, "head_dim": 18, "rotary_dim": 18}
    arguments |= {"key_heads": key_heads}
    tile = {"block_tokens": 4, "block_heads": 16, "num_warps": warps, "whole_rows": True}
    found = []
    for inplace in (False, True):
        lines = compiler.submit(compiling.rope_ptx, {**arguments, "inplace": inplace}, tile).result().splitlines()
        last = max(at for at, line in enumerate(lines) if "ld.global" in line and ".b16" in line)
        first = min(at for at, line in enumerate(lines) if "st.global" in line)
        assert last < first
        found.append(sum("bar.sync" in line for line in lines[last:first]))
    copied, in_place = found  # both may wait for angles that other threads hold
    assert in_place == copied + 1


# Programmatic dependent launch: its instruction is not in the interpreter ----------------------------------------


def test_pdl_waits_before_it_reads(compiler: concurrent.futures.Executor) -> None:
    specs = list(rope_specs())
    rope = [kernel_name(spec, RopeVariant()) for spec in (specs[0], specs[-1])]
    for name in (*rope, PROBE_KERNEL, "gru_cell_split", "linear_cat_vector"):
        code = compiler.submit(compiling.code_with_pdl, name).result()
        waits = [line for line, text in enumerate(code) if "ACQBULK" in text]
        loads = [line for line, text in enumerate(code) if "LDG" in text]
        assert waits, f"{name} does not wait"
        assert waits[0] < loads[0], f"{name} reads before it waits"


# Steps of a GRU: weights and states that are loaded ahead -----------------------------------------------------------


def kernel_id(spec: GruCellSpec) -> str:
    return f"{spec.dtype}{spec.precision}-{spec.hidden}-{'x'.join(map(str, spec.inputs))}"


def cell(dtype: str, hidden: int, *inputs: int, precision: str = "tf32") -> GruCellSpec:
    return GruCellSpec(dtype, hidden, inputs, precision=precision if dtype == "float32" else "")


# Widths that no block divides, whose elements are loaded one at a time; many rows; long rows, of which each takes seconds. With an
# input as long as its state, the one of float32 needs as many registers and three times as long.
CELLS = [
    (cell("bfloat16", 65, 33, 100), 1),
    (cell("bfloat16", 65, 33, 100), 16),
    (cell("float32", 4096, 256, precision="ieee"), 1),
    (cell("bfloat16", 65, 33, 100), 300),
    (cell("float32", 65, 33, 100), 2),
    (cell("bfloat16", 4096, 4096), 1),
    (cell("float32", 65, 33, 100), 300),
    (cell("float32", 1000, 333, 77), 32),
    (cell("bfloat16", 1024, 256, 1024), 32),
    (cell("bfloat16", 1024, 256, 1024), 128),
    (cell("bfloat16", 257, 300), 1000),
]


# All are compiled for Hopper, and two of three for one other architecture each.
CELLS_ON = [
    (spec, batch, architecture)
    for index, (spec, batch) in enumerate(CELLS)
    for architecture in ("sm_90", *(("sm_80",), ("sm_100",), ())[index % 3])
]


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize(
    ("spec", "batch", "architecture"),
    CELLS_ON,
    ids=lambda v: kernel_id(v) if isinstance(v, GruCellSpec) else str(v),
)
def test_the_default_of_a_step_compiles_whatever_its_sizes(
    compiler: concurrent.futures.Executor, spec: GruCellSpec, batch: int, architecture: str
) -> None:
    size = GruCellSize(batch)
    variant = fit(default_variant(spec, size), spec, int(architecture.removeprefix("sm_")))
    problem = Problem("any sizes", "gru_cell", spec, size)
    needs = compiler.submit(compile_variant, problem, variant, architecture).result()
    assert hopeless(needs, int(architecture.removeprefix("sm_"))) is None


def _pool(name: str, **knobs: Any) -> list[tuple[Problem, Any]]:
    """A variant for each tile, number of stages and order of loops of a problem's pool, among those with these knobs."""
    (problem,) = (p for p in default_problems() if p.name == name)
    found: dict[Any, tuple[Problem, Any]] = {}
    for v in legal_pool(problem, 90).variants:
        if all(getattr(v, knob) == value for knob, value in knobs.items()):
            told = v.block_hidden, v.num_stages, v.schedule
            found.setdefault(told, (problem, v))
    return list(found.values())


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("stacked", [False, True])
def test_what_a_warpgroup_still_reads_is_not_overwritten(
    compiler: concurrent.futures.Executor, *, stacked: bool
) -> None:
    """All operands of a product in progress have equally many buffers. With one too few, results were wrong at times."""
    found = _pool("gru_cell_grid_bf16_200x384", form="tile", stacked=stacked, block_batch=64, block_k=64)
    products = 0
    for problem, variant in found[:: max(1, len(found) // 6)]:
        for operands in compiler.submit(compiling.buffers_of_products, problem, variant).result():
            assert len(set(operands)) == 1, variant
            products += 1
    assert products, "none was seen to be under way"


def test_two_products_of_other_hardware_are_not_legal_together() -> None:
    spec = GruCellSpec("bfloat16", 384, (384,))
    of_16, of_8 = (
        GruCellVariant("tile", 64, units, 64, k_parts=1, num_stages=6, schedule="two", stacked=True)
        for units in (16, 8)
    )
    assert rejection(spec, None, of_16) is None
    assert "overwrite what a warpgroup still reads" in str(rejection(spec, None, of_8))
    assert rejection(spec, None, of_8, 80) is None, "warps multiply both"


# 16 bytes are 8 elements, which divide 600. Triton looks only for multiples of 16 elements by itself.
@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize("hidden", [600, 1024])
@pytest.mark.parametrize("schedule", ["two", "one", "joint"])
def test_operands_come_16_bytes_at_a_time_while_others_are_multiplied(
    compiler: concurrent.futures.Executor, schedule: str, hidden: int
) -> None:
    spec = GruCellSpec("bfloat16", hidden, (hidden,))
    variant = GruCellVariant("split", 16, 16, 256, num_stages=3, schedule=schedule)
    needs, ptx = compiler.submit(compiling.cell_code, spec, variant, 16).result()
    assert "cp.async.cg.shared.global" in ptx
    assert "cp.async.ca" not in ptx
    assert needs.spill_bytes == 0


def test_64_rows_are_multiplied_by_the_instructions_of_a_warp_group(compiler: concurrent.futures.Executor) -> None:
    spec = GruCellSpec("bfloat16", 1024, (1024,))
    variant = GruCellVariant("tile", 64, 32, 64, k_parts=1, schedule="joint", stacked=True)
    _, ptx = compiler.submit(compiling.cell_code, spec, variant, 256).result()
    assert "wgmma.mma_async" in ptx


@pytest.mark.parametrize("steps", [1, 4])
def test_a_vector_step_exchanges_nothing_between_warps_but_its_results(
    compiler: concurrent.futures.Executor, steps: int
) -> None:
    spec = GruCellSpec("bfloat16", 1024, (1024,))
    _, ptx = compiler.submit(compiling.cell_code, spec, GruCellVariant("vector", 1, 4, steps * 256), 1).result()
    # Three gates of x and of h, 1024 / 256 steps; and the loads of x and h themselves.
    assert ptx.count("ld.global.v4") == 2 * 4 * 4
    # Triton 3.6 gives the steps of a block to different warps, and adds them up through shared memory: no default has
    # several steps, and neither has a winner on the H200.
    crosses = steps > 1 and compiling.TRITON < (3, 7)
    assert (ptx.count("bar.sync") > 1) == crosses, "sums that cross warps are several times slower"


def test_rows_of_a_vector_step_are_exchanged_by_triton_3_6(compiler: concurrent.futures.Executor) -> None:
    """It gives the rows of the input to different warps; form "outer" has its warps where each Triton puts them."""
    spec = GruCellSpec("bfloat16", 384, (640,))
    _, ptx = compiler.submit(compiling.cell_code, spec, GruCellVariant("vector", 2, 4, 256), 8).result()
    assert (ptx.count("bar.sync") > 1) == (compiling.TRITON < (3, 7))


@pytest.mark.parametrize("width", [640, 641], ids=["one input is aligned", "none is aligned"])
@pytest.mark.parametrize("family", ["gru_cell", "linear_cat"])
def test_threads_of_an_outer_form_exchange_nothing_but_results(
    compiler: concurrent.futures.Executor, family: str, width: int
) -> None:
    """Triton would see that 16 divides one stride, load that input in wider pieces, and exchange them in each block."""
    cell = Problem("", "gru_cell", GruCellSpec("float32", 385, (width,), precision="ieee"), GruCellSize(30))
    line = LinearCatSpec("float32", (width, 45), 385, precision="ieee")
    problem, variant = {
        "gru_cell": (cell, GruCellVariant("outer", 8, 8)),
        "linear_cat": (Problem("", "linear_cat", line, LinearCatSize(30)), LinearCatVariant("outer", 8, 8)),
    }[family]
    ptx = compiler.submit(compiling.ptx_of, problem, variant).result()
    assert ptx.count("bar.sync") <= 2, "for the results, once their sums are complete"


@pytest.mark.parametrize("schedule", ["two", "one", "joint", None], ids=lambda s: s or "linear_cat")
def test_padded_rows_are_loaded_asynchronously(compiler: concurrent.futures.Executor, schedule: str | None) -> None:
    """Tensor cores wait for rows that are not aligned: those are loaded two bytes at a time, and no such load is asynchronous."""
    line = Problem("", "linear_cat", LinearCatSpec("bfloat16", (601, 300), 450), LinearCatSize(180))
    cell = Problem("", "gru_cell", GruCellSpec("bfloat16", 675, (675,)), GruCellSize(180))
    problem, variant = (
        (line, LinearCatVariant("padded", 64, 32, 64))
        if schedule is None
        else (cell, GruCellVariant("padded", 64, 16, 64, k_parts=1, num_stages=3, schedule=schedule))
    )
    padded, given = (
        compiler.submit(compiling.ptx_of, problem, one).result()
        for one in (variant, dataclasses.replace(variant, form="tile"))
    )
    # 64 rows of 64 elements are 8 KB, 16 bytes for each of 128 threads in 4 loads; and those of the weights.
    assert padded.count("cp.async.cg") >= 2 * 4
    assert "cp.async.c" not in given


# Recurrences: launches of many steps --------------------------------------------------------------------------------


# All texts were compiled above with "spin"; here each structure waits in the other ways too, for one layout in turn.
EXCHANGES = {
    "spin": ("max.u16x2", "ld.relaxed.gpu"),
    "poll": ("ld.volatile.global",),
    "counter": ("acquire", "release"),
}
WAITING_RECURRENCES = [name for name in RECURRENCES if "_row" not in name]
KINDS_OF_WAITING = sorted({name.removeprefix("gru_").partition("_")[2] for name in WAITING_RECURRENCES})
WAITING = [
    *((name, "spin") for name in WAITING_RECURRENCES),
    *(
        (there[(at + shift) % len(there)], exchange)
        for at, structure in enumerate(KINDS_OF_WAITING)
        for there in [[name for name in WAITING_RECURRENCES if name.endswith(f"_{structure}")]]
        for shift, exchange in enumerate(("poll", "counter"))
    ),
]


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize(("name", "exchange"), WAITING)
def test_a_whole_sequence_runs_all_programs_at_once_and_waits(
    compiler: concurrent.futures.Executor, name: str, exchange: str
) -> None:
    ptx, spill_bytes, cooperative = compiler.submit(compiling.waiting_code, name, exchange).result()
    assert cooperative, "its programs wait for each other"
    assert spill_bytes == 0
    # The acquire of a counter is removed where its result is not used.
    for word in EXCHANGES[exchange]:
        assert word in ptx


def test_a_launch_a_step_is_compiled_once_for_all_steps_and_sets(compiler: concurrent.futures.Executor) -> None:
    compiled, thunks = compiler.submit(compiling.staged_steps, "steps").result()
    assert compiled == 1
    assert thunks == [[(step, step + 1) for step in range(6)]] * 3, "the probe and two sets"
    compiled, thunks = compiler.submit(compiling.staged_steps, "persistent").result()
    assert (compiled, thunks) == (1, [[(0, 6)]] * 3)
