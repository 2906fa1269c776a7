"""GRUs whose rows are no multiple of 16 bytes: wider kernels give the same results, and when those kernels serve."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.nn
from benchmarks.session import RESULTS
from tests.support.gru_machine import Machine, laid_by_cudnn, machine
from tests.support.gru_running import FEATURES, VARIANTS, B, T, assert_as_pytorch, call_of, interpreted
from tests.support.gru_training import ONE, assert_alike, backward, choose
from tests.support.run import INTERPRETED
from tuned.calls.gru import eager, padding, run, training
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.calls.gru.wide import flat, narrowed, silence, widened, widening_us, wider_spec, width_of
from tuned.dispatch import gru
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, row_variant
from tuned.lookup.lookup import Choice, Gpu

if TYPE_CHECKING:
    from tuned.families.launch import Launch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:RNN module weights"),  # torch.nn.GRU warns of weights that it did not lay out
]

__all__ = ["backward", "interpreted", "machine"]

NARROW, WIDE = 18, 20
H200 = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
H100 = Gpu("nvidia_h100_80gb_hbm3", 90, 132, "NVIDIA H100 80GB HBM3")
LAYOUTS = ("dense", "first", "packed", "thd")
without_a_gpu = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru.py has these on a GPU")


def narrow(layout: str = "dense", layers: int = 1, directions: int = 1, *, bias: bool = True) -> GruCall:
    first = layout == "first"
    return call_of("dense" if first else layout, layers, directions, bias=bias, first=first, hidden=NARROW)


def to_be_widened(call: GruCall) -> GruCall:
    return dataclasses.replace(call, width=WIDE)


def doubled(call: GruCall) -> GruCall:
    x, hx, *weights = (t.detach().double().requires_grad_() for t in call.tensors)
    return dataclasses.replace(call, input=x, hx=hx, weights=tuple(weights))


@pytest.mark.parametrize(("hidden", "item", "width"), [(1, 2, 8), (8, 2, 8), (9, 2, 16), (1, 4, 4), (66, 4, 68)])
def test_a_width_has_rows_of_a_multiple_of_16_bytes(hidden: int, item: int, width: int) -> None:
    assert width_of(hidden, item) == width
    assert wider_spec(GruSpec({2: "float16", 4: "float32"}[item], hidden)).hidden == width


def assert_gradients_too(call: GruCall, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Results of a float64 call are contiguous and equal PyTorch's, and so do their gradients."""
    wanted = eager.gru(call)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.is_contiguous()) == (theirs.shape, True)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    given = [torch.randn_like(out) for out in wanted]
    for ours, theirs in zip(
        *(torch.autograd.grad(outputs, call.tensors, given) for outputs in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "bias"), [((1, 1), True), ((1, 2), False), ((3, 1), False), ((2, 2), True)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_widened_gives_the_same_and_its_gradients(layout: str, shape: tuple[int, int], *, bias: bool) -> None:
    call = doubled(narrow(layout, *shape, bias=bias))
    wide = widened(to_be_widened(call))
    assert (wide.hx.shape[2], wide.units, wide.width) == (WIDE, NARROW, None)
    assert_gradients_too(call, narrowed(call, *eager.gru(wide)))


@pytest.mark.parametrize(("shape", "bias"), [((1, 1), True), ((1, 2), False), ((3, 1), False), ((2, 2), True)], ids=str)
@pytest.mark.parametrize("layout", ["dense", "first", "packed"])
def test_pytorchs_own_of_padded_tensors_gives_the_same_and_its_gradients(
    layout: str, shape: tuple[int, int], *, bias: bool
) -> None:
    call = doubled(narrow(layout, *shape, bias=bias))
    assert_gradients_too(call, training.padded_pytorch(to_be_widened(call)))


def test_pytorchs_own_of_padded_tensors_takes_any_strides_and_a_batch_of_one() -> None:
    call = doubled(narrow("dense", 2, 2))
    transposed = [w.detach().mT.contiguous().mT if w.dim() > 1 else w.detach() for w in call.weights]
    transposed[2] = transposed[2][:1].expand_as(transposed[2])
    for rows in (slice(None), slice(1)):
        x, hx = call.input.detach()[:, :1].expand_as(call.input)[:, rows], call.hx.detach().flip(1)[:, rows]
        given = [t.detach().requires_grad_() for t in (x, hx.mT.contiguous().mT, *transposed)]
        strided = dataclasses.replace(call, input=given[0], hx=given[1], weights=tuple(given[2:]))
        assert not all(t.is_contiguous() for t in given[:2])
        assert_gradients_too(strided, training.padded_pytorch(to_be_widened(strided)))


@pytest.mark.parametrize("shape", [(1, 2), (3, 1)], ids=str)
def test_pytorchs_own_of_padded_tensors_makes_no_nan_of_an_input_that_is_infinite(shape: tuple[int, int]) -> None:
    call = narrow("dense", *shape)
    call.input[1, 0, 3] = torch.inf
    wanted = eager.gru(call)
    assert bool(wanted[0].isfinite().all())
    for ours, theirs in zip(training.padded_pytorch(to_be_widened(call)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_padded_weights_lie_as_cudnn_has_them(shape: tuple[int, int], *, bias: bool) -> None:
    """cuDNN copies weights that lie otherwise, and PyTorch warns of it."""
    weights = flat(widened(to_be_widened(narrow("dense", *shape, bias=bias)), alike=True)).weights
    theirs = [weight.clone() for weight in weights]
    laid_by_cudnn(theirs, narrow("dense", *shape, bias=bias))
    places = [[t.data_ptr() - some[0].data_ptr() for t in some] for some in (weights, theirs)]
    assert places[0] == places[1]
    assert all(torch.equal(one, other) for one, other in zip(weights, theirs, strict=True))
    biases = 0 if bias else 6 * WIDE * shape[0] * shape[1]  # cuDNN reads room for biases even if there are none
    assert weights[0].untyped_storage().nbytes() == 4 * (sum(weight.numel() for weight in weights) + biases)


def test_weights_of_a_kind_lie_evenly_whatever_they_did_before() -> None:
    call = to_be_widened(narrow(layers=3))
    weights = widened(call).weights
    for kind in range(4):
        cells = weights[kind::4] if kind else weights[4::4]
        assert run.stack(cells).data_ptr() == cells[0].data_ptr(), "copied once more"


@without_a_gpu
@pytest.mark.parametrize("strategy", ["persistent", "library"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_widened_call_gives_what_pytorch_gives(
    monkeypatch: pytest.MonkeyPatch, interpreted: list[Launch], layout: str, shape: tuple[int, int], strategy: str
) -> None:
    if strategy == "library" and (layout in {"packed", "thd"} or shape == (3, 1)):
        pytest.skip("these are one launch")
    monkeypatch.setattr(run, "_choose", lambda spec, *_: Choice("winner", f"for {spec}", VARIANTS[strategy]))
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    monkeypatch.setattr(run, "capturing", lambda _device: True)
    call = narrow(layout, *shape)
    assert_as_pytorch(call, run.forward(to_be_widened(call)))
    assert interpreted
    assert run.choice_of(to_be_widened(call))[0].why.startswith("with 2 units more, so that rows are a multiple")


@without_a_gpu
@pytest.mark.parametrize("shape", [(1, 2), (3, 1)], ids=str)
def test_an_input_that_is_infinite_saturates_gates_and_makes_no_nan(
    monkeypatch: pytest.MonkeyPatch, interpreted: list[Launch], shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "", VARIANTS["persistent"]))
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = narrow("dense", *shape)
    call.input[1, 0, 3] = torch.inf
    assert bool(eager.gru(call)[0].isfinite().all())
    assert_as_pytorch(call, run.forward(to_be_widened(call)))
    assert interpreted


def test_only_the_units_that_were_added_are_silenced() -> None:
    gates = torch.ones(2, 3, 3 * WIDE)
    silence(gates, None)
    assert bool((gates == 1).all())
    silence(gates, NARROW)
    assert gates.view(2, 3, 3, WIDE)[..., :NARROW].sum() == 2 * 3 * 3 * NARROW == gates.sum()


@without_a_gpu
@pytest.mark.parametrize(
    ("layout", "shape", "recompute"),
    [
        *((layout, shape, False) for layout in LAYOUTS for shape in ((1, 1), (2, 2))),
        *((layout, (1, 2), True) for layout in LAYOUTS),
    ],
    ids=str,
)
def test_gradients_of_a_widened_call_are_autograds(
    monkeypatch: pytest.MonkeyPatch,
    interpreted: list[Launch],
    backward: list[Launch],
    layout: str,
    shape: tuple[int, int],
    recompute: bool,
) -> None:
    choose(monkeypatch, ONE)
    monkeypatch.setattr(
        run,
        "_parts",
        lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", VARIANTS["persistent"]))] * call.num_layers,
    )
    call = narrow(layout, *shape)
    exact = doubled(call)
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors]
    call = dataclasses.replace(
        call, input=leaves[0], hx=leaves[1], weights=tuple(leaves[2:]), width=WIDE, recompute=recompute
    )
    outputs, wanted = training.forward(call), eager.gru(exact)
    given = [torch.randn_like(out) for out in outputs]
    found = torch.autograd.grad(outputs, leaves, given)
    assert_alike(found, list(torch.autograd.grad(wanted, exact.tensors, [g.double() for g in given])))
    assert interpreted
    assert backward


# Known calls ----------------------------------------------------------------------------------------------------------


@without_a_gpu
@pytest.mark.parametrize(
    ("shape", "first", "marked"),
    [((1, 1), False, True), ((1, 2), True, False), ((2, 2), True, True), ((2, 2), False, False), ((3, 1), True, False)],
    ids=str,
)
def test_a_known_call_is_widened_again_with_its_own_tensors(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    first: bool,
    shape: tuple[int, int],
    marked: bool,
) -> None:
    poll = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="poll")

    def chosen(spec: GruSpec, *_: Any) -> Choice:
        wide = spec.hidden == WIDE and not (spec.stacked and marked)
        return Choice("default", "", poll, us=0.001) if wide else Choice("eager", "one by one", None)

    monkeypatch.setattr(run, "_choose", chosen)
    monkeypatch.setattr(run, "widening_us", lambda *_, **__: 0.0)
    monkeypatch.setattr(run, "CALLED_LAYER_SAVES_US", 0.0)
    layers, directions = shape
    settings = {"num_layers": layers, "bidirectional": directions == 2, "batch_first": first}
    made = torch.nn.GRU(FEATURES, NARROW, **settings)
    launches = 1 if directions == 1 and not marked else layers
    for time in range(4):  # decided in full, known by its properties, known at once
        x = torch.randn((B, T, FEATURES) if first else (T, B, FEATURES))
        x[0, 0, 0] = torch.inf
        hx = torch.rand(layers * directions, B, NARROW)
        marks = torch.rand(x.shape[:2]) < 0.4 if marked else None
        before = machine.public, machine.direct
        with torch.no_grad():
            made._flat_weights[1].mul_(0.9)  # as an optimizer does, in place
            found = gru(x, hx, made._flat_weights, resets=marks, **settings)
            wanted = eager.gru(dataclasses.replace(_as_call(x, hx, made, settings), resets=marks))
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
        told = machine.public - before[0], machine.direct - before[1]
        assert told == ((launches, 0) if not time else (0, launches))


def _as_call(x: torch.Tensor, hx: torch.Tensor, made: torch.nn.GRU, settings: dict[str, Any]) -> GruCall:
    return gru_call(x, hx, made._flat_weights, **settings)


@without_a_gpu
def test_a_gru_that_is_as_wide_gets_no_plan_of_a_widened_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, backward: list[Launch]
) -> None:
    """Both GRUs have the same kernels and properties; the units that pad the one are real units of the other."""
    poll = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="poll")
    choose(monkeypatch, ONE)
    monkeypatch.setattr(run, "_parts", lambda call, **_: [(*run.spec_of(call, 1), Choice("winner", "", poll))])
    monkeypatch.setattr(training, "stays_on_chip", lambda *_: False)
    monkeypatch.setattr(training, "why_not", lambda call: None if call.hidden == WIDE else "kernels lose")
    for hidden in (NARROW, NARROW, NARROW, WIDE, WIDE, WIDE):
        made = torch.nn.GRU(8, hidden)  # rows of 32 bytes, which stay as they are
        weights = [weight.detach().requires_grad_() for weight in made._flat_weights]
        x, hx = torch.randn(T, B, 8), torch.rand(1, B, hidden)
        before = machine.public + machine.direct
        with torch.enable_grad():
            out, _ = gru(x, hx, weights)
            loss = out.sum()
        assert machine.public + machine.direct > before
        torch.testing.assert_close(out, made(x, hx)[0], rtol=0, atol=2e-3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert backward


# When -----------------------------------------------------------------------------------------------------------------


def test_a_call_is_widened_where_kernels_then_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    for captured in (False, True):

        def widths(hidden: int, steps: int = 200, rows: int = 30, captured: bool = captured, **rest: Any) -> Any:
            made = torch.nn.GRU(hidden, hidden, dtype=torch.bfloat16, device="meta", **rest)
            x = torch.empty(steps, rows, hidden, dtype=torch.bfloat16, device="meta")
            hx = torch.empty(made.num_layers * (1 + made.bidirectional), rows, hidden, dtype=x.dtype, device="meta")
            settings = {"num_layers": made.num_layers, "bidirectional": made.bidirectional}
            call = _as_call(x, hx, made, settings)
            return run.wide(call, captured=captured).width

        assert widths(1001) == 1008
        assert widths(250, steps=1000) == 256
        assert widths(250, steps=1000, bidirectional=True, num_layers=2) == 256
        assert widths(256) is None, "it is as wide as it has to be"
        assert widths(250, steps=1) is None, "copies take longer than one step"


def test_a_wide_input_is_widened_where_its_product_takes_longer_than_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)

    def width(features: int, steps: int) -> int | None:
        made = torch.nn.GRU(features, 512, dtype=torch.bfloat16, device="meta")
        x = torch.empty(steps, 64, features, dtype=torch.bfloat16, device="meta")
        hx = torch.empty(1, 64, 512, dtype=x.dtype, device="meta")
        return run.wide(_as_call(x, hx, made, {}), captured=False).width

    assert width(257, 2000) == 512
    assert width(257, 10) is None
    assert width(256, 2000) is None, "its rows are multiples of 16 bytes"


# nn.GRU took 85 us a step where padded rows take 17, and 74 where they take 25.
SLOW: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "bfloat16": ("bfloat16", 42, 128, 1461, {"bidirectional": True}),
    "float32": ("float32", 131, 326, 994, {}),
}


