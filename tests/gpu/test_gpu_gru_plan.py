"""Plans of GRU calls on a real GPU: packed sequences, padded products of PyTorch's operators, default states."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import tuned
import tuned.nn
from tuned.calls.gru import plan, run, training
from tuned.families.gru.variant import GruVariant
from tuned.launching import zeros
from tuned.lookup.lookup import Choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SPLIT = GruVariant("persistent", "split", 16, 16, "spin")
SETTINGS: dict[str, dict[str, Any]] = {
    "layer": {},
    "both ways, no bias": {"bidirectional": True, "bias": False},
    "two layers": {"num_layers": 2},
    "three layers, both ways, batch first": {"num_layers": 3, "bidirectional": True, "batch_first": True},
}
KINDS = [("bfloat16", 2e-2), ("float32", 3e-3)]


def pair(features: int, hidden: int, dtype: str, settings: dict[str, Any]) -> tuple[torch.nn.GRU, tuned.nn.GRU]:
    made: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype), **settings}
    theirs, ours = torch.nn.GRU(features, hidden, **made), tuned.nn.GRU(features, hidden, **made)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_close(found: Any, wanted: Any, atol: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("hidden", [96, 101])
@pytest.mark.parametrize(("dtype", "atol"), KINDS)
@pytest.mark.parametrize("case", SETTINGS)
def test_packed_sequences_are_right_whatever_lengths_came_before(
    monkeypatch: pytest.MonkeyPatch, case: str, dtype: str, atol: float, hidden: int
) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "", SPLIT, us=1.0))
    monkeypatch.setattr(run, "pays", lambda *_, **__: True)
    monkeypatch.setattr(plan, "_PLANS", {})
    monkeypatch.setattr(plan, "_ONCE", {})
    theirs, ours = pair(40, hidden, dtype, {**SETTINGS[case], "batch_first": False})
    other = torch.cuda.Stream()
    with torch.no_grad():
        for time, lengths in enumerate([[30, 7, 30], [30, 7, 30], [12, 30, 1], [30, 7, 30], [12, 30, 1], [12, 30, 1]]):
            x = torch.randn(30, 3, 40, device="cuda", dtype=theirs.weight_hh_l0.dtype)
            packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
            hx = torch.randn(len(theirs._all_weights), 3, hidden, device="cuda", dtype=x.dtype) if time % 2 else None
            wanted = theirs(packed, hx)
            stream = other if time == 3 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = ours(packed, hx)
            torch.cuda.current_stream().wait_stream(stream)
            assert_close((found[0].data, found[1]), (wanted[0].data, wanted[1]), atol)
        assert len(plan._PLANS) == 2 * 2, "a plan for each set of lengths, known in two ways"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), KINDS)
@pytest.mark.parametrize("case", SETTINGS)
def test_pytorchs_own_of_padded_tensors_is_right_and_copies_no_weights(
    monkeypatch: pytest.MonkeyPatch, case: str, dtype: str, atol: float, packed: bool
) -> None:
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("eager", "it takes less", None))
    monkeypatch.setattr(run, "pays_pytorch", lambda *_, **__: True)
    settings = {**SETTINGS[case], "batch_first": False} if packed else SETTINGS[case]
    theirs, ours = pair(57, 101, dtype, settings)
    with torch.no_grad():
        for time in range(4):
            for weight in theirs.parameters():
                weight.mul_(0.9)
            ours.load_state_dict(theirs.state_dict())
            x: Any = torch.randn(20, 5, 57, device="cuda", dtype=theirs.weight_hh_l0.dtype)
            if not packed and time == 3:
                x[1, 2, 3] = torch.inf
            x = pack_padded_sequence(x, torch.tensor([20, 20, 9, 5, 1])) if packed else x
            wanted = theirs(x)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # cuDNN warns when it copies weights
                found = [ours(x)]
                if not packed:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        found.append(ours(x))
                    graph.replay()
            for output, h_n in found:
                both = (output.data, wanted[0].data) if packed else (output, wanted[0])
                torch.testing.assert_close(*both, rtol=0, atol=atol)
                torch.testing.assert_close(h_n, wanted[1], rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.04), ("float32", 5e-3)])
@pytest.mark.parametrize("case", SETTINGS)
def test_pytorchs_own_of_padded_tensors_trains_as_of_others(
    monkeypatch: pytest.MonkeyPatch, case: str, dtype: str, atol: float
) -> None:
    for module in (run, training):
        monkeypatch.setattr(module, "_choose", lambda *_: Choice("eager", "it takes less", None))
    monkeypatch.setattr(training, "_pays_pytorch", lambda _call: True)
    theirs, ours = pair(57, 101, dtype, SETTINGS[case])
    ours.load_state_dict(theirs.state_dict())
    x, gradients = torch.randn(20, 5, 57, device="cuda", dtype=theirs.weight_hh_l0.dtype), []
    assert "units more" in tuned.explain(ours, x).why
    for module in (theirs, ours):
        given = x.clone().requires_grad_()
        with warnings.catch_warnings():
            if module is ours:
                warnings.simplefilter("error")  # cuDNN warns when it copies weights
            output, h_n = module(given)
        of = torch.autograd.grad((output.square().mean(), h_n.sum()), [given, *module.parameters()])
        gradients.append([output.detach(), h_n.detach(), *of])
    for wanted, found in zip(*gradients, strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol * max(1.0, float(wanted.abs().max())))


def test_states_that_nobody_gave_are_zeros_of_which_there_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeros, "_KEPT", {})
    zeros._view.cache_clear()
    theirs, ours = pair(64, 128, "bfloat16", {"num_layers": 2})
    x = torch.randn(12, 4, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            torch.cuda.set_sync_debug_mode("error")
            try:  # a copy would wait
                first = ours(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not zeros._KEPT
            wanted = theirs(x)
            with torch.inference_mode():
                inside = ours(x)
            assert len(zeros._KEPT) == 1
            torch.cuda.set_sync_debug_mode("error")
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                elsewhere = ours(x)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            for found in (first, inside, elsewhere, ours(x)):
                assert_close(found, wanted, 2e-2)
        for _ in range(3):  # the last is made by a plan, whose gradient saves them
            training = ours(x.requires_grad_())
            training[0].sum().backward()
        assert not bool(zeros._KEPT[0].any()), "somebody wrote to them"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        zeros._view.cache_clear()
