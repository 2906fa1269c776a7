"""use_tuned_rope: transformers' models give the same results, by rope_qk, and get their own function back by undo."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from typing import Any

import pytest
import torch

from tests.support.transformers_models import (
    FAMILIES,
    LAYERS,
    ROUNDED_ONCE,
    Family,
    generated,
    logits_and_gradients,
    rotation_errors,
)
from tuned import dispatch
from tuned.compat.transformers import RotaryPosEmb, kernel_mapping, register_kernel_layer, use_tuned_rope

LLAMA = FAMILIES[0]
TOKENS = 4  # generated tokens: one by the prompt, and three by the cache
all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from transformers' own imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@functools.cache
def model_of(family: Family) -> Any:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    return family.model()


@functools.cache
def unpatched(family: Family) -> tuple[Any, ...]:
    model = model_of(family)
    return *logits_and_gradients(model), generated(model, TOKENS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of rope_qk and qk_norm_rope, in order."""
    seen: list[dict[str, Any]] = []
    rope_qk, qk_norm_rope = dispatch.rope_qk, dispatch.qk_norm_rope

    def seeing(q: torch.Tensor, k: torch.Tensor | None, **kwargs: Any) -> Any:
        seen.append({"q": q, "k": k, **kwargs})
        return rope_qk(q, k, **kwargs)

    def seeing_norms(q: torch.Tensor, k: torch.Tensor | None, *weights: torch.Tensor, **kwargs: Any) -> Any:
        seen.append({"q": q, "k": k, "weights": weights, **kwargs})
        return qk_norm_rope(q, k, *weights, **kwargs)

    monkeypatch.setattr(dispatch, "rope_qk", seeing)
    monkeypatch.setattr(dispatch, "qk_norm_rope", seeing_norms)
    return seen


def own_function(model: Any) -> Any:
    return vars(sys.modules[type(model).__module__])["apply_rotary_pos_emb"]


def angles(batch: int, tokens: int, width: int) -> dict[str, torch.Tensor]:
    return {"cos": torch.randn(batch, tokens, width), "sin": torch.randn(batch, tokens, width)}


@all_families
def test_logits_and_gradients_are_the_models_own(family: Family, calls: list[dict[str, Any]]) -> None:
    logits, gradients, _ = unpatched(family)
    with use_tuned_rope(model_of(family)):
        calls.clear()  # without the calls that find the style
        found, found_gradients = logits_and_gradients(model_of(family))
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    for name, wanted in gradients.items():
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found_gradients[name], wanted, rtol=1e-4, atol=1e-4 * scale, msg=name)
    assert len(calls) == LAYERS
    assert [len(call.get("weights", ())) for call in calls] == [2 if family.normed else 0] * LAYERS
    for call in calls:  # each call reads half of the angles, and heads are rows of q as it lies in memory
        assert call["cos"].shape == (2, 7, family.rotary_dim // 2)
        assert (call["interleaved"], call["angle_entries"]) == (family.interleaved, "pair")
        assert (call["q"].shape[:2], call["k"].shape[:2]) == ((2, 7), (2, 7))


@all_families
def test_generate_gives_the_models_own_tokens(family: Family, calls: list[dict[str, Any]]) -> None:
    model = model_of(family)
    wanted = unpatched(family)[2]
    with use_tuned_rope(model):
        calls.clear()
        found = generated(model, TOKENS)
    assert torch.equal(found, wanted)
    assert len(calls) == LAYERS * TOKENS
    assert not torch.equal(found[0, -TOKENS:], found[1, -TOKENS:])


def test_in_low_precision_the_error_is_no_more_than_the_models_own() -> None:
    model = model_of(LLAMA)
    function, torch_dtype = own_function(model), torch.bfloat16
    q, k = torch.randn(2, 4, 9, 16, dtype=torch_dtype), torch.randn(2, 2, 9, 16, dtype=torch_dtype)
    freqs = torch.rand(2, 9, 8).repeat(1, 1, 2) * 6
    cos, sin = freqs.cos().to(torch_dtype), freqs.sin().to(torch_dtype)
    exact = function(q.double(), k.double(), cos.double(), sin.double())
    theirs = function(q, k, cos, sin)
    with use_tuned_rope(model):
        ours = own_function(model)(q, k, cos, sin)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == torch_dtype
        assert torch.equal(a, c.to(torch_dtype)) or (a - c).abs().mean() < 0.9 * (b - c).abs().mean()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("Llama", "GPTNeoX", "Glm")], ids=lambda f: f.name)
