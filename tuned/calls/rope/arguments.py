"""Check the arguments of a RoPE call and turn them into a Spec, a size and a RopeCall. Nothing is written here."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tuned.families.rope.launches import RopeCall
from tuned.families.rope.spec import ANGLE_ENTRIES, LAYOUTS, ROTATED, RopeSize, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TOKENS = 2**31 - 1  # token indices are 32-bit inside the kernels; offsets in memory are 64-bit
SUPPORTED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
ANGLE_DTYPES = {**SUPPORTED, torch.float64: "float64"}
INDICES = (torch.int32, torch.int64)
AXES = {"bshd": 4, "sbhd": 4, "thd": 3}


class Given(NamedTuple):
    """The tensors of a call, and its offset, which may be one."""

    x: Any
    key: Any = None
    freqs: Any = None
    cos: Any = None
    sin: Any = None
    cos_sin_cache: Any = None
    inv_freq: Any = None
    cu_seqlens: Any = None
    positions: Any = None
    offset: Any = 0


class Sources(NamedTuple):
    """Which arguments of the public call a plan's tensors were."""

    angles: str
    place: str | None
    copied: bool  # cos and sin have no strides in common, or cu_seqlens has gaps: they are copied in each call

    @classmethod
    def of(cls, given: Given) -> Sources:
        """Those of a call."""
        names = ("freqs", "cos_sin_cache", "inv_freq", "cos")
        angles = next((name for name in names if getattr(given, name) is not None), "freqs")
        ids = given.positions is not None
        place = "positions" if ids else "offset" if isinstance(given.offset, torch.Tensor) else None
        apart = given.cos is not None and given.sin is not None and given.cos.stride() != given.sin.stride()
        bounds = given.cu_seqlens
        return cls(angles, place, apart or (isinstance(bounds, torch.Tensor) and not bounds.is_contiguous()))

    def given(  # noqa: PLR0913 - those of Plan.run
        self, x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, place: Any, number: Any, *_addresses: int
    ) -> Given:
        """The arguments of the public call again."""
        tensors = {self.angles: angles, "sin": sin, "cu_seqlens": cu_seqlens, "offset": number}
        return Given(x, key, **tensors | ({self.place: place} if self.place else {}))


class Settings(NamedTuple):
    """The arguments of a call that are no tensors. ``kv_heads``: None, or of a packed qkv; 0 where it has an axis of 3."""

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
    kv_heads: int | None = None
    direction: str = "forward"


class Prepared(NamedTuple):
    """A checked call."""

    spec: RopeSpec | None  # None where no kernel takes the dtype of x, or features of x and key that lie unlike
    size: RopeSize
    call: RopeCall
    eager_spec: RopeSpec  # for eager PyTorch, which does not read the dtype from it


class Angles(NamedTuple):
    """Where the angles of a call come from."""

    kind: str  # as in RopeSpec.angles
    first: torch.Tensor  # [rows, entries], or [batch, rows, entries]; inv_freq: [1, entries]
    second: torch.Tensor | None


def whole_number(name: str, value: Any) -> Any:
    """A number that counts, as an int: whatever stands for one is one, but no bool. A tracer's symbol stays.

    Of a tensor on a GPU this waits for its value.

    Raises:
        TypeError: for anything else.
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
    raise TypeError(f"{name} must be an int, got {what}: pass int(...) of it if that is what is meant")


def whole_numbers(rotary_dim: Any, max_seqlen: Any, cp_size: Any, cp_rank: Any) -> tuple[Any, Any, Any, Any]:
    """The arguments of a public call that count, each as ``whole_number``; the first two may be None."""
    return (
        rotary_dim if rotary_dim is None else whole_number("rotary_dim", rotary_dim),
        max_seqlen if max_seqlen is None else whole_number("max_seqlen", max_seqlen),
        whole_number("cp_size", cp_size),
        whole_number("cp_rank", cp_rank),
    )


def offset_of(offset: Any, positions: Any) -> Any:
    """An offset that is no int: the tensor that it is, or the int that it stands for."""
    if not isinstance(offset, torch.Tensor):
        return whole_number("offset", offset)
    if positions is not None:
        raise ValueError("give positions or an offset, not both: add the offset to the positions")
    return offset


def _angle_tensor(name: str, tensor: Any, device: torch.device, *, batched: bool = False) -> torch.Tensor:
    """A tensor of angles as [rows, entries], or, where it may be, [batch, rows, entries]: a view."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of x, {device}, got {tensor.device}: move it with .to()")
    if tensor.dtype not in ANGLE_DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.ndim == 2 or (batched and tensor.ndim == 3):  # noqa: PLR2004
        return tensor
    if tensor.ndim < 2 or any(n != 1 for n in tensor.shape[1:-1]):  # noqa: PLR2004
        allowed = "[rows, entries], [batch, rows, entries]" if batched else "[rows, entries]"
        raise ValueError(
            f"{name} must be {allowed}, or with dimensions of 1 between, such as [rows, 1, 1, entries]; "
            f"got {list(tensor.shape)}"
        )
    return tensor.reshape(tensor.shape[0], tensor.shape[-1])


