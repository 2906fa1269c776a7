"""The plan of a repeated GRU call: which launch it makes, which calls it never serves, and what it keeps alive."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tuned.launching.plan
import tuned.nn
from tests.support.copies import by_loops
from tests.support.gru_machine import Machine, machine
from tests.support.precisions import other_gemms
from tests.support.run import INTERPRETED
from tuned import dispatch
from tuned.calls.gru import eager, plan, project, run
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.dispatch import gru
from tuned.families.gru.launches import Recurrence, counters_needed
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.launch import Launch
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.launching import left, rehearsal
from tuned.launching.plan import DirectLaunch
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["machine"]

pytestmark = pytest.mark.interpreter

T, B, FEATURES, H = 3, 2, 5, 16
SPIN = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="spin")
POLL = dataclasses.replace(SPIN, exchange="poll")  # a variant that the interpreter can run
HEAD = (0, None, None, None)  # the arguments that the launcher adds
without_a_gpu = pytest.mark.skipif(not INTERPRETED, reason="this stands in for a GPU where there is none")
COUNTER = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="counter")
ALONE = GruVariant("persistent", block_hidden=64, num_warps=4)
ROW = GruVariant("persistent", "row", 32, 1, num_warps=1)
STAGED = GruVariant("persistent", "staged", 16, 16, "spin", num_warps=8)


class Wiretap:
    """Records the launch that a direct launch was made from, and the arguments of each call of it."""

    def __init__(self) -> None:
        self.learned: list[Launch] = []
        self.fired: list[tuple[Any, ...]] = []
        self.listeners = types.SimpleNamespace(calls=[])

    def direct(self, launch: Launch, compiled: Any, device: Any) -> DirectLaunch:
        del compiled, device
        self.learned.append(launch)
        numbers = tuple(v for v in launch.arguments if not isinstance(v, torch.Tensor))
        rest = (*numbers, *launch.constants.values())
        silent = types.SimpleNamespace(calls=[])
        return DirectLaunch(
            lambda *g: self.fired.append(g), 0, HEAD, launch.programs, rest, lambda _: 7, self.listeners, silent
        )


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiretap]:
    made = Wiretap()
    monkeypatch.setattr(plan, "direct_launch", made.direct)
    monkeypatch.setattr(plan, "launches_of", by_loops)
    monkeypatch.setattr(plan, "_PLANS", {})
    monkeypatch.setattr(plan, "_TRAINED", {})
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: False)
    with torch.no_grad():
        yield made


def weights_of(layers: int, directions: int, *, bias: bool = True, flat: bool = False) -> list[torch.Tensor]:
    shapes = []
    for layer, _ in itertools.product(range(layers), range(directions)):
        shapes += [(3 * H, FEATURES if layer == 0 else directions * H), (3 * H, H)] + [(3 * H,), (3 * H,)] * bias
    if not flat:
        return [torch.randn(shape) for shape in shapes]
    memory, at, views = torch.randn(sum(torch.Size(s).numel() for s in shapes)), 0, []
    for shape in shapes:
        count = torch.Size(shape).numel()
        views.append(memory[at : at + count].view(shape))
        at += count
    return views


def learned(
    variant: GruVariant, weights: list[torch.Tensor], *, captured: bool = True, gradient: bool = False, **settings: Any
) -> tuple[GruCall, GruSpec]:
    """A call on the CPU that was served in full, and whose plan was then kept."""
    call = gru_call(torch.randn(T, B, FEATURES), torch.randn(hidden_rows(settings), B, H), weights, **settings)
    directions = 2 if call.bidirectional else 1
    spec = GruSpec("float32", H, "dense", directions, call.num_layers, call.has_biases)
    each = 4 if call.has_biases else 2
    cells = [call.weights[i : i + each] for i in range(0, len(call.weights), each)]
    tokens = call.input.shape[:-1]
    recurrence = Recurrence(
        gates=torch.empty(directions, *tokens, 3 * H).transpose(1, 2)
        if call.batch_first
        else torch.empty(directions, *tokens, 3 * H),
        weight_ih=run.stack([c[0] for c in cells[1:]]) if spec.stacked else None,
        weight_hh=run.stack([c[1] for c in cells]),
        bias_ih=run.stack([c[2] for c in cells]) if spec.bias else None,
        bias_hh=run.stack([c[3] for c in cells]) if spec.bias else None,
        h_0=call.hx,
        out=torch.empty(*tokens, directions * H),
        between=torch.empty(spec.layers - 1, *tokens, H) if spec.stacked else None,
        h_n=torch.empty_like(call.hx),
        batch=B,
        seq=T,
        states=torch.empty(directions, B, H) if variant.in_turn else None,
        counters=torch.empty(counters_needed(spec, B), dtype=torch.int32),
    )
    launched = plan.Launched(call, spec, variant, recurrence, "compiled")
    plan.learn(call, [launched], captured=captured, gradient=gradient)
    return call, spec


def hidden_rows(settings: dict[str, Any]) -> int:
    return int(settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1))


def again(call: GruCall, weights: Any = None) -> Any:
    settings = (call.has_biases, call.num_layers, call.bidirectional, call.batch_first)
    return plan.known(call.input, call.hx, weights or call.weights, settings)


CASES = {
    "layer": (SPIN, {}, False),
    "without bias": (SPIN, {"bias": False}, False),
    "counter": (COUNTER, {}, False),
    "both ways, apart": (SPIN, {"bidirectional": True}, False),
    "both ways, together": (SPIN, {"bidirectional": True}, True),
    "in turn": (dataclasses.replace(SPIN, turns=2), {}, False),
    "in turn, both ways, by counters": (dataclasses.replace(COUNTER, turns=3), {"bidirectional": True}, True),
    "stack, apart": (SPIN, {"num_layers": 3}, False),
    "stack, together": (SPIN, {"num_layers": 3}, True),
    "staged": (STAGED, {}, False),
    "staged, both ways": (STAGED, {"bidirectional": True}, True),
    "rows": (ROW, {}, False),
    "rows, both ways, without bias": (ROW, {"bidirectional": True, "bias": False}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_seen_before_is_the_same_launch_on_its_own_tensors(
    tap: Wiretap, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    variant, settings, flat = CASES[case]
    weights = weights_of(
        settings.get("num_layers", 1),
        2 if settings.get("bidirectional") else 1,
        bias=settings.get("bias", True),
        flat=flat,
    )
    # New memory may hold what an earlier call put there.
    monkeypatch.setattr(
        tuned.launching.plan,
        "_maker",
        lambda shape, _, device, dtype: lambda: torch.zeros(shape, device=device, dtype=dtype),
    )
    call, spec = learned(variant, weights, **settings)
    out, h_n = again(call)
    (launch,), (fired,) = tap.learned, tap.fired
    tensors = [t for t in launch.arguments if isinstance(t, torch.Tensor)]
    numbers = [n for n in launch.arguments if not isinstance(n, torch.Tensor)]
    assert fired[:4] == (launch.programs, 1, 1, 7)
    given = fired[9:]
    assert list(given[len(tensors) :]) == [*numbers, *launch.constants.values()]
    pointers = given[: len(tensors)]
    assert out.data_ptr() in pointers
    assert h_n.data_ptr() in pointers
    order = ["gates", *["weight_ih"] * spec.stacked, "weight_hh", "bias_ih", "bias_hh", "h_0", "out"]
    named = dict(zip(order, pointers, strict=False))
    assert named["out"] == out.data_ptr()
    assert named["h_0"] == call.hx.data_ptr()
    if flat or case in ("layer", "counter"):  # read where they lie
        assert named["weight_hh"] == call.weights[1].data_ptr()
        assert not spec.stacked or named["weight_ih"] == call.weights[4].data_ptr()
    if not spec.bias:
        assert named["bias_ih"] == named["bias_hh"] == call.hx.data_ptr()
    filled = out.view(torch.int32)
    assert bool((filled == -1).all()) is (variant.exchange != "counter"), "what readers wait to see go away"
    assert out.shape == (T, B, spec.directions * H)


def layer_by_layer(variant: GruVariant, spec: GruSpec, *_: Any) -> Choice:
    """No single launch has all layers of a stack."""
    return Choice("eager", "one by one", None) if spec.stacked else Choice("default", "", variant)


LAYERS: dict[str, dict[str, Any]] = {
    "both ways": {"num_layers": 2, "bidirectional": True},
    "both ways, batch first, no bias": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
    "three one way": {"num_layers": 3},
}


@without_a_gpu
@pytest.mark.parametrize("variant", [POLL, ROW], ids=lambda v: v.form)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_are_launched_one_after_another_have_one_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str, marked: bool, variant: GruVariant
) -> None:
    monkeypatch.setattr(run, "_choose", functools.partial(layer_by_layer, variant))
    settings = LAYERS[case]
    made = torch.nn.GRU(FEATURES, H, **settings)
    weights = made._flat_weights
    first = [torch.randn(T, B, FEATURES), torch.randn(hidden_rows(settings), B, H)]
    strides: set[Any] = set()
    # TensorFloat-32 rounds.
    for time in range(4):  # decided in full, known by its properties, known at once
        x, hx = (torch.randn_like(t) for t in first)
        x = x.transpose(0, 1).contiguous() if settings.get("batch_first") else x
        marks = torch.rand(x.shape[:2]) < 0.4 if marked else None  # other marks in each call
        launches = machine.public, machine.direct
        out, h_n = gru(x, hx, weights, resets=marks, **settings)
        call = gru_call(x, hx, weights, resets=marks, **settings)
        want, want_h = made(x, hx) if marks is None else eager.gru(call)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, want_h, rtol=0, atol=2e-3)
        strides.add((out.stride(), h_n.stride()))
        layers = settings["num_layers"]
        assert (machine.public - launches[0], machine.direct - launches[1]) == (
            (layers, 0) if not time else (0, layers)
        )
    assert len(strides) == 1


@pytest.fixture
def stepped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Every call runs by steps of strategy "library", and a stack runs layer by layer."""

    monkeypatch.setattr(run, "_choose", functools.partial(layer_by_layer, GruVariant()))
    monkeypatch.setattr(run, "timely", lambda choice, *_, **__: choice)
    torch.manual_seed(0)
    return machine


