"""RMSNorm with a rotation: values, gradients, in place, packed, traced; interpreted kernels of the gradient."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tuned.dispatch
from generator.rendering.structures import load
from tests.support.orders import of_several_orders
from tests.support.run import INTERPRETED
from tuned.calls.rope import call as rope_call
from tuned.calls.rope import norm, saved
from tuned.calls.rope import ops as rope_ops
from tuned.calls.rope.arguments import Given, Settings, Sources
from tuned.calls.rope.plan import Plan
from tuned.families.rope.variant import RopeVariant, default_variant
from tuned.lookup.lookup import Choice

if TYPE_CHECKING:
    from tuned.families.launch import Launch

SEQ, BATCH, HEADS, KEY_HEADS, DIM = 5, 2, 3, 2, 8
NORMS = ("head", "all")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def widths(norm_of: str, heads: int = HEADS, key_heads: int = KEY_HEADS) -> tuple[int, int]:
    return (heads * DIM, key_heads * DIM) if norm_of == "all" else (DIM, DIM)


def tensors(norm_of: str = "head", dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A query, a key and their weights; angles of the first 6 features."""
    of_q, of_k = widths(norm_of)
    angle = torch.rand(SEQ, DIM // 2 - 1, dtype=torch.float64) * 6
    return {
        "q": torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype),
        "k": torch.randn(BATCH, SEQ, KEY_HEADS, DIM, dtype=dtype),
        "q_weight": torch.randn(of_q, dtype=dtype),
        "k_weight": torch.randn(of_k, dtype=dtype),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
    }


