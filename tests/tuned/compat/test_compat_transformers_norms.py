"""use_tuned_rope: norms of queries and keys go into the rotation's launch, each computed once; or stay as before."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.transformers_models import (
    LAYERS,
    NORMED,
    SMOOTH,
    SOME_LAYERS,
    Family,
    generated,
    logits_and_gradients,
    padded_batch,
    relative_error,
)
from tuned import dispatch
from tuned.compat.fusing import MARK, FusedForward, Norms, forward_of, norms_of
from tuned.compat.rotary_style import Found, find
from tuned.compat.transformers import use_tuned_rope

ATTENTION = tuple(f"model.layers.{layer}.self_attn" for layer in range(LAYERS))
QWEN, GEMMA, OLMO, *_ = NORMED
AS_GOOD = 1.5  # times the error of the model's own: each error is one draw of roundings
each_norm = pytest.mark.parametrize("family", [*NORMED, SOME_LAYERS], ids=lambda family: family.name)
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from transformers' own imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@functools.cache
def first_model(family: Family) -> Any:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    return with_random_norms(family.model())


@functools.cache
def own_results(family: Family) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logits_and_gradients(first_model(family))


def with_random_norms(model: Any) -> Any:
    """New models have norm weights that are all 1, or all 0 if 1 is added: replace them by random ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for norm in norms(model):
            norm.weight.add_(0.3 * torch.randn(norm.weight.shape, generator=generator))
    return model


def model_of(family: Family, **more: Any) -> Any:
    """A copy that a test may change."""
    return with_random_norms(family.model(**more)) if more else copy.deepcopy(first_model(family))


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def norms(model: Any) -> list[Any]:
    return [
        one
        for attention in attentions(model)
        for name, one in attention.named_children()
        if name.endswith(("_norm", "_layernorm"))
    ]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**padded_batch()).logits[:, 4:]  # type: ignore[no-any-return]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of qk_norm_rope."""
    seen: list[dict[str, Any]] = []
    qk_norm_rope = dispatch.qk_norm_rope

    def seeing(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        seen.append({"tensors": tensors, **kwargs})
        return qk_norm_rope(*tensors, **kwargs)

    monkeypatch.setattr(dispatch, "qk_norm_rope", seeing)
    return seen


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Counts calls of the norms in a model's attention; use it before the model is patched."""

    def count(model: Any) -> list[Any]:
        called: list[Any] = []
        (kind,) = {type(norm) for norm in norms(model)}
        forward = kind.forward

        def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
            if any(self is norm for norm in norms(model)):
                called.append(self)
            return forward(self, x)

        monkeypatch.setattr(kind, "forward", counting)
        return called

    return count


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, gradient in wanted.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=name)


@each_norm
def test_logits_and_gradients_are_the_models_own_and_no_norm_is_called(
    family: Family, calls: list[dict[str, Any]], counted: Any
) -> None:
    model = first_model(family)
    wanted, gradients = own_results(family)
    called = counted(model)
    rotated = LAYERS if family is not SOME_LAYERS else LAYERS - 1
    with use_tuned_rope(model) as patch:
        assert (patch.fused, patch.unfused, patch.kept) == (ATTENTION, {}, {})
        called.clear()  # without the calls that find the style
        found, found_gradients = logits_and_gradients(model)
    assert len(calls) == rotated
    assert len(called) == 2 * (LAYERS - rotated)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert_gradients(found_gradients, gradients)
    for call in calls:
        assert call["norm"] == ("all" if family is OLMO else "head")
        assert call["zero_centered"] is (family is GEMMA)


@each_norm
def test_generate_gives_the_models_own_tokens(family: Family, calls: list[dict[str, Any]]) -> None:
    model = first_model(family)
    wanted = generated(model, 4)
    with use_tuned_rope(model):
        assert torch.equal(generated(model, 4), wanted)
    assert len(calls) == 4 * (LAYERS if family is not SOME_LAYERS else LAYERS - 1)


@pytest.mark.parametrize("family", NORMED, ids=lambda family: family.name)
def test_in_bfloat16_logits_and_gradients_err_no_more_than_the_models_own(
    family: Family, calls: list[dict[str, Any]]
) -> None:
    model = model_of(family, initializer_range=SMOOTH).bfloat16()
    exact, exact_gradients = logits_and_gradients(copy.deepcopy(model).double())
    theirs, their_gradients = logits_and_gradients(model)
    with use_tuned_rope(model):
        ours, our_gradients = logits_and_gradients(model)
    assert [call["rounding"] for call in calls] == ["product" if family in (GEMMA, OLMO) else "each"] * LAYERS
    assert relative_error(ours, exact) <= AS_GOOD * relative_error(theirs, exact)
    whole = [
        torch.cat([t.flatten().double() for t in gradients.values()])
        for gradients in (our_gradients, their_gradients, exact_gradients)
    ]
    assert relative_error(whole[0], whole[2]) <= AS_GOOD * relative_error(whole[1], whole[2])