@pytest.mark.parametrize("case", SLOW)
def test_pytorchs_own_gets_padded_rows_where_it_takes_less_so(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    dtype, steps, rows, hidden, settings = SLOW[case]

    def padded(hidden: int, **others: Any) -> bool:
        made = torch.nn.GRU(hidden, hidden, dtype=getattr(torch, dtype), device="meta", **settings)
        x = torch.empty(steps, rows, hidden, dtype=getattr(torch, dtype), device="meta")
        hx = torch.empty(2 if settings else 1, rows, hidden, dtype=x.dtype, device="meta")
        call = run.wide(dataclasses.replace(_as_call(x, hx, made, settings), **others), captured=False)
        return run.pads_pytorch(call, captured=False)

    assert padded(hidden)
    assert not padded(width_of(hidden, 2)), "it is as wide as it has to be"
    assert not padded(hidden, resets=torch.empty(steps, rows, dtype=torch.bool, device="meta"))
    monkeypatch.setattr(run, "recurrent_precision", lambda: "ieee")
    assert padded(hidden) is (dtype == "bfloat16"), "multiplied without tensor cores, narrow rows take no longer"


def trained(
    monkeypatch: pytest.MonkeyPatch, dtype: str, sizes: tuple[int, int, int], *, captured: bool, **others: Any
) -> GruCall:
    """A call of one layer with a gradient as ``training.wide`` returns it; ``sizes``: steps, rows and units."""
    for module in (run, training):
        monkeypatch.setattr(module, "gpu_of", lambda _device: H100)
    monkeypatch.setattr(run, "capturing", lambda _device: captured)
    for module in (run, training):
        monkeypatch.setattr(module, "why_eager", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    steps, rows, hidden = sizes
    made = torch.nn.GRU(hidden, hidden, dtype=getattr(torch, dtype), device="meta")
    x = torch.empty(steps, rows, hidden, dtype=getattr(torch, dtype), device="meta")
    hx = torch.empty(1, rows, hidden, dtype=x.dtype, device="meta")
    return training.wide(dataclasses.replace(_as_call(x, hx, made, {}), **others))


@pytest.mark.parametrize(
    ("dtype", "sizes", "called", "captured"),
    [
        ("float32", (33, 138, 1714), True, True),  # a step took 257 us on an H100, and 120 with 1742 units
        ("float32", (282, 90, 1057), True, True),
        ("float32", (282, 20, 1457), False, True),  # a slow host takes as long for both
        ("float32", (6, 138, 1714), False, True),  # with so few steps, deciding anew for each call takes too long
        ("float32", (33, 138, 1716), False, False),  # rows of a multiple of 16 bytes
        ("float32", (3, 12, 411), False, False),  # so few steps that copies take longer
    ],
)
def test_pytorchs_own_gets_padded_rows_of_a_call_with_a_gradient(
    monkeypatch: pytest.MonkeyPatch, dtype: str, sizes: tuple[int, int, int], *, called: bool, captured: bool
) -> None:
    for in_graph, pads in ((False, called), (True, captured)):
        call = trained(monkeypatch, dtype, sizes, captured=in_graph)
        assert training.pads_pytorch(call) is pads
        reason = training.why_not(call)
        assert reason is not None
        assert ("units more, so that rows are a multiple of 16 bytes" in reason) is pads


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "meta"), (torch.float32, "cpu")])
def test_a_gradient_of_what_no_kernel_takes_asks_no_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str
) -> None:
    """A GRU in float64 trains on a GPU that has cuDNN, and one on a CPU beside it."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(training, "gpu_of", lambda _device: pytest.fail("a GPU is asked for"))
    monkeypatch.setattr(training, "why_not", lambda _call: "no kernel takes it")
    if device == "meta":  # as on a GPU
        monkeypatch.setattr(training, "why_eager", lambda _x, supported: None if supported else "the dtype")
    made = torch.nn.GRU(1713, 1713, dtype=dtype, device=device)
    x, hx = (torch.empty(n, 100, 1713, dtype=dtype, device=device) for n in (3, 1))
    assert training.wide(_as_call(x, hx, made, {})).width is None


def test_pytorchs_own_of_a_gradient_stays_as_it_is_where_padding_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, captured = (33, 138, 1714), True
    marked = torch.empty(33, 138, dtype=torch.bool, device="meta")
    assert trained(monkeypatch, "float32", sizes, captured=captured, resets=marked).width is None
    assert trained(monkeypatch, "float32", sizes, captured=captured, dropout=0.5).width is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "enabled", False)
        assert trained(patch, "float32", sizes, captured=captured).width is None
    monkeypatch.setattr(run, "recurrent_precision", lambda: "ieee")
    assert trained(monkeypatch, "float32", sizes, captured=captured).width is None, (
        "without tensor cores they take no longer"
    )


@pytest.mark.parametrize(
    ("rows", "hidden", "both", "captured"),
    [
        (258, 1461, True, False),
        (258, 1461, True, True),
        (
            70,
            1511,
            False,
            True,
        ),  # nn.GRU is thought to take 29 us a step, less than a slow host takes for our steps
        (244, 813, False, False),
        (244, 813, False, True),
    ],
)
def test_a_launch_for_each_step_of_padded_rows_serves_where_that_takes_less(
    monkeypatch: pytest.MonkeyPatch, rows: int, hidden: int, *, both: bool, captured: bool
) -> None:
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    made = torch.nn.GRU(hidden, hidden, dtype=torch.bfloat16, device="meta", bidirectional=both)
    x = torch.empty(42, rows, hidden, dtype=torch.bfloat16, device="meta")
    hx = torch.empty(2 if both else 1, rows, hidden, dtype=torch.bfloat16, device="meta")
    call = run.wide(_as_call(x, hx, made, {"bidirectional": both}), captured=captured)
    ((spec, _, choice),) = run._parts(call, captured=captured)
    assert spec.hidden == width_of(hidden, 2)
    assert (choice.rule, choice.variant.strategy) == ("model", "library")
    assert not run.pads_pytorch(call, captured=captured)


def padded(
    shape: tuple[int, int, int], layers: int = 1, dtype: torch.dtype = torch.bfloat16, *, captured: bool = False
) -> Any:
    """The call of a GRU of (steps, rows, units), as ``run.wide`` returns it."""
    steps, rows, hidden = shape
    made = torch.nn.GRU(hidden, hidden, layers, dtype=dtype, device="meta")
    x, hx = (torch.empty(n, rows, hidden, dtype=dtype, device="meta") for n in (steps, layers))
    return run.wide(_as_call(x, hx, made, {"num_layers": layers}), captured=captured)


def test_a_host_that_is_slow_takes_as_long_for_padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 rows of 1404 units: the model gives nn.GRU 22 us a step, ours 9; a slow host takes 37; one launch 17."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    for captured, strategy in ((False, "persistent"), (True, "library")):
        call = padded((70, 80, 1404), captured=captured)
        ((_, _, choice),) = run._parts(call, captured=captured)
        assert (call.width, choice.variant.strategy) == (1408, strategy)


@pytest.mark.parametrize(
    ("shape", "layers", "dtype"),
    [
        ((237, 179, 918), 1, torch.bfloat16),
        ((179, 47, 1156), 2, torch.bfloat16),
        ((77, 272, 315), 2, torch.float32),
        ((40, 44, 1924), 3, torch.bfloat16),
    ],
)
def test_a_kernel_in_one_launch_serves_a_padded_call_whose_steps_take_the_host_as_long_as_before(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], layers: int, dtype: torch.dtype
) -> None:
    """108 such calls were measured: each was faster, on average twice as fast."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = padded(shape, layers, dtype)
    assert call.width == width_of(shape[2], dtype.itemsize)
    parts = run._parts(call)
    assert all(choice.variant is not None and choice.variant.strategy == "persistent" for _, _, choice in parts)
    assert "a host as long with padded rows" in parts[0][2].why
    assert not run.pads_pytorch(call)


