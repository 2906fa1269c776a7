"""Check the arguments of a RoPE call and turn them into a Spec, a size and a RopeCall. No tensor is written here."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tuned.calls.overlap import check_strides, refuse_overlap, wrapped
from tuned.calls.refusal import check_dense, check_flag, is_number
from tuned.calls.rope.mistakes import (
    complex_hint,
    heads_first_hint,
    readable,
    refuse_bounds,
    refuse_cosines_alone,
    warn_if_half_of_the_head,
    warn_if_heads_come_first,
)
from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import ANGLE_ENTRIES, LAYOUTS, MOST_AXES, NORMS, ROTATED, ROUNDINGS, RopeSize, RopeSpec

# Token indices are 32-bit inside the kernels, and rounded up to whole tiles; offsets in memory are 64-bit.
MAX_TOKENS = 2**31 - 64
SUPPORTED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
ANGLE_DTYPES = {**SUPPORTED, torch.float64: "float64"}
INDICES = (torch.int32, torch.int64)
_Strides = tuple[int, int, int, int]
AXES = {"bshd": 4, "sbhd": 4, "thd": 3, "bhsd": 4}
FORMATS = (*LAYOUTS, "bhsd")  # the last is a view of bshd: kernels know its strides, not its name


class Given(NamedTuple):
    """The tensors of a call, and its offset, which is an int or a tensor."""

    x: Any
    key: Any = None
    freqs: Any = None
    cos: Any = None
    sin: Any = None
    cos_sin_cache: Any = None
    inv_freq: Any = None
    freqs_cis: Any = None
    cu_seqlens: Any = None
    positions: Any = None
    offset: Any = 0
    weight: Any = None
    key_weight: Any = None


class Sources(NamedTuple):
    """Which arguments of the public call the tensors of a plan come from."""

    angles: str
    positions: str | None  # "positions", or "offset" if that is a tensor
    # Cos and sin differ in strides, or cu_seqlens or a norm's weight is not contiguous: they are copied in each call.
    copied: bool

    @classmethod
    def of(cls, given: Given) -> Sources:
        """The sources of a call."""
        names = ("freqs", "cos_sin_cache", "inv_freq", "freqs_cis", "cos")
        angles = next((name for name in names if getattr(given, name) is not None), "freqs")
        ids = given.positions is not None
        positions = "positions" if ids else "offset" if isinstance(given.offset, torch.Tensor) else None
        both = isinstance(given.cos, torch.Tensor) and isinstance(given.sin, torch.Tensor)
        apart = both and given.cos.stride() != given.sin.stride()
        dense = (given.cu_seqlens, given.weight, given.key_weight)
        return cls(
            angles, positions, apart or any(isinstance(t, torch.Tensor) and not t.is_contiguous() for t in dense)
        )

    def given(  # noqa: PLR0913 - the arguments of Plan.run
        self,
        x: Any,
        key: Any,
        angles: Any,
        sin: Any,
        cu_seqlens: Any,
        positions: Any,
        offset: Any,
        _addresses: tuple[int, ...] = (),
        weights: Any = None,
    ) -> Given:
        """The arguments of the public call, from those of ``Plan.run``."""
        tensors = {self.angles: angles, "sin": sin, "cu_seqlens": cu_seqlens, "offset": offset}
        if weights is not None:
            tensors |= {"weight": weights[0], "key_weight": weights[1]}
        return Given(x, key, **tensors | ({self.positions: positions} if self.positions else {}))


class Settings(NamedTuple):
    """The arguments of a call that are not tensors.

    ``kv_heads``: None unless x is a packed qkv; then its number of kv heads, or 0 if qkv has an axis of 3 instead.
    ``k_dim``: 0 unless x is MLA's kv, and the key its k_pe; then how many features of kv belong to the key. Backward, x
    and the key are the gradients of the key and of the value.
    """

    tensor_format: str = "bshd"
    interleaved: bool = False
    inplace: bool = False
    rotary_dim: int | None = None
    angle_entries: str | None = None
    max_seqlen: int | None = None
    attention_scaling: float = 1.0
    cp_size: int = 1
    cp_rank: int = 0
    rotated: str = "first"
    conjugate: bool = False
    sections: tuple[int, ...] | None = None
    interleaved_sections: bool = False
    kv_heads: int | None = None
    deinterleave: bool = False
    k_dim: int = 0
    direction: str = "forward"
    norm: str = ""
    eps: float = 0.0
    zero_centered: bool = False
    rounding: str = "once"


class Prepared(NamedTuple):
    """A checked call."""

    spec: (
        RopeSpec | None
    )  # None if no kernel takes the dtype of x, or two tensors (but MLA's) differ in the stride of head_dim
    size: RopeSize
    call: RopeCall
    eager_spec: RopeSpec  # for eager PyTorch, which ignores its dtype


class Angles(NamedTuple):
    """Where the angles of a call come from."""

    kind: str  # as in RopeSpec.angles
    first: torch.Tensor  # [rows, entries], or [batch, rows, entries]; inv_freq: [1, entries]
    second: torch.Tensor | None


def whole_number(name: str, value: Any) -> Any:
    """An integer argument as an int. A SymInt is returned as it is; a bool is refused.

    Anything with ``__index__`` is taken. A tensor on a GPU makes the CPU wait for its value.

    Raises:
        TypeError: ``value`` is not an integer.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    tensor = isinstance(value, torch.Tensor)
    if not isinstance(value, bool) and not (tensor and value.dtype == torch.bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    what = f"a tensor of {list(value.shape)} {value.dtype}" if tensor else f"{type(value).__name__} {value!r}"
    raise TypeError(f"{name} must be an int, got {what}: convert it with int(...) if that is meant")


def whole_numbers(rotary_dim: Any, max_seqlen: Any, cp_size: Any, cp_rank: Any) -> tuple[Any, Any, Any, Any]:
    """The integer arguments of a public call, each by ``whole_number``; the first two may be None."""
    return (
        rotary_dim if rotary_dim is None else whole_number("rotary_dim", rotary_dim),
        max_seqlen if max_seqlen is None else whole_number("max_seqlen", max_seqlen),
        whole_number("cp_size", cp_size),
        whole_number("cp_rank", cp_rank),
    )


def sections_of(sections: Any) -> tuple[Any, ...]:
    """The sections that a user gave, as a tuple, with whole numbers as ints. ``prepare`` checks the numbers.

    Plans are cached by this tuple. With a tensor in it they would keep that tensor's memory, and not see it change.

    Raises:
        TypeError: the sections are not a sequence.
    """
    try:
        return tuple([n if type(n) is int else _index(n) for n in sections])
    except TypeError:
        raise TypeError(
            f"sections must be a sequence of numbers of pairs, one for each axis, got {type(sections).__name__} {sections!r}: pass the "
            "model's mrope_section, or how many pairs each axis has"
        ) from None


def kv_heads_of(kv_heads: Any) -> Any:
    """The kv_heads that a user gave for a packed qkv, as an int.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1. (In ``Settings``, 0 means an axis of 3, for which a user gives None.)
    """
    if type(kv_heads) is not int:
        kv_heads = whole_number("kv_heads", kv_heads)
    if kv_heads < 1:
        raise ValueError(
            f"kv_heads must be at least 1, got kv_heads={kv_heads}: pass None for a qkv with an axis of 3, "
            "such as [b, s, 3, h, d]"
        )
    return kv_heads


def offset_of(offset: Any, positions: Any) -> Any:
    """An offset that is not of type int: a tensor stays a tensor, anything else becomes an int."""
    if not isinstance(offset, torch.Tensor):
        return whole_number("offset", offset)
    if positions is not None:
        raise ValueError(f"give positions or an offset, not both, got {_both(offset)}: add the offset to the positions")
    return offset


def _both(offset: Any) -> str:
    """Positions and an offset that were both given, for an error message."""
    return f"positions and an offset of {list(offset.shape) if isinstance(offset, torch.Tensor) else offset}"


def _angle_tensor(name: str, tensor: Any, device: torch.device, *, batched: bool = False) -> torch.Tensor:
    """A view of a tensor of angles as [rows, entries], or, if ``batched``, maybe [batch, rows, entries]."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: convert it with torch.as_tensor(...)")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of x, {device}, got {tensor.device}: move it with .to()")
    if tensor.dtype not in ANGLE_DTYPES:
        raise TypeError(
            f"{name} must be {'real: ' if tensor.is_complex() else ''}float16, bfloat16, float32 or float64, got {tensor.dtype}: "
            + complex_hint(name, tensor)
        )
    if tensor.ndim == 2 or (batched and tensor.ndim == 3):  # noqa: PLR2004
        return tensor
    if tensor.ndim < 2 or any(n != 1 for n in tensor.shape[1:-1]):  # noqa: PLR2004
        allowed = "[rows, entries], [batch, rows, entries]" if batched else "[rows, entries]"
        raise ValueError(
            f"{name} must be {allowed}, or have axes of length 1 between rows and entries, as [rows, 1, 1, entries]; "
            f"got {list(tensor.shape)}: {_shape_hint(name, tensor)}"
        )
    return tensor.reshape(tensor.shape[0], tensor.shape[-1])


def _shape_hint(name: str, tensor: torch.Tensor) -> str:
    if tensor.ndim > 2 and tensor.shape[0] == 1:  # noqa: PLR2004
        return f"pass {name}.squeeze(0), whose rows all sequences share"
    if tensor.ndim == 4 and tensor.shape[1] == 1:  # noqa: PLR2004
        return f"pass {name}.squeeze(1), without the axis of heads"
    return "give one row per position, without axes of heads, and for each token's own position give positions"


def _radians(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        raise TypeError(
            f"{name} must be float32, got {tensor.dtype}: "
            + ("" if tensor.dtype == torch.float64 else "16 bits cannot resolve an angle of 1e5 rad; ")
            + "convert with .float(), or better make the angles in float32; or pass cos and sin"
        )
    return tensor


def _angles(given: Given, device: torch.device) -> Angles:
    """The angles of a call, which must come from exactly one source."""
    sources = {
        "freqs": given.freqs is not None,
        "cos and sin": given.cos is not None or given.sin is not None,
        "cos_sin_cache": given.cos_sin_cache is not None,
        "inv_freq": given.inv_freq is not None,
        "freqs_cis": given.freqs_cis is not None,
    }
    named = [name for name, is_given in sources.items() if is_given]
    if not named:
        raise ValueError(
            "give the angles: freqs in radians, both cos and sin, a cos_sin_cache, freqs_cis, or inv_freq; got none of them"
        )
    if len(named) > 1:
        swapped = given.freqs is not None and given.cos is not None and given.sin is None
        hint = "; cos and sin after x are taken as freqs and cos: name them, as cos=..., sin=..." if swapped else ""
        raise ValueError(f"give one source of angles, got {' and '.join(named)}: leave out all but one{hint}")
    if given.freqs is not None:
        return Angles("freqs", _radians("freqs", _angle_tensor("freqs", given.freqs, device)), None)
    if given.freqs_cis is not None:
        return _complex(given.freqs_cis, device)
    if given.inv_freq is not None:
        return Angles("inv_freq", _inv_freq(given.inv_freq, device), None)
    if given.cos_sin_cache is not None:
        cache = _angle_tensor("cos_sin_cache", given.cos_sin_cache, device)
        if cache.shape[1] % 2:
            raise ValueError(
                "cos_sin_cache must have rows of cosines followed by as many sines, so an even number of entries; "
                f"got {cache.shape[1]}: concatenate them with torch.cat((cos, sin), -1), one entry per pair each"
            )
        refuse_cosines_alone(cache)
        half = cache.shape[1] // 2
        return Angles("cos_sin", cache[:, :half], cache[:, half:])
    return _cos_sin(given.cos, given.sin, device)


def _complex(freqs_cis: Any, device: torch.device) -> Angles:
    """Views of cosines and sines that are the real and imaginary parts of complex numbers."""
    if not isinstance(freqs_cis, torch.Tensor) or not freqs_cis.is_complex():
        got = freqs_cis.dtype if isinstance(freqs_cis, torch.Tensor) else type(freqs_cis).__name__
        raise TypeError(
            f"freqs_cis must be a complex tensor, cos + i sin of each pair, got {got}: pass radians as freqs, or cosines and sines "
            "as cos and sin"
        )
    parts = torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = (_angle_tensor("freqs_cis", parts[..., part], device, batched=True) for part in (0, 1))
    return Angles("cos_sin", cos, sin)


def _inv_freq(inv_freq: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(inv_freq, torch.Tensor) or inv_freq.ndim != 1:
        what = list(inv_freq.shape) if isinstance(inv_freq, torch.Tensor) else type(inv_freq).__name__
        raise ValueError(
            f"inv_freq must be a tensor of [pairs], in radians per position, got {what}: make it with "
            "base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)"
        )
    return _radians("inv_freq", _angle_tensor("inv_freq", inv_freq[None], device))


def _cos_sin(cos: Any, sin: Any, device: torch.device) -> Angles:
    if cos is None or sin is None:
        raise ValueError(
            f"give both cos and sin, got {'sin' if cos is None else 'cos'} alone: pass the other too, or freqs in radians"
        )
    cos, sin = (_angle_tensor(n, t, device, batched=True) for n, t in (("cos", cos), ("sin", sin)))
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos and sin must have the same shape and dtype, got {list(cos.shape)} {cos.dtype} "
            f"and {list(sin.shape)} {sin.dtype}: take both from the same angles, with .cos() and .sin()"
        )
    if cos.stride() != sin.stride():  # the kernel has one set of strides for both; the copies are small
        cos, sin = cos.contiguous(), sin.contiguous()
    return Angles("cos_sin", cos, sin)


def _entries(settings: Settings, angles: Angles) -> str:
    """What an entry of the angles is for: a "feature" or a "pair"."""
    if settings.angle_entries is None:
        return "feature" if angles.kind == "freqs" else "pair"
    return settings.angle_entries


def _rotary_dim(entries: int, angle_entries: str, settings: Settings, head_dim: int) -> int:
    """How many features the angles rotate."""
    if angle_entries not in ANGLE_ENTRIES:
        raise ValueError(
            'angle_entries must be "feature" (one entry per rotated feature) or "pair" (one per pair, half as many), '
            f"got {angle_entries!r}"
        )
    implied = entries if angle_entries == "feature" else 2 * entries
    told = f"angles with {entries} entries, one per {angle_entries}, rotate {implied} features"
    other = "pair" if angle_entries == "feature" else "feature"
    others = 2 * entries if angle_entries == "feature" else entries
    if settings.rotary_dim is not None and settings.rotary_dim != implied:
        hint = (
            f'if each entry is for a {other}, pass angle_entries="{other}"'
            if settings.rotary_dim == others
            else "leave rotary_dim out, or give angles of that many features"
        )
        raise ValueError(f"rotary_dim={settings.rotary_dim} does not fit: {told}; {hint}")
    if implied % 2 or not 0 < implied <= head_dim:
        hint = (
            f'if each entry is for a {other}, pass angle_entries="{other}"'
            if others % 2 == 0 and 0 < others <= head_dim
            else "give angles of as many features as rotate"
        )
        raise ValueError(f"rotary_dim must be even and in (0, head_dim={head_dim}], but {told}; {hint}")
    return implied


def _index_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype not in INDICES:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}: convert with .to(torch.int32)")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of x, {device}, got {tensor.device}: move it with .to()")
    return tensor


def _packed(cu_seqlens: Any, device: torch.device) -> torch.Tensor:
    """cu_seqlens, checked, and contiguous as the kernels need it."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        what = list(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(
            f'tensor_format "thd" needs cu_seqlens, a tensor of [sequences + 1], or positions, one per token; got {what}'
            ": for one sequence pass torch.tensor([0, tokens], dtype=torch.int32)"
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}: convert with .to(torch.int32)")
    if cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens must be on the device of x, {device}, got {cu_seqlens.device}: move it with .to()"
        )
    return cu_seqlens.contiguous()


