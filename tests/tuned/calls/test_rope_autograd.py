"""Gradients of RoPE, by kernels and by PyTorch's operators: every form, in place, of views, twice, under PyTorch's modes."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.rope_calls import Case, Marked, Watch, build, watch
from tests.support.rope_forms import FORMS, B, D, H, K, S, angles, assert_same, leaves, turned
from tuned.calls.rope import call as rope_call
from tuned.dispatch import (
    mla_kv_rope,
    qk_norm_rope,
    qkv_norm_rope_,
    rope,
    rope_append_,
    rope_backward,
    rope_qk,
    rope_qkv,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["watch"]


@pytest.fixture(params=["eager", "kernels"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to serve a call: PyTorch's operators and kernels."""
    torch.manual_seed(0)
    if request.param == "kernels":
        request.getfixturevalue("watch")
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


rotate = functools.partial(rope, angle_entries="pair")
rotate_qk = functools.partial(rope_qk, angle_entries="pair")
rotate_qkv = functools.partial(rope_qkv, angle_entries="pair")


# Which tensors are differentiated ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("used", ["both", "q", "k"])
def test_the_gradients_of_a_pair_are_those_of_what_was_used(used: str, inplace: bool) -> None:
    q, k = leaves(H, K)
    freqs = angles()

    def loss(pair: Any) -> torch.Tensor:
        chosen = {"both": pair, "q": pair[:1], "k": pair[1:]}[used]
        return sum((t * t.detach().cos()).sum() for t in chosen)  # type: ignore[no-any-return]

    for _ in range(2):
        found = torch.autograd.grad(
            loss(rotate_qk(q * 1, k * 1, freqs, inplace=inplace)), (q, k), allow_unused=True, materialize_grads=True
        )
        wanted = torch.autograd.grad(
            loss((turned(q, freqs), turned(k, freqs))), (q, k), allow_unused=True, materialize_grads=True
        )
        assert_same(found, wanted)


def test_the_backward_of_a_pair_is_one_launch_and_of_one_of_them_moves_that_alone(watch: Watch) -> None:
    q, k = leaves(H, K)
    freqs = angles()
    for wanted, results in ((2, slice(None)), (2, slice(1))):
        for _ in range(3):
            before = watch.public + watch.direct
            rotated = rotate_qk(q, k, freqs)
            sum(t.square().sum() for t in rotated[results]).backward()
        assert watch.public + watch.direct - before == wanted


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen: int, inplace: bool) -> None:
    made, freqs = leaves(H, K), angles()
    pair = [t.detach().clone() if i == frozen else t * 1 for i, t in enumerate(made)]
    for _ in range(2):
        rotated = rotate_qk(*(t.clone() for t in pair), freqs, inplace=inplace)
        assert [t.requires_grad for t in rotated] == [i != frozen for i in range(2)]
        (found,) = torch.autograd.grad(sum(t.square().sum() for t in rotated), made[1 - frozen], retain_graph=True)
        assert_same(found, 2 * made[1 - frozen].detach())


@pytest.mark.usefixtures("way")
def test_a_gradient_in_which_all_elements_are_one_number_is_read_and_not_written() -> None:
    (x,) = leaves(H)
    freqs = angles()
    for _ in range(2):
        (found,) = torch.autograd.grad(rotate(x, freqs).sum(), x)
        (wanted,) = torch.autograd.grad(turned(x, freqs).sum(), x)
        assert_same(found, wanted)


QKV = {"heads": (1, (B, S, H + 2, D), slice(0, H + 1)), "axis of 3": (None, (B, S, 3, H, D), slice(0, 2))}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("form", QKV)
def test_the_values_of_a_packed_qkv_have_their_gradient_as_it_comes(form: str, inplace: bool) -> None:
    kv_heads, shape, moved = QKV[form]
    qkv, freqs, weights = torch.randn(shape, requires_grad=True), angles(), torch.randn(shape)
    flat = qkv if kv_heads else qkv.flatten(2, 3)
    heads = moved.stop if kv_heads else moved.stop * H
    wanted = torch.cat((turned(flat[:, :, :heads], freqs), flat[:, :, heads:]), 2).view(shape)
    expected = torch.autograd.grad(wanted, qkv, weights)
    for _ in range(2):
        out = rotate_qkv(qkv * 1, freqs, kv_heads=kv_heads, inplace=inplace)
        assert_same(out, wanted)
        assert_same(torch.autograd.grad(out, qkv, weights), expected)
        axis = (slice(None), slice(None), slice(moved.stop, None))
        assert torch.equal(
            torch.autograd.grad(rotate_qkv(qkv, freqs, kv_heads=kv_heads), qkv, weights)[0][axis], weights[axis]
        )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("first", ["q", "k"])
