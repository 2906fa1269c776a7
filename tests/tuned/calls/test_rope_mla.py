"""MLA: key and value made from kv, and queries whose last features rotate; values, gradients, strides, plans, traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tuned
from tests.support.rope_calls import Watch, chosen_once, watch
from tuned.calls.rope import ops as rope_ops
from tuned.calls.rope.arguments import Settings
from tuned.dispatch import mla_kv_rope, rope

__all__ = ["chosen_once", "watch"]

SEQ, BATCH, HEADS, KEPT, TURNED, VALUE = 5, 2, 3, 8, 6, 4
LAYOUTS = {"bshd": (BATCH, SEQ), "sbhd": (SEQ, BATCH), "thd": (BATCH * SEQ,)}
STYLES = {"half": {}, "interleaved": {"interleaved": True}, "deinterleave": {"deinterleave": True}}
BOUNDS = (1, 4, 4, 9)  # the first and the last of ten tokens belong to no sequence


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def table(entries: int = TURNED // 2, rows: int = 40, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    radians = torch.rand(rows, entries, dtype=torch.float64) * 6
    return {"cos": radians.cos().to(dtype), "sin": radians.sin().to(dtype)}


def tensors(layout: str = "bshd", dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """kv, and k_pe as a projection leaves it: a slice of a wider tensor."""
    wide = torch.randn(*LAYOUTS[layout], 7 + TURNED, dtype=dtype)
    return torch.randn(*LAYOUTS[layout], HEADS, KEPT + VALUE, dtype=dtype), wide[..., None, 7:]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """X [..., heads, features], rotated by hand; cos and sin [..., pairs]."""
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    a, b = x.chunk(2, -1) if style == "half" else (x[..., ::2], x[..., 1::2])
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pairs, -1).flatten(-2) if style == "interleaved" else torch.cat(pairs, -1)


def rows_of(layout: str, positions: torch.Tensor) -> torch.Tensor:
    return positions if layout != "sbhd" else positions.t()


def by_hand(
    kv: torch.Tensor, k_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value by the definition; cos and sin are given for each token."""
    shared = turned(k_pe, cos, sin, style).expand(*kv.shape[:-1], -1)
    return torch.cat((kv[..., :KEPT], shared), -1), kv[..., KEPT:]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_is_that_of_kv_and_the_shared_head_rotated(layout: str, style: str) -> None:
    kv, k_pe = tensors(layout)
    angles, shape = table(), LAYOUTS[layout]
    ids = torch.randint(0, 40, shape)
    key, value = mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT, tensor_format=layout, positions=ids, **STYLES[style])
    wanted = by_hand(kv, k_pe, angles["cos"][ids], angles["sin"][ids], style)
    torch.testing.assert_close((key, value), wanted, rtol=1e-7, atol=1e-7)
    assert key.is_contiguous()
    assert value.is_contiguous()


@pytest.mark.parametrize("style", STYLES)
def test_tokens_of_no_sequence_are_not_rotated(style: str) -> None:
    kv, k_pe = tensors("thd")
    angles = table()
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    key, value = mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT, tensor_format="thd", cu_seqlens=bounds, **STYLES[style])
    places = torch.tensor([0, 0, 1, 2, 0, 1, 2, 3, 4, 0])
    cos, sin = (angles[n][places] for n in ("cos", "sin"))
    for outside in (0, -1):
        cos[outside], sin[outside] = 1.0, 0.0
    torch.testing.assert_close((key, value), by_hand(kv, k_pe, cos, sin, style), rtol=1e-7, atol=1e-7)
    q = torch.randn(BATCH * SEQ, HEADS, TURNED, dtype=torch.float64)
    out = rope(q, **angles, tensor_format="thd", cu_seqlens=bounds, **STYLES[style])
    torch.testing.assert_close(out, turned(q, cos, sin, style), rtol=1e-7, atol=1e-7)
    again = q.clone()
    assert rope(again, **angles, tensor_format="thd", cu_seqlens=bounds, inplace=True, **STYLES[style]) is again
    assert torch.equal(again, out)