STEPS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first, no bias": {"batch_first": True, "bias": False},
    "both ways": {"bidirectional": True},
    "two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "both ways, whose first step is another kernel": {"hidden_size": 24, "bidirectional": True},
}


@without_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", STEPS)
def test_steps_of_the_library_have_a_plan_of_all_their_launches(
    stepped: Machine, case: str, dtype: torch.dtype
) -> None:
    settings = dict(STEPS[case])
    hidden = settings.pop("hidden_size", H)
    made = torch.nn.GRU(FEATURES, hidden, **settings, dtype=dtype)
    launches = T * settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)
    for time in range(4):  # decided in full, known by its properties, known at once
        shape = (B, T, FEATURES) if settings.get("batch_first") else (T, B, FEATURES)
        x = torch.randn(shape, dtype=dtype)
        hx = torch.rand(hidden_rows(settings), B, hidden, dtype=dtype) - 0.5  # in float16: multiples of 2^-12
        before = stepped.public, stepped.direct
        out, h_n = gru(x, hx, made._flat_weights, **settings)
        want, want_h = made(x, hx)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, want_h, rtol=0, atol=2e-3)
        told = stepped.public - before[0], stepped.direct - before[1]
        assert told == ((launches, 0) if not time else (0, launches))


@without_a_gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_steps_of_the_library_take_strided_tensors(stepped: Machine, rows: int) -> None:
    """Transposed inputs and weights have a plan; states of other strides, or one state for all rows, have none."""
    made = torch.nn.GRU(FEATURES, H)
    weights = [w.t().contiguous().t() if w.ndim > 1 else w for w in made._flat_weights]
    plain = torch.randn(1, rows, H)
    for hx, planned in (
        (plain, True),
        (torch.randn(1, rows, 2 * H)[..., ::2], False),
        (plain[:, :1].expand(1, 4, H), False),
    ):
        x = torch.randn(hx.shape[1], T, FEATURES).transpose(0, 1)
        before = stepped.direct
        for _ in range(3):
            for got, want in zip(gru(x, hx, weights), made(x, hx), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
        assert stepped.direct - before == (2 * T if planned else 0)


@without_a_gpu
@pytest.mark.parametrize("what", ["rows of 18 bytes", "a bias at 2 bytes"])
def test_steps_that_are_no_one_kernel_have_no_plan(stepped: Machine, what: str) -> None:
    """Addresses that 16 does not divide need another compiled kernel; rows of 18 bytes have both kinds."""
    hidden = 9 if what == "rows of 18 bytes" else H
    made = torch.nn.GRU(FEATURES, hidden, dtype=torch.float16)
    weights = list(made._flat_weights)
    if hidden == H:
        weights[2] = torch.cat((weights[2][:1], weights[2]))[1:]
    x, hx = torch.randn(T, B, FEATURES).half(), (torch.rand(1, B, hidden) - 0.5).half()
    for time in range(3):
        torch.testing.assert_close(gru(x, hx, weights)[0], made(x, hx)[0], rtol=0, atol=2e-3)
        assert (stepped.public, stepped.direct) == ((time + 1) * T, 0)


@without_a_gpu
@pytest.mark.parametrize("strategy", ["persistent", "library"])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_product_that_a_kernel_makes_is_made_by_a_known_call_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, directions: int, strategy: str
) -> None:
    """For example if torch multiplies float32 by IEEE rules and a GRU multiplies in TensorFloat-32."""
    variant = POLL if strategy == "persistent" else GruVariant()
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", variant))
    monkeypatch.setattr(run, "timely", lambda choice, *_, **__: choice)
    monkeypatch.setattr(project, "by_library", lambda *_: False)
    monkeypatch.setattr(plan, "by_library", lambda *_: False)
    monkeypatch.setattr(project, "_projection", lambda *_: LinearCatVariant())
    products: list[str] = []

    def launch(_device: Any, launch: Launch) -> str:
        products.append(launch.kernel)
        machine.interpret(launch)
        return "compiled"

    monkeypatch.setattr(project, "launch_known", launch)
    made = torch.nn.GRU(FEATURES, H, bidirectional=directions == 2)
    steps = 1 if strategy == "persistent" else T * directions
    for time in range(4):
        x, hx = torch.randn(T, B, FEATURES), torch.randn(directions, B, H)
        before = machine.public, machine.direct
        for got, want in zip(gru(x, hx, made._flat_weights, bidirectional=directions == 2), made(x, hx), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=3e-3)
        told = machine.public - before[0], machine.direct - before[1]
        planned = directions if strategy == "persistent" else 0  # with few steps the products are launched directly too
        assert told == ((steps, 0) if not time else (0, steps + planned))
        assert len(products) == directions * (1 if planned else time + 1)


