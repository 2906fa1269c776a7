"""The hot paths of a GRU step and of a linear over segments: which calls are remembered, and which have no plan."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned.calls.gru_cell.run
import tuned.calls.gru_cell.run as cell
import tuned.calls.linear_cat.run as linear
import tuned.calls.products
import tuned.calls.recurrent.serve
import tuned.dispatch
import tuned.launching.left
import tuned.launching.plan
from generator.measuring.mended import mended_interpreter
from tests.support.gru_machine import believing
from tests.support.precisions import other_gemms
from tests.support.run import INTERPRETED
from tuned.launching.plan import DirectLaunch
from tuned.lookup.lookup import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="this stands in for a GPU where there is none"),
]
HIDDEN, WIDTH, BATCH = 24, 16, 2
HEAD = (0, None, None, None)  # the arguments that the launcher adds


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """CPU tensors take the path of GPU tensors, through the interpreter; yields the arguments of each direct launch."""
    launched: list[tuple[Any, ...]] = []

    def direct(launch: Any, compiled: Any, device: Any) -> DirectLaunch:
        del compiled, device
        numbers = tuple(v for v in launch.arguments if not isinstance(v, torch.Tensor))
        silent = types.SimpleNamespace(calls=[])
        rest = (*numbers, *launch.constants.values())
        return DirectLaunch(
            lambda *given: launched.append(given), 0, HEAD, launch.programs, rest, lambda _: 7, silent, silent
        )

    for module in (tuned.calls.gru_cell.run, linear):
        monkeypatch.setattr(module, "why_eager", lambda *_: None)
    for module in (cell, linear):
        monkeypatch.setattr(module, "gpu_of", lambda _: Gpu("a_card_without_a_table", 80, 100))
        monkeypatch.setattr(module, "_PLANS", {})
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: False)
    monkeypatch.setattr(tuned.launching.plan, "direct_launch", direct)
    believing(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with np.errstate(all="ignore"), mended_interpreter(), torch.no_grad():
        yield launched


def step(*, bias: bool = True, dtype: torch.dtype = torch.float32, segments: int = 1) -> list[Any]:
    """Arguments of a step: x, h, weights, biases."""
    torch.manual_seed(0)
    x = [torch.randn(BATCH, WIDTH // segments).to(dtype) for _ in range(segments)]
    made = torch.nn.GRUCell(WIDTH, HIDDEN, bias=bias, dtype=dtype)
    weights = [made.weight_ih, made.weight_hh, *((made.bias_ih, made.bias_hh) if bias else (None, None))]
    return [x[0] if segments == 1 else tuple(x), torch.randn(BATCH, HIDDEN).to(dtype), *weights]


def serve(arguments: list[Any], *, inplace: bool = False) -> Any:
    """Serves a call as dispatch does: by its plan if it is known, else the whole way."""
    x, *rest = arguments
    found = cell.known(x, *rest, inplace)
    return cell.run_cell(x if isinstance(x, tuple) else (x,), *rest, inplace=inplace) if found is None else found


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_what_pytorch_serves_is_known_from_the_second_call_on(
    fired: list[Any], monkeypatch: pytest.MonkeyPatch, *, segments: int, inplace: bool
) -> None:
    for module in (cell, linear):
        monkeypatch.setattr(module.MOMENTS, "variant_of", lambda *_: (None, True))
    arguments = step(segments=segments)
    x, h, *weights = arguments
    want = torch.gru_cell(x if segments == 1 else torch.cat(x, -1), h, *weights)
    for again in range(2):
        state = h.clone()
        assert (cell.known(x, state, *weights, inplace) is not None) == bool(again)
        state = h.clone()
        out = serve([x, state, *weights], inplace=inplace)
        assert (out is state) == inplace
        torch.testing.assert_close(out, want, rtol=0, atol=0)
    inputs, weight = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, 4)), torch.randn(HIDDEN, WIDTH + 4)
    assert linear.known(inputs, weight, None) is None
    product = linear.run_linear_cat(inputs, weight, None)
    torch.testing.assert_close(linear.known(inputs, weight, None), product, rtol=0, atol=0)
    assert linear.known(inputs, weight, torch.randn(HIDDEN)) is None
    assert linear.known([t.double() for t in inputs], weight, None) is None, "its error is not PyTorch's"
    assert linear.known([torch.randn(1, 2), torch.randn(1, WIDTH + 2)], weight, None) is None
    assert cell.known(x, h.double(), *weights, inplace) is None
    if segments == 1:
        assert cell.is_left(x, h, *weights) == (not inplace), "as tuned.nn.GRUCell asks"
    assert cell.known(x, h, *weights, not inplace) is None
    with torch.enable_grad():
        assert (cell.known(x, h, *weights, inplace) is None) == inplace, (
            "a state that a gradient needs is not overwritten"
        )
    assert not fired


@pytest.mark.usefixtures("fired")
def test_what_is_known_without_a_gradient_is_not_known_with_one() -> None:
    x, h, *weights = step()
    inputs, weight = (
        (torch.randn(BATCH, WIDTH), torch.randn(BATCH, 4)),
        torch.nn.Parameter(torch.randn(HIDDEN, WIDTH + 4)),
    )
    serve([x, h, *weights])
    linear.run_linear_cat(inputs, weight, None)
    for _ in range(3):
        assert cell.known(x, h, *weights, False) is not None
        assert linear.known(inputs, weight, None) is not None
    with torch.enable_grad():
        assert cell.known(x, h, *weights, False) is None
        assert linear.known(inputs, weight, None) is None


def test_a_kernel_for_calls_alone_is_not_captured(fired: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For a single call the host takes longer than this kernel; in a CUDA graph nothing says that the kernel wins."""
    now = types.SimpleNamespace(captures=False)
    for module in (cell, linear):
        genuine, moments = module.MOMENTS.variant_of, module.MOMENTS
        monkeypatch.setattr(moments, "variant_of", lambda *of, g=genuine: (None if now.captures else g(*of)[0], False))
        monkeypatch.setattr(module, "capturing", lambda _: now.captures)
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: now.captures)
    arguments = step()
    inputs, weight = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, 4)), torch.randn(HIDDEN, WIDTH + 4)
    want, product = torch.gru_cell(*arguments), torch.nn.functional.linear(torch.cat(inputs, -1), weight)

    def both() -> tuple[Any, Any]:
        x, h, *weights = arguments
        found = cell.known(x, h, *weights, False), linear.known(inputs, weight, None)
        if found[0] is None:
            torch.testing.assert_close(cell.run_cell((x,), h, *weights, inplace=False), want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(linear.run_linear_cat(inputs, weight, None), product, atol=1e-5, rtol=1e-5)
        return found

    assert both() == (None, None)
    assert None not in both()
    assert len(fired) == 2
    now.captures = True
    for _ in range(2):
        assert both() == (None, None)
    now.captures = False
    assert None not in both()
    assert len(fired) == 4


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_right_and_the_next_alike_is_one_direct_launch(
    fired: list[Any], *, bias: bool, segments: int
) -> None:
    arguments = step(bias=bias, segments=segments)
    x, *rest = arguments
    want = torch.gru_cell(x if segments == 1 else torch.cat(x, -1), *rest)
    torch.testing.assert_close(serve(arguments), want, atol=1e-5, rtol=1e-5)
    assert not fired
    again = [
        x.clone() if segments == 1 else tuple(t.clone() for t in x),
        *(t if t is None else t.clone() for t in rest),
    ]
    again[2:] = [torch.nn.Parameter(t) if t is not None else None for t in again[2:]]
    out = serve(again)
    (given,) = fired
    x, h, w_ih, w_hh, b_ih, b_hh = again
    pointers = [t.data_ptr() for t in ((x,) if segments == 1 else x)]
    pointers += [h.data_ptr()] * (4 - segments)
    b_ih, b_hh = (b_ih, b_hh) if bias else (w_ih, w_hh)
    pointers += [t.data_ptr() for t in (h, w_ih, w_hh, b_ih, b_hh, out)]
    assert given[1:4] == (1, 1, 7), "a grid of one dimension, on the stream of now"
    assert list(given[9 : 9 + len(pointers)]) == pointers
    assert given[9 + len(pointers)] == BATCH


CHANGES = {
    "another batch": lambda a: [a[0][:1], a[1][:1], *a[2:]],
    "another dtype": lambda a: [t.bfloat16() for t in a],
    "rows apart": lambda a: [torch.randn(BATCH, 2 * WIDTH)[:, :WIDTH], *a[1:]],
    "state in rows apart": lambda a: [a[0], torch.randn(BATCH, 2 * HIDDEN)[:, :HIDDEN], *a[2:]],
    "another alignment": lambda a: [torch.randn(BATCH * WIDTH + 1)[1:].view(BATCH, WIDTH), *a[1:]],
    "weight by columns": lambda a: [*a[:2], a[2].detach().t().contiguous().t(), *a[3:]],
    "no bias": lambda a: [*a[:4], None, None],
    "segments": lambda a: [(a[0][:, :8].contiguous(), a[0][:, 8:].contiguous()), *a[1:]],
    "a subclass": lambda a: [a[0], a[1].as_subclass(type("Mine", (torch.Tensor,), {})), *a[2:]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_differs_is_not_taken_for_what_is_known(fired: list[Any], change: Any) -> None:
    arguments = step()
    serve(arguments)
    assert cell.known(*arguments, False) is not None
    fired.clear()
    assert cell.known(*change(arguments), False) is None
    assert cell.known(*arguments, True) is None
    assert not fired


def test_a_step_that_needs_a_gradient_or_is_followed_is_not_known(
    fired: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = step()
    serve(arguments)
    fired.clear()
    with torch.enable_grad():
        assert cell.known(*arguments, False) is None
    with torch.autograd.forward_ad.dual_level():
        assert cell.known(*arguments, False) is None
    monkeypatch.setattr(cell, "_autocast", lambda: True)
    assert cell.known(*arguments, False) is None
    assert not fired


def test_tensors_that_must_be_copied_are_copied_every_time(fired: list[Any]) -> None:
    arguments = step()
    arguments[2] = arguments[2].detach().t().contiguous().t()
    want = torch.gru_cell(*arguments)
    for _ in range(3):
        torch.testing.assert_close(serve(arguments), want, atol=1e-5, rtol=1e-5)
    assert not fired


def test_in_place_the_state_is_overwritten_and_autograd_told(fired: list[Any]) -> None:
    arguments = step()
    want, h = torch.gru_cell(*arguments), arguments[1]
    assert serve(arguments, inplace=True) is h
    torch.testing.assert_close(h, want, atol=1e-5, rtol=1e-5)
    version = h._version
    assert serve(arguments, inplace=True) is h
    assert h._version > version
    assert len(fired) == 1


@pytest.mark.usefixtures("fired")
def test_the_first_step_in_place_tells_autograd_as_the_known_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.calls.recurrent.serve, "why_eager", lambda *_, **__: None)
    arguments = step()
    h, version = arguments[1], arguments[1]._version
    assert tuned.dispatch.gru_cell(*arguments, inplace=True) is h
    assert h._version > version


def test_a_weight_whose_rows_lie_too_far_apart_for_32_bits_is_copied() -> None:
    near, far = (torch.empty(8, 4, device="meta").as_strided((8, 4), (step, 1)) for step in (2**28 - 1, 2**28))
    assert tuned.calls.products.weight_of(near) is near
    assert tuned.calls.products.weight_of(far).is_contiguous()


def test_nothing_of_the_callers_is_kept_alive(fired: list[Any]) -> None:
    arguments = step(segments=2)
    serve(arguments)
    serve(arguments)
    fired.clear()
    kept = [weakref.ref(t) for t in (*arguments[0], *arguments[1:])]
    del arguments
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_what_is_remembered_is_bounded(fired: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.launching.plan, "MAX_PLANS", 2)
    x, h, *weights = step()
    for batch in range(1, 6):
        serve([x[:1].repeat(batch, 1), h[:1].repeat(batch, 1), *weights])
    assert len(cell._PLANS) <= 2
    assert not fired


# A linear over segments ---------------------------------------------------------------------------------------------


def linear_of(*, bias: bool = True) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    return (torch.randn(2, 3, 8), torch.randn(2, 3, 5)), torch.randn(20, 13), torch.randn(20) if bias else None


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_is_right_and_the_next_alike_is_one_direct_launch(fired: list[Any], *, bias: bool) -> None:
    inputs, weight, b = linear_of(bias=bias)
    want = torch.nn.functional.linear(torch.cat(inputs, -1), weight, b)
    assert linear.known(inputs, weight, b) is None
    torch.testing.assert_close(linear.run_linear_cat(inputs, weight, b), want, atol=1e-5, rtol=1e-5)
    assert not fired
    out = linear.known(inputs, weight, b)
    assert out.shape == want.shape
    (given,) = fired
    x, p = [t.data_ptr() for t in inputs], weight.data_ptr()
    assert list(given[9:17]) == [*x, p, p, p, p if b is None else b.data_ptr(), out.data_ptr(), 6]
    with torch.enable_grad():
        assert linear.known(inputs, weight.clone().requires_grad_(), b) is None
    assert linear.known((inputs[0][:1], inputs[1][:1]), weight, b) is None


def test_what_was_known_in_another_precision_is_not_taken(fired: list[Any]) -> None:
    arguments, given = step(), linear_of()
    serve(arguments)
    linear.run_linear_cat(*given)
    assert cell.known(*arguments, False) is not None
    assert linear.known(*given) is not None
    fired.clear()
    with other_gemms():
        assert cell.known(*arguments, False) is None
        assert linear.known(*given) is None
    assert not fired


def test_one_segment_is_the_librarys(fired: list[Any]) -> None:
    inputs, weight, bias = linear_of()
    whole = torch.cat(inputs, -1)
    for given in ((whole,), (whole, whole[..., :0])):
        assert "library" in str(linear.why_not(given, weight))
        torch.testing.assert_close(
            linear.run_linear_cat(given, weight, bias), torch.nn.functional.linear(whole, weight, bias)
        )
    assert not fired
    assert not linear._PLANS


def test_a_linear_that_pytorch_serves_is_known_by_the_shape_of_its_bias() -> None:
    """When a bias was known by its id, one of one element that got the id of a freed bias was broadcast."""
    left = tuned.launching.left
    inputs, weight = [torch.randn(2, 3), torch.randn(2, 5)], torch.randn(4, 8)
    with torch.no_grad():
        tuned.dispatch.linear_cat(inputs, weight, torch.randn(4))
        assert left.is_left(weight, linear.sizes(inputs, torch.randn(4))), "another bias of as many elements"
        assert not left.is_left(weight, linear.sizes(inputs, None))
        with pytest.raises(ValueError, match=r"bias must be \[4\], got \[1\]"):
            tuned.dispatch.linear_cat(inputs, weight, torch.randn(1))