class _Positions(NamedTuple):
    """Where the positions of a call come from."""

    mode: str  # as in RopeSpec.positions
    tensor: torch.Tensor | None = None
    strides: tuple[int, int] = (0, 0)  # seq, batch; in elements
    offset: int = 0
    axis_stride: int = 0


def _positions(given: Given, settings: Settings, seq: int, batch: int, sequences: int | None) -> _Positions:
    """The positions of a call; ``sequences`` is None unless the tokens are packed by cu_seqlens."""
    device, offset = given.x.device, given.offset
    if settings.sections is not None and given.positions is None:
        raise ValueError(
            f"sections need positions, one row for each of {len(settings.sections)} axes, got none: pass [axes, tokens], or leave "
            "sections out"
        )
    if given.positions is not None:
        return _ids(given, settings, seq, batch)
    if not isinstance(offset, torch.Tensor):
        # Kernels compute positions in 32 bits if all that they are computed from has 32 bits.
        most = MAX_TOKENS - seq * settings.cp_size
        if not -MAX_TOKENS <= offset <= most:
            raise ValueError(
                f"offset must be from {-MAX_TOKENS} to {most}, got {offset}: positions have 32 bits; attention sees their differences "
                "alone, so subtract the same number from those of q and k"
            )
        return _Positions("shifted" if offset else "order", offset=offset)
    offset = _index_tensor("offset", offset, device)
    count = batch if sequences is None else sequences
    if offset.ndim == 0:
        return _Positions("offset", offset)
    if offset.shape != (count,):
        raise ValueError(
            f"offset must be an int, a tensor of no dimension, or a tensor of [{count}], one entry per sequence; "
            f"got {list(offset.shape)}: for positions of each token pass positions"
        )
    return _Positions("starts", offset, (0, offset.stride(0)))


