"""The kernels of a linear over segments, compared with NumPy's float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from generator.families.linear_cat.problems import problems
from generator.rendering.structures import structures
from generator.searching.pool import legal_pool
from tests.support import pairwise
from tests.support.linear_cat_forms import FORMS, assert_right
from tests.support.run import INTERPRETED, triton_calls_itself
from tuned.families.architecture import LEAST_SHARED, shared_limit
from tuned.families.choices import choices
from tuned.families.linear_cat.launches import kernel_name
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant, default_variant, rejection, stage_bytes
from tuned.families.products import DTYPES

pytestmark = pytest.mark.interpreter

SEGMENTS = ((70, 8), (33, 100), (5, 1, 64), (7, 130, 1, 3))


def spec_of(dtype: str, inputs: tuple[int, ...], outputs: int, **rest: Any) -> LinearCatSpec:
    precision = rest.pop("precision", "tf32")
    return LinearCatSpec(dtype, inputs, outputs, precision=precision if dtype == "float32" else "", **rest)


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", SEGMENTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_segments_of_any_width(form: str, inputs: tuple[int, ...], dtype: str) -> None:
    view = "wide" if len(inputs) % 2 else "contiguous"
    assert_right(spec_of(dtype, inputs, 37, bias=len(inputs) < 4), 5, FORMS[form], view)


@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (3, 20), (7, 100), (17, 257)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_takes_any_number_of_rows_and_outputs(form: str, rows: int, outputs: int) -> None:
    assert_right(spec_of("float32", (20, 3), outputs, precision="ieee"), rows, FORMS[form])


@pytest.mark.skipif(not INTERPRETED, reason="Triton has one version, and its compiler shows it to others")
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0+git1a2b3c4d"])
def test_the_warps_of_an_outer_form_may_be_at_either_end(version: str) -> None:
    """Triton's version chooses one, so what is installed never runs the other."""
    spec = spec_of("float32", (33, 20), 37, precision="ieee")
    with triton_calls_itself(version):
        assert_right(spec, 5, LinearCatVariant("outer", 4, 8, num_warps=4))


def test_every_emitted_kernel_is_among_those_tested() -> None:
    tested = {kernel_name(spec_of("float16", (70,), 1), variant) for variant in FORMS.values()}
    assert tested == {name for name in structures() if name.startswith("linear_cat_")}


# Every number, pairwise ---------------------------------------------------------------------------------------------


def axes_of(form: str) -> dict[str, tuple[Any, ...]]:
    """The knobs of a form."""
    declared = choices(LinearCatVariant)
    least, most = {"tile": (16, 128), "padded": (16, 64), "vector": (1, 8), "outer": (1, 16)}[form]
    rows = tuple(n for n in declared["block_rows"] if least <= n <= most)
    used = {"tile": ("block_k", "num_stages", "order"), "padded": ("block_k",), "vector": ("block_k",), "outer": ()}[
        form
    ]
    return {"form": (form,), "block_rows": rows, **{n: declared[n] for n in ("block_columns", *used, "num_warps")}}


def possible(knobs: dict[str, Any]) -> bool:
    """Whether the text can express it, a GPU has room for it, and it is small enough to interpret."""
    variant = LinearCatVariant(**knobs)
    if variant.form in ("tile", "padded"):  # plus a tenth for the sums; on a GPU these tests launch the variant
        needed = variant.num_stages * stage_bytes(spec_of("float16", (40, 8), 19), variant)
        if needed > 0.9 * shared_limit(90):
            return False
    if knobs["form"] == "vector":
        products = knobs["block_rows"] * knobs["block_columns"] * knobs["block_k"]
        return knobs["block_k"] >= 256 and products <= 2**13 * min(4, knobs["num_warps"])  # 256 elements a thread
    if variant.is_outer:
        return knobs["num_warps"] <= knobs["block_columns"] <= 32
    return knobs["block_columns"] >= 16 and knobs["block_k"] <= 512


NUMBERS = [k for form in FORMS for k in pairwise.covering(pairwise.product(axes_of(form), possible))]


@pytest.mark.thinned_on_gpu(every=7)
@pytest.mark.parametrize("knobs", NUMBERS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_every_choice_of_a_knob_computes_what_the_oracle_does(knobs: dict[str, Any]) -> None:
    # There is a second tile of columns, or of rows if the first has many columns; neither is full.
    outputs, rows = min(knobs["block_columns"] + 3, 20), min(knobs["block_rows"] + 1, 33)
    inputs = (39, 8) if knobs["form"] == "padded" else (40, 8)
    assert_right(spec_of("float16", inputs, outputs), rows, LinearCatVariant(**knobs))


def test_every_declared_choice_is_tested() -> None:
    for name, declared in choices(LinearCatVariant).items():
        # griddepcontrol is a Hopper instruction that the interpreter does not have: see the compile tests.
        interpretable = set(declared) - ({True} if name == "pdl" else set())
        assert {getattr(LinearCatVariant(**knobs), name) for knobs in NUMBERS} == interpretable, name


# Rules --------------------------------------------------------------------------------------------------------------


def test_the_default_is_legal_for_any_call_on_any_architecture() -> None:
    widths, sizes = ((1,), (64,), (3, 5), (256, 1024), (7, 7, 7, 4000)), (1, 3, 16, 17, 128, 1000, 100_000)
    for dtype, outputs, inputs, precision in itertools.product(
        DTYPES, (1, 20, 257, 10_000, 50_257), widths, ("ieee", "tf32")
    ):
        spec = spec_of(dtype, inputs, outputs, precision=precision)
        for size in (None, *map(LinearCatSize, sizes)):
            variant = default_variant(spec, size)
            for capability in (*LEAST_SHARED, 80, 90):
                assert rejection(spec, size, variant, capability) is None, (spec, size, variant, capability)


@pytest.mark.parametrize("problem", list(problems()), ids=lambda p: p.name)
def test_pools_are_neither_tiny_nor_endless_and_hold_the_default(problem: Any) -> None:
    pool = legal_pool(problem, 90).variants
    least = 10 if "grid" in problem.name else 50  # the smallest of the grid fill few programs, and have few ways
    assert least <= len(pool) <= 600
    assert default_variant(problem.spec, problem.size) in pool
