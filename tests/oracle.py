"""RoPE and the GRU gates in NumPy float64, one explicit 2 x 2 matrix a pair: what every kernel is held against.

Written from the definition and sharing no code with tuned or generator, so that a slip there is not repeated here.
Tensors are canonical, [seq, batch, heads, head_dim], whatever the layout of the call.
"""

from __future__ import annotations

import itertools

import numpy as np

# Bits of the significand, the implicit one counted, and exponent of the smallest subnormal number (IEEE 754; bfloat16
# has float32's exponents).
PRECISION = {"float32": 24, "float16": 11, "bfloat16": 8}
SMALLEST_EXPONENT = {"float32": -149, "float16": -24, "bfloat16": -133}
U32 = 2.0**-24  # unit roundoff of float32


def pairs(rotary_dim: int, style: str) -> list[tuple[int, int]]:
    """The two features of each pair."""
    if style == "interleaved":
        return [(2 * j, 2 * j + 1) for j in range(rotary_dim // 2)]
    return [(j, j + rotary_dim // 2) for j in range(rotary_dim // 2)]


def token_positions(seq: int, cu_seqlens: tuple[int, ...] | None) -> list[int | None]:
    """Position of each token in its sequence; None for a token that no sequence holds."""
    if cu_seqlens is None:
        return list(range(seq))
    found: list[int | None] = [None] * seq
    for start, end in itertools.pairwise(cu_seqlens):
        for token in range(start, min(end, seq)):
            found[token] = token - start
    return found


def matrices(cos: np.ndarray, sin: np.ndarray, first: int, second: int) -> np.ndarray:
    """[rows, 2, 2]: what a pair is multiplied by at each position, from the entries of its two features."""
    return np.stack([np.stack([cos[:, first], -sin[:, first]], -1), np.stack([sin[:, second], cos[:, second]], -1)], -2)


def rope(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    rotary_dim: int,
    style: str,
    entries: str,
    transposed: bool = False,
    cu_seqlens: tuple[int, ...] | None = None,
) -> np.ndarray:
    """x [seq, batch, heads, head_dim], rotated; ``cos`` and ``sin`` are [rows, entries], float64 all.

    Positions past the rows give NaN; tokens that no sequence holds, and features past rotary_dim, are copied.
    """
    out = x.copy()
    positions = token_positions(x.shape[0], cu_seqlens)
    held = [token for token, position in enumerate(positions) if position is not None]
    rows = [positions[token] for token in held]
    # One row of NaN stands for every position that the angles do not reach.
    cos, sin = (np.concatenate([a, np.full((1, a.shape[1]), np.nan)]) for a in (cos, sin))
    rows = [min(row, len(cos) - 1) for row in rows]
    for j, (a, b) in enumerate(pairs(rotary_dim, style)):
        maps = matrices(cos, sin, *((a, b) if entries == "feature" else (j, j)))[rows]
        if transposed:
            maps = maps.transpose(0, 2, 1)
        out[np.ix_(held, range(x.shape[1]), range(x.shape[2]), [a, b])] = np.einsum(
            "tij,tbhj->tbhi", maps, x[held][..., [a, b]]
        )
    return out


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """The unit in the last place of each value in ``dtype``; that of the smallest number for zeros and for NaN."""
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    return 2.0 ** np.maximum(exponent - PRECISION[dtype], SMALLEST_EXPONENT[dtype])


def rope_tolerance(
    x: np.ndarray, wanted: np.ndarray, dtype: str, *, rotary_dim: int, style: str, truncates: bool = False
) -> np.ndarray:
    """The largest error that is right, per element; zero where a value is only copied.

    In float32 a result is first * cos - second * sin (or its like), with cos and sin at most 1 in size. Each product
    may be off by 2 units in the last place of the sine or cosine (CUDA's documented bound; a unit is at most 2^-24
    there), by its own rounding and by that of the sum: 4 x 2^-24 of |first| + |second|. The store then rounds once, by
    half a unit in the last place, or truncates, by a whole one.
    """
    out = np.zeros_like(wanted)
    for a, b in pairs(rotary_dim, style):
        arithmetic = 4 * U32 * (np.abs(x[..., a]) + np.abs(x[..., b]))
        for feature in (a, b):
            stored = ulp(np.abs(wanted[..., feature]) + arithmetic, dtype)
            out[..., feature] = arithmetic + (1.0 if truncates else 0.5) * stored
    return out


def gru_gates(
    gates_x: np.ndarray, gates_h: np.ndarray, h: np.ndarray, bias_ih: np.ndarray, bias_hh: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """h' [batch, hidden] from [batch, 3 * hidden] products in the order r, z, n, and the error float32 may leave.

    The bound follows the chain, u = 2^-24: a sigmoid has slope 1/4 and takes two roundings of its four terms, an
    exponential (2 units in the last place, and its argument's rounding, together under 8 u after the division); tanh
    has slope 1 and ends the same way; the blend adds 3 u of its terms.
    """
    hidden = h.shape[1]
    x, hh = gates_x + bias_ih, gates_h + bias_hh
    size = np.abs(gates_x) + np.abs(bias_ih) + np.abs(gates_h) + np.abs(bias_hh)
    out, error = np.empty_like(h), np.empty_like(h)
    for j in range(hidden):
        i_r, i_z, i_n = j, hidden + j, 2 * hidden + j
        with np.errstate(over="ignore"):  # 1 / (1 + inf) is the 0 that is right
            r = 1 / (1 + np.exp(-(x[:, i_r] + hh[:, i_r])))
            z = 1 / (1 + np.exp(-(x[:, i_z] + hh[:, i_z])))
        n = np.tanh(x[:, i_n] + r * hh[:, i_n])
        out[:, j] = (1 - z) * n + z * h[:, j]
        # A sigmoid is never off by more than 1, nor a tanh by more than 2, however large their arguments.
        error_r = np.minimum(U32 * (0.25 * 3 * size[:, i_r] + 8), 1)
        error_z = np.minimum(U32 * (0.25 * 3 * size[:, i_z] + 8), 1)
        error_n = np.minimum(U32 * (4 * size[:, i_n] + 8) + error_r * np.abs(hh[:, i_n]), 2)
        error[:, j] = error_n + error_z * np.abs(h[:, j] - n) + 3 * U32 * (1 + np.abs(h[:, j]))
    return out, error


def gru_tolerance(wanted: np.ndarray, arithmetic: np.ndarray, dtype: str, *, truncates: bool = False) -> np.ndarray:
    """``arithmetic``, and one rounding (or truncation) of the result."""
    return arithmetic + (1.0 if truncates else 0.5) * ulp(np.abs(wanted) + arithmetic, dtype)