def _ids(given: Given, settings: Settings, seq: int, batch: int) -> _Positions:
    """Positions given as a tensor, one entry per token."""
    ids = given.positions
    if not isinstance(ids, torch.Tensor):
        raise TypeError(
            f"positions must be a tensor of int32 or int64, got {type(ids).__name__}: convert with torch.tensor(...)"
        )
    ids = _index_tensor("positions", ids, given.x.device)
    if offset_of(given.offset, ids) != 0:
        raise ValueError(
            f"give positions or an offset, not both, got {_both(given.offset)}: add the offset to the positions"
        )
    if given.cu_seqlens is not None or settings.max_seqlen is not None or settings.cp_size != 1:
        named = {"cu_seqlens": given.cu_seqlens is not None, "max_seqlen": settings.max_seqlen is not None}
        got = " and ".join(name for name, is_given in {**named, "cp_size": settings.cp_size != 1}.items() if is_given)
        raise ValueError(
            f"positions cannot be combined with cu_seqlens, max_seqlen or cp_size, got {got} too: leave those out"
        )
    layout = settings.tensor_format
    whole = {"bshd": (batch, seq), "sbhd": (seq, batch), "thd": (seq,)}[layout]
    if settings.sections is not None:
        axes = len(settings.sections)
        if ids.shape not in ((axes, *whole), (axes, seq)):  # not a set: torch.jit.trace gives lengths as tensors
            raise ValueError(
                f"positions must be [{axes}, tokens], one row for each of the {axes} sections: {[axes, *whole]} or {[axes, seq]}, got "
                f"{list(ids.shape)}"
            )
        one = _ids(given._replace(positions=ids[0]), settings._replace(sections=None), seq, batch)
        return _Positions("axes", ids, one.strides, axis_stride=ids.stride(0))
    if ids.shape == whole and layout != "thd":
        first, second = ids.stride()
        return _Positions("ids", ids, (second, first) if layout == "bshd" else (first, second))
    if ids.shape == (seq,):
        return _Positions("ids", ids, (ids.stride(0), 0))
    either = f"{list(whole)}, as the tokens" + ("" if layout == "thd" else f", or [{seq}], shared by the batch")
    hint = (
        "pass positions[0], which all share"
        if ids.shape == (1, seq)
        else "give one position per token, in the order of x"
    )
    raise ValueError(f"positions must be {either}; got {list(ids.shape)}: {hint}")


