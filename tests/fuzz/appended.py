"""``rope_append_`` of tensors as models have them: parts of one qkv, and caches that are parts of one tensor."""

from __future__ import annotations

from typing import Any

import torch

from tuned import dispatch


def parts(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Views of qkv: the query, the key and the value."""
    keys = (qkv.shape[1] - heads) // 2
    return qkv[:, :heads], qkv[:, heads : heads + keys], qkv[:, heads + keys :]


def called(
    function: Any,
    *,
    qkv: torch.Tensor | None = None,
    heads: int = 0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    both: torch.Tensor | None = None,
    key_cache: torch.Tensor | None = None,
    value_cache: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """The overwritten tensors: the query or its qkv; the caches or the tensor that holds both; then the key."""
    if qkv is not None:
        q, k, v = parts(qkv, heads)
    caches = (key_cache, value_cache) if both is None else (both[:, 0], both[:, 1])
    out = function(q, k, v, *caches, **others)
    if out is not q:
        raise AssertionError("another tensor than the query is returned")
    written = [out if qkv is None else qkv, *(caches if both is None else (both,))]
    if others.get("key_inplace") and qkv is None:
        written.append(k)
    return tuple(written)


def append(**arguments: Any) -> tuple[torch.Tensor, ...]:
    return called(dispatch.rope_append_, **arguments)
