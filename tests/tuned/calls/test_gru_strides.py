"""Every tensor of every GRU family with any strides, in first and later calls, against float64; in the interpreter."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.calls.gru_cell.run
import tuned.calls.linear_cat.run
from tests.support.gru_machine import Machine, laid_by_cudnn, machine
from tests.support.run import INTERPRETED
from tests.support.views import VIEWS, apart, expanded, misaligned, negative, odd, repeated, sliced, transposed
from tuned.calls.gru import padding, project, run
from tuned.calls.recurrent import serve
from tuned.dispatch import gru, gru_cell, linear_cat
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_cell.launches import GruCellCall, fused_launch, gates_launch
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant, gates_variant
from tuned.families.linear_cat.launches import LinearCatCall
from tuned.families.linear_cat.launches import launches as linear_launches
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["machine"]

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru_strides.py has these on a GPU"),
]

T, FEATURES, H = 2, 6, 20
TOLERANCE = {"rtol": 0, "atol": 3e-3}  # the products are in TF32
SHORT = ("plain", "transposed", "apart", "misaligned", "odd", "batch_innermost")  # views whose calls can be known
CALLS = 3  # the first call is decided, the second known; packed ones are known from the third


def assert_right(
    call: Callable[[list[torch.Tensor]], Any],
    exact: Callable[[list[torch.Tensor]], Any],
    tensors: dict[str, torch.Tensor],
    view: Callable[[torch.Tensor], torch.Tensor],
    which: set[str],
) -> None:
    """Calls give PyTorch's float64 results with some of the tensors in a view; each call has other numbers."""
    for again in range(CALLS):
        # A negative view must not be taken for one like it, without the sign, that was seen before.
        use = sliced if view is negative and again == 0 else view
        given = [use(t.roll(again, -1)) if name in which else t.roll(again, -1) for name, t in tensors.items()]
        before = [t.clone() for t in given]
        found = call(given)
        wanted = exact([t.double() for t in before])
        for ours, theirs in zip(_all(found), _all(wanted), strict=True):
            torch.testing.assert_close(ours.double(), theirs, **TOLERANCE, msg=lambda m, n=again: f"call {n}: {m}")
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "an input was changed"


