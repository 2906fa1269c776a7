"""The GRU families under what surrounds a call: dispatch modes, tracers, scripts, default devices, no GPU at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tuned.calls.gru_cell.run
import tuned.calls.linear_cat.run
import tuned.nn
from tests.support.gru_calls import FEATURES, B, H, T, weights_of
from tests.support.gru_calls_of_users import CALLS, Model, tensors
from tests.support.plans import Always
from tests.support.pythons import python
from tuned.calls.gru import plan
from tuned.dispatch import gru, gru_cell, linear_cat

pytestmark = pytest.mark.processes


def shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in (result if isinstance(result, tuple) else (result,))]


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        assert torch.equal(a, b)


# Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_another_default_device_changes_nothing(call: str) -> None:
    given = tensors()
    wanted = CALLS[call](given)
    torch.set_default_device("meta")
    try:
        found = CALLS[call](given)
    finally:
        torch.set_default_device(None)
    assert_same(found, wanted)


@pytest.mark.parametrize("call", CALLS)
def test_meta_tensors_give_shapes(call: str) -> None:
    assert shapes(CALLS[call](tensors("meta"))) == shapes(CALLS[call](tensors()))


def test_meta_modules_give_the_shapes_of_pytorchs() -> None:
    packed = torch.nn.utils.rnn.PackedSequence(torch.empty(6, FEATURES, device="meta"), torch.tensor([3, 2, 1]))
    for x in (torch.empty(T, B, FEATURES, device="meta"), packed):
        for settings in ({}, {"num_layers": 2, "bidirectional": True}):
            theirs, ours = (m(FEATURES, H, device="meta", **settings)(x) for m in (torch.nn.GRU, tuned.nn.GRU))
            assert getattr(ours[0], "data", ours[0]).shape == getattr(theirs[0], "data", theirs[0]).shape
            assert ours[1].shape == theirs[1].shape
    cell = tuned.nn.GRUCell(FEATURES, H, device="meta")
    assert cell(torch.empty(B, FEATURES, device="meta")).shape == (B, H)


def test_no_sequence_on_meta() -> None:
    empty = gru(
        torch.empty(0, FEATURES, device="meta"),
        torch.empty(1, 2, H, device="meta"),
        weights_of(1, 1, device="meta"),
        cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta"),
        max_seqlen=0,
    )
    assert shapes(empty) == [(0, H), (1, 2, H)]


NO_CUDA = """
import torch
def refuse(*_, **__):
    raise AssertionError("CUDA was asked for")
torch._C._cuda_getDevice = torch.cuda.current_device = torch.cuda._lazy_init = refuse
torch.cuda.get_device_capability = torch.cuda.get_device_properties = torch.cuda.is_current_stream_capturing = refuse
from tests.support.gru_calls_of_users import CALLS, tensors
import tuned.nn
given = tensors()
for _ in range(2):
    for call in CALLS.values():
        call(given)
    with tuned.nn.patched():
        torch.nn.GRU(6, 4)(given["x"])
        torch.nn.GRUCell(6, 4)(given["row"])
    with torch.no_grad():
        for call in CALLS.values():
            call(given)
