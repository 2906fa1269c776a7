"""The call of NVIDIA/TransformerEngine, ``transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb``."""

from __future__ import annotations

import torch

from tuned.calls.refusal import no_tensor
from tuned.dispatch import rope


def apply_rotary_pos_emb(  # noqa: PLR0913 - the arguments of TransformerEngine
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
    fused: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the first features of each head, out of place.

    Args:
        t: ``[s, b, h, d]`` (sbhd), ``[b, s, h, d]`` (bshd) or ``[t, h, d]`` (thd), any strides; only this rank's tokens if
            cp_size is above 1.
        freqs: angles in radians, ``[s2, 1, 1, d2]`` with s2 >= s * cp_size and d2 <= d, one entry per feature; taken in
            float32.
        tensor_format: the axes of t.
        start_positions: int32 or int64 ``[b]`` (thd: ``[sequences]``), where each sequence starts; added to every
            position.
        interleaved: pairs are features (2 j, 2 j + 1); otherwise (j, j + d2 / 2).
        fused: accepted and ignored: there is one implementation, which takes every layout.
        cu_seqlens: int32 ``[sequences + 1]``, of all ranks together; read for thd only, as in TransformerEngine.
        cp_size: ranks of context parallelism; each holds two of 2 * cp_size chunks of every sequence.
        cp_rank: this rank: it holds chunks cp_rank and 2 * cp_size - 1 - cp_rank.

    Returns:
        A contiguous tensor like t. Differentiable in t, also with start_positions.

    If freqs has no row for a position, the result is NaN on a GPU; nothing past freqs is read. If shapes or a tensor on
    a CPU show such a position, it is an error.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
    """
    del fused
    try:
        dtype = freqs.dtype
    except AttributeError:
        raise no_tensor(freqs=freqs) from None
    if tensor_format == "bhsd":  # TransformerEngine lacks it
        raise heads_first()
    return rope(
        t,
        freqs if dtype == torch.float32 else radians(freqs),
        tensor_format=tensor_format,
        interleaved=interleaved,
        angle_entries="feature",  # as TransformerEngine's angles always are
        offset=0 if start_positions is None else start_positions,
        cu_seqlens=cu_seqlens if tensor_format == "thd" else None,
        cp_size=cp_size,
        cp_rank=cp_rank,
    ).contiguous()  # as TransformerEngine's result is, whatever t's strides; callers take views of it


def heads_first() -> ValueError:
    """The error for tensor_format "bhsd", which ``tuned.dispatch`` has and TransformerEngine lacks."""
    return ValueError(
        "tensor_format must be one of ('sbhd', 'bshd', 'thd'), got 'bhsd': pass t.transpose(1, 2) and tensor_format=\"bshd\""
    )


def radians(freqs: torch.Tensor) -> torch.Tensor:
    """Angles in float32. Complex ones are refused, since .float() would drop their imaginary part."""
    if not isinstance(freqs, torch.Tensor):  # a NumPy array has a dtype too
        raise no_tensor(freqs=freqs)
    if freqs.is_complex():
        raise TypeError(
            f"freqs must be real, angles in radians with one entry per feature, got {freqs.dtype}: take freqs.angle() of each pair, twice"
        )
    if freqs.is_quantized:
        raise TypeError(f"freqs must be real, angles in radians, got {freqs.dtype}: take freqs.dequantize()")
    return freqs.float()
