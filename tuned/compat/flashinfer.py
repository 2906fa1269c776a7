"""The call of flashinfer-ai/flashinfer, ``flashinfer.rope.apply_rope_with_cos_sin_cache_inplace``.

It differs from theirs in two ways: the cache may be of any float dtype, and every size of head and of its rotated part is
rotated rightly. Ids past the cache give NaN on a GPU and an error on a CPU.
"""

from __future__ import annotations

import torch

from tuned.compat.vllm import rotary_embedding


def apply_rope_with_cos_sin_cache_inplace(  # noqa: PLR0913 - the arguments of FlashInfer
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,  # noqa: FBT001, FBT002 - its order
) -> None:
    """Rotate query and key in place and in one launch.

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