def test_undo_restores_the_very_forward_and_leaves_nothing_behind() -> None:
    model = model_of(QWEN)
    kind = type(attentions(model)[0])
    forward, state = kind.forward, list(model.state_dict())
    patch = use_tuned_rope(model)
    assert kind.forward is not forward
    assert list(model.state_dict()) == state
    patch.undo()
    patch.undo()
    assert kind.forward is forward
    assert not any(hasattr(one, MARK) for one in attentions(model))


def test_nested_patches_and_two_models_of_a_class_need_as_many_undone(calls: list[dict[str, Any]]) -> None:
    one, other = model_of(QWEN), model_of(QWEN)
    kind = type(attentions(one)[0])
    forward, wanted = kind.forward, logits(one)
    first = use_tuned_rope(one)
    torch.testing.assert_close(logits(other), wanted)
    assert not calls  # no call has asked whether its norms fit
    second, third = use_tuned_rope(other), use_tuned_rope(one)
    first.undo()
    for model in (one, other):
        calls.clear()
        torch.testing.assert_close(logits(model), wanted)
        assert len(calls) == LAYERS
    third.undo()
    assert kind.forward is not forward
    second.undo()
    assert kind.forward is forward


def test_what_another_patch_put_in_place_of_the_forward_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(QWEN)
    kind = type(attentions(model)[0])
    forward = kind.forward
    patch = use_tuned_rope(model)
    with monkeypatch.context() as other:
        other.setattr(kind, "forward", len)
        with pytest.raises(RuntimeError, match=r"Qwen3Attention\.forward must still be what use_tuned_rope put there"):
            patch.undo()
    patch.undo()
    assert kind.forward is forward


