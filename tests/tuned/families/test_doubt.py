"""For which shapes a row's time says something: for few in CUDA graphs; in calls for all that take the host longer."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tuned.calls.gru import project
from tuned.calls.gru_cell import run as cell
from tuned.calls.linear_cat import run as linear
from tuned.families.gru_cell import variant as cells
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat import variant as products
from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec
from tuned.families.products import CALLED_FAST, CALLED_PRODUCTS, CALLED_ROWS, FAR, slow_loads
from tuned.lookup import lookup
from tuned.lookup.lookup import Gpu
from tuned.lookup.misses import Moments
from tuned.lookup.table import tables

ROW = GruCellSpec("bfloat16", 512, (512,))
CELL = cell.MOMENTS
H200 = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
H100 = Gpu("nvidia_h100_80gb_hbm3", 90, 132, "NVIDIA H100 80GB HBM3")


def doubts(spec: Any, rows: int, octaves: float = 1.0, row: Any = ROW) -> list[str | None]:
    """The doubts of a call, and of a CUDA graph."""
    size = GruCellSize(rows) if isinstance(spec, GruCellSpec) else LinearCatSize(rows)
    return [family.doubt(row, spec, size, octaves) for family in CELL._families if family.doubt is not None]


def test_a_row_speaks_for_shapes_like_its_own() -> None:
    like = dataclasses.replace(ROW, hidden=768, inputs=(384,), dtype="float16")
    assert doubts(like, 4000) == [None, None]
    assert doubts(like, 4000, FAR) == [None, None]
    assert all("are far" in (said or "") for said in doubts(like, 4000, FAR + 0.1))
    for spec in (GruCellSpec("float32", 512, (512,), precision=precision) for precision in ("ieee", "tf32")):
        assert all("precision" in (said or "") for said in doubts(spec, 1)), "as a call too"


def test_rows_that_are_not_aligned_are_spoken_for_by_such_rows() -> None:
    for spec in (dataclasses.replace(ROW, hidden=500), dataclasses.replace(ROW, inputs=(512, 3))):
        assert all("16 bytes" in (said or "") for said in doubts(spec, 4000))
        assert doubts(spec, 4000, row=dataclasses.replace(ROW, hidden=200, inputs=(201,))) == [None, None]
        assert doubts(spec, 2) == [None, None], "of two rows loads are few"
    assert doubts(dataclasses.replace(ROW, hidden=100, inputs=(100,)), 4000) == [None, None]


def test_many_results_of_rows_that_are_not_aligned_are_left_to_pytorch_in_graphs() -> None:
    """``benchmarks.random_steps``, seed 57638275: a kernel took 6.76 us in a graph, PyTorch's operators 5.24; as calls 17.6 and 41.6."""
    spec, aligned = LinearCatSpec("bfloat16", (27, 45), 6010), LinearCatSpec("bfloat16", (256, 128), 6144)
    called, captured = (
        family.doubt(aligned, spec, LinearCatSize(2), 3.4) for family in linear.MOMENTS._families if family.doubt
    )
    assert called is None
    assert "an element at a time" in captured
    for few in (dataclasses.replace(spec, outputs=5200), dataclasses.replace(spec, inputs=(24, 48))):
        assert products.doubt(aligned, few, LinearCatSize(2), 3.4) is None


def test_no_linear_that_kernels_serve_in_a_graph_was_slower_in_any_random_run() -> None:
    runs = Path(lookup.__file__).parents[2] / "benchmarks" / "results" / "random"
    ratios = []
    for run in sorted(runs.glob("nvidia_h200-steps-*.json")):
        for row in json.loads(run.read_text())["rows"]:
            if row["kind"] != "linear" or row["rule"] == "eager" or "ours_graph_us" not in row:
                continue
            precision = "ieee" if row["dtype"] == "float32" else ""
            spec = LinearCatSpec(row["dtype"], tuple(row["inputs"]), row["outputs"], precision=precision)
            found = lookup.choose(linear.MOMENTS._families[-1], spec, LinearCatSize(row["rows"]), H200)
            if (
                found.variant is None or found.variant.form == "outer"
            ):  # other kernels served the latter when the run was made
                continue
            if found.row is None or not slow_loads(found.row.spec):
                ratios.append(row["theirs_graph_us"] / row["ours_graph_us"])
    assert len(ratios) > 80
    assert min(ratios) > 1.1