def _context_parallel(settings: Settings, seq: int, sequences: int | None) -> bool:
    size, rank = settings.cp_size, settings.cp_rank
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"cp_rank must be from 0 to cp_size - 1, got cp_rank={rank}, cp_size={size}: pass the rank in, and the size of, the group "
            "that shares each sequence, or leave both out"
        )
    if size > 1 and sequences is None and seq % 2:
        raise ValueError(
            f"seq must be even with cp_size={size}, since each rank has two chunks of every sequence; got {seq}: "
            f"pad sequences to a multiple of {2 * size}"
        )
    return size > 1


def strides_of(layout: str, tensor: Any) -> tuple[int, int, int, int]:
    """Strides in elements, in the order of the kernels: seq, batch, heads, head_dim. Packed tokens have batch stride 0."""
    first, *rest = tensor.stride()
    if layout == "thd":
        return first, 0, rest[0], rest[1]
    return (rest[0], first, rest[1], rest[2]) if layout == "bshd" else (first, *rest)


def _rotated_tensor(name: str, x: Any, layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}: convert it with torch.as_tensor(...)")
    if x.ndim != AXES[layout]:
        hint = {
            3: 'for packed tokens [t, h, d] pass tensor_format="thd", for one sequence x[None]',
            4: 'for a batch pass tensor_format="bshd" or "sbhd"',
            5: "for a packed qkv call rope_qkv",
        }.get(x.ndim, "reshape it, or name its axes with tensor_format")
        raise ValueError(
            f"{name} must be [{', '.join(layout)}] for tensor_format {layout!r}, got {list(x.shape)}: {hint}"
        )
    if not x.dtype.is_floating_point or x.element_size() < 2:  # noqa: PLR2004 - PyTorch has no arithmetic in 8 bits
        raise TypeError(
            f"{name} must be floating point of at least 16 bits, got {x.dtype}: convert with .to(torch.bfloat16)"
            + (", or pass torch.view_as_real(x).flatten(-2) with interleaved=True" if x.dtype.is_complex else "")
        )


def _name_of_x(given: Given, settings: Settings) -> str:
    """What the public function calls the tensor that is x here."""
    if settings.kv_heads is not None:
        return "qkv"
    if settings.k_dim:
        return "kv"
    if given.key is not None:
        return "q"
    return "grad_output" if settings.direction == "backward" else "x"


def _check_kinds(given: Given, settings: Settings) -> None:
    _check_settings(settings)
    check_strided(given, settings)


def check_strided(given: Given, settings: Settings) -> None:
    """Refuse sparse and nested tensors, so that all tensors of a checked call have strides.

    Raises:
        TypeError: a tensor is sparse or nested.
    """
    check_dense(given._replace(x=None)._asdict() | {_name_of_x(given, settings): given.x})


def heads_apart(x: Any, settings: Settings) -> bool:
    """Whether a packed qkv has an axis of 3 that, by its strides, no view can merge with the axis of heads."""
    axis_of_3 = settings.kv_heads == 0 and isinstance(x, torch.Tensor) and x.ndim == AXES[settings.tensor_format] + 1
    return bool(axis_of_3 and x.shape[-2] > 1 and x.stride(-3) != x.shape[-2] * x.stride(-2))


def packed_heads(x: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, int]:
    """A packed qkv with all its heads on one axis, and the number of v's heads, which are the last.

    The result is a view of qkv. If no view has that shape, as with a gradient that came through a transpose or a slice,
    it is a view of a copy; in place that is an error.
    """
    kv_heads, axes = settings.kv_heads, AXES[settings.tensor_format]
    if kv_heads == 0:
        if x.ndim != axes + 1 or x.shape[-3] != 3:  # noqa: PLR2004
            raise ValueError(
                f"qkv must be [{', '.join(settings.tensor_format[:-2])}, 3, h, d], or pass kv_heads for "
                f"[{', '.join(settings.tensor_format[:-2])}, heads + 2 * kv_heads, d]; got {list(x.shape)}"
            )
        heads = x.shape[-2]
        if heads_apart(x, settings):
            if settings.inplace:
                raise ValueError(
                    "the axis of 3 and the heads of qkv must be contiguous to be rotated in place, got strides "
                    f"{list(x.stride())}: make qkv contiguous, or use rope_qk"
                )
            x = x.contiguous()
        # Not flatten, for which torch.autograd.grad(..., is_grads_batched=True) has no rule. Not as_strided: its gradient is one for each place in memory, and heads of an expanded qkv share places.
        return x.reshape(*x.shape[:-3], 3 * heads, x.shape[-1]), heads
    assert kv_heads is not None
    if x.ndim != axes or kv_heads < 0 or x.shape[-2] <= 2 * kv_heads:
        raise ValueError(
            f"qkv must have more than 2 * kv_heads heads, got {list(x.shape)} with kv_heads={kv_heads}: pass the number of heads that k "
            f"has, and v, for a qkv of [{', '.join(settings.tensor_format[:-2])}, heads + 2 * kv_heads, d]"
        )
    return x, kv_heads