def _radians(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        raise TypeError(
            f"{name} must be float32, got {tensor.dtype}: angles of 1e5 rad have no digits left in 16 bits; "
            "convert with .float(), or pass cos and sin"
        )
    return tensor


def _angles(given: Given, device: torch.device) -> Angles:
    """The one source of angles that was given."""
    sources = {
        "freqs": given.freqs is not None,
        "cos and sin": given.cos is not None or given.sin is not None,
        "cos_sin_cache": given.cos_sin_cache is not None,
        "inv_freq": given.inv_freq is not None,
    }
    named = [name for name, there in sources.items() if there]
    if not named:
        raise ValueError("give the angles: freqs in radians, both cos and sin, a cos_sin_cache, or inv_freq")
    if len(named) > 1:
        raise ValueError(f"give one source of angles, not both {' and '.join(named)}: they say the same thing")
    if given.freqs is not None:
        return Angles("freqs", _radians("freqs", _angle_tensor("freqs", given.freqs, device)), None)
    if given.inv_freq is not None:
        return Angles("inv_freq", _inv_freq(given.inv_freq, device), None)
    if given.cos_sin_cache is not None:
        cache = _angle_tensor("cos_sin_cache", given.cos_sin_cache, device)
        if cache.shape[1] % 2:
            raise ValueError(
                f"cos_sin_cache must have cosines, then as many sines, in a row; got {cache.shape[1]} entries"
            )
        half = cache.shape[1] // 2
        return Angles("cos_sin", cache[:, :half], cache[:, half:])
    return _cos_sin(given.cos, given.sin, device)


def _inv_freq(inv_freq: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(inv_freq, torch.Tensor) or inv_freq.ndim != 1:
        what = list(inv_freq.shape) if isinstance(inv_freq, torch.Tensor) else type(inv_freq).__name__
        raise ValueError(f"inv_freq must be a tensor of [pairs], radians a position, got {what}")
    return _radians("inv_freq", _angle_tensor("inv_freq", inv_freq[None], device))


def _cos_sin(cos: Any, sin: Any, device: torch.device) -> Angles:
    if cos is None or sin is None:
        raise ValueError("give both cos and sin, or freqs in radians")
    cos, sin = (_angle_tensor(n, t, device, batched=True) for n, t in (("cos", cos), ("sin", sin)))
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos and sin must have one shape and dtype, got {list(cos.shape)} {cos.dtype} "
            f"and {list(sin.shape)} {sin.dtype}"
        )
    if cos.stride() != sin.stride():  # the kernel walks both by one set of strides; angles are small
        cos, sin = cos.contiguous(), sin.contiguous()
    return Angles("cos_sin", cos, sin)


def _rotary_dim(entries: int, angle_entries: str, settings: Settings, head_dim: int) -> int:
    """How many features the angles rotate."""
    if angle_entries not in ANGLE_ENTRIES:
        raise ValueError(
            'angle_entries must be "feature" (one entry a rotated feature) or "pair" (one a pair, half as many), '
            f"got {angle_entries!r}"
        )
    implied = entries if angle_entries == "feature" else 2 * entries
    told = f"angles with {entries} entries, one a {angle_entries}, rotate {implied} features"
    other = "pair" if angle_entries == "feature" else "feature"
    if settings.rotary_dim is not None and settings.rotary_dim != implied:
        raise ValueError(
            f"rotary_dim={settings.rotary_dim} does not fit: {told}; if each entry is for a {other}, "
            f'pass angle_entries="{other}"'
        )
    if implied % 2 or not 0 < implied <= head_dim:
        raise ValueError(
            f"rotary_dim must be even and in (0, head_dim={head_dim}], but {told}; "
            f'if each entry is for a {other}, pass angle_entries="{other}"'
        )
    return implied


def _index_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype not in INDICES:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}: convert with .to(torch.int32)")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of x, {device}, got {tensor.device}: move it with .to()")
    return tensor