def test_what_padded_calls_are_served_by_is_nothing_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 78 measured trainings of this kind, 55 were slower than nn.GRU."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = padded((237, 179, 918))
    ours, trained = (run._parts(call, trained=trained)[0][2].variant for trained in (False, True))
    assert ours.strategy == "persistent"
    assert trained is None or trained.strategy == "library"


def test_pytorchs_own_of_padded_rows_stays_where_a_kernel_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model gives a kernel 16 us a step of a layer, PyTorch's operator 10, or 17 as long as a usual host."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = padded((24, 85, 1173), 3)
    assert call.width == 1176
    assert run.pads_pytorch(call)


def test_pytorchs_own_is_padded_where_a_kernel_is_there_that_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = padded((128, 476, 602))
    assert call.width == 608
    assert call.left
    assert run.pads_pytorch(call)
    assert run._parts(dataclasses.replace(call, left=False))[0][2].variant is not None
    assert (call.as_given.width, call.as_given.left) == (None, False)


@pytest.mark.parametrize("steps", [20, 64, 2000])
def test_what_a_row_of_another_size_took_is_not_what_a_call_replaces(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The row's time stood for the whole call, however long: at 1000 steps no kernel seemed to win, at 20 any did."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = padded((steps, 12, 1231), dtype=torch.float32)
    ((_, _, narrow),) = run._parts(call.as_given)
    assert narrow.variant is None
    assert narrow.us == 0
    assert call.width == 1232
    assert run._parts(call)[0][2].variant.staged


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_padded_call_replaces_takes_at_least_what_it_is_thought_to(dtype: str) -> None:
    """Nine in ten of the random GRUs whose rows are no multiple of 16 bytes took at least that time."""
    found = []
    for path in sorted(RESULTS.glob("random/nvidia_h*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if "theirs_graph_us" not in row or "features" in row or row.get("hidden", 0) <= run.SOME_UNITS:
                continue
            if row["dtype"] != dtype or not run.FEW_ROWS < row["batch"] <= run.SOME_ROWS:
                continue
            both, layers = 2 if row["bidirectional"] else 1, row["layers"]
            spec, size = GruSpec(dtype, row["hidden"], directions=both), GruSize(row["batch"], row["steps"])
            if wider_spec(spec) != spec:
                found.append(row["theirs_graph_us"] / run._replaced_us(spec, size, layers, captured=True))
    assert len(found) > 150
    assert sorted(found)[len(found) // 10] >= 1.0


def test_padding_spares_a_call_of_pytorchs_own_nothing_that_the_host_takes() -> None:
    """3 layers of 1543 units take 15 us a step of a layer and direction in a graph, of 1544 6; a slow host 24 or more."""
    spec, size = GruSpec("bfloat16", 1543, directions=2), GruSize(35, 57)
    assert run.pays_pytorch(spec, size, 3, captured=True)
    assert not run.pays_pytorch(spec, size, 3, captured=False)
    assert run.pays_pytorch(dataclasses.replace(spec, hidden=1461), GruSize(258, 42), 1, captured=False)


def test_padding_for_autograd_is_an_operator_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, size = GruSpec("bfloat16", 99), GruSize(8, 64)
    once, each = (widening_us(spec, size, 1, captured=False, autograd=autograd) for autograd in (False, True))
    assert each > 5 * once
    asked: list[bool] = []
    monkeypatch.setattr(training, "widening_us", lambda *_, **named: asked.append(named.get("autograd", False)) or 0.0)
    monkeypatch.setattr(training, "why_not", lambda _call: None)
    monkeypatch.setattr(run, "kernels_us", lambda call, **_: 1000.0 if call.width is None else 100.0)
    assert training.wide(narrow()).width == WIDE
    assert asked == [True]


@without_a_gpu
@pytest.mark.usefixtures("machine")
def test_cudnn_finds_biases_of_0_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "flatten", laid_by_cudnn)
    call = narrow(layers=2, directions=2, bias=False)
    made = padding.padding_of(to_be_widened(call), flat=True)
    assert made is not None
    _, _, weights = made.pad(call.input, call.hx, call.weights)
    end = max(w.storage_offset() + w.numel() for w in weights)
    behind = torch.as_strided(weights[0], (4 * 2 * 3 * WIDE,), (1,), end)
    assert not bool(behind.any())


@without_a_gpu
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("layers", "directions", "bias", "packed"), [(1, 1, True, False), (2, 2, False, False), (3, 1, True, True)]
)
def test_pytorchs_own_is_given_what_cudnn_need_not_copy(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    directions: int,
    bias: bool,
    packed: bool,
    first: bool,
) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("eager", "it takes less", None))
    monkeypatch.setattr(run, "pays_pytorch", lambda *_, **__: True)
    monkeypatch.setattr(padding, "flatten", laid_by_cudnn)
    settings: dict[str, Any] = {
        "num_layers": layers,
        "bidirectional": directions > 1,
        "bias": bias,
        "batch_first": first,
    }
    theirs, ours = torch.nn.GRU(7, NARROW, **settings), tuned.nn.GRU(7, NARROW, **settings)
    ours.load_state_dict(theirs.state_dict())
    genuine, given = torch.gru, []
    for time in range(3):
        x: Any = torch.randn(3, 2, 7)
        x[0, 0, 0] = torch.inf
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=False) if packed else x
        want, want_h = theirs(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "gru", lambda *a: given.append(a) or genuine(*a))
            out, h_n = ours(x)
        for one, other in zip(
            (out.data, h_n) if packed else (out, h_n), (want.data, want_h) if packed else (want, want_h), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
            assert one.is_contiguous()
        weights = given[-1][3 if packed else 2]
        assert weights[1].shape == (3 * WIDE, WIDE)
        if time:
            assert machine.copies > 0
            assert weights[0].storage_offset() == 0, "cuDNN takes weights from the start of their memory"
    assert len(given) == 3
    assert run.why_not(dataclasses.replace(narrow(), width=WIDE)) == (
        "it takes less; with 2 units more, so that rows are a multiple of 16 bytes"
    )


@without_a_gpu
@pytest.mark.usefixtures("machine")
def test_weights_that_cudnn_has_in_another_order_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "flatten", lambda weights, call: laid_by_cudnn(weights[::-1], call))
    assert padding.padding_of(to_be_widened(narrow()), flat=True) is None
    monkeypatch.setattr(padding, "flatten", lambda *_: None)
    assert padding.padding_of(to_be_widened(narrow()), flat=True) is None, "cuDNN is off"
    monkeypatch.setattr(padding, "flatten", laid_by_cudnn)
    assert padding.padding_of(to_be_widened(narrow()), flat=True) is not None