def test_many_weights_are_not_left_to_what_is_best_for_one_row() -> None:
    """``benchmarks.random_steps``, seed 57638275: 7 rows took 13.6 us in a graph by the variant of one row, PyTorch's operators 11.4."""
    one, spec = LinearCatSpec("bfloat16", (1024, 512), 6144), LinearCatSpec("bfloat16", (392, 608), 5430)
    apart = products.distance(one, spec)
    assert "for each row" in (products.doubt(one, spec, LinearCatSize(7), apart + math.log2(7)) or "")
    assert products.doubt(one, spec, LinearCatSize(4), apart + 2) is None
    of_one, few = (dataclasses.replace(spec, outputs=1024) for spec in (one, spec))
    assert products.doubt(of_one, few, LinearCatSize(7), products.distance(of_one, few) + math.log2(7)) is None
    assert lookup.choose(linear.MOMENTS._families[-1], spec, LinearCatSize(7), H200).variant is None


def test_a_small_call_is_the_hosts_time() -> None:
    spec = GruCellSpec("bfloat16", 1001, (1001,))
    most = CALLED_PRODUCTS // spec.weights
    called, captured = doubts(spec, most, 9.0)
    assert called is None
    assert captured is not None
    assert None not in doubts(spec, most + 1, 9.0)


def test_in_float32_few_rows_are_the_hosts_time() -> None:
    """With more rows, products without tensor cores count: deep ones took up to 220 us where PyTorch took 51."""
    row = LinearCatSpec("float32", (256, 128), 96, precision="ieee")
    spec = dataclasses.replace(row, inputs=(447, 688, 34), outputs=16)
    called, captured = (family for family in linear.MOMENTS._families)
    assert called.doubt is not None
    assert captured.doubt is not None
    assert called.doubt(row, spec, LinearCatSize(CALLED_ROWS), 9.0) is None
    assert called.doubt(row, spec, LinearCatSize(CALLED_ROWS + 1), 9.0) == captured.doubt(
        row, spec, LinearCatSize(5), 9.0
    )
    half = LinearCatSpec("bfloat16", (512, 512), 96)
    assert called.doubt(half, dataclasses.replace(half, inputs=(447, 688, 34)), LinearCatSize(64), 9.0) is None