def _packed(cu_seqlens: Any, device: torch.device) -> torch.Tensor:
    """The bounds of the packed sequences, side by side in memory as the kernels read them."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        what = list(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(
            f'tensor_format "thd" needs cu_seqlens, a tensor of [sequences + 1], or positions, one a token; got {what}'
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}: convert with .to(torch.int32)")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on the device of x, {device}, got {cu_seqlens.device}")
    return cu_seqlens.contiguous()


class _Places(NamedTuple):
    """Where positions come from."""

    mode: str  # as in RopeSpec.positions
    tensor: torch.Tensor | None = None
    strides: tuple[int, int] = (0, 0)  # seq, batch
    offset: int = 0


def _places(given: Given, settings: Settings, seq: int, batch: int, sequences: int | None) -> _Places:
    """What the call says of positions; ``sequences`` is None where they are not packed."""
    device, offset = given.x.device, given.offset
    if given.positions is not None:
        return _ids(given, settings, seq, batch)
    if not isinstance(offset, torch.Tensor):
        # Positions are 32-bit inside the kernels where all that they come from is.
        most = MAX_TOKENS - seq * settings.cp_size
        if not -MAX_TOKENS <= offset <= most:
            raise ValueError(f"offset must be from {-MAX_TOKENS} to {most}, got {offset}")
        return _Places("shifted" if offset else "order", offset=offset)
    offset = _index_tensor("offset", offset, device)
    count = batch if sequences is None else sequences
    if offset.ndim == 0:
        return _Places("offset", offset)
    if offset.shape != (count,):
        raise ValueError(f"offset must be a number, or one for each of the {count} sequences, got {list(offset.shape)}")
    return _Places("starts", offset, (0, offset.stride(0)))


def _ids(given: Given, settings: Settings, seq: int, batch: int) -> _Places:
    """Positions given token by token."""
    ids = given.positions
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"positions must be a tensor of int32 or int64, got {type(ids).__name__}")
    ids = _index_tensor("positions", ids, given.x.device)
    if offset_of(given.offset, ids) != 0:
        raise ValueError("give positions or an offset, not both: add the offset to the positions")
    if given.cu_seqlens is not None or settings.max_seqlen is not None or settings.cp_size != 1:
        raise ValueError("positions say where each token is: give no cu_seqlens, max_seqlen or cp_size with them")
    layout = settings.tensor_format
    whole = {"bshd": (batch, seq), "sbhd": (seq, batch), "thd": (seq,)}[layout]
    if ids.shape == whole and layout != "thd":
        first, second = ids.stride()
        return _Places("ids", ids, (second, first) if layout == "bshd" else (first, second))
    if ids.shape == (seq,):
        return _Places("ids", ids, (ids.stride(0), 0))
    either = f"{list(whole)}, as the tokens" + ("" if layout == "thd" else f", or [{seq}], shared by the batch")
    raise ValueError(f"positions must be {either}; got {list(ids.shape)}")


def _context_parallel(settings: Settings, seq: int, sequences: int | None) -> bool:
    size, rank = settings.cp_size, settings.cp_rank
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"cp_rank must be from 0 to cp_size - 1, got cp_rank={rank}, cp_size={size}")
    if size > 1 and sequences is None and seq % 2:
        raise ValueError(
            f"with cp_size={size} each rank has two chunks of every sequence: {seq} tokens cannot be halved"
        )
    return size > 1


def strides_of(layout: str, tensor: Any) -> tuple[int, int, int, int]:
    """Strides in elements as the kernels take them: seq, batch, heads, head_dim."""
    first, *rest = tensor.stride()
    if layout == "thd":
        return first, 0, rest[0], rest[1]
    return (rest[0], first, rest[1], rest[2]) if layout == "bshd" else (first, *rest)


def _rotated_tensor(name: str, x: Any, layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.ndim != AXES[layout]:
        raise ValueError(f"{name} must be [{', '.join(layout)}] for tensor_format {layout!r}, got {list(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, got {x.dtype}")


def heads_apart(x: Any, settings: Settings) -> bool:
    """Whether q, k and v of a packed qkv with an axis of 3 lie so that no view has their heads on one axis."""
    if settings.kv_heads != 0 or not isinstance(x, torch.Tensor) or x.ndim != AXES[settings.tensor_format] + 1:
        return False
    return bool(x.shape[-2] > 1 and x.stride(-3) != x.shape[-2] * x.stride(-2))


def packed_heads(x: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, int]:
    """A packed qkv with its heads on one axis, and how many of them, the last, are v's.

    A view; where there is none, out of place, of a copy, as of a gradient that a transpose or a slice left.
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
                raise ValueError("q, k and v of a packed qkv must lie side by side: make it contiguous, or use rope_qk")
            x = x.contiguous()
        step = x.stride(-2) if heads > 1 else x.stride(-3)
        return x.as_strided(
            (*x.shape[:-3], 3 * heads, x.shape[-1]), (*x.stride()[:-3], step, x.stride(-1)), x.storage_offset()
        ), heads
    assert kv_heads is not None
    if x.ndim != axes or kv_heads < 0 or x.shape[-2] <= 2 * kv_heads:
        raise ValueError(f"qkv must have more than 2 * kv_heads heads, got {list(x.shape)} with kv_heads={kv_heads}")
    return x, kv_heads