def packed_parts(qkv: Any, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the query and of the key of a packed qkv.

    Raises:
        TypeError, ValueError: qkv is not packed as the settings say.
    """
    _check_settings(settings)
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a tensor, got {type(qkv).__name__}: convert it with torch.as_tensor(...)")
    check_dense({"qkv": qkv})
    packed, values = packed_heads(qkv, settings)
    heads = packed.shape[-2] - 2 * values
    return packed[..., :heads, :], packed[..., heads : heads + values, :]


def _check_key(x: torch.Tensor, key: Any, layout: str) -> None:
    """Refuse a key that differs from x in more than its number of heads."""
    _rotated_tensor("k", key, layout)
    if key.shape[:-2] != x.shape[:-2] or key.shape[-1] != x.shape[-1]:
        first = layout == "bshd" and (key.shape[0], *key.shape[2:]) == (x.shape[0], *x.shape[2:])
        hint = (
            "if they are [b, h, s, d], as in Hugging Face's models, pass q.transpose(1, 2) and k.transpose(1, 2), or "
            'tensor_format="bhsd" to tuned.dispatch'
            if first
            else "rotate q and k of other tokens each by rope"
        )
        raise ValueError(
            f"k must have the tokens and the head_dim of q, {list(x.shape[:-2])} and {x.shape[-1]}; got {list(key.shape)}: {hint}"
        )
    if key.dtype != x.dtype or key.device != x.device:
        raise ValueError(
            f"k must be {x.dtype} on {x.device}, as q is; got {key.dtype} on {key.device}: convert with k.to(q)"
        )


def _check_overwritable(x: torch.Tensor, key: torch.Tensor | None) -> None:
    """Refuse tensors of which an element would be written twice."""
    check_strides("x" if key is None else "q", x)
    if key is not None:
        check_strides("k", key)
        refuse_overlap(x, key)


def _check_settings(settings: Settings) -> None:
    """Refuse unknown strings, strings that do not go together, and strings and tensors in the place of bools."""
    for name in ("interleaved", "inplace", "conjugate", "interleaved_sections", "deinterleave", "zero_centered"):
        check_flag(name, getattr(settings, name))
    if settings.tensor_format not in FORMATS:
        raise ValueError(
            f"tensor_format must be one of {FORMATS}, got {settings.tensor_format!r}: name the axes of x in their order"
        )
    if settings.k_dim and settings.tensor_format not in LAYOUTS:
        raise ValueError(
            f"tensor_format of kv must be one of {LAYOUTS}, got {settings.tensor_format!r}: pass kv.transpose(1, 2) and "
            "k_pe.transpose(1, 2) as bshd"
        )
    if settings.rotated not in ROTATED:
        raise ValueError(
            f"rotated must be one of {ROTATED}, got {settings.rotated!r}: name where in a head the features are that rotate"
        )
    if settings.rotated == "proportional" and settings.interleaved:
        raise ValueError(
            'rotated="proportional" pairs j with j + head_dim / 2, so interleaved must be False, '
            f"got {settings.interleaved!r}: leave it out"
        )
    if settings.deinterleave and (settings.interleaved or settings.rotated == "proportional"):
        got = "interleaved=True" if settings.interleaved else 'rotated="proportional"'
        raise ValueError(
            f"deinterleave reads pairs (2 j, 2 j + 1) and writes halves, got {got} too: leave that out, or deinterleave"
        )


def tokens_first(t: Any, settings: Settings) -> Any:
    """A tensor of the call as [b, s, h, d] where it is [b, h, s, d], and back; others as they are."""
    return t.transpose(1, 2) if settings.tensor_format == "bhsd" and t is not None else t


def _tokens_first(given: Given, settings: Settings) -> tuple[Given, Settings]:
    """The same call of views [b, s, h, d]."""
    if settings.kv_heads is not None:
        raise ValueError(
            "tensor_format of a packed qkv must be one of bshd, sbhd and thd, got 'bhsd': pass q and k, views of it, to rope_qk"
        )
    _rotated_tensor(_name_of_x(given, settings), given.x, "bhsd")
    if given.key is not None:
        _rotated_tensor("k", given.key, "bhsd")
    x, key = (tokens_first(t, settings) for t in (given.x, given.key))
    return given._replace(x=x, key=key), settings._replace(tensor_format="bshd")


def _scales(scaling: Any, angles: Angles) -> bool:
    """Whether cosines and sines are scaled. Refuse what is not a number, and a tensor: a plan would keep its value."""
    if isinstance(scaling, torch.Tensor):
        raise TypeError(
            "attention_scaling must be a number, got a tensor, whose value may change: convert it with float(...)"
        )
    if not is_number(scaling):
        raise TypeError(f"attention_scaling must be a number, got {scaling!r}: leave it out for 1.0")
    if scaling != 1.0 and angles.kind == "cos_sin":
        raise ValueError(
            f"attention_scaling must be 1.0 unless freqs or inv_freq give the angles, got {scaling}: "
            "multiply cos and sin by it, unless they were"
        )
    return bool(scaling != 1.0)


def tokens_of(layout: str, x: torch.Tensor) -> tuple[int, int]:
    """(seq, batch) of x; packed tokens have a batch of 1."""
    if layout == "thd":
        return x.shape[0], 1
    first, second = x.shape[:2]
    return (second, first) if layout == "bshd" else (first, second)


def k_dim_of(k_dim: Any) -> int:
    """The k_dim that a user gave, as an int of at least 1; in ``Settings`` 0 means none."""
    k_dim = whole_number("k_dim", k_dim)
    if k_dim < 1:
        raise ValueError(
            f"k_dim must be from 1 to the features of kv but one, got {k_dim}: pass how many are the key's"
        )
    return k_dim  # type: ignore[no-any-return]


def _latent(given: Given, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA's kv and k_pe, checked, or the gradients of the key and of the value."""
    kv, k_pe, layout = given.x, given.key, settings.tensor_format
    _rotated_tensor("kv", kv, layout)
    _rotated_tensor("k_pe", k_pe, layout)
    if settings.direction == "backward":
        return kv, k_pe
    if kv.shape[-1] <= settings.k_dim:
        raise ValueError(
            f"kv must be [{', '.join(layout[:-1])}, k_dim + v_dim], got {list(kv.shape)} with k_dim={settings.k_dim}: pass how many "
            "features of each head are the key's; the others are the value's"
        )
    if k_pe.shape[:-1] != (*kv.shape[:-2], 1):
        raise ValueError(
            f"k_pe must have the tokens of kv and one head, {[*kv.shape[:-2], 1]} and its features, got {list(k_pe.shape)}: "
            + ("pass k_pe.unsqueeze(-2), of the same tokens" if k_pe.shape[-2] != 1 else "pass that of the same tokens")
        )
    if k_pe.dtype != kv.dtype or k_pe.device != kv.device:
        raise ValueError(
            f"k_pe must be {kv.dtype} on {kv.device}, as kv is; got {k_pe.dtype} on {k_pe.device}: convert with k_pe.to(kv)"
        )
    return kv, k_pe


def _head_dims(x: torch.Tensor, key: Any, settings: Settings) -> tuple[Any, Any]:
    """Features of a head of the query and the key, and of a head of MLA's value (0 in other calls)."""
    k_dim = settings.k_dim
    if not k_dim:
        return x.shape[-1], 0
    return (
        (x.shape[-1], key.shape[-1])
        if settings.direction == "backward"
        else (k_dim + key.shape[-1], x.shape[-1] - k_dim)
    )


def _all_of_the_shared_head(rotary: int, head_dim: int, settings: Settings) -> Settings:
    """Refuse angles that do not rotate all of k_pe. Returns the settings, with ``rotated`` "last", as MLA's key has it."""
    if rotary != head_dim - settings.k_dim:
        raise ValueError(
            f"the angles must rotate all features of k_pe, {head_dim - settings.k_dim}, got those of {rotary}: pass the features that "
            "rotate as k_pe, or name what an entry of the angles is for, by angle_entries"
        )
    return settings._replace(rotated="last")


def _made(
    spec: RopeSpec, x: torch.Tensor, key: Any, make_out: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, Any, _Strides, _Strides]:
    """Both results of a call, the strides of the key, and the strides of the second result."""
    if not spec.splits:
        out = x if spec.inplace else make_out(x)
        key_out = key if spec.inplace or key is None else make_out(key)
        nothing = (0, 0, 0, 0)
        steps = (nothing, nothing) if key is None else (strides_of(spec.layout, key), strides_of(spec.layout, key_out))
        return out, key_out, *steps
    out, key_out = _split_results(spec, x, key, make_out)
    of_key, of_out = strides_of(spec.layout, key), strides_of(spec.layout, key_out)
    # All heads share one key head, which has no next head: its head stride is 0. A value of one feature has stride 1.
    if spec.sums_heads:
        of_key = (*of_key[:3], 1 if spec.value_dim == 1 else of_key[3])
        return out, key_out, of_key, (*of_out[:2], 0, of_out[3])
    return out, key_out, (*of_key[:2], 0, of_key[3]), of_out


def _split_results(spec: RopeSpec, x: torch.Tensor, key: torch.Tensor, make_out: Callable[..., Any]) -> tuple[Any, Any]:
    """MLA's results, contiguous; or x and key in their place if ``make_out`` returns what it is given."""
    nothing = x.new_empty(0)
    if make_out(nothing) is nothing:
        return x, key
    one, two = spec.split_shapes(tuple(x.shape))
    return x.new_empty(one), x.new_empty(two)


_spec = functools.lru_cache(maxsize=4096)(RopeSpec)


def prepare(
    given: Given,
    settings: Settings,
    *,
    make_out: Callable[[torch.Tensor], torch.Tensor],
    angle_gradient: bool = False,
) -> Prepared:
    """Check a call. Out of place its outputs are ``make_out(x)`` and ``make_out(key)``.

    ``angle_gradient``: prepare the backward that gives the gradient of the angles too.

    Raises:
        TypeError: an argument has the wrong type, or a tensor the wrong dtype.
        ValueError: a shape, device, layout or combination is not allowed. Nothing has been written.
    """
    _check_kinds(given, settings)
    asked = settings
    if settings.tensor_format == "bhsd":
        given, settings = _tokens_first(given, settings)
    layout, inplace = settings.tensor_format, settings.inplace
    x, key, copied = (*_latent(given, settings), 0) if settings.k_dim else _rotated(given, settings)
    angles = _angles(given, x.device)
    entries = _entries(settings, angles)
    heads, (head_dim, value_dim) = x.shape[-2], _head_dims(x, key, settings)
    rotary = _rotary_dim(angles.first.shape[-1], entries, settings, head_dim - settings.k_dim)
    if settings.k_dim:
        settings = _all_of_the_shared_head(rotary, head_dim, settings)
    warn_if_half_of_the_head(given, settings, rotary, head_dim - settings.k_dim)
    settings = _with_sections(settings, rotary)
    seq, batch = tokens_of(layout, x)
    bounds, sequences = None, None
    if layout == "thd" and given.positions is None:
        bounds = _packed(given.cu_seqlens, x.device)
        refuse_bounds(bounds, seq, settings)
        sequences = bounds.numel() - 1
    elif given.positions is None and (given.cu_seqlens is not None or settings.max_seqlen is not None):
        raise ValueError(
            f'cu_seqlens and max_seqlen are for tensor_format "thd", got {layout!r}: leave them out, or pass packed tokens [t, h, d]'
        )
    positions = _positions(given, settings, seq, batch, sequences)
    parallel = _context_parallel(settings, seq, sequences)
    rows = _rows(angles, batch, layout)
    if angles.kind != "inv_freq":
        _reach(rows, positions, settings, seq, sequences, heads_first_hint(x, rows, asked, positions.mode))
        _values_reach(rows, positions, seq * settings.cp_size, bounds)
        warn_if_heads_come_first(x, given, asked, rows, positions.mode)
    if x.numel() and seq * batch > MAX_TOKENS:
        raise ValueError(f"seq * batch must be at most {MAX_TOKENS}, got {seq * batch}: split the call")
    normed = asks_for_norm(given, settings)
    weight, key_weight = _norm_weights(given, settings, heads, head_dim) if normed else (None, None)
    if inplace:
        _check_overwritable(x, key)
    scaled = _scales(settings.attention_scaling, angles)
    direction, conjugate = settings.direction, settings.conjugate
    # The conjugate of a rotation is its transpose: one spec for both.
    more = settings.norm or settings.deinterleave or settings.k_dim or angle_gradient  # more than a rotation
    if conjugate and entries == "pair" and not inplace and not more:
        direction, conjugate = ("forward" if direction == "backward" else "backward"), False
    make_spec = RopeSpec if torch.compiler.is_dynamo_compiling() else _spec  # Dynamo does not trace lru_cache
    eager_spec = make_spec(
        layout,
        SUPPORTED.get(x.dtype, "float32"),  # eager PyTorch also takes float64, which a spec cannot say
        max(heads, 1),
        head_dim,
        rotary,
        "interleaved" if settings.interleaved else "half",
        angles.kind,
        ANGLE_DTYPES[angles.first.dtype],
        entries,
        inplace,
        direction,
        key.shape[-2] if key is not None and not settings.k_dim else 0,
        copied,
        positions.mode,
        parallel,
        # If all features rotate, "first", "last" and "proportional" are the same.
        "first" if rotary == head_dim else settings.rotated,
        conjugate,
        scaled,
        angles.first.ndim > 2,  # noqa: PLR2004
        settings.norm,
        settings.zero_centered,
        settings.rounding,
        settings.sections or (),
        bool(settings.interleaved_sections),
        bool(settings.deinterleave),
        value_dim,
        angle_gradient=angle_gradient,
    )
    out, key_out, key_strides, key_out_strides = _made(eager_spec, x, key, make_out)
    # Kernels have one head_dim stride for x and key, and one for both results. MLA's kernel has one for each tensor.
    alike = key is None or eager_spec.splits
    alike = alike or (x.stride(-1) == key.stride(-1) and out.stride(-1) == key_out.stride(-1))
    supported = x.dtype in SUPPORTED and alike
    size = RopeSize(batch, seq) if sequences is None else packed_size(seq, sequences)
    first = angles.first
    call = RopeCall(
        x=x,
        out=out,
        cos=first,
        sin=angles.second,
        seq=seq,
        batch=batch,
        angle_rows=rows,
        x_strides=strides_of(layout, x),
        out_strides=strides_of(layout, out),
        angle_strides=(first.stride(-2), first.stride(-1)),
        cu_seqlens=bounds,
        sequences=sequences or 0,
        key=key,
        key_out=key_out,
        key_strides=key_strides,
        key_out_strides=key_out_strides,
        angle_stride_b=first.stride(0) if first.ndim > 2 else 0,  # noqa: PLR2004
        positions=positions.tensor,
        position_strides=positions.strides,
        axis_stride=positions.axis_stride,
        offset=positions.offset,
        cp_size=settings.cp_size,
        cp_rank=settings.cp_rank,
        scaling=float(settings.attention_scaling),
        weight=weight,
        key_weight=key_weight,
        eps=float(settings.eps),
    )
    return Prepared(eager_spec if supported else None, size, call, eager_spec)


def asks_for_norm(given: Given, settings: Settings) -> bool:
    """Whether a call names a norm, or gives an argument that only a norm has."""
    weighted = given.weight is not None or given.key_weight is not None
    return settings.norm != "" or weighted or bool(settings.eps)


def _norm_weights(given: Given, settings: Settings, heads: int, head_dim: int) -> tuple[Any, Any]:
    """The weights of the norms of x and of the key, contiguous as the kernels need them."""
    if settings.norm not in NORMS[1:]:
        raise ValueError(
            f'norm must be "head" or "all", got {settings.norm!r}: name what is normalised together, the features of each head '
            "or those of all heads"
        )
    if settings.rounding not in ROUNDINGS:
        raise ValueError(
            'rounding must be "once", "product" (what the norm gives is rounded) or "each" (also before the weight), '
            f"got {settings.rounding!r}: leave it out for the most precise"
        )
    if not is_number(settings.eps) or not settings.eps >= 0:
        raise ValueError(f"eps must be a number of at least 0, got {settings.eps!r}: give the norm's own, such as 1e-6")
    if (given.key is None) != (given.key_weight is None):
        one, other = ("k_weight", "k") if given.key is None else ("k", "k_weight")
        raise ValueError(f"k and k_weight must come together, got {one} without {other}: give both, or leave both out")
    found: list[Any] = []
    for name, tensor, weight, count in (
        ("q_weight", given.x, given.weight, heads),
        ("k_weight", given.key, given.key_weight, 0 if given.key is None else given.key.shape[-2]),
    ):
        if tensor is None:
            found.append(None)
            continue
        if not isinstance(weight, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(weight).__name__}: give the norm's weight, or torch.ones({head_dim})"
            )
        wanted = head_dim if settings.norm == "head" else count * head_dim
        if weight.shape != (wanted,):
            of = "head_dim, of each head" if settings.norm == "head" else "heads * head_dim, of all heads"
            other = "all" if settings.norm == "head" else "head"
            raise ValueError(
                f'{name} must be [{wanted}] ({of}) with norm="{settings.norm}", got {list(weight.shape)}: '
                f'if the model normalises otherwise, pass norm="{other}"'
            )
        if weight.dtype not in ANGLE_DTYPES or weight.device != given.x.device:
            raise ValueError(
                f"{name} must be floating point on the device of q, {given.x.device}, got {weight.dtype} on "
                f"{weight.device}: move it with .to()"
            )
        found.append(weight.resolve_neg().contiguous())
    return found[0], found[1]