def test_slices_of_one_tensor_are_overwritten_with_the_right_gradients(first: str) -> None:
    qkv = torch.randn(B, S, H + 2 * K, D, requires_grad=True)
    freqs, weights = angles(), torch.randn(B, S, H + 2 * K, D)

    def run(both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = both[:, :, :H], both[:, :, H : H + K]
        pair = (q, k) if first == "q" else (k, q)
        out = rotate_qk(*pair, freqs, inplace=True)
        assert out[0] is pair[0]
        assert out[1] is pair[1]
        return both, q, k

    for _ in range(2):
        both, q, k = run(qkv * 1)
        wanted = torch.cat((turned(qkv[:, :, : H + K], freqs), qkv[:, :, H + K :]), 2)
        assert_same((both, q, k), (wanted, wanted[:, :, :H], wanted[:, :, H : H + K]))
        outs, grads = (both, q, k), (weights, weights[:, :, :H].cos(), weights[:, :, H : H + K].sin())
        found = torch.autograd.grad(outs, qkv, grads)
        expected = torch.autograd.grad((wanted, wanted[:, :, :H], wanted[:, :, H : H + K]), qkv, grads)
        assert_same(found, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "how", ["split", "chunk", "unbind", "leaf", "slice of a leaf", "no_grad view", "leaf that is a view"]
)
@pytest.mark.parametrize("form", ["one", "pair", "qkv"])
def test_what_autograd_cannot_follow_is_refused_before_any_write(how: str, form: str) -> None:
    whole = torch.randn(B, S, 2 * H, D)
    leaf = whole.clone().requires_grad_()
    made = leaf * 1
    with torch.no_grad():
        unseen = made[:, :, :H], made[:, :, H:]
    q, k = {
        "split": lambda: made.split(H, 2),
        "chunk": lambda: made.chunk(2, 2),
        "unbind": lambda: made.view(B, S, 2, H, D).unbind(2),
        "leaf": lambda: (leaf, leaf.detach().clone()),
        "slice of a leaf": lambda: (leaf[:, :, :H], leaf[:, :, H:]),
        "no_grad view": lambda: unseen,
        "leaf that is a view": lambda: (whole.clone()[:, :, :H].requires_grad_(), whole.clone()[:, :, H:]),
    }[how]()
    q, k = (q, k) if k.shape[2] == H else (q, k[:, :, :H])
    calls: dict[str, Callable[..., Any]] = {
        "one": lambda x, _: rotate(x, angles(), inplace=True),
        "pair": lambda x, key: rotate_qk(x, key, angles(), inplace=True),
        "qkv": lambda x, _: rotate_qkv(x, angles(), kv_heads=1, inplace=True),
    }
    for _ in range(3):  # calls with the same properties that are allowed
        bases = [torch.randn(2 * whole.numel(), requires_grad=t.requires_grad) * 1 for t in (q, k)]
        calls[form](
            *(b.as_strided(t.shape, t.stride(), t.storage_offset()) for b, t in zip(bases, (q, k), strict=True))
        )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="use inplace=False"):
            calls[form](q, k)
    for t in (made, leaf, q, k):
        assert t._version <= 1
    assert torch.equal(made.detach(), whole)
    assert torch.equal(leaf.detach(), whole)
    assert torch.equal(q.detach(), whole[:, :, : q.shape[2]])