@pytest.mark.parametrize("entries", ["pair", "feature"])
def test_pairs_put_apart_are_those_of_megatron(entries: str) -> None:
    """Megatron's operators: pairs to halves, then t * cos + rotate_half(t) * sin; a pair's two entries may differ."""
    q = torch.randn(SEQ, BATCH, HEADS, KEPT + TURNED, dtype=torch.float64)
    angles = table(TURNED)
    if entries == "pair":
        angles = {n: torch.cat((t[:, : TURNED // 2],) * 2, -1) for n, t in angles.items()}
    cos, sin = (t[:SEQ, None, None] for t in angles.values())
    halves = torch.cat((q[..., KEPT::2], q[..., KEPT + 1 :: 2]), -1)
    swapped = torch.cat((-halves[..., TURNED // 2 :], halves[..., : TURNED // 2]), -1)
    wanted = torch.cat((q[..., :KEPT], halves * cos + swapped * sin), -1)
    given = {n: t[:, : TURNED // 2] if entries == "pair" else t for n, t in angles.items()}
    named: dict[str, Any] = {"tensor_format": "sbhd", "rotated": "last", "deinterleave": True, "angle_entries": entries}
    torch.testing.assert_close(rope(q, **given, **named), wanted, rtol=1e-7, atol=1e-7)


# Gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_finite_differences(layout: str, style: str) -> None:
    kv, k_pe = (t.detach().requires_grad_() for t in tensors(layout))
    bounds = {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)} if layout == "thd" else {}
    given = {**table(), "k_dim": KEPT, "tensor_format": layout, **bounds, **STYLES[style]}
    run = lambda kv, k_pe: mla_kv_rope(kv, k_pe, **given)  # noqa: E731
    assert torch.autograd.gradcheck(run, (kv, k_pe), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (kv, k_pe), fast_mode=True)


CALLS: dict[str, dict[str, Any]] = {
    "sbhd": {"tensor_format": "sbhd"},
    "bshd": {"interleaved": True},
    "deinterleave": {"tensor_format": "sbhd", "deinterleave": True},
    "thd": {"tensor_format": "thd", "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32), "deinterleave": True},
    "thd interleaved": {"tensor_format": "thd", "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32), "interleaved": True},
    "ids": {"positions": torch.randint(0, 40, (BATCH, SEQ))},
    "starts": {"offset": torch.tensor([3, 0]), "conjugate": True},
    "ranks": {"tensor_format": "thd", "cu_seqlens": torch.tensor((0, 8, 20), dtype=torch.int32), "cp_size": 2, "cp_rank": 1},
    "conjugate": {"conjugate": True, "deinterleave": True},
    "feature": {"angle_entries": "feature", "deinterleave": True},
}  # fmt: skip


def results(named: dict[str, Any], kv: Any, k_pe: Any, angles: Any, left_out: int | None) -> list[torch.Tensor]:
    """Both results, both gradients and gradients of gradients; ``left_out`` is a result that nothing depends on."""
    leaves = [t.detach().requires_grad_() for t in (kv, k_pe)]
    made = mla_kv_rope(*leaves, **angles, k_dim=KEPT, **named)
    weights = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape).requires_grad_() for t in made]
    asked = [(m, w) for i, (m, w) in enumerate(zip(made, weights, strict=True)) if i != left_out]
    grads = torch.autograd.grad(
        [m for m, _ in asked], leaves, [w for _, w in asked], create_graph=True, allow_unused=True
    )
    grads = tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))
    again = torch.autograd.grad([g.square().sum() for g in grads if g.requires_grad], [w for _, w in asked])
    return [t.detach() for t in (*made, *grads, *again)]


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("name", CALLS)
def test_kernels_and_operators_give_the_same(watch: Watch, name: str) -> None:
    """Compares a new call, a known call, and eager PyTorch: in float64, which no kernel takes."""
    named = CALLS[name]
    kv, k_pe = tensors(named.get("tensor_format", "bshd"))
    entries = TURNED if "angle_entries" in named else TURNED // 2
    angles = table(entries, 40)
    for left_out in (None, 0, 1):
        wanted = results(named, kv, k_pe, angles, left_out)
        watch.interpreted = True
        before, times = watch.public + watch.direct, 2 if left_out is None else 1
        for _ in range(times):
            found = results(named, kv.float(), k_pe.float(), {n: t.float() for n, t in angles.items()}, left_out)
            torch.testing.assert_close(found, [t.float() for t in wanted], rtol=1e-5, atol=1e-5)
        assert watch.public + watch.direct - before == 3 * times, "forward, backward, and forward again"


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("which", ["kv", "k_pe", "neither"])
def test_what_needs_no_gradient_has_none(watch: Watch, which: str) -> None:
    kv, k_pe = (t.float() for t in tensors())
    angles = table(dtype=torch.float32)
    for t, name in ((kv, "kv"), (k_pe, "k_pe")):
        t.requires_grad_(name == which)
    key, value = mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT)
    assert (key.requires_grad, value.requires_grad) == (which != "neither", which == "kv")
    if which == "neither":
        return
    leaf = kv if which == "kv" else k_pe
    (found,) = torch.autograd.grad(key.sum(), leaf)
    both = [t.detach().requires_grad_() for t in (kv, k_pe)]
    wanted = torch.autograd.grad(mla_kv_rope(*both, **angles, k_dim=KEPT)[0].sum(), both[which != "kv"])[0]
    assert torch.equal(found, wanted)
    assert watch.public


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("by_kernels", [False, True])
def test_the_gradient_of_the_shared_head_rounds_once(by_kernels: bool, request: pytest.FixtureRequest) -> None:
    """After the sum over heads and the rotation back: half a unit of the result, even if two features cancel."""
    if by_kernels:
        request.getfixturevalue("watch").interpreted = True
    heads, tokens = 5, 300
    kv, k_pe = torch.zeros(1, tokens, heads, 4).half(), torch.zeros(1, tokens, 1, 2).half()
    angle = torch.rand(tokens, 1) * 6
    angles = {"cos": angle.cos(), "sin": angle.sin()}
    grad = torch.randn(1, tokens, heads, 4).half()
    key, _ = mla_kv_rope(kv, k_pe.requires_grad_(), **angles, k_dim=2)
    (found,) = torch.autograd.grad(key, k_pe, grad)
    total = grad[..., 2:].double().sum(-2, keepdim=True)
    exact = turned(total, angles["cos"], -angles["sin"], "half")
    # The interpreter and PyTorch round float16 to the nearest.
    assert bool(((found.double() - exact).abs() <= 1.01 * 2**-11 * exact.abs() + 2**-20).all())


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_query_in_place_is_that_out_of_place_with_its_gradient(watch: Watch, layout: str, style: str) -> None:
    watch.interpreted = True
    angles = table(dtype=torch.float32)
    named: dict[str, Any] = {"tensor_format": layout, "rotated": "last", **STYLES[style]}
    if layout == "thd":
        named["cu_seqlens"] = torch.tensor(BOUNDS, dtype=torch.int32)
    leaf = torch.randn(*LAYOUTS[layout], HEADS, KEPT + TURNED).requires_grad_()
    found = []
    for inplace in (False, True):
        q = leaf * 2
        out = rope(q, **angles, **named, inplace=inplace)
        assert (out is q) == inplace
        weight = torch.linspace(-1, 1, q.numel()).view(q.shape)
        found.append([out.detach().clone(), *torch.autograd.grad(out, leaf, weight)])
    wide = leaf.detach().double().requires_grad_()
    out = rope(wide * 2, **{n: t.double() for n, t in angles.items()}, **named)
    found.append([out.detach().float(), *(g.float() for g in torch.autograd.grad(out, wide, weight.double()))])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
    assert watch.public + watch.direct == 4
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="is a leaf that requires grad"):
        rope(leaf, **angles, **named, inplace=True)
    assert torch.equal(leaf.detach(), before)


# Strides and lengths ------------------------------------------------------------------------------------------------------


def views(kv: torch.Tensor, k_pe: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    wide = torch.cat((kv, kv), -1)
    return {
        "transposed": (kv.transpose(1, 2).contiguous().transpose(1, 2), k_pe.transpose(0, 1).contiguous().transpose(0, 1)),
        "features apart": (wide[..., ::2], k_pe.transpose(1, 3).contiguous().transpose(1, 3)),
        "expanded": (kv[:, :, :1].expand_as(kv), k_pe[:1].expand_as(k_pe)),
        "negative": (torch.complex(kv, kv).conj().imag, torch.complex(k_pe, k_pe).conj().imag),
        "shared by tokens": (kv, k_pe[:, :1].expand_as(k_pe)),
    }  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("name", ["transposed", "features apart", "expanded", "negative", "shared by tokens"])
def test_any_strides_are_right(watch: Watch, name: str) -> None:
    watch.interpreted = True
    kv, k_pe = (t.float() for t in tensors())
    angles = table(dtype=torch.float32)
    kv, k_pe = views(kv, k_pe)[name]
    wanted = by_hand(kv, k_pe, angles["cos"][:SEQ], angles["sin"][:SEQ], "half")
    for _ in range(2):
        found = mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    key, value = (torch.randn_like(t) for t in wanted)
    grads = views(key, torch.randn(BATCH, SEQ, 1, 2))[name][0], views(value, torch.randn(BATCH, SEQ, 1, 2))[name][0]
    leaves = [t.detach().clone().requires_grad_() for t in (kv, k_pe)]
    ours = torch.autograd.grad(mla_kv_rope(*leaves, **angles, k_dim=KEPT), leaves, grads)
    theirs = torch.autograd.grad(by_hand(*leaves, angles["cos"][:SEQ], angles["sin"][:SEQ], "half"), leaves, grads)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_lengths_launch_what_is_compiled(watch: Watch, layout: str) -> None:
    """16 divides the rows of these heads, so that another length changes no property that kernels are compiled for."""
    watch.interpreted = True
    angles = {"cos": torch.rand(64, 8), "sin": torch.rand(64, 8)}
    for seq in (8, 3, 17):
        tokens = {"bshd": (2, seq), "sbhd": (seq, 2), "thd": (seq,)}[layout]
        leaves = [torch.randn(*tokens, *rest).requires_grad_() for rest in ((4, 48), (1, 16))]
        bounds = {"cu_seqlens": torch.tensor([0, seq], dtype=torch.int32)} if layout == "thd" else {}
        key, value = mla_kv_rope(*leaves, **angles, k_dim=32, tensor_format=layout, **bounds)
        places = torch.arange(seq)
        cos, sin = (angles[n][places] for n in ("cos", "sin"))
        cos, sin = (t[:, None].expand(*tokens, -1) if layout == "sbhd" else t.expand(*tokens, -1) for t in (cos, sin))
        shared = turned(leaves[1], cos, sin, "half").expand(*tokens, 4, -1)
        wanted = torch.cat((leaves[0][..., :32], shared), -1), leaves[0][..., 32:]
        torch.testing.assert_close((key, value), wanted, rtol=1e-5, atol=1e-5)
        weights = [torch.randn_like(t) for t in wanted]
        grads = [torch.autograd.grad(made, leaves, weights) for made in ((key, value), wanted)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    assert watch.direct >= 2


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
def test_the_stride_of_a_values_only_feature_says_nothing(watch: Watch) -> None:
    """Found by the fuzz: PyTorch calls such a gradient contiguous, whatever that stride is."""
    watch.interpreted = True
    angles = table(rows=1, dtype=torch.float32)
    for stride in (1, 7, 1, 3):
        leaves = [torch.randn(1, 1, 1, n, requires_grad=True) for n in (KEPT + 1, TURNED)]
        weights = torch.randn(1, 1, 1, KEPT + TURNED), torch.randn(1).as_strided((1, 1, 1, 1), (9, 9, 9, stride))
        grads = [
            torch.autograd.grad(made, leaves, weights)
            for made in (mla_kv_rope(*leaves, **angles, k_dim=KEPT), by_hand(*leaves, *angles.values(), "half"))
        ]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    assert watch.direct


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_an_empty_call_is_empty(shape: tuple[int, int, int]) -> None:
    batch, seq, heads = shape
    leaves = [torch.randn(batch, seq, n, d, requires_grad=True) for n, d in ((heads, 12), (1, 6))]
    key, value = mla_kv_rope(*leaves, **table(dtype=torch.float32), k_dim=8)
    assert (key.shape, value.shape) == ((batch, seq, heads, 14), (batch, seq, heads, 4))
    grads = torch.autograd.grad(key.sum() + value.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert not grads[1].any()


# Traced -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "train"), [("half", True), ("interleaved", False), ("deinterleave", True)])
def test_compiled_it_is_the_same(style: str, train: bool) -> None:
    kv, k_pe = (t.float() for t in tensors("sbhd"))
    angles = table(dtype=torch.float32)

    def run(kv: Any, k_pe: Any, cos: Any, sin: Any) -> Any:
        named: dict[str, Any] = {"tensor_format": "sbhd", **STYLES[style]}
        query = rope(kv * 1, cos=cos, sin=sin, rotated="last", inplace=True, **named)
        return *mla_kv_rope(kv * 1, k_pe * 1, cos=cos, sin=sin, k_dim=KEPT, **named), query

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_(train) for t in (kv, k_pe)]
        made = function(*leaves, *angles.values())
        grads = torch.autograd.grad(sum(t.square().sum() for t in made), leaves) if train else ()
        found.append([*(t.detach() for t in made), *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("style", ["interleaved", "deinterleave"])
def test_the_operator_is_as_it_says(style: str) -> None:
    kv, k_pe = (t.float() for t in tensors())
    angles = table(dtype=torch.float32)
    settings = Settings(k_dim=KEPT, **{"interleaved": False, **STYLES[style]})._asdict()  # type: ignore[arg-type]
    settings.pop("inplace")
    given = list(settings.values())[:-4]
    rest = (None, angles["cos"], angles["sin"], None, None, None, None, None, None, 0, *given)
    torch.library.opcheck(rope_ops.mla_kv_rope, (kv.requires_grad_(), k_pe.detach().requires_grad_(), *rest))
    key, value = torch.randn(BATCH, SEQ, HEADS, KEPT + TURNED), torch.randn(BATCH, SEQ, HEADS, VALUE)
    torch.library.opcheck(rope_ops.mla_kv_rope, (key, value, *rest[:-1], "backward"))


def test_it_is_traced_without_memory() -> None:
    with FakeTensorMode():
        kv, k_pe = torch.empty(4, 2, 128, 256), torch.empty(4, 2, 1, 64)
        key, value = mla_kv_rope(kv, k_pe, torch.empty(4, 64), k_dim=128, tensor_format="sbhd")
    assert (key.shape, value.shape) == ((4, 2, 128, 192), (4, 2, 128, 128))
    meta = [torch.empty(4, 2, 128, 256, device="meta"), torch.empty(4, 2, 1, 64, device="meta")]
    key, value = mla_kv_rope(*meta, torch.empty(4, 64, device="meta"), k_dim=128, tensor_format="sbhd")
    assert (key.shape, value.shape) == ((4, 2, 128, 192), (4, 2, 128, 128))


def test_under_torch_func_it_is_the_same() -> None:
    kv, k_pe = tensors()
    angles = table()
    loss = lambda kv, k_pe: mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT)[0].square().sum()  # noqa: E731
    found = torch.func.grad(loss, argnums=(0, 1))(kv, k_pe)
    leaves = [t.detach().clone().requires_grad_() for t in (kv, k_pe)]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once")
def test_a_known_call_is_left_to_operators_under_torch_func(watch: Watch) -> None:
    """The transform does not follow the tensors of the call, but follows another factor of the result."""
    kv, k_pe = (t.float() for t in tensors())
    angles = table(dtype=torch.float32)
    run = lambda kv, k_pe: mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT)  # noqa: E731
    for needs in (False, True):
        leaves = [t.detach().clone().requires_grad_(needs) for t in (kv, k_pe)]
        for _ in range(3):
            key, value = run(*leaves)
        launched = watch.public + watch.direct
        assert watch.direct
        for index, t in enumerate((key, value)):
            beside = lambda s, leaves=leaves, index=index: run(*leaves)[index] * s  # noqa: E731
            total = lambda s, beside=beside: beside(s).sum()  # noqa: E731
            torch.testing.assert_close(torch.func.grad(total)(torch.ones_like(t)), t.detach())
            torch.testing.assert_close(torch.func.vmap(beside)(torch.ones(1, *t.shape))[0], t)
        assert watch.public + watch.direct == launched
        run(*leaves)
        assert watch.public + watch.direct == launched + 1


@pytest.mark.interpreter
@pytest.mark.usefixtures("chosen_once", "watch")
def test_results_of_known_calls_share_nothing() -> None:
    kv, k_pe = (t.float() for t in tensors())
    angles = table(dtype=torch.float32)
    made: list[torch.Tensor] = [kv, k_pe]
    for _ in range(4):
        made += mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT)
        assert [t._is_view() for t in made[2:]] == [False] * (len(made) - 2)
    assert len({t.untyped_storage().data_ptr() for t in made}) == len(made)
    with torch.inference_mode():
        assert all(t.is_inference() for _ in range(3) for t in mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT))
    assert not any(t.is_inference() for t in mla_kv_rope(kv, k_pe, **angles, k_dim=KEPT))


def test_angles_get_their_gradients() -> None:
    kv, k_pe = tensors()
    freqs = torch.rand(SEQ, TURNED, requires_grad=True)
    key, _ = mla_kv_rope(kv, k_pe, freqs, k_dim=KEPT)
    assert torch.autograd.grad(key.sum(), freqs)[0].abs().sum() > 0


def test_it_is_explained() -> None:
    kv, k_pe = (
        torch.empty(4096, 1, 128, 256, dtype=torch.bfloat16, device="meta"),
        torch.empty(4096, 1, 1, 64, dtype=torch.bfloat16, device="meta"),
    )
    freqs = torch.empty(4096, 64, device="meta")
    for named, name in (({}, "rope_mla_half_freqs"), ({"interleaved": True}, "rope_mla_interleaved_freqs")):
        told = tuned.explain(mla_kv_rope, kv, k_pe, freqs, k_dim=128, tensor_format="sbhd", gpu="nvidia_h200", **named)
        assert told.kernels == (name,)
