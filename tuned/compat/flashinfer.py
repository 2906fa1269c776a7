"""The calls of flashinfer-ai/flashinfer, ``apply_rope_with_cos_sin_cache_inplace`` and ``append_paged_kv_cache``.

The first differs from FlashInfer's in two ways: the cache may be of any float dtype, and heads and rotated parts of
every size are rotated rightly. Ids past the cache give NaN on a GPU and an error on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.refusal import check_dense, no_tensor
from tuned.calls.rope import append
from tuned.compat.vllm import rotary_embedding


def apply_rope_with_cos_sin_cache_inplace(  # noqa: PLR0913 - the arguments of FlashInfer
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,  # noqa: FBT001, FBT002 - its order
) -> None:
    """Rotate query and key in place, in one launch.

    Args:
        positions: int32 or int64 ``[tokens]``: rows of the cache.
        query: ``[tokens, heads * head_size]``, or ``[tokens, heads, head_size]``; rows may be strided, as the parts of a
            packed qkv are.
        key: like query, any number of heads.
        head_size: features of a head.
        cos_sin_cache: ``[rows, rotary_dim]``, cosines of the pairs, then their sines.
        is_neox: pairs are features (j, j + rotary_dim / 2); otherwise (2 j, 2 j + 1), GPT-J.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: query or key cannot be overwritten without losing a gradient; nothing has been written.
    """
    rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


def append_paged_kv_cache(  # noqa: PLR0913 - the arguments of FlashInfer
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values to the pages of their sequences, with PyTorch's operators, since nothing is rotated.

    A token goes to slot positions % page_size of page kv_indices[kv_indptr[batch_indices] + positions // page_size].

    Args:
        append_key: ``[tokens, heads, head_dim]``, any strides.
        append_value: like append_key.
        batch_indices: int32 or int64 ``[tokens]``, or shorter: the sequence of each token.
        positions: like batch_indices: the position of each token in its sequence.
        paged_kv_cache: ``[pages, 2, page_size, heads, head_dim]``, or ``[pages, 2, heads, page_size, head_dim]`` with
            kv_layout "HND"; or a tuple (cache of the keys, cache of the values), each without the axis of 2. The dtype
            of append_key, or torch.float8_e4m3fn.
        kv_indices: int32 or int64: the pages of all sequences, one after the other.
        kv_indptr: int32 or int64 ``[sequences + 1]``: where the pages of each sequence begin in kv_indices.
        kv_last_page_len: ignored; FlashInfer does not read it to append either.
        kv_layout: "NHD" or "HND".

    A token whose page is not among kv_indices or among the pages is written nowhere.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: a tensor requires a gradient while gradients are enabled; nothing has been written.
    """
    del kv_last_page_len
    numbers = {
        "batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr,
    }  # fmt: skip
    for name, t in numbers.items():
        if not isinstance(t, torch.Tensor):
            raise no_tensor(**{name: t})
        if t.ndim != 1 or t.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be one row of int32 or int64, got {list(t.shape)} {t.dtype}: convert with .flatten().to(torch.int32)"
            )
    if batch_indices.shape != positions.shape:
        raise ValueError(
            f"batch_indices and positions must be one number a token each, got {list(batch_indices.shape)} and "
            f"{list(positions.shape)}: make both with get_batch_indices_positions"
        )
    for name, t in numbers.items():
        if t.device != batch_indices.device:
            raise ValueError(
                f"{name} must be on the device of batch_indices, {batch_indices.device}, got {t.device}: move it with .to()"
            )
    if isinstance(paged_kv_cache, torch.Tensor):
        check_dense({"paged_kv_cache": paged_kv_cache})
        if paged_kv_cache.ndim != 5 or paged_kv_cache.shape[1] != 2:  # noqa: PLR2004
            raise ValueError(
                f"paged_kv_cache must be [pages, 2, ...] with 5 axes, got {list(paged_kv_cache.shape)}: pass caches of their own as a "
                "tuple of two"
            )
        paged_kv_cache = (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
    key_cache, value_cache = _both_caches(paged_kv_cache)
    page_size = max(key_cache.shape[1 if kv_layout == "NHD" else 2], 1)
    batch, place, starts = batch_indices.long(), positions.long(), kv_indptr.long()
    sequences = max(kv_indptr.shape[0] - 1, 0)
    known = (batch >= 0) & (batch < sequences) & (place >= 0)
    if not sequences or not kv_indices.shape[0]:
        slots = torch.full_like(place, -1)
    else:
        owner = batch.clamp(0, sequences - 1)
        entry = starts[owner] + torch.div(place, page_size, rounding_mode="floor")
        known = known & (entry >= 0) & (entry < kv_indices.shape[0])
        page = kv_indices.long()[entry.clamp(0, kv_indices.shape[0] - 1)]
        slots = torch.where(known & (page >= 0), page * page_size + place % page_size, -1)
    append.write(append_key, append.Cached(append_value, key_cache, value_cache, slots), kv_layout)


def _both_caches(caches: Any) -> tuple[torch.Tensor, Any]:
    """(cache of the keys, cache of the values) from a tuple. The second is checked later, against the first."""
    if isinstance(caches, (tuple, list)) and len(caches) == 2:  # noqa: PLR2004
        key_cache, value_cache = caches
        if isinstance(key_cache, torch.Tensor) and key_cache.ndim == 4:  # noqa: PLR2004
            return key_cache, value_cache
    got = type(caches).__name__
    if isinstance(caches, (tuple, list)):
        parts = [list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in caches]
        got = f"a {got} of {', '.join(map(str, parts)) or 'nothing'}"
    raise ValueError(
        f"paged_kv_cache must be a tensor, or a tuple of two with 4 axes, got {got}: pass the pages of keys and of values"
    )
