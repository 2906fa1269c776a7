"""tuned.nn and patched modules raise the errors of PyTorch's modules, with the same text, at first and later calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import zeros
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import tuned.nn
from tests.support.outcome import outcome
from tuned.calls.refusal import was_refused
from tuned.dispatch import gru, gru_cell

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[Any], Any]

I, H, T, B, L = 6, 4, 5, 3, 2  # noqa: E741 - input size


def pack(features: int = I) -> Any:
    return pack_sequence([zeros(4, features), zeros(2, features)])


GRU_CALLS: dict[str, Call] = {
    "right": lambda m: m(zeros(T, B, I)),
    "0-D": lambda m: m(zeros(())),
    "1-D": lambda m: m(zeros(I)),
    "4-D": lambda m: m(zeros(1, 1, 1, I)),
    "features": lambda m: m(zeros(T, B, 7)),
    "no features": lambda m: m(zeros(T, B, 0)),
    "hx layers": lambda m: m(zeros(T, B, I), zeros(1, B, H)),
    "hx batch": lambda m: m(zeros(T, B, I), zeros(L, 2, H)),
    "hx hidden": lambda m: m(zeros(T, B, I), zeros(L, B, 5)),
    "hx 2-D": lambda m: m(zeros(T, B, I), zeros(L, H)),
    "hx 3-D": lambda m: m(zeros(T, I), zeros(L, B, H)),
    "hx unbatched": lambda m: m(zeros(T, I), zeros(1, H)),
    "features unbatched": lambda m: m(zeros(T, 7)),
    "half": lambda m: m(zeros(T, B, I).half()),
    "double": lambda m: m(zeros(T, B, I).double()),
    "complex": lambda m: m(zeros(T, B, I, dtype=torch.complex64)),
    "integers": lambda m: m(zeros(T, B, I).long()),
    "hx half": lambda m: m(zeros(T, B, I), zeros(L, B, H).half()),
    "hx meta": lambda m: m(zeros(T, B, I), zeros(L, B, H, device="meta")),
    "meta": lambda m: m(zeros(T, B, I, device="meta")),
    "no steps": lambda m: m(zeros(0, B, I)),
    "no steps unbatched": lambda m: m(zeros(0, I)),
    "no batch": lambda m: m(zeros(T, 0, I)),
    "None": lambda m: m(None),
    "list": lambda m: m([1.0]),
    "tuple": lambda m: m((zeros(T, B, I),)),
    "hx int": lambda m: m(zeros(T, B, I), 3),
    "nothing": lambda m: m(),
    "too much": lambda m: m(zeros(T, B, I), None, None),
    "packed features": lambda m: m(pack(7)),
    "packed hx": lambda m: m(pack(), zeros(L, 3, H)),
    "packed hx 2-D": lambda m: m(pack(), zeros(L, H)),
    "packed half": lambda m: m(pack().to(torch.float16)),
}
SETTINGS: list[dict[str, Any]] = [{}, {"batch_first": True, "bidirectional": True}, {"bias": False}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("call", GRU_CALLS.values(), ids=GRU_CALLS)
def test_a_gru_raises_what_pytorchs_does(call: Call, settings: dict[str, Any]) -> None:
    theirs, ours = torch.nn.GRU(I, H, L, **settings), tuned.nn.GRU(I, H, L, **settings)
    wanted = outcome(lambda: call(theirs))
    for _ in range(2):
        assert outcome(lambda: call(ours)) == wanted
        with tuned.nn.patched():
            assert outcome(lambda: call(theirs)) == wanted
        ours(zeros(T, B, I))


CELL_CALLS: dict[str, Call] = {
    "right": lambda m: m(zeros(B, I)),
    "0-D": lambda m: m(zeros(())),
    "3-D": lambda m: m(zeros(1, B, I)),
    "hx 1-D": lambda m: m(zeros(B, I), zeros(H)),
    "hx 2-D": lambda m: m(zeros(I), zeros(B, H)),
    "features": lambda m: m(zeros(B, 7)),
    "features unbatched": lambda m: m(zeros(7)),
    "hidden": lambda m: m(zeros(B, I), zeros(B, 5)),
    "broadcast hx": lambda m: m(zeros(B, I), zeros(1, H)),
    "broadcast x": lambda m: m(zeros(1, I), zeros(B, H)),
    "half": lambda m: m(zeros(B, I).half()),
    "hx double": lambda m: m(zeros(B, I), zeros(B, H).double()),
    "integers": lambda m: m(zeros(B, I).long()),
    "None": lambda m: m(None),
    "list": lambda m: m([zeros(B, I)]),
    "hx int": lambda m: m(zeros(B, I), 4),
    "meta": lambda m: m(zeros(B, I, device="meta")),
    "no batch": lambda m: m(zeros(0, I)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("call", CELL_CALLS.values(), ids=CELL_CALLS)
def test_a_cell_raises_what_pytorchs_does(call: Call, bias: bool) -> None:
    theirs, ours = torch.nn.GRUCell(I, H, bias), tuned.nn.GRUCell(I, H, bias)
    wanted = outcome(lambda: call(theirs))
    for _ in range(2):
        assert outcome(lambda: call(ours)) == wanted
        with tuned.nn.patched():
            assert outcome(lambda: call(theirs)) == wanted
        ours(zeros(B, I))


def test_what_pytorch_ends_the_process_at_is_refused() -> None:
    said = r"as many axes as input, 1, got 2|got \[1, 3\] and \[1, 1, 1\]"
    for cell in (tuned.nn.GRUCell(3, 1), torch.nn.GRUCell(3, 1)):
        with tuned.nn.patched(), pytest.raises(ValueError, match=said):
            cell(zeros(3), zeros(1, 1))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_without_sizes_raises_what_pytorchs_cell_raises() -> None:
    """What compares the tensors of repeated steps ends the process at such a tensor."""
    ours = tuned.nn.GRUCell(I, H).requires_grad_(False)
    for _ in range(4):
        gru_cell(zeros(B, I), zeros(B, H), *ours.parameters())
    nested = torch.nested.nested_tensor([zeros(I)] * B)
    for given in ((nested,), (nested, zeros(B, H))):
        assert outcome(lambda given=given: ours(*given)) == outcome(
            lambda given=given: torch.nn.GRUCell.forward(ours, *given)
        )


def test_no_packed_sequence_after_a_known_call_raises_what_pytorchs_gru_raises() -> None:
    ours, none = tuned.nn.GRU(I, H).requires_grad_(False), PackedSequence(zeros(0, I), zeros(0, dtype=torch.int64))
    ours(zeros(T, B, I))
    assert outcome(lambda: ours(none)) == outcome(lambda: torch.nn.GRU(I, H)(none))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_without_sizes_gets_what_pytorchs_gru_gives() -> None:
    ours, theirs = tuned.nn.GRU(I, H), torch.nn.GRU(I, H)
    ours.load_state_dict(theirs.state_dict())
    ours(zeros(T, B, I))
    same, apart = (torch.nested.nested_tensor([torch.randn(n, I) for n in lengths]) for lengths in ((T, T), (T, 2)))
    state = zeros(1, T, H)
    for given in ((same, state), (same,), (apart, state), (same[0], same), (same, zeros(1, 2, H))):
        assert outcome(lambda given=given: ours(*given)) == outcome(lambda given=given: theirs(*given))
    torch.testing.assert_close(ours(same, state), theirs(same, state), rtol=0, atol=0)


CONSTRUCTORS: dict[str, Call] = {
    "proj_size": lambda t: t(I, H, proj_size=2),
    "unknown": lambda t: t(I, H, foo=2),
    "nonlinearity": lambda t: t(I, H, nonlinearity="relu"),
    "dropout": lambda t: t(I, H, dropout=2),
    "no layers": lambda t: t(I, H, 0),
    "no hidden": lambda t: t(I, 0),
    "hidden below 0": lambda t: t(I, -4),
    "hidden float": lambda t: t(I, 4.0),
}


@pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_constructor_raises_what_pytorchs_does(make: Call) -> None:
    wanted = outcome(lambda: make(torch.nn.GRU))
    assert wanted[0] != "served"
    assert outcome(lambda: make(tuned.nn.GRU)) == wanted


def test_errors_of_what_runs_are_not_taken_for_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("of a kernel")

    for name in ("gru", "gru_cell"):
        monkeypatch.setattr(tuned.dispatch.serve, name, fail)
    monkeypatch.setattr(tuned.nn, "why_eager", lambda *_, **__: None)
    with torch.no_grad(), tuned.nn.patched():
        for module, shape in ((tuned.nn.GRU(I, H), (T, B, I)), (torch.nn.GRU(I, H), (T, B, I))):
            with pytest.raises(ValueError, match="of a kernel"):
                module(zeros(shape))
        for cell in (tuned.nn.GRUCell(I, H), torch.nn.GRUCell(I, H)):
            with pytest.raises(ValueError, match="of a kernel"):
                cell(zeros(B, I))


def test_the_public_functions_keep_their_own_words() -> None:
    weights = [zeros(12, I), zeros(12, H)]
    for call in (
        lambda: gru(zeros(B, I), zeros(1, B, H), weights),
        lambda: gru_cell(zeros(2, I), zeros(B, H), *weights),
    ):
        with pytest.raises(ValueError, match="must be") as caught:
            call()
        assert type(caught.value) is ValueError
        assert was_refused(caught.value)