@pytest.mark.usefixtures("way")
def test_two_tensors_that_share_memory_are_not_both_overwritten() -> None:
    freqs = angles()
    apart = [torch.randn(B, S, H, D), torch.randn(B, S, H, D)]
    with_gradient = [t.clone().requires_grad_() for t in apart]
    for _ in range(3):
        rotate_qk(*(t.clone() for t in apart), freqs, inplace=True)
        rotate_qk(*(t * 1 for t in with_gradient), freqs, inplace=True)
    wide = torch.randn(B, S, H + 1, D)
    sharing = (
        (apart[0], apart[0]),
        (wide[:, :, :H], wide[:, :, 1:]),
        (with_gradient[0] * 1,) * 2,
    )
    for q, k in sharing:
        before = q.detach().clone()
        for _ in range(2):
            with pytest.raises(ValueError, match="share memory"):
                rotate_qk(q, k, freqs, inplace=True)
        assert torch.equal(q.detach(), before)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_is_the_transpose(name: str, inplace: bool) -> None:
    """<y, J x> = <J^T y, x>, whatever J is; and J is not the identity, nor its own transpose."""
    given, settings, made = build(dataclasses.replace(FORMS[name], inplace=inplace, x_grad="made", key_grad="made"))
    before = [t.detach().clone() for t in made]
    out = rope_call.call(*given, tuple(settings))
    outs = list(out) if isinstance(out, tuple) else [out]
    ys = [torch.randn_like(t) for t in outs]
    grads = torch.autograd.grad(outs, made, ys, retain_graph=True)
    forward = sum(
        torch.vdot(y.flatten().double(), t.detach().flatten().double()) for y, t in zip(ys, outs, strict=True)
    )
    backward = sum(torch.vdot(g.flatten().double(), x.flatten().double()) for g, x in zip(grads, before, strict=True))
    assert_same(forward, backward)
    assert not torch.allclose(outs[0].detach(), before[0])
    backwards = settings._replace(inplace=False, direction="backward")
    direct = rope_call.call(*given._replace(x=ys[0], key=ys[1] if len(ys) > 1 else None), tuple(backwards))
    assert_same(direct[0] if len(ys) > 1 else direct, grads[0])


