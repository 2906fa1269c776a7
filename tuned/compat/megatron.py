"""The calls of NVIDIA/Megatron-LM for multi-head latent attention: ``fused_apply_mla_rope_for_q`` and ``_for_kv``.

They are those of ``megatron.core.fusions.fused_mla_yarn_rope_apply``. As in Megatron, pairs are neighbouring features
in the arguments and (j, j + emb_dim / 2) in the results, and ``rotary_interleaved`` must be False. The ranks of context
parallelism matter with cu_seqlens only: without it, cos and sin have the angles of this rank's tokens. They differ from
Megatron's in these ways: tensors may have any strides; arithmetic is in float32 with one rounding; tokens past the last
of cu_seqlens keep their angle 0 (Megatron rotates them as first tokens, which no loss sees); the gradient of q is
written to new memory (in Megatron over the gradient that was given); and gradients of gradients can be taken.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.overlap import check_strides, refuse_overlap
from tuned.calls.refusal import check_dense, no_tensor
from tuned.calls.rope.arguments import whole_number
from tuned.dispatch import mla_kv_rope, rope


def fused_apply_mla_rope_for_q(  # noqa: PLR0913 - the arguments of Megatron
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
) -> torch.Tensor:
    """Rotate the last features of each query head in place.

    Args:
        t: ``[s, b, h, qk_head_dim + emb_dim]``, or with cu_seqlens_q ``[t, h, qk_head_dim + emb_dim]``; any strides.
        cos: ``[rows, 1, 1, emb_dim]``, any float dtype; entries j and j + emb_dim / 2 belong to a pair, and may differ.
        sin: like cos.
        qk_head_dim: features of a head that do not rotate.
        emb_dim: features of a head that rotate.
        cu_seqlens_q: int32 ``[sequences + 1]``, where whole sequences start.
        cp_rank: this rank; with cu_seqlens_q.
        cp_size: ranks that share each sequence; with cu_seqlens_q.
        rotary_interleaved: must be False.

    Returns:
        t itself, whose pairs are now (j, j + emb_dim / 2) of the rotated features.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: t cannot be overwritten without losing a gradient; nothing has been written.
    """
    _refuse_interleaved(rotary_interleaved)
    if not isinstance(t, torch.Tensor):
        raise no_tensor(t=t)
    features = t.shape[-1] if t.ndim else 0
    if whole_number("qk_head_dim", qk_head_dim) + whole_number("emb_dim", emb_dim) != features:
        raise ValueError(
            f"qk_head_dim + emb_dim must be the features of a head of t, {features}, got {qk_head_dim} + {emb_dim}: pass how many "
            "do not rotate, and how many do"
        )
    packed = cu_seqlens_q is not None
    return rope(
        t,
        cos=cos,
        sin=sin,
        tensor_format="thd" if packed else "sbhd",
        inplace=True,
        rotary_dim=emb_dim,
        angle_entries="feature",
        cu_seqlens=cu_seqlens_q,
        cp_size=cp_size if packed else 1,
        cp_rank=cp_rank if packed else 0,
        rotated="last",
        deinterleave=True,
    )


def fused_apply_mla_rope_for_kv(  # noqa: PLR0913 - the arguments of Megatron
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,  # noqa: FBT001, FBT002 - its order
    out_key: torch.Tensor | None = None,
    out_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value of kv, with the rotated k_pos_emb in every head's key, in one launch.

    Args:
        kv: ``[s, b, h, k_dim + v_dim]``, or with cu_seqlens_kv ``[t, h, k_dim + v_dim]``; any strides.
        k_pos_emb: ``[s, b, 1, emb_dim]`` or ``[t, 1, emb_dim]``; any strides.
        cos: ``[rows, 1, 1, emb_dim]``, any float dtype; entries j and j + emb_dim / 2 belong to a pair, and may differ.
        sin: like cos.
        emb_dim: features of k_pos_emb.
        k_dim: features of each head of kv that belong to the key.
        v_dim: features of each head of kv that belong to the value.
        cu_seqlens_kv: int32 ``[sequences + 1]``, where whole sequences start.
        cp_rank: this rank; with cu_seqlens_kv.
        cp_size: ranks that share each sequence; with cu_seqlens_kv.
        rotary_interleaved: must be False.
        out_key: a tensor that the key is copied to, and returned in; given together with out_value.
        out_value: the same for the value.

    Returns:
        key ``[..., h, k_dim + emb_dim]`` and value ``[..., h, v_dim]``.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
    """
    _refuse_interleaved(rotary_interleaved)
    for name, tensor in (("kv", kv), ("k_pos_emb", k_pos_emb)):
        if not isinstance(tensor, torch.Tensor):
            raise no_tensor(**{name: tensor})
    for names, tensor, counts in (("k_dim + v_dim", kv, (k_dim, v_dim)), ("emb_dim", k_pos_emb, (emb_dim,))):
        features = tensor.shape[-1] if tensor.ndim else 0
        if sum(whole_number(names.split(" + ")[i], count) for i, count in enumerate(counts)) != features:
            of = "kv" if tensor is kv else "k_pos_emb"
            raise ValueError(
                f"{names} must be the features of a head of {of}, {features}, got {' + '.join(map(str, counts))}: pass those of the model"
            )
    if (out_key is None) != (out_value is None):
        one, other = ("out_value", "out_key") if out_key is None else ("out_key", "out_value")
        raise ValueError(
            f"out_key and out_value must come together, got {one} without {other}: give both, or leave both out"
        )
    packed = cu_seqlens_kv is not None
    key, value = mla_kv_rope(
        kv,
        k_pos_emb,
        cos=cos,
        sin=sin,
        k_dim=k_dim,
        tensor_format="thd" if packed else "sbhd",
        deinterleave=True,
        angle_entries="feature",
        cu_seqlens=cu_seqlens_kv,
        cp_size=cp_size if packed else 1,
        cp_rank=cp_rank if packed else 0,
    )
    if out_key is None or out_value is None:
        return key, value
    for name, out, made in (("out_key", out_key, key), ("out_value", out_value, value)):
        if not isinstance(out, torch.Tensor):
            raise no_tensor(**{name: out})
        if out.shape != made.shape or out.dtype != made.dtype or out.device != made.device or out.requires_grad:
            raise ValueError(
                f"{name} must be {list(made.shape)} {made.dtype} on {made.device} without a gradient, got {list(out.shape)} {out.dtype} "
                f"on {out.device}{' that requires one' if out.requires_grad else ''}: pass {name}=None for new memory"
            )
        check_dense({name: out})
        check_strides(name, out, f"pass {name}=None for new memory")
    refuse_overlap(out_key, out_value, "out_key and out_value", "pass None for new memory")
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return _Kept.apply(key, value, out_key, out_value)  # type: ignore[no-any-return, no-untyped-call]
    return out_key.copy_(key), out_value.copy_(value)


class _Kept(torch.autograd.Function):
    """Copies results into the caller's tensors, which the next step gives again: these have no graph, as in Megatron."""

    @staticmethod
    def forward(  # type: ignore[override]
        key: torch.Tensor, value: torch.Tensor, out_key: torch.Tensor, out_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return out_key.copy_(key), out_value.copy_(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, grad_key: Any, grad_value: Any) -> tuple[Any, Any, None, None]:  # type: ignore[override]
        return grad_key, grad_value, None, None


def _refuse_interleaved(rotary_interleaved: bool) -> None:  # noqa: FBT001
    if rotary_interleaved is not False:
        raise ValueError(
            f"rotary_interleaved must be False, got {rotary_interleaved!r}: Megatron's function has no other; for results whose pairs "
            "are neighbours call tuned.dispatch.rope and mla_kv_rope with interleaved=True"
        )
