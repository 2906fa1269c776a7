"""use_tuned_rope on a real GPU: kernels serve transformers' models, and err no more than the models' functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tuned
from tests.support.transformers_models import (
    FAMILIES,
    LAYERS,
    NORMED,
    ROUNDED_ONCE,
    SMOOTH,
    Family,
    generated,
    logits_and_gradients,
    rotation_errors,
)
from tests.support.transformers_models import (
    relative_error as error,
)
from tuned import dispatch
from tuned.compat.transformers import use_tuned_rope

pytestmark = [
    pytest.mark.gpu_sample,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from transformers' own imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # Inductor warns if TF32 exists and is not used; these tests compare float32 with float32, so they must not use it.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
WORSE = 1.2  # times the error of the model's own function that counts as good: each error is one draw of roundings
CHOSEN = [family for family in FAMILIES if family.name in ("Llama", "GPTNeoX", "Glm")]  # whole, partial, interleaved
on_chosen = pytest.mark.parametrize("family", CHOSEN, ids=lambda family: family.name)
# Norms of each head, with 1 + weight, of all heads, and of heads of which a part rotates.
on_normed = pytest.mark.parametrize("family", NORMED[:4], ids=lambda family: family.name)
ATTENTION = tuple(f"model.layers.{layer}.self_attn" for layer in range(LAYERS))


def model_of(family: Family, dtype: torch.dtype, **more: Any) -> Any:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    return family.model(hidden_size=256, head_dim=64, **more).to("cuda", dtype)


def rules_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    rules: list[str] = []
    function = getattr(dispatch, name)

    def explained(q: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        if q.is_cuda:
            rules.append(tuned.explain(function, q, *others, **kwargs).rule)
        return function(q, *others, **kwargs)

    monkeypatch.setattr(dispatch, name, explained)
    return rules


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules by which each call of rope_qk on the GPU was served."""
    return rules_of(monkeypatch, "rope_qk")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules by which each call of qk_norm_rope on the GPU was served."""
    return rules_of(monkeypatch, "qk_norm_rope")


@on_chosen
def test_in_float32_logits_gradients_and_tokens_are_the_models_own(family: Family, served: list[str]) -> None:
    model = model_of(family, torch.float32)
    wanted, gradients = logits_and_gradients(model)
    tokens = generated(model)
    with use_tuned_rope(model):
        found, found_gradients = logits_and_gradients(model)
        assert len(served) == LAYERS
        assert torch.equal(generated(model), tokens)
    assert len(served) == LAYERS * 9
    assert "eager" not in served
    assert error(found, wanted) < 1e-5
    for name, gradient in gradients.items():
        assert error(found_gradients[name], gradient) < 1e-4, name


@on_chosen
def test_in_bfloat16_logits_and_gradients_err_no_more_than_the_models_own(family: Family, served: list[str]) -> None:
    model = model_of(family, torch.bfloat16, initializer_range=SMOOTH)
    exact, exact_gradients = logits_and_gradients(copy.deepcopy(model).double())
    theirs, their_gradients = logits_and_gradients(model)
    with use_tuned_rope(model):
        ours, our_gradients = logits_and_gradients(model)
    assert len(served) == LAYERS
    assert "eager" not in served
    assert error(ours, exact) <= WORSE * error(theirs, exact)
    whole = {
        name: torch.cat([t.flatten().double() for t in g.values()])
        for name, g in (("ours", our_gradients), ("theirs", their_gradients), ("exact", exact_gradients))
    }
    assert error(whole["ours"], whole["exact"]) <= WORSE * error(whole["theirs"], whole["exact"])


@on_chosen
def test_in_bfloat16_the_function_errs_less_than_the_models_own(family: Family) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    for ours, theirs in rotation_errors(family, "cuda"):
        assert ours <= ROUNDED_ONCE * theirs


@on_chosen
def test_a_compiled_model_is_served(family: Family) -> None:
    model = model_of(family, torch.float32)
    wanted, gradients = logits_and_gradients(model)
    torch._dynamo.reset()
    try:
        with use_tuned_rope(model):
            found, found_gradients = logits_and_gradients(torch.compile(model, fullgraph=True))
    finally:
        torch._dynamo.reset()
    assert error(found, wanted) < 1e-4
    for name, gradient in gradients.items():
        assert error(found_gradients[f"_orig_mod.{name}"], gradient) < 1e-3, name


# Models that normalise queries and keys


def normed_model_of(family: Family, dtype: torch.dtype, **more: Any) -> Any:
    """The weights of norms are neither all 1 nor all 0."""
    model = model_of(family, dtype, **more)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_((0.3 * torch.randn(weight.shape, generator=generator)).to(weight))
    return model


@on_normed
def test_norms_in_the_launch_give_the_models_own_logits_gradients_and_tokens(
    family: Family, served: list[str], fused: list[str]
) -> None:
    model = normed_model_of(family, torch.float32)
    wanted, gradients = logits_and_gradients(model)
    tokens = generated(model)
    with use_tuned_rope(model) as patch:
        assert (patch.fused, patch.unfused) == (ATTENTION, {})
        found, found_gradients = logits_and_gradients(model)
        assert len(fused) == LAYERS
        assert torch.equal(generated(model), tokens)
    assert (len(fused), len(served)) == (LAYERS * 9, 0)
    assert "eager" not in fused
    assert error(found, wanted) < 1e-5
    for name, gradient in gradients.items():
        assert error(found_gradients[name], gradient) < 1e-4, name


@on_normed
def test_norms_in_the_launch_err_no_more_than_the_models_own_in_bfloat16(family: Family, fused: list[str]) -> None:
    model = normed_model_of(family, torch.bfloat16, initializer_range=SMOOTH)
    exact, exact_gradients = logits_and_gradients(copy.deepcopy(model).double())
    theirs, their_gradients = logits_and_gradients(model)
    with use_tuned_rope(model):
        ours, our_gradients = logits_and_gradients(model)
    assert len(fused) == LAYERS
    assert "eager" not in fused
    assert error(ours, exact) <= WORSE * error(theirs, exact)
    whole = {
        name: torch.cat([t.flatten().double() for t in g.values()])
        for name, g in (("ours", our_gradients), ("theirs", their_gradients), ("exact", exact_gradients))
    }
    assert error(whole["ours"], whole["exact"]) <= WORSE * error(whole["theirs"], whole["exact"])


@on_normed
def test_norms_in_the_launch_train_under_autocast(family: Family, fused: list[str]) -> None:
    model = normed_model_of(family, torch.float32, initializer_range=SMOOTH)
    exact, exact_gradients = logits_and_gradients(model)
    with torch.autocast("cuda", torch.bfloat16):
        theirs, their_gradients = logits_and_gradients(model)
        with use_tuned_rope(model):
            ours, our_gradients = logits_and_gradients(model)
    assert len(fused) == LAYERS
    assert "eager" not in fused
    assert error(ours, exact) <= WORSE * error(theirs, exact)
    whole = [torch.cat([t.flatten() for t in g.values()]) for g in (our_gradients, their_gradients, exact_gradients)]
    assert error(whole[0], whole[2]) <= WORSE * error(whole[1], whole[2])


@on_normed
def test_a_compiled_model_has_norms_in_the_launch(family: Family) -> None:
    model = normed_model_of(family, torch.float32)
    wanted, gradients = logits_and_gradients(model)
    torch._dynamo.reset()
    try:
        with use_tuned_rope(model):
            found, found_gradients = logits_and_gradients(torch.compile(model, fullgraph=True))
    finally:
        torch._dynamo.reset()
    assert error(found, wanted) < 1e-4
    for name, gradient in gradients.items():
        assert error(found_gradients[f"_orig_mod.{name}"], gradient) < 1e-3, name