assert not torch.cuda.is_initialized()
"""


def test_a_call_on_a_cpu_does_not_ask_for_a_gpu() -> None:
    done = python("-c", NO_CUDA)
    assert done.returncode == 0, done.stderr[-2000:]


# Modes and tracers that follow operators ------------------------------------------------------------------------------


class Listening(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gru", "cell", "linear_cat"])
def test_a_known_call_is_not_launched_where_a_mode_would_miss_it(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    module = {"gru": plan, "cell": tuned.calls.gru_cell.run, "linear_cat": tuned.calls.linear_cat.run}[family]
    launched = "output", "state"
    plans = Always(lambda *_: launched)
    monkeypatch.setattr(module, "_PLANS", plans)
    given = tensors()
    other = given["x"].clone()  # the short way does not know a call that is given one tensor twice
    call = CALLS[family] if family != "linear_cat" else lambda t: linear_cat((t["x"], other), t["weight"])
    with torch.no_grad():
        assert [call(given) for _ in range(3)] == [launched] * 3
        assert plans.short == 1
        with Listening():
            found = call(given)
        monkeypatch.setattr(module, "_PLANS", {})
        assert_same(found, call(given))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["real", "fake"])
def test_a_traced_graph_computes_anew_for_other_inputs(call: str, kind: str) -> None:
    if call in ("thd", "packed") and kind == "fake":
        pytest.skip("lengths on a CPU are values of the call, and a fake tensor has none")
    first, second = tensors(), tensors()
    first["bounds"] = second["bounds"]  # on a CPU bounds are constants of the graph, as the bounds of a loop are
    names = [name for name in first if name not in ("weights", "deep", "bounds")]

    def function(*given: torch.Tensor) -> Any:
        return CALLS[call]({**second, "bounds": second["bounds"], **dict(zip(names, given, strict=True))})

    with torch.no_grad():
        graph = make_fx(function, tracing_mode=kind, _allow_non_fake_inputs=True)(*(first[name] for name in names))
        assert_same(graph(*(second[name] for name in names)), CALLS[call](second))


@pytest.mark.parametrize("call", ["gru", "packed", "thd", "cell", "linear_cat"])
def test_a_fake_gpu_gets_an_operator_that_is_counted_as_pytorchs_products(call: str) -> None:
    """This also holds for a counter that was made before the operators were."""
    with FlopCounterMode(display=False) as theirs:
        CALLS[call](tensors())
    with FakeTensorMode(), FlopCounterMode(display=False) as ours:
        given = tensors("cuda")
        found = CALLS[call](given)
    names = {"cell": "gru_cell", "linear_cat": "linear_cat"}
    operator = getattr(torch.ops.tuned, names.get(call, "gru"))
    assert dict(ours.get_flop_counts()["Global"]) == {operator: ours.get_total_flops()}
    assert ours.get_total_flops() == theirs.get_total_flops() > 0
    for t in found if isinstance(found, tuple) else (found,):
        assert t.device.type == "cuda"


def test_a_counter_made_before_the_operators_counts_them() -> None:
    script = (
        "import torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "from tests.support.gru_calls_of_users import CALLS, tensors\n"
        "with FakeTensorMode(), FlopCounterMode(display=False) as counter:\n"
        "    CALLS['gru'](tensors('cuda'))\n"
        "assert counter.get_total_flops() > 0\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]


# torch.jit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["replaced", "patched"])
@pytest.mark.parametrize("gradient", [True, False])
def test_a_model_is_traced_with_its_check(way: str, gradient: bool) -> None:
    model, x = Model().requires_grad_(gradient), torch.randn(B, T, FEATURES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and warns of checks of shapes
        if way == "patched":
            with tuned.nn.patched():
                traced = torch.jit.trace(model, x)
        else:
            traced = torch.jit.trace(tuned.nn.replace(model), x)
        torch.jit.trace(tuned.nn.GRU(FEATURES, H, 2, dropout=0.5).eval(), x)
    torch.testing.assert_close(traced(2 * x), model(2 * x))
    assert traced(x).requires_grad is gradient


SCRIPTS = """
import warnings
import torch
import tuned.nn
from tests.support.gru_calls_of_users import Model
warnings.simplefilter("ignore")
model, x = Model(), torch.randn(3, 5, 6)
wanted = model(x)
def check(scripted):
    assert torch.equal(scripted(x), wanted)
with tuned.nn.patched():
    check(torch.jit.script(model))
check(torch.jit.script(model))
tuned.nn.replace(model)
before = {name: p.data_ptr() for name, p in model.named_parameters()}
check(torch.jit.script(model))
check(torch.jit.script(torch.nn.Sequential(model)))
check(model)
assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
assert type(tuned.nn.replace(model).encoder) is tuned.nn.GRU
check(torch.jit.script(tuned.nn.restore(model)))
torch.jit.script(tuned.nn.GRUCell(6, 4))(x[0])
"""


def test_models_are_scripted_and_nothing_is_broken_after_it() -> None:
    done = python("-c", SCRIPTS)
    assert done.returncode == 0, done.stderr[-2000:]


# Arguments ------------------------------------------------------------------------------------------------------------


def test_one_bias_of_two_is_refused_whatever_was_called_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    x, h, (w_ih, w_hh, b_ih, b_hh) = given["row"], given["h"], given["weights"]
    monkeypatch.setattr(tuned.calls.gru_cell.run, "_PLANS", Always(lambda *_: "launched"))
    assert [gru_cell(x, h, w_ih, w_hh) for _ in range(3)] == ["launched"] * 3
    for biases in ((b_ih, None), (None, b_hh)):
        with pytest.raises(ValueError, match="both bias_ih and bias_hh"):
            gru_cell(x, h, w_ih, w_hh, *biases)


def test_max_seqlen_is_no_tensor() -> None:
    given = tensors()
    with pytest.raises(TypeError, match=r"max_seqlen must be an int, got a tensor: pass max_seqlen.item\(\)"):
        gru(
            given["rows"],
            given["hx"],
            given["deep"],
            num_layers=2,
            cu_seqlens=given["bounds"],
            max_seqlen=torch.tensor(3),
        )  # type: ignore[arg-type]