def _all(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# Sequences ------------------------------------------------------------------------------------------------------------

POLL = GruVariant("persistent", block_hidden=32, exchange="poll")
GRUS: dict[str, tuple[GruVariant, dict[str, Any]]] = {
    "layer": (POLL, {}),
    "batch first": (POLL, {"batch_first": True}),
    "both ways": (POLL, {"bidirectional": True}),
    "stack": (POLL, {"num_layers": 2}),
    "steps": (GruVariant("steps", block_hidden=16), {"batch_first": True}),
    "library": (GruVariant(), {"batch_first": True}),
    "packed": (POLL, {"batch_sizes": True}),
    "thd": (POLL, {"cu_seqlens": True}),
}


def gru_tensors(batch: int, settings: dict[str, Any], hidden: int = H) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers, directions = settings.get("num_layers", 1), 2 if settings.get("bidirectional") else 1
    rows = (T * batch,) if {"batch_sizes", "cu_seqlens"} & set(settings) else (T, batch)
    rows = rows[::-1] if settings.get("batch_first") else rows
    made = {"input": torch.randn(*rows, FEATURES), "hx": torch.randn(layers * directions, batch, hidden)}
    for layer in range(layers):
        for direction in range(directions):
            features = FEATURES if layer == 0 else directions * hidden
            gates = 3 * hidden
            shapes = {"w_ih": (gates, features), "w_hh": (gates, hidden), "b_ih": (gates,), "b_hh": (gates,)}
            made |= {f"{name} {layer}{direction}": torch.randn(shape) / 4 for name, shape in shapes.items()}
    return made


def gru_function(batch: int, settings: dict[str, Any]) -> Callable[[list[torch.Tensor]], Any]:
    named = dict(settings)
    if "batch_sizes" in named:
        named["batch_sizes"] = torch.tensor([batch, -7] * T)[::2]  # PyTorch would read the -7 in between too
    if "cu_seqlens" in named:
        named |= {"cu_seqlens": torch.arange(batch + 1, dtype=torch.int32) * T, "max_seqlen": T}
    return lambda tensors: gru(tensors[0], tensors[1], tensors[2:], **named)


# A layer takes every view with one sequence and with three; of two other forms, each takes every other view.
STRIDED = [("layer", view, batch) for view in VIEWS for batch in (1, 3)] + [
    (case, view, 1) for i, case in enumerate(GRUS) for j, view in enumerate(VIEWS) if case != "layer" and (i + j) % 2
]


def assert_every_tensor_right(
    monkeypatch: pytest.MonkeyPatch, batch: int, settings: dict[str, Any], view: str, hidden: int = H
) -> None:
    """First the states lie in a view, then all other tensors: a call whose state is copied is never known."""
    tensors = gru_tensors(batch, settings, hidden)
    function = gru_function(batch, settings)

    def exact(doubled: list[torch.Tensor]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(serve, "why_eager", lambda *_, **__: "float64")
            return function(doubled)

    for which in ({"hx"}, set(tensors) - {"hx"}):
        assert_right(function, exact, tensors, VIEWS[view], which)


@pytest.mark.parametrize(("case", "view", "batch"), STRIDED)
def test_a_gru_takes_every_tensor_with_any_strides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str, view: str, batch: int
) -> None:
    variant, settings = GRUS[case]
    monkeypatch.setattr(
        run, "_choose", lambda spec, *_: Choice("winner", "", variant if not spec.stacked or variant is POLL else None)
    )
    if variant.strategy != "persistent":  # this variant is launched for each step, in CUDA graphs only
        monkeypatch.setattr(run, "capturing", lambda _device: True)
    assert_every_tensor_right(monkeypatch, batch, settings, view)
    assert machine.public
    if variant is POLL and view in SHORT and not {"batch_sizes", "cu_seqlens"} & set(settings):
        assert machine.direct >= CALLS - 1, "the short way was not tried"


PADDED = {
    "input": (H, 3, {}),  # of 24 bytes a row; states have 80
    "all": (18, 1, {"batch_first": True}),
    "all, both ways": (18, 3, {"bidirectional": True, "num_layers": 2}),
}


# The first of them takes every view; of the others, whose tensors come to the kernel in the same way, each every other view.
PADDED_VIEWS = [
    (case, view) for i, case in enumerate(PADDED) for j, view in enumerate(VIEWS) if case == "input" or (i + j) % 2
]


@pytest.mark.parametrize(("case", "view"), PADDED_VIEWS)
def test_a_padded_gru_takes_every_tensor_with_any_strides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str, view: str
) -> None:
    hidden, batch, settings = PADDED[case]
    padded: list[int | None] = []
    widened = run.widened

    def spied(call: Any) -> Any:
        padded.append(call.width)
        return widened(call)

    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "", POLL))
    for name in ("pays", "pays_for_input"):
        monkeypatch.setattr(run, name, lambda *_, **__: True)
    monkeypatch.setattr(run, "widened", spied)
    assert_every_tensor_right(monkeypatch, batch, settings, view, hidden)
    assert set(padded) == {20}
    if view in SHORT:
        assert machine.direct, "the short way was not tried"


COPIED: dict[str, tuple[int, dict[str, Any]]] = {
    "layers": (1, {"num_layers": 2}),
    "both ways": (3, {"bidirectional": True, "batch_first": True}),
    "packed": (3, {"batch_sizes": True, "bias": True}),
}


@pytest.mark.parametrize(
    ("case", "view"),
    [(case, view) for i, case in enumerate(COPIED) for j, view in enumerate(VIEWS) if i == 0 or (i + j) % 2],
)
def test_pytorchs_own_of_padded_tensors_takes_every_tensor_with_any_strides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str, view: str
) -> None:
    batch, settings = COPIED[case]
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("eager", "it takes less", None))
    monkeypatch.setattr(run, "pays_pytorch", lambda *_, **__: True)
    monkeypatch.setattr(padding, "flatten", laid_by_cudnn)
    assert_every_tensor_right(monkeypatch, batch, settings, view, 18)
    assert machine.copies or VIEWS[view] is negative, "nothing was padded"