def _index(n: Any) -> Any:
    """A value with ``__index__`` as an int; a bool, and anything else, as it is."""
    if isinstance(n, (bool, torch.SymInt)) or (isinstance(n, torch.Tensor) and n.dtype == torch.bool):
        return n
    try:
        return operator.index(n)
    except TypeError:
        return n


def _with_sections(settings: Settings, rotary: int) -> Settings:
    """The settings, with sections as ints; refuse sections that do not divide the rotary_dim / 2 pairs among the axes."""
    sections, pairs = settings.sections, rotary // 2
    if sections is None:
        if settings.interleaved_sections:
            raise ValueError("interleaved_sections say how sections lie, got True without sections: pass them too")
        return settings
    sections = tuple(map(_index, sections))
    whole = all(type(n) is int and n >= 0 for n in sections)
    if not whole or not 2 <= len(sections) <= MOST_AXES or sum(sections) != pairs:  # noqa: PLR2004
        raise ValueError(
            f"sections must be 2 to {MOST_AXES} numbers of pairs that add up to rotary_dim / 2, {pairs}, got {sections!r}: pass the "
            "model's mrope_section, or how many pairs each axis has"
        )
    if settings.interleaved_sections and (
        len(sections) != 3 or 3 * sections[1] > pairs + 1 or 3 * sections[2] > pairs  # noqa: PLR2004
    ):
        raise ValueError(
            f"interleaved sections must be 3, of which the second and the third have a third of the {pairs} pairs at most, got "
            f"{sections!r}: leave interleaved_sections out if they lie in a row"
        )
    return settings._replace(sections=sections)


