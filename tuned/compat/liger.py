"""The calls of linkedin/Liger-Kernel, ``liger_kernel.transformers.rope``.

They differ from Liger's functions in three ways:

* They never work in place. Liger overwrites q and k if the heads of a token are contiguous in memory, and not
  otherwise, so that callers can rely only on the result. To save memory, call
  ``tuned.dispatch.rope_qk(..., inplace=True)``.
* They compute in float32 and round once; Liger computes in the dtype of cos, bfloat16 in most models.
* They refuse what Liger would rotate wrongly: an unsqueeze_dim other than 1, and cos narrower or wider than a head.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.refusal import check_dense, no_tensor
from tuned.dispatch import rope_qk


def liger_rotary_pos_emb(  # noqa: PLR0913 - the arguments of Liger
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in one launch, as transformers' Llama does.

    Args:
        q: ``[batch, heads, seq, head_dim]``, any strides.
        k: ``[batch, kv_heads, seq, head_dim]``, any strides.
        cos: ``[1, seq, head_dim]`` or ``[batch, seq, head_dim]``, with two equal halves: the first is read.
        sin: like cos.
        position_ids: accepted and ignored, as in Liger: cos and sin have one row per token already.
        unsqueeze_dim: 1, the axis of heads.

    Returns:
        q and k rotated, new tensors. Differentiable in both.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    del position_ids
    if isinstance(unsqueeze_dim, torch.Tensor) or unsqueeze_dim != 1:
        raise ValueError(
            f"unsqueeze_dim must be 1, got {unsqueeze_dim}: q and k are [batch, heads, seq, head_dim]; transpose them, or "
            "call tuned.dispatch.rope_qk, which takes [batch, seq, heads, head_dim]"
        )
    try:
        _, _, _, head_dim = q.shape
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    except (AttributeError, IndexError, ValueError):
        raise _wrong(q, k, "[batch, heads, seq, head_dim]", 4) from None
    rotated_q, rotated_k = rope_qk(
        q,
        k,
        None,
        _first_half(cos, head_dim, "cos"),
        _first_half(sin, head_dim, "sin"),
        tensor_format="bshd",
        angle_entries="pair",
    )
    assert rotated_k is not None
    return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def liger_rotary_pos_emb_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k of a vision tower in one launch.

    Args:
        q: ``[seq, heads, head_dim]``, any strides.
        k: ``[seq, kv_heads, head_dim]``, any strides.
        cos: ``[seq, head_dim]``, with two equal halves: the first is read.
        sin: like cos.

    Returns:
        q and k rotated, new tensors in their dtypes. Differentiable in both.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    try:
        _, _, head_dim = q.shape
        q, k = q[None], k[None]
    except (AttributeError, TypeError, ValueError):
        raise _wrong(q, k, "[seq, heads, head_dim]", 3) from None
    rotated_q, rotated_k = rope_qk(
        q,
        k,
        None,
        _first_half(cos, head_dim, "cos"),
        _first_half(sin, head_dim, "sin"),
        tensor_format="bshd",
        angle_entries="pair",
    )
    assert rotated_k is not None
    return rotated_q[0], rotated_k[0]


def _wrong(q: Any, k: Any, wanted: str, axes: int) -> Exception:
    """The error for q and k that do not have the shapes in ``wanted``."""
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return no_tensor(q=q, k=k)
    shapes = f"{list(q.shape)} and {list(k.shape)}"
    return ValueError(
        f"q and k must be {wanted}, got {shapes}: reshape them to {axes} axes, or call tuned.dispatch.rope_qk"
    )


def _first_half(angles: torch.Tensor, head_dim: int, name: str) -> torch.Tensor:
    """One entry per pair: [seq, head_dim / 2], or [batch, seq, head_dim / 2] if each sequence has its own angles."""
    try:
        width = angles.shape[-1] if angles.shape else 1  # a single number has no axis
    except AttributeError:
        raise no_tensor(**{name: angles}) from None
    if width != head_dim:
        raise ValueError(
            f"{name} must have head_dim={head_dim} entries per token, got {width}; to rotate a part of each head, "
            "call tuned.dispatch.rope_qk"
        )
    half = head_dim // 2
    shared = angles.ndim == 3 and angles.shape[0] == 1  # noqa: PLR2004 - one table for the whole batch
    try:
        return angles[0, :, :half] if shared else angles[..., :half]
    except RuntimeError:
        check_dense({name: angles})
        raise
