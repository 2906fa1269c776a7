"""[b, h, s, d] is a view of [b, s, h, d]; a norm takes the paths of other calls. Both ways, repeated, any strides."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned
import tuned.calls.rope.call
from generator.rendering.structures import load
from tests.support.rope_calls import Watch, watch
from tuned.calls.rope import saved
from tuned.compat.transformer_engine import apply_rotary_pos_emb
from tuned.dispatch import qk_norm_rope, qkv_norm_rope_, rope, rope_backward, rope_qk, rope_qkv

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["watch"]

B, S, H, K, D = 2, 5, 3, 2, 8
TABLE = torch.outer(torch.arange(9.0), 10.0 ** -torch.arange(D // 2))
ANGLES = {"cos": TABLE.cos(), "sin": TABLE.sin()}


@pytest.fixture(params=["eager", "kernels"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to serve a call: PyTorch's operators, and kernels in the interpreter."""
    torch.manual_seed(0)
    if request.param == "kernels":
        watching: Watch = request.getfixturevalue("watch")
        watching.interpreted = True
        monkeypatch.setattr(saved, "run_steps", _interpreted)
    return str(request.param)


def _interpreted(steps: Any, _launch: Any) -> None:
    for step in steps:
        with np.errstate(all="ignore"):
            load(step.kernel)[(step.programs,)](*step.arguments, **step.constants | {"PDL": False})


def heads_first(heads: int, lies: str) -> torch.Tensor:
    """[b, h, s, d] in memory: contiguous, or a view of [b, s, h, d] as a projection leaves it, or with gaps."""
    if lies == "tokens first":
        return torch.randn(B, S, heads, D).transpose(1, 2)
    return (
        torch.randn(B, heads, S, D) if lies == "heads first" else torch.randn(B, heads, S + 2, D + 4)[:, :, 1:-1, 2:-2]
    )


LIES = ("heads first", "tokens first", "gaps")


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("inplace", [False, True])
def test_heads_first_is_the_same_of_views(lies: str, inplace: bool) -> None:
    ids = torch.tensor([[0, 3, 1, 7, 2], [5, 5, 0, 8, 4]])
    for _ in range(2):
        for named in ({}, {"offset": 3}, {"positions": ids}, {"offset": torch.tensor([0, 4])}, {"interleaved": True}):
            x = heads_first(H, lies)
            wanted = rope(x.transpose(1, 2).clone(), **ANGLES, **named).transpose(1, 2)
            out = rope(x, **ANGLES, **named, tensor_format="bhsd", inplace=inplace)
            assert (out is x) == inplace
            assert out.shape == x.shape
            torch.testing.assert_close(out, wanted)
            q, k = heads_first(H, lies), heads_first(K, lies)
            both = rope_qk(q.transpose(1, 2).clone(), k.transpose(1, 2).clone(), **ANGLES, **named)
            for found, one in zip(
                rope_qk(q, k, **ANGLES, **named, tensor_format="bhsd", inplace=inplace), both, strict=True
            ):
                torch.testing.assert_close(found, one.transpose(1, 2))


def test_what_a_kernel_gives_lies_as_the_input_does(way: str) -> None:
    if way == "eager":
        pytest.skip("PyTorch's operators choose strides of their own")
    for lies in ("heads first", "tokens first"):
        for _ in range(2):
            x = heads_first(H, lies)
            assert rope(x, **ANGLES, tensor_format="bhsd").stride() == x.stride()


@pytest.mark.parametrize("lies", LIES)
def test_gradients_of_heads_first(lies: str) -> None:
    weight = torch.rand(D) + 0.5
    grads = torch.randn(B, H, S, D), torch.randn(B, K, S, D)
    for function in (
        lambda q, k, **named: rope_qk(q, k, **ANGLES, **named),
        lambda q, k, **named: qk_norm_rope(q, k, weight, weight, **ANGLES, **named),
    ):
        q, k = (heads_first(n, lies).requires_grad_() for n in (H, K))
        found = torch.autograd.grad(function(q, k, tensor_format="bhsd"), (q, k), grads)
        turned = function(q.transpose(1, 2), k.transpose(1, 2))
        wanted = torch.autograd.grad([t.transpose(1, 2) for t in turned], (q, k), grads)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    grad = rope_backward(grads[0], **ANGLES, tensor_format="bhsd")
    torch.testing.assert_close(grad, rope_backward(grads[0].transpose(1, 2), **ANGLES).transpose(1, 2))


