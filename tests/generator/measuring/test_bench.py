"""Timing launches on a fake device: what runs, in which order, and which part of the time counts."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from generator.measuring import bench
from generator.measuring.bench import GRAPH_US, REPLAYS, Emptied, device_time, half_spread, sets_filling

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTYING_US, LAUNCH_US = 30.0, 10.0
WARM_US = 5_000.0


@dataclasses.dataclass
class Device:
    """Does one thing after another, each in its given time; a graph is the list of things done while it was captured."""

    now_us: float = 0.0
    done: list[str] = dataclasses.field(default_factory=list)
    captured: list[tuple[str, float]] | None = None

    def thing(self, name: str, us: float) -> Callable[[], None]:
        return lambda: self.do(name, us)

    def do(self, name: str, us: float) -> None:
        if self.captured is not None:
            self.captured.append((name, us))
        else:
            self.done.append(name)
            self.now_us += us

    def event(self, **_: Any) -> Any:
        event = types.SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now_us)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event

    def graph(self) -> Any:
        graph = types.SimpleNamespace(held=[])
        graph.replay = lambda: (self.done.append("replay"), [self.do(*one) for one in graph.held])
        graph.capture_begin = lambda: setattr(self, "captured", graph.held)
        graph.capture_end = lambda: setattr(self, "captured", None)
        return graph


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    cuda = types.SimpleNamespace(
        current_stream=lambda: stream,
        Stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        Event=made.event,
        CUDAGraph=made.graph,
        synchronize=lambda: None,
    )
    monkeypatch.setattr(bench, "torch", types.SimpleNamespace(cuda=cuda))
    return made


def launches(device: Device) -> list[Callable[[], None]]:
    return [device.thing(name, LAUNCH_US) for name in "ab"]


def test_of_the_launches_of_a_graph_each_counts_alike(device: Device) -> None:
    assert device_time(launches(device)).median_us == LAUNCH_US
    assert device.done.count("a") == device.done.count("b") + 1, "compiled and loaded before the rest"


@pytest.mark.parametrize("restores", [False, True])
def test_the_l2_is_emptied_before_each_round_and_the_time_of_that_is_no_launchs(device: Device, restores: bool) -> None:
    restore = device.thing("restore", 7.0) if restores else None
    emptied = Emptied(device.thing("empty", EMPTYING_US), EMPTYING_US)
    assert device_time(launches(device), restore=restore, emptied=emptied).median_us == pytest.approx(LAUNCH_US)
    rounds = [name for name in device.done if name not in ("replay", "restore")][3:]
    assert rounds == ["empty", "a", "b"] * (len(rounds) // 3)


@pytest.mark.parametrize("restores", [False, True])
def test_a_gpu_that_waited_does_real_work_before_what_counts(device: Device, restores: bool) -> None:
    restore = device.thing("restore", 7.0) if restores else None
    runs = Counter[bool]()
    for warm in (False, True):
        device.done.clear()
        assert device_time(launches(device), restore=restore, warm_us=WARM_US * warm).median_us == LAUNCH_US
        runs[warm] = device.done.count("a")
    assert (runs[True] - runs[False]) * 2 * LAUNCH_US == pytest.approx(WARM_US, rel=2 * GRAPH_US / WARM_US)


def test_garbage_is_collected_before_and_after_a_capture_and_not_in_it(device: Device) -> None:
    seen = list[bool]()
    one, other = (device.thing(name, LAUNCH_US) for name in "ab")

    def launch() -> None:
        seen.append((device.captured is not None) == gc.isenabled())
        one()

    def fail() -> None:
        other()
        if device.captured is not None:
            raise RuntimeError("cannot be captured")

    device_time([launch, other])
    with pytest.raises(RuntimeError, match="cannot be captured"):
        device_time([launch, fail])
    assert len(seen) > 4
    assert not any(seen)
    assert gc.isenabled()
    assert device.captured is None


def test_what_is_found_afterwards_the_replays_have_written(device: Device) -> None:
    device_time(launches(device), poison=device.thing("poison", 1.0), warm_us=WARM_US)
    assert device.done.count("poison") == 1
    before, after = device.done[: device.done.index("poison")], device.done[device.done.index("poison") + 1 :]
    assert before == ["a", "a", "b"], "no replay before it"
    assert after.count("replay") > REPLAYS


def test_sets_fill_the_l2_twice() -> None:
    assert [sets_filling(100, one) for one in (1, 99, 100, 150, 10**6)] == [200, 3, 2, 2, 2]


def test_a_single_value_has_no_spread() -> None:
    assert half_spread([3.0]) == 0
    assert half_spread([1.0, 2.0, 3.0]) == 1