LINEAR_VARIANTS = {
    "tile": LinearCatVariant(),
    "padded": LinearCatVariant("padded"),
    "vector": LinearCatVariant("vector", 4, 32, 128),
    "outer": LinearCatVariant("outer", 4, 8),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("form", "batch"), [("tile", 1), ("vector", 3), ("outer", 9)])
def test_products_of_another_precision_than_the_librarys_take_any_input(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, view: str, batch: int, form: str
) -> None:
    """A float32 GRU's input needs such a product if TF32 is allowed for recurrent networks and not for GEMMs."""
    variant = LINEAR_VARIANTS[form]
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", POLL))
    monkeypatch.setattr(project, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(project, "_projection", lambda *_: variant)
    settings = {"batch_first": True}
    tensors, function = gru_tensors(batch, settings), gru_function(batch, settings)

    def exact(doubled: list[torch.Tensor]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(serve, "why_eager", lambda *_, **__: "float64")
            return function(doubled)

    for which in ("input", "w_ih 00"):
        assert_right(function, exact, tensors, VIEWS[view], {which})
    assert machine.public


# Steps ----------------------------------------------------------------------------------------------------------------

FORMS = ("library", "padded_library", "tile", "padded", "split", "vector", "outer")


def cell_variant(form: str) -> GruCellVariant:
    """A small variant of one form."""
    sizes: dict[str, dict[str, Any]] = {
        "tile": {"block_batch": 16, "block_hidden": 32, "block_k": 64},
        "padded": {"block_batch": 16, "block_hidden": 32, "block_k": 64},
        "split": {"block_batch": 16, "block_hidden": 32, "block_k": 64},
        "vector": {"block_batch": 4, "block_hidden": 16, "block_k": 128},
        "outer": {"block_batch": 4, "block_hidden": 8},
    }
    if form.endswith("library"):
        return dataclasses.replace(gates_variant(H), form=form)
    return GruCellVariant(form, **sizes[form])


@pytest.mark.parametrize(
    ("form", "view"),
    # How tensors come to a kernel depends on whether it is one; the others differ in what they do with them.
    [
        (form, view)
        for form in FORMS
        for view in (VIEWS if form in ("library", "padded_library", "tile", "padded") else ("transposed", "misaligned"))
    ],
)
@pytest.mark.parametrize(("widths", "batch"), [((FEATURES,), 1), ((2, 4), 3)], ids=str)
def test_a_step_takes_every_tensor_with_any_strides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, form: str, view: str, batch: int, widths: tuple[int, ...]
) -> None:
    variant = cell_variant(form)
    monkeypatch.setattr(tuned.calls.gru_cell.run.MOMENTS, "variant_of", lambda *_: (variant, True))
    torch.manual_seed(0)
    shapes = {f"x{index}": (batch, width) for index, width in enumerate(widths)}
    shapes |= {"h": (batch, H), "w_ih": (3 * H, FEATURES), "w_hh": (3 * H, H), "b_ih": (3 * H,), "b_hh": (3 * H,)}
    tensors = {name: torch.randn(shape) / (1 if name[0] in "xh" else 4) for name, shape in shapes.items()}
    count = len(widths)

    def function(given: list[torch.Tensor]) -> Any:
        return gru_cell(given[0] if count == 1 else tuple(given[:count]), *given[count:])

    def exact(given: list[torch.Tensor]) -> Any:
        return torch.gru_cell(torch.cat(given[:count], -1), *given[count:])

    for kinds in ("x", "h", "w", "b") if view != "plain" else "h":
        which = {name for name in tensors if name[0] in kinds}
        assert_right(function, exact, tensors, VIEWS[view], which)
    assert machine.public
    if view == "plain":
        assert machine.direct >= CALLS - 1, "the short way was not tried"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("form", "rows"), [("tile", 1), ("padded", 2), ("vector", 3), ("outer", 9)])
