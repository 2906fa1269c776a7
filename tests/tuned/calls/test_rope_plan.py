"""The hot path of RoPE: no call is served by a launch made for another call, and no tensor of a caller is kept."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuned
import tuned.calls.rope.plan
import tuned.launching.plan
import tuned.lookup.misses
from tests.support.rope_calls import CHOICES, Case, Watch, build, chosen_once, forget, watch
from tests.support.rope_plans import CASES, check, wanted_of
from tuned.calls.rope import call as rope_call
from tuned.dispatch import qk_norm_rope, rope, rope_qk, rope_qkv
from tuned.launching import launcher
from tuned.lookup.lookup import Gpu

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("chosen_once")]

__all__ = ["chosen_once", "watch"]


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_differs_in_one_thing_from_one_seen_before_is_right(name: str) -> None:
    base = CASES[name]
    for field, values in CHOICES.items():
        for value in values:
            changed = dataclasses.replace(base, **{field: value})
            for case in (base, changed, changed) if changed != base else ():
                check(case)


def test_calls_seen_before_are_launched_directly(watch: Watch) -> None:
    for case in CASES.values():
        for _ in range(3):
            check(case)
    assert watch.direct >= 2 * len(CASES)


LENGTHS = {
    "plain": Case(key_heads=None),
    "plain sbhd": Case("sbhd", key_heads=None, source="cos_sin"),
    "plain packed": Case("thd", key_heads=None, source="cache"),
    "pair": Case(),
    "pair in place": Case(inplace=True, source="inv_freq"),
    "narrow key": Case("sbhd", key_heads=1, head_dim=24),
    "training": Case(x_grad="made", key_grad="made", source="cos_sin", entries="feature"),
    "tokens": Case("thd", source="cache", place="ids", inplace=True),
    "ids": Case(source="cache", place="ids"),
    "shared ids": Case("sbhd", source="cache", place="shared"),
    "shifted": Case(place="shifted"),
    "starts": Case("sbhd", place="starts"),
    "packed starts": Case("thd", place="starts"),
    "parallel": Case(cp_size=2, rows=2 * 40),
    "packed parallel": Case("thd", cp_size=2, rows=2 * 40),
    "qkv": Case(key_heads=None, kv_heads=1),
    "qkv in place": Case(key_heads=None, kv_heads=1, inplace=True),
    "qkv of 5": Case(key_heads=None, kv_heads=0, heads=8),
}
VIEWS = [
    {"view": view, "key_view": view, "angle_view": angle, "sine_view": angle, "index_view": "odd"}
    for view in ("contiguous", "odd")
    for angle in ("contiguous", "odd")
]


@pytest.mark.parametrize("name", LENGTHS)
def test_calls_of_other_lengths_are_right_whichever_came_first(watch: Watch, name: str) -> None:
    sizes = [(2, 4), (1, 1), (1, 6), (3, 2), (2, 1), (1, 10), (1, 2)]
    for views in VIEWS:
        for first in (0, 1, 4):
            forget()
            for batch, seq in sizes[first:] + sizes[:first]:
                rows = LENGTHS[name].rows
                for few in {1, rows} if (batch, seq) == (1, 1) else {rows, rows + 1}:
                    check(dataclasses.replace(LENGTHS[name], batch=batch, seq=seq, rows=few, **views))
    assert watch.direct


CHANGES = [(field, value) for field, values in CHOICES.items() for value in values]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CASES)),
    changes=st.lists(st.sampled_from(CHANGES), min_size=4, max_size=16),
    data=st.data(),
)
def test_nothing_stale_is_launched_whatever_came_before(
    watch: Watch, name: str, changes: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """Calls differ in more and more properties; then earlier calls come again in any order."""
    assert watch.public >= 0
    forget()
    cases = [CASES[name]]
    for field, value in changes:
        cases.append(dataclasses.replace(cases[-1], **{field: value}))
    again = data.draw(st.lists(st.sampled_from(range(len(cases))), max_size=12))
    for case in (*cases, *cases, *cases, *(cases[i] for i in again)):  # the third round is known by the short way
        check(case)


# What is compiled and how it is launched ------------------------------------------------------------------------------


def test_lengths_of_one_class_are_compiled_for_once(watch: Watch) -> None:
    freqs = torch.rand(64, 16)
    for length in range(2, 40, 2):
        rope_qk(torch.randn(1, length, 4, 16), torch.randn(1, length, 2, 16), freqs, tensor_format="sbhd")
    variants = {key[1] for key in tuned.calls.rope.plan._COMPILED}
    assert watch.public == len(variants) <= 2, "each variant once, whatever the length"
    assert watch.direct == 19 - watch.public
    before = watch.public
    rope_qk(
        torch.randn(1, 4, 4, 16),
        torch.randn(1, 4, 2, 16),
        freqs.half().float()[:, ::2],
        angle_entries="pair",
        tensor_format="sbhd",
    )
    assert watch.public == before + 1, "what is of another class is compiled"


@pytest.mark.parametrize("head_dim", [20, 24, 32])
def test_rows_of_one_token_that_lie_wider_than_others_say_nothing_of_them(head_dim: int) -> None:
    """One token of a packed tensor counts as contiguous: 16 divides its row stride, but not that of longer calls."""
    packed = torch.empty(1, 1, 4, head_dim, device="meta")
    one, two = packed[:, :, :1], torch.empty(1, 2, 1, head_dim, device="meta")
    assert one.is_contiguous()
    regular = tuned.calls.rope.lengths._regular
    assert regular(one) == regular(two) == (head_dim % 16 == 0)


def test_what_is_remembered_is_bounded(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.launching.plan, "MAX_PLANS", 3)
    for length in range(1, 12):
        for heads in (1, 2, 3, 4):
            check(Case(heads=heads, seq=length))
    tables = rope_call._PLANS, tuned.calls.rope.plan._COMPILED, tuned.calls.rope.lengths._CLASSES
    assert [0 < len(table) <= 3 for table in tables] == [True] * 3
    assert watch.public


CALLS = [CASES["plain"], CASES["pair in place"], CASES["training"], CASES["qkv"]]


@pytest.mark.parametrize("which", [0, 1])
def test_while_a_profiler_listens_launches_are_public(watch: Watch, which: int) -> None:
    for case in CALLS:
        for _ in range(2):
            check(case)
    direct = watch.direct
    assert direct
    watch.listeners[which].calls.append("a profiler")
    public = watch.public
    for case in CALLS:
        check(case)
    assert watch.direct == direct
    assert watch.public >= public + len(CALLS)
    watch.listeners[which].calls.clear()
    public = watch.public
    for case in CALLS:
        check(case)
    assert watch.public == public
    assert watch.direct >= direct + len(CALLS)


@pytest.mark.parametrize("why", ["safe", "another launcher", "hooks kept another way"])
def test_where_there_is_no_other_launcher_every_launch_is_public(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "hooks kept another way":
        monkeypatch.setattr(tuned.launching.plan, "hooks", lambda: None)
    else:
        monkeypatch.setattr(tuned.launching.plan, "direct_supported", launcher.direct_supported)
        monkeypatch.setattr(launcher, "_PROBED", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setenv("TUNED_DISPATCH", "safe" if why == "safe" else "")
        monkeypatch.setattr(launcher, "_probe", lambda _device: why == "safe")
    for case in CALLS:
        for _ in range(3):
            check(case)
    assert watch.direct == 0
    assert watch.public >= 3 * len(CALLS)


def test_a_first_call_under_capture_decides_nothing_for_later_ones(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned.calls.rope.plan, "capturing", lambda: True)
    for _ in range(2):
        check(Case())
    assert (watch.public, watch.direct) == (2, 0)
    assert not tuned.calls.rope.plan._COMPILED
    monkeypatch.setattr(tuned.calls.rope.plan, "capturing", lambda: False)
    check(Case())
    assert (watch.public, watch.direct) == (3, 0)
    monkeypatch.setattr(tuned.calls.rope.plan, "capturing", lambda: True)
    check(Case())
    assert (watch.public, watch.direct) == (3, 1), "what is known is captured"


def test_a_call_of_another_thread_does_not_take_what_a_first_call_prepared(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    freqs, x, other = torch.rand(64, 8), torch.randn(2, 4, 4, 16), torch.randn(2, 4, 4, 16)
    results: list[torch.Tensor] = []
    genuine = rope_call.remember

    def remember(*arguments: Any) -> None:
        """From here on the plan is known, although its first run is still to come."""
        genuine(*arguments)
        monkeypatch.setattr(rope_call, "remember", genuine)
        thread = threading.Thread(target=lambda: results.append(rope(other, freqs, angle_entries="pair")))
        thread.start()
        thread.join()

    monkeypatch.setattr(rope_call, "remember", remember)
    results.insert(0, rope(x, freqs, angle_entries="pair"))
    assert watch.public >= 1
    forget()
    for tensor, got in zip((x, other), results, strict=True):
        torch.testing.assert_close(got, rope(tensor, freqs, angle_entries="pair"), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "pair in place", "training", "qkv"])
def test_a_first_call_is_prepared_once_and_a_known_one_not_at_all(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made: list[str] = []

    def counted(module: Any, function: str) -> None:
        genuine = getattr(module, function)

        def called(*arguments: Any, **named: Any) -> Any:
            made.append(function)
            return genuine(*arguments, **named)

        monkeypatch.setattr(module, function, called)

    counted(rope_call, "prepare")
    for function in ("prepare", "launches"):
        counted(tuned.calls.rope.plan, function)
    given, asked, _ = build(LENGTHS[name])
    rope_call.call(*given, tuple(asked))
    assert (watch.public, watch.direct) == (1, 0)
    assert sorted(made) == ["launches", "prepare"]
    made.clear()
    given, asked, _ = build(LENGTHS[name])
    rope_call.call(*given, tuple(asked))
    assert (watch.public, watch.direct) == (1, 1)
    assert not made


def test_more_tokens_than_the_table_has_rows_are_no_reason_to_launch_publicly(watch: Watch) -> None:
    for _ in range(3):
        check(Case("thd", batch=5, seq=10, rows=40, source="cache", place="ids", inplace=True))
    assert (watch.public, watch.direct) == (1, 2)


def test_offsets_that_are_numbers_share_a_plan_and_are_checked_each_time(watch: Watch) -> None:
    x, freqs = torch.randn(1, 4, 2, 16), torch.rand(20, 16)
    for offset in (1, 2, 16, 7):
        torch.testing.assert_close(rope(x, freqs, offset=offset), rope(x, freqs[offset:]))
    assert watch.public == 2, "with an offset and without"
    for offset in (17, -1, 2**31):
        with pytest.raises(ValueError, match=r"offset|angles are too short"):
            rope(x, freqs, offset=offset)


@pytest.mark.usefixtures("watch")
def test_threads_that_call_at_once_disturb_nobody() -> None:
    cases = [dataclasses.replace(case, seq=seq) for case in CASES.values() for seq in (2, 4, 6) if not case.cp_size > 1]
    for case in cases:
        wanted_of(case)

    def work(first: int) -> int:
        for i in range(len(cases)):
            check(cases[(first + 7 * i) % len(cases)])
        return first

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(3):
            forget()
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                assert list(pool.map(work, range(8))) == list(range(8))
    finally:
        sys.setswitchinterval(interval)


def test_the_interpreter_runs_what_is_launched_directly_too(watch: Watch) -> None:
    watch.interpreted = True
    for name in ("pair", "in place training", "tokens", "packed", "qkv", "proportional"):
        case = dataclasses.replace(CASES[name], seq=2)
        for _ in range(3):
            check(case)
    assert watch.direct >= 12


def test_a_packed_qkv_whose_parts_lie_apart_is_launched_as_a_dense_copy(watch: Watch) -> None:
    watch.interpreted = True
    wide = torch.randn(2, 3, 3, 6, 16)
    freqs, grad = torch.randn(3, 16), torch.randn(2, 3, 3, 4, 16)
    for needed in (False, True):
        for _ in range(3):
            leaf = wide.clone().requires_grad_(needed)
            dense = wide[..., 1:5, :].clone().requires_grad_(needed)
            launched = watch.public + watch.direct
            found = rope_qkv(leaf[..., 1:5, :], freqs)
            assert watch.public + watch.direct == launched + 1
            wanted = rope_qkv(dense, freqs)
            assert torch.equal(found, wanted)
            if needed:
                found.backward(grad)
                wanted.backward(grad)
                assert torch.equal(leaf.grad[..., 1:5, :], dense.grad)
    assert watch.direct > 0


QKV = {  # strides of [1 or 2, 5, 3, 2, 4]
    "dense": (120, 24, 8, 4, 1),
    "expanded over the batch": (7, 0, 112, 56, 1),
    "expanded over the sequence": (0, 24, 8, 4, 1),
    "expanded over all tokens": (0, 0, 8, 4, 1),
    "heads outside": (4, 8, 80, 40, 1),
    "features outside": (30, 6, 2, 1, 60),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("seq", [1, 2])
@pytest.mark.parametrize("case", QKV)
def test_a_packed_qkv_of_any_strides_has_the_same_result_again(watch: Watch, case: str, seq: int) -> None:
    watch.interpreted = True
    storage = torch.randn(600, generator=torch.Generator().manual_seed(2))
    qkv = storage.as_strided((seq, 5, 3, 2, 4), QKV[case])
    cos, sin = torch.rand(8, 2), torch.rand(8, 2)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return rope_qkv(x, offset=5, cos=cos, sin=sin, tensor_format="sbhd", interleaved=True)

    forget()
    wanted = rotated(qkv.contiguous())
    forget()
    for _ in range(3):
        found = rotated(qkv)
        torch.testing.assert_close(found, wanted)


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd", "bhsd"])
@pytest.mark.parametrize("normed", [False, True])
def test_what_shares_memory_has_the_same_result_again(watch: Watch, layout: str, normed: bool) -> None:
    """Expands each axis of the query or of the key in turn, and leaves the others as they are."""
    watch.interpreted = True
    seq, batch = 3, 1 if layout == "thd" else 2
    shapes = {"bshd": (batch, seq, 2, 4), "sbhd": (seq, batch, 2, 4), "thd": (seq, 2, 4), "bhsd": (batch, 2, seq, 4)}
    shape, cos, sin = shapes[layout], torch.rand(seq, 2), torch.rand(seq, 2)
    extra = {"cu_seqlens": torch.tensor([0, seq], dtype=torch.int32)} if layout == "thd" else {}
    of_norm = {"q_weight": torch.rand(4), "k_weight": torch.rand(4)} if normed else {}
    operator = qk_norm_rope if normed else rope_qk

    def turned(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return operator(q, k, cos=cos, sin=sin, tensor_format=layout, **of_norm, **extra)

    for axis, of_key in itertools.product(range(len(shape) - 1), (False, True)):
        dense = torch.randn(shape)
        shared = dense.narrow(axis, 0, 1).expand(shape)
        q, k = (dense, shared) if of_key else (shared, dense)
        forget()
        wanted = turned(q.contiguous(), k.contiguous())
        forget()
        for _ in range(3):
            for ours, right in zip(turned(q, k), wanted, strict=True):
                torch.testing.assert_close(ours, right)


@pytest.mark.usefixtures("watch")
def test_a_scaling_that_is_a_tensor_is_refused_and_not_kept() -> None:
    x, freqs, factor = torch.randn(1, 4, 2, 16), torch.rand(4, 16), torch.tensor(1.5)
    for _ in range(2):
        with pytest.raises(TypeError, match="must be a number"):
            rope(x, freqs, attention_scaling=factor)


def test_a_gpu_that_nothing_was_tuned_on_is_told_of_at_the_line_that_called(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_call, "call", watch.genuine)  # else the caller would be the watch's frame
    monkeypatch.setattr(tuned.calls.rope.plan, "gpu_of", lambda _device: Gpu("a_new_card", 90, 132, "A New Card"))
    monkeypatch.setattr(tuned.lookup.misses, "_TOLD", set())
    x, freqs = torch.ones(1, 2, 4, 16), torch.zeros(2, 8)
    with pytest.warns(tuned.TunedWarning, match="nothing was tuned on A New Card") as said:
        rope_qk(x, x, freqs, angle_entries="pair")
    assert said[0].filename == __file__


RESULTS = {
    "bshd": ((2, 8, 4, 64), {}),
    "bhsd": ((2, 4, 8, 64), {}),
    "thd": ((8, 4, 64), {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}),
}


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("layout", RESULTS)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("two", [False, True])
def test_a_result_may_be_overwritten_from_the_first_call_on(layout: str, *, gradient: bool, two: bool) -> None:
    """A view made inside an autograd node may not be overwritten, nor one made while nothing is recorded."""
    shape, others = RESULTS[layout]
    freqs = torch.randn(16, 32)
    for _ in range(3):
        x = torch.randn(shape, requires_grad=gradient)
        given = {"angle_entries": "pair", "tensor_format": layout, **others}
        results = rope_qk(x, 2 * x, freqs, **given) if two else (rope(x, freqs, **given),)
        for result in results:
            assert not result._is_view()
            wanted = 3 * result.detach()
            result.mul_(torch.full((), 3.0, requires_grad=True))
            torch.testing.assert_close(result.detach(), wanted)
            result.detach_()


@pytest.mark.usefixtures("watch")
def test_angles_with_axes_of_their_own_are_refused_whatever_came_before() -> None:
    for _ in range(2):
        rope(torch.randn(2, 8, 4, 64), torch.randn(16, 1, 1, 32), angle_entries="pair")
    with pytest.raises(ValueError, match=r"must be \[rows, entries\]"):
        rope(torch.randn(2, 4, 4, 64), torch.randn(16, 3, 1, 32), angle_entries="pair")
