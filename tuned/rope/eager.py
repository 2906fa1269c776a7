"""RoPE in eager PyTorch: what a call gets on a CPU, in float64, or when the angles need a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tuned.rope.launches import RopeCall
    from tuned.rope.spec import RopeSpec


def positions(seq: int, cu_seqlens: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each packed token in its sequence, and whether any sequence holds it: [seq] both. No host sync."""
    tokens = torch.arange(seq, device=device, dtype=torch.int32)
    owner = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    inside = (owner >= 0) & (tokens < cu_seqlens[-1])
    return tokens - cu_seqlens[owner.clamp(min=0)], inside


def rotate(spec: RopeSpec, call: RopeCall) -> torch.Tensor:
    """A new tensor with the rotated features of ``call.x``; differentiable in x and in the angles."""
    x = call.x
    compute = torch.promote_types(x.dtype, torch.float32)
    cos = (torch.cos(call.cos) if spec.takes_sine else call.cos).to(compute)
    sin = (torch.sin(call.cos) if spec.takes_sine else call.sin).to(compute)
    inside = None
    if spec.packed:
        rows, inside = positions(call.seq, call.cu_seqlens, x.device)
        known = (rows < call.angle_rows)[:, None]
        rows = rows.clamp(0, max(call.angle_rows - 1, 0))
        if call.angle_rows:
            cos, sin = (torch.where(known, a[rows], torch.nan) for a in (cos, sin))
        else:
            cos = sin = torch.full((call.seq, cos.shape[-1]), torch.nan, dtype=compute, device=x.device)
    else:
        cos, sin = cos[: call.seq], sin[: call.seq]
    # [seq, entries] to the axes of x before its last
    shape = {"bshd": (1, -1, 1), "sbhd": (-1, 1, 1), "thd": (-1, 1)}[spec.layout]
    cos, sin = (a.reshape(*(call.seq if n == -1 else n for n in shape), a.shape[-1]) for a in (cos, sin))
    head = x[..., : spec.rotary_dim].to(compute)
    half = spec.rotary_dim // 2
    pair_cos, pair_sin = (cos, cos), (sin, sin)
    if spec.interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        if spec.angle_entries == "feature":
            pair_cos, pair_sin = (cos[..., 0::2], cos[..., 1::2]), (sin[..., 0::2], sin[..., 1::2])
    else:
        first, second = head[..., :half], head[..., half:]
        if spec.angle_entries == "feature":
            pair_cos, pair_sin = (cos[..., :half], cos[..., half:]), (sin[..., :half], sin[..., half:])
    if spec.direction == "backward":
        pair_sin = (-pair_sin[1], -pair_sin[0])
    out_first = first * pair_cos[0] - second * pair_sin[0]
    out_second = second * pair_cos[1] + first * pair_sin[1]
    if spec.interleaved:
        rotated = torch.stack((out_first, out_second), -1).flatten(-2)
    else:
        rotated = torch.cat((out_first, out_second), -1)
    out = torch.cat((rotated.to(x.dtype), x[..., spec.rotary_dim :]), -1)
    return out if inside is None else torch.where(inside[:, None, None], out, x)