def test_what_pytorchs_own_takes_of_a_small_call_is_the_hosts_time_at_least() -> None:
    """A row's time is that of the device; if the device is done before the host is, a call takes the host's time."""
    spec = LinearCatSpec("bfloat16", (256, 128), 768)
    slower = {
        moment: [f.least_us for f in MOMENTS._families] for moment, MOMENTS in (("l", linear.MOMENTS), ("c", CELL))
    }
    for called, captured in slower.values():
        assert captured is None
        assert called is not None
    called = slower["l"][0]
    assert called(spec, LinearCatSize(24)) == linear.HOST_US
    single = dataclasses.replace(spec, dtype="float32", precision="ieee")
    for one, most in ((spec, CALLED_FAST), (single, CALLED_PRODUCTS)):
        assert called(one, LinearCatSize(most // spec.weights)) == linear.HOST_US
        assert called(one, LinearCatSize(most // spec.weights + 1)) == 0
    assert [called(single, LinearCatSize(rows)) for rows in (CALLED_ROWS, CALLED_ROWS + 1)] == 2 * [linear.HOST_US]
    row = next(r for r in tables()["nvidia_h200"].rows["linear_cat"] if r.spec == spec and r.size == LinearCatSize(24))
    quick, unknown = (dataclasses.replace(row, median_us=9.0, eager_us=us) for us in (8.0, 0.0))
    for family, theirs in zip(linear.MOMENTS._families, (linear.HOST_US, 8.0), strict=True):
        assert lookup._theirs_us(family, quick, spec, row.size) == theirs
        assert lookup._theirs_us(family, unknown, spec, row.size) == 0, "what is not known is not less than a kernel's"


def test_in_place_and_of_one_segment_a_kernel_does_what_pytorchs_own_cannot() -> None:
    assert doubts(dataclasses.replace(ROW, hidden=501, inplace=True), 4000, 9.0) == [None, None]
    spec, row = LinearCatSpec("float32", (501,), 7, precision="tf32"), LinearCatSpec("bfloat16", (512,), 512)
    found = [f.doubt(row, spec, LinearCatSize(4000), 9.0) for f in linear.MOMENTS._families if f.doubt is not None]
    assert found == [None, None]


@pytest.mark.parametrize("moments", [cell.MOMENTS, linear.MOMENTS], ids=["cell", "linear"])
def test_measured_problems_get_the_same_kernel_at_both_moments(moments: Moments) -> None:
    name = moments._families[0].name
    for row in tables()["nvidia_h200"].rows[name]:
        (called, always), (captured, _) = (
            moments.variant_of(row.spec, row.size, H200, moment) for moment in (False, True)
        )
        assert captured == (row.variant if not 0 < row.eager_us < row.median_us else None)
        assert always is (called == captured)
        spent = name == "gru_cell" and cells.spends(row.spec, row.size, row.variant) is not None
        assert called in ((None,) if spent else (captured, row.variant)), (
            "of what the host takes longer for, the kernel"
        )


def test_no_call_waits_for_more_launches_than_pytorchs_own() -> None:
    """Seven random steps of two library products and a kernel had 0.87 to 0.94 of PyTorch's speed, in graphs 1.0."""
    for rows, inputs, hidden in ((1012, 48, 99), (773, 49, 108), (543, 94, 104), (458, 57, 120)):
        spec = GruCellSpec("float32", hidden, (inputs,), precision="ieee")
        found = CELL.choice_of(spec, GruCellSize(rows), H100, captured=False)
        assert (found.rule, found.variant) == ("eager", None), rows
        assert "longer than PyTorch's own" in found.why
    library = cells.gates_variant(768)
    large = GruCellSpec("float32", 768, (768,), precision="ieee")
    half = GruCellSpec("bfloat16", 768, (768,))
    reasons = [cells.spends(spec, GruCellSize(rows), library) for spec in (large, half) for rows in (400, 800, 8000)]
    assert [reason is None for reason in reasons] == [False, True, True, False, False, True], "the device's time alone"
    assert cells.spends(dataclasses.replace(half, inplace=True), GruCellSize(64), library) is None, (
        "PyTorch's copies too"
    )
    assert cells.spends(half, GruCellSize(64), GruCellVariant()) is None, "one launch"
    assert CELL._families[True].spends is None, "in a graph launches cost the host nothing"


def test_without_tensor_cores_a_small_lead_serves_no_larger_step() -> None:
    """By rows that led by 1.22, 5 of 9 random steps of as many products took up to 1.05 of PyTorch's time in graphs."""
    for rows, inputs, hidden in ((56, 96, 216), (229, 99, 66)):
        spec = GruCellSpec("float32", hidden, (inputs,), precision="ieee")
        assert CELL.choice_of(spec, GruCellSize(rows), H100, captured=True).rule == "eager", rows
    for rows, inputs, hidden in (
        (189, 53, 112),
        (277, 82, 83),
    ):  # by another kernel, whose rows of an H200 lead by more
        spec = GruCellSpec("float32", hidden, (inputs,), precision="ieee")
        found = CELL.choice_of(spec, GruCellSize(rows), H100, captured=True)
        assert found.variant.form == "outer", rows
        assert found.row.eager_us > 2 * found.row.median_us
    for rows, inputs, hidden in ((172, 86, 62), (209, 97, 33), (9, 86, 104), (221, 34, 87)):
        spec = GruCellSpec("float32", hidden, (inputs,), precision="ieee")
        assert CELL.choice_of(spec, GruCellSize(rows), H100, captured=True).variant is not None, rows


def test_what_only_calls_win_by_is_left_to_pytorch_in_a_graph() -> None:
    spec, size = GruCellSpec("bfloat16", 445, (120,)), GruCellSize(16)
    called, captured = (CELL.variant_of(spec, size, H200, moment) for moment in (False, True))
    assert called[0] is not None
    assert captured == (None, False)
    assert called[1] is False
    assert CELL.choice_of(spec, size, H200, captured=True).rule == "eager"
    assert CELL.choice_of(spec, size, H200, captured=False).variant == called[0]


def test_a_default_serves_calls_alone_where_no_variant_of_a_near_row_fits() -> None:
    """108 rows of 152 to 794 by a kernel that nobody measured took 11 us in a graph, PyTorch 7; as calls they took 13 and 27."""
    spec = LinearCatSpec("float32", (2197, 3), 30, precision="ieee")  # more blocks of K than form "outer" writes out
    called, captured = (linear.MOMENTS.choice_of(spec, LinearCatSize(108), H200, now) for now in (False, True))
    assert called.rule == "portfolio"
    assert (captured.rule, captured.variant) == ("eager", None)
    assert "no variant of a row that is near fits" in captured.why


def test_a_large_call_that_no_variant_of_a_near_row_fits_is_left_to_pytorch() -> None:
    """153 rows took 82 us by a kernel that nobody measured, where PyTorch took 17.5 and a slow host 48."""
    spec = LinearCatSpec("float32", (193, 42), 4671, precision="ieee")
    for now in (False, True):
        assert linear.MOMENTS.choice_of(spec, LinearCatSize(153), H200, now).rule == "eager"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(("features", "outputs", "rows"), [(24, 15, 28), (5, 15, 28), (132, 794, 108), (1, 3, 1)])
def test_a_grus_products_have_a_kernel_at_any_moment(features: int, outputs: int, rows: int, precision: str) -> None:
    """PyTorch's operator would multiply in the precision that is set for other GEMMs."""
    spec = LinearCatSpec("float32", (features,), outputs, bias=False, precision=precision)
    for now in (False, True):
        assert linear.MOMENTS.choice_of(spec, LinearCatSize(rows), H200, now).variant is not None
    assert project._projection(spec, LinearCatSize(rows), H200) is not None


@pytest.mark.parametrize(("features", "outputs", "rows"), [(1536, 768, 24), (1400, 800, 30), (1024, 100, 24)])
def test_a_grus_products_have_a_kernel_where_a_row_says_that_it_is_slower(
    features: int, outputs: int, rows: int
) -> None:
    """With ``torch.backends.cuda.matmul.allow_tf32`` PyTorch would multiply a GRU's IEEE products in TensorFloat-32."""
    spec = LinearCatSpec("float32", (features,), outputs, bias=False, precision="ieee")
    assert linear.MOMENTS.choice_of(spec, LinearCatSize(rows), H100, captured=True).rule == "eager"
    variant = project._projection(spec, LinearCatSize(rows), H100)
    assert products.rejection(spec, LinearCatSize(rows), variant) is None


def test_such_a_product_is_launched_and_not_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(project, "precision_of", lambda _dtype: "tf32")
    monkeypatch.setattr(project, "gpu_of", lambda _device: H100)
    monkeypatch.setattr(project, "run_steps", lambda steps, _run: launched.extend(steps))
    monkeypatch.setattr(torch, "mm", lambda *_, **__: pytest.fail("it would multiply in TensorFloat-32"))
    out = torch.empty(24, 768)
    project.project(torch.randn(24, 1536), torch.randn(768, 1536), out, "ieee")
    (launch,) = launched
    assert launch.kernel == "linear_cat_outer", "which multiplies in float32"


def test_a_lead_must_be_larger_the_further_away_it_was_measured() -> None:
    """In a graph a row led by 1.08, but a shape 2.3 octaves away took 9.5 us where PyTorch took 5.7."""
    row = LinearCatSpec("float32", (256, 128), 768, precision="ieee")
    near, far = (dataclasses.replace(row, inputs=(256, width), outputs=out) for width, out in ((120, 768), (64, 2400)))
    for spec, serves in ((near, True), (far, False)):
        found = linear.MOMENTS.choice_of(spec, LinearCatSize(24), H100, captured=True)
        assert (found.variant is not None) is serves
        assert found.row is not None, "it is that row's lead that decides"
        assert linear.MOMENTS.choice_of(spec, LinearCatSize(24), H100, captured=False).variant is not None


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (GruCellSpec("bfloat16", 476, (1356,), inplace=True), GruCellSize(2)),
        (GruCellSpec("float32", 874, (1612,), inplace=True, precision="tf32"), GruCellSize(169)),
        (LinearCatSpec("float32", (384,), 700, bias=False, precision="ieee"), LinearCatSize(24)),
    ],
)
def test_where_any_row_is_trusted_a_lead_lasts_however_far(spec: Any, size: Any) -> None:
    """In place, PyTorch needs a copy after its operator; and a GRU's product may not be PyTorch's."""
    moments = CELL if isinstance(spec, GruCellSpec) else linear.MOMENTS
    found = moments.choice_of(spec, size, H100, captured=True)
    assert found.row is not None
    assert found.variant is not None
    away = lookup._octaves(moments._families[True], found.row, spec, size)
    lead = found.row.eager_us / found.row.median_us
    assert lookup.LEAD < lead < lookup.LEAD ** (1 + away), "so that this shape tells"


def test_without_tensor_cores_weights_that_no_cache_holds_are_left_to_pytorch() -> None:
    """Each row reads all weights again: 8 rows of 1076 and 1672 took 99 us in a graph where PyTorch took 44."""
    row = GruCellSpec("float32", 768, (768,), precision="ieee")
    large = dataclasses.replace(row, hidden=1672, inputs=(1076,))
    assert all("L2" in (said or "") for said in doubts(large, 8, 2.0, row))
    assert doubts(large, 2, 2.0, row) == [None, None], "of two rows, programs side by side read the same weights"
    assert doubts(dataclasses.replace(row, hidden=1000, inputs=(768,)), 8, 2.0, row) == [None, None]
    assert CELL.choice_of(large, GruCellSize(8), H100, captured=True).rule == "eager"


def test_rows_that_are_loaded_one_by_one_are_no_matter_of_tensor_cores() -> None:
    """For 505 and 1069 form "split" took 1.8 times PyTorch's time; "vector" at most 0.57 for 38 other such rows."""
    spec, size = GruCellSpec("bfloat16", 1069, (505,)), GruCellSize(1)
    split = GruCellVariant("split", 16, 8, 256, 4, num_stages=5, num_warps=4)
    assert "an element at a time" in (cells.rejection(spec, size, split) or "")
    assert cells.rejection(dataclasses.replace(spec, hidden=1072, inputs=(504,)), size, split) is None
    assert "an element at a time" not in (cells.rejection(spec, GruCellSize(3), split) or "")
    for moment in (False, True):
        variant = CELL.choice_of(spec, size, H100, captured=moment).variant
        assert variant is not None
        assert variant.form == "vector"