def test_in_bfloat16_the_function_errs_less_than_the_models_own(family: Family) -> None:
    for ours, theirs in rotation_errors(family, "cpu"):
        assert ours <= ROUNDED_ONCE * theirs


def test_undo_restores_the_very_function_and_may_be_called_again() -> None:
    model = model_of(LLAMA)
    function = own_function(model)
    patch = use_tuned_rope(model)
    assert patch.functions == ("transformers.models.llama.modeling_llama.apply_rotary_pos_emb",)
    assert patch.kept == {}
    assert own_function(model) is not function
    patch.undo()
    assert own_function(model) is function
    patch.undo()
    assert own_function(model) is function


def test_two_models_of_a_file_and_nested_patches_need_as_many_undone(calls: list[dict[str, Any]]) -> None:
    one, other = model_of(LLAMA), LLAMA.model()
    function = own_function(one)
    first, second = use_tuned_rope(one), use_tuned_rope(other)
    first.undo()
    calls.clear()
    logits_and_gradients(one)  # the patch is of the file, which both models share
    assert len(calls) == LAYERS
    with use_tuned_rope(other):
        pass
    assert own_function(one) is not function
    second.undo()
    assert own_function(one) is function


def test_models_of_two_files_are_patched_apart() -> None:
    one, other = model_of(LLAMA), model_of(FAMILIES[2])
    functions = own_function(one), own_function(other)
    with use_tuned_rope(torch.nn.ModuleList([one, other])) as patch:
        assert len(patch.functions) == 2
        with use_tuned_rope(one):
            pass
        assert own_function(one) is not functions[0]
        assert own_function(other) is not functions[1]
    assert (own_function(one), own_function(other)) == functions


def test_an_exception_in_the_block_undoes_it() -> None:
    model = model_of(LLAMA)
    function = own_function(model)
    with pytest.raises(KeyError, match="theirs"), use_tuned_rope(model):
        raise KeyError("theirs")
    assert own_function(model) is function


def test_what_another_patch_replaced_since_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LLAMA)
    function = own_function(model)
    patch = use_tuned_rope(model)
    with monkeypatch.context() as other:
        other.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", len)
        with pytest.raises(
            RuntimeError, match=r"must still be what use_tuned_rope put there, got <built-in function len>"
        ):
            patch.undo()
        assert own_function(model) is len
    patch.undo()
    assert own_function(model) is function


