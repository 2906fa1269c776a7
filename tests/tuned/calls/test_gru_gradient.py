"""tuned.calls.gru.gradient without a GPU: a repeated gradient is launched directly, with the arguments of a new one."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.families.gru_backward.reference import inputs
from tuned.calls.gru import gradient as run
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru_backward import FAMILY
from tuned.families.gru_backward.variant import default_variant
from tuned.families.launch import Fill, Launch
from tuned.launching.rehearsal import Heard, NotedError, listen

if TYPE_CHECKING:
    from tuned.families.gru.variant import GruVariant

SIZE = GruSize(5, 6)
CASES = [
    (GruSpec("bfloat16", 64), {}),
    (GruSpec("float32", 64, bias=False), {}),
    (GruSpec("bfloat16", 64, directions=2), {"turns": 2, "prefetch": "early"}),
    (GruSpec("float16", 64, "packed"), {}),
    (GruSpec("bfloat16", 64, "thd"), {"exchange": "counter"}),
    (GruSpec("bfloat16", 64, resets=True), {}),
    (GruSpec("float32", 64, "thd", directions=2, resets=True), {"exchange": "counter"}),
]


class Launches:
    """Records launches in place of a GPU."""

    def __init__(self) -> None:
        self.public: list[Launch] = []
        self.direct: list[tuple[Any, ...]] = []
        self.hooks = types.SimpleNamespace(calls=[])

    def known(self, _index: int, launch: Launch) -> str:
        self.public.append(launch)
        return "compiled"

    def prepared(self, launch: Launch, compiled: Any, _index: int) -> Any:
        assert compiled == "compiled"
        numbers = tuple(n for n in launch.arguments if not isinstance(n, torch.Tensor))
        rest = (*numbers, *launch.constants.values())
        return (
            lambda *given: self.direct.append(given),
            7,
            ("head",),
            launch.programs,
            rest,
            lambda _: 3,
            self.hooks,
            self.hooks,
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(run, "_KNOWN", {})
    monkeypatch.setattr(run, "launch_known", made.known)
    monkeypatch.setattr(run, "direct_launch", made.prepared)
    return made


def variant_of(spec: GruSpec, knobs: dict[str, Any]) -> GruVariant:
    return dataclasses.replace(default_variant(spec, SIZE), **knobs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_second_gradient_has_the_arguments_of_a_first(launches: Launches, case: tuple[GruSpec, Any]) -> None:
    spec, variant = case[0], variant_of(*case)
    for seed in range(3):
        gradient = inputs(spec, SIZE, "cpu", seed)
        fills = gradient.out if variant.exchange != "counter" else gradient.counters
        fills.fill_(1)
        run.launch(0, spec, variant, gradient)
        *before, wanted = FAMILY.launches(spec, variant, gradient)
        assert isinstance(wanted, Launch)
        assert [type(step) for step in before] == [Fill]
        bits = fills.view(torch.int16 if fills.element_size() == 2 else torch.int32)
        assert (bits == (0 if variant.exchange == "counter" else -1)).all()
        if not seed:
            continue
        programs, *_, function, head = launches.direct[-1][:6]
        assert (programs, function, head) == (wanted.programs, 7, "head")
        values = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in wanted.arguments]
        assert launches.direct[-1][6:] == (*values, *wanted.constants.values())
    assert (len(launches.public), len(launches.direct)) == (1, 2)


def test_a_gradient_with_other_strides_alignment_or_settings_is_a_new_one(launches: Launches) -> None:
    spec, variant = CASES[0][0], variant_of(*CASES[0])
    run.launch(0, spec, variant, inputs(spec, SIZE, "cpu", 0))
    gradient = inputs(spec, SIZE, "cpu", 1)
    turned = gradient.grad_out.transpose(0, 1).contiguous().transpose(0, 1)
    shifted = torch.zeros(gradient.grad_out.numel() + 1, dtype=torch.bfloat16)[1:].view(gradient.grad_out.shape)
    others = [dataclasses.replace(gradient, grad_out=grad) for grad in (turned, shifted)]
    others.append(inputs(spec, GruSize(6, 6), "cpu", 0))
    for count, other in enumerate(others, 2):
        run.launch(0, spec, variant, other)
        assert (len(launches.public), len(launches.direct)) == (count, 0)
    run.launch(1, spec, variant, gradient)
    run.launch(0, spec, dataclasses.replace(variant, num_warps=8), gradient)
    assert (len(launches.public), len(launches.direct)) == (6, 0)
    run.launch(0, spec, variant, gradient)
    assert (len(launches.public), len(launches.direct)) == (6, 1)


@pytest.mark.parametrize("case", CASES[3:5], ids=str)
def test_as_many_sequences_of_fewer_tokens_are_new_ones(launches: Launches, case: tuple[GruSpec, Any]) -> None:
    """The kernel is told the number of tokens, which no stride of a single direction shows."""
    spec, variant = case[0], variant_of(*case)
    gradient = inputs(spec, SIZE, "cpu", 0)
    run.launch(0, spec, variant, gradient)
    names = ("gates", "hidden", "before", "out")
    fewer = {name: getattr(gradient, name)[:, :-1] for name in names} | {"grad_out": gradient.grad_out[:-1]}
    run.launch(0, spec, variant, dataclasses.replace(gradient, **fewer))
    assert (len(launches.public), len(launches.direct)) == (2, 0)
    (one, other) = (launch.arguments[14] for launch in launches.public)
    assert one == other + 1


def test_who_listens_or_profiles_gets_the_launch(launches: Launches) -> None:
    spec, variant = CASES[0][0], variant_of(*CASES[0])
    gradient = inputs(spec, SIZE, "cpu", 0)
    run.launch(0, spec, variant, gradient)
    launches.hooks.calls.append(print)
    run.launch(0, spec, variant, gradient)
    launches.hooks.calls.clear()
    with listen(Heard()), pytest.raises(NotedError):
        run.launch(0, spec, variant, gradient)
    assert (len(launches.public), len(launches.direct)) == (3, 0)


def test_what_was_filled_for_many_launches_is_not_filled_again(launches: Launches) -> None:
    spec, variant = CASES[0][0], variant_of(*CASES[0])
    for seed in range(2):
        gradient = inputs(spec, SIZE, "cpu", seed)
        gradient.out.fill_(1)
        run.launch(0, spec, variant, gradient, filled=True)
        assert (gradient.out == 1).all()
    counted, by_counters = CASES[4][0], variant_of(*CASES[4])
    gradient = inputs(counted, SIZE, "cpu", 0)
    gradient.counters.fill_(1)
    run.launch(0, counted, by_counters, gradient, filled=True)
    assert (gradient.counters == 0).all(), "each launch counts anew"
    assert launches.direct