@without_a_gpu
@pytest.mark.usefixtures("machine")
def test_without_direct_launches_pytorchs_own_gets_the_call_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "padding_of", lambda *_, **__: None)
    monkeypatch.setattr(run, "learn_library", lambda *_, **__: None)
    call = narrow()
    for one, other in zip(run.padded_pytorch(to_be_widened(call)), eager.gru(call), strict=True):
        assert torch.equal(one, other)


@without_a_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_alone_is_widened(monkeypatch: pytest.MonkeyPatch, interpreted: list[Launch], layout: str) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "", VARIANTS["persistent"]))
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    first = layout == "first"
    call = call_of("dense" if first else layout, 2, 2, first=first)
    wide = widened(dataclasses.replace(call, width=call.hx.shape[2]))
    assert (wide.input.shape[-1], wide.units) == (8, None)
    assert_as_pytorch(call, run.forward(dataclasses.replace(call, width=call.hx.shape[2])))
    assert interpreted


def test_a_graph_spares_pytorchs_own_the_host() -> None:
    """A call of 16 rows of 512 units takes the host at least 8 us a step, and the device 6."""
    spec, size = GruSpec("bfloat16", 512), GruSize(16, 1000)
    called, captured = (run.library_us_of(spec, size, 3, captured=captured) for captured in (False, True))
    assert called == 3 * 8 * 1000
    assert captured < 12 * 1000


