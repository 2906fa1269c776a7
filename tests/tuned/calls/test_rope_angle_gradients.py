"""Angles that need a gradient: the interpreted kernel against autograd, in place, traced; what is kept; what is eager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.dispatch
from tests.support.orders import of_several_orders
from tests.support.rope_calls import Watch, watch
from tuned.calls.rope import angles as learned
from tuned.calls.rope import call as rope_call
from tuned.calls.rope import ops as rope_ops
from tuned.calls.rope import saved
from tuned.calls.rope.arguments import Given, Settings, Sources
from tuned.calls.rope.plan import Plan
from tuned.dispatch import mla_kv_rope, qk_norm_rope, rope, rope_backward, rope_qk

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["watch"]
B, S, H, K, D, R = 2, 5, 3, 2, 8, 6
ROWS = 40
PACKED = torch.tensor([1, 3, 3, 2 * S - 1], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def table(entries: int = R // 2) -> torch.Tensor:
    return torch.rand(ROWS, entries) * 6


def sources() -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """The ways to give angles."""
    return {
        "freqs": lambda: {"freqs": table()},
        "wide freqs": lambda: {"freqs": table(R)[:, None, None]},
        "cos_sin": lambda: {"cos": table().cos(), "sin": table().sin()},
        "batched": lambda: {"cos": torch.rand(B, ROWS, R // 2), "sin": torch.rand(B, ROWS, R // 2)},
        "cache": lambda: {"cos_sin_cache": torch.cat((table().cos(), table().sin()), -1)},
        "inv_freq": lambda: {"inv_freq": torch.rand(R // 2)},
        "complex": lambda: {"freqs_cis": torch.polar(torch.ones(ROWS, R // 2), table())},
    }


IDS = torch.tensor([[3, 0, 9, 3, 2], [7, 7, 8, 30, 3]])
# (source, axes of x, axes of the key or None, settings, other tensors)
CASES: list[tuple[str, tuple[int, ...], tuple[int, ...] | None, dict[str, Any], dict[str, Any]]] = [
    ("freqs", (B, S, H, D), (B, S, K, D), {"angle_entries": "pair"}, {"offset": 3}),
    ("wide freqs", (S, B, H, D), None, {"tensor_format": "sbhd", "angle_entries": "feature"}, {"positions": IDS.t()}),
    ("cos_sin", (B, H, S, D), (B, K, S, D), {"tensor_format": "bhsd", "rotated": "last", "conjugate": True}, {}),
    ("cos_sin", (2 * S, H, D), (2 * S, K, D), {"tensor_format": "thd", "inplace": True}, {"cu_seqlens": PACKED}),
    ("batched", (B, S, H, D), None, {"inplace": True}, {"offset": torch.tensor([1, 4])}),
    ("cache", (B, S, H + 2 * K, D), None, {"kv_heads": K}, {"positions": IDS}),
    ("cache", (B, S, 3, H, D), None, {"kv_heads": 0}, {"offset": torch.tensor(2)}),
    ("inv_freq", (B, S, H, D), (B, S, K, D), {"sections": (1, 2), "interleaved": True}, {"positions": IDS.expand(2, B, S)}),
    ("inv_freq", (B, 2 * S, H, D), None, {"cp_size": 2, "cp_rank": 1, "attention_scaling": 1.5}, {}),
    ("complex", (B, S, H, D), (B, S, K, D), {"interleaved": True}, {"positions": IDS}),
    ("cos_sin", (B, S, H, D), (B, S, K, D), {"deinterleave": True}, {}),
]  # fmt: skip


def drawn(case: int) -> tuple[Given, Settings, list[torch.Tensor]]:
    """A call, and its tensors that need a gradient: in each third case only the angles."""
    source, shape, key_shape, settings, others = CASES[case]
    named = {name: t.requires_grad_() for name, t in sources()[source]().items()}
    x, key = torch.randn(shape), None if key_shape is None else torch.randn(key_shape)
    leaves = list(named.values())
    if case % 3 and not settings.get("inplace"):
        leaves += [t.requires_grad_() for t in (x, key) if t is not None]
    return Given(x, key, **named, **others), Settings(rotary_dim=R, **settings), leaves


def gradients(
    given: Given, settings: Settings, leaves: list[torch.Tensor], run: Any, *, twice: bool = False
) -> list[Any]:
    """The results, their gradients, and the gradients of those gradients."""
    given = given._replace(x=given.x * 1, key=None if given.key is None else given.key * 1)
    out = run(given, settings)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in outs]
    found = torch.autograd.grad(outs, leaves, weights, create_graph=twice)
    more: tuple[Any, ...] = ()
    if twice:
        size = sum(t.abs().square().sum() for t in found)
        more = torch.autograd.grad(size, leaves, allow_unused=True)
    return [*outs, *found, *more]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_kernels_gradients_are_autograds(case: int, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    run = saved.run_steps

    def listed(steps: Any, launch: Any) -> None:
        launched.extend(step.kernel for step in steps)
        run(steps, launch)

    monkeypatch.setattr(saved, "run_steps", listed)
    watch.interpreted = True
    given, settings, leaves = drawn(case)
    wanted = gradients(given, settings, leaves, rope_call.run_eager)
    for _ in range(2):  # first a new call, then a known one
        found = gradients(given, settings, leaves, rope_call.call_given)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(launched) == 2
    assert all(name.startswith("rope_angle_gradient") for name in launched)
    with torch.no_grad():
        again, first = (learned.gradient(given, settings._replace(inplace=False), *_ones(given)) for _ in range(2))
    assert all(a is b or torch.equal(a, b) for a, b in zip(again, first, strict=True))


def _ones(given: Given) -> list[Any]:
    return [None if t is None else torch.ones_like(t) for t in (given.x, given.key)]


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("case", [2, 5, 7])
def test_gradients_of_gradients_are_autograds(case: int) -> None:
    given, settings, leaves = drawn(case)
    found, wanted = (
        gradients(given, settings, leaves, run, twice=True) for run in (rope_call.call_given, rope_call.run_eager)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def node(given: Given, settings: Settings) -> Any:
    """The call as the autograd node that a call on a GPU has; its forward is PyTorch's."""
    origins = Sources.of(given)

    def forward(*arguments: Any) -> Any:
        with torch.no_grad():
            return rope_call.run_eager(origins.given(*arguments), settings)

    made = learned.differentiable(Plan(forward), settings, origins, rope_call.call_given)
    return made.run(given.x, given.key, getattr(given, origins.angles), given.sin, None, None, 0, (), None)