def _like(x: torch.Tensor, key: Any, layout: str) -> None:
    """Whether the key is a tensor with the tokens of x."""
    _rotated_tensor("k", key, layout)
    if key.shape[:-2] != x.shape[:-2] or key.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"k must have the tokens and the head_dim of q, {list(x.shape[:-2])} and {x.shape[-1]}; got {list(key.shape)}"
        )
    if key.dtype != x.dtype or key.device != x.device:
        raise ValueError(f"k must be {x.dtype} on {x.device}, as q is; got {key.dtype} on {key.device}")


def _writable(name: str, x: torch.Tensor) -> None:
    if any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{name} cannot be overwritten: some of its elements share memory (stride 0); use inplace=False"
        )


def refuse_overlap(x: torch.Tensor, key: torch.Tensor) -> None:
    """Refuse to overwrite two tensors of which one element belongs to both."""
    if not x.numel() or not key.numel() or x.is_meta or torch.compiler.is_dynamo_compiling():  # no memory, or none yet
        return
    between = _bytes_between(x, key)
    if between is None:
        return
    first, second = (x, key) if between >= 0 else (key, x)
    between, parts = divmod(abs(between), x.element_size())
    lies = zip(first.stride(), first.shape, second.stride(), second.shape, strict=True)
    axes = [(t if n == 1 else s, n, s if m == 1 else t, m) for s, n, t, m in lies]  # of one entry any stride is right
    if sum((n - 1) * s for s, n, _, _ in axes) < between:
        return
    # Interleaved views, such as q and k of a packed qkv, with the same strides: within steps no longer than the distance
    # of the two, the first must not reach the second; and longer steps must lead past both.
    axes = [axis for axis in axes if max(axis[1], axis[3]) > 1]
    alike = not parts and all(s == t for s, _, t, _ in axes)
    short = [axis for axis in axes if axis[0] <= between]
    alike &= sum((n - 1) * s for s, n, _, _ in short) < between
    reach = between + sum((m - 1) * t for _, _, t, m in short)
    for s, n, _, m in sorted(axis for axis in axes if axis[0] > between):
        alike &= s > reach
        reach += (max(n, m) - 1) * s
    if not alike:
        _refuse_shared(first, second, between * x.element_size() + parts)


def _bytes_between(x: torch.Tensor, key: torch.Tensor) -> int | None:
    """How far the key begins behind x in memory; None where they cannot share any.

    By addresses: two storages may lie over the same memory. What has no address, of a tracer say, has its storage's.
    """
    try:
        return key.data_ptr() - x.data_ptr()
    except RuntimeError:
        if x.untyped_storage().data_ptr() != key.untyped_storage().data_ptr():
            return None
        return int(key.storage_offset() - x.storage_offset()) * x.element_size()


def _refuse_shared(first: torch.Tensor, second: torch.Tensor, between: int) -> None:
    """Settle by the addresses of all elements what strides do not; ``between``: bytes from the first to the second."""
    size = first.element_size()
    starts = []
    for t, begin in ((first, 0), (second, between)):
        places = torch.full((), begin, dtype=torch.int64, device="cpu")
        for n, step in zip(t.shape, t.stride(), strict=True):
            places = places[..., None] + torch.arange(n, device="cpu") * (step * size)
        starts.append(places.flatten())
    one, other = starts
    # Elements of one dtype overlap where they begin less than its size apart.
    if any(torch.isin(one + shift, other).any() for shift in ((0,) if between % size == 0 else range(1 - size, size))):
        raise ValueError("q and k share memory, and both would be overwritten: use inplace=False")


