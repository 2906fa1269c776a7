"""Small models of transformers with random weights, made from their configurations: nothing is downloaded."""

from __future__ import annotations

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
    "initializer_range": 0.2,  # so large that attention looks at some tokens more than at others
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_WIDE: dict[str, Any] = _GROUPED | {"head_dim": 16}


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models, and what its attention must ask rope_qk for."""

    name: str  # of its classes, without Config and ForCausalLM
    arguments: dict[str, Any]  # of its configuration
    rotary_dim: int
    interleaved: bool = False

    def model(self, **more: Any) -> Any:
        import transformers  # noqa: PLC0415 - an extra, and seconds to import

        config = getattr(transformers, f"{self.name}Config")(**_SIZES | self.arguments | more)
        torch.manual_seed(0)
        return getattr(transformers, f"{self.name.removesuffix('Text')}ForCausalLM")(config).eval()


FAMILIES = (
    Family("Llama", _GROUPED, 16),
    Family("Mistral", _WIDE, 16),
    Family("Qwen2", _GROUPED, 16),
    Family("Qwen3", _WIDE, 16),
    Family("Gemma", _WIDE, 16),
    Family("Gemma2", _WIDE, 16),
    Family("Gemma3Text", _WIDE | {"layer_types": ["sliding_attention", "full_attention"]}, 16),
    Family("GPTNeoX", {"rotary_pct": 0.5}, 8),
    Family("Phi", _GROUPED | {"partial_rotary_factor": 0.5}, 8),
    Family("Glm", _WIDE | {"partial_rotary_factor": 0.5}, 8, interleaved=True),
)


def padded_batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two prompts of 3 and 7 tokens, padded on the left, so that the positions of their tokens differ."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of the padded batch, and of a loss over its logits for every parameter; the logits of padding are dropped."""
    batch = padded_batch(str(model.device))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(**batch, position_ids=positions).logits[batch["attention_mask"].bool()]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad((logits * weight).sum(), list(named.values()))
    return logits.detach(), dict(zip(named, gradients, strict=True))


def generated(model: Any) -> torch.Tensor:
    """Eight more tokens a prompt, the likeliest each time."""
    return model.generate(**padded_batch(str(model.device)), max_new_tokens=8, do_sample=False)  # type: ignore[no-any-return]
