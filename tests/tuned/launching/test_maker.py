"""The maker of a repeated call's results: it makes what PyTorch makes, and is PyTorch if torch has nothing quicker."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tuned.launching import plan
from tuned.launching.plan import maker, maker_like

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    plan._quick_empty.cache_clear()
    yield
    plan._quick_empty.cache_clear()


def check(shape: tuple[int, ...], like: torch.Tensor) -> None:
    make, wanted = maker(shape, like), like.new_empty(shape)
    made, other = make(), make()
    for t in (made, other):
        assert (type(t), t.dtype, t.device, t.shape, t.stride()) == (
            torch.Tensor, wanted.dtype, wanted.device, wanted.shape, wanted.stride(),
        )  # fmt: skip
        assert (t.requires_grad, t.is_leaf, t._is_view(), t._version) == (False, True, False, 0)
        assert t.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
        assert not t.data_ptr() % 16
    assert not made.numel() or made.data_ptr() != other.data_ptr()
    with torch.inference_mode():
        assert make().is_inference()
    assert not make().is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 1, 3, 4), (1, 1, 1, 1), (2, 0, 3), torch.Size((3, 7))])
def test_what_is_made_is_as_pytorch_makes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, torch.randn(3, dtype=dtype, requires_grad=True))
    assert maker(shape, torch.empty(1, device="meta", dtype=dtype))().device.type == "meta"


@pytest.mark.parametrize("found", ["nothing", "other arguments", "another layout"])
def test_of_another_torch_pytorchs_own_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    asked: list[Any] = []

    def quick(*given: Any) -> torch.Tensor:
        asked.append(given)
        if found == "other arguments":
            raise TypeError(given)
        return torch.empty(3, 2, dtype=torch.float16).t()

    guards = types.SimpleNamespace(**({} if found == "nothing" else {"_empty_strided_cpu": quick}))
    monkeypatch.setattr(torch._C._dynamo, "guards", guards)
    check((2, 3, 4), torch.randn(3))
    assert len(asked) == (found != "nothing")


def test_like_a_tensor_is_as_empty_like_makes_it() -> None:
    t = torch.randn(2, 3, 4, 6)
    odd = torch.empty_strided((1, 3, 1, 4), (77, 4, 5, 1))
    for one in (
        t,
        odd,
        t.transpose(1, 2),
        t[..., ::2],
        t[:, :1].expand(2, 3, 4, 6),
        t[0, 0],
        t[:0],
        t.to(torch.bfloat16),
    ):
        made, wanted = maker_like(one)(), torch.empty_like(one)
        assert (made.dtype, made.shape, made.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert made.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert maker((2, 3), t, torch.int32)().dtype == torch.int32