@pytest.mark.parametrize("inplace", [False, True])
def test_heads_first_is_traced(inplace: bool, way: str) -> None:
    if way == "kernels":
        pytest.skip("torch.compile's operators run whatever way there is")
    x, k = torch.randn(B, H, S, D), torch.randn(B, K, S, D)

    def run(x: torch.Tensor, k: torch.Tensor) -> Any:
        out = rope(x * 1, **ANGLES, tensor_format="bhsd", inplace=inplace)
        return out, rope_qk(x * 1, k * 1, **ANGLES, tensor_format="bhsd", inplace=inplace)[1]

    for one, other in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(x, k), run(x, k), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rope(torch.randn(H, S, D), **ANGLES, tensor_format="bhsd"), r"x must be \[b, h, s, d\].*got \[3, 5, 8\]"),
        (
            lambda: rope_qkv(torch.randn(B, S, 5, D), **ANGLES, tensor_format="bhsd", kv_heads=1),
            "must be one of bshd, sbhd and thd, got 'bhsd'.*to rope_qk",
        ),
        (lambda: rope(torch.randn(B, H, 12, D), **ANGLES, tensor_format="bhsd"), "too short: 9 positions for a sequence of 12"),
    ],
)  # fmt: skip
def test_what_heads_first_cannot_be_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "if x is [b, h, s, d]" not in str(caught.value)


