"""The call of sgl-project/sglang, ``sglang.jit_kernel.diffusion.qknorm_rope.fused_inplace_qknorm_rope``.

It takes any float dtype, width and strides; SGLang's function takes only some. A position past the cache gives NaN on a
GPU and an error on a CPU.
"""

from __future__ import annotations

import torch

from tuned.calls.refusal import check_flag, no_tensor
from tuned.calls.rope.arguments import whole_number
from tuned.compat.vllm import STYLES
from tuned.dispatch import qk_norm_rope


def fused_inplace_qknorm_rope(  # noqa: PLR0913 - the arguments of SGLang
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
    round_norm_before_rope: bool = False,
    cache_has_full_width: bool = False,
) -> None:
    """RMSNorm of each head of q and k, then the rotation, in place and in one launch.

    Args:
        q: ``[tokens, heads, head_dim]``.
        k: like q, any number of heads.
        q_weight: weight of q's norm, ``[head_dim]``.
        k_weight: weight of k's norm, ``[head_dim]``.
        cos_sin_cache: ``[rows, rope_dim]``, the cosines of the pairs, then their sines; or, with ``cache_has_full_width``,
            ``[rows, 2 * rope_dim]``, a cosine and a sine for every feature.
        positions: int32 or int64, ``[tokens]``: rows of the cache.
        is_neox: pairs are features (j, j + rope_dim / 2); otherwise (2 j, 2 j + 1).
        eps: added to the mean of the squares.
        head_dim: 0, or the features of a head.
        rope_dim: 0, or how many features of a head rotate.
        round_norm_before_rope: round the result of the norm to the dtype of q.
        cache_has_full_width: see ``cos_sin_cache``.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: q or k cannot be overwritten without losing a gradient; nothing has been written.
    """
    if not isinstance(q, torch.Tensor):
        raise no_tensor(q=q)
    if is_neox is not True and is_neox is not False:
        check_flag("is_neox", is_neox, STYLES)
    if round_norm_before_rope is not False:
        check_flag("round_norm_before_rope", round_norm_before_rope)
    if cache_has_full_width is not False:
        check_flag("cache_has_full_width", cache_has_full_width)
    head_dim = head_dim if type(head_dim) is int else whole_number("head_dim", head_dim)
    rope_dim = rope_dim if type(rope_dim) is int else whole_number("rope_dim", rope_dim)
    if head_dim and head_dim != q.shape[-1]:
        raise ValueError(
            f"head_dim must be 0 or the features of a head, {q.shape[-1]}, got {head_dim}: give q as [tokens, heads, head_dim]"
        )
    qk_norm_rope(
        q,
        k,
        q_weight,
        k_weight,
        eps=eps,
        rounding="product" if round_norm_before_rope else "once",
        tensor_format="thd",
        interleaved=not is_neox,
        inplace=True,
        rotary_dim=rope_dim or None,
        angle_entries="feature" if cache_has_full_width else "pair",
        cos_sin_cache=cos_sin_cache,
        positions=positions,
    )