@without_a_gpu
def test_a_product_of_an_input_that_is_copied_is_decided_each_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "by_library", lambda *_: False)
    monkeypatch.setattr(project, "_projection", lambda *_: LinearCatVariant())
    rows, weight, out = torch.randn(6, FEATURES), torch.randn(3 * H, FEATURES), torch.empty(6, 3 * H)
    for other in ((rows.t().contiguous().t(), weight), (rows, weight.t().contiguous().t())):
        assert project.product_of(*other, out, "tf32") is None
    product = project.product_of(rows, weight, out, "tf32")
    assert product is not None
    product(rows, weight, out.data_ptr())
    torch.testing.assert_close(out, rows @ weight.t(), rtol=0, atol=2e-2)
    monkeypatch.setattr(project, "compiled_before", lambda *_: None)
    assert project.product_of(rows, weight, out, "tf32") is None, "it was never launched"
    assert machine.direct == 1


@without_a_gpu
def test_a_layer_that_cannot_be_launched_leaves_the_call_to_the_long_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", POLL))
    settings = LAYERS["both ways"]
    made = torch.nn.GRU(FEATURES, H, **settings)
    weights, x, hx = made._flat_weights, torch.randn(T, B, FEATURES), torch.randn(4, B, H)
    genuine = plan._plan

    def second_fails(launched: plan.Launched, direct: Any) -> Any:
        return (lambda *_: None) if launched.call.input.shape[-1] != FEATURES else genuine(launched, direct)

    monkeypatch.setattr(plan, "_plan", second_fails)
    for _ in range(3):
        out, h_n = gru(x, hx, weights, **settings)
        torch.testing.assert_close(out, made(x, hx)[0], rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, made(x, hx)[1], rtol=0, atol=2e-3)
    assert machine.public == 3 * 2