def _overwritable(x: torch.Tensor, key: torch.Tensor | None) -> None:
    """Whether no element of what is overwritten is written twice."""
    _writable("x" if key is None else "q", x)
    if key is not None:
        _writable("k", key)
        refuse_overlap(x, key)


def _words(settings: Settings) -> None:
    """Whether the words among the settings are known, and go together."""
    if settings.tensor_format not in LAYOUTS:
        raise ValueError(f"tensor_format must be one of {LAYOUTS}, got {settings.tensor_format!r}")
    if settings.rotated not in ROTATED:
        raise ValueError(f"rotated must be one of {ROTATED}, got {settings.rotated!r}")
    if settings.rotated == "proportional" and settings.interleaved:
        raise ValueError('rotated="proportional" pairs j with j + head_dim / 2, so interleaved must be False')
    for name in ("interleaved", "inplace", "conjugate"):
        if isinstance(getattr(settings, name), torch.Tensor):
            raise TypeError(f"{name} must be a bool, got a tensor, which may change: pass bool(...) of it")


def _tokens(layout: str, x: torch.Tensor) -> tuple[int, int]:
    """Tokens along their axis, and the batch; a packed call has a batch of one."""
    if layout == "thd":
        return x.shape[0], 1
    first, second = x.shape[:2]
    return (second, first) if layout == "bshd" else (first, second)


_spec = functools.lru_cache(maxsize=4096)(RopeSpec)


def prepare(given: Given, settings: Settings, *, make_out: Callable[[torch.Tensor], torch.Tensor]) -> Prepared:
    """The call, checked; out of place its outputs are what ``make_out`` makes of x and of the key.

    Raises:
        TypeError: a tensor of the wrong kind or dtype.
        ValueError: a shape, device, layout or combination that is not allowed. Nothing has been written.
    """
    layout, inplace = settings.tensor_format, settings.inplace
    _words(settings)
    x, key, copied = given.x, given.key, 0
    if settings.kv_heads is not None and isinstance(x, torch.Tensor):
        x, copied = packed_heads(x, settings)
        if inplace:
            x, copied = x[..., : x.shape[-2] - copied, :], 0
    _rotated_tensor("x", x, layout)
    if key is not None:
        _like(x, key, layout)
    angles = _angles(given, x.device)
    entries = settings.angle_entries or ("feature" if angles.kind == "freqs" else "pair")
    heads, head_dim = x.shape[-2:]
    rotary = _rotary_dim(angles.first.shape[-1], entries, settings, head_dim)
    seq, batch = _tokens(layout, x)
    bounds, sequences = None, None
    if layout == "thd" and given.positions is None:
        bounds = _packed(given.cu_seqlens, x.device)
        sequences = bounds.numel() - 1
    elif given.positions is None and (given.cu_seqlens is not None or settings.max_seqlen is not None):
        raise ValueError(f'cu_seqlens and max_seqlen are for tensor_format "thd", got {layout!r}')
    places = _places(given, settings, seq, batch, sequences)
    parallel = _context_parallel(settings, seq, sequences)
    rows = _rows(angles, batch, layout)
    if angles.kind != "inv_freq":
        _reach(rows, places, settings, seq, sequences)
        _values_reach(rows, places, seq * settings.cp_size, sequences)
    if x.numel() and seq * batch > MAX_TOKENS:
        raise ValueError(f"seq * batch must be at most {MAX_TOKENS}, got {seq * batch}: split the call")
    if inplace:
        _overwritable(x, key)
    if isinstance(settings.attention_scaling, torch.Tensor):
        raise TypeError("attention_scaling must be a number, got a tensor, which may change: pass float(...) of it")
    scaled = settings.attention_scaling != 1.0
    if scaled and angles.kind == "cos_sin":
        raise ValueError(
            "attention_scaling is for freqs and inv_freq: cos and sin hold it already, or multiply them by it"
        )
    direction, conjugate = settings.direction, settings.conjugate
    if conjugate and entries == "pair" and not inplace:  # then it is the transpose
        direction, conjugate = ("forward" if direction == "backward" else "backward"), False
    out = x if inplace else make_out(x)
    key_out = key if inplace or key is None else make_out(key)
    # The kernels step through the features of both tensors, and of both results, by one stride.
    alike = key is None or (x.stride(-1) == key.stride(-1) and out.stride(-1) == key_out.stride(-1))
    supported = x.dtype in SUPPORTED and alike
    make_spec = RopeSpec if torch.compiler.is_dynamo_compiling() else _spec  # which does not look into a cache
    eager_spec = make_spec(
        layout,
        SUPPORTED.get(x.dtype, "float32"),  # eager PyTorch takes float64 too; the spec has no word for it
        max(heads, 1),
        head_dim,
        rotary,
        "interleaved" if settings.interleaved else "half",
        angles.kind,
        ANGLE_DTYPES[angles.first.dtype],
        entries,
        inplace,
        direction,
        key.shape[-2] if key is not None else 0,
        copied,
        places.mode,
        parallel,
        # All features, or the first pairs: other words for the same.
        "first" if rotary == head_dim else settings.rotated,
        conjugate,
        scaled,
        angles.first.ndim > 2,  # noqa: PLR2004
    )
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
        key_strides=(0, 0, 0, 0) if key is None else strides_of(layout, key),
        key_out_strides=(0, 0, 0, 0) if key is None else strides_of(layout, key_out),
        angle_stride_b=first.stride(0) if first.ndim > 2 else 0,  # noqa: PLR2004
        positions=places.tensor,
        position_strides=places.strides,
        offset=places.offset,
        cp_size=settings.cp_size,
        cp_rank=settings.cp_rank,
        scaling=float(settings.attention_scaling),
    )
    return Prepared(eager_spec if supported else None, size, call, eager_spec)


