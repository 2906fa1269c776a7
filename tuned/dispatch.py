"""The fastest known kernel for each call.

Which kernel a call gets:

1. The winner measured on this device for this spec and size, if it still counts: the source of its kernel is unchanged,
   the GPU is the same model with as many multiprocessors, and the timing method is today's (``tuned.lookup.record``).
   A winner that does not count is a neighbour, as in 2.
2. The row nearest to the call, with its tile rescaled to the width of the call's rows. The distance is the octaves
   between the numbers of tokens, plus the family's ``distance`` between the specs (for RoPE in
   ``tuned.families.rope.variant``). A rotation that is more than ``REACH`` octaves from every row goes on to 3. The
   rule was chosen by leave-one-out regret (``python tune.py regret``); its figures are in each table.
   Rows of another GPU count too, if it has as many multiprocessors of the same kind; of equally near rows, those of
   this GPU win.
   (2b) If no row of this GPU covers such a call, not even to say that PyTorch is as fast, the tables of other GPUs
   are searched in the same way, the most similar first; features that this GPU lacks are taken out of its variants.
   (2c) The same with the portfolio of the architecture: ``tuned/tables/_portfolio.py``.
   A GRU over sequences uses a model of its time instead (``tuned.lookup.model``). The rows of its spec and batch serve
   every length. For any other shape the model picks among all variants that fit the GPU; near a row, it replaces the
   row's variant only by one that is much better. PyTorch's operator serves where its time, measured or modelled, is
   less. Outside of CUDA graphs it also replaces most variants that launch a kernel for each
   step, since a call waits for the host there.
3. The default variant of the spec and size: for RoPE the best tile by a rule of thumb, within 3 percent of the best of all
   in the median.
4. Eager PyTorch, for: tensors on a CPU; dtypes that no kernel takes; no Triton; a single step or a linear that needs a
   gradient; a GRU over sequences whose gradient takes less time in PyTorch; angles that need a gradient in a call with
   a norm, in one of MLA's key and value, or in ``rope_backward``.

torch.compile traces each call as an operator of torch.library (``tuned.calls.rope.ops``,
``tuned.calls.recurrent.ops``), and the order above holds inside of that operator. Other tracers and dispatch modes
(make_fx, FakeTensorMode, FlopCounterMode) see the operators of RoPE everywhere. For the GRU families they see our
operators on a GPU, and PyTorch's operators on a CPU.

``tuned.explain`` tells which of these a call gets, and why. On a model of GPU without measurements, the first call warns
(``tuned.TunedWarning``).

Environment: ``TUNED_TABLES=DIR`` names a folder whose records replace the shipped tables of the same GPUs. ``TUNED_RECORD=FILE`` appends to a
file the problems that no row was measured for, for ``tune.py --problems FILE``. ``TUNED_DISPATCH=safe`` makes every launch
use Triton's public launcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tuned.calls.gru import plan as gru_plan
from tuned.calls.gru import training as gru_training
from tuned.calls.gru.arguments import gru_call
from tuned.calls.gru_cell import run as gru_cell_run
from tuned.calls.gru_cell.arguments import checked_cell, reset_rows
from tuned.calls.linear_cat import run as linear_cat_run
from tuned.calls.linear_cat.arguments import check_linear_cat
from tuned.calls.recurrent import serve
from tuned.calls.refusal import check_flag
from tuned.calls.rope import append as rope_append
from tuned.calls.rope import call as rope_call
from tuned.calls.rope.arguments import (
    Given,
    Settings,
    k_dim_of,
    kv_heads_of,
    offset_of,
    packed_parts,
    sections_of,
    whole_numbers,
)
from tuned.launching.overwrite import bump_versions, refuse_overwrite
from tuned.lookup.lookup import Choice

_NUMBERS = (float, int)


def rope(  # noqa: PLR0913 - the arguments of its peers
    x: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
    deinterleave: bool = False,
) -> torch.Tensor:
    """Rotary position embedding: rotate features of each head by angles that depend on the position.

    Angles come from one source: freqs, cos and sin, cos_sin_cache, freqs_cis, or inv_freq. A token's position is its index in its
    sequence plus offset, or its entry in positions.

    Args:
        x: ``[b, s, h, d]`` (bshd), ``[s, b, h, d]`` (sbhd), ``[t, h, d]`` (thd) or ``[b, h, s, d]`` (bhsd), any strides, float32,
            float16 or bfloat16 on a GPU; anything floating point on a CPU.
        freqs: angles in radians, float32, ``[rows, entries]`` or ``[rows, 1, 1, entries]``, one row per position.
        cos: cosines of the angles, any float dtype, shaped like freqs, or ``[b, rows, entries]``; together with sin.
        sin: sines of the angles, like cos.
        tensor_format: the axes of x: "bshd", "sbhd", "thd" or "bhsd" (``[b, h, s, d]``, as Hugging Face's models hold it).
        interleaved: pairs are features (2 j, 2 j + 1), GPT-J; otherwise (j, j + rotary_dim / 2), NeoX, rotate_half.
        inplace: overwrite x and return it; features that do not rotate are not touched.
        rotary_dim: how many features rotate; checked against the angles when given.
        angle_entries: "feature": one entry per rotated feature, and the two of a pair may differ (TransformerEngine);
            "pair": one entry per pair (flash-attention), half the bytes. The default is "feature" for freqs and "pair" for
            the others. It is never guessed from the width.
        cu_seqlens: int32 ``[sequences + 1]`` on the device of x, where packed sequences start; thd only. Tokens outside
            every sequence are copied. Values on a GPU are not checked.
        max_seqlen: if given, checked against the angles, without synchronizing with the GPU; thd only.
        cos_sin_cache: ``[rows, rotary_dim]``: the cosines of a position's pairs, then their sines (vLLM, FlashInfer).
        inv_freq: radians per position, float32, ``[pairs]``: the angle is position * inv_freq, rounded once to float32;
            no table is read.
        freqs_cis: complex, ``[rows, pairs]`` or ``[b, rows, pairs]``: cos + i sin of a position's pairs (Llama's
            original code, torchtitan); read in place, without a copy.
        attention_scaling: cosines and sines are multiplied by it (YaRN); with freqs and inv_freq.
        positions: int32 or int64, ``[b, s]`` (bshd and bhsd), ``[s, b]`` (sbhd) or ``[t]`` (thd), or ``[s]``, shared by the batch;
            on the device of x. With sections there is one more axis in front, with one row per section.
        offset: added to the index in the sequence: an int; or an int32 or int64 tensor on the device of x, either of no
            dimension or with one entry per sequence, ``[b]`` or, if packed, ``[sequences]``.
        cp_size: ranks of context parallelism. x has this rank's tokens of each sequence: chunks cp_rank and
            2 * cp_size - 1 - cp_rank of 2 * cp_size chunks. The angles and cu_seqlens describe whole sequences, whose
            lengths must be divisible by 2 * cp_size.
        cp_rank: the rank of this process.
        rotated: which features rotate: the "first" rotary_dim; the "last" rotary_dim (DeepSeek's MLA); or
            "proportional": pairs are (j, j + d / 2) over the whole head, and the first rotary_dim / 2 pairs rotate
            (Gemma 4).
        conjugate: rotate by the negative angle.
        sections: for positions of more than one axis (video, images): how many pairs take their angle from each row of
            positions, 2 to 4 numbers that add up to rotary_dim / 2. A pair's row of positions names a row of the
            angles, of which pair j reads entry j. This is mRoPE (Qwen2-VL: time, height, width), or, with a table whose
            columns belong to axes, axial RoPE (FLUX, Wan, vision towers).
        interleaved_sections: the pairs of three sections take turns, 0 1 2 0 1 2, as in Qwen3-VL; otherwise each
            section's pairs are in a row.
        deinterleave: pairs are read as features (2 j, 2 j + 1) and written as (j, j + rotary_dim / 2), as Megatron does
            with DeepSeek's queries. The entries of angles are arranged as for halves. Pairs of tokens outside every
            sequence are reordered too.

    Returns:
        A tensor like x, or x itself in place. A kernel computes gradients of x, of any order. If the angles need a
        gradient, one kernel computes both gradients, and sums that of the angles over heads in a fixed order. For that
        the forward keeps x, or a copy of x if the call is in place; gradients of these gradients are computed by
        PyTorch's operators.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written. Positions past a table, or below 0,
            are an error if they can be found without synchronizing with a GPU; otherwise they give NaN in the result.
        RuntimeError: x cannot be overwritten without losing a gradient; nothing has been written.
    """
    if (
        (rotary_dim is not None and type(rotary_dim) is not int)
        or (max_seqlen is not None and type(max_seqlen) is not int)
        or type(cp_size) is not int
        or type(cp_rank) is not int
    ):
        rotary_dim, max_seqlen, cp_size, cp_rank = whole_numbers(rotary_dim, max_seqlen, cp_size, cp_rank)
    if sections is not None:
        sections = sections_of(sections)
    settings = (
        tensor_format, interleaved, inplace, rotary_dim, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        rotated, conjugate, sections, interleaved_sections, None, deinterleave, 0, "forward",
    )  # fmt: skip
    return rope_call.call(  # type: ignore[no-any-return]
        x,
        None,
        freqs,
        cos,
        sin,
        cos_sin_cache,
        inv_freq,
        freqs_cis,
        cu_seqlens,
        positions,
        offset,
        None,
        None,
        settings,
    )


def rope_qk(  # noqa: PLR0913 - the arguments of rope
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
    deinterleave: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``rope`` of a query and a key in one launch, with the arguments of ``rope``.

    q is as x there. k has the tokens, dtype and head_dim of q, and any number of heads (GQA, MQA); it is None if a layer
    has no key.

    Returns:
        (q, k), rotated; in place, the given tensors.

    Raises:
        TypeError, ValueError, RuntimeError: as ``rope``; nothing has been written.
    """
    if (
        (rotary_dim is not None and type(rotary_dim) is not int)
        or (max_seqlen is not None and type(max_seqlen) is not int)
        or type(cp_size) is not int
        or type(cp_rank) is not int
    ):
        rotary_dim, max_seqlen, cp_size, cp_rank = whole_numbers(rotary_dim, max_seqlen, cp_size, cp_rank)
    if sections is not None:
        sections = sections_of(sections)
    settings = (
        tensor_format, interleaved, inplace, rotary_dim, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        rotated, conjugate, sections, interleaved_sections, None, deinterleave, 0, "forward",
    )  # fmt: skip
    out = rope_call.call(
        q, k, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens, positions, offset, None, None, settings
    )
    return out if k is not None else (out, None)


def rope_qkv(  # noqa: PLR0913 - the arguments of rope
    qkv: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
    kv_heads: int | None = None,
) -> torch.Tensor:
    """``rope`` of the query and the key in a packed qkv, with the arguments of ``rope`` but deinterleave.

    v is copied; in place, it is left as it is.

    With kv_heads, which is at least 1, qkv has the axes of tensor_format and heads + 2 * kv_heads heads: queries, keys,
    values. Without it (None) qkv has an axis of 3 before the heads: ``[b, s, 3, h, d]``.

    Returns:
        A tensor like qkv, or qkv itself in place.

    Raises:
        TypeError, ValueError, RuntimeError: as ``rope``, and a ValueError if kv_heads is below 1; nothing has been written.
    """
    kv_heads = 0 if kv_heads is None else kv_heads_of(kv_heads)  # in Settings, 0 is an axis of 3
    if (
        (rotary_dim is not None and type(rotary_dim) is not int)
        or (max_seqlen is not None and type(max_seqlen) is not int)
        or type(cp_size) is not int
        or type(cp_rank) is not int
    ):
        rotary_dim, max_seqlen, cp_size, cp_rank = whole_numbers(rotary_dim, max_seqlen, cp_size, cp_rank)
    if sections is not None:
        sections = sections_of(sections)
    settings = (
        tensor_format, interleaved, inplace, rotary_dim, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        rotated, conjugate, sections, interleaved_sections, kv_heads, False, 0, "forward",
    )  # fmt: skip
    return rope_call.call(  # type: ignore[no-any-return]
        qkv,
        None,
        freqs,
        cos,
        sin,
        cos_sin_cache,
        inv_freq,
        freqs_cis,
        cu_seqlens,
        positions,
        offset,
        None,
        None,
        settings,
    )


def rope_backward(  # noqa: PLR0913 - the arguments of rope
    grad_output: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
    deinterleave: bool = False,
) -> torch.Tensor:
    """The transpose of ``rope`` as a linear map of x, with the same arguments: from grad_output to the gradient of x.

    Always out of place. If the two angle entries of each pair are equal, it is the rotation by the negative angle.

    grad_output is the gradient of the result of ``rope``, and has its shape: any strides, float32, float16 or bfloat16
    on a GPU, anything floating point on a CPU. The other arguments are those of ``rope`` except inplace.

    Returns:
        The gradient of x, a new tensor like grad_output. It is differentiable, as the result of ``rope`` is.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if (
        (rotary_dim is not None and type(rotary_dim) is not int)
        or (max_seqlen is not None and type(max_seqlen) is not int)
        or type(cp_size) is not int
        or type(cp_rank) is not int
    ):
        rotary_dim, max_seqlen, cp_size, cp_rank = whole_numbers(rotary_dim, max_seqlen, cp_size, cp_rank)
    if sections is not None:
        sections = sections_of(sections)
    settings = (
        tensor_format, interleaved, False, rotary_dim, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        rotated, conjugate, sections, interleaved_sections, None, deinterleave, 0, "backward",
    )  # fmt: skip
    return rope_call.call(  # type: ignore[no-any-return]
        grad_output,
        None,
        freqs,
        cos,
        sin,
        cos_sin_cache,
        inv_freq,
        freqs_cis,
        cu_seqlens,
        positions,
        offset,
        None,
        None,
        settings,
    )


def qk_norm_rope(  # noqa: PLR0913 - the arguments of rope_qk, and of two norms
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: str = "head",
    zero_centered: bool = False,
    rounding: str = "once",
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm of queries and keys, then ``rope_qk`` of both, in one launch, as in Qwen 3, Gemma 3 and OLMo 2.

    It takes the arguments of ``rope_qk`` except deinterleave. All features are normalised, also those that do not
    rotate. k and k_weight are None if a layer has no key. The other arguments:

    * q_weight, k_weight: weights of the norms, any float dtype: ``[d]`` with norm "head", ``[h * d]`` with norm "all".
    * eps: added to the mean of the squares.
    * norm: what is normalised together: the features of each "head" (Qwen 3, Gemma 3), or "all" heads of a tensor (OLMo 2).
    * zero_centered: multiply by 1 + weight (Gemma), not by weight.
    * rounding: "once" keeps float32 up to the store, which is the most precise. The others round where a model's code
      does, so that logits can be compared: "product" rounds the result of the norm to the dtype of q (Gemma 3, OLMo 2),
      "each" also rounds before the multiplication by the weight (Qwen 3). Gradients treat the roundings as exact.

    Returns:
        (q, k); in place, the given tensors. Differentiable in q, k and both weights: one kernel computes the gradients,
        another adds up those of the weights in a fixed order, with the same bits in each run. If a gradient is needed,
        an in-place call copies its input for it.

    Raises:
        TypeError, ValueError, RuntimeError: as ``rope``; nothing has been written.
    """
    if sections is not None:
        sections = sections_of(sections)
    if rotary_dim is not None or max_seqlen is not None or type(cp_size) is not int or type(cp_rank) is not int:
        rotary_dim, max_seqlen, cp_size, cp_rank = whole_numbers(rotary_dim, max_seqlen, cp_size, cp_rank)
    settings = (
        tensor_format, interleaved, inplace, rotary_dim, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        rotated, conjugate, sections, interleaved_sections, None, False, 0, "forward", norm, eps, zero_centered, rounding,
    )  # fmt: skip
    out = rope_call.call(
        q,
        k,
        freqs,
        cos,
        sin,
        cos_sin_cache,
        inv_freq,
        freqs_cis,
        cu_seqlens,
        positions,
        offset,
        q_weight,
        k_weight,
        settings,
    )
    return (out, None) if k is None else out


def qkv_norm_rope_(  # noqa: PLR0913 - the arguments of qk_norm_rope
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    kv_heads: int | None = None,
    tensor_format: str = "bshd",
    **others: Any,
) -> torch.Tensor:
    """``qk_norm_rope`` of the query and the key of a packed qkv, in place, with the same arguments; v stays as it is.

    qkv is ``[..., heads + 2 * kv_heads, d]``: the query's heads, then the key's, then the value's. Without kv_heads it
    is ``[..., 3, h, d]``. The axes in front are those of ``tensor_format``.

    Returns:
        qkv itself.

    Raises:
        TypeError, ValueError, RuntimeError: as ``qk_norm_rope``; nothing has been written.
    """
    if "inplace" in others:
        raise _told_inplace()
    settings = Settings(tensor_format, kv_heads=0 if kv_heads is None else kv_heads_of(kv_heads), inplace=True)
    q, k = packed_parts(qkv, settings)
    qk_norm_rope(q, k, q_weight, k_weight, freqs, cos, sin, tensor_format=tensor_format, inplace=True, **others)
    return qkv


def _told_inplace() -> TypeError:
    return TypeError("qkv_norm_rope_ is in place: leave inplace out, or give views of qkv to qk_norm_rope")


def mla_kv_rope(  # noqa: PLR0913 - the arguments of rope
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    k_dim: int,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    deinterleave: bool = False,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value of multi-head latent attention (DeepSeek), in one launch; their gradient is one launch too.

    A head's key is its first ``k_dim`` features of kv, then the rotated k_pe, which all heads share. A head's value is
    the rest of its features of kv. For the query call ``rope(q, rotated="last", inplace=True)``. Angles and positions
    are as in ``rope``. The other arguments:

    * kv: ``[b, s, h, k_dim + v_dim]`` (bshd), ``[s, b, h, k_dim + v_dim]`` (sbhd) or ``[t, h, k_dim + v_dim]`` (thd), any strides.
    * k_pe: ``[b, s, 1, e]``, ``[s, b, 1, e]`` or ``[t, 1, e]``, dtype and device of kv, any strides, such as a slice of a wider
      tensor. All e features rotate.
    * k_dim: features of each head of kv that belong to the key, at least 1; v_dim is at least 1 too.
    * deinterleave: as in ``rope``: pairs are (2 j, 2 j + 1) in k_pe and (j, j + e / 2) in the key, as in Megatron.

    Returns:
        key ``[..., h, k_dim + e]`` and value ``[..., h, v_dim]``, contiguous; neither shares memory with kv. A kernel
        differentiates in kv and k_pe, any number of times; eager PyTorch differentiates in the angles. The gradient of
        k_pe is summed over heads in float32, in a fixed order, and rounded once: the same bits in each run.

    Raises:
        TypeError, ValueError: as ``rope``; nothing has been written.
    """
    if (
        type(k_dim) is not int
        or k_dim < 1
        or (max_seqlen is not None and type(max_seqlen) is not int)
        or type(cp_size) is not int
        or type(cp_rank) is not int
    ):
        k_dim = k_dim_of(k_dim)
        _, max_seqlen, cp_size, cp_rank = whole_numbers(None, max_seqlen, cp_size, cp_rank)
    if sections is not None:
        sections = sections_of(sections)
    settings = (
        tensor_format, interleaved, False, None, angle_entries, max_seqlen, attention_scaling, cp_size, cp_rank,
        "first", conjugate, sections, interleaved_sections, None, deinterleave, k_dim, "forward",
    )  # fmt: skip
    return rope_call.call(  # type: ignore[no-any-return]
        kv,
        k_pe,
        freqs,
        cos,
        sin,
        cos_sin_cache,
        inv_freq,
        freqs_cis,
        cu_seqlens,
        positions,
        offset,
        None,
        None,
        settings,
    )


def rope_append_(  # noqa: PLR0913 - the arguments of rope_qk, and of a cache
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    cache_layout: str = "NHD",
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    key_inplace: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    rounding: str = "once",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    freqs_cis: torch.Tensor | None = None,
    attention_scaling: float = 1.0,
    positions: torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
    rotated: str = "first",
    conjugate: bool = False,
    sections: Sequence[int] | None = None,
    interleaved_sections: bool = False,
) -> torch.Tensor:
    """Rotate a query in place, and write the rotated key and the value to the pages of a cache, in one launch.

    Angles and positions are those of ``rope_qk`` for packed tokens (tensor_format "thd"): give positions, one per
    token, or cu_seqlens. The key is rounded once, to the dtype of the cache. There is no gradient. The other arguments:

    * q: ``[t, h, d]``, float32, float16 or bfloat16 on a GPU, any strides: overwritten. k and v: ``[t, kv_heads, d]``, of the
      dtype of q; they may be views of one qkv, which are read without a copy.
    * key_cache, value_cache: ``[pages, page_size, kv_heads, d]`` with cache_layout "NHD" (vLLM's flash layout,
      FlashInfer), ``[pages, kv_heads, page_size, d]`` with "HND"; any strides, so both may be views of one tensor. The
      dtype of k, or torch.float8_e4m3fn, whose largest number is 448: larger values are clamped to it. A kernel writes
      float8 from compute capability 8.9 on; below, PyTorch's operators do. The caches must not share memory with q, k
      or v; this is not checked.
    * slot_mapping: int32 or int64, at most ``[t]``: where in the caches each of the first tokens goes, page * page_size + slot.
      A token that has a negative slot, or none, or one past the last page, is written to no cache; its query is rotated. No
      two tokens may have the same slot.
    * key_scale, value_scale: float32, one number or one per kv head, on the device of q: float8 caches hold
      key / key_scale.
    * key_inplace: overwrite k too, with the rotated key, for attention that reads k beside the cache.
    * q_weight, k_weight, eps, zero_centered, rounding: RMSNorm of each head of q and k first, as in ``qk_norm_rope``.

    Tokens outside every sequence of cu_seqlens are left as they are, and written to no cache. Values on a GPU are not read by
    the host: a CUDA graph can be replayed with new slots.

    Returns:
        q itself.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: something requires a gradient while gradients are enabled; nothing has been written.
    """
    if sections is not None:
        sections = sections_of(sections)
    if (rotary_dim is not None and type(rotary_dim) is not int) or (
        max_seqlen is not None and type(max_seqlen) is not int
    ):
        rotary_dim, max_seqlen, _, _ = whole_numbers(rotary_dim, max_seqlen, 1, 0)
    norm = ("", 0.0, False, "once") if q_weight is None and k_weight is None else ("head", eps, zero_centered, rounding)
    settings = (
        "thd", interleaved, False, rotary_dim, angle_entries, max_seqlen, attention_scaling, 1, 0, rotated, conjugate,
        sections, interleaved_sections, None, False, 0, "forward", *norm,
    )  # fmt: skip
    return rope_append.call(  # type: ignore[no-any-return]
        q, k, v, key_cache, value_cache, slot_mapping, freqs, cos, sin, cos_sin_cache, inv_freq, freqs_cis, cu_seqlens,
        positions, offset, q_weight, k_weight, key_scale, value_scale, settings, cache_layout, key_inplace,
    )  # fmt: skip


def gru_cell(  # noqa: PLR0913 - the arguments of torch.gru_cell
    x: torch.Tensor | tuple[torch.Tensor, ...],
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    *,
    inplace: bool = False,
    resets: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of a GRU, as torch.nn.GRUCell computes it: one kernel, or two library GEMMs and one kernel for the gates.

    Args:
        x: input, ``[batch, input_size]``; or a tuple of segments ``[batch, k_i]``, taken as if concatenated.
        h: hidden state, ``[batch, hidden]``.
        weight_ih: ``[3 * hidden, input_size]``, gates in the order r, z, n.
        weight_hh: ``[3 * hidden, hidden]``.
        bias_ih: ``[3 * hidden]``, or None together with bias_hh.
        bias_hh: ``[3 * hidden]``, or None together with bias_ih.
        inplace: overwrite h and return it. Two GEMMs read h before a kernel for the gates overwrites it; with resets the step
            runs out of place and its result is copied.
        resets: bool ``[batch]``, on the device of h: the rows whose state is taken as 0.

    Returns:
        The next hidden state ``[batch, hidden]``, or h itself in place. If a gradient is needed, eager PyTorch computes it.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: h cannot be overwritten without losing a gradient; nothing has been written.
    """
    if resets is not None:
        check_flag("inplace", inplace)
        marks = reset_rows(h, resets)
        state = h.masked_fill(marks, 0)
        if inplace:  # x may be h itself, and a step that fails leaves h as it was
            _checked_overwrite(x, h, weight_ih, weight_hh, bias_ih, bias_hh)
            return h.copy_(gru_cell(x, state, weight_ih, weight_hh, bias_ih, bias_hh))
        h = state
    if not torch.compiler.is_dynamo_compiling():
        known = gru_cell_run.known(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
        if known is not None:
            return known  # type: ignore[no-any-return]
    check_flag("inplace", inplace)
    tensors = (x, h, weight_ih, weight_hh, bias_ih, bias_hh)
    segments, given = _checked_overwrite(*tensors) if inplace else checked_cell(*tensors, False)  # noqa: FBT003
    if serve.by_operator((*segments, *given)):
        from tuned.calls.recurrent import traced  # noqa: PLC0415 - registering operators takes 10 ms, and only this path needs them

        out: torch.Tensor = traced.gru_cell(segments, *given)
        return h.copy_(out) if inplace else out
    out = serve.gru_cell(segments, *given, inplace=inplace)
    if inplace:
        bump_versions(h)
    return out


def _checked_overwrite(x: Any, h: Any, *weights: Any) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """``checked_cell`` for a step that overwrites h.

    Raises:
        RuntimeError: h cannot be overwritten without losing a gradient.
    """
    segments, given = checked_cell(x, h, *weights, True)  # noqa: FBT003
    # Dynamo cannot tell whether h is a view; the check below refuses every tensor that requires a gradient.
    if not torch.compiler.is_dynamo_compiling():
        refuse_overwrite(h)
    if torch.is_grad_enabled() and any(t.requires_grad for t in serve.present(*segments, *given)):
        raise RuntimeError("h is overwritten, and its old value is needed for a gradient; use inplace=False")
    return segments, given


def gru(  # noqa: PLR0913 - the arguments of torch.gru
    input: torch.Tensor,  # noqa: A002 - its name there
    hx: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
    batch_sizes: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    recompute: bool = False,
    resets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GRU over whole sequences, as torch.nn.GRU computes it (gates r, z, n; reset after the product).

    All tensors have one floating dtype, except under autocast; kernels take float32, float16 and bfloat16.
    With D = 2 if bidirectional else 1, L layers, hidden size H:

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` batch_first, any strides; or packed, ``[rows, I]``, with one of
            batch_sizes and cu_seqlens.
        hx: the first hidden states, ``[L * D, B, H]``; with batch_sizes, in the order in which the sequences are
            packed.
        weights: for each layer, for each direction: w_ih ``[3 * H, I]`` (``[3 * H, D * H]`` above the first layer), w_hh
            ``[3 * H, H]`` and, with bias, b_ih and b_hh ``[3 * H]``; the order of torch.nn.GRU's parameters.
        bias: whether weights has biases.
        num_layers: L.
        dropout: probability that an element between two layers is zeroed, in training.
        training: whether to drop.
        bidirectional: run each layer backwards too; outputs of the two directions stand side by side.
        batch_first: the axes of input and output; not for packed input.
        batch_sizes: the number of sequences at each step, int64 ``[T]`` on the CPU, as in torch's PackedSequence.
        cu_seqlens: where the sequences start in rows, int32 ``[B + 1]`` on the device of input, from 0 to the number of
            rows. Sequences may be empty and in any order. Values on a GPU are not checked.
        max_seqlen: at least the longest length; with cu_seqlens.
        recompute: for training: the backward multiplies the input by its weights a second time, so that the forward
            keeps 3 * D * H values fewer for each layer and each step of each sequence.
        resets: bool, ``[T, B]``, ``[B, T]`` batch_first or ``[rows]`` packed, on the device of input, any strides: the
            state of every layer is 0 before the steps that are marked, as if a new sequence began there; the direction
            that goes backwards is cut between the same two steps. A mark at a sequence's first step drops its hx.

    Returns:
        output, ``[T, B, D * H]``, ``[B, T, D * H]`` or ``[rows, D * H]``, and h_n ``[L * D, B, H]``, in the dtype of
        input; under autocast, in the dtypes that PyTorch returns. Kernels compute the gradients too, with the same bits
        in each run, where a row of this GPU says that they are faster than PyTorch; gradients of gradients are
        PyTorch's.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    # An iterator, such as module.parameters(), could be read only once.
    if type(weights) not in (list, tuple) and isinstance(weights, Iterator):
        weights = tuple(weights)
    if (
        cu_seqlens is None
        and max_seqlen is None
        and type(training) is type(recompute) is bool
        and type(dropout) in _NUMBERS
        and (dropout == 0 or (not training and 0 < dropout <= 1))
        and not torch.compiler.is_dynamo_compiling()
    ):
        settings = (bias, num_layers, bidirectional, batch_first)
        known = gru_plan.known(input, hx, weights, settings, resets, batch_sizes)
        if known is None and batch_sizes is None:
            known = gru_training.known(input, hx, weights, settings, resets, recompute=recompute)
        if known is not None:
            return known
    call = gru_call(
        input,
        hx,
        weights,
        bias=bias,
        num_layers=num_layers,
        dropout=dropout,
        training=training,
        bidirectional=bidirectional,
        batch_first=batch_first,
        batch_sizes=batch_sizes,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        recompute=recompute,
        resets=resets,
    )
    if serve.by_operator((*call.tensors, resets), reads=resets is not None or cu_seqlens is not None):
        from tuned.calls.recurrent import traced  # noqa: PLC0415

        return traced.gru(call)
    return serve.gru(call)


def linear_cat(
    inputs: tuple[torch.Tensor, ...], weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """torch.nn.functional.linear of several inputs, taken as if concatenated in their last axis.

    Args:
        inputs: segments ``[..., k_i]``, equal in all but k_i.
        weight: ``[n, sum of k_i]``.
        bias: ``[n]`` or None.

    Returns:
        ``[..., n]``. If no kernel serves the call, eager PyTorch concatenates the segments. It also does so if a
        gradient is needed, except while a CUDA graph is captured.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if not torch.compiler.is_dynamo_compiling():
        known = linear_cat_run.known(inputs, weight, bias)
        if known is not None:
            return known  # type: ignore[no-any-return]
    check_linear_cat(inputs, weight, bias)
    if serve.by_operator((*inputs, weight, bias)):
        from tuned.calls.recurrent import traced  # noqa: PLC0415

        return traced.linear_cat(inputs, weight, bias)
    return serve.linear_cat(inputs, weight, bias)


# Name -> the function defined here, even if a profiler replaces the module's attribute later.
DEFINED = {
    f.__name__: f
    for f in (
        rope,
        rope_qk,
        rope_qkv,
        rope_backward,
        qk_norm_rope,
        qkv_norm_rope_,
        mla_kv_rope,
        rope_append_,
        gru_cell,
        gru,
        linear_cat,
    )
}


def explain_rope(function: Any, *args: Any, **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of one of the rotating functions above, and its spec; nothing runs."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    if function is rope_append_:
        return _explain_append(named)
    if function is qkv_norm_rope_:
        return _explain_packed_norm(**named)
    x, key = named.pop(next(iter(named))), named.pop("k_pe" if function is mla_kv_rope else "k", None)
    if function is mla_kv_rope:
        named["k_dim"] = k_dim_of(named["k_dim"])
    named["sections"] = None if named["sections"] is None else sections_of(named["sections"])
    counts = ("rotary_dim", "max_seqlen", "cp_size", "cp_rank")
    named |= {"rotary_dim": None} if function is mla_kv_rope else {}
    named |= zip(counts, whole_numbers(*map(named.get, counts)), strict=True)
    if function is rope_qkv:
        named["kv_heads"] = 0 if named["kv_heads"] is None else kv_heads_of(named["kv_heads"])
    named["offset"] = offset_of(named["offset"], named["positions"])
    direction = "backward" if function is rope_backward else "forward"
    weights = {"weight": named.pop("q_weight", None), "key_weight": named.pop("k_weight", None)}
    given = Given(x, key, **{name: named.pop(name) for name in Given._fields[2:-2]}, **weights)
    return rope_call.explain(given, Settings(**named, direction=direction))


def _explain_packed_norm(
    qkv: Any, kv_heads: Any, tensor_format: Any, others: dict[str, Any], **named: Any
) -> tuple[Choice, Any]:
    if "inplace" in others:
        raise _told_inplace()
    settings = Settings(tensor_format, kv_heads=0 if kv_heads is None else kv_heads_of(kv_heads), inplace=True)
    q, k = packed_parts(qkv, settings)
    return explain_rope(qk_norm_rope, q, k, tensor_format=tensor_format, inplace=True, **named, **others)


def _explain_append(named: dict[str, Any]) -> tuple[Choice, Any]:
    cached = rope_append.Cached(named.pop("v"), *(named.pop(name) for name in rope_append.Cached._fields[1:]))
    layout, key_inplace = named.pop("cache_layout"), named.pop("key_inplace")
    weights = {"weight": named.pop("q_weight"), "key_weight": named.pop("k_weight")}
    if all(weight is None for weight in weights.values()):
        for name in ("eps", "zero_centered", "rounding"):
            del named[name]
    else:
        named["norm"] = "head"
    named["sections"] = None if named["sections"] is None else sections_of(named["sections"])
    numbers = whole_numbers(named["rotary_dim"], named["max_seqlen"], 1, 0)
    named |= zip(("rotary_dim", "max_seqlen"), numbers, strict=False)
    named["offset"] = offset_of(named["offset"], named["positions"])
    x, key = named.pop("q"), named.pop("k")
    given = Given(x, key, **{name: named.pop(name) for name in Given._fields[2:-2]}, **weights)
    settings = Settings(tensor_format="thd", **named)
    return rope_append.explain(given, cached, rope_append.Asked(settings, layout, key_inplace))