def test_a_gradient_of_a_gradient_is_right_in_float64() -> None:
    q, k = leaves(1, 1, dtype=torch.float64)
    cos, sin = torch.rand(S, D, dtype=torch.float64), torch.rand(S, D, dtype=torch.float64)
    run = functools.partial(rope_qk, cos=cos, sin=sin, angle_entries="feature")
    assert torch.autograd.gradcheck(run, (q[:1, :2], k[:1, :2]))
    assert torch.autograd.gradgradcheck(run, (q[:1, :2], k[:1, :2]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
def test_the_backward_is_differentiable_again(inplace: bool) -> None:
    q, k = leaves(H, K)
    freqs, weights = angles(), [torch.randn(B, S, h, D) for h in (H, K)]
    results = []
    for run in (lambda: rotate_qk(q * 1, k * 1, freqs, inplace=inplace), lambda: (turned(q, freqs), turned(k, freqs))):
        first = torch.autograd.grad([t.pow(3).sum() for t in run()], (q, k), create_graph=True)
        second = torch.autograd.grad(first, (q, k), weights)
        results.append((*first, *second))
    assert_same(*results)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("source", ["freqs", "cos_sin", "cache", "inv_freq"])
def test_angles_that_need_a_gradient_get_one(source: str, inplace: bool) -> None:
    x, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    rates = torch.rand(D // 2, requires_grad=True)
    freqs = torch.arange(S + 3)[:, None] * rates
    named = {
        "freqs": {"freqs": freqs},
        "cos_sin": {"cos": freqs.cos(), "sin": freqs.sin()},
        "cache": {"cos_sin_cache": torch.cat((freqs.cos(), freqs.sin()), -1)},
        "inv_freq": {"inv_freq": rates},
    }[source]
    found = torch.autograd.grad(
        sum(t.pow(3).sum() for t in rotate_qk(x.clone(), k.clone(), **named, inplace=inplace)), rates, retain_graph=True
    )
    wanted = torch.autograd.grad(turned(x, freqs).pow(3).sum() + turned(k, freqs).pow(3).sum(), rates)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def _learned(x: torch.Tensor, **named: Any) -> Any:
    return rotate_qk(x * 1, x * 2, angles() * x.mean(), **named)


def _normed(x: torch.Tensor, **named: Any) -> Any:
    weight = x[0, 0, 0] * 1
    return qk_norm_rope(x * 1, x * 2, weight, weight, angles(), angle_entries="pair", **named)


NODES: dict[str, Callable[[torch.Tensor], Any]] = {
    "x": lambda x: rotate(x, angles()),
    "interleaved": lambda x: rotate(x, angles(), interleaved=True),
    "pair": lambda x: rotate_qk(x, x.detach(), angles())[0],
    "pair in place": lambda x: rotate_qk(x * 1, x * 2, angles(), inplace=True),
    "qkv": lambda x: rotate_qkv(x, angles(), kv_heads=1),
    "qkv of 5": lambda x: rotate_qkv(x[:, :, None].expand(B, S, 3, H, D), angles()),
    "backward": lambda x: rope_backward(x, angles(), angle_entries="pair"),
    "latent": lambda x: mla_kv_rope(x, x[:, :, :1], angles(), k_dim=5, angle_entries="pair"),
    "learned": _learned,
    "learned in place": lambda x: _learned(x, inplace=True),
    "learned qkv of 5": lambda x: rotate_qkv(x[:, :, None].expand(B, S, 3, H, D), angles() * x.mean()),
    "learned heads first": lambda x: rotate(x.transpose(1, 2), angles() * x.mean(), tensor_format="bhsd"),
    "norm": _normed,
    "norm in place": lambda x: _normed(x, inplace=True),
    "norm heads first": lambda x: qk_norm_rope(
        x.transpose(1, 2), None, x[0, 0, 0] * 1, None, angles(), angle_entries="pair", tensor_format="bhsd"
    )[0],
}


def _of_nodes(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)  # for equal angles
    results = NODES[name](x)
    return [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]


def _each_gradient(name: str, x: torch.Tensor, over: list[torch.Tensor], **how: Any) -> torch.Tensor:
    """The gradients for one batch entry of ``over`` after the other."""
    return torch.stack([torch.autograd.grad(_of_nodes(name, x), x, one, **how)[0] for one in zip(*over, strict=True)])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
@pytest.mark.parametrize("name", NODES)
def test_gradients_may_be_taken_in_a_batch(name: str, how: str) -> None:
    """As torch.autograd.functional.jacobian(..., vectorize=True) takes them."""
    (x,) = leaves(H)
    over = [torch.randn(3, *t.shape) for t in _of_nodes(name, x)]
    for again in (False, True):
        results = _of_nodes(name, x)
        if how == "vmap":
            found = torch.func.vmap(lambda *one: torch.autograd.grad(results, x, one, retain_graph=True)[0])(*over)  # noqa: B023
        else:
            (found,) = torch.autograd.grad(results, x, over, is_grads_batched=True, create_graph=again)
        wanted = _each_gradient(name, x, over, create_graph=again)
        assert_same(found, wanted)
        if again and how != "vmap" and wanted.requires_grad:
            assert_same(*(torch.autograd.grad(t.square().sum(), x) for t in (found, wanted)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NODES)
def test_forward_mode_sees_through_a_gradient(name: str) -> None:
    (x,) = leaves(H)
    for _ in range(2):
        results = _of_nodes(name, x)
        over, tangents = ([torch.randn_like(t) for t in results] for _ in range(2))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(one, tangent) for one, tangent in zip(over, tangents, strict=True)]
            found = forward_ad.unpack_dual(torch.autograd.grad(results, x, duals)[0])
            both = [t[None] for t in over], [t[None] for t in tangents]
            assert_same([found.primal, found.tangent], [_each_gradient(name, x, one)[0] for one in both])
        assert not found.primal.requires_grad


@pytest.mark.parametrize("name", ["x", "pair in place", "learned", "norm", "latent"])
def test_forward_mode_over_an_operator_s_gradient_is_refused_not_dropped(name: str) -> None:
    """Operators of torch.library have no rule for it. Inside of a level the call is made of PyTorch's operators, which have."""
    (x,) = leaves(H)

    def recorded() -> list[torch.Tensor]:
        with FlopCounterMode(display=False):
            return _of_nodes(name, x)

    results = recorded()
    over, tangents = ([torch.randn_like(t) for t in results] for _ in range(2))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, tangent) for one, tangent in zip(over, tangents, strict=True)]
        with pytest.raises(
            RuntimeError, match=r"got a tensor with a tangent: make the call inside of forward_ad.dual_level\(\) too"
        ):
            torch.autograd.grad(results, x, duals)
        found = forward_ad.unpack_dual(torch.autograd.grad(recorded(), x, duals)[0]).tangent
    assert_same(found, _each_gradient(name, x, [t[None] for t in tangents])[0])


# What is kept -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_a_value_that_was_needed_and_overwritten_is_an_error_and_no_wrong_gradient() -> None:
    (x,) = leaves(H)
    freqs = angles()
    for _ in range(2):
        kept = x.exp()  # the node of exp keeps its result
        rotate(kept, freqs, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def test_a_table_that_was_overwritten_before_the_backward_is_an_error(watch: Watch) -> None:
    (x,) = leaves(H)
    for kind in ("freqs", "positions", "offset"):
        for _ in range(2):
            freqs, ids, start = angles(), torch.arange(S), torch.tensor(1)
            named = {"freqs": {}, "positions": {"positions": ids}, "offset": {"offset": start}}[kind]
            out = rotate(x, freqs, **named)
            {"freqs": freqs, "positions": ids, "offset": start}[kind].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
    assert watch.direct


def kept_by(case: Case) -> list[Any]:
    given, settings, made = build(case)
    out = rope_call.call(*given, tuple(settings))
    results = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if results:
        sum(t.sum() for t in results).backward()
    return [weakref.ref(t) for t in (*given, *made, *results) if isinstance(t, torch.Tensor)]


KEPT = {
    **{name: dataclasses.replace(case, x_grad="made", key_grad="made") for name, case in FORMS.items()},
    **{f"{name}, no gradient": dataclasses.replace(case, inplace=True) for name, case in FORMS.items()},
    "double": Case(dtype=torch.float64),
    "angles": Case(angle_grad=True),
    "copied": Case(source="cos_sin", sine_view="swapped"),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", KEPT)
def test_no_tensor_of_a_call_outlives_it(name: str) -> None:
    for _ in range(3):
        references = kept_by(KEPT[name])
        assert [r() for r in references] == [None] * len(references)


# PyTorch's modes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(inplace: bool, reentrant: bool) -> None:
    q, k = leaves(H, K)
    freqs = angles()

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rotated = rotate_qk(a * 2, b * 2, freqs, inplace=inplace)
        return sum(t.pow(3).sum() for t in rotated)  # type: ignore[return-value]

    for _ in range(2):
        q.grad = k.grad = None
        checkpoint(run, q, k, use_reentrant=reentrant).backward()
        wanted = torch.autograd.grad(run(q, k), (q, k))
        assert_same((q.grad, k.grad), wanted)


@pytest.mark.usefixtures("way")
def test_the_transforms_of_torch_func_see_through_it() -> None:
    x, freqs = torch.randn(B, S, H, D), angles()
    plain = torch.randn(B, S, H, D)
    for _ in range(2):
        rotate(x, freqs)  # known to the hot path
        rotate(plain.requires_grad_(False), freqs)
        assert_same(torch.func.grad(lambda t: rotate(t, freqs).pow(3).sum())(x), _gradient(x, freqs))
        assert_same(torch.func.vmap(lambda t: rotate(t, freqs))(x[None]), turned(x, freqs)[None])
        assert_same(
            torch.func.jvp(lambda t: rotate(t, freqs), (x,), (plain,)), (turned(x, freqs), turned(plain, freqs))
        )
        small = x[:1, :1, :1]
        jacobian = torch.func.jacrev(lambda t: rotate(t, freqs[:1]))(small).reshape(D, D)
        assert_same(jacobian @ small.flatten(), turned(small, freqs).flatten())
        # One tensor that the transform does not follow, and one that it does.
        beside = torch.func.grad(lambda t: (rotate(plain, freqs) * t).sum())(x)
        assert_same(beside, turned(plain, freqs))
        needing = plain.clone().requires_grad_()
        assert_same(torch.func.grad(lambda t, u=needing: (rotate(u, freqs) * t).sum())(x), turned(plain, freqs))
        assert_same(torch.func.vmap(lambda t: rotate(plain, freqs) * t)(x[None])[0], turned(plain, freqs) * x)


def _appended(q: torch.Tensor, angles: dict[str, torch.Tensor]) -> torch.Tensor:
    k, ids = q.detach() + 1, torch.arange(q.shape[0])
    caches = [torch.zeros(2, 4, *k.shape[1:]) + 0 * q.sum().detach() for _ in range(2)]
    rope_append_(q, k, k + 1, *caches, ids, positions=ids, **angles)
    return torch.cat((q.flatten(), *(t.flatten() for t in caches)))


OVERWRITING: dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]] = {
    "two tensors": lambda t, angles: torch.cat(rope_qk(t * 1, t * 2, **angles, inplace=True)),
    "views of one": lambda t, angles: rope_qkv(torch.stack((t, t, t), -3), **angles, inplace=True),
    "every other head": lambda t, angles: torch.cat(_every_other(t, angles)),
    "normed": lambda t, angles: torch.cat(qk_norm_rope(t * 1, t * 2, *torch.ones(2, D), **angles, inplace=True)),
    "normed views": lambda t, angles: qkv_norm_rope_(torch.stack((t, t, t), -3), *torch.ones(2, D), **angles),
    "beside a cache": lambda t, angles: _appended((t * 1)[0], angles),
}


def _every_other(t: torch.Tensor, angles: dict[str, torch.Tensor]) -> Any:
    both = torch.cat((t, t), -2)
    return rope_qk(both[..., ::2, :], both[..., 1::2, :], **angles, inplace=True)


@pytest.mark.parametrize("name", OVERWRITING)
def test_transforms_see_through_what_overwrites_several_tensors(name: str) -> None:
    freqs = angles()[:, : D // 2]
    cosines = {"cos": freqs.cos(), "sin": freqs.sin()}
    x, tangent = torch.randn(2, B, S, H, D), torch.randn(B, S, H, D)

    def run(t: torch.Tensor) -> torch.Tensor:
        return OVERWRITING[name](t, cosines)

    def total(t: torch.Tensor) -> torch.Tensor:
        return run(t).pow(3).sum()

    assert_same(torch.func.vmap(run)(x), torch.stack([run(t) for t in x]))
    assert_same(torch.func.functionalize(run)(x[0]), run(x[0]))
    if name == "beside a cache":  # a cache has no gradient
        return
    needing = x[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(needing), needing)
    assert_same(torch.func.grad(total)(x[0]), wanted)
    assert_same(torch.func.vmap(torch.func.grad(total))(x)[0], wanted)
    assert_same(torch.func.jvp(total, (x[0],), (tangent,))[1], (wanted * tangent).sum())


@pytest.mark.parametrize("transform", ["grad", "vmap", "functionalize"])
@pytest.mark.parametrize("heads", [slice(None), slice(1, None)])
def test_under_a_transform_tensors_that_overlap_are_refused(transform: str, heads: slice) -> None:
    cosines = {"cos": angles()[:, : D // 2].cos(), "sin": angles()[:, : D // 2].sin()}

    def run(t: torch.Tensor) -> torch.Tensor:
        q = t * 1
        return rope_qk(q, q[..., heads, :], **cosines, inplace=True)[0].sum()

    with pytest.raises(ValueError, match="share memory"):
        getattr(torch.func, transform)(run)(torch.randn((1,) * (transform == "vmap") + (B, S, H, D)))


@pytest.mark.parametrize("name", ["positions", "offset"])
def test_positions_may_be_mapped(name: str) -> None:
    x, freqs = torch.randn(B, S, H, D), angles()
    values = torch.tensor([[0, 2, 1, 3, 1], [1, 2, 0, 0, 3]]) if name == "positions" else torch.tensor([0, 1])
    freqs = torch.cat((freqs, freqs))
    found = torch.func.vmap(lambda t: rotate(x, freqs, **{name: t}))(values)
    assert_same(found, torch.stack([rotate(x, freqs, **{name: t}) for t in values]))


def _gradient(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    needing = x.clone().requires_grad_()
    return torch.autograd.grad(turned(needing, freqs).pow(3).sum(), needing)[0]


def test_what_a_transform_decided_is_for_calls_under_it(watch: Watch) -> None:
    x, freqs = torch.randn(B, S, H, D), angles()
    torch.func.grad(lambda t: (rotate(x, freqs) * t).sum())(torch.randn_like(x))
    rotate(x, freqs)
    rotate(x, freqs)
    assert (watch.public, watch.direct) == (1, 1)


@pytest.mark.usefixtures("way")
def test_forward_mode_sees_through_it() -> None:
    x, tangent, freqs = torch.randn(B, S, H, D), torch.randn(B, S, H, D), angles()
    for _ in range(2):
        rotate(x, freqs)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(rotate(forward_ad.make_dual(x, tangent), freqs))
        assert_same(out.primal, turned(x, freqs))
        assert_same(out.tangent, turned(tangent, freqs))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtype_of_x(dtype: torch.dtype) -> None:
    q, k = leaves(H, K, dtype=dtype)
    freqs = angles()
    wanted = torch.autograd.grad(sum(t.float().pow(2).sum() for t in rotate_qk(q, k, freqs)), (q, k))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = rotate_qk(q, k, freqs)
            loss = sum(t.float().pow(2).sum() for t in out)
        assert [t.dtype for t in out] == [dtype, dtype]
        found = torch.autograd.grad(loss, (q, k))
        torch.testing.assert_close(found, wanted)
        assert [t.dtype for t in found] == [dtype, dtype]


@pytest.mark.usefixtures("way")
def test_deterministic_mode_changes_nothing() -> None:
    (x,) = leaves(H)
    freqs = angles()
    wanted = torch.autograd.grad(rotate(x, freqs).pow(3).sum(), x)
    torch.use_deterministic_algorithms(True)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(rotate(x, freqs).pow(3).sum(), x)[0], wanted[0])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode_takes_tensors_of_its_own_and_others(inside: bool, inplace: bool) -> None:
    values, freqs = torch.randn(B, S, H, D), angles()
    for _ in range(3):
        made = values.clone()
        with torch.inference_mode():
            x, k = (values.clone() if inside else made), values[:, :, :K].clone()
            q_out, k_out = rotate_qk(x, k, freqs, inplace=inplace)
            assert (q_out is x) == inplace
        assert_same(torch.clone(q_out), turned(values, freqs))
        assert_same(torch.clone(k_out), turned(values[:, :, :K], freqs))
        assert inside or made._version == inplace


def test_what_cannot_be_written_is_found_before_anything_is() -> None:
    """A key made in inference mode and used outside of it: the query used to be rotated before the key was refused."""
    freqs = angles()
    with torch.inference_mode():
        k = torch.randn(B, S, K, D)
    for _ in range(3):
        q = torch.randn(B, S, H, D)
        before = q.clone()
        with pytest.raises(RuntimeError, match=r"made in inference mode cannot be overwritten.*or pass a clone"):
            rotate_qk(q, k, freqs, inplace=True)
        assert torch.equal(q, before)


@pytest.mark.usefixtures("way")
def test_parameters_and_subclasses_are_tensors_too() -> None:
    freqs = angles()
    parameter = torch.nn.Parameter(torch.randn(B, S, H, D))
    marked = torch.randn(B, S, H, D).as_subclass(Marked)
    for _ in range(2):
        out = rotate(parameter, freqs)
        assert type(out) is torch.Tensor
        assert_same(
            torch.autograd.grad(out.sum(), parameter), torch.autograd.grad(turned(parameter, freqs).sum(), parameter)
        )
        assert_same(rotate(marked, freqs).as_subclass(torch.Tensor), turned(marked.as_subclass(torch.Tensor), freqs))
        assert type(rotate(marked, freqs)) is Marked
        table = freqs.as_subclass(Marked)
        assert_same(rotate(parameter, table).as_subclass(torch.Tensor), turned(parameter, freqs))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("inplace", [False, True])
def test_the_imaginary_part_of_a_conjugate_is_negative(inplace: bool) -> None:
    """PyTorch negates it on each read; the memory, which a kernel would read, holds the values without the sign."""
    x, freqs = torch.randn(B, S, H, D), angles()
    turns = torch.polar(torch.ones_like(freqs), freqs)
    for _ in range(2):
        for known in (turns, turns.conj(), turns):
            sign = -1 if known.is_conj() else 1
            out = rotate(x.clone(), cos=known.real, sin=known.imag, inplace=inplace)
            assert_same(out, turned(x, sign * freqs))
            z = torch.complex(x, x)
            q = (z.conj() if known.is_conj() else z).imag
            rotated = rotate(q, freqs, inplace=inplace)
            assert_same(rotated + 0, turned(sign * x, freqs))


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_jit_holds_the_rotation() -> None:
    x, freqs = torch.randn(B, S, H, D), angles()
    rotate(x, freqs)
    rotate(x, freqs)
    traced = torch.jit.trace(lambda t: rotate(t, freqs), (x,))
    other = torch.randn(B, S, H, D)
    assert_same(traced(other), turned(other, freqs))
    assert_same(rotate(other, freqs), turned(other, freqs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_jit_holds_the_rotation_of_packed_sequences() -> None:
    """The trace follows the lengths, which are tensors."""
    freqs, bounds = angles(), torch.tensor([0, 2, B * S], dtype=torch.int32)

    def packed(t: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return rotate(t, freqs, tensor_format="thd", cu_seqlens=bounds)

    traced = torch.jit.trace(packed, (torch.randn(B * S, H, D), bounds), check_trace=False)
    other = torch.randn(B * S, H, D)
    assert_same(traced(other, bounds), packed(other, bounds))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [n for n in OVERWRITING if n != "beside a cache"])  # a cache has no such views
def test_a_trace_of_torch_jit_holds_what_overwrites_several_tensors(name: str) -> None:
    freqs = angles()[:, : D // 2]
    cosines = {"cos": freqs.cos(), "sin": freqs.sin()}
    traced = torch.jit.trace(lambda t: OVERWRITING[name](t, cosines), (torch.randn(B, S, H, D),), check_trace=False)
    other = torch.randn(B, S, H, D)
    assert_same(traced(other), OVERWRITING[name](other, cosines))


OVERWRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "interleaved": lambda x: rotate(x, angles(), interleaved=True, positions=torch.arange(S)),
    "heads first": lambda x: rotate_qk(x, x, angles()[:, :1], tensor_format="bhsd", positions=torch.arange(H))[1],
    "qkv": lambda x: rotate_qkv(x[:, :, None].expand(B, S, 3, H, D), angles()),
    "qkv by positions": lambda x: rotate_qkv(x[:, :, None].expand(B, S, 3, H, D), angles(), positions=torch.arange(S)),
    "norm": lambda x: qk_norm_rope(x, None, torch.ones(D), None, angles(), angle_entries="pair", interleaved=True)[0],
    "conjugated": lambda x: rope(
        x, freqs_cis=torch.polar(torch.ones(S, D // 2), angles()[:S]).conj(), interleaved=True
    ),
    "conjugated, learned": lambda x: rope(
        x, freqs_cis=torch.polar(torch.ones(S, D // 2), angles()[:S] * x.mean()).conj(), interleaved=True
    ),
    "negated": lambda x: rotate(torch.complex(x, x).conj().imag, angles(), interleaved=True),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_a_result_may_be_overwritten(name: str, enabled: bool) -> None:
    """Autograd refuses this for a view that was made in a node or without gradients."""
    (x,), scale = leaves(H), torch.tensor(2.0, requires_grad=True)
    for _ in range(3):
        with torch.set_grad_enabled(enabled):
            out = OVERWRITTEN[name](x)
        before = out.detach().clone()
        out.mul_(scale)
        assert_same(torch.autograd.grad(out.sum(), scale)[0], before.sum())


@pytest.mark.usefixtures("way")
def test_the_public_transpose_is_that_of_the_gradient() -> None:
    (x,) = leaves(H)
    freqs, y = angles(), torch.randn(B, S, H, D)
    assert_same(rope_backward(y, freqs, angle_entries="pair"), torch.autograd.grad(rotate(x, freqs), x, y)[0])
