"""The kernels of a GRU step, compared with the oracle and with torch.nn.GRUCell."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from generator.families.gru_cell.problems import problems
from generator.families.gru_cell.texts import GRU_CELL_FORMS, gru_gates_specs
from generator.rendering.structures import structures
from generator.searching.pool import legal_pool
from tests.support import pairwise
from tests.support.gru_case import GruCase, assert_right, build, run_steps
from tests.support.gru_cell_forms import FORMS, LIBRARY, OUTER, PADDED, PADDED_LIBRARY, SPLIT, TILE, VECTOR
from tests.support.rope_case import assert_close
from tests.support.run import DEVICE, INTERPRETED, to_numpy, triton_calls_itself
from tuned.families.architecture import LEAST_SHARED, shared_limit
from tuned.families.choices import choices
from tuned.families.gru_cell.launches import GruCellCall, kernel_name, launches
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant, default_variant, fit, rejection, stage_bytes
from tuned.families.launch import Product
from tuned.families.products import DTYPES

pytestmark = pytest.mark.interpreter

SEGMENTS = ((70,), (33, 100), (5, 1, 64), (7, 130, 1, 3))


def spec_of(dtype: str, hidden: int, inputs: tuple[int, ...], **rest: Any) -> GruCellSpec:
    precision = rest.pop("precision", "tf32")
    return GruCellSpec(dtype, hidden, inputs, precision=precision if dtype == "float32" else "", **rest)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", SEGMENTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_segments_of_any_width(form: str, inputs: tuple[int, ...], dtype: str) -> None:
    view = "wide" if len(inputs) % 2 else "contiguous"
    assert_right(GruCase(spec_of(dtype, 19, inputs), batch=5, view=view), FORMS[form])


@pytest.mark.thinned_on_gpu(every=2)
@pytest.mark.parametrize(
    ("spec", "view", "dtype"),
    [
        tuple(row.values())
        for row in pairwise.covering(
            pairwise.product(
                {"spec": tuple(gru_gates_specs()), "view": ("contiguous", "wide", "transposed"), "dtype": DTYPES},
                lambda _: True,
            )
        )
    ],
    ids=lambda value: kernel_name(value, LIBRARY) if isinstance(value, GruCellSpec) else value,
)
def test_every_kernel_of_the_gates_follows_the_librarys_products(spec: GruCellSpec, view: str, dtype: str) -> None:
    small = spec_of(dtype, 70, (20, 3), bias=spec.bias, inplace=spec.inplace)
    assert_right(GruCase(small, batch=3, view=view), LIBRARY)


@pytest.mark.skipif(not INTERPRETED, reason="Triton has one version, and its compiler shows it to others")
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0+git1a2b3c4d"])
def test_the_warps_of_an_outer_form_may_be_at_either_end(version: str) -> None:
    """Triton's version chooses one, so what is installed never runs the other."""
    spec = spec_of("float32", 19, (33, 20), precision="ieee")
    with triton_calls_itself(version):
        assert_right(GruCase(spec, batch=5), GruCellVariant("outer", 4, 8, num_warps=4))


def test_every_emitted_kernel_is_among_those_tested() -> None:
    tested = {kernel_name(spec, LIBRARY) for spec in gru_gates_specs()}
    tested |= {kernel_name(spec_of("float16", 70, (70,)), FORMS[form]) for form in GRU_CELL_FORMS}
    assert tested == {name for name in structures() if name.startswith(("gru_cell_", "gru_gates_"))}


SIZES = [(1, 1), (20, 7), (100, 17), (192, 3), (257, 3), (384, 7), (600, 1), (896, 3)]  # hidden, batch


