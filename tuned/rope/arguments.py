"""Check the arguments of a RoPE call and turn them into a Spec, a size and a RopeCall. Nothing is written here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tuned.rope.launches import RopeCall
from tuned.rope.spec import LAYOUTS, RopeSize, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TOKENS = 2**31 - 1  # token indices are 32-bit inside the kernels; offsets are 64-bit


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _angle_rows(name: str, tensor: Any, device: torch.device) -> torch.Tensor:
    """A tensor of angles as [rows, entries], a view."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim < 2 or any(n != 1 for n in tensor.shape[1:-1]):  # noqa: PLR2004
        raise ValueError(
            f"{name} must be [rows, entries], or with dimensions of 1 between, such as [rows, 1, 1, entries]; "
            f"got {list(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of x, {device}, got {tensor.device}: move it with .to()")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[0], tensor.shape[-1])  # noqa: PLR2004


def _angles(freqs: Any, cos: Any, sin: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """The angle tensors as [rows, entries], and which kind they are."""
    if freqs is not None and (cos is not None or sin is not None):
        raise ValueError("give freqs, or cos and sin, not both: they say the same thing")
    if freqs is not None:
        rows = _angle_rows("freqs", freqs, device)
        if rows.dtype != torch.float32:
            raise TypeError(
                f"freqs must be float32, got {rows.dtype}: angles of 1e5 rad have no digits left in 16 bits; "
                "convert with .float(), or pass cos and sin"
            )
        return rows, None, "freqs"
    if cos is None or sin is None:
        raise ValueError("give the angles: freqs in radians, or both cos and sin")
    cos, sin = _angle_rows("cos", cos, device), _angle_rows("sin", sin, device)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos and sin must have one shape and dtype, got {list(cos.shape)} {cos.dtype} "
            f"and {list(sin.shape)} {sin.dtype}"
        )
    if _name(cos.dtype) not in ("float32", "float16", "bfloat16", "float64"):
        raise TypeError(f"cos and sin must be float16, bfloat16, float32 or float64, got {cos.dtype}")
    if cos.stride() != sin.stride():  # the kernel walks both by one pair of strides; angles are small
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, "cos_sin"


def _rotary_dim(entries: int, angle_entries: str, rotary_dim: int | None, head_dim: int) -> int:
    if angle_entries not in ("feature", "pair"):
        raise ValueError(
            'angle_entries must be "feature" (one entry a rotated feature) or "pair" (one a pair, half as many), '
            f"got {angle_entries!r}"
        )
    implied = entries if angle_entries == "feature" else 2 * entries
    told = f"angles with {entries} entries, one a {angle_entries}, rotate {implied} features"
    other = "pair" if angle_entries == "feature" else "feature"
    if rotary_dim is not None and rotary_dim != implied:
        raise ValueError(
            f'rotary_dim={rotary_dim} does not fit: {told}; if each entry is for a {other}, pass angle_entries="{other}"'
        )
    if implied % 2 or not 0 < implied <= head_dim:
        raise ValueError(
            f"rotary_dim must be even and in (0, head_dim={head_dim}], but {told}; "
            f'if each entry is for a {other}, pass angle_entries="{other}"'
        )
    return implied


def _packed(cu_seqlens: Any, max_seqlen: int | None, device: torch.device, angle_rows: int) -> None:
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        what = list(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(f'tensor_format "thd" needs cu_seqlens, a tensor of [sequences + 1], got {what}')
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}: convert with .to(torch.int32)")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on the device of x, {device}, got {cu_seqlens.device}")
    if max_seqlen is not None and max_seqlen > angle_rows:
        raise ValueError(
            f"the angles are too short: {angle_rows} positions for sequences of up to max_seqlen={max_seqlen}; "
            "make them at least as long"
        )


def strides_of(layout: str, tensor: Any) -> tuple[int, int, int, int]:
    """Strides in elements as the kernels take them: seq, batch, heads, head_dim."""
    first, *rest = tensor.stride()
    if layout == "thd":
        return first, 0, rest[0], rest[1]
    return (rest[0], first, rest[1], rest[2]) if layout == "bshd" else (first, *rest)


