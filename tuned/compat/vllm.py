"""The calls of vllm-project/vllm: ``rotary_embedding``, ``fused_qk_norm_rope`` and ``reshape_and_cache_flash`` of ``vllm._custom_ops``.

The first two differ from vLLM's in three ways: positions may be int32; tensors may have any strides; and a position past the cache gives NaN on a GPU (vLLM reads past the cache) and an error on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.refusal import check_dense, check_flag, no_tensor
from tuned.calls.rope import append
from tuned.calls.rope.arguments import whole_number
from tuned.dispatch import qk_norm_rope, rope_qk

STYLES = "pass True for halves, False for adjacent pairs"  # meaning of is_neox


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
    """Rotate query, and key if there is one, in place, in one launch.

    Args:
        positions: int32 or int64, ``[tokens]`` or ``[batch, seq]``: rows of the cache.
        query: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``; with positions ``[batch, seq]``, these
            two axes replace tokens. Any strides.
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
    if type(head_size) is not int:
        head_size = whole_number("head_size", head_size)
    if is_neox is not True and is_neox is not False:
        check_flag("is_neox", is_neox, STYLES)
    if inverse is not False:
        check_flag("inverse", inverse)
    last = head_size
    if type(rope_dim_offset) is not int:
        rope_dim_offset = whole_number("rope_dim_offset", rope_dim_offset)
    if rope_dim_offset:
        if not isinstance(cos_sin_cache, torch.Tensor):
            raise no_tensor(cos_sin_cache=cos_sin_cache)
        last = rope_dim_offset + cos_sin_cache.shape[-1]
        if not 0 < rope_dim_offset < last <= head_size:
            raise ValueError(
                "rope_dim_offset and rotary_dim must lie in a head: "
                f"got features {rope_dim_offset} to {last} of head_size={head_size}: rope_dim_offset is at most head_size - rotary_dim"
            )
    try:
        axes = positions.ndim
    except AttributeError:
        raise no_tensor(positions=positions) from None
    q = _by_head(query, positions, head_size, "query")
    k = None if key is None else _by_head(key, positions, head_size, "key")
    if rope_dim_offset:
        q = q[..., rope_dim_offset:last]
        k = None if k is None else k[..., rope_dim_offset:last]
    rope_qk(
        q,
        k,
        tensor_format="thd" if axes == 1 else "bshd",
        interleaved=not is_neox,
        inplace=True,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        conjugate=inverse,
    )


