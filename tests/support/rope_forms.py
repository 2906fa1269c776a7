"""RoPE calls in all their forms."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.rope_calls import Case

B, S, H, K, D = 2, 5, 4, 2, 16


def angles(entries: int = D // 2) -> torch.Tensor:
    return torch.rand(S + 3, entries) * 6


def turned(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The formula for [b, s, h, d], style half and one entry a pair, in operators that autograd differentiates."""
    cos, sin = (
        f(freqs[: x.shape[1]].to(torch.promote_types(x.dtype, torch.float32)))[:, None] for f in (torch.cos, torch.sin)
    )
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def leaves(*heads: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(B, S, h, D, dtype=dtype, requires_grad=True) for h in heads]


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


FORMS = {
    "conjugate": Case(conjugate=True, entries="feature"),
    "conjugate pairs": Case(conjugate=True),
    "last": Case(rotated="last", rotary=8),
    "proportional": Case(rotated="proportional", rotary=8),
    "interleaved": Case(interleaved=True, entries="feature"),
    "ids": Case(place="ids", source="cache"),
    "shared ids": Case("sbhd", place="shared"),
    "starts": Case(place="starts", source="cos_sin", entries="feature"),
    "offset": Case(place="offset", source="inv_freq", scaling=1.5),
    "shifted": Case(place="shifted"),
    "packed": Case("thd", sequences=3, entries="feature"),
    "packed starts": Case("thd", place="starts"),
    "packed ids": Case("thd", place="ids"),
    "parallel": Case(cp_size=2, cp_rank=1),
    "packed parallel": Case("thd", cp_size=2, cp_rank=1, rows=80),
    "scaled": Case(scaling=0.5),
    "batched": Case(batched=True, source="cos_sin", entries="feature"),
    "qkv": Case(key_heads=None, kv_heads=1, entries="feature"),
    "qkv of 5": Case(key_heads=None, kv_heads=0),
}