def test_a_linear_over_segments_takes_every_tensor_with_any_strides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, form: str, view: str, rows: int
) -> None:
    variant = LINEAR_VARIANTS[form]
    monkeypatch.setattr(tuned.calls.linear_cat.run.MOMENTS, "variant_of", lambda *_: (variant, True))
    torch.manual_seed(0)
    shapes = {"x0": (2, rows, 5), "x1": (2, rows, 8), "weight": (12, 13), "bias": (12,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    def function(given: list[torch.Tensor]) -> Any:
        return linear_cat(tuple(given[:2]), *given[2:])

    def exact(given: list[torch.Tensor]) -> Any:
        return torch.nn.functional.linear(torch.cat(given[:2], -1), *given[2:])

    for which in ({"x0"}, {"x1"}, {"weight", "bias"}) if view != "plain" else ({"x0"},):
        assert_right(function, exact, tensors, VIEWS[view], which)
    assert machine.public
    if view == "plain":
        assert machine.direct >= CALLS - 1, "the short way was not tried"


# What launches rely on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [transposed, sliced, repeated])
def test_a_launch_over_rows_that_are_not_side_by_side_is_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weight, out, bias = torch.randn(4, 6), torch.randn(12, 6), torch.randn(4, 12), torch.randn(12)
    spec = LinearCatSpec("float32", (6,), 12, precision="ieee")
    for index in range(4):
        given = [view(t) if i == index else t for i, t in enumerate((x, weight, out, bias))]
        with pytest.raises(ValueError, match=r"last stride of \w+ must be 1 in a launch.*contiguous"):
            linear_launches(spec, LinearCatVariant(), LinearCatCall.of((given[0],), *given[1:]))
    cell = GruCellSpec("float32", 4, (6,), precision="ieee")
    tensors = (x, torch.randn(4, 4), torch.randn(12, 6), torch.randn(12, 4), torch.randn(4, 4), bias, bias)
    for index in range(len(tensors)):
        given = [view(t) if i == index else t for i, t in enumerate(tensors)]
        with pytest.raises(ValueError, match="last stride"):
            fused_launch(cell, cell_variant("tile"), GruCellCall.of((given[0],), *given[1:]))
    gates = (out, view(out))
    with pytest.raises(ValueError, match="last stride of gates_h"):
        gates_launch(cell, gates_variant(4), GruCellCall.of((x,), *tensors[1:]), gates)


def test_what_means_nothing_is_not_refused() -> None:
    x = torch.randn(12).as_strided((4, 1), (3, 5))
    spec = LinearCatSpec("float32", (1,), 12, bias=False, precision="ieee")
    call = LinearCatCall.of((x,), odd(torch.randn(12, 1)), torch.randn(4, 12))
    assert linear_launches(spec, LinearCatVariant(), call)


def test_the_views_are_what_they_say() -> None:
    t = torch.randn(3, 1, 4)
    assert negative(t).is_neg()
    assert odd(t).stride() == (4, 7, 1)
    assert misaligned(t).data_ptr() % 16 == 4
    assert apart(t).stride(-1) == 1
    assert expanded(t).stride(0) == 0
    for name, view in VIEWS.items():
        assert view(t).shape == t.shape
        if name not in ("expanded", "repeated"):
            assert torch.equal(view(t), t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager_reads_nothing_between_the_rows_of_the_state(dtype: torch.dtype) -> None:
    between = torch.full((17, 200), torch.nan, dtype=dtype)
    h = between[:, :100].normal_()[None]
    weights = [torch.randn(300, 96).to(dtype) / 10, torch.randn(300, 100).to(dtype) / 10]
    out, h_n = gru(torch.randn(17, 7, 96).to(dtype), h, weights, bias=False, batch_first=True)
    assert not bool(out.isnan().any())
    assert not bool(h_n.isnan().any())
