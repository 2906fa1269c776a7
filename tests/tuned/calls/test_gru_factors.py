"""tuned.calls.gru.factors: products of bfloat16 parts, with PyTorch's own product of bfloat16 replaced by one that a CPU has."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests.support.gru_factors import multiplies
from tests.support.gru_running import call_of, interpreted
from tests.support.gru_training import ONE, TURNS, assert_alike, backward, choose, wanted_of
from tests.support.run import INTERPRETED
from tuned.calls.gru import eager, factors, training
from tuned.calls.gru.factors import CALLED_PRODUCT, EIGHT, LEAST_COLUMNS, LEAST_TOKENS, Factor, multiplied, splits
from tuned.families.gru.spec import GruSpec

__all__ = ["backward", "interpreted", "multiplies"]

ENOUGH, WIDE = LEAST_TOKENS, LEAST_COLUMNS


def rows(tokens: int = ENOUGH, features: int = WIDE, **others: Any) -> Any:
    """The input of a layer on a GPU, as far as ``splits`` looks at it."""
    given = {"shape": (tokens, features), "is_cuda": True, "device": "cuda", "dtype": torch.float32, **others}
    return types.SimpleNamespace(**given)


@pytest.mark.parametrize("tf32", [False, True])
def test_large_float32_products_are_split_where_the_gru_may_use_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, *, tf32: bool
) -> None:
    monkeypatch.setattr(factors, "precision_of", lambda _dtype: "tf32" if tf32 else "ieee")
    monkeypatch.setattr(torch.version, "hip", None)
    captured = [True]
    monkeypatch.setattr(factors, "capturing", lambda _device: captured[0])
    one = GruSpec("float32", WIDE)
    assert splits(one, rows()) is not tf32, "torch's own products use tensor cores then"
    assert splits(one, rows(shape=(64, ENOUGH // 64, WIDE))) is not tf32, "steps and rows are tokens"
    for spec, given in (
        (GruSpec("bfloat16", WIDE), rows(dtype=torch.bfloat16)),
        (GruSpec("float32", WIDE, precision="ieee"), rows()),
        (GruSpec("float32", WIDE - EIGHT), rows()),
        (GruSpec("float32", WIDE + EIGHT // 2), rows()),
        (one, rows(tokens=ENOUGH - 1)),
        (one, rows(features=WIDE - EIGHT)),
        (one, rows(features=WIDE + 1)),
        (one, rows(is_cuda=False)),
    ):
        assert not splits(spec, given), (spec, given)
    captured[0] = False
    many = CALLED_PRODUCT // WIDE**2
    found = splits(one, rows()), splits(one, rows(tokens=many)), splits(one, rows(tokens=many + 1))
    assert found == (False, False, not tf32), "as a call, the host makes a dozen launches more"
    captured[0] = True
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not splits(one, rows()), "an AMD GPU was not measured"


def test_parts_add_up_to_all_but_the_last_bits() -> None:
    whole = torch.randn(64, 48) * 10.0 ** torch.randint(-6, 7, (64, 1))
    high, low = Factor.of(whole, split=True).parts or ()
    assert ((high.double() + low.double() - whole).abs() <= 2.0**-16 * whole.abs()).all()
    assert Factor.of(whole, split=False).parts is None


@pytest.mark.usefixtures("multiplies")
def test_a_product_of_parts_is_far_nearer_than_tensorfloat() -> None:
    a, b, to = torch.randn(700, 40), torch.randn(700, 24), torch.randn(24, 24)
    of_a, of_b = Factor.of(a, split=True), Factor.of(b, split=True)
    wanted = a[:, 8:32].double().t() @ b.double()
    found = multiplied(of_a.columns(8, 32).t(), of_b)
    error = (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert error < 2.0**-15
    assert torch.equal(multiplied(of_a.columns(8, 32).t(), of_b, out=torch.empty(24, 24)), found)
    added = multiplied(of_a.columns(8, 32).t(), of_b, to=to.clone())
    assert torch.allclose(added, found + to, atol=1e-3, rtol=0)


def test_what_is_not_split_is_the_librarys() -> None:
    a, b, to, out = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3), torch.empty(5, 3)
    one, other = Factor.of(a, split=False), Factor.of(b, split=False)
    assert torch.equal(multiplied(one, other), torch.mm(a, b))
    assert multiplied(one, other, out=out) is out
    assert torch.equal(out, torch.mm(a, b))
    assert torch.equal(multiplied(one, other, to=to.clone()), torch.addmm(to, a, b))


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru_training.py has these on a GPU")
@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize(("layout", "directions"), [("dense", 1), ("dense", 2), ("packed", 2)])
def test_gradients_by_parts_are_autograds(
    monkeypatch: pytest.MonkeyPatch, multiplies: list[tuple[Any, ...]], layout: str, directions: int
) -> None:
    monkeypatch.setattr(training, "splits", lambda _spec, _rows: True)
    call = call_of(layout, 1, directions)
    choose(monkeypatch, ONE if directions == 1 else TURNS)
    output, h_n = eager.gru(call)
    given = torch.randn_like(output), torch.randn_like(h_n)
    found = training.gradients(call, output, [True] * len(call.tensors), given)
    assert_alike(found, wanted_of(call, given))
    assert len(multiplies) == 12 * directions, "of the input, w_ih, and both parts of w_hh, three each"
