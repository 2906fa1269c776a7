"""RoPE and the GRU gates in NumPy float64, one explicit 2 x 2 matrix a pair: every kernel is checked against these.

Written from the definition and sharing no code with tuned or generator, so that a mistake there is not repeated here.
Tensors are canonical, [seq, batch, heads, head_dim], whatever the layout of the call.
"""

from __future__ import annotations

import itertools

import numpy as np

# Bits of the significand with the implicit one, and the exponent of the smallest subnormal number (IEEE 754; bfloat16
# has float32's exponents).
PRECISION = {"float32": 24, "float16": 11, "bfloat16": 8}
SMALLEST_EXPONENT = {"float32": -149, "float16": -24, "bfloat16": -133}
U32 = 2.0**-24  # unit roundoff of float32


def pairs(rotary_dim: int, style: str) -> list[tuple[int, int]]:
    """The two entries of each pair among ``rotary_dim`` entries; these are the features if the first features rotate."""
    if style == "interleaved":
        return [(2 * j, 2 * j + 1) for j in range(rotary_dim // 2)]
    return [(j, j + rotary_dim // 2) for j in range(rotary_dim // 2)]


def features(head_dim: int, rotary_dim: int, style: str, rotated: str) -> list[tuple[int, int]]:
    """The two features of each pair that rotates."""
    if rotated == "proportional":  # pairs span the whole head, and the first few of them rotate
        return pairs(head_dim, style)[: rotary_dim // 2]
    first = head_dim - rotary_dim if rotated == "last" else 0
    return [(first + a, first + b) for a, b in pairs(rotary_dim, style)]


def token_positions(seq: int, cu_seqlens: tuple[int, ...] | None) -> list[int | None]:
    """Position of each token in its sequence; None for a token that no sequence holds."""
    return [None if place is None else place[1] for place in _places(seq, cu_seqlens)]


def _places(seq: int, cu_seqlens: tuple[int, ...] | None) -> list[tuple[int, int] | None]:
    """The sequence of each token and its place there; None for a token that no sequence holds."""
    found: list[tuple[int, int] | None] = [None] * seq
    for index, (start, end) in enumerate(itertools.pairwise((0, seq) if cu_seqlens is None else cu_seqlens)):
        for token in range(start, min(end, seq)):
            found[token] = (index, token - start)
    return found


def own_chunks(length: int, cp_size: int, cp_rank: int) -> list[int]:
    """Where the tokens of one rank are in the whole sequence: the rank has two of its 2 * cp_size chunks, in order."""
    chunks = np.array_split(np.arange(length), 2 * cp_size)
    return [int(place) for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank) for place in chunks[chunk]]


def call_positions(
    seq: int,
    batch: int,
    *,
    cu_seqlens: tuple[int, ...] | None = None,
    starts: tuple[int, ...] | int = 0,
    ids: np.ndarray | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> list[list[int | None]]:
    """The position of each token of a call, [seq][batch]; None for a token that no sequence holds.

    ``starts``: where the sequences start, one number for all, or one for each batch entry or packed sequence.
    ``ids``: the positions themselves, [seq, batch]. ``cu_seqlens`` bound whole sequences; one rank of
    ``cp_size`` has the tokens of its chunks, sequence after sequence.
    """
    if ids is not None:
        return [[int(position) for position in row] for row in ids]
    bounds = (0, seq * cp_size) if cu_seqlens is None else cu_seqlens
    if cp_size > 1:
        mine = [own_chunks(end - start, cp_size, cp_rank) for start, end in itertools.pairwise(bounds)]
        begins = np.cumsum([bounds[0] // cp_size, *map(len, mine)]).tolist()
    else:
        mine, begins = [list(range(end - start)) for start, end in itertools.pairwise(bounds)], list(bounds)

    def start(sequence: int, entry: int) -> int:
        return starts if isinstance(starts, int) else starts[entry if cu_seqlens is None else sequence]

    return [
        [None if place is None else mine[place[0]][place[1]] + start(place[0], entry) for entry in range(batch)]
        for place in _places(seq, tuple(begins))
    ]


def rows_at(table: np.ndarray, positions: list[list[int | None]]) -> np.ndarray:
    """[seq, batch, entries]: the row of ``table``, [rows, entries] or [batch, rows, entries], at each position.

    NaN at positions past the rows or below 0; zeros for tokens without a position.
    """
    out = np.zeros((len(positions), len(positions[0]) if positions else 0, table.shape[-1]))
    for (token, entry), _ in np.ndenumerate(out[..., 0]):
        position, own = positions[token][entry], table[entry] if table.ndim > 2 else table
        if position is not None:
            out[token, entry] = own[position] if 0 <= position < len(own) else np.nan
    return out


def radians_at(inv_freq: np.ndarray, positions: list[list[int | None]]) -> np.ndarray:
    """[seq, batch, entries]: position times rate, each rounded to float32, and the product rounded to float32 once."""
    numbers = np.array([[0 if p is None else p for p in row] for row in positions], dtype=np.int64)
    rates = inv_freq.astype(np.float32)
    return (numbers.astype(np.float32)[..., None] * rates).astype(np.float64)


def matrices(cos: np.ndarray, sin: np.ndarray, first: int, second: int) -> np.ndarray:
    """[seq, batch, 2, 2]: the matrix that a pair is multiplied by, from the entries of its two features."""
    return np.stack(
        [
            np.stack([cos[..., first], -sin[..., first]], -1),
            np.stack([sin[..., second], cos[..., second]], -1),
        ],
        -2,
    )


def rope(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    turned: list[tuple[int, int]],
    style: str,
    entries: str,
    transposed: bool = False,
    held: np.ndarray | None = None,
) -> np.ndarray:
    """x [seq, batch, heads, head_dim] with the pairs ``turned`` rotated; ``cos`` and ``sin`` are [seq, batch, entries].

    All in float64. ``held`` [seq]: which tokens are rotated at all. All other tokens and features are copied.
    """
    out = x.copy()
    tokens = np.flatnonzero(np.ones(len(x), dtype=bool) if held is None else held)
    for j, ((a, b), (first, second)) in enumerate(zip(turned, pairs(2 * len(turned), style), strict=True)):
        maps = matrices(cos, sin, *((first, second) if entries == "feature" else (j, j)))[tokens]
        if transposed:
            maps = np.swapaxes(maps, -1, -2)
        out[np.ix_(tokens, range(x.shape[1]), range(x.shape[2]), [a, b])] = np.einsum(
            "tbij,tbhj->tbhi", maps, x[tokens][..., [a, b]]
        )
    return out


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """The unit in the last place of each value in ``dtype``; for zeros and NaN that of the smallest number."""
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    return 2.0 ** np.maximum(exponent - PRECISION[dtype], SMALLEST_EXPONENT[dtype])


def rope_tolerance(
    x: np.ndarray,
    wanted: np.ndarray,
    dtype: str,
    *,
    turned: list[tuple[int, int]],
    scaling: float = 1.0,
    truncates: bool = False,
) -> np.ndarray:
    """The largest error that is right, per element; zero where a value is only copied.

    In float32 a result is first * cos - second * sin (or its like), with cos and sin at most 1 in size. Each product
    may be off by 2 units in the last place of the sine or cosine (CUDA's documented bound; a unit is at most 2^-24
    there), by its own rounding and by that of the sum: 4 x 2^-24 of |first| + |second|. Cosines and sines that are
    multiplied by ``scaling`` are rounded once more, and are at most ``scaling`` in size. The store then rounds once, by
    half a unit in the last place, or truncates, by a whole one.
    """
    out = np.zeros_like(wanted)
    roundings = 4 if scaling == 1.0 else 5 * abs(scaling)
    for a, b in turned:
        arithmetic = roundings * U32 * (np.abs(x[..., a]) + np.abs(x[..., b]))
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
        with np.errstate(over="ignore"):  # 1 / (1 + inf) is 0, which is right
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
    """The error allowed: ``arithmetic``, and one rounding (or truncation) of the result."""
    return arithmetic + (1.0 if truncates else 0.5) * ulp(np.abs(wanted) + arithmetic, dtype)