def _rotated(given: Given, settings: Settings) -> tuple[torch.Tensor, Any, int]:
    """Check what is rotated: (x or a view of a packed qkv, the key or None, how many of x's last heads are copied)."""
    x, key, copied = given.x, given.key, 0
    if settings.kv_heads is not None and isinstance(x, torch.Tensor):
        x, copied = packed_heads(x, settings)
        if settings.inplace:
            x, copied = x[..., : x.shape[-2] - copied, :], 0
    _rotated_tensor(_name_of_x(given, settings), x, settings.tensor_format)
    if key is not None:
        _check_key(x, key, settings.tensor_format)
    return x, key, copied


def _rows(angles: Angles, batch: int, layout: str) -> int:
    """The number of positions that the angles cover."""
    first = angles.first
    if first.ndim > 2 and (layout == "thd" or first.shape[0] != batch):  # noqa: PLR2004
        raise ValueError(
            f"cos and sin of [batch, rows, entries] must have the batch of x, {batch}, got {list(first.shape)}"
            + ("; packed tokens have no batch: give [rows, entries] and positions" if layout == "thd" else "")
            + (": pass cos[0] and sin[0], which the batch shares" if layout != "thd" and first.shape[0] == 1 else "")
            + (
                ": give one table per batch entry, or [rows, entries] for all"
                if layout != "thd" and first.shape[0] != 1
                else ""
            )
        )
    return first.shape[-2]


