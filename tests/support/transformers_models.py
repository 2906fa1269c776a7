"""Small models of transformers with random weights, made from their configurations: nothing is downloaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

LAYERS, VOCABULARY = 2, 99
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for attention to prefer some tokens to others
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_WIDE: dict[str, Any] = _GROUPED | {"head_dim": 16}


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models, and what its attention must ask rope_qk for."""

    name: str  # of its classes, without the suffixes Config and ForCausalLM
    arguments: dict[str, Any]  # arguments of its configuration
    rotary_dim: int
    interleaved: bool = False
    normed: bool = False  # whether queries and keys are normalised before the rotation

    def model(self, **more: Any) -> Any:
        import transformers  # noqa: PLC0415 - an extra, and seconds to import

        config = getattr(transformers, f"{self.name}Config")(**_SIZES | self.arguments | more)
        torch.manual_seed(0)
        return getattr(transformers, f"{self.name.removesuffix('Text')}ForCausalLM")(config).eval()


FAMILIES = (
    Family("Llama", _GROUPED, 16),
    Family("Mistral", _WIDE, 16),
    Family("Qwen2", _GROUPED, 16),
    Family("Qwen3", _WIDE, 16, normed=True),
    Family("Gemma", _WIDE, 16),
    Family("Gemma2", _WIDE, 16),
    Family("Gemma3Text", _WIDE | {"layer_types": ["sliding_attention", "full_attention"]}, 16, normed=True),
    Family("GPTNeoX", {"rotary_pct": 0.5}, 8),
    Family("Phi", _GROUPED | {"partial_rotary_factor": 0.5}, 8),
    Family("Glm", _WIDE | {"partial_rotary_factor": 0.5}, 8, interleaved=True),
    Family("Olmo2", _WIDE, 16, normed=True),  # normalises all heads of a token together
    Family(  # norms under an if, and a partial rotation; without expert layers, which do not work in float64
        "Glm4Moe",
        _WIDE | {"use_qk_norm": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": LAYERS},
        8,
        normed=True,
    ),
    Family("Lfm2", _WIDE, 16, normed=True),  # its norms have another name
)
NORMED = tuple(family for family in FAMILIES if family.normed)
# Rotates in its first layer only, and normalises in both.
SOME_LAYERS = Family(
    "Exaone4", _WIDE | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, 16, normed=True
)


# The initializer range for comparing errors. With 0.2 attention almost chooses a single token, and a rounding can change which
# one, so that the errors scatter widely: over ten seeds the ratio of the two functions' errors was from 0.6 to 1.9 on a CPU.
# With this range it was from 0.92 to 1.06.
SMOOTH = 0.06


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square error, relative to the root mean square of ``exact``."""
    return ((found.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt()).item()


def padded_batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two prompts of 3 and 7 tokens, padded on the left, so that the positions of their tokens differ."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the padded batch without its padding, and the gradients of a loss over them for every parameter."""
    batch = padded_batch(str(model.device))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(**batch, position_ids=positions).logits[batch["attention_mask"].bool()]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad((logits * weight).sum(), list(named.values()))
    return logits.detach(), dict(zip(named, gradients, strict=True))


def generated(model: Any, tokens: int = 8) -> torch.Tensor:
    """The prompts continued by ``tokens`` tokens, always the likeliest."""
    return model.generate(**padded_batch(str(model.device)), max_new_tokens=tokens, do_sample=False)  # type: ignore[no-any-return]


ROUNDED_ONCE = (
    0.8  # times the error of a function that rounds both products and their sum to bfloat16: 0.68 to 0.72 on a CPU
)


def rotation_errors(family: Family, device: str) -> list[tuple[float, float]]:
    """Root mean square errors in bfloat16 of tuned's function and of the model's: for q, k and the gradients of both."""
    from tuned.compat import rotary_style  # noqa: PLC0415 - with transformers only

    model = family.model()
    namespace = vars(sys.modules[type(model).__module__])
    own = namespace["apply_rotary_pos_emb"]
    ours = rotary_style.replacement(model, namespace, "apply_rotary_pos_emb")
    generator = torch.Generator().manual_seed(0)
    head_dim = 64 * 16 // family.rotary_dim  # the share that rotates is that of the model

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    q, k, *weights = (random(2, heads, 33, head_dim) for heads in (4, 2, 4, 2))
    radians = 30 * torch.rand(1, 33, 32, generator=generator)
    radians = radians.repeat_interleave(2, -1) if family.interleaved else torch.cat((radians, radians), -1)
    cos, sin = radians.cos().to(device, torch.bfloat16), radians.sin().to(device, torch.bfloat16)

    def run(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k)]
        out = function(*leaves, cos.to(dtype), sin.to(dtype))
        return [*out, *torch.autograd.grad(out, leaves, [t.to(dtype) for t in weights])]

    exact = run(own, torch.float64)
    found = [run(function, torch.bfloat16) for function in (ours, own)]
    return [
        ((a.double() - e).square().mean().sqrt().item(), (b.double() - e).square().mean().sqrt().item())
        for a, b, e in zip(*found, exact, strict=True)
    ]