@pytest.mark.parametrize("case", ["apart", "q is k", "k from q", "cos is sin", "sin from cos", "angles from q"])
def test_a_tensor_given_twice_or_computed_from_another_has_the_gradients_of_the_formula(case: str) -> None:
    leaves = [torch.randn(1, 2, H, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves += [(torch.rand(2, D // 2, dtype=torch.float64) / 2 + 0.1).requires_grad_() for _ in range(2)]
    found = []
    for run in (node, rope_call.run_eager):

        def call(*leaves: Any, run: Any = run) -> Any:
            q, k, cos, sin = leaves
            k = {"q is k": q, "k from q": q * 2 + k}.get(case, k)
            cos = cos * q.mean() if case == "angles from q" else cos
            sin = {"cos is sin": cos, "sin from cos": (1 - cos.square()).sqrt()}.get(case, sin)
            return run(Given(q, k, cos=cos, sin=sin), Settings())

        found.append(of_several_orders(call, leaves))
    torch.testing.assert_close(*found)


@pytest.mark.interpreter
@pytest.mark.parametrize("left", [0, 1])
def test_a_result_that_nothing_depends_on_has_no_part(left: int, watch: Watch) -> None:
    watch.interpreted = True
    given, settings, leaves = drawn(10)
    found = [
        torch.autograd.grad(run(given, settings)[1 - left].square().sum(), leaves, allow_unused=True, materialize_grads=True)
        for run in (rope_call.call_given, rope_call.run_eager)
    ]  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


EMPTY = torch.zeros(0, dtype=torch.int64)
NONE = torch.zeros(2, dtype=torch.int32)  # bounds of one sequence without tokens
WITHOUT_A_ROW: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "bounds": ((0, 3, D), {"cu_seqlens": NONE, "tensor_format": "thd"}),
    "positions of packed": ((0, 3, D), {"positions": EMPTY, "tensor_format": "thd"}),
    "positions": ((2, 0, 3, D), {"positions": EMPTY}),
    "positions of entries": ((2, 0, 3, D), {"positions": EMPTY.view(2, 0)}),
    "in order": ((2, 0, 3, D), {}),
    "axes": ((2, 0, 3, D), {"positions": EMPTY.view(2, 0), "sections": (1, D // 2 - 1)}),
}


@pytest.mark.parametrize("source", ["freqs", "cos", "cos_sin_cache"])
@pytest.mark.parametrize("kind", WITHOUT_A_ROW)
def test_a_table_without_a_row_has_a_gradient_without_a_row(kind: str, source: str) -> None:
    """A rank may have no token, and its training must go on."""
    shape, named = WITHOUT_A_ROW[kind]
    entries = D if source == "cos_sin_cache" else D // 2
    table = torch.zeros(0, entries, requires_grad=True)
    given = {"cos": table, "sin": torch.zeros(0, entries)} if source == "cos" else {source: table}
    if source == "freqs":
        named = {**named, "angle_entries": "pair"}
    for out in (rope(torch.zeros(shape), **given, **named), *rope_qk(*torch.zeros(2, *shape), **given, **named)):
        (grad,) = torch.autograd.grad(out.sum(), table, retain_graph=True)
        assert (grad.shape, grad.dtype) == (table.shape, table.dtype)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("empty", [0, 1])
def test_of_a_query_and_a_key_an_empty_one_needs_the_gradient_of_the_table_too(
    watch: Watch, empty: int, inplace: bool
) -> None:
    """Kernels give this gradient as operators do."""
    table = torch.randn(6, D // 2, requires_grad=True)
    given = [torch.randn(2, 6, 0 if index == empty else 3, D) for index in range(2)]
    before = given[1 - empty].clone()
    for _ in range(3):
        tensors = [t.clone() for t in given]
        out = rope_qk(*tensors, table, angle_entries="pair", inplace=inplace)
        assert [t.requires_grad for t in out] == [True, True]
        assert [a is b for a, b in zip(out, tensors, strict=True)] == [inplace, inplace]
        (none,) = torch.autograd.grad(out[empty].sum(), table, retain_graph=True)
        assert not none.any()
        (grad,) = torch.autograd.grad(out[1 - empty].square().sum(), table)
        assert grad.shape == table.shape
    assert torch.equal(given[1 - empty], before)
    assert watch.public + watch.direct == 3


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_formula_of_operators_is_that_of_finite_differences(case: int) -> None:
    """On a CPU this formula stands in for the kernel inside an operator, where there is no autograd."""
    given, settings, _ = drawn(case)
    named = settings._replace(inplace=False)._asdict()
    named.pop("inplace")
    rest = tuple(named.values())[:-4]
    # Radians are float32, too coarse for finite differences: compare these with autograd of the eager formula.
    wide = {n: t.detach() for n, t in given._asdict().items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    wide |= {} if given.freqs_cis is None else {"freqs_cis": given.freqs_cis.detach()}
    radians = [n for n in ("freqs", "inv_freq") if n in wide]
    wide = {
        n: t if n in radians else t.to(torch.complex128 if t.is_complex() else torch.float64) for n, t in wide.items()
    }
    starts = given.offset if isinstance(given.offset, torch.Tensor) else None

    def run(*leaves: torch.Tensor) -> Any:
        own = given._replace(**dict(zip(wide, leaves, strict=True)))
        outs = rope_ops.rope_learned(own.x, own.key, *own[2:10], starts, 0 if starts is not None else own.offset, *rest)
        return outs[: 1 if own.key is None else 2]

    if radians:
        leaves = [t.requires_grad_() for t in wide.values()]
        out = run(*leaves)
        wanted = rope_call.run_eager(given._replace(**wide), settings._replace(inplace=False))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        found = [torch.autograd.grad([t.square().sum() for t in outs], leaves) for outs in (out, wanted)]
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        return
    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in wide.values()], fast_mode=True)


@pytest.mark.parametrize(("with_key", "inplace"), [(True, True), (True, False), (False, True)])
def test_compiled_it_is_the_same(with_key: bool, inplace: bool) -> None:
    x, key, freqs = torch.randn(B, S, H, D), torch.randn(B, S, K, D), table()

    def run(x: Any, key: Any, freqs: Any) -> Any:
        named = {"inplace": inplace, "angle_entries": "pair"}
        if not with_key:
            return rope(x * 1, freqs, **named)
        return torch.cat(rope_qk(x * 1, key * 1, freqs, **named), 2)

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, key, freqs)]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_operators_are_as_they_say() -> None:
    x, key, cos, sin = torch.randn(B, S, H, D), torch.randn(B, S, K, D), table().cos(), table().sin()
    settings = Settings()._asdict()
    settings.pop("inplace")
    rest = (None, None, None, None, None, None, 0, *list(settings.values())[:-4])
    tensors = [t.requires_grad_() for t in (x, key, cos, sin)]
    torch.library.opcheck(rope_ops.rope_learned, (*tensors[:2], None, *tensors[2:], *rest))
    plain = [t.detach() for t in tensors]
    torch.library.opcheck(
        rope_ops.rope_learned_backward, (*_ones(Given(*plain[:2])), *plain[:2], None, *plain[2:], *rest)
    )


@pytest.mark.usefixtures("watch")
def test_a_forward_keeps_its_input_and_the_angles_alone() -> None:
    x, key, freqs = torch.randn(B, S, H, D), torch.randn(B, S, K, D), table().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope_qk(x, key, freqs, angle_entries="pair")
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in (x, key, freqs))


@pytest.mark.usefixtures("watch")
def test_explain_says_what_no_kernel_gives() -> None:
    cos, sin = (t.requires_grad_() for t in (table(D // 2).cos(), table(D // 2).sin()))
    x, weight = torch.randn(B, S, H, D), torch.ones(D)
    assert tuned.explain(rope, x, cos=cos, sin=sin).rule != "eager"
    normed = tuned.explain(qk_norm_rope, x, x, weight, weight, cos=cos, sin=sin)
    latent = tuned.explain(mla_kv_rope, x, x[:, :, :1], cos=cos, sin=sin, k_dim=4)
    back = tuned.explain(rope_backward, x, cos=cos, sin=sin)
    for told, what in (
        (normed, "with a norm"),
        (latent, "of MLA's key and value"),
        (back, "that is a gradient itself"),
    ):
        assert told.rule == "eager"
        assert what in told.why


@pytest.mark.parametrize("leaf", [True, False])
def test_a_leaf_cannot_be_overwritten(leaf: bool) -> None:
    x = torch.randn(B, S, H, D)
    given = x.requires_grad_() if leaf else x.unbind()[0][None]
    with pytest.raises(RuntimeError, match="leaf" if leaf else "several views"):
        rope(given, table(D // 2).requires_grad_(), inplace=True, angle_entries="pair")