@pytest.mark.thinned_on_gpu(every=5)
@pytest.mark.parametrize(("hidden", "batch"), SIZES)
@pytest.mark.parametrize("form", GRU_CELL_FORMS)
def test_every_form_takes_any_hidden_size_and_batch(form: str, hidden: int, batch: int) -> None:
    dtype = "bfloat16" if hidden % 3 else "float32"
    tile = {
        # With many warps: with few, a GPU's compiler spills and takes 20 s.
        "split": dataclasses.replace(SPLIT, block_hidden=64, block_k=256, k_parts=4, num_warps=8),
        "tile": dataclasses.replace(TILE, block_hidden=64, schedule="joint", stacked=True),
        "padded": dataclasses.replace(PADDED, block_hidden=16, schedule="one"),
        "vector": dataclasses.replace(VECTOR, block_hidden=32, block_k=256, num_warps=8),
        "outer": dataclasses.replace(OUTER, block_hidden=16, num_warps=8),
    }
    spec = spec_of(dtype, hidden, (hidden // 2 + 1, 3), bias=hidden % 2 == 0)
    assert_right(GruCase(spec, batch), tile[form])


@pytest.mark.parametrize(("hidden", "inputs"), [(24, (5, 3)), (19, (16, 8)), (19, (72,)), (21, (1, 2, 3))], ids=str)
@pytest.mark.parametrize("schedule", ["two", "one", "joint"])
def test_only_rows_that_are_not_aligned_are_copied(hidden: int, inputs: tuple[int, ...], schedule: str) -> None:
    spec = spec_of("bfloat16", hidden, inputs)
    variant = dataclasses.replace(PADDED, schedule=schedule, stacked=schedule == "one")
    assert_right(GruCase(spec, batch=5), variant)
    call, _ = build(GruCase(spec, batch=5))
    main = launches(spec, variant, call)[-1]
    assert (main.arguments[0] is call.x0) == (inputs in ((16, 8), (72,)))
    assert (main.arguments[4] is call.h) == (hidden == 24)
    assert main.constants["ALIGN"] == 8


@pytest.mark.parametrize(("hidden", "inputs"), [(24, (5, 3)), (19, (16, 8)), (21, (1, 2, 3))], ids=str)
def test_the_library_multiplies_and_stores_only_aligned_rows(hidden: int, inputs: tuple[int, ...]) -> None:
    spec = spec_of("float16", hidden, inputs)
    assert_right(GruCase(spec, batch=5), PADDED_LIBRARY)
    call, _ = build(GruCase(spec, batch=5))
    products = [step for step in launches(spec, PADDED_LIBRARY, call) if isinstance(step, Product)]
    assert len(products) == 2
    assert all(t.stride() == (t.shape[1], 1) and t.shape[1] % 8 == 0 for p in products for t in (p.a, p.b, p.out))


def test_float32_products_may_be_ieee() -> None:
    spec = spec_of("float32", 20, (33, 40), precision="ieee")
    for variant in FORMS.values():
        assert_right(GruCase(spec, batch=5), variant)


def test_tf32_operands_are_rounded_to_nearest() -> None:
    # 1 + 2^-11 + 2^-23 lies above the middle between two TF32 numbers: it rounds to 1 + 2^-10; cut off it would be 1.
    spec = GruCellSpec("float32", 8, (16,), bias=False, precision="tf32")
    x, h = torch.zeros(1, 16), torch.zeros(1, 8)
    weight_ih = torch.zeros(24, 16)
    x[0, 0], weight_ih[:, 0] = 1 + 2.0**-11 + 2.0**-23, 0.5
    for variant in (SPLIT, TILE):
        tensors = [t.to(DEVICE) for t in (h, weight_ih, torch.zeros(24, 8), torch.empty(1, 8))]
        call = GruCellCall.of((x.to(DEVICE),), *tensors)
        run_steps(launches(spec, variant, call))
        rounded = torch.full((8,), 0.5 * (1 + 2.0**-10), dtype=torch.float64)
        want = torch.tanh(rounded) * (1 - torch.sigmoid(rounded))
        assert_close(to_numpy(call.out[0]), want.numpy(), np.full(8, 2.0**-21))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1], ids=hex)
