"""A process, context or stream with only part of a GPU: launches whose programs wait are made to fit, or not made."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from tests.support.gru_machine import GPU, Machine, machine
from tests.support.gru_running import VARIANTS, assert_as_pytorch, call_of, interpreted
from tuned.calls.gru import plan, run
from tuned.calls.recurrent import serve
from tuned.dispatch import gru
from tuned.families.gru.variant import GruVariant, alone, programs
from tuned.launching import residents
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from tuned.calls.gru.arguments import GruCall
    from tuned.families.launch import Launch

__all__ = ["interpreted", "machine"]

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:RNN module weights"),
]  # operators of PyTorch on a GPU

# The errors of Triton 3.6 and 3.7: both quote the driver.
ERROR = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A driver that says where a call is and what it may use there; counts how often it is asked."""
    state = types.SimpleNamespace(stream=7, driver=None, asked=0)

    def multiprocessors(_device: int) -> Any:
        state.asked += 1
        return state.driver

    monkeypatch.setattr(residents, "_PLACES", {})
    monkeypatch.setattr(residents, "_SEEN", [])
    monkeypatch.setattr(residents, "_driver", lambda: types.SimpleNamespace(cuCtxGetCurrent=lambda _: 0))
    monkeypatch.setattr(residents, "raw_stream", lambda: lambda _device: state.stream)
    monkeypatch.setattr(residents, "_multiprocessors", multiprocessors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(run, "gpu_of", lambda _device: GPU)
    place = residents.place  # on the CPU, a tensor's device index is -1
    monkeypatch.setattr(residents, "place", lambda device: place(max(device, 0)))
    run._choose.cache_clear()
    return state


def waits(choice: Choice, spec: Any) -> bool:
    return choice.variant is not None and choice.variant.strategy == "persistent" and not alone(spec, choice.variant)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("limit", [1, 8, 32])
def test_a_part_of_a_gpu_gets_what_fits_it(part: types.SimpleNamespace, layers: int, limit: int) -> None:
    call = call_of(layers=layers)
    part.driver = limit
    for spec, size, choice in run._parts(call):
        assert not waits(choice, spec) or programs(spec, size, choice.variant) <= limit
        assert f"{limit} of 132 programs may wait for each other here" in choice.why
    part.stream = 8
    part.driver = None
    assert "may wait" not in run._parts(call)[0][2].why
    assert part.asked == 2, "a place is asked for once"


class Fails:
    """A launcher on which cooperative launches fail."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.failed = machine, 0

    def launch(self, device: Any, launch: Launch) -> str:
        if launch.options.get("launch_cooperative_grid"):
            self.failed += 1
            raise ERROR
        return self.machine.launch(device, launch)


def choose(spec: Any, size: Any, gpu: Any, limit: int | None = None) -> Choice:
    """A grid whose programs wait, unless none is allowed."""
    if limit is not None and limit < programs(spec, size, VARIANTS["persistent"]):
        return Choice("default", f"{limit} may wait", None if spec.stacked else GruVariant("steps", block_hidden=16))
    return Choice("default", "", VARIANTS["persistent"], gpu=gpu)


def dispatched(call: GruCall) -> Any:
    return gru(call.input, call.hx, call.weights, bias=call.has_biases, num_layers=call.num_layers)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_launch_that_is_too_large_is_made_another_way_and_not_tried_again(
    machine: Machine, part: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    fails = Fails(machine)
    monkeypatch.setattr(run, "launch_known", fails.launch)
    monkeypatch.setattr(run, "_choose", choose)
    call = call_of(layers=layers)
    call = type(call)(call.input, call.hx.contiguous(), *list(vars(call).values())[2:])
    for _ in range(3):
        found = dispatched(call)
        with monkeypatch.context() as patch:
            patch.setattr(serve, "why_eager", lambda *_, **__: "PyTorch's")
            assert_as_pytorch(call, found)
    assert fails.failed == 1
    told = tuned.explain(gru, call.input, call.hx, call.weights, num_layers=layers)
    assert told.rule == "eager", "a launch for each step would be slower than PyTorch's own"
    assert told.why.endswith("1 may wait")
    part.stream = 8
    dispatched(call)
    assert fails.failed == 2, "another stream may have more"


@pytest.mark.usefixtures("part")
def test_where_no_kernel_is_left_pytorch_serves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Fails(machine)
    monkeypatch.setattr(run, "launch_known", fails.launch)

    def only(_spec: Any, _size: Any, _gpu: Any, limit: int | None = None) -> Choice:
        return Choice("eager", "nothing fits", None) if limit else Choice("default", "", VARIANTS["persistent"])

    monkeypatch.setattr(run, "_choose", only)
    call = call_of()
    assert_as_pytorch(call, dispatched(call))
    assert_as_pytorch(call, dispatched(call))
    assert fails.failed == 1


@pytest.mark.usefixtures("machine", "part")
def test_another_error_of_a_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(run, "launch_known", launch)
    monkeypatch.setattr(run, "_choose", choose)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dispatched(call_of())


def test_a_known_call_that_comes_to_a_smaller_part_is_served(
    machine: Machine, part: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan was made when the whole GPU was available."""
    monkeypatch.setattr(run, "_choose", choose)
    whole = machine.direct_launch

    def direct_launch(launch: Launch, compiled: Any, device: Any) -> Any:
        made = whole(launch, compiled, device)

        def fire(*values: Any) -> None:
            if part.stream == 9 and launch.options.get("launch_cooperative_grid"):
                raise ERROR
            made.run(*values)

        return made._replace(run=fire)

    monkeypatch.setattr(plan, "direct_launch", direct_launch)
    call = call_of()
    call = type(call)(call.input, call.hx.contiguous(), *list(vars(call).values())[2:])
    wanted = dispatched(call)
    dispatched(call)
    assert (machine.public, machine.direct) == (1, 1)
    part.stream, part.driver = 9, 1
    for _ in range(3):
        for ours, theirs in zip(dispatched(call), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert machine.direct == 1
    part.stream = 7
    dispatched(call)
    dispatched(call)
    assert machine.direct == 2, "where all of it is there, it is used again"


def test_no_limit_is_looked_up_where_none_was_ever_met(part: types.SimpleNamespace) -> None:
    assert residents.place(0) is False
    assert not part.asked
    part.driver = 32
    assert residents.allowed(0) == 32
    assert residents.place(0) == 32
    residents.forbid(0)
    assert residents.allowed(0) == 1


def test_a_graph_is_captured_with_what_its_context_is_known_to_allow(
    part: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    residents.forbid(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    part.stream = 8
    assert residents.allowed(0) == 1, "its launch would fail while the graph is captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert residents.allowed(0) is None


def test_only_one_error_is_about_size() -> None:
    assert residents.too_large(ERROR)
    assert not residents.too_large(RuntimeError("out of memory"))
    assert not residents.too_large(ValueError(str(ERROR)))