def _rows(angles: Angles, batch: int, layout: str) -> int:
    """How many positions the angles have."""
    first = angles.first
    if first.ndim > 2:  # noqa: PLR2004
        if layout == "thd" or first.shape[0] != batch:
            raise ValueError(
                f"cos and sin of [batch, rows, entries] must have the batch of x, {batch}, got {list(first.shape)}"
                + ("; packed tokens have none: give [rows, entries] and positions" if layout == "thd" else "")
            )
        return first.shape[1]
    return first.shape[0]


def _reach(rows: int, places: _Places, settings: Settings, seq: int, sequences: int | None) -> None:
    """Refuse positions past the angles where the arguments say so without their values."""
    if places.mode == "ids":
        return
    if sequences is not None:
        longest = settings.max_seqlen
        if longest is not None and longest + max(places.offset, 0) > rows:
            raise ValueError(
                f"the angles are too short: {rows} positions for sequences of up to max_seqlen={longest}"
                f"{f' from {places.offset} on' if places.offset else ''}; make them at least as long"
            )
    elif places.offset + seq * settings.cp_size > rows:
        of = f"{seq}" if settings.cp_size == 1 else f"{seq} on each of {settings.cp_size} ranks"
        on = f" from position {places.offset} on" if places.offset else ""
        raise ValueError(
            f"the angles are too short: {rows} positions for a sequence of {of}{on}; make them at least as long"
        )
    if places.offset < 0:
        raise ValueError(f"offset must be at least 0 with a table of angles, got {places.offset}")


def _values_reach(rows: int, places: _Places, seq: int, sequences: int | None) -> None:
    """Refuse positions past the angles by their values, which a CPU shows without waiting; on a GPU they give NaN."""
    tensor = places.tensor
    if tensor is None or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or not tensor.numel():
        return
    least, most = (int(v) for v in torch.aminmax(tensor))
    most += 0 if places.mode == "ids" or sequences is not None or not seq else seq - 1
    if least < 0 or most >= rows:
        name = "positions" if places.mode == "ids" else "offset"
        raise ValueError(
            f"{name} must keep positions in [0, {rows}), the rows of the angles; they go from {least} to {most}"
        )


def offset_limits(spec: RopeSpec, settings: Settings, rows: int, seq: int) -> tuple[int, int]:
    """The least and the largest offset that is a number which ``prepare`` accepts, with a table of ``rows`` positions."""
    if spec.angles == "inv_freq":
        return -MAX_TOKENS, MAX_TOKENS - seq * settings.cp_size
    if spec.positions == "ids":
        return 0, 0
    if spec.packed:
        return 0, MAX_TOKENS if settings.max_seqlen is None else rows - settings.max_seqlen
    return 0, rows - seq * settings.cp_size


def packed_size(tokens: int, sequences: int) -> RopeSize:
    """The size of a packed call: as many sequences of their mean length."""
    return RopeSize(max(sequences, 1), max(1, round(tokens / max(sequences, 1))))