def test_a_compiled_model_is_served_and_recompiles_once_undone(calls: list[dict[str, Any]]) -> None:
    model = LLAMA.model(num_hidden_layers=1)
    wanted, gradients = logits_and_gradients(model)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with use_tuned_rope(model):
            calls.clear()
            found, found_gradients = logits_and_gradients(compiled)
            assert len(calls) == 1
        undone = logits_and_gradients(compiled)[0]
        assert len(calls) == 1
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close([found, undone], [wanted, wanted], rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        one = found_gradients[f"_orig_mod.{name}"]
        torch.testing.assert_close(one, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())


def test_the_callers_random_numbers_and_gradients_stay_as_they_were() -> None:
    model = model_of(LLAMA)
    state = torch.random.get_rng_state()
    with use_tuned_rope(model):
        pass
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


# Functions that stand for those of other models; they have transformers' name and are called in its way.

HALVES = "torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1)"
ADJACENT = "torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)"
ENTRIES = {
    "feature": "t",
    "half": "t[..., : t.shape[-1] // 2]",
    "pair": "t",
}
SIGNATURES = {
    "q, k, cos, sin, unsqueeze_dim=1": "return turn(q), turn(k)",
    "q, k, cos, sin, position_ids=None, unsqueeze_dim=1": "return turn(q), turn(k)",
    "q, k=None, cos=None, sin=None, unsqueeze_dim=1": "return turn(q) if k is None else (turn(q), turn(k))",
    "x, cos, sin, unsqueeze_dim=1": "return turn(x)",
}
SOURCE = """
import torch

called = []

def partner(t):
    return {partner}

def spread(t):
    return {spread}

def apply_rotary_pos_emb({signature}):
    called.append(1)
    cos, sin = (spread(t).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    width = cos.shape[-1]
    def turn(t):
        first, past = {split}
        turned = first * cos {sign} partner(first) * sin
        return torch.cat({join}, dim=-1)
    {end}

class Attention(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return apply_rotary_pos_emb(*args, **kwargs)
"""
PLAIN = {
    "partner": HALVES,
    "spread": "t",
    "signature": next(iter(SIGNATURES)),
    "split": "(t, None)",
    "join": "(turned,)",
    "sign": "+",
    "end": "return turn(q), turn(k)",
}
SPLITS = {
    None: ("(t, None)", "(turned,)"),
    "first": ("(t[..., :width], t[..., width:])", "(turned, past)"),
    "last": ("(t[..., t.shape[-1] - width :], t[..., : t.shape[-1] - width])", "(past, turned)"),
}


def file_of(source: str) -> types.ModuleType:
    module = types.ModuleType("modeling_made_up")
    exec(source, vars(module))
    return module


def made_up(
    interleaved: bool = False,
    entries: str = "feature",
    conjugate: bool = False,
    rotated: str | None = None,
    signature: str = next(iter(SIGNATURES)),
) -> types.ModuleType:
    spread = ENTRIES[entries]
    if entries != "feature":
        spread = (
            f"({spread}).repeat_interleave(2, dim=-1)" if interleaved else f"torch.cat(({spread}, {spread}), dim=-1)"
        )
    split, join = SPLITS[rotated]
    return file_of(
        SOURCE.format(
            partner=ADJACENT if interleaved else HALVES,
            spread=spread,
            signature=signature,
            split=split,
            join=join,
            sign="-" if conjugate else "+",
            end=SIGNATURES[signature],
        )
    )


STYLES = [
    *itertools.product((False, True), ENTRIES, (False, True), SPLITS, [next(iter(SIGNATURES))]),
    *((False, "feature", False, None, signature) for signature in SIGNATURES),
]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_style_is_found_whatever_the_file(style: tuple[Any, ...], calls: list[dict[str, Any]]) -> None:
    file = made_up(*style)
    _, entries, _, rotated, signature = style
    attention = file.Attention()
    head_dim, width = 16 if rotated is None else 24, 8 if entries == "pair" else 16
    given = angles(2, 5, width)
    q, k = torch.randn(2, 3, 5, head_dim), torch.randn(2, 1, 5, head_dim)
    tensors = (q,) if signature.startswith("x") else (q, k)
    wanted = attention(*tensors, **given)
    with use_tuned_rope(attention):
        file.called.clear()
        calls.clear()
        found = attention(*tensors, **given)
        shared = attention(*tensors, **{name: t[:1] for name, t in given.items()})
        beside = attention(*(t.transpose(1, 2) for t in tensors), **given, unsqueeze_dim=2)
        assert (len(calls), file.called) == (3, [])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared, attention(*tensors, **{name: t[:1] for name, t in given.items()}))
    turned_back = beside.transpose(1, 2) if len(tensors) == 1 else tuple(t.transpose(1, 2) for t in beside)
    torch.testing.assert_close(turned_back, wanted, rtol=1e-5, atol=1e-5)