@pytest.mark.parametrize("case", ["layer", "both ways, apart", "stack, together"])
def test_the_forward_of_a_call_with_a_gradient_has_a_plan_of_its_own(tap: Wiretap, case: str) -> None:
    variant, settings, flat = CASES[case]
    layers, directions = settings.get("num_layers", 1), 2 if settings.get("bidirectional") else 1
    call, _ = learned(variant, weights_of(layers, directions, flat=flat), gradient=True, **settings)
    given = call.input, call.hx, call.weights
    assert again(call) is None, "it keeps what no other needs"
    with torch.enable_grad():
        assert plan.trained(*given, plan.settings_of(call)) is None, "nothing needs a gradient"
        call.weights[0].requires_grad_()
        found = plan.trained(*given, plan.settings_of(call))
        assert again(call) is None, "no plan of a call without a gradient takes it"
    out, h_n, gates, between = found(*given)
    pointers = tap.fired[0][9:]
    assert {t.data_ptr() for t in (out, h_n, gates)} <= set(pointers)
    assert (between is None) is (layers == 1)
    assert between is None or (between.shape == (layers - 1, T, B, H) and between.data_ptr() in pointers)
    products = torch.stack([call.input @ w.detach().t() for w in call.weights[: 4 * directions : 4]])
    torch.testing.assert_close(gates.detach().view(products.shape), products)
    assert plan.trained(*given, plan.settings_of(call)) is None, "no gradient is asked for"