def by_hand(x: torch.Tensor, weight: torch.Tensor, norm_of: str, eps: float, centre: float) -> torch.Tensor:
    """The norm, a head at a time, in float64: x [batch, seq, heads, dim]."""
    out = torch.empty_like(x, dtype=torch.float64)
    for b, s in itertools.product(range(x.shape[0]), range(x.shape[1])):
        whole = x[b, s].double()
        for h in range(x.shape[2]):
            over = whole if norm_of == "all" else whole[h]
            own = weight.double()[h * DIM : (h + 1) * DIM] if norm_of == "all" else weight.double()
            out[b, s, h] = whole[h] / ((over**2).sum() / over.numel() + eps).sqrt() * (own + centre)
    return out


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("norm_of", NORMS)
@pytest.mark.parametrize("rotated", ["first", "last", "proportional"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_normed_rotation_is_the_norm_then_the_rotation(
    norm_of: str, rotated: str, interleaved: bool, zero_centered: bool
) -> None:
    if rotated == "proportional" and interleaved:
        return
    given = tensors(norm_of)
    named = {"cos": given["cos"], "sin": given["sin"], "interleaved": interleaved, "rotated": rotated}
    q, k = tuned.dispatch.qk_norm_rope(
        **{n: t for n, t in given.items() if n not in named},
        **named,
        norm=norm_of,
        eps=0.1,
        zero_centered=zero_centered,
    )
    for name, found in (("q", q), ("k", k)):
        normed = by_hand(given[name], given[f"{name}_weight"], norm_of, 0.1, float(zero_centered))
        torch.testing.assert_close(found, tuned.dispatch.rope(normed, **named), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm_of", NORMS)
def test_every_layout_and_position_is_the_same_norm(norm_of: str) -> None:
    given = tensors(norm_of, torch.float32)
    table = torch.rand(40, DIM // 2) * 6
    angles = {"cos": table.cos(), "sin": table.sin()}
    weights = given["q_weight"], given["k_weight"]
    ids = torch.tensor([[3, 0, 9, 1, 2], [7, 7, 8, 30, 4]])
    wanted = tuned.dispatch.qk_norm_rope(given["q"], given["k"], *weights, **angles, positions=ids, norm=norm_of)
    by_sequence = tuned.dispatch.qk_norm_rope(
        *(given[n].transpose(0, 1) for n in "qk"), *weights, **angles, positions=ids.t(), norm=norm_of,
        tensor_format="sbhd",
    )  # fmt: skip
    packed = tuned.dispatch.qk_norm_rope(
        *(given[n].flatten(0, 1) for n in "qk"), *weights, **angles, positions=ids.flatten(), norm=norm_of,
        tensor_format="thd",
    )  # fmt: skip
    for one, other, third in zip(wanted, by_sequence, packed, strict=True):
        torch.testing.assert_close(one, other.transpose(0, 1))
        torch.testing.assert_close(one, third.view(one.shape))


def test_tokens_of_no_sequence_are_copied() -> None:
    given = tensors(dtype=torch.float32)
    q, k = given["q"][0], given["k"][0]
    cu_seqlens = torch.tensor([1, 2, 4], dtype=torch.int32)
    named = {"cu_seqlens": cu_seqlens, "tensor_format": "thd", "cos": given["cos"], "sin": given["sin"]}
    out, key_out = tuned.dispatch.qk_norm_rope(q, k, given["q_weight"], given["k_weight"], **named)
    for found, was in ((out, q), (key_out, k)):
        assert torch.equal(found[[0, 4]], was[[0, 4]])
        assert not torch.isclose(found[1:4], was[1:4]).all()


def test_a_layer_without_a_key_has_a_query_alone() -> None:
    given = tensors()
    angles = {"cos": given["cos"], "sin": given["sin"]}
    both, _ = tuned.dispatch.qk_norm_rope(given["q"], given["k"], given["q_weight"], given["k_weight"], **angles)
    alone, nothing = tuned.dispatch.qk_norm_rope(given["q"], None, given["q_weight"], None, **angles)
    assert nothing is None
    assert torch.equal(alone, both)


@pytest.mark.parametrize("empty", ["q", "k", "both"])
def test_a_tensor_without_heads_or_tokens_stays_empty(empty: str) -> None:
    given = tensors()
    if empty == "both":
        given |= {n: given[n][:, :0] for n in "qk"}
    else:
        given[empty] = given[empty][:, :, :0]
    q, k = tuned.dispatch.qk_norm_rope(**given)
    assert (q.shape, k.shape) == (given["q"].shape, given["k"].shape)


# Rounding: what models' own code gives, bit by bit ---------------------------------------------------------------------


def qwen(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounds as the modules of transformers that multiply after the cast."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounds as the modules that cast after the multiplication, which is by 1 + weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize(
    ("own", "rounding", "zero_centered"), [(qwen, "each", False), (gemma, "product", True)], ids=["qwen3", "gemma3"]
)
def test_the_roundings_of_a_models_own_norm_are_kept(own: Any, rounding: str, zero_centered: bool) -> None:
    given = tensors(dtype=torch.bfloat16)
    nothing = {"cos": torch.ones(SEQ, DIM // 2), "sin": torch.zeros(SEQ, DIM // 2)}
    weights = given["q_weight"], given["k_weight"]
    found = tuned.dispatch.qk_norm_rope(
        given["q"], given["k"], *weights, **nothing, rounding=rounding, zero_centered=zero_centered
    )
    for name, one in zip("qk", found, strict=True):
        assert torch.equal(one, own(given[name], given[f"{name}_weight"], 1e-6))


# In place, packed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_of", NORMS)
def test_in_place_it_is_the_same(norm_of: str) -> None:
    given = tensors(norm_of)
    wanted = tuned.dispatch.qk_norm_rope(**given, norm=norm_of)
    found = tuned.dispatch.qk_norm_rope(**given, norm=norm_of, inplace=True)
    for name, one, other in zip("qk", found, wanted, strict=True):
        assert one is given[name]
        assert torch.equal(one, other)


@pytest.mark.parametrize("axis_of_3", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_packed_qkv_keeps_its_values(layout: str, axis_of_3: bool) -> None:
    tokens = (BATCH, SEQ) if layout == "bshd" else (SEQ,)
    heads = (3, HEADS) if axis_of_3 else (HEADS + 2 * KEY_HEADS,)
    qkv, weight = torch.randn(*tokens, *heads, DIM), torch.randn(DIM)
    table = torch.rand(SEQ, DIM // 2) * 6
    named: dict[str, Any] = {"cos": table.cos(), "sin": table.sin(), "tensor_format": layout}
    if layout == "thd":
        named["positions"] = torch.arange(SEQ)
    parts = qkv.flatten(-3, -2) if axis_of_3 else qkv
    keys = HEADS if axis_of_3 else KEY_HEADS
    q, k, v = (t.clone() for t in parts.split((HEADS, keys, keys), -2))
    wanted = tuned.dispatch.qk_norm_rope(q, k, weight, weight, **named)
    out = tuned.dispatch.qkv_norm_rope_(qkv, weight, weight, **named, kv_heads=None if axis_of_3 else KEY_HEADS)
    assert out is qkv
    assert torch.equal((qkv.flatten(-3, -2) if axis_of_3 else qkv), torch.cat((*wanted, v), -2))


# Gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_of", NORMS)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_and_their_gradients_are_those_of_finite_differences(norm_of: str, inplace: bool) -> None:
    given = tensors(norm_of)
    leaves = [given[n].clone()[:1, :2].requires_grad_() for n in "qk"]
    leaves += [given[n].requires_grad_() for n in ("q_weight", "k_weight")]

    def run(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        if inplace:
            q, k = q * 1, k * 1
        return tuned.dispatch.qk_norm_rope(
            q, k, q_weight, k_weight, cos=given["cos"], sin=given["sin"], norm=norm_of, eps=0.1, inplace=inplace
        )

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_a_leaf_cannot_be_overwritten() -> None:
    given = tensors()
    before = given["q"].requires_grad_().detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        tuned.dispatch.qk_norm_rope(**given, inplace=True)
    assert torch.equal(given["q"].detach(), before)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Interpreted kernels compute gradients, with the default variant; yields the launches."""
    if not INTERPRETED:
        pytest.skip("tests/gpu/test_gpu_rope_norm.py has these on a GPU")
    made: list[Launch] = []

    def chosen(prepared: Any, bypassed: str | None) -> Choice:
        if bypassed is not None or prepared.spec is None:
            return Choice("eager", bypassed or "no spec", None)
        variant: RopeVariant = dataclasses.replace(default_variant(prepared.spec, prepared.size), pdl=False)
        return Choice("default", "a test asked for it", variant)

    def launched(steps: Any, _launch: Any) -> None:
        for step in steps:
            made.append(step)
            with np.errstate(all="ignore"):
                load(step.kernel)[(step.programs,)](*step.arguments, **step.constants)

    monkeypatch.setattr(norm, "choice_of", chosen)
    monkeypatch.setattr(saved, "run_steps", launched)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: torch.no_grad())
    return made


def node(given: Given, settings: Settings) -> Any:
    """The call as the autograd node that a call on a GPU has; its forward is PyTorch's."""
    sources = Sources.of(given)

    def forward(*arguments: Any) -> Any:
        with torch.no_grad():
            return rope_call.run_eager(sources.given(*arguments), settings)

    made = norm.differentiable(
        Plan(forward), settings, sources, (given.x, given.key, given.weight, given.key_weight), rope_call.call_given
    )
    angles = getattr(given, sources.angles)
    weights = (given.weight, given.key_weight)
    return made.run(given.x, given.key, angles, given.sin, given.cu_seqlens, given.positions, given.offset, (), weights)


def assert_same_gradients(given: Given, settings: Settings, weights: list[Any]) -> None:
    """The gradients of the node equal the formula's; None stands for a result whose gradient is not asked for."""
    names = [n for n in ("x", "key", "weight", "key_weight") if getattr(given, n) is not None]
    found = []
    for run in (node, rope_call.run_eager):
        leaves = {n: getattr(given, n).detach().clone().requires_grad_() for n in names}
        out = run(given._replace(**leaves), settings)
        out = out if isinstance(out, tuple) else (out,)
        asked = [(o, w) for o, w in zip(out, weights, strict=True) if w is not None]
        found.append(
            torch.autograd.grad([o for o, _ in asked], list(leaves.values()), [w for _, w in asked], allow_unused=True)
        )
    for ours, theirs in zip(*found, strict=True):
        wanted = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("norm_of", NORMS)
@pytest.mark.parametrize("case", ["apart", "one weight", "q is k", "k from q", "weight from q"])
def test_a_tensor_given_twice_or_computed_from_another_has_the_gradients_of_the_formula(
    norm_of: str, case: str
) -> None:
    given = tensors(norm_of)
    given |= {"k": torch.randn_like(given["q"]), "k_weight": torch.randn_like(given["q_weight"])}
    leaves = [given[n][:1, :2].requires_grad_() for n in "qk"]
    leaves += [given[n].requires_grad_() for n in ("q_weight", "k_weight")]
    found = []
    for run in (node, rope_call.run_eager):

        def call(*leaves: Any, run: Any = run) -> Any:
            q, k, weight, key_weight = leaves
            k = {"q is k": q, "k from q": q * 2 + k}.get(case, k)
            key_weight = {
                "one weight": weight,
                "weight from q": key_weight * q.sum(),
            }.get(case, key_weight)
            made = Given(q, k, cos=given["cos"], sin=given["sin"], weight=weight, key_weight=key_weight)
            return run(made, Settings(norm=norm_of, eps=0.1))

        found.append(of_several_orders(call, leaves))
    torch.testing.assert_close(*found)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", range(12))
def test_the_kernels_of_the_gradient_are_the_formulas(case: int, interpreted: list[Launch]) -> None:
    norm_of, with_key = NORMS[case % 2], case % 3 > 0
    given = tensors(norm_of, torch.float32)
    weights = [torch.randn_like(given["q"]), torch.randn_like(given["k"])][: 1 + with_key]
    if case % 4 == 3 and with_key:
        weights[case % 2] = None  # a result that nothing depends on
    call = Given(
        given["q"], given["k"] if with_key else None, cos=given["cos"], sin=given["sin"],
        weight=given["q_weight"], key_weight=given["k_weight"] if with_key else None,
    )  # fmt: skip
    settings = Settings(
        norm=norm_of, eps=1e-3, interleaved=case % 5 == 0, rotated=("first", "last")[case % 2], zero_centered=case > 5
    )
    assert_same_gradients(call, settings, weights)
    assert [launch.kernel.startswith("rope_norm_") for launch in interpreted] == [True, True]


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("norm_of", NORMS)
@pytest.mark.parametrize("left", [0, 1])
def test_a_result_that_nothing_depends_on_has_no_part_in_the_gradients(norm_of: str, left: int) -> None:
    given = tensors(norm_of, torch.float32)
    grads: list[Any] = [torch.randn_like(given["q"]), torch.randn_like(given["k"])]
    grads[left] = None
    call = Given(
        given["q"], given["k"], cos=given["cos"], sin=given["sin"], weight=given["q_weight"],
        key_weight=given["k_weight"],
    )  # fmt: skip
    assert_same_gradients(call, Settings(norm=norm_of, eps=1e-6), grads)


@pytest.mark.parametrize("asked", ["q", "k", "q_weight", "k_weight"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("run", [node, rope_call.run_eager])
def test_a_result_of_what_needs_no_gradient_needs_none(asked: str, inplace: bool, run: Any) -> None:
    given = tensors()
    given[asked].requires_grad_()
    x, key = (given[n] * 1.0 for n in ("q", "k"))
    call = Given(
        x, key, cos=given["cos"], sin=given["sin"], weight=given["q_weight"], key_weight=given["k_weight"]
    )  # fmt: skip
    out = run(call, Settings(norm="head", eps=1e-6, inplace=inplace))
    assert [t.requires_grad for t in out] == [asked in ("q", "q_weight"), asked in ("k", "k_weight")]
    (grad,) = torch.autograd.grad([t.sum() for t in out if t.requires_grad], given[asked])
    assert grad.abs().sum() > 0


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("lies", ["transposed", "sliced", "expanded", "negative", "key apart"])
def test_the_kernels_take_gradients_and_inputs_of_any_strides(lies: str) -> None:
    given = tensors(dtype=torch.float32)
    x, grad, key_grad = given["q"], torch.randn_like(given["q"]), torch.randn_like(given["k"])
    if lies == "transposed":
        grad = grad.transpose(1, 3).contiguous().transpose(1, 3)
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    elif lies == "sliced":
        x = torch.cat((x, x), 2)[:, :, ::2][:, :, :HEADS]
    elif lies == "expanded":
        grad = grad[:, :1].expand_as(grad)
    elif lies == "negative":
        grad = torch.complex(grad, grad).conj().imag
    else:
        key_grad = key_grad.transpose(2, 3).contiguous().transpose(2, 3)
    call = Given(
        x, given["k"], cos=given["cos"], sin=given["sin"], weight=given["q_weight"], key_weight=given["k_weight"]
    )
    assert_same_gradients(call, Settings(norm="head", eps=1e-6), [grad, key_grad])


@pytest.mark.interpreter
def test_the_weights_gradients_have_the_same_bits_in_each_run(interpreted: list[Launch]) -> None:
    given = tensors(dtype=torch.float32)
    call = Given(
        given["q"], given["k"], cos=given["cos"], sin=given["sin"], weight=given["q_weight"],
        key_weight=given["k_weight"],
    )  # fmt: skip
    grads = torch.randn_like(given["q"]), torch.randn_like(given["k"])
    first, second = (norm.gradient(call, Settings(norm="head", eps=1e-6), *grads) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert len(interpreted) == 4


# Traced ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_compiled_it_is_the_same(with_key: bool, inplace: bool, train: bool) -> None:
    given = tensors(dtype=torch.float32)
    if not with_key:
        given |= {"k": None, "k_weight": None}  # type: ignore[dict-item]

    def run(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        out, key_out = tuned.dispatch.qk_norm_rope(
            q * 1, None if k is None else k * 1, q_weight, k_weight, cos=cos, sin=sin, inplace=inplace
        )
        return out if key_out is None else torch.cat((out, key_out), 2)

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        own = {n: t if t is None else t.detach().clone() for n, t in given.items()}
        leaves = [own[n].requires_grad_(train) for n in ("q", "k", "q_weight", "k_weight") if own[n] is not None]
        out = function(**own)
        found.append([out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if train else ())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_a_qkv_that_needs_no_gradient_is_overwritten_where_its_weights_do() -> None:
    given = tensors(dtype=torch.float32)
    weights = [given[n].requires_grad_() for n in ("q_weight", "k_weight")]
    whole = torch.randn(BATCH, SEQ, HEADS + 2 * KEY_HEADS, DIM)

    def run(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
        named = {"cos": cos, "sin": sin, "rotary_dim": DIM - 2}
        return tuned.dispatch.qkv_norm_rope_(qkv * 1, q_weight, k_weight, **named, kv_heads=KEY_HEADS) * 1

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = function(whole, *weights, given["cos"], given["sin"])
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), weights)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("with_key", [True, False])
def test_the_operators_are_as_they_say(with_key: bool) -> None:
    given = tensors(dtype=torch.float32)
    settings = Settings(norm="head", eps=1e-6)._asdict()
    settings.pop("inplace")
    tensor = {n: given[n].requires_grad_() for n in ("q", "k", "q_weight", "k_weight")}
    if not with_key:
        tensor |= {"k": None, "k_weight": None}  # type: ignore[dict-item]
    rest = (None, given["cos"], given["sin"], None, None, None, None, None, None, 0, *settings.values())
    torch.library.opcheck(rope_ops.qk_norm_rope, (*tensor.values(), *rest))
    plain = [t if t is None else t.detach() for t in tensor.values()]
    torch.library.opcheck(rope_ops.qk_norm_rope_, (*plain, *rest))
    grads = [t if t is None else torch.randn_like(t) for t in plain[:2]]
    torch.library.opcheck(rope_ops.qk_norm_rope_backward, (*grads, *plain, *rest))


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": "token"}, r"norm must be \"head\" or \"all\", got 'token'"),
        ({"rounding": "never"}, "rounding must be .*'never'"),
        ({"eps": -1.0}, "eps must be a number of at least 0, got -1.0"),
        ({"q_weight": torch.ones(DIM + 1)}, r"q_weight must be \[8\].*got \[9\].*norm=\"all\""),
        ({"k_weight": torch.ones(2, DIM)}, r"k_weight must be \[8\].*got \[2, 8\]"),
        ({"norm": "all"}, r"q_weight must be \[24\].*heads \* head_dim.*got \[8\].*norm=\"head\""),
        ({"q_weight": 1.0}, "q_weight must be a tensor, got float"),
        ({"q_weight": torch.ones(DIM, dtype=torch.int32)}, "q_weight must be floating point.*got torch.int32"),
        ({"k": None}, "k and k_weight must come together, got k_weight without k"),
        ({"k_weight": None}, "k and k_weight must come together, got k without k_weight"),
        ({"rotary_dim": 4}, "rotary_dim=4 does not fit"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_said_and_nothing_is_written(change: dict[str, Any], said: str) -> None:
    given = tensors(dtype=torch.float32)
    before = {n: given[n].clone() for n in "qk"}
    with pytest.raises((TypeError, ValueError), match=said):
        tuned.dispatch.qk_norm_rope(**given | change, inplace=True)
    assert all(torch.equal(given[n], t) for n, t in before.items())


def test_a_norm_of_no_name_is_refused_under_a_dispatch_mode_too() -> None:
    given = tensors(dtype=torch.float32)
    before = {n: given[n].clone() for n in "qk"}
    with FlopCounterMode(display=False), pytest.raises(ValueError, match=r"norm must be \"head\" or \"all\", got ''"):
        tuned.dispatch.qk_norm_rope(**given, norm="", inplace=True)
    assert all(torch.equal(given[n], t) for n, t in before.items())


@pytest.mark.parametrize("eps", [np.float32(0.5), np.float64(0.25), np.float16(2), Fraction(1, 8)], ids=repr)
def test_eps_may_be_any_real_number(eps: Any) -> None:
    given = tensors(dtype=torch.float32)
    found = tuned.dispatch.qk_norm_rope(**given, eps=eps)
    with FlopCounterMode(display=False):
        found += tuned.dispatch.qk_norm_rope(**given, eps=eps)
    wanted = tuned.dispatch.qk_norm_rope(**given, eps=float(eps))  # last: its plan would serve the others
    assert all(map(torch.equal, found, wanted * 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inplace": True}, "leave inplace out"),
        ({"qkv": 3}, "qkv must be a tensor, got int"),
        ({"tensor_format": "bhd"}, "tensor_format must be"),
        ({"kv_heads": 4}, r"more than 2 \* kv_heads heads"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else None,
)
def test_a_qkv_that_is_not_packed_so_is_refused(change: dict[str, Any], said: str) -> None:
    named: dict[str, Any] = {"qkv": torch.randn(1, SEQ, 7, DIM), "kv_heads": 2, "cos": torch.ones(SEQ, 4)}
    named |= {"sin": torch.zeros(SEQ, 4), "q_weight": torch.ones(DIM), "k_weight": torch.ones(DIM)}
    with pytest.raises((TypeError, ValueError), match=said):
        tuned.dispatch.qkv_norm_rope_(**named | change)


def test_explain_knows_a_norm() -> None:
    given = tensors(dtype=torch.float32)
    told = tuned.explain(tuned.dispatch.qk_norm_rope, **given)
    assert (told.rule, told.kernels) == ("eager", ())