def test_what_draws_random_numbers_stays_as_it_is() -> None:
    call = dataclasses.replace(narrow(layers=2), dropout=0.5)
    assert run.wide(call) is call
    assert training.wide(call) is call


@pytest.mark.parametrize(
    ("narrow_us", "wide_us", "pays"),
    [(100.0, 40.0, True), (100.0, 99.0, True), (100.0, 123.0, False), (None, 40.0, True), (None, 5e4, False)],
)
def test_widening_must_win_by_what_the_model_may_err(narrow_us: float | None, wide_us: float, *, pays: bool) -> None:
    spec, size, variant = GruSpec("bfloat16", 99), GruSize(8, 64), GruVariant("persistent")
    before = Choice("eager", "", None) if narrow_us is None else Choice("model", "", variant, us=narrow_us)
    after = Choice("model", "", variant, us=wide_us)
    assert widening_us(spec, size, 1, captured=True) < 8.0
    assert run.pays(spec, size, 1, [before], [after], captured=True) is pays
    unknown = dataclasses.replace(after, us=0.0)
    assert not run.pays(spec, size, 1, [before], [unknown], captured=True)
    assert not run.pays(spec, size, 1, [before], [dataclasses.replace(after, variant=None)], captured=True)


@pytest.mark.parametrize(("wide_us", "pays"), [(91.0, False), (90.0, True)])
def test_form_row_is_padded_for_the_product_of_the_input_alone(wide_us: float, *, pays: bool) -> None:
    spec, size, variant = GruSpec("float32", 99), GruSize(8, 64), row_variant(99)
    before, after = (Choice("model", "", variant, us=us) for us in (100.0, wide_us))
    assert 4.1 < widening_us(spec, size, 1, captured=True) < 4.9
    assert run.pays(spec, size, 1, [before], [after], captured=True) is pays