@pytest.mark.parametrize("form", GRU_CELL_FORMS)
def test_nan_of_any_bits_stays_nan(form: str, bits: int) -> None:
    spec = spec_of("float32", 20, (20,))
    call, _ = build(GruCase(spec, batch=2))
    call.x0.view(torch.int32)[0, 3] = bits
    run_steps(launches(spec, FORMS[form], call))
    assert bool(call.out[0].isnan().all())
    assert not bool(call.out[1].isnan().any())


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("scale", [30.0, 1e3, 1e30], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gates_far_out_saturate_and_never_give_nan(form: str, scale: float) -> None:
    out = assert_right(GruCase(spec_of("float32", 19, (20,), precision="ieee"), batch=3, scale=scale), FORMS[form])
    assert not bool(out.isnan().any())


# Every number, pairwise ---------------------------------------------------------------------------------------------


def axes_of(form: str) -> dict[str, tuple[Any, ...]]:
    """The knobs of a form; knobs of compiling and launching, which change no result, with their existing choices."""
    declared = choices(GruCellVariant)
    used = {
        "split": ("block_k", "k_parts", "schedule", "num_stages", "num_warps"),
        "tile": ("block_k", "schedule", "stacked", "order", "num_warps"),
        "padded": ("block_k", "schedule", "num_warps"),
        "vector": ("block_k", "num_warps"),
        "outer": ("num_warps",),
        "library": ("num_warps",),
        "padded_library": ("num_warps",),
    }
    ranges = {
        "split": (16, 64, 8, 64),
        "tile": (64, 128, 8, 64),
        "padded": (64, 64, 8, 32),
        "vector": (1, 8, 2, 16),
        "outer": (1, 16, 2, 16),
    }
    ranges["library"] = ranges["padded_library"] = (1, 8, 64, 256)
    rows_from, rows_to, units_from, units_to = ranges[form]
    rows = tuple(n for n in declared["block_batch"] if rows_from <= n <= rows_to)
    units = tuple(n for n in declared["block_hidden"] if units_from <= n <= units_to)
    return {"form": (form,), "block_batch": rows, "block_hidden": units, **{n: declared[n] for n in used[form]}}


def possible(knobs: dict[str, Any]) -> bool:
    """Whether the text can express it, a GPU has room for it (however slow), and it is small enough to interpret."""
    if knobs["form"] in (
        "split",
        "tile",
        "padded",
    ):  # plus a tenth for the sums; on a GPU these tests launch the variant
        variant = GruCellVariant(**knobs)
        kept = variant.num_stages - int(variant.form == "split")
        if kept * stage_bytes(spec_of("float16", 19, (72, 8)), variant) > 0.9 * shared_limit(90):
            return False
    if knobs["form"] == "split":
        return knobs["k_parts"] > 1 and knobs["block_k"] // knobs["k_parts"] >= 16
    if knobs["form"] == "vector":
        products = knobs["block_batch"] * knobs["block_hidden"] * knobs["block_k"]
        return knobs["block_k"] >= 256 and products <= 2**13 * min(4, knobs["num_warps"])  # 256 elements a thread
    if knobs["form"] == "outer":
        return knobs["block_hidden"] >= knobs["num_warps"]
    return knobs["form"] not in ("tile", "padded") or knobs["block_k"] <= 512


NUMBERS = [
    {"k_parts": 1, **knobs} if form in ("tile", "padded") else knobs
    for form in FORMS
    for knobs in pairwise.covering(pairwise.product(axes_of(form), possible))
]


@pytest.mark.thinned_on_gpu(every=9)
@pytest.mark.parametrize("knobs", NUMBERS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_of_a_knob_computes_what_the_oracle_does(knobs: dict[str, Any]) -> None:
    # There is a second tile of units, or of rows if the first has many units; neither is full.
    hidden = min(knobs["block_hidden"] + 3, 20)
    batch = min(knobs["block_batch"] + 1, 33)
    assert_right(GruCase(spec_of("float16", hidden, (72, 8)), batch), GruCellVariant(**knobs))


def test_every_declared_choice_is_tested() -> None:
    for name, declared in choices(GruCellVariant).items():
        # griddepcontrol is a Hopper instruction that the interpreter does not have: see the compile tests.
        interpretable = set(declared) - ({True} if name == "pdl" else set())
        assert {getattr(GruCellVariant(**knobs), name) for knobs in NUMBERS} == interpretable, name


# Rules --------------------------------------------------------------------------------------------------------------


def test_the_default_is_legal_for_any_call_on_any_architecture() -> None:
    widths = ((1,), (64,), (3, 5), (256, 1024), (7, 7, 7, 4000))
    sizes = (1, 3, 16, 17, 128, 1000, 100_000)
    for dtype, hidden, inputs, inplace in itertools.product(DTYPES, (1, 20, 257, 4096), widths, (False, True)):
        for precision in ("ieee", "tf32"):
            spec = spec_of(dtype, hidden, inputs, inplace=inplace, precision=precision)
            for size in (None, *(GruCellSize(batch) for batch in sizes)):
                variant = default_variant(spec, size)
                for capability in (*LEAST_SHARED, 80, 90):
                    fitted = fit(variant, spec, capability)
                    assert rejection(spec, size, fitted, capability) is None, (spec, size, fitted, capability)


def test_only_the_librarys_form_writes_over_h() -> None:
    spec = spec_of("bfloat16", 1024, (1024,), inplace=True)
    fused = GruCellVariant("split", 32, 16, 256, num_stages=4)
    assert rejection(dataclasses.replace(spec, inplace=False), GruCellSize(64), fused) is None
    assert "other programs read it" in str(rejection(spec, GruCellSize(64), fused))
    assert default_variant(spec, GruCellSize(64)).form == "library"


def test_a_variant_needs_the_shared_memory_that_an_architecture_has() -> None:
    spec, size = spec_of("bfloat16", 1024, (1024,)), GruCellSize(64)
    large = GruCellVariant("split", 32, 16, 256, num_stages=4)
    assert rejection(spec, size, large, 90) is None
    assert "shared memory" in str(rejection(spec, size, large, 86))


@pytest.mark.parametrize("problem", list(problems())[:8:2], ids=lambda p: p.name)
def test_pools_are_neither_tiny_nor_endless_and_hold_the_default(problem: Any) -> None:
    pool = legal_pool(problem, 90).variants
    assert 25 <= len(pool) <= 650
    assert default_variant(problem.spec, problem.size) in pool


# PyTorch's cell -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_that_of_pytorchs_cell(form: str, *, bias: bool) -> None:
    torch.manual_seed(0)
    hidden, batch, inputs = 24, 3, 16
    cell = torch.nn.GRUCell(inputs, hidden, bias=bias, dtype=torch.float64)
    x, h = torch.randn(batch, inputs, dtype=torch.float64), torch.randn(batch, hidden, dtype=torch.float64)
    with torch.no_grad():
        want = cell(x, h)
    tensors = [x, h, cell.weight_ih, cell.weight_hh, torch.full_like(h, torch.nan)]
    tensors += [cell.bias_ih, cell.bias_hh] if bias else []
    given = [t.detach().to(DEVICE, torch.float32) for t in tensors]
    spec = spec_of("float32", hidden, (inputs,), bias=bias, precision="ieee")
    call = GruCellCall.of((given[0],), *given[1:])
    run_steps(launches(spec, FORMS[form], call))
    # Inputs were rounded to float32, by 2^-24 of values below 8: a chain has a few dozen such errors.
    assert_close(to_numpy(call.out), want.numpy(), np.full(want.shape, 64 * 2.0**-24))
