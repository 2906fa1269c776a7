"""Repeated calls that are recognised at once: which tensors count as alike, and which are never taken for others."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuned.launching import alike

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "what else a plan depends on"


def learned(*tensors: torch.Tensor | None) -> Callable[..., Any]:
    table: dict[Any, Any] = {}
    alike.learn(table, KEY, tensors, "plan")
    [[(are_alike, plan)]] = table.values()
    assert plan == "plan"
    return are_alike


def known(t: torch.Tensor | None) -> Any:
    """All properties of a tensor that a kernel may depend on, read one by one."""
    return t is None or (
        type(t), t.dtype, t.shape, t.stride(), t.data_ptr() % 16, t.device, t.requires_grad, t.is_neg(), t.is_conj(),
        t.is_inference(),
    )  # fmt: skip


def made(draw: random.Random) -> torch.Tensor | None:
    """A tensor of few kinds, so that two are often alike."""
    dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.int32, torch.complex64])
    with torch.inference_mode(draw.random() < 0.1):
        big = torch.zeros(4096).view(dtype)
        shape, strides = draw.choice(
            [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (12, 1, 3)), ((2, 12), (12, 1)), ((1, 3, 4), (12, 4, 1))]
        )
        t = torch.as_strided(big, shape, strides, draw.choice([0, 0, 0, 1]))
    if t.is_inference():
        return t
    if draw.random() < 0.1 and not t.dtype.is_complex:
        t = torch._neg_view(t)
    if draw.random() < 0.1:
        t = t.conj()
    if draw.random() < 0.2 and t.dtype.is_floating_point:
        t.requires_grad_()
    if draw.random() < 0.1 and t.dtype.is_floating_point:
        t = torch.nn.Parameter(t.detach(), requires_grad=t.requires_grad)
    return None if draw.random() < 0.1 else t


def test_what_is_alike_is_alike_in_all_that_a_kernel_may_depend_on() -> None:
    draw = random.Random(7)
    calls = [(made(draw), torch.zeros(3), made(draw)) for _ in range(300)]
    yes = no = 0
    for tensors in calls[:60]:
        are_alike = learned(*tensors)
        for others in calls:
            same = list(map(known, tensors)) == list(map(known, others))
            found = are_alike(*others)
            assert bool(found) is same, (tensors, others)
            yes, no = yes + same, no + (not same)
            if same:
                assert found == tuple(t.data_ptr() for t in others if t is not None)
    assert min(yes, no) > 50


def test_modes_and_transforms_are_none_of_a_call_without() -> None:
    t = torch.randn(3)
    are_alike, seen = learned(t), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            return function(*args, **(kwargs or {}))

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(are_alike(t))
        return x.sum()

    assert are_alike(t)
    with Mode():
        ask(t)
    torch.func.vmap(ask)(torch.randn(2, 3))
    torch.func.grad(ask)(torch.randn(3))
    torch.jit.trace(ask, torch.randn(3), check_trace=False)
    assert seen == [False] * 4
    assert not learned(t)(torch.randn(3, requires_grad=True))
    assert not learned(t)(torch.nn.Parameter(torch.randn(3), requires_grad=False))


def test_it_keeps_no_tensor() -> None:
    tensors: list[Any] = [torch.randn(4), None, torch.randn(2, 3)]
    table: dict[Any, Any] = {}
    alike.learn(table, KEY, tensors, "plan")
    kept = [weakref.ref(t) for t in tensors if t is not None]
    tensors.clear()
    gc.collect()
    assert table
    assert not any(ref() is not None for ref in kept)


def test_one_tensor_twice_is_alike_where_one_is_given_twice_alone() -> None:
    a, b, c = torch.randn(3, 4).unbind()
    are_alike = learned(a, None, b, a)
    assert are_alike(b, None, a, b) == (b.data_ptr(), a.data_ptr(), b.data_ptr())
    assert are_alike(c, None, b, c)
    for others in ((a, None, b, c), (a, None, b, b), (a, a, b, a), (a, None, a, a)):
        assert not are_alike(*others)
    assert not learned(a, b)(a, a)


def test_a_plan_that_takes_no_addresses_does_not_ask_for_them() -> None:
    table: dict[Any, Any] = {}
    a, b = torch.randn(2, 5).unbind()
    alike.learn(table, KEY, (a, None, a), "plan", addresses=False)
    ((are_alike, _),) = table[KEY]
    assert are_alike(b, None, b) is True, "5 elements further, no multiple of 16 bytes"
    for others in ((a, None, b), (a, a, a), (a[:4], None, a[:4]), (a.double(), None, a.double())):
        assert not are_alike(*others)


def test_what_nothing_compares_is_not_tried_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(alike, "_compare", lambda *_: compared.append(1))
    t, table = torch.randn(4), {}
    for _ in range(1000):
        assert not any(are_alike(t) for are_alike, _ in table.get(KEY, ()))
        alike.learn(table, KEY, (t,), "plan")
    assert len(compared) <= alike.MOST + 1000 / alike.SELDOM + 1
    assert len(table[KEY]) == alike.MOST


def test_many_kinds_of_one_key_make_room_for_what_comes_now() -> None:
    table: dict[Any, Any] = {}

    def serve(t: torch.Tensor) -> bool:
        if any(are_alike(t) for are_alike, _ in table.get(KEY, ())):
            return True
        alike.learn(table, KEY, (t,), "plan")
        return False

    tensors = [torch.randn(n) for n in range(1, 3 * alike.MOST)]
    for t in tensors:
        serve(t)
    assert len(table[KEY]) == alike.MOST
    calls = next(count for count in itertools.count() if serve(tensors[-1]))
    assert calls <= alike.SELDOM
    assert serve(tensors[-1])
    assert len(table[KEY]) == alike.MOST


@pytest.mark.parametrize("guards", ["none", "other arguments", "raises when it compares"])
def test_another_torch_knows_no_short_way_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch, guards: str) -> None:
    class Raises:
        def __init__(self, *tensors: Any, **sizes: Any) -> None:
            del tensors, sizes

        def check(self, *tensors: Any) -> bool:
            raise RuntimeError(tensors)

    others = {"none": None, "other arguments": functools.partial(list), "raises when it compares": Raises}
    monkeypatch.setattr(alike, "_Guards", others[guards])
    t, table = torch.randn(4), {}
    for _ in range(3):
        alike.learn(table, KEY, (t,), "plan")
    assert not any(are_alike(t) for are_alike, _ in table.get(KEY, ()))