@without_a_gpu
@pytest.mark.parametrize("case", ["layer", "both ways", "turns", "counter", "batch first", "rows"])
def test_a_call_with_resets_is_known_by_them(machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    variant = {"turns": dataclasses.replace(POLL, turns=2), "counter": COUNTER, "rows": ROW}.get(case, POLL)
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", variant))
    settings: dict[str, Any] = {"both ways": {"bidirectional": True}, "batch first": {"batch_first": True}}.get(
        case, {}
    )
    made = tuned.nn.GRU(FEATURES, H, **settings)
    batch, steps = (T, B) if settings.get("batch_first") else (B, T)
    x, hx = torch.randn(T, B, FEATURES), torch.randn(2 if made.bidirectional else 1, batch, H)
    for time in range(6):
        marks, before = torch.rand(T, B) < 0.4, machine.direct
        given = marks if time < 4 else torch.stack((marks, ~marks), 2)[..., 0]  # from then on with other strides
        out, h_n = made(x, hx, resets=given)
        want, want_h = eager.gru(gru_call(x, hx, made._flat_weights, resets=marks, **settings))
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, want_h, rtol=0, atol=2e-3)
        assert machine.direct - before == (time not in (0, 4)), "known from the second on"
    public = machine.public
    torch.testing.assert_close(made(x, hx)[0], torch.nn.GRU.forward(made, x, hx)[0], rtol=0, atol=2e-3)
    assert machine.public == public + 1, "one without resets is another call"
    for wrong in (marks[:, :1], marks[0], marks.float(), [marks]):
        with pytest.raises((TypeError, ValueError), match="resets"):
            made(x, hx, resets=wrong)
    assert batch * steps == T * B


@pytest.mark.usefixtures("tap")
def test_what_is_not_like_the_call_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = learned(SPIN, weights_of(1, 1))
    x, hx, weights, settings = call.input, call.hx, call.weights, (True, 1, False, False)
    assert plan.known(x, hx, weights, settings) is not None
    others: dict[str, tuple[Any, ...]] = {
        "length": (torch.randn(T + 1, B, FEATURES), hx, weights, settings),
        "strides": (x.transpose(0, 1).contiguous().transpose(0, 1), hx, weights, settings),
        "alignment": (torch.randn(T * B * FEATURES + 1)[1:].view(T, B, FEATURES), hx, weights, settings),
        "dtype": (x.half(), hx.half(), [w.half() for w in weights], settings),
        "state": (x, torch.randn(1, H, B).transpose(1, 2), weights, settings),
        "weights": (x, hx, [*weights[:1], torch.randn(H, 3 * H).t(), *weights[2:]], settings),
        "subclass": (torch.nn.Parameter(x, requires_grad=False), hx, weights, settings),
        "batch first": (x, hx, weights, (True, 1, False, True)),
        "no tensor": (None, hx, weights, settings),
        "resets": (x, hx, weights, settings, torch.zeros(T, B, dtype=torch.bool)),
        "resets that are none": (x, hx, weights, settings, [False]),
    }
    for what, given in others.items():
        assert plan.known(*given) is None, what
    with torch.enable_grad():
        assert plan.known(x.clone().requires_grad_(), hx, weights, settings) is None, "a gradient"
        assert plan.known(x, hx, weights, settings) is not None, "none is asked for"
    now = torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(allow_tf32=not now):
        assert plan.known(x, hx, weights, settings) is None, "precision of the recurrence"
    with other_gemms():
        assert plan.known(x, hx, weights, settings) is None, "precision of the library's product"
    assert plan.known(x, hx, weights, settings) is not None, "as before"
    for module in (plan, tuned.launching.plan):
        monkeypatch.setattr(module, "_autocast", lambda: True)
    assert plan.known(x, hx, weights, settings) is None, "autocast"


def test_a_profiler_that_listens_gets_a_launch_that_it_sees(tap: Wiretap) -> None:
    call, _ = learned(SPIN, weights_of(1, 1))
    tap.listeners.calls.append("a profiler")
    assert again(call) is None
    assert not tap.fired


@pytest.mark.usefixtures("tap")
def test_weights_whose_distances_changed_go_the_long_way() -> None:
    call, _ = learned(SPIN, weights_of(1, 2, flat=True), bidirectional=True)
    assert again(call) is not None
    assert again(call, weights_of(1, 2)) is None, "the kernel was compiled for other strides"