def test_a_row_of_pytorchs_own_time_counts_before_what_is_thought_of_it() -> None:
    spec, size, variant = GruSpec("float32", 99), GruSize(8, 64), GruVariant("persistent")
    ours = [Choice("model", "", variant, us=100.0)]
    thought = Choice("eager", "", None, us=50.0)
    assert run.pays(spec, size, 1, [thought], ours, captured=True) == (
        run.library_us_of(spec, size, 1, captured=True) > 150
    )
    measured: Any = dataclasses.replace(thought, row="a row")
    assert not run.pays(spec, size, 1, [measured], ours, captured=True)
    slow: Any = dataclasses.replace(measured, us=500.0)
    assert run.pays(spec, size, 1, [slow], ours, captured=True)


def test_where_pytorchs_own_has_no_resets_a_kernel_serves_at_any_time() -> None:
    spec, size = GruSpec("float32", 99, resets=True), GruSize(8, 64)
    ours = [Choice("default", "", GruVariant("persistent"), us=1e9)]
    assert run.pays(spec, size, 1, [Choice("eager", "", None)], ours, captured=False)


def test_a_gradient_is_widened_where_kernels_serve_it_only_so(monkeypatch: pytest.MonkeyPatch) -> None:
    call = narrow()
    monkeypatch.setattr(training, "stays_on_chip", lambda *_: False)
    monkeypatch.setattr(training, "_pays_pytorch", lambda _call: False)
    monkeypatch.setattr(run, "kernels_us", lambda _call, **_: 0.0)
    for served, width in (({NARROW, WIDE}, None), ({WIDE}, WIDE), (set(), None), ({NARROW}, None)):
        monkeypatch.setattr(training, "why_not", lambda call, served=served: None if call.hidden in served else "slow")
        assert training.wide(call).width == width
    monkeypatch.setattr(training, "stays_on_chip", lambda *_: True)
    monkeypatch.setattr(training, "why_not", lambda call: "slow" if call.hidden == NARROW else None)
    assert training.wide(call).width is None, "PyTorch's own is fast there"


