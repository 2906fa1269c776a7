"""Calls in the order of their angles by PyTorch's operators: known calls are not prepared again and run few operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.rope_calls import forget
from tests.support.run import DEVICE
from tuned.calls.rope import arguments
from tuned.calls.rope import call as rope_call
from tuned.calls.rope.arguments import Given, Settings
from tuned.dispatch import rope, rope_qk
from tuned.families.rope import in_order

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of calls on a CPU")

VIEWS = {
    "contiguous": lambda *shape: torch.randn(shape),
    "transposed": lambda *shape: torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
    "every other": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "expanded": lambda *shape: torch.randn(1, *shape[1:]).expand(shape),
    "negative": lambda *shape: torch.randn(shape, dtype=torch.complex64).conj().imag,
}
B, S, H, D, ROWS = 2, 5, 4, 12, 9


def calls() -> dict[str, dict[str, Any]]:
    """The settings of calls, and the angles that they take."""
    found: dict[str, dict[str, Any]] = {}
    for tensor_format in ("bshd", "sbhd", "bhsd"):
        for source in ("freqs", "inv_freq", "cos", "per batch", "freqs_cis"):
            for entries in ("pair", "feature") if source != "freqs_cis" else ("pair",):
                found[f"{tensor_format} {source} {entries}"] = {
                    "tensor_format": tensor_format,
                    "source": source,
                    "angle_entries": entries,
                }
    more: dict[str, dict[str, Any]] = {
        "scaled": {"source": "freqs", "attention_scaling": 1.5},
        "last": {"rotated": "last", "turned": 8},
        "first": {"turned": 8},
        "proportional": {"rotated": "proportional", "turned": 8},
        "conjugate": {"conjugate": True},
        "backward": {"direction": "backward"},
        "backward feature": {"direction": "backward", "angle_entries": "feature"},
        "conjugate feature": {"conjugate": True, "angle_entries": "feature"},
        "qkv": {"kv_heads": 1},
        "qkv of 3": {"kv_heads": 0},
        "shifted": {"offset": 3},
        "tables of few bits": {"tables": torch.float16},
        "tables of many bits": {"tables": torch.float64, "angle_entries": "feature"},
    }
    return found | more


def made(settings: dict[str, Any], dtype: torch.dtype, view: str, key: bool) -> tuple[Given, Settings]:
    """A call of those settings."""
    named = dict(settings)
    source, turned, offset = named.pop("source", "cos"), named.pop("turned", D), named.pop("offset", 0)
    tables = named.pop("tables", dtype)
    tensor_format = named.get("tensor_format", "bshd")
    tokens = {"bshd": (B, S), "sbhd": (S, B)}.get(tensor_format)
    tail = (H,) if named.get("kv_heads") != 0 else (3, H)

    def tensor(*tail: int) -> torch.Tensor:
        shape = (*tokens, *tail, D) if tokens is not None else (B, *tail, S, D)
        return VIEWS[view](*shape).to(dtype)

    pairs = turned // 2 if named.get("angle_entries", "pair") == "pair" else turned
    named.setdefault("angle_entries", "pair")
    radians = torch.randn(*((B,) if source == "per batch" else ()), ROWS, pairs)
    angles: dict[str, Any] = {
        "freqs": lambda: {"freqs": radians[:, None, None]},
        "inv_freq": lambda: {"inv_freq": radians[0]},
        "cos": lambda: {"cos": radians.cos().to(tables), "sin": radians.sin().to(tables)},
        "per batch": lambda: {"cos": radians.cos(), "sin": radians.sin()},
        "freqs_cis": lambda: {"freqs_cis": torch.polar(torch.ones_like(radians), radians).conj()},
    }[source]()
    beside = tensor(2) if key and "kv_heads" not in named else None
    return Given(tensor(*tail), beside, offset=offset, **angles), Settings(**named)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each call that is prepared; at first no call is known."""
    forget()
    found: list[Settings] = []

    def prepare(given: Given, settings: Settings, **named: Any) -> Any:
        found.append(settings)
        return arguments.prepare(given, settings, **named)

    monkeypatch.setattr(rope_call, "prepare", prepare)
    return found


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_known_call_is_prepared_once_and_gives_the_bits_of_the_formula(
    prepared: list[Settings], name: str, dtype: torch.dtype, *, interleaved: bool
) -> None:
    if interleaved and name == "proportional":
        pytest.skip("refused")
    for view in VIEWS:
        for key in (False, True):
            forget()
            prepared.clear()
            for _ in range(3):  # other values with the same properties
                given, settings = made(calls()[name] | {"interleaved": interleaved}, dtype, view, key)
                got = rope_call.call_given(given, settings)
                assert same_bits(got, rope_call.run_eager(given, settings))
            assert len(prepared) == 3 + 1, "by the formula each time"


