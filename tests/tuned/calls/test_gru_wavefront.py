"""tuned.calls.gru.wavefront without a GPU: gradients of a stack whose layers run at once, compared with autograd's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.gru_factors import multiplies
from tests.support.gru_running import call_of, interpreted
from tests.support.gru_training import ONE, TURNS, assert_alike, backward, choose, outputs_of, wanted_of
from tests.support.run import INTERPRETED
from tuned.calls.gru import eager, training, wavefront
from tuned.calls.gru.wavefront import Wave
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import programs
from tuned.families.gru_backward.variant import rejection

if TYPE_CHECKING:
    from tuned.calls.gru.arguments import GruCall
    from tuned.families.launch import Launch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru_training.py has these on a GPU"),
]

__all__ = ["backward", "interpreted", "multiplies"]

HIDDEN = 16  # rows of a multiple of 16 bytes


def stack_of(
    layers: int, steps: int, batch: int = 3, *, first: bool = False, bias: bool = True, **rest: Any
) -> GruCall:
    call = call_of("dense", layers, 1, hidden=HIDDEN, first=first, bias=bias, **rest)
    features = call.input.shape[2]
    x = torch.randn((batch, steps, features) if first else (steps, batch, features))
    return dataclasses.replace(call, input=x, hx=torch.randn(layers, batch, HIDDEN))


def found_by(monkeypatch: pytest.MonkeyPatch, call: GruCall, wave: Wave, wanted: Any, given: Any) -> Any:
    """The gradients of a call by a wavefront."""
    choose(monkeypatch, wave.variant)
    monkeypatch.setattr(training, "_planned", lambda *_: wave)
    outputs, gates = outputs_of(call)
    return training._stack(call, outputs, gates, wanted, given)


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize(
    ("layers", "at_once", "seq", "steps", "variant"),
    [
        (2, 2, 6, 3, ONE),
        (3, 3, 7, 2, ONE),  # the last chunk is shorter
        (3, 2, 5, 2, ONE),  # two groups; the lower has one layer
        (4, 4, 3, 1, ONE),  # more layers than chunks
        (5, 3, 9, 4, TURNS),
        (3, 3, 4, 4, ONE),  # one chunk
        (3, 3, 7, 3, dataclasses.replace(ONE, exchange="counter")),
    ],
)
@pytest.mark.parametrize(("first", "bias"), [(False, True), (True, False)])
def test_gradients_of_every_tensor_are_autograds(
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    at_once: int,
    seq: int,
    steps: int,
    variant: Any,
    *,
    first: bool,
    bias: bool,
) -> None:
    call = stack_of(layers, seq, 11, first=first, bias=bias)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = found_by(monkeypatch, call, Wave(variant, at_once, steps, 0.0), [True] * len(call.tensors), given)
    assert_alike(found, wanted_of(call, given))
    assert all(t.shape == own.shape for t, own in zip(found, call.tensors, strict=True))


@pytest.mark.usefixtures("backward")
def test_gradients_by_parts_are_autograds(monkeypatch: pytest.MonkeyPatch, multiplies: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(wavefront, "splits", lambda _spec, _rows: True)
    call = stack_of(3, 7, 11, first=False, bias=True)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = found_by(monkeypatch, call, Wave(ONE, 3, 2, 0.0), [True] * len(call.tensors), given)
    assert_alike(found, wanted_of(call, given))
    assert len(multiplies) == 3 + 3 * 9, "of the input; of each layer's w_ih and both parts of its w_hh, three each"


def test_each_diagonal_is_one_launch_of_all_layers_that_have_a_chunk(
    monkeypatch: pytest.MonkeyPatch, backward: list[Launch]
) -> None:
    call = stack_of(3, 8)
    output, _ = eager.gru(call)
    found_by(monkeypatch, call, Wave(ONE, 3, 2, 0.0), [True] * len(call.tensors), (torch.randn_like(output), None))
    alone = -(-HIDDEN // ONE.block_hidden)
    assert [launch.programs // alone for launch in backward] == [1, 2, 3, 3, 2, 1]


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("place", range(2))
def test_one_of_both_results_may_be_all_that_has_a_gradient(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    call = stack_of(3, 5)
    results = eager.gru(call)
    given: Any = [None, None]
    given[place] = torch.randn_like(results[place])
    found = found_by(monkeypatch, call, Wave(ONE, 3, 2, 0.0), [True] * len(call.tensors), tuple(given))
    assert_alike(found, wanted_of(call, tuple(given)))


def test_where_memory_is_to_be_spared_layers_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, backward: list[Launch]
) -> None:
    call = stack_of(3, 5)
    choose(monkeypatch, ONE)
    monkeypatch.setattr(training, "_planned", lambda *_: Wave(ONE, 3, 2, 0.0))
    results = eager.gru(call)
    given = tuple(map(torch.randn_like, results))
    found = training._stack(call, outputs_of(call)[0], None, [True] * len(call.tensors), given)
    assert len(backward) == call.num_layers
    assert_alike(found, wanted_of(call, given))


@pytest.mark.parametrize("captured", [False, True])
def test_where_memory_ends_layers_go_one_by_one_unless_a_graph_has_begun(
    monkeypatch: pytest.MonkeyPatch, backward: list[Launch], *, captured: bool
) -> None:
    call = stack_of(3, 5)
    results = eager.gru(call)
    given = tuple(map(torch.randn_like, results))
    launched, stopped = training.launch, 2

    def launch(*arguments: Any, filled: bool = False, **options: Any) -> Any:
        if filled and len(backward) == stopped:
            raise torch.OutOfMemoryError
        return launched(*arguments, filled=filled, **options)

    monkeypatch.setattr(training, "launch", launch)
    monkeypatch.setattr(training.run, "capturing", lambda _: captured)
    right = wanted_of(call, given)
    wave = Wave(ONE, 3, 2, 0.0)
    if captured:
        with pytest.raises(torch.OutOfMemoryError):
            found_by(monkeypatch, call, wave, [True] * len(call.tensors), given)
        return
    assert_alike(found_by(monkeypatch, call, wave, [True] * len(call.tensors), given), right)
    assert len(backward) == stopped + call.num_layers


@pytest.mark.usefixtures("backward")
def test_what_is_not_wanted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    call = stack_of(3, 5)
    results = eager.gru(call)
    given = tuple(map(torch.randn_like, results))
    right = wanted_of(call, given)
    for wanted in (
        [True, False, *[False] * 12],
        [False, True, *[False] * 12],
        [False, False, *([True] + [False] * 3) * 3],
        [False, False, *([False, True, False, True]) * 3],
        [False, False, *[True] * 4, *[False] * 8],
        [True, False, *[False] * 8, *[True] * 4],
    ):
        found = found_by(monkeypatch, call, Wave(ONE, 2, 2, 0.0), wanted, given)
        assert [t is not None for t in found] == wanted
        assert_alike([t for t in found if t is not None], [t for t, own in zip(right, wanted, strict=True) if own])


@pytest.mark.usefixtures("backward")
def test_a_gradient_with_negative_strides_bits_and_gaps_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    call = stack_of(2, 5)
    output, h_n = eager.gru(call)
    given = (
        torch._neg_view(torch.randn(*output.shape[:2], 2 * HIDDEN)[..., ::2]),
        torch._neg_view(torch.randn(h_n.shape)),
    )
    found = found_by(monkeypatch, call, Wave(ONE, 2, 2, 0.0), [True] * len(call.tensors), given)
    assert_alike(found, wanted_of(call, given))


# When ------------------------------------------------------------------------------------------------------------------


def plan_of(
    spec: GruSpec, batch: int, seq: int, layers: int, *, captured: bool = True, capability: int = 90, **knobs: Any
) -> Wave | None:
    """The wave of a stack on 132 multiprocessors, if a step of a layer takes 2 us."""
    tile = dataclasses.replace(ONE, exchange="spin", num_warps=4, **knobs)
    return wavefront.planned(spec, GruSize(batch, seq), layers, tile, 2.0, capability, 132, captured=captured)


def test_as_many_layers_run_at_once_as_fit_in_tiles_that_may_be_larger() -> None:
    small = GruSpec("bfloat16", 256)
    assert [plan_of(small, 10, 512, n).layers for n in (2, 3, 4)] == [2, 3, 4]  # type: ignore[union-attr]
    six = plan_of(small, 10, 512, 6)
    assert six is not None
    # 32 programs a layer become 16.
    assert (six.layers, six.variant.block_hidden, six.variant.block_batch) == (6, 32, 8)
    large = plan_of(GruSpec("bfloat16", 768), 64, 128, 5, block_hidden=32)
    assert large is None, "a layer has more than half of the multiprocessors, however large its tiles"
    ten = plan_of(GruSpec("bfloat16", 512), 32, 512, 10)
    assert ten is not None
    assert ten.layers == 4, "groups of four, four and two"
    assert ten.layers * programs(GruSpec("bfloat16", 512), GruSize(32, 1), ten.variant) <= 132


@pytest.mark.parametrize("capability", [75, 80, 86, 90])
def test_tiles_are_as_large_as_a_gpu_has_shared_memory_for(capability: int) -> None:
    spec, size = GruSpec("bfloat16", 640), GruSize(16, 512)
    wave = plan_of(spec, 16, 512, 4, capability=capability)
    assert wave is None or rejection(spec, size, wave.variant, capability, 132) is None
    assert (wave is not None and wave.variant.block_hidden == 32) == (capability == 90)


def test_chunks_are_shorter_where_the_host_does_not_count() -> None:
    in_graph, called = (plan_of(GruSpec("bfloat16", 256), 10, 512, 4, captured=on) for on in (True, False))
    assert in_graph is not None
    assert called is not None
    assert 8 <= in_graph.steps < called.steps <= 256


@pytest.mark.parametrize(
    ("spec", "seq", "layers"),
    [
        (GruSpec("bfloat16", 256), 512, 1),
        (GruSpec("bfloat16", 256, directions=2), 512, 2),
        (GruSpec("bfloat16", 256, layout="packed"), 512, 2),
        (GruSpec("bfloat16", 256, layout="thd"), 512, 2),
        (GruSpec("bfloat16", 256, resets=True), 512, 2),
        (GruSpec("bfloat16", 250), 512, 2),  # rows of no multiple of 16 bytes
        (GruSpec("bfloat16", 256), 4, 2),  # too short to pay
    ],
)
def test_other_stacks_go_layer_by_layer(spec: GruSpec, seq: int, layers: int) -> None:
    assert plan_of(spec, 10, seq, layers) is None
    assert plan_of(GruSpec("bfloat16", 256), 10, 512, 2, turns=2) is None, "programs in turn are busy"
