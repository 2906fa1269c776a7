"""A repeated call, served by its plan, makes the results that PyTorch's operators would make in every surrounding.

On a GPU a kernel serves most of these calls. On a CPU rotations take the path of GPU tensors; PyTorch serves the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.rope_calls import chosen_once, watch
from tuned.dispatch import gru, gru_cell, linear_cat, mla_kv_rope, qk_norm_rope, rope, rope_qk

__all__ = ["chosen_once", "watch"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, S, H, K, D, N, STEPS = 2, 6, 4, 2, 64, 64, 5
TIMES = 4  # the first call compiles, the second makes the plan, and from the third on the plan serves the call at once
Call = Callable[[], Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE) * 0.3


def table(dim: int) -> dict[str, torch.Tensor]:
    angles = torch.outer(torch.arange(S), 10_000.0 ** (-torch.arange(0, dim, 2) / dim)).to(DEVICE)
    return {"cos": angles.cos(), "sin": angles.sin()}


def layers(**shape: Any) -> list[torch.Tensor]:
    """A GRU's weights in one piece of memory, as nn.GRU keeps them: cuDNN warns of weights that lie otherwise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [w.detach() for w in torch.nn.GRU(N, N, **shape).to(DEVICE).parameters()]


def made() -> dict[str, Call]:
    """Calls whose results are new tensors, none of which needs a gradient."""
    x, key, angles, few, shared = normal(B, S, H, D), normal(B, S, K, D), table(D), table(D // 2), table(32)
    single, two, both = layers(), layers(num_layers=2), layers(bidirectional=True)
    sequence, state, step, h = normal(STEPS, B, N), normal(2, B, N), normal(B, N), normal(B, N)
    one, w = functools.partial(gru_cell, step, h, *single), normal(D, 2 * D)
    return {
        "rope": lambda: rope(x, **angles),
        "rope of other strides": lambda: rope(x.transpose(0, 1), tensor_format="sbhd", **angles),
        "rope of few angles": lambda: rope(x, **few),
        "rope_qk": lambda: rope_qk(x, key, **angles),
        "rope_qk of other strides": lambda: rope_qk(x.transpose(1, 2), key.transpose(1, 2), tensor_format="bhsd", **angles),
        "qk_norm_rope": lambda: qk_norm_rope(x, key, x[0, 0, 0], key[0, 0, 0], **angles),
        "mla_kv_rope": lambda: mla_kv_rope(x, key[:, :, :1, :32], k_dim=32, **shared),
        "gru_cell": one,
        "linear_cat": lambda: linear_cat((x, x), w),
        "gru": lambda: gru(sequence, state[:1], single),
        "gru of two layers": lambda: gru(sequence, state, two, num_layers=2),
        "gru both ways": lambda: gru(sequence, state, both, bidirectional=True),
    }  # fmt: skip


NAMES = list(made())


@pytest.fixture(autouse=True)
def launched(request: pytest.FixtureRequest, chosen_once: None) -> Any:
    """The counter of launches of rotations, on a CPU."""
    del chosen_once
    return None if torch.cuda.is_available() else request.getfixturevalue("watch")


def results(call: Call) -> tuple[torch.Tensor, ...]:
    found = call()
    return found if isinstance(found, tuple) else (found,)


def known(name: str) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """A call that was made before, and its first results."""
    call = made()[name]
    first, *_ = [results(call) for _ in range(TIMES)]
    return call, first


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_new_tensors_of_their_own(launched: Any, name: str) -> None:
    call, first = known(name)
    if launched is not None and "rope" in name:
        assert launched.direct == TIMES - 1
    kept = [first, *(results(call) for _ in range(3))]
    places = {t.untyped_storage().data_ptr() for one in kept for t in one}
    assert len(places) == sum(map(len, kept))
    for one in kept:
        for t, wanted in zip(one, first, strict=True):
            assert (type(t), t.dtype, t.device, t.shape, t.stride()) == (
                torch.Tensor, wanted.dtype, wanted.device, wanted.shape, wanted.stride(),
            )  # fmt: skip
            assert (t.requires_grad, t.grad_fn, t.is_inference()) == (False, None, False)
            same(t, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_in_inference_mode_they_are_inference_tensors(name: str) -> None:
    call, first = known(name)
    with torch.inference_mode():
        for _ in range(TIMES):
            for t, wanted in zip(results(call), first, strict=True):
                assert t.is_inference()
                same(t, wanted)
    assert not any(t.is_inference() for t in results(call))


def serves_no_transform(call: Call) -> bool:
    """Whether a transform refuses a call because PyTorch serves it, and PyTorch's GRU on a GPU has no transforms."""
    one = torch.ones((), device=DEVICE)
    try:
        torch.func.grad(lambda s: results(call)[0].sum() * s)(one)
    except NotImplementedError as error:
        if "TensorWrapper" not in str(error):
            raise
        own = torch.nn.GRU(N, N).to(DEVICE).requires_grad_(False)
        with pytest.raises(NotImplementedError, match="TensorWrapper"):
            torch.func.grad(lambda s: own(normal(STEPS, B, N))[0].sum() * s)(one)
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_torch_func_may_use_and_change_them(name: str) -> None:
    """The transform does not follow the tensors given, but the results are still made inside the transform."""
    call, first = known(name)
    if serves_no_transform(call):
        pytest.skip("cuDNN serves it, which no transform can hold")
    for index, wanted in enumerate(first):
        ones = torch.ones_like(wanted)
        for change in (torch.mul, torch.Tensor.mul_):
            scaled = lambda s, index=index, change=change: change(results(call)[index], s)  # noqa: E731
            total = lambda s, scaled=scaled: scaled(s).sum()  # noqa: E731
            same(torch.func.grad(total)(ones), wanted)
            same(torch.func.jvp(scaled, (ones,), (ones,))[1], wanted)
        beside = lambda s, index=index: results(call)[index] * s  # noqa: E731
        same(torch.func.vmap(beside)(torch.stack((ones, 2 * ones)))[1], 2 * wanted)
    for t, wanted in zip(results(call), first, strict=True):
        same(t, wanted)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_dispatch_mode_sees_what_makes_them(name: str) -> None:
    call, first = known(name)
    with Counting() as mode:
        found = results(call)
    assert mode.seen
    for t, wanted in zip(found, first, strict=True):
        same(t, wanted)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a GPU's")
@pytest.mark.parametrize("name", NAMES)
def test_in_a_graph_they_are_memory_of_its_pool(name: str) -> None:
    call, first = known(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = results(call)
    others = [torch.full_like(t, float("nan")) for _ in range(8) for t in held]
    for _ in range(2):
        graph.replay()
    for t, wanted in zip(held, first, strict=True):
        same(t, wanted)
        assert t.untyped_storage().data_ptr() not in {o.untyped_storage().data_ptr() for o in others}