def fused_qk_norm_rope(  # noqa: PLR0913 - the arguments of vLLM
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,  # noqa: FBT001 - its order
    position_ids: torch.Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """RMSNorm of each head of query and key in a packed qkv, then the rotation, in place and in one launch.

    Args:
        qkv: ``[tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim]``, any float dtype; values stay as they are.
        num_heads_q: heads of the query.
        num_heads_k: heads of the key.
        num_heads_v: heads of the value.
        head_dim: features of a head.
        eps: added to the mean of the squares.
        q_weight: weight of the query's norm, ``[head_dim]``.
        k_weight: weight of the key's norm, ``[head_dim]``.
        cos_sin_cache: ``[rows, rotary_dim]``, cosines of the pairs, then their sines, any float dtype.
        is_neox: pairs are features (j, j + rotary_dim / 2); otherwise (2 j, 2 j + 1), GPT-J.
        position_ids: int32 or int64, ``[tokens]``: rows of the cache.
        forced_token_heads_per_warp: a setting of vLLM's kernel; ignored here.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: qkv cannot be overwritten without losing a gradient; nothing has been written.
    """
    del forced_token_heads_per_warp
    if is_neox is not True and is_neox is not False:
        check_flag("is_neox", is_neox, STYLES)
    if not isinstance(qkv, torch.Tensor):
        raise no_tensor(qkv=qkv)
    num_heads_q, num_heads_k = whole_number("num_heads_q", num_heads_q), whole_number("num_heads_k", num_heads_k)
    num_heads_v, head_dim = whole_number("num_heads_v", num_heads_v), whole_number("head_dim", head_dim)
    heads = num_heads_q + num_heads_k + num_heads_v
    if num_heads_q < 0 or num_heads_k < 0 or num_heads_v < 0 or head_dim < 0:
        raise ValueError(
            "num_heads_q, num_heads_k, num_heads_v and head_dim must be at least 0, got "
            f"{num_heads_q}, {num_heads_k}, {num_heads_v} and {head_dim}: give the heads of query, key and value as qkv has them"
        )
    if qkv.ndim != 2 or qkv.shape[1] != heads * head_dim:  # noqa: PLR2004 - axes
        raise ValueError(
            f"qkv must be [tokens, {heads} heads * head_dim={head_dim}], got {list(qkv.shape)}: give all three of query, key "
            "and value, and how many heads each has"
        )
    try:
        packed = qkv.view(qkv.shape[0], heads, head_dim)
    except RuntimeError:  # a tensor without strides
        check_dense({"qkv": qkv})
        raise
    qk_norm_rope(
        packed[:, :num_heads_q],
        packed[:, num_heads_q : num_heads_q + num_heads_k],
        q_weight,
        k_weight,
        eps=eps,
        tensor_format="thd",
        interleaved=not is_neox,
        inplace=True,
        cos_sin_cache=cos_sin_cache,
        positions=position_ids,
    )


def reshape_and_cache_flash(  # noqa: PLR0913 - the arguments of vLLM
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write key and value to the pages of a cache, with PyTorch's operators, since nothing is rotated.

    ``tuned.dispatch.rope_append_`` does this and the rotation before it in one launch.

    Args:
        key: ``[tokens, heads, head_size]``, any strides.
        value: like key.
        key_cache: ``[pages, page_size, heads, head_size]``, any strides.
        value_cache: like key_cache.
        slot_mapping: int32 or int64, at most ``[tokens]``: page * page_size + slot of the first tokens. A token whose
            number is negative, or past the last page, is written nowhere.
        kv_cache_dtype: "auto": caches have the dtype of key; "fp8" or "fp8_e4m3": torch.float8_e4m3fn, or its bytes as uint8.
        k_scale: float32, one number or one per head: float8 caches hold key / k_scale.
        v_scale: the same for value.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: key, value or a cache requires a gradient while gradients are enabled; nothing has been written.
    """
    kinds = ("auto", "fp8", "fp8_e4m3")
    if kv_cache_dtype not in kinds:
        raise ValueError(
            f"kv_cache_dtype must be one of {kinds}, got {kv_cache_dtype!r}: for another, convert key and value, and pass 'auto'"
        )
    scales: tuple[Any, Any] = (None, None)
    if kv_cache_dtype != "auto":
        scales = k_scale, v_scale
        check_dense({"key_cache": key_cache, "value_cache": value_cache})
        key_cache, value_cache = (
            t.view(torch.float8_e4m3fn) if isinstance(t, torch.Tensor) and t.dtype == torch.uint8 else t
            for t in (key_cache, value_cache)
        )
    append.write(key, append.Cached(value, key_cache, value_cache, slot_mapping, *scales))


def _by_head(tensor: torch.Tensor, positions: torch.Tensor, head_size: int, name: str) -> torch.Tensor:
    """A view whose last two axes are heads and head_size."""
    axes = positions.ndim
    try:
        own = tensor.ndim
    except AttributeError:
        raise no_tensor(**{name: tensor}) from None
    if own == axes + 2 and tensor.shape[-1] == head_size:
        return tensor
    if own != axes + 1 or head_size < 1 or tensor.shape[-1] % head_size:
        raise ValueError(
            f"{name} must have the axes of positions {list(positions.shape)}, then heads * head_size={head_size} features "
            f"in one axis or two, got {list(tensor.shape)}: reshape it, or pass positions of its tokens"
        )
    try:
        return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // head_size, head_size)
    except (TypeError, RuntimeError):
        # An array, or a tensor without strides: checked only after the failure, since a check would cost each call time.
        check_dense({name: tensor})
        if isinstance(tensor, torch.Tensor):  # a dense one: not an error of ours
            raise
        raise no_tensor(**{name: tensor}) from None