class Prepared(NamedTuple):
    """A checked call."""

    spec: RopeSpec | None  # None where no kernel takes the dtype of x
    size: RopeSize
    call: RopeCall
    eager_spec: RopeSpec  # for eager PyTorch, which does not read the dtype from it


def prepare(  # noqa: PLR0913 - the arguments of the public call
    x: Any,
    freqs: Any,
    cos: Any,
    sin: Any,
    cu_seqlens: Any,
    tensor_format: str,
    interleaved: bool,  # noqa: FBT001
    inplace: bool,  # noqa: FBT001
    rotary_dim: int | None,
    angle_entries: str | None,
    max_seqlen: int | None,
    direction: str,
    *,
    make_out: Callable[[torch.Tensor], torch.Tensor],
) -> Prepared:
    """The call, checked; out of place its output is what ``make_out`` makes of x.

    Raises:
        TypeError: a tensor of the wrong kind or dtype.
        ValueError: a shape, device, layout or combination that is not allowed. Nothing has been written.
    """
    if tensor_format not in LAYOUTS:
        raise ValueError(f"tensor_format must be one of {LAYOUTS}, got {tensor_format!r}")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    axes = 3 if tensor_format == "thd" else 4
    if x.ndim != axes:
        raise ValueError(
            f"x must be [{', '.join(tensor_format)}] for tensor_format {tensor_format!r}, got {list(x.shape)}"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(f"x must be floating point, got {x.dtype}")
    angles, second, kind = _angles(freqs, cos, sin, x.device)
    if angle_entries is None:
        angle_entries = "feature" if kind == "freqs" else "pair"
    heads, head_dim = x.shape[-2:]
    rotary = _rotary_dim(angles.shape[-1], angle_entries, rotary_dim, head_dim)
    packed = tensor_format == "thd"
    if packed:
        _packed(cu_seqlens, max_seqlen, x.device, angles.shape[0])
        seq, batch, sequences = x.shape[0], 1, cu_seqlens.numel() - 1
        size = RopeSize(max(sequences, 1), max(1, round(seq / max(sequences, 1))))
    else:
        if cu_seqlens is not None or max_seqlen is not None:
            raise ValueError(f'cu_seqlens and max_seqlen are for tensor_format "thd", got {tensor_format!r}')
        seq, batch = (x.shape[1], x.shape[0]) if tensor_format == "bshd" else (x.shape[0], x.shape[1])
        sequences, size = 0, RopeSize(batch, seq)
        if angles.shape[0] < seq:
            raise ValueError(
                f"the angles are too short: {angles.shape[0]} positions for a sequence of {seq}; make them at least as long"
            )
    if x.numel() and seq * batch > MAX_TOKENS:
        raise ValueError(f"seq * batch must be at most {MAX_TOKENS}, got {seq * batch}: split the call")
    if inplace and any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
        raise ValueError("x cannot be overwritten: some of its elements share memory (stride 0); use inplace=False")
    fields: dict[str, Any] = {
        "layout": tensor_format,
        "heads": max(heads, 1),
        "head_dim": head_dim,
        "rotary_dim": rotary,
        "style": "interleaved" if interleaved else "half",
        "angles": kind,
        "angle_dtype": _name(angles.dtype),
        "angle_entries": angle_entries,
        "inplace": inplace,
        "direction": direction,
    }
    supported = _name(x.dtype) in ("float32", "float16", "bfloat16")
    # Eager PyTorch takes float64 too; the spec has no word for it.
    spec = RopeSpec(dtype=_name(x.dtype) if supported else "float32", **fields)
    out = x if inplace else make_out(x)
    call = RopeCall(
        x=x,
        out=out,
        cos=angles,
        sin=second,
        seq=seq,
        batch=batch,
        angle_rows=angles.shape[0],
        x_strides=strides_of(tensor_format, x),
        out_strides=strides_of(tensor_format, out),
        angle_strides=(angles.stride(0), angles.stride(1)),
        cu_seqlens=cu_seqlens,
        sequences=sequences,
    )
    return Prepared(spec if supported else None, size, call, spec)