@pytest.mark.usefixtures("tap")
def test_what_one_launch_cannot_do_again_is_not_remembered() -> None:
    call, _ = learned(GruVariant("steps"), weights_of(1, 1))
    assert again(call) is None


@without_a_gpu
@pytest.mark.parametrize("case", LAYERS)
def test_weights_that_lie_apart_are_brought_together_in_one_launch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The weights of torch.nn.GRU in bfloat16 lie apart, because cuDNN is not asked to flatten them."""
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", POLL))
    monkeypatch.setattr(torch, "stack", functools.partial(stacked_once, torch.stack, calls := []))
    settings = LAYERS[case]
    made = torch.nn.GRU(FEATURES, H, **settings)
    launches = 1 if case == "three one way" else settings["num_layers"]
    for time in range(4):
        weights = [w.detach().clone() for w in made._flat_weights]
        shape = (B, T, FEATURES) if settings.get("batch_first") else (T, B, FEATURES)
        x, hx = torch.randn(shape), torch.randn(hidden_rows(settings), B, H)
        before = machine.direct, machine.copies, len(calls)
        found = gru(x, hx, weights, **settings)
        for one, other in zip(found, made(x, hx), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        if time:
            assert len(calls) == before[2], "a copy for each kind"
            assert machine.direct - before[0] == launches
            each = (
                4 if settings.get("bias", True) else 2
            )  # one launch copies six tensors; it also fills the buffer that programs wait on
            copied = len(weights) - 1 if launches == 1 else 2 * (each - 1)
            assert machine.copies - before[1] == launches * (1 - (-copied // 6))


def stacked_once(genuine: Any, calls: list[Any], *given: Any) -> torch.Tensor:
    calls.append(given)
    return genuine(*given)


STATES: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (H, lambda hx: hx.transpose(0, 1).contiguous().transpose(0, 1)),
    "of one layer 18 bytes behind the other": (9, torch.clone),
    "at 2 bytes": (H, lambda hx: torch.cat((hx.flatten()[:1], hx.flatten()))[1:].view_as(hx)),
}


@without_a_gpu
@pytest.mark.parametrize("states", STATES)
def test_states_that_are_copied_are_copied_by_known_calls_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    monkeypatch.setattr(run, "_choose", functools.partial(layer_by_layer, POLL))
    monkeypatch.setattr(run, "pays", lambda *_, **__: False)
    hidden, lay = STATES[states]
    made = torch.nn.GRU(FEATURES, hidden, num_layers=2, dtype=torch.float16)
    for time in range(4):
        x, hx = torch.randn(T, 1, FEATURES).half(), lay((torch.rand(2, 1, hidden) - 0.5).half())
        before = machine.direct
        out, h_n = gru(x, hx, made._flat_weights, num_layers=2)
        want, want_h = made(x, hx)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, want_h, rtol=0, atol=2e-3)
        assert h_n.is_contiguous()
        assert machine.direct - before == (2 if time else 0), "it took the long way"


@without_a_gpu
@pytest.mark.parametrize("case", ["layer", "padded", "both ways", "two layers", "marked", "rows"])
def test_packed_sequences_have_a_plan_for_each_set_of_lengths(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(run, "_choose", functools.partial(layer_by_layer, ROW if case == "rows" else POLL))
    monkeypatch.setattr(run, "pays", lambda *_, **__: True)
    hidden = 18 if case == "padded" else H
    settings = {"bidirectional": case == "both ways", "num_layers": 2 if case == "two layers" else 1}
    made = torch.nn.GRU(FEATURES, hidden, **settings)  # type: ignore[arg-type]
    ours = tuned.nn.GRU(FEATURES, hidden, **settings)
    ours.load_state_dict(made.state_dict())
    layers = settings["num_layers"]
    monkeypatch.setattr(plan, "_ONCE", {})
    for time, lengths in enumerate([[3, 1], [3, 1], [2, 2], [3, 1], [2, 2], [2, 2]]):
        packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, FEATURES), torch.tensor(lengths))
        before = machine.direct
        if case == "marked":
            hx, marks = torch.randn(1, 2, hidden), torch.rand(len(packed.data)) < 0.4
            given = (packed.data, hx, made._flat_weights)
            out, h_n = gru(*given, batch_sizes=packed.batch_sizes, resets=marks)
            want, want_h = eager.gru(gru_call(*given, batch_sizes=packed.batch_sizes, resets=marks))
        else:
            (out, *_), h_n = ours(packed)
            (want, *_), want_h = made(packed)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(h_n, want_h, rtol=0, atol=2e-3)
        seldom = time in (0, 1, 2, 4)  # a plan is made when the same lengths come again
        assert machine.direct - before == (0 if seldom else layers), "a plan of other lengths served it, or none"


def test_lengths_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_ONCE", {})
    assert [plan._again(key) for key in "aabba"] == [False, True, False, True, False]
    for key in range(2 * plan.MAX_LENGTHS):
        assert not plan._again(key)
    assert len(plan._ONCE) <= plan.MAX_LENGTHS
    assert not plan._again("a"), "it came too long ago"


def test_lengths_that_two_threads_see_again_at_once_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread removes a key between two steps of this thread."""

    class Taken(dict[Any, bool]):
        def __contains__(self, _key: object) -> bool:
            return True

        def __iter__(self) -> Iterator[Any]:
            msg = "dictionary changed size during iteration"
            raise RuntimeError(msg)

    monkeypatch.setattr(plan, "_ONCE", Taken())
    assert not plan._again("a")
    for key in range(plan.MAX_LENGTHS):
        plan._again(key)


