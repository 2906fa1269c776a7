"""Tensors as they are taken by the kernels that multiply inputs by weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tuned.families.products import MAX_SEGMENTS

MAX_ELEMENTS = 2**31  # of a weight: the kernels compute offsets in it in 32 bits


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a spec."""
    return str(dtype).removeprefix("torch.")


def _slowly(_backend: str, products: str) -> str:
    of = torch.backends.cuda.matmul if products == "matmul" else torch.backends.cudnn.rnn
    return of.fp32_precision


# Each call asks this, and torch.backends takes 5 to 20 times as long to answer. (allow_tf32 raises after a program has used the
# newer setting; fp32_precision follows both.)
_precision: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", _slowly)  # noqa: SLF001


def precision_of(dtype: torch.dtype) -> str:
    """The precision of float32 products now, "tf32" or "ieee": torch's setting for GEMMs on a GPU. "" for other dtypes."""
    if dtype != torch.float32:
        return ""
    return "tf32" if _precision("cuda", "matmul") == "tf32" else "ieee"


def recurrent_precision() -> str:
    """The precision of a GRU's float32 products, "tf32" or "ieee": torch's setting for cuDNN's recurrent networks."""
    return "tf32" if _precision("cuda", "rnn") == "tf32" else "ieee"


def rows_of(t: torch.Tensor) -> torch.Tensor:
    """A 2D tensor with last stride 1: itself, or a copy."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def weight_of(t: torch.Tensor) -> torch.Tensor:
    """A weight with last stride 1 and offsets that fit in 32 bits: itself, or a copy."""
    return rows_of(t) if t.stride(0) * t.shape[0] < MAX_ELEMENTS else t.contiguous()


def used(segments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The segments that are not empty; concatenated if there are more than the kernels take."""
    wide = tuple(t for t in segments if t.shape[-1])
    return wide if len(wide) <= MAX_SEGMENTS else (torch.cat(wide, -1),)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that torch.autocast casts to on a device type; None if it is off or, as on "meta", unknown."""
    # torch.amp.is_autocast_available would tell for any device type, but torch 2.11's Dynamo cannot trace it.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