def _reach(  # noqa: PLR0913 - the sizes of a call
    rows: int, positions: _Positions, settings: Settings, seq: int, sequences: int | None, hint: str
) -> None:
    """Refuse positions past the end of the angles, as far as shapes and int arguments alone show them."""
    if positions.mode in ("ids", "axes"):
        return
    if sequences is not None:
        longest = settings.max_seqlen
        if longest is not None and longest + max(positions.offset, 0) > rows:
            raise ValueError(
                f"the angles are too short: {rows} positions for sequences of up to max_seqlen={longest}"
                f"{f' from {positions.offset} on' if positions.offset else ''}; make them at least as long"
            )
    elif positions.offset + seq * settings.cp_size > rows:
        of = f"{seq}" if settings.cp_size == 1 else f"{seq} on each of {settings.cp_size} ranks"
        on = f" from position {positions.offset} on" if positions.offset else ""
        raise ValueError(
            f"the angles are too short: {rows} positions for a sequence of {of}{on}; make them at least as long{hint}"
        )
    if positions.offset < 0:
        raise ValueError(
            f"offset must be at least 0 with a table of angles, got {positions.offset}: positions before its first row need inv_freq"
        )


def _values_reach(rows: int, positions: _Positions, seq: int, bounds: torch.Tensor | None) -> None:
    """Refuse positions past the end of the angles by values on a CPU; ``bounds`` are those of packed sequences.

    On a GPU, reading values would synchronize; there such positions give NaN.
    """
    if bounds is not None:
        _sequences_reach(rows, positions, bounds)
    elif seq or positions.mode in ("ids", "axes"):  # without tokens, no position follows an offset
        _tensor_reaches(rows, positions, seq - 1)


def _tensor_reaches(rows: int, positions: _Positions, last: int) -> None:
    """Refuse a tensor of positions or offsets by its values; ``last`` is the index of the last token after an offset."""
    tensor = positions.tensor
    if tensor is None or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or not tensor.numel():
        return
    if wrapped(tensor):  # under torch.func.vmap it has no single value
        return
    least, most = (int(v) for v in torch.aminmax(tensor))
    most += 0 if positions.mode in ("ids", "axes") else last
    if least < 0 or most >= rows:
        name = "positions" if positions.mode in ("ids", "axes") else "offset"
        what = "positions" if name == "positions" else "offset plus the index of each token"
        raise ValueError(
            f"{what} must be in [0, {rows}), the rows of the angles, got {least} to {most}: make the angles longer, or pass inv_freq, "
            "which has every position"
        )


def _sequences_reach(rows: int, positions: _Positions, bounds: torch.Tensor) -> None:
    """Refuse packed sequences that start before the angles or end past them; an empty one has no position, wherever it starts."""
    first = positions.tensor
    if not readable(bounds) or not (first is None or readable(first)):
        return
    ends = bounds.tolist()
    starts = [positions.offset] * (len(ends) - 1) if first is None else first.expand(len(ends) - 1).tolist()
    for start, (begin, end) in zip(starts, itertools.pairwise(ends), strict=True):
        if begin < end and start < 0:
            raise ValueError(
                f"offset must be at least 0 with a table of angles, got {start} for cu_seqlens {begin} to {end}: positions before its "
                "first row need inv_freq"
            )
        if begin < end and start + end - begin > rows:
            on = f" from position {start} on" if start else ""
            raise ValueError(
                f"the angles are too short: {rows} positions for a sequence of {end - begin}{on}, cu_seqlens {begin} to {end}; make "
                "them at least as long, or pass inv_freq, which has every position"
            )


def offset_limits(spec: RopeSpec, settings: Settings, rows: int, seq: int) -> tuple[int, int]:
    """The smallest and the largest int offset that ``prepare`` accepts, with angles of ``rows`` positions."""
    if spec.angles == "inv_freq":
        return -MAX_TOKENS, MAX_TOKENS - seq * settings.cp_size
    if spec.positions in ("ids", "axes"):
        return 0, 0
    if spec.packed:
        most = MAX_TOKENS - seq * settings.cp_size
        return 0, most if settings.max_seqlen is None else min(most, rows - settings.max_seqlen)
    return 0, rows - seq * settings.cp_size


def packed_size(tokens: int, sequences: int) -> RopeSize:
    """The size of a packed call, as if all its sequences had their mean length, rounded."""
    batch = max(sequences, 1)
    # Whole numbers alone: torch.jit.trace follows lengths, as tensors, which Python cannot round.
    return RopeSize(batch, max(1, (tokens + batch // 2) // batch))