@pytest.mark.parametrize("name", calls())
def test_a_query_and_a_key_that_are_not_joined_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(in_order, "JOINED", 0)
    for view in VIEWS:
        forget()
        for _ in range(2):
            given, settings = made(calls()[name], torch.bfloat16, view, key=True)
            assert same_bits(rope_call.call_given(given, settings), rope_call.run_eager(given, settings))


@pytest.mark.parametrize("name", ["scaled", "last", "proportional", "conjugate feature", "shifted", "bhsd cos pair"])
@pytest.mark.parametrize("key", [False, True], ids=["alone", "pair"])
def test_in_place_the_same_tensors_hold_the_same_bits(prepared: list[Settings], name: str, *, key: bool) -> None:
    for view in ("contiguous", "transposed", "every other"):
        forget()
        prepared.clear()
        for _ in range(2):
            given, settings = made(calls()[name], torch.float32, view, key)
            want = rope_call.run_eager(given, settings)
            got = rope_call.call_given(given, settings._replace(inplace=True))
            assert same_bits(got, want)
            assert got is given.x or (got[0] is given.x and got[1] is given.key)
        assert [s.inplace for s in prepared].count(True) == 1


def operators(function: Any) -> list[str]:
    """The names of the operators that a function runs, without views and other aliases."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function()
    inner = {"aten::as_strided", "aten::resize_", "aten::empty", "aten::empty_strided"}
    return [event.name for event in seen.events() if event.name.startswith("aten::") and event.name not in inner]


def test_a_known_call_takes_few_operators() -> None:
    x, k = torch.randn(1, 16, 4, 64), torch.randn(1, 16, 2, 64)
    cos, sin = torch.randn(2, 16, 32)
    short, short_k = x.bfloat16(), k.bfloat16()
    large = torch.ones(1, 16, in_order.JOINED // (16 * 64), 64, dtype=torch.bfloat16)
    one = ["empty_like", "mul", "mul", "sub_", "add_"]
    one_widened = ["empty_like", "to", "_to_copy", "copy_", "mul", "mul_", "sub_", "add_", "copy_"]
    views = {f"aten::{name}" for name in ("unbind", "select", "split", "split_with_sizes", "narrow", "slice")}
    for call, wanted in (
        (lambda: rope(x, cos=cos, sin=sin), one),
        (lambda: rope_qk(x, k, cos=cos, sin=sin), 2 * one),
        (lambda: rope(short, cos=cos, sin=sin), one_widened),
        (lambda: rope_qk(short, short_k, cos=cos, sin=sin), [*one_widened, "cat", *(2 * ["empty_like", "copy_"])]),
        (lambda: rope_qk(large, short_k, cos=cos, sin=sin), 2 * one_widened),
    ):
        call()
        found = [name.removeprefix("aten::") for name in operators(call) if name not in views]
        assert sorted(found) == sorted(wanted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_what_no_property_tells_goes_the_long_way(prepared: list[Settings]) -> None:
    x, cos, sin = torch.randn(1, 6, 2, 8), *torch.randn(2, 9, 4)
    want = rope(x, cos=cos, sin=sin)
    shifted = rope(x, cos=cos, sin=sin, offset=3)
    with pytest.raises(ValueError, match="too short"):
        rope(x, cos=cos, sin=sin, offset=4)
    with pytest.raises(ValueError, match="offset must be at least 0"):
        rope(x, cos=cos, sin=sin, offset=-1)
    assert torch.equal(rope(x, cos=cos[3:], sin=sin[3:]), shifted)
    for tensors in ((x.to("meta"), cos, sin), (x, cos.to("meta"), sin), (x, cos, sin.to("meta"))):
        with pytest.raises(ValueError, match="must be on the device of x"):
            rope(tensors[0], cos=tensors[1], sin=tensors[2])
    assert rope(*(t.to("meta") for t in (x, cos)), angle_entries="pair").is_meta
    del prepared[:]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope(x, cos=cos, sin=sin), want)
    assert torch.equal(torch.func.vmap(lambda _: rope(x, cos=cos, sin=sin))(torch.zeros(2))[1], want)
    (grad,) = (torch.func.grad(lambda s: (rope(x, cos=cos, sin=sin) * s).sum())(torch.ones(())),)
    torch.testing.assert_close(grad, want.sum())
    traced = torch.jit.trace(lambda t: rope(t, cos=cos, sin=sin), (x,), check_trace=False)
    other = torch.randn_like(x)
    assert torch.equal(traced(other), rope(other, cos=cos, sin=sin))
    assert len(prepared) == 4


def test_a_pair_of_half_precision_is_rotated_under_autocast_to_another() -> None:
    """torch.cat refuses such a pair under autocast."""
    q, k, (cos, sin) = torch.randn(1, 5, 2, 8).half(), torch.randn(1, 5, 2, 8).half(), torch.randn(2, 5, 4).half()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = rope_qk(q, k, cos=cos, sin=sin)
        assert same_bits(found, rope_qk(q, k, cos=cos, sin=sin))
        forget()


def test_a_known_call_in_place_refuses_a_pair_that_overlaps() -> None:
    memory, cos, sin = torch.randn(400), *torch.randn(2, 5, 4)
    q, k = memory[:80].view(1, 5, 2, 8), memory[160:240].view(1, 5, 2, 8)
    for _ in range(2):
        rope_qk(q, k, cos=cos, sin=sin, inplace=True)
    before = memory.clone()
    with pytest.raises(ValueError, match="share memory"):
        rope_qk(q, memory[72:152].view(1, 5, 2, 8), cos=cos, sin=sin, inplace=True)
    assert torch.equal(memory, before)


def test_cosines_and_sines_may_have_different_axes() -> None:
    x, cos, sin = torch.randn(1, 5, 2, 8), *torch.randn(2, 5, 4)
    want = rope(x, cos=cos, sin=sin)
    for tables in ((cos[:, None, None], sin), (cos, sin[:, None, None])):
        for _ in range(2):
            assert torch.equal(rope(x, cos=tables[0], sin=tables[1]), want)


def test_a_gradient_that_a_known_call_did_not_need_is_right() -> None:
    x, cos, sin = torch.randn(1, 5, 2, 8), *torch.randn(2, 5, 4)
    rope(x, cos=cos, sin=sin)
    for leaf in (x, cos):
        leaf.requires_grad_()
        (found,) = torch.autograd.grad(rope(x, cos=cos, sin=sin).square().sum(), leaf)
        with torch.no_grad():
            assert not rope(x, cos=cos, sin=sin).requires_grad
        given = Given(x, cos=cos, sin=sin)
        (want,) = torch.autograd.grad(rope_call.run_eager(given, Settings()).square().sum(), leaf)
        assert torch.equal(found, want)
        leaf.requires_grad_(requires_grad=False)


def test_the_result_of_a_known_call_is_no_view() -> None:
    x, cos, sin = torch.randn(1, 5, 2, 8), *torch.randn(2, 5, 4)
    with torch.no_grad():
        outs = [rope(x, cos=cos, sin=sin) for _ in range(2)]
    weight = torch.ones((), requires_grad=True)
    for out in outs:
        assert not out._is_view()
        out.mul_(weight)  # autograd refuses this for a view that was made without it
