"""The call of vllm-project/vllm, ``vllm._custom_ops.rotary_embedding``.

It differs from theirs in three ways: positions may be int32; query and key may have different strides; and a position past
the cache gives NaN on a GPU (theirs reads past it) and an error on a CPU.
"""

from __future__ import annotations

import torch

from tuned.dispatch import rope_qk


def rotary_embedding(  # noqa: PLR0913 - the arguments of vLLM
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: FBT001 - its order
    rope_dim_offset: int = 0,
    inverse: bool = False,  # noqa: FBT001, FBT002
) -> None:
    """Rotate query, and key if there is one, in place and in one launch.

    Args:
        positions: int32 or int64, ``[tokens]`` or ``[batch, seq]``: rows of the cache.
        query: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``; with positions ``[batch, seq]`` these
            two axes for tokens. Strides are free, but the features of a token that are one axis must be so in memory.
        key: like query, any number of heads; or None.
        head_size: features of a head.
        cos_sin_cache: ``[rows, rotary_dim]``, cosines of the pairs, then their sines, any float dtype.
        is_neox: pairs are features (j, j + rotary_dim / 2); otherwise (2 j, 2 j + 1), GPT-J.
        rope_dim_offset: the first feature of each head that rotates.
        inverse: rotate by minus the angle.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: query or key cannot be overwritten without losing a gradient; nothing has been written.
    """
    last = head_size
    if rope_dim_offset:
        last = rope_dim_offset + cos_sin_cache.shape[-1]
        if not 0 < rope_dim_offset < last <= head_size:
            raise ValueError(
                "rope_dim_offset and rotary_dim must lie in a head: "
                f"features {rope_dim_offset} to {last} of head_size={head_size}"
            )
    q = _by_head(query, positions, head_size, "query")
    k = None if key is None else _by_head(key, positions, head_size, "key")
    if rope_dim_offset:
        q = q[..., rope_dim_offset:last]
        k = None if k is None else k[..., rope_dim_offset:last]
    rope_qk(
        q,
        k,
        tensor_format="thd" if positions.ndim == 1 else "bshd",
        interleaved=not is_neox,
        inplace=True,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        conjugate=inverse,
    )


def _by_head(tensor: torch.Tensor, positions: torch.Tensor, head_size: int, name: str) -> torch.Tensor:
    """A view whose last two axes are heads and head_size."""
    axes = positions.ndim
    if tensor.ndim == axes + 2 and tensor.shape[-1] == head_size:
        return tensor
    if tensor.ndim != axes + 1 or head_size < 1 or tensor.shape[-1] % head_size:
        raise ValueError(
            f"{name} must have the axes of positions {list(positions.shape)}, then heads * head_size={head_size} features "
            f"in one axis or two, got {list(tensor.shape)}"
        )
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // head_size, head_size)