def test_keys_may_be_absent_where_the_function_lets_them(calls: list[dict[str, Any]]) -> None:
    attention = made_up(signature="q, k=None, cos=None, sin=None, unsqueeze_dim=1").Attention()
    q, given = torch.randn(2, 3, 5, 16), angles(2, 5, 16)
    wanted = attention(q, **given)
    with use_tuned_rope(attention):
        calls.clear()
        torch.testing.assert_close(attention(q, **given), wanted)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("q", "k", "cos", "unsqueeze_dim"),
    [
        ((2, 3, 5, 16), (2, 1, 5, 16), (2, 5, 16), -3),
        ((3, 5, 16), (1, 5, 16), (5, 16), 0),  # no batch
        ((2, 3, 5, 16), (2, 1, 5, 16), (2, 1, 16), 1),  # one position for all tokens
        ((1, 3, 5, 16), (1, 1, 5, 16), (2, 5, 16), 1),  # only cos has a batch
        ((2, 3, 1, 16), (2, 1, 5, 16), (2, 1, 16), 1),  # fewer queries than keys
        ((2, 3, 5, 16), (1, 1, 5, 16), (2, 5, 16), 1),  # keys shared by the batch
    ],
)
def test_shapes_that_no_kernel_takes_go_to_the_models_own_function(
    q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], unsqueeze_dim: int, calls: list[dict[str, Any]]
) -> None:
    file = made_up()
    attention = file.Attention()
    tensors = torch.randn(q), torch.randn(k)
    given = {"cos": torch.randn(cos), "sin": torch.randn(cos), "unsqueeze_dim": unsqueeze_dim}
    wanted = attention(*tensors, **given)
    with use_tuned_rope(attention):
        file.called.clear()
        calls.clear()
        found = attention(*tensors, **given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (calls, file.called) == ([], [1])


def test_a_wider_head_raises_what_the_model_raises_where_its_function_has_no_rest() -> None:
    attention = made_up().Attention()
    q = torch.randn(2, 3, 5, 24)
    with use_tuned_rope(attention), pytest.raises(RuntimeError, match="must match the size"):
        attention(q, q, **angles(2, 5, 16))


EMBEDDING = """
class MadeUpRotaryEmbedding(torch.nn.Module):
    def forward(self, x, position_ids):
        freqs = position_ids[..., None] * torch.tensor([1.0, 0.1])
        freqs = torch.cat((freqs, {second}), dim=-1)
        return freqs.cos(), freqs.sin()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.embedding = Attention(), MadeUpRotaryEmbedding()
"""


ANOTHER = "\nclass AnotherRotaryEmbedding(MadeUpRotaryEmbedding):\n    pass\n"  # belongs to another model of the file


@pytest.mark.parametrize(
    ("second", "more", "entries", "width"),
    [("freqs", "", "pair", 8), ("2 * freqs", "", "feature", 16), ("freqs", ANOTHER, "feature", 16)],
)
def test_half_of_the_angles_is_read_only_where_all_models_of_the_file_make_equal_halves(
    second: str, more: str, entries: str, width: int, calls: list[dict[str, Any]]
) -> None:
    file = file_of(SOURCE.format(**PLAIN) + EMBEDDING.format(second=second) + more)
    model = file.Model()
    q, one = torch.randn(2, 3, 5, 16), torch.randn(2, 5, 8)
    with use_tuned_rope(model):
        calls.clear()
        model.attention(q, q, torch.cat((one, one), -1), torch.cat((one, one), -1))
    assert (calls[0]["angle_entries"], calls[0]["cos"].shape[-1]) == (entries, width)


REFUSED = {
    "another rotation": (
        SOURCE.replace("{partner}", "t.flip(-1)"),
        "its results are those of rotating neither halves nor adjacent pairs",
    ),
    "another call": (
        SOURCE.replace("({signature})", "(q, k, freqs_cis, unsqueeze_dim=1)"),
        r"it takes \(q, k, freqs_cis,",
    ),
    "no such function": (SOURCE.replace("apply_rotary_pos_emb", "turned"), "no module that calls such a function"),
    "one of two": (
        SOURCE.replace("class Att", "def apply_rotary_pos_emb_vision(q):\n    return q\n\nclass Att").replace(
            "        return apply", "        apply_rotary_pos_emb_vision(args[0])\n        return apply"
        ),
        r"modeling_made_up.apply_rotary_pos_emb_vision: it takes \(q\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_with_the_name_of_the_class(case: str) -> None:
    source, why = REFUSED[case]
    file = file_of(source.format(**PLAIN))
    before = dict(vars(file))
    with pytest.raises(ValueError, match=rf"^Attention must have attention whose .*{why}"):
        use_tuned_rope(file.Attention())
    assert vars(file) == before


def test_a_file_with_a_second_function_is_served_where_its_own_is_known(calls: list[dict[str, Any]]) -> None:
    known, unknown = made_up(), file_of(SOURCE.format(**PLAIN | {"partner": "t.flip(-1)"}))
    with use_tuned_rope(torch.nn.ModuleList([known.Attention(), unknown.Attention()])) as patch:
        assert patch.functions == ("modeling_made_up.apply_rotary_pos_emb",)
        assert "neither" in patch.kept["modeling_made_up.apply_rotary_pos_emb"]
        calls.clear()
        q = torch.randn(2, 3, 5, 16)
        known.Attention()(q, q, **angles(2, 5, 16))
    assert len(calls) == 1


def test_a_configuration_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        use_tuned_rope({})  # type: ignore[arg-type]


# The layer for the kernels package


def test_the_layer_is_what_the_kernels_package_demands_and_serves_training(calls: list[dict[str, Any]]) -> None:
    kernels = pytest.importorskip("kernels", reason="the kernels package is not installed")
    file = made_up()
    file.apply_rotary_pos_emb = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(file.apply_rotary_pos_emb)
    kernels.use_kernelized_func(file.apply_rotary_pos_emb)(file.Attention)
    attention = file.Attention()
    q, k = (torch.randn(2, heads, 5, 16, requires_grad=True) for heads in (3, 1))
    given = angles(2, 5, 16)
    wanted = attention(q, k, **given)
    gradients = torch.autograd.grad([t.square().sum() for t in wanted], (q, k))
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    file.called.clear()
    with kernels.use_kernel_mapping(kernel_mapping("cpu")):
        kernels.kernelize(attention, mode=mode, device="cpu", use_fallback=False)
    found = attention(q, k, **given)
    assert (len(calls), file.called) == (1, [])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad([t.square().sum() for t in found], (q, k)), gradients)

    layer = file.apply_rotary_pos_emb  # undo restores the decorated, kernelized function
    with use_tuned_rope(attention) as patch:
        assert patch.functions == ("modeling_made_up.apply_rotary_pos_emb",)
        assert file.apply_rotary_pos_emb is not layer
    assert file.apply_rotary_pos_emb is layer


def test_the_layer_is_registered_for_the_devices_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kernels", reason="the kernels package is not installed")
    registered: list[dict[str, Any]] = []
    monkeypatch.setattr("kernels.register_kernel_mapping", registered.append)
    register_kernel_layer()
    register_kernel_layer("cuda", "rocm")
    assert [list(mapping["rotary_pos_emb"]) for mapping in registered] == [["cuda"], ["cuda", "rocm"]]
    assert registered[0]["rotary_pos_emb"]["cuda"].load() is RotaryPosEmb


def test_without_the_kernels_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match=r"pip install kernels; use_tuned_rope\(model\) does without"):
        register_kernel_layer()


def test_the_layer_refuses_angles_of_another_width() -> None:
    q = torch.randn(2, 3, 5, 16)
    with pytest.raises(ValueError, match=r"cos and sin \[b or 1, s, d\], got .*\(2, 5, 8\)"):
        RotaryPosEmb()(q, q, **angles(2, 5, 8))