@pytest.mark.parametrize(
    "sizes", [torch.tensor([2, 1], dtype=torch.int32), torch.tensor([2, 1], device="meta"), [2, 1]], ids=str
)
def test_batch_sizes_of_another_kind_are_known_by_no_plan(sizes: Any) -> None:
    weights = weights_of(1, 1)
    assert (
        plan.known(torch.randn(3, FEATURES), torch.randn(1, 2, H), weights, (True, 1, False, False), None, sizes)
        is None
    )


def test_a_plan_keeps_nothing_of_the_callers(tap: Wiretap) -> None:
    call, _ = learned(SPIN, weights_of(1, 1))
    assert again(call) is not None
    kept = [weakref.ref(t) for t in call.tensors]
    tap.learned.clear()
    del call
    gc.collect()
    assert [r() for r in kept] == [None] * len(kept)


def test_small_and_odd_float32_products_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, recurrent, rows, features, wanted in (
        ("ieee", "tf32", 10, 6, True),
        ("ieee", "tf32", 10**9, 6, False),
        ("ieee", "tf32", 10**9, 7, True),  # a kernel would load one element at a time
        ("tf32", "ieee", 10, 6, False),
        ("tf32", "ieee", 10, 7, False),  # the product would be too coarse
        ("tf32", "tf32", 10**9, 6, True),
    ):
        monkeypatch.setattr(project, "precision_of", lambda _, now=library: now)
        weight = torch.empty(3 * H, features)
        assert project.by_library(rows, weight, recurrent) is wanted, (library, recurrent, rows, features)
    assert project.by_library(10**9, weight.half(), "tf32")


def test_sizes_are_what_the_kernel_is_told(tap: Wiretap) -> None:
    call, spec = learned(ALONE, weights_of(1, 1))
    assert again(call) is not None
    (launch,) = tap.learned
    assert GruSize(B, T) == GruSize(*launch.arguments[8:10])
    assert launch.constants["HIDDEN"] == spec.hidden