def test_a_rotation_that_was_replaced_since_is_called(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    model = model_of(QWEN)
    with use_tuned_rope(model), monkeypatch.context() as other:
        other.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
        unrotated = logits(model)
    assert not calls
    assert relative_error(unrotated, logits(model)) > 0.1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_of_a_norm_is_called(when: str, everywhere: bool, calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    norm = attentions(model)[0].q_norm

    def hook(module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        return 3 * out if module is norm else out

    def register() -> Any:
        if everywhere:
            return torch.nn.modules.module.register_module_forward_hook(hook)
        return norm.register_forward_hook(hook)

    with register():
        wanted = logits(model)
    if when == "before":
        with register():
            with use_tuned_rope(model) as patch:
                found = logits(model)
            if not everywhere:
                assert patch.fused == ATTENTION[1:]
                assert patch.unfused[ATTENTION[0]] == "what it rotates is what q_norm gives, and it has hooks"
    else:
        with use_tuned_rope(model):
            with register():
                found = logits(model)
            fused = len(calls)
            logits(model)
            assert len(calls) == fused + LAYERS
            del calls[fused:]
    torch.testing.assert_close(found, wanted)
    assert len(calls) == (0 if everywhere else LAYERS - 1)


def test_weights_and_eps_are_looked_up_in_each_call(calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    with use_tuned_rope(model):
        norm = attentions(model)[0].q_norm
        norm.weight = torch.nn.Parameter(torch.randn_like(norm.weight))
        attentions(model)[1].k_norm.weight.data = torch.randn_like(norm.weight)
        for one in (attentions(model)[1].q_norm, attentions(model)[1].k_norm):
            one.variance_epsilon = 0.5
        found = logits(model)
        assert len(calls) == LAYERS
        attentions(model)[0].q_norm.variance_epsilon = 2.0  # only the query's eps changes; one call takes a single eps
        apart = logits(model)
        assert len(calls) == 2 * LAYERS - 1
        model.double()
        wide = logits(model)
        assert wide.dtype == torch.float64
    torch.testing.assert_close(apart, wide.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model), wide, rtol=1e-4, atol=1e-4)
    model.float()
    attentions(model)[0].q_norm.variance_epsilon = attentions(model)[0].k_norm.variance_epsilon
    torch.testing.assert_close(logits(model), found)


def test_weights_of_a_functional_call_are_those_given(calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    other = {name: 2 * weight.detach() for name, weight in model.named_parameters() if "q_norm" in name}
    wanted = torch.func.functional_call(model, other, kwargs=padded_batch()).logits
    with use_tuned_rope(model):
        found = torch.func.functional_call(model, other, kwargs=padded_batch()).logits
    assert len(calls) == LAYERS
    torch.testing.assert_close(found, wanted)


def test_a_copy_of_a_patched_model_is_served_by_its_own_weights(calls: list[dict[str, Any]]) -> None:
    model = model_of(GEMMA)
    with use_tuned_rope(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for norm in norms(other):
                norm.weight.mul_(-2)
        found = logits(other)
        assert len(calls) == LAYERS
        kept = logits(model)
    torch.testing.assert_close(found, logits(other))
    torch.testing.assert_close(kept, logits(model))
    assert len(calls) == 2 * LAYERS


def test_a_pickled_model_holds_nothing_of_ours(calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    try:
        pickle.dumps(model)
    except AttributeError:
        pytest.skip("transformers 5.20 makes models that cannot be pickled")
    with use_tuned_rope(model):
        written = pickle.dumps(model)
        read = pickle.loads(written)
        found = logits(read)
        assert not calls
        with use_tuned_rope(read):
            torch.testing.assert_close(logits(read), found)
        assert len(calls) == LAYERS
    assert b"tuned.compat" not in written
    torch.testing.assert_close(found, logits(model))


def test_norms_of_all_heads_are_fused_only_where_their_way_is_seen() -> None:
    attention = attentions(first_model(OLMO))[0]
    found = find(first_model(OLMO), vars(sys.modules[type(attention).__module__]), "apply_rotary_pos_emb")
    assert isinstance(found, Found)
    forward = forward_of(type(attention), "apply_rotary_pos_emb", found)
    assert isinstance(forward, FusedForward)
    assert isinstance(norms_of(attention, forward), Norms)
    forward.derived = dataclasses.replace(forward.derived, turned=False)
    assert norms_of(attention, forward) == (
        "what it rotates is what q_norm gives, and it is of all heads, and it cannot be seen where these go"
    )
    assert not hasattr(attention, MARK)


def test_a_norm_that_was_exchanged_is_called(calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    with use_tuned_rope(model):
        attentions(model)[0].k_norm = torch.nn.LayerNorm(16)
        torch.nn.utils.parametrize.register_parametrization(attentions(model)[1].q_norm, "weight", torch.nn.Softplus())
        found = logits(model)
    assert not calls
    torch.testing.assert_close(found, logits(model))


def replaced_forward(attention: Any) -> None:
    norm = attention.q_norm
    norm.forward = lambda x: x * norm.weight


def layer_norm(attention: Any) -> None:
    class Centred(torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(-1, keepdim=True))

    attention.q_norm = Centred(16, eps=1e-6)


def weightless(attention: Any) -> None:
    attention.q_norm = torch.nn.RMSNorm(16, elementwise_affine=False)


def sharded(attention: Any) -> None:
    class Shard(torch.nn.Parameter):
        pass

    attention.q_norm._parameters["weight"] = Shard(attention.q_norm.weight.detach().clone())


def unlike(attention: Any) -> None:
    attention.q_norm = torch.nn.RMSNorm(16, eps=1e-6)  # rounds elsewhere


def own_forward(attention: Any) -> None:
    attention.forward = functools.partial(type(attention).forward, attention)


UNFIT = {
    replaced_forward: "its forward was replaced",
    layer_norm: "its results are not those of an RMSNorm of the last axis",
    weightless: "it must have one parameter, of one axis",
    sharded: "its parameter is a Shard",
    unlike: "q_norm and k_norm compute different norms",
    own_forward: "its own forward was replaced",
}


@pytest.mark.parametrize("change", UNFIT, ids=lambda change: change.__name__)
def test_norms_that_do_not_fit_are_taken_as_before_and_others_are_fused(
    change: Callable[[Any], None], calls: list[dict[str, Any]]
) -> None:
    model = model_of(QWEN)
    change(attentions(model)[0])
    wanted, gradients = logits_and_gradients(model)
    with use_tuned_rope(model) as patch:
        assert patch.fused == ATTENTION[1:]
        assert list(patch.unfused) == [ATTENTION[0]]
        assert UNFIT[change] in patch.unfused[ATTENTION[0]]
        found, found_gradients = logits_and_gradients(model)
    assert len(calls) == LAYERS - 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert_gradients(found_gradients, gradients)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("Cohere", {"use_qk_norm": True}, "q_norm gives, and it must have one parameter, of one axis"),  # a LayerNorm
        (
            "HunYuanDenseV1",
            {},
            "q_proj gives, and it must have one parameter, of one axis",
        ),  # the rotation comes before the norm
        ("Phi", {"qk_layernorm": True}, "is seen between its norm and the rotation"),  # only a part of a head rotates
    ],
)
def test_other_models_with_norms_are_rotated_as_before(
    name: str, more: dict[str, Any], why: str, calls: list[dict[str, Any]]
) -> None:
    model = first_model(Family(name, {"num_key_value_heads": 2, "head_dim": 16, **more}, 16))
    forward = type(attentions(model)[0]).forward
    wanted, gradients = logits_and_gradients(model)
    with use_tuned_rope(model) as patch:
        assert patch.fused == ()
        assert all(why in reason for reason in patch.unfused.values()), patch.unfused
        assert list(patch.unfused) == list(ATTENTION)
        assert type(attentions(model)[0]).forward is forward
        found, found_gradients = logits_and_gradients(model)
    assert not calls
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert_gradients(found_gradients, gradients)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_is_fused_and_recompiles_once_undone(calls: list[dict[str, Any]]) -> None:
    model = model_of(SOME_LAYERS)
    wanted, gradients = own_results(SOME_LAYERS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits_and_gradients(compiled)[0], wanted, rtol=1e-4, atol=1e-4)
    with use_tuned_rope(model):
        found, found_gradients = logits_and_gradients(compiled)
        fused = len(calls)
        assert fused == LAYERS - 1
    undone = logits_and_gradients(compiled)[0]
    assert len(calls) == fused
    torch.testing.assert_close([found, undone], [wanted, wanted], rtol=1e-4, atol=1e-4)
    assert_gradients(found_gradients, {f"_orig_mod.{name}": gradient for name, gradient in gradients.items()})


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_training_gives_the_models_own_gradients(reentrant: bool, calls: list[dict[str, Any]]) -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**padded_batch(), use_cache=False).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    wanted, model = gradients(model_of(QWEN)), model_of(QWEN)
    with use_tuned_rope(model):
        found = gradients(model)
    assert len(calls) == 2 * LAYERS  # the checkpoint runs the forward again
    assert_gradients(found, wanted)


@pytest.mark.parametrize("trained", ["norms", "projections"])
def test_only_what_is_trained_gets_a_gradient(trained: str, calls: list[dict[str, Any]]) -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        part = ("q_norm", "k_norm") if trained == "norms" else ("q_proj",)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(one in name for one in part))
        model(**padded_batch()).logits.square().mean().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    wanted, model = gradients(model_of(OLMO)), model_of(OLMO)
    with use_tuned_rope(model):
        found = gradients(model)
    assert len(calls) == LAYERS
    assert found.keys() == wanted.keys()
    assert_gradients(found, wanted)


@pytest.mark.parametrize("family", [QWEN, GEMMA], ids=lambda family: family.name)
def test_under_autocast_errors_are_no_more_than_the_models_own(family: Family, calls: list[dict[str, Any]]) -> None:
    model = model_of(family, initializer_range=SMOOTH)
    exact, exact_gradients = logits_and_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, their_gradients = logits_and_gradients(model)
    with use_tuned_rope(model), torch.autocast("cpu", torch.bfloat16):
        ours, our_gradients = logits_and_gradients(model)
    assert [call["tensors"][0].dtype for call in calls] == [torch.bfloat16] * LAYERS
    assert relative_error(ours, exact) <= AS_GOOD * relative_error(theirs, exact)
    whole = [torch.cat([t.flatten() for t in g.values()]) for g in (our_gradients, their_gradients, exact_gradients)]
    assert relative_error(whole[0], whole[2]) <= AS_GOOD * relative_error(whole[1], whole[2])


def test_a_norm_that_widens_the_dtype_is_called_where_autocast_does_not_narrow_it(calls: list[dict[str, Any]]) -> None:
    model = model_of(QWEN)
    attention = attentions(model)[0].bfloat16()
    attention.q_norm.float()
    attention.config._attn_implementation = "eager"
    x, angles = torch.randn(2, 5, 64).bfloat16(), (torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    attention.v_proj.float()

    def run() -> Any:
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError) as raised,
        ):  # the error is the model's: its dtypes do not fit together
            attention(x, angles, None)
        return str(raised.value)

    wanted = run()
    with use_tuned_rope(model):
        assert run() == wanted
    assert not calls


def test_calls_that_no_kernel_takes_are_normalised_by_the_modules(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in (QWEN, OLMO):
        model = model_of(family)
        wanted = logits(model)
        with use_tuned_rope(model), monkeypatch.context() as patched:
            patched.setattr("tuned.compat.fusing.rotate", lambda *_: None)
            found = logits(model)
        assert not calls
        torch.testing.assert_close(found, wanted)
