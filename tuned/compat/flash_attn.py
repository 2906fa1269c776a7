"""The calls of Dao-AILab/flash-attention, ``flash_attn.layers.rotary``.

They differ from flash-attention's functions in four ways:

* Positions outside the table: flash-attention leaves tokens past the table's end unrotated, and reads memory before its
  start. Here such positions are an error if that is known without synchronizing with the GPU, and give NaN otherwise.
* In place, a leaf that requires grad is refused with RuntimeError, before any write. For other tensors autograd tracks the
  write, in the result and in the argument alike. A backward never overwrites the gradient that it gets.
* head_dim may be above 256, and cos and sin may have another dtype than x.
* max_seqlen may be left out.
"""

from __future__ import annotations

import torch

from tuned.calls.overlap import check_strides
from tuned.calls.refusal import check_dense, no_tensor
from tuned.calls.rope.arguments import whole_number
from tuned.dispatch import rope, rope_qkv
from tuned.launching.overwrite import refuse_overwrite

APART = "pass a contiguous copy of it"
PACKED_DIMS = 5  # [batch, seqlen, 3, heads, head_dim]; with heads of q, k and v in one axis there are 4


def apply_rotary_emb(  # noqa: PLR0913 - the arguments of flash-attention
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
    inplace: bool = False,  # noqa: FBT001, FBT002
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first features of each head.

    Args:
        x: ``[batch, seqlen, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with cu_seqlens; any strides.
        cos: ``[rows, rotary_dim / 2]``, one entry per pair, any float dtype.
        sin: like cos.
        interleaved: pairs are features (2 j, 2 j + 1), GPT-J; otherwise (j, j + rotary_dim / 2), GPT-NeoX.
        inplace: overwrite x and return it.
        seqlen_offsets: added to the positions: an int, or int32 or int64 ``[batch]``, one per sequence.
        cu_seqlens: int32 ``[batch + 1]``, where packed sequences start.
        max_seqlen: the longest length of the sequences; checked against cos. Read with cu_seqlens only.

    Returns:
        A tensor like x, or x itself in place. Differentiable in x.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: x cannot be overwritten without losing a gradient; nothing has been written.
    """
    packed = cu_seqlens is not None
    return rope(
        x,
        None,
        cos,
        sin,
        tensor_format="thd" if packed else "bshd",
        interleaved=interleaved,
        inplace=inplace,
        offset=seqlen_offsets,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen if packed else None,
    )


apply_rotary_emb_func = apply_rotary_emb  # flash-attention's older name


def apply_rotary_emb_qkv_(  # noqa: PLR0913 - the arguments of flash-attention
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate q and k in place in a packed qkv; v is not touched.

    It is one launch, or one each for q and k if k has its own table or the heads of q and k are not contiguous in
    memory.

    Args:
        qkv: ``[batch, seqlen, 3, heads, head_dim]``, or ``[batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim]``;
            any strides.
        cos: ``[rows, rotary_dim / 2]``, one entry per pair, any float dtype.
        sin: like cos.
        cos_k: cosines for k, if they differ from those for q (XPos).
        sin_k: sines for k.
        interleaved: pairs are features (2 j, 2 j + 1); otherwise (j, j + rotary_dim / 2).
        seqlen_offsets: added to the positions: an int, or int32 or int64 ``[batch]``.
        num_heads_q: the number of q's heads; required if qkv has four axes, ignored if it has five.

    Returns:
        qkv itself. Differentiable in it.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: qkv cannot be overwritten without losing a gradient; nothing has been written.
    """
    kv_heads = _kv_heads(qkv, num_heads_q)
    # Whether the heads of q, k and v are one axis, or can be made one axis by a view.
    side_by_side = kv_heads is not None or _stride(qkv, 2, "qkv") == qkv.shape[3] * qkv.stride(3)
    if cos_k is None and sin_k is None and side_by_side:
        return rope_qkv(
            qkv,
            None,
            cos,
            sin,
            tensor_format="bshd",
            interleaved=interleaved,
            inplace=True,
            offset=seqlen_offsets,
            kv_heads=kv_heads,
        )
    # Checked here, before q is written. If the tables are alike, the checks of q, cos and sin cover the rest.
    check_dense({"qkv": qkv, "cos": cos, "sin": sin, "cos_k": cos_k, "sin_k": sin_k})
    check_strides("qkv", qkv, APART)  # if q, k and v share memory, the strides of each alone do not show it
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for name, table in (("cos_k", cos_k), ("sin_k", sin_k)):
        if not isinstance(table, torch.Tensor) or not isinstance(cos, torch.Tensor):
            raise no_tensor(cos=cos, **{name: table})
        if (table.shape, table.dtype, table.device) != (cos.shape, cos.dtype, cos.device):
            raise ValueError(
                f"{name} must have the shape, dtype and device of cos, {list(cos.shape)} {cos.dtype} {cos.device}, "
                f"got {list(table.shape)} {table.dtype} {table.device}: make all four tables for the same positions"
            )
    q = qkv[:, :, 0] if kv_heads is None else qkv[:, :, :num_heads_q]
    k = qkv[:, :, 1] if kv_heads is None else qkv[:, :, num_heads_q:-kv_heads]
    if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot tell whether k is a view
        refuse_overwrite(k, by_gradient=cos_k.requires_grad or sin_k.requires_grad)
    apply_rotary_emb(q, cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate k in place in a packed kv; v is not touched.

    Args:
        kv: ``[batch, seqlen, 2, heads, head_dim]``.
        cos: ``[rows, rotary_dim / 2]``, one entry per pair, any float dtype.
        sin: like cos.
        interleaved: pairs are features (2 j, 2 j + 1); otherwise (j, j + rotary_dim / 2).
        seqlen_offsets: added to the positions: an int, or int32 or int64 ``[batch]``.

    Returns:
        kv itself. Differentiable in it.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: kv cannot be overwritten without losing a gradient; nothing has been written.
    """
    try:
        axes = kv.ndim
    except AttributeError:
        raise no_tensor(kv=kv) from None
    if axes != PACKED_DIMS or kv.shape[2] != 2:  # noqa: PLR2004 - k and v
        raise ValueError(
            f"kv must be [batch, seqlen, 2, heads, head_dim], got {list(kv.shape)}: stack k and v with torch.stack((k, v), 2), or for a qkv "
            "call apply_rotary_emb_qkv_"
        )
    if _stride(kv, 2, "kv") == 0:  # k and v share memory, which the strides of k do not show
        check_dense({"kv": kv})
        check_strides("kv", kv, APART)
    apply_rotary_emb(kv.select(2, 0), cos, sin, interleaved, inplace=True, seqlen_offsets=seqlen_offsets)
    return kv


def _stride(packed: torch.Tensor, axis: int, name: str) -> int:
    """The stride of an axis. What has no strides is refused only here: to check earlier would cost each call time."""
    try:
        return packed.stride(axis)
    except (AttributeError, RuntimeError):
        check_dense({name: packed})
        raise no_tensor(**{name: packed}) from None


def _kv_heads(qkv: torch.Tensor, num_heads_q: int | None) -> int | None:
    """The number of k's heads in a qkv of four axes; None for a qkv of five."""
    try:
        axes = qkv.ndim
    except AttributeError:
        raise no_tensor(qkv=qkv) from None
    if axes == PACKED_DIMS and qkv.shape[2] == 3:  # noqa: PLR2004 - q, k and v
        return None
    if axes != PACKED_DIMS - 1:
        raise ValueError(
            "qkv must be [batch, seqlen, 3, heads, head_dim] or "
            f"[batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim], got {list(qkv.shape)}: reshape it, and for x that is not packed "
            "call apply_rotary_emb"
        )
    if num_heads_q is None:
        raise ValueError(
            f"qkv with four axes needs num_heads_q, the number of q's heads, got None for {list(qkv.shape)}: pass it, or give qkv an axis of 3"
        )
    if type(num_heads_q) is not int:
        num_heads_q = whole_number("num_heads_q", num_heads_q)
    rest = qkv.shape[2] - num_heads_q
    kv_heads = rest // 2  # torch.compile does not trace divmod of a dynamic size
    if rest % 2 or num_heads_q < 1 or kv_heads < 1:
        raise ValueError(
            "num_heads_q must be positive and leave an even and positive number of heads for k and v, "
            f"got num_heads_q={num_heads_q} of {qkv.shape[2]} heads: the heads are num_heads_q + 2 * num_heads_k"
        )
    return kv_heads