def test_what_no_plan_does_is_asked_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a plan contains neither dropout nor bounds, so such calls must not look for one."""
    monkeypatch.setattr(plan, "known", lambda *_: pytest.fail("a plan was asked for"))
    weights, hx = weights_of(2, 1), torch.randn(2, B, H)
    x, rows = torch.randn(T, B, FEATURES), torch.randn(T * B, FEATURES)
    bounds = torch.arange(0, T * B + 1, T, dtype=torch.int32)
    others: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (x, {"dropout": 0.5, "training": True}),
        (rows, {"cu_seqlens": bounds, "max_seqlen": T}),
    ]
    for given, settings in others:
        out, _ = dispatch.gru(given, hx, weights, num_layers=2, **settings)
        assert out.shape == (*given.shape[:-1], H)


@pytest.mark.parametrize("captured", [True, False])
def test_a_kernel_for_calls_alone_is_not_captured(
    tap: Wiretap, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    call, _ = learned(SPIN, weights_of(1, 1, flat=True), captured=captured)
    assert again(call) is not None
    monkeypatch.setattr(tuned.launching.plan, "_capturing", lambda: True)
    assert (again(call) is not None) == captured
    assert len(tap.fired) == 1 + captured


# Calls that PyTorch serves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False])
def test_what_pytorch_serves_is_remembered_too(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """The plan calls PyTorch's operator with the call's tensors; but not in a graph that has a better one."""
    monkeypatch.setattr(plan, "_PLANS", {})
    monkeypatch.setattr(plan, "_TRAINED", {})
    graph = types.SimpleNamespace(captures=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph.captures)
    module = torch.nn.GRU(H, H, 2, bidirectional=True)
    weights = tuple(module._flat_weights)
    call = GruCall(torch.randn(T, B, H), torch.zeros(4, B, H), weights, True, 2, True, False)
    with torch.no_grad():
        assert again(call) is None
        plan.leave(call, captured=captured)
        other = dataclasses.replace(call, input=torch.randn(T, B, H))
        for ours, theirs in zip(again(other), module(other.input), strict=True):
            assert torch.equal(ours, theirs)
        assert again(dataclasses.replace(call, input=torch.randn(T + 1, B, H))) is None
        graph.captures = True
        assert (again(other) is None) == (not captured)
        graph.captures = False
        copied = torch.zeros(B, 8 * H)[None, :, :H].expand(4, B, H)
        assert again(dataclasses.replace(call, hx=copied)) is None, (
            "a state that cuDNN refuses, since it is not contiguous"
        )
    assert again(other) is None, "with a gradient others are faster"
    plan.leave(call, captured=captured, gradient=True)
    output, _ = again(other)
    output.sum().backward()
    assert weights[0].grad is not None, "PyTorch's own is differentiable"


@pytest.mark.parametrize("captured", [True, False])
def test_sizes_that_are_left_to_pytorch_are_these_alone(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """One dtype, direction, number of layers and weight; and in a CUDA graph only if it was left there."""
    graph = types.SimpleNamespace(captures=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph.captures)
    settings, x, hx = (True, 1, False, False), torch.zeros(T, B, H), torch.zeros(1, B, H)
    module = torch.nn.GRU(H, H)
    weights = tuple(module._flat_weights)
    call = GruCall(x, hx, weights, True, 1, False, False)
    for other in (
        dataclasses.replace(call, dropout=0.5),
        dataclasses.replace(call, cu_seqlens=torch.tensor([0, T], dtype=torch.int32), max_seqlen=T),
    ):
        plan.leave(other, captured=captured)
    assert not left.LEFT
    rows = x.flatten(0, 1)
    plan.leave(dataclasses.replace(call, input=rows, batch_sizes=torch.tensor([B] * T)), captured=captured)
    assert not plan.is_left(x, hx, weights, settings)
    assert plan.is_left(rows, None, weights, settings, T)
    assert not plan.is_left(rows, None, weights, settings, T + 1)
    plan.leave(call, captured=captured)
    assert plan.is_left(x, hx, weights, settings)
    assert not plan.is_left(x, hx, weights, settings, gradient=True)
    plan.leave(dataclasses.replace(call, dropout=0.5), captured=captured, gradient=True)
    assert plan.is_left(x, hx, weights, settings, gradient=True), "of a gradient it is the same with dropout"
    strided = torch.zeros(B, T, H).transpose(0, 1)
    assert plan.is_left(strided, hx, weights, settings), "PyTorch's own takes any strides"
    assert not plan.is_left(x[1:], hx, weights, settings)
    assert not plan.is_left(x, torch.zeros(2, B, H), weights, settings)
    assert not plan.is_left(x.double(), hx.double(), weights, settings)
    assert not plan.is_left(x, hx, weights, (True, 1, True, False))
    assert not plan.is_left(x, hx, tuple(torch.nn.GRU(H, H)._flat_weights), settings)
    with rehearsal.listen(rehearsal.Heard()):
        assert not plan.is_left(x, hx, weights, settings), "it must be told of every call"
    with monkeypatch.context() as patch:
        patch.setattr(left, "_autocast", lambda: True)
        assert not plan.is_left(x, hx, weights, settings), "kernels would get other tensors"
    with FlopCounterMode(display=False):
        assert not plan.is_left(x, hx, weights, settings), "it counts the operations of our operators"
    graph.captures = True
    assert plan.is_left(x, hx, weights, settings) == captured
    graph.captures = False
    module.to(torch.bfloat16)
    assert weights[0].dtype == torch.bfloat16
    assert not plan.is_left(x, hx, weights, settings), "the same weights have another dtype"


def test_of_weights_only_so_many_are_kept() -> None:
    weights = [torch.empty(1) for _ in range(tuned.launching.plan.MAX_PLANS + 1)]
    for weight in weights:
        left.leave(weight, "sizes")
    assert len(left.LEFT) == 1
    assert left.is_left(weights[-1], "sizes")
