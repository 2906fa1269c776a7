"""Mistakes in a RoPE call that its shapes and types allow, but that values on a CPU, or two shapes together, give away.

Values are read where that does not wait for a GPU. Nothing is read of a tensor that a tracer or a transform has made.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import torch

from tuned.calls.overlap import wrapped
from tuned.launching.plan import listeners, tracing
from tuned.lookup.caller import outside

if TYPE_CHECKING:
    from tuned.calls.rope.arguments import Given, Settings


def _traced() -> bool:
    """Whether sizes are symbols, or tensors that a tracer follows."""
    return torch.compiler.is_dynamo_compiling() or tracing() is not None


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read without waiting for a GPU, and without a tracer that notices."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not _traced()
        and not wrapped(tensor)
        and not listeners()
    )


def heads_may_come_first(x: torch.Tensor, given: Given, settings: Settings, rows: int, mode: str) -> bool:
    """Whether x looks like [b, h, s, d] where [b, s, h, d] is meant: its third axis alone is as long as the angles.

    False under a tracer, since torch.compile's operator asks when it runs; and for a gradient, whose forward was asked.
    """
    if given.cos is None or settings.tensor_format != "bshd" or settings.kv_heads is not None:
        return False
    if mode != "order" or settings.direction != "forward" or _traced():
        return False
    seq, heads = x.shape[1:3]
    return rows == heads and rows != seq and (given.key is None or given.key.shape[2] == heads)


def warn_if_heads_come_first(x: torch.Tensor, given: Given, settings: Settings, rows: int, mode: str) -> None:
    """Warn if ``heads_may_come_first``."""
    if not heads_may_come_first(x, given, settings, rows, mode):
        return
    seq = x.shape[1]
    warnings.warn(
        f"x of tensor_format 'bshd' must be [b, s, h, d], got {list(x.shape)}, whose third axis alone is as long as cos and sin "
        f'({rows} rows): if it is [b, h, s, d], as in Hugging Face\'s models, pass x.transpose(1, 2), or tensor_format="bhsd" to tuned.dispatch; if not, pass the first {seq} '
        "rows of cos and sin, and this warning ends",
        stacklevel=outside(),
    )


def half_of_the_head(given: Given, settings: Settings, rotary: int, head_dim: int) -> bool:
    """Whether freqs are half as wide as the head: one entry a feature rotates half of it, but one a pair may be meant.

    False under a tracer, since torch.compile's operator asks when it runs; and for a gradient, whose forward was asked.
    """
    told = settings.rotary_dim is not None or settings.angle_entries is not None
    forward = settings.direction == "forward"
    return given.freqs is not None and not told and 2 * rotary == head_dim and forward and not _traced()


def warn_if_half_of_the_head(given: Given, settings: Settings, rotary: int, head_dim: int) -> None:
    """Warn if freqs are ``half_of_the_head``."""
    if not half_of_the_head(given, settings, rotary, head_dim):
        return
    warnings.warn(
        f"freqs half as wide as head_dim must say what they are for, got {rotary} entries for heads of {head_dim}, taken as one a "
        f'feature: pass rotary_dim={rotary} to rotate half of each head, as now; or angle_entries="pair" to rotate all of it, as '
        "outer(t, inv_freq) is meant. Release 0.3.0 refuses them",
        FutureWarning,
        stacklevel=outside(),
    )


def heads_first_hint(x: torch.Tensor, rows: int, settings: Settings, mode: str) -> str:
    """A hint for the error that the angles are too short, if x looks like [b, h, s, d]; else empty."""
    if settings.tensor_format != "bshd" or mode != "order" or _traced() or x.shape[2] != rows:
        return ""
    return '; if x is [b, h, s, d], pass x.transpose(1, 2), or tensor_format="bhsd" to tuned.dispatch'


def refuse_cosines_alone(cache: torch.Tensor) -> None:
    """Refuse cosines, or sines, in the place of a cos_sin_cache.

    The two halves of a row of cosines are equal where entries are repeated for both features of a pair, and at position 0;
    no angles have cosines that are all equal to their sines. A row that is expanded from one entry is not looked at.

    Raises:
        ValueError: the halves of a row are equal.
    """
    if not readable(cache) or cache.shape[0] == 0 or cache.shape[1] < 4 or not cache.stride(1):  # noqa: PLR2004 - two pairs
        return
    for row in (cache[0], cache[-1]):
        cosines, sines = row.detach().chunk(2)
        if torch.equal(cosines, sines) and bool(row.any()):
            raise ValueError(
                "cos_sin_cache must hold the cosines of a position's pairs, then their sines, got rows whose halves are equal, such "
                f"as cos or sin alone ({list(cache.shape)}): pass cos=cos, sin=sin, or torch.cat((cos, sin), -1) of one entry per pair"
            )


def refuse_bounds(bounds: torch.Tensor, tokens: int, settings: Settings) -> None:
    """Check max_seqlen, and the values of cu_seqlens, the bounds of whole sequences, of which x has ``tokens`` on this rank.

    Warns of bounds that are allowed but look like lengths.

    Raises:
        ValueError: max_seqlen is negative; or the bounds decrease, lie outside of x, or do not fit cp_size.
    """
    cp_size, longest = settings.cp_size, settings.max_seqlen
    if longest is not None and longest < 0:
        raise ValueError(f"max_seqlen must be at least 0, got {longest}: pass the longest length, or leave it out")
    if not readable(bounds):
        return
    ends, whole = bounds.tolist(), tokens * cp_size
    lengths = [after - before for before, after in itertools.pairwise(ends)]
    starts = "pass where sequences start, and the end of the last: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))"
    if min(lengths, default=0) < 0:
        at = next(index for index, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"cu_seqlens must not decrease, got {ends[at]} and then {ends[at + 1]} at index {at + 1}: if these are lengths, {starts}"
        )
    if ends[0] < 0 or ends[-1] > whole:
        ranks = "" if cp_size == 1 else f", {tokens} on each of {cp_size} ranks"
        raise ValueError(
            f"cu_seqlens must be from 0 to the {whole} tokens of x{ranks}, got {ends[0]} to {ends[-1]}: if these are lengths, {starts}"
        )
    chunks = 2 * cp_size
    if cp_size > 1 and (uneven := next((length for length in lengths if length % chunks), None)) is not None:
        raise ValueError(
            f"the lengths of cu_seqlens must be divisible by 2 * cp_size = {chunks}, got a length of {uneven}: pad each sequence"
        )
    if ends[0] and sum(ends) == whole:
        warnings.warn(
            f"cu_seqlens must be where sequences start, got {_short(ends)}, which add up to the {whole} tokens of x as lengths do; as "
            f"bounds they leave the first {ends[0]} tokens as they are: if these are lengths, {starts}",
            stacklevel=outside(),
        )


def _short(numbers: list[int]) -> str:
    most = 8
    return str(numbers) if len(numbers) <= most else f"[{', '.join(map(str, numbers[:most]))}, ...]"


def complex_hint(name: str, tensor: torch.Tensor) -> str:
    """The way out for complex angles, such as Llama's freqs_cis."""
    if not tensor.is_complex():
        return "convert with .float()" if name != "inv_freq" else "convert with .float(), or better make it in float32"
    if name == "freqs":
        return "pass it as freqs_cis=, with interleaved=True for Llama's"
    return f"pass cos={name}.real and sin={name}.imag"
