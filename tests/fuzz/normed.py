"""``qk_norm_rope`` of a query and a key that are parts of one tensor, as a projection leaves them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tuned import dispatch


def parts(qkv: torch.Tensor, heads: int, key_heads: int, tensor_format: str) -> tuple[torch.Tensor, ...]:
    """Views of qkv: the query, the key, and what is after them."""
    axis = 1 if tensor_format == "bhsd" else -2
    ends = (0, heads, heads + key_heads, qkv.shape[axis])
    return tuple(
        qkv.narrow(axis, a, b - a) for a, b in itertools.pairwise(ends)
    )  # autograd refuses to overwrite a split


def of_views(qkv: torch.Tensor, *, heads: int, key_heads: int, **others: Any) -> Any:
    """In place: qkv, of which nothing but the parts may change; else (q, k)."""
    q, k, _ = parts(qkv, heads, key_heads, others.get("tensor_format", "bshd"))
    out = dispatch.qk_norm_rope(q, k, **others)
    if not others.get("inplace", False):
        return out
    if out[0] is not q or out[1] is not k:
        raise AssertionError("other tensors than those that are overwritten are returned")
    return qkv