@pytest.mark.parametrize("norm_of", ["head", "all"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("with_key", [False, True])
def test_a_norm_takes_the_way_of_other_calls(norm_of: str, inplace: bool, with_key: bool, way: str) -> None:
    weight, key_weight = (torch.rand(n * D if norm_of == "all" else D) + 0.5 for n in (H, K))
    for seq in (S, S, 4):  # a repeated call, then another length
        q, k = torch.randn(B, seq, H, D), torch.randn(B, seq, K, D)
        wanted = qk_norm_rope(q.double(), k.double(), weight, key_weight, **ANGLES, norm=norm_of)
        given = (q, k, weight, key_weight) if with_key else (q, None, weight, None)
        found = qk_norm_rope(*given, **ANGLES, norm=norm_of, inplace=inplace)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            if one is not None:
                assert (one is given[index]) == inplace
                torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    plans = tuned.calls.rope.call._PLANS
    assert way == "eager" or len([key for key in plans if key[0][1] == torch.float32]) == 2


def test_another_weight_is_used_at_the_next_call() -> None:
    q, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    for scale in (1.0, 2.0, 3.0):
        weight = torch.full((D,), scale)
        for named in ({}, {"eps": 0.5}):
            found, _ = qk_norm_rope(q, k, weight, weight, **ANGLES, **named)
            normed = torch.nn.functional.rms_norm(q, (D,), weight, named.get("eps", 1e-6))
            torch.testing.assert_close(found, rope(normed, **ANGLES), rtol=1e-5, atol=1e-5)


def test_a_strided_weight_is_copied_in_each_call() -> None:
    q, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    whole = torch.rand(3, 2 * D)
    for row in whole:
        found, _ = qk_norm_rope(q, k, row[::2], row[1::2], **ANGLES)
        wanted = rope(torch.nn.functional.rms_norm(q, (D,), row[::2].contiguous(), 1e-6), **ANGLES)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_weights_of_another_dtype_are_another_call() -> None:
    both = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    weight, dtypes = torch.rand(D) + 0.5, (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    for of_query, of_key in itertools.product(dtypes, dtypes[:2]):
        given = weight.to(of_query), weight.to(of_key)
        for _ in range(2):
            found = qk_norm_rope(*both, *given, **ANGLES)
            for x, w, out in zip(both, given, found, strict=True):
                wanted = rope(torch.nn.functional.rms_norm(x, (D,), w.float(), 1e-6), **ANGLES)
                torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tensor_format", ["bshd", "bhsd"])
@pytest.mark.parametrize("norm_of", ["head", "all"])
def test_gradients_of_a_norm_in_place_are_those_of_its_input(tensor_format: str, norm_of: str) -> None:
    weights = [(torch.rand(n * D if norm_of == "all" else D) + 0.5).requires_grad_() for n in (H, K)]
    for _ in range(2):
        leaves = [torch.randn(B, S, n, D).requires_grad_() for n in (H, K)]
        grads, found = [torch.randn_like(t) for t in leaves], []
        for inplace in (False, True):
            given = [t * 1.0 if tensor_format == "bshd" else t.transpose(1, 2) * 1.0 for t in leaves]
            named: dict[str, Any] = {"norm": norm_of, "inplace": inplace, "tensor_format": tensor_format}
            out = qk_norm_rope(*given, *weights, **ANGLES, **named)
            assert all(a is b for a, b in zip(out, given, strict=True)) == inplace
            asked = [t if tensor_format == "bshd" else t.transpose(1, 2) for t in grads]
            found.append(torch.autograd.grad(out, [*leaves, *weights], asked))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_qkv_that_needs_no_gradient_is_overwritten_where_its_weights_do(packed: bool) -> None:
    """After the query was written, autograd takes the key, a view of the same tensor, for a leaf until it is asked."""
    weights = [(torch.rand(D) + 0.5).requires_grad_() for _ in range(2)]
    whole = torch.randn(B, S, H + 2 * K, D)
    for _ in range(2):
        qkv = whole.clone()
        if packed:
            qkv_norm_rope_(qkv, *weights, **ANGLES, kv_heads=K)
        else:
            qk_norm_rope(qkv[:, :, :H], qkv[:, :, H : H + K], *weights, **ANGLES, inplace=True)
        wanted = qk_norm_rope(whole[:, :, :H], whole[:, :, H : H + K], *weights, **ANGLES)
        grads = [torch.autograd.grad(out.square().sum(), weights) for out in (qkv, torch.cat(wanted, 2))]
        assert torch.equal(qkv[:, :, H + K :], whole[:, :, H + K :])
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)


def test_a_key_that_autograd_cannot_follow_is_refused_before_the_query_is_written() -> None:
    weight = (torch.rand(D) + 0.5).requires_grad_()
    for _ in range(2):
        q = torch.randn(B, S, H, D)
        _, k = torch.randn(B, S, H + K, D).split([H, K], 2)
        before = q.clone()
        with pytest.raises(RuntimeError, match="one of several views made together"):
            qk_norm_rope(q, k, weight, weight, **ANGLES, inplace=True)
        assert torch.equal(q, before)


@pytest.mark.parametrize("norm_of", ["head", "all"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("again", [False, True])
def test_tokens_of_no_sequence_may_be_anything(norm_of: str, eps: float, again: bool) -> None:
    """Their gradients pass through and add nothing to the weights' gradients, although 0 * NaN in a sum would."""
    cu_seqlens = torch.tensor([1, 3, 6], dtype=torch.int32)
    leaves = [torch.randn(8, n, D) for n in (H, K)]
    weights = [(torch.rand(n * D if norm_of == "all" else D) + 0.5).requires_grad_() for n in (H, K)]
    outside = torch.tensor([0, 6, 7])
    grads = [torch.randn_like(t) for t in leaves]
    found = []
    for stands in (0.5, torch.nan, torch.inf):
        given = [t.index_fill(0, outside, stands).requires_grad_() for t in leaves]
        named: dict[str, Any] = {"cu_seqlens": cu_seqlens, "tensor_format": "thd", "norm": norm_of, "eps": eps}
        out = qk_norm_rope(*given, *weights, **ANGLES, **named)
        assert all(bool((t[outside].nan_to_num(9.0) == torch.tensor(stands).nan_to_num(9.0)).all()) for t in out)
        found.append(torch.autograd.grad(out, [*given, *weights], grads, create_graph=again))
    for made in found:
        for one, other, grad in zip(made, found[0], [*grads, None, None], strict=True):
            torch.testing.assert_close(one, other)
            assert grad is None or torch.equal(one[outside], grad[outside])


# Half of a head -----------------------------------------------------------------------------------------------------------


def test_freqs_half_as_wide_as_the_head_are_asked_about(way: str) -> None:
    x, freqs = torch.randn(B, S, H, D), torch.rand(S, D // 2)
    with pytest.warns(
        FutureWarning, match=r"got 4 entries for heads of 8.*rotary_dim=4.*angle_entries=\"pair\""
    ) as told:
        half = rope(x, freqs)
    assert way == "kernels" or told[0].filename == __file__  # with kernels, a function of the tests stands between
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(rope(x, freqs, rotary_dim=D // 2), half)
        assert not torch.equal(rope(x, freqs, angle_entries="pair"), half)
        rope(x, torch.rand(S, D))
        rope(x, torch.rand(S, 2))
        apply_rotary_pos_emb(x.transpose(0, 1), freqs[:, None, None])  # their entries are always of features


def test_a_gradient_says_nothing_that_the_forward_has_said() -> None:
    q, weight = torch.randn(B, S, H, D, requires_grad=True), torch.ones(D)
    with pytest.warns(FutureWarning, match="half as wide"):
        out, _ = qk_norm_rope(q, None, weight, None, torch.rand(S, D // 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        grad.sum().backward()