@pytest.mark.parametrize(
    ("features", "hidden", "steps", "width"),
    [(257, 512, 2000, 512), (256, 512, 2000, None), (257, 512, 8, None), (300, 500, 2000, 504), (300, 500, 8, None)],
)
def test_a_gradient_is_widened_where_its_products_then_take_less(
    monkeypatch: pytest.MonkeyPatch, features: int, hidden: int, steps: int, width: int | None
) -> None:
    monkeypatch.setattr(training, "why_not", lambda _call: None)
    monkeypatch.setattr(run, "kernels_us", lambda _call, **_: 0.0)
    assert training.wide(to_be_trained(steps, 64, features, hidden)).width == width


@pytest.mark.parametrize(
    ("narrow_us", "captured", "width"),
    [(1400.0, False, 504), (500.0, False, None), (500.0, True, 504), (150.0, True, None)],
)
def test_a_gradient_is_widened_where_its_recurrence_then_takes_less(
    monkeypatch: pytest.MonkeyPatch, narrow_us: float, *, captured: bool, width: int | None
) -> None:
    """A padded forward of kernels takes 100 us. In a call, padding takes about 200 us, and to decide for it 300 more."""
    monkeypatch.setattr(training, "why_not", lambda _call: None)
    monkeypatch.setattr(run, "capturing", lambda _device: captured)
    monkeypatch.setattr(run, "kernels_us", lambda call, **_: narrow_us if call.width is None else 100.0)
    assert training.wide(to_be_trained(300, 1, 504, 500)).width == width
    monkeypatch.setattr(run, "kernels_us", lambda call, **_: narrow_us if call.width is None else 0.0)
    assert training.wide(to_be_trained(300, 1, 504, 500)).width is None, "nothing says what kernels take"


def test_a_model_says_what_the_recurrence_of_a_gradient_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 took 4.9 ms for 608 steps of 12 rows of 411 units, forward and backward in a graph, and 2.5 with 416."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: H200)
    call = to_be_trained(608, 12, 411, 411)
    narrow, broad = (run.kernels_us(one, trained=True) for one in (call, dataclasses.replace(call, width=416)))
    assert 0 < broad < 0.75 * narrow


def to_be_trained(steps: int, batch: int, features: int, hidden: int) -> GruCall:
    made = torch.nn.GRU(features, hidden, dtype=torch.bfloat16, device="meta")
    x = torch.empty(steps, batch, features, dtype=torch.bfloat16, device="meta")
    return _as_call(x, torch.empty(1, batch, hidden, dtype=x.dtype, device="meta"), made, {})


def test_explain_says_that_a_call_is_widened() -> None:
    module = tuned.nn.GRU(1001, 1001, dtype=torch.bfloat16)
    with torch.no_grad():
        told = tuned.explain(module, torch.empty(256, 4, 1001, dtype=torch.bfloat16), gpu="nvidia_h200")
    assert "with 7 units more" in told.why
