"""rope_norm_backward_half_freqs: RoPE of complete calls, any layout, half pairs, out of place; sine and cosine taken here; RMSNorm before it.

@generated from templates/rope_norm_backward.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The gradient of RMSNorm with a rotation, of one tensor or two. Let z be the gradient of the norm's result, which is the
transposed rotation of grad; y = z * weight; n the input times its reciprocal norm; and means be over all features that
are normalised together. Then the input's gradient is reciprocal * (y - n * mean(y * n)), and the weight's is the sum
over tokens (and heads) of z * n. The reciprocal norms are computed again from the input, which is read anyway, and
mean(y * n) is reciprocal * mean(y * input), so that no sum waits for another. A program takes tile after tile of the
same rows, and sums its part of the weights' gradients in registers; templates/rope_norm_weights.py.jinja adds the
parts, in one order. Arithmetic is in float32, and results are rounded once, at the store. Names as in
templates/rope.py.jinja; given: the forward's input, and its key.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(
    rows, m_row, stride_d, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, DISTANCE: tl.constexpr, EVICT: tl.constexpr,
    ABSENT: tl.constexpr,
):  # fmt: skip
    """Features (j, j + DISTANCE) of each row: [BLOCK_TOKENS, BLOCK_HEADS, PAIR_BLOCK] twice."""
    i_pair = tl.arange(0, PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_pair < PAIRS)[None, None, :]
    pointers = rows[:, :, None] + i_pair[None, None, :] * stride_d
    first = tl.load(pointers, mask=mask, other=ABSENT, eviction_policy=EVICT)
    second = tl.load(pointers + DISTANCE * stride_d, mask=mask, other=ABSENT, eviction_policy=EVICT)
    return first, second


@triton.jit
def _store_pairs(
    rows,
    m_row,
    stride_d,
    first,
    second,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    DISTANCE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """The inverse of _load_pairs."""
    i_pair = tl.arange(0, PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_pair < PAIRS)[None, None, :]
    pointers = rows[:, :, None] + i_pair[None, None, :] * stride_d
    tl.store(pointers, first, mask=mask, cache_modifier=CACHE)
    tl.store(pointers + DISTANCE * stride_d, second, mask=mask, cache_modifier=CACHE)


@triton.jit
def _sincos(x):
    """Sine and cosine of float32 radians, each within 2.1 * 2^-24. No branch, no table, no stack."""
    # Reduce the angle to quarter turns, modulo 4. |x| is m * 2^e with an integer m of 24 bits. Of 2 / pi only a window
    # of 64 bits matters, which begins at bit ``place``: m * window, modulo 2^64, is the angle in units of 2^-62 quarter
    # turns. The four words are floor(2 / pi * 2^230).
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    place = tl.minimum(tl.maximum((bits >> 23) - 126, 0), 128)
    shift = (place & 63).to(tl.uint64)
    word_0 = tl.full((), 0x28BE60DB93, tl.uint64)
    word_1 = tl.full((), 0x91054A7F09D5F47D, tl.uint64)
    word_2 = tl.full((), 0x4D377036D8A5664F, tl.uint64)
    word_3 = tl.full((), 0x10E4107F9458EAF7, tl.uint64)
    high = tl.where(place < 64, word_0, tl.where(place < 128, word_1, word_2))
    low = tl.where(place < 64, word_1, tl.where(place < 128, word_2, word_3))
    # Two shifts to the right, since a shift by 64 (if ``shift`` is 0) is not defined.
    window = (high << shift) | ((low >> 1) >> (63 - shift))
    # Add half a quarter turn, so that the top two bits are the nearest quarter turn. The rest, up to half a quarter
    # turn either way, is in units of 2^-32; flipping its highest bit subtracts the half again.
    turns = m * window + 0x2000000000000000
    quarter = (turns >> 62).to(tl.int32)
    rest = ((turns >> 30) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True) ^ -2147483648
    r = rest.to(tl.float32) * 3.6572951981e-10  # pi / 2 * 2^-32
    # Below pi / 4 there is nothing to reduce. Infinity and NaN give NaN.
    small = size < 0.78539816
    r = tl.where(small, size, tl.where(size < float("inf"), r, float("nan")))
    quarter = tl.where(small, 0, quarter)
    # Polynomials, Chebyshev fits on +-pi / 4 of (sin r / r - 1) / r^2 and (cos r - 1 + r^2 / 2) / r^4, whose errors are
    # 1.4e-11 and 7.6e-10.
    z = r * r
    odd = r + r * z * (-0.16666667 + z * (8.3333319e-3 + z * (-1.9840087e-4 + z * 2.7249957e-6)))
    even = 1.0 - 0.5 * z + z * z * (0.041666664 + z * (-1.3888304e-3 + z * 2.4547986e-5))
    # Odd quarter turns swap sine and cosine. Bit 1 of ``quarter`` is the sign of the sine of |x|.
    swapped = (quarter & 1) != 0
    sine = tl.where(swapped, even, odd)
    cosine = tl.where(swapped, odd, even)
    turned = (quarter & 2) != 0
    sine = tl.where(turned != (x < 0), -sine, sine)
    # The cosine is negative where bit 1 of quarter + 1 is set. Compare two bits instead of adding: LLVM narrows the
    # addition to 16 bits and adds for two angles at once (add.s16x2), and ptxas 12.8 then loses the constant of some.
    # docs/decisions/0024.
    cosine = tl.where(turned != swapped, -cosine, cosine)
    return sine, cosine


@triton.jit
def _cos_sin(freqs, p_angle, m_angle, EVICT: tl.constexpr):
    """Cosine and sine of the angles at p_angle, NaN outside the mask: [BLOCK_TOKENS, PAIR_BLOCK] both."""
    sine, cosine = _sincos(tl.load(freqs + p_angle, mask=m_angle, other=float("nan"), eviction_policy=EVICT))
    return cosine, sine


@triton.jit
def _axis(
    i_pair,
    SECTION_1: tl.constexpr,
    SECTION_2: tl.constexpr,
    SECTION_3: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr,
):
    """Which axis of the positions each pair takes its angle from: [PAIR_BLOCK].

    Sections in a row: axes 1, 2 and 3 begin at pairs SECTION_1, SECTION_2 and SECTION_3. Interleaved: pairs 1, 4, 7 ...
    below SECTION_1 are of axis 1, pairs 2, 5, 8 ... below SECTION_2 of axis 2, and all others of axis 0.
    """
    if SECTIONS_INTERLEAVED:
        first = (i_pair % 3 == 1) & (i_pair < SECTION_1)
        second = (i_pair % 3 == 2) & (i_pair < SECTION_2)
        return first.to(tl.int32) + 2 * second.to(tl.int32)
    axis = (i_pair >= SECTION_1).to(tl.int32) + (i_pair >= SECTION_2).to(tl.int32)
    return axis + (i_pair >= SECTION_3).to(tl.int32)


@triton.jit
def _bounds(cu_seqlens, i_bound, sequences, cp_size, CONTEXT_PARALLEL: tl.constexpr):
    """Where sequences begin among the tokens of this rank; past the last bound, a number larger than any token's."""
    bound = tl.load(cu_seqlens + i_bound, mask=i_bound <= sequences, other=2147483647)
    if CONTEXT_PARALLEL:
        bound = tl.where(i_bound <= sequences, bound // cp_size, bound)
    return bound


@triton.jit
def _sequences(
    i_token, cu_seqlens, sequences, cp_size, CONTEXT_PARALLEL: tl.constexpr, STEPS: tl.constexpr, FAN: tl.constexpr
):
    """The sequence of each token, where it begins, and whether there is one: [BLOCK_TOKENS] each."""
    # Search the last bound at or before each token by comparing FAN bounds at a time. Each step waits for memory once,
    # and one step is enough for FAN - 1 sequences. Empty sequences have equal bounds, of which the last one counts.
    end = tl.load(cu_seqlens + sequences)
    if CONTEXT_PARALLEL:
        end = end // cp_size
    i_sequence = i_token * 0
    start = i_token * 0
    for step in tl.static_range(STEPS):
        stride = FAN ** (STEPS - 1 - step)
        i_tried = i_sequence[:, None] + tl.arange(0, FAN)[None, :] * stride  # [BLOCK_TOKENS, FAN]
        bound = _bounds(cu_seqlens, i_tried, sequences, cp_size, CONTEXT_PARALLEL)
        m_before = bound <= i_token[:, None]
        i_sequence += tl.maximum(tl.sum(m_before.to(tl.int32), 1) - 1, 0) * stride
        start = tl.max(tl.where(m_before, bound, -1), 1)
    return i_sequence, start, (start >= 0) & (i_token < end)


@triton.jit
def _dual_chunk(i_place, length, cp_size, cp_rank):
    """Place in the whole sequence, of whose 2 cp_size chunks a rank has numbers cp_rank and 2 cp_size - 1 - cp_rank."""
    chunk = length // 2
    later = (2 * cp_size - 2 - cp_rank) * chunk + i_place  # tokens of the second chunk begin at ``chunk``
    return tl.where(i_place < chunk, cp_rank * chunk + i_place, later)


@triton.jit
def _tail(rows, m_row, stride_d, FEATURE: tl.constexpr, TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr):
    """Pointers and mask of the features that do not rotate: [BLOCK_TOKENS, BLOCK_HEADS, TAIL_BLOCK] both."""
    i_feature = tl.arange(0, TAIL_BLOCK)
    mask = m_row[:, :, None] & (i_feature < TAIL)[None, None, :]
    return rows[:, :, None] + (FEATURE + i_feature)[None, None, :] * stride_d, mask


@triton.jit
def _multiple(stride, MULTIPLE: tl.constexpr):
    """The stride as it is; the compiler then sees that MULTIPLE divides it, and so how much one load can take."""
    if MULTIPLE > 1:
        if isinstance(stride, tl.tensor):  # 1 is a constant
            stride = stride // MULTIPLE * MULTIPLE
    return stride


@triton.jit
def _rows(
    x, key, i_batch, i_token, i_row,
    stride_s, stride_b, stride_h, key_stride_s, key_stride_b, key_stride_h,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Pointers to the first feature of each row, of x or of key: [BLOCK_TOKENS, BLOCK_HEADS]."""
    stride_s, stride_b = _multiple(stride_s, MULTIPLE), _multiple(stride_b, MULTIPLE)
    stride_h = _multiple(stride_h, MULTIPLE)
    # 64-bit offsets: tokens x heads x head_dim may pass 2^31.
    i_token = i_token.to(tl.int64)
    rows = x + ((i_batch * stride_b + i_token * stride_s)[:, None] + (i_row.to(tl.int64) * stride_h)[None, :])
    if KEY_HEADS > 0:
        key_stride_s, key_stride_b = _multiple(key_stride_s, MULTIPLE), _multiple(key_stride_b, MULTIPLE)
        key_stride_h = _multiple(key_stride_h, MULTIPLE)
        i_head = (i_row - HEADS).to(tl.int64)
        of_key = key + ((i_batch * key_stride_b + i_token * key_stride_s)[:, None] + (i_head * key_stride_h)[None, :])
        rows = tl.where((i_row < HEADS)[None, :], rows, of_key)
    return rows


@triton.jit
def _features(PAIR_BLOCK: tl.constexpr, DISTANCE: tl.constexpr, FEATURE: tl.constexpr):
    """The first and the second feature of each pair: [PAIR_BLOCK] both."""
    i_pair = tl.arange(0, PAIR_BLOCK)
    return FEATURE + i_pair, FEATURE + i_pair + DISTANCE


@triton.jit
def _together(values, i_row, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, NORM_ALL: tl.constexpr):
    """For each row the sum of ``values`` over the rows that are normalised with it: [BLOCK_TOKENS, BLOCK_HEADS]."""
    if NORM_ALL:
        m_query = (i_row < HEADS)[None, :]
        of_query = tl.sum(tl.where(m_query, values, 0.0), 1)[:, None]
        if KEY_HEADS > 0:
            values = tl.where(m_query, of_query, tl.sum(tl.where(m_query, 0.0, values), 1)[:, None])
        else:
            values = of_query + tl.zeros_like(values)
    return values


@triton.jit
def _parts(i_row, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM_ALL: tl.constexpr):
    """1 / the number of features that are normalised with each row: [1, BLOCK_HEADS]."""
    heads = 1 + i_row * 0
    if NORM_ALL:
        heads = tl.where(i_row < HEADS, HEADS, KEY_HEADS)
    return (1.0 / (tl.maximum(heads, 1) * HEAD_DIM).to(tl.float32))[None, :]


@triton.jit
def _reciprocal_norms(
    squares,
    i_row,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM_ALL: tl.constexpr,
):
    """1 / sqrt(mean of the squares + eps), given the sum of squares of each row: [BLOCK_TOKENS, BLOCK_HEADS, 1]."""
    part = _parts(i_row, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
    return tl.rsqrt(_together(squares, i_row, HEADS, KEY_HEADS, NORM_ALL) * part + eps)[:, :, None]


@triton.jit
def _spread(row, i_feature, BLOCK: tl.constexpr):
    """Pointers to some features of each row, in a tile of shape BLOCK."""
    return tl.broadcast_to(row[None, :, None] + i_feature[None, None, :], BLOCK)


@triton.jit
def _weights(
    weight,
    key_weight,
    i_row,
    i_feature,
    m_feature,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM_ALL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """The weight of each feature of each row, 0 outside the mask: [BLOCK_TOKENS, BLOCK_HEADS, block], float32.

    Loaded for each token, in the layout of the rows: a smaller tile would have to be spread over the threads through
    shared memory, with barriers.
    """
    p_row = i_row * 0
    if NORM_ALL:
        p_row = tl.where(i_row < HEADS, i_row, i_row - HEADS) * HEAD_DIM
    block: tl.constexpr = [BLOCK_TOKENS, i_row.shape[0], i_feature.shape[0]]
    m_query = tl.broadcast_to((i_row < HEADS)[None, :, None] & m_feature[None, None, :], block)
    m_key = tl.broadcast_to((i_row < HEADS + KEY_HEADS)[None, :, None] & m_feature[None, None, :], block)
    row, of_key = weight + p_row, key_weight + p_row
    if KEY_HEADS > 0 and weight.dtype == key_weight.dtype:
        row = tl.where(i_row < HEADS, row, of_key)
        m_query = m_key
    own = tl.load(_spread(row, i_feature, block), mask=m_query, other=0.0).to(tl.float32)
    if KEY_HEADS > 0 and weight.dtype != key_weight.dtype:
        m_key = m_key & (i_row >= HEADS)[None, :, None]
        own += tl.load(_spread(of_key, i_feature, block), mask=m_key, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        own += 1.0
    return own


@triton.jit
def _scaled(values, reciprocal, weights, dtype: tl.constexpr, ROUNDING: tl.constexpr):
    """Values times their reciprocal norm and weight, in float32, rounded in between as the model's own code does."""
    values = values * reciprocal
    if ROUNDING == "each":
        values = values.to(dtype).to(tl.float32)
    values = values * weights
    if ROUNDING != "once":
        values = values.to(dtype).to(tl.float32)
    return values


@triton.jit
def _add_two(a_0, a_1, b_0, b_1):
    return a_0 + b_0, a_1 + b_1


@triton.jit
def _add_to(of_query, of_key, values, i_row, FIRST: tl.constexpr, HEADS: tl.constexpr):
    """Add the values of the rows from FIRST on, [BLOCK_TOKENS, BLOCK_HEADS, block], to the query's or to the key's."""
    if FIRST + i_row.shape[0] <= HEADS:
        of_query += values
    elif FIRST >= HEADS:
        of_key += values
    else:
        m_query = (i_row < HEADS)[None, :, None]
        of_query += tl.where(m_query, values, 0.0)
        of_key += tl.where(m_query, 0.0, values)
    return of_query, of_key


@triton.jit
def _both_weights(
    weight, key_weight, i_row, i_first, i_second, m_pair,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM_ALL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """_weights of the first and of the second features of pairs."""
    first = _weights(
        weight, key_weight, i_row, i_first, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS
    )
    second = _weights(
        weight, key_weight, i_row, i_second, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS
    )
    return first, second


@triton.jit
def _kept(values, m_row):
    """The values of the rows in ``m_row``, and 0 in the others: [BLOCK_TOKENS, BLOCK_HEADS, block]."""
    return tl.where(m_row[:, :, None], values, 0.0)


@triton.jit
def _turned_back(
    grad_first, grad_second, first, second, cos_first, sin_first, cos_second, sin_second, i_pair, m_used,
    TURNED_PAIRS: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """z, the gradient of the norm's result, and the norm's input; each of two features, in float32.

    The rotation is transposed: the two sines of a pair change places, and their signs change.
    """
    grad_first, grad_second = grad_first.to(tl.float32), grad_second.to(tl.float32)
    z_first = grad_first * cos_first + grad_second * sin_second
    z_second = grad_second * cos_second - grad_first * sin_first
    if TURNED_PAIRS < PAIRS:
        m_turned = (i_pair < TURNED_PAIRS)[None, None, :]
        z_first = tl.where(m_turned, z_first, grad_first)
        z_second = tl.where(m_turned, z_second, grad_second)
    b_first, b_second = first.to(tl.float32), second.to(tl.float32)
    if PACKED:  # tokens that no sequence holds were copied: they may be NaN, and add nothing
        z_first, z_second = _kept(z_first, m_used), _kept(z_second, m_used)
        b_first, b_second = _kept(b_first, m_used), _kept(b_second, m_used)
    return z_first, z_second, b_first, b_second


@triton.jit
def _add_four(a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3):
    return a_0 + b_0, a_1 + b_1, a_2 + b_2, a_3 + b_3


@triton.jit
def _both_together(a, b, i_row, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, NORM_ALL: tl.constexpr):
    """_together of a and of b: [BLOCK_TOKENS, BLOCK_HEADS] both.

    One reduction sums both, for the query and for the key: warps wait for each other once.
    """
    if NORM_ALL:
        m_query = (i_row < HEADS)[None, :]
        of_query = tl.where(m_query, a, 0.0), tl.where(m_query, b, 0.0)
        if KEY_HEADS > 0:
            of_key = tl.where(m_query, 0.0, a), tl.where(m_query, 0.0, b)
            a_query, b_query, a_key, b_key = tl.reduce(of_query + of_key, 1, _add_four)
            a = tl.where(m_query, a_query[:, None], a_key[:, None])
            b = tl.where(m_query, b_query[:, None], b_key[:, None])
        else:
            a_query, b_query = tl.reduce(of_query, 1, _add_two)
            a, b = a_query[:, None] + tl.zeros_like(a), b_query[:, None] + tl.zeros_like(b)
    return a, b


@triton.jit
def _store_part(
    partials, part, i_row, i_feature, m_feature,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM_ALL: tl.constexpr,
):  # fmt: skip
    """Store a program's sums of some features, [BLOCK_HEADS, block], to its row of partials."""
    if NORM_ALL:
        place = (i_row * HEAD_DIM)[:, None] + i_feature[None, :]
        mask = (i_row < HEADS + KEY_HEADS)[:, None] & m_feature[None, :]
        tl.store(partials + place, part, mask=mask)
    else:
        m_query = (i_row < HEADS)[:, None]
        tl.store(partials + i_feature, tl.sum(tl.where(m_query, part, 0.0), 0), mask=m_feature)
        if KEY_HEADS > 0:
            tl.store(partials + HEAD_DIM + i_feature, tl.sum(tl.where(m_query, 0.0, part), 0), mask=m_feature)


@triton.jit(
    do_not_specialize=[
        "offset", "seq", "batch", "angle_rows", "sequences", "cp_size", "cp_rank", "scaling",
        "position_stride_s", "position_stride_b",
    ]
)  # fmt: skip
def rope_norm_backward_half_freqs(
    x,  # the gradient of the result
    out,  # that of the input
    freqs,
    cu_seqlens,  # int32 [sequences + 1], PACKED
    key,
    key_out,
    positions,  # int32 or int64: ids, starts, or one offset
    weight,  # of the norm of x: [HEAD_DIM], or [HEADS * HEAD_DIM] if NORM_ALL
    key_weight,  # of the norm of the key; any pointer without a key
    given,
    key_given,
    partials,  # float32 [programs, features of both weights]
    offset,
    seq,
    batch,
    angle_rows,
    x_stride_s,
    x_stride_b,
    x_stride_h,
    stride_d,  # of x and of key
    out_stride_s,
    out_stride_b,
    out_stride_h,
    out_stride_d,  # of both results
    angle_stride_s,
    angle_stride_d,
    sequences,
    cp_size,  # ranks; if POSITIONS is "axes", elements of positions from one axis to the next
    cp_rank,
    scaling,
    eps,
    key_stride_s,
    key_stride_b,
    key_stride_h,
    angle_stride_b,
    position_stride_s,
    position_stride_b,
    key_out_stride_s,
    key_out_stride_b,
    key_out_stride_h,
    given_stride_s,
    given_stride_b,
    given_stride_h,
    given_stride_d,  # of both
    key_given_stride_s,
    key_given_stride_b,
    key_given_stride_h,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # pairs that are read and written
    PAIR_BLOCK: tl.constexpr,  # PAIRS padded to a power of two
    TAIL: tl.constexpr,  # features that are normalised beside the pairs
    TAIL_BLOCK: tl.constexpr,
    PER_FEATURE: tl.constexpr,  # the two entries of a pair may differ
    BACKWARD: tl.constexpr,  # always
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ORDER: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    PDL: tl.constexpr,
    MULTIPLE: tl.constexpr,  # divides all strides of rows; 1 if 16 does, which the compiler sees itself
    ANGLE_MULTIPLE: tl.constexpr,  # the same for the strides of angles
    SEARCH_STEPS: tl.constexpr,
    SEARCH_FAN: tl.constexpr,  # SEARCH_FAN ** SEARCH_STEPS > sequences
    KEY_HEADS: tl.constexpr,
    COPIED_HEADS: tl.constexpr,  # none
    TURNED_PAIRS: tl.constexpr,  # the first of PAIRS rotate
    PAIR_DISTANCE: tl.constexpr,  # features between the two of a pair, style half
    FIRST_FEATURE: tl.constexpr,  # the first feature that rotates
    TAIL_FEATURE: tl.constexpr,  # the first of TAIL
    CONJUGATE: tl.constexpr,  # rotate by minus the angle
    SCALED: tl.constexpr,
    ANGLES_PER_BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,  # "order", "offset", "starts", "ids" or "axes"
    SECTION_1: tl.constexpr,  # of "axes": see _axis
    SECTION_2: tl.constexpr,
    SECTION_3: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
    CONTEXT_PARALLEL: tl.constexpr,
    ANGLE_EVICT: tl.constexpr,  # for loads of a table, not of inv_freq, which every program reads again
    HEAD_DIM: tl.constexpr,
    NORM_ALL: tl.constexpr,  # the heads of a tensor are normalised together, not each by itself
    ZERO_CENTERED: tl.constexpr,  # features are multiplied by 1 + weight
    ROUNDING: tl.constexpr,  # where the forward rounds, which the gradient takes as exact
    STAGES: tl.constexpr,  # tiles that a program has at a time: being loaded, or computed
    CHUNKS: tl.constexpr,  # a program has so many times BLOCK_HEADS rows, one after the other: all, if NORM_ALL
):
    if PDL:
        # Dependent launch: the next kernel's programs may take places that fall free. This kernel reads and writes
        # nothing before the previous one has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 64-bit offsets of features and angle entries too: even a few may lie further apart than 2^31 elements. Triton
    # makes a stride of 1 a constant, which is no tensor.
    if isinstance(stride_d, tl.tensor):
        stride_d = stride_d.to(tl.int64)
    if isinstance(angle_stride_d, tl.tensor):
        angle_stride_d = angle_stride_d.to(tl.int64)
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)
    if isinstance(given_stride_d, tl.tensor):
        given_stride_d = given_stride_d.to(tl.int64)

    # This program's rows. It takes every ``turns``-th tile of the tokens of all batch entries.
    rows_of_token: tl.constexpr = HEADS + KEY_HEADS
    row_tiles: tl.constexpr = (rows_of_token + BLOCK_HEADS * CHUNKS - 1) // (BLOCK_HEADS * CHUNKS)
    i_program = tl.program_id(0)
    turns = tl.num_programs(0) // row_tiles
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    i_row_0 = (i_program % row_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # of the first chunk, [BLOCK_HEADS]
    m_pair = tl.arange(0, PAIR_BLOCK) < PAIRS
    i_first, i_second = _features(PAIR_BLOCK, PAIR_DISTANCE, FIRST_FEATURE)
    # One chunk's weights are kept. Those of several would take the registers of another program, and L1 has them.
    if CHUNKS == 1:
        w_first, w_second = _both_weights(
            weight, key_weight, i_row_0, i_first, i_second, m_pair,
            HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
        )  # fmt: skip
    none = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, PAIR_BLOCK], tl.float32)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + ((none, none),)
    if TAIL > 0:
        i_tail = TAIL_FEATURE + tl.arange(0, TAIL_BLOCK)
        m_kept = tl.arange(0, TAIL_BLOCK) < TAIL
        if CHUNKS == 1:
            w_tail = _weights(
                weight, key_weight, i_row_0, i_tail, m_kept,
                HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
            )  # fmt: skip
        no_tail = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, TAIL_BLOCK], tl.float32)
        tail_sums = ()
        for _ in tl.static_range(CHUNKS):
            tail_sums = tail_sums + (no_tail,)

    # The next tiles are loaded to shared memory while one is computed.
    for i_tile in tl.range(i_program // row_tiles, token_tiles * batch, turns, num_stages=STAGES):
        i_batch = (i_tile // token_tiles).to(tl.int64)
        i_token = (i_tile % token_tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        m_token = i_token < seq
        held, tails = (), ()
        for chunk in tl.static_range(CHUNKS):
            i_row = i_row_0 + chunk * BLOCK_HEADS
            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
            rows = _rows(
                x, key, i_batch, i_token, i_row,
                x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h,
                HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            given_rows = _rows(
                given, key_given, i_batch, i_token, i_row,
                given_stride_s, given_stride_b, given_stride_h,
                key_given_stride_s, key_given_stride_b, key_given_stride_h, HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            grad_first, grad_second = _load_pairs(
                rows + FIRST_FEATURE * stride_d, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, 0.0
            )
            first, second = _load_pairs(
                given_rows + FIRST_FEATURE * given_stride_d, m_row, given_stride_d,
                PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, 0.0,
            )  # fmt: skip
            held = held + ((grad_first, grad_second, first, second),)
            if TAIL > 0:
                tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                grad_tail = tl.load(tail, mask=m_tail, other=0.0, eviction_policy=LOAD_EVICT)
                tail, m_tail = _tail(given_rows, m_row, given_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                tails = tails + ((grad_tail, tl.load(tail, mask=m_tail, other=0.0, eviction_policy=LOAD_EVICT)),)

        # The position of each token, and whether it has one: [BLOCK_TOKENS] both. With axes, each pair has the
        # position of its axis: i_position is [BLOCK_TOKENS, PAIR_BLOCK].
        m_inside = m_token
        i_pair = tl.arange(0, PAIR_BLOCK)
        if POSITIONS == "axes":
            i_axis = _axis(i_pair, SECTION_1, SECTION_2, SECTION_3, SECTIONS_INTERLEAVED)
            p_id = i_batch * position_stride_b + i_token.to(tl.int64) * position_stride_s
            p_id = p_id[:, None] + (i_axis.to(tl.int64) * cp_size)[None, :]  # no ranks here
            i_position = tl.load(positions + p_id, mask=m_token[:, None], other=0)
        elif POSITIONS == "ids":
            p_id = i_batch * position_stride_b + i_token.to(tl.int64) * position_stride_s
            i_position = tl.load(positions + p_id, mask=m_token, other=0)
        else:
            i_sequence = i_batch
            i_position = i_token
            length = seq
            if PACKED:
                i_sequence, start, m_inside = _sequences(
                    i_token, cu_seqlens, sequences, cp_size, CONTEXT_PARALLEL, SEARCH_STEPS, SEARCH_FAN
                )
                i_position = i_token - start
                if CONTEXT_PARALLEL:
                    length = _bounds(cu_seqlens, i_sequence + 1, sequences, cp_size, CONTEXT_PARALLEL) - start
            if CONTEXT_PARALLEL:
                i_position = _dual_chunk(i_position, length, cp_size, cp_rank)
            i_position += offset
            if POSITIONS == "offset":
                i_position += tl.load(positions)
            if POSITIONS == "starts":
                if PACKED:
                    i_position += tl.load(
                        positions + i_sequence.to(tl.int64) * position_stride_b,
                        mask=m_inside,
                        other=0,
                    )
                else:
                    i_position += tl.load(positions + i_sequence * position_stride_b)

        # Cosines and sines, [BLOCK_TOKENS, PAIR_BLOCK]; NaN past the tokens, and past the rows of a table.
        m_known = m_token[:, None] if POSITIONS == "axes" else m_token
        m_known = m_known & (i_position < angle_rows)
        m_known = m_known & (i_position >= 0)
        if POSITIONS == "axes":
            m_angle = m_known & (i_pair < TURNED_PAIRS)[None, :]
        else:
            m_angle = m_known[:, None] & (i_pair < TURNED_PAIRS)[None, :]
        p_first = i_pair[None, :] * angle_stride_d
        p_second = p_first + TURNED_PAIRS * angle_stride_d
        if POSITIONS == "axes":
            p_angle = i_position.to(tl.int64) * _multiple(angle_stride_s, ANGLE_MULTIPLE)
        else:
            p_angle = (i_position.to(tl.int64) * _multiple(angle_stride_s, ANGLE_MULTIPLE))[:, None]
        if ANGLES_PER_BATCH:
            p_angle += i_batch * _multiple(angle_stride_b, ANGLE_MULTIPLE)
        cos_first, sin_first = _cos_sin(freqs, p_angle + p_first, m_angle, ANGLE_EVICT)
        cos_second, sin_second = cos_first, sin_first
        if PER_FEATURE:
            cos_second, sin_second = _cos_sin(freqs, p_angle + p_second, m_angle, ANGLE_EVICT)
        if SCALED:
            cos_first, sin_first = cos_first * scaling, sin_first * scaling
            cos_second, sin_second = cos_second * scaling, sin_second * scaling
        if CONJUGATE:
            sin_first, sin_second = -sin_first, -sin_second
        # [BLOCK_TOKENS, 1, PAIR_BLOCK]: the rows of a token share its angles.
        cos_first, sin_first = cos_first[:, None, :], sin_first[:, None, :]
        cos_second, sin_second = cos_second[:, None, :], sin_second[:, None, :]

        # Where a tile has no tokens or pairs, gradients are 0 and angles are NaN. 0 * NaN would be NaN, so cosines and
        # sines become 0.
        m_turned = m_token[:, None, None] & (i_pair < TURNED_PAIRS)[None, None, :]
        cos_first, sin_first = tl.where(m_turned, cos_first, 0.0), tl.where(m_turned, sin_first, 0.0)
        cos_second, sin_second = tl.where(m_turned, cos_second, 0.0), tl.where(m_turned, sin_second, 0.0)

        # y; and for each row the sum of the squares of the input, and that of y * input.
        query_squares, key_squares, query_along, key_along = none, none, none, none
        if CHUNKS > 1 and TAIL > 0:
            query_tail, key_tail, query_tail_along, key_tail_along = no_tail, no_tail, no_tail, no_tail
        for chunk in tl.static_range(CHUNKS):
            i_row = i_row_0 + chunk * BLOCK_HEADS
            m_used = m_token[:, None] & (i_row < rows_of_token)[None, :] & m_inside[:, None]
            grad_first, grad_second, first, second = held[chunk]
            z_first, z_second, b_first, b_second = _turned_back(
                grad_first, grad_second, first, second, cos_first, sin_first, cos_second, sin_second, i_pair, m_used,
                TURNED_PAIRS, PAIRS, PACKED,
            )  # fmt: skip
            if CHUNKS > 1:
                w_first, w_second = _both_weights(
                    weight, key_weight, i_row, i_first, i_second, m_pair,
                    HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
                )  # fmt: skip
            y_first, y_second = z_first * w_first, z_second * w_second
            if CHUNKS > 1:
                squares, along = b_first * b_first + b_second * b_second, y_first * b_first + y_second * b_second
                query_squares, key_squares = _add_to(
                    query_squares, key_squares, squares, i_row, chunk * BLOCK_HEADS, HEADS
                )
                query_along, key_along = _add_to(query_along, key_along, along, i_row, chunk * BLOCK_HEADS, HEADS)
            else:
                squares = tl.sum(b_first * b_first + b_second * b_second, 2)
                along = tl.sum(y_first * b_first + y_second * b_second, 2)
            if TAIL > 0:
                grad_tail, b_tail = tails[chunk]
                z_tail, tail_32 = grad_tail.to(tl.float32), b_tail.to(tl.float32)
                if PACKED:
                    z_tail, tail_32 = _kept(z_tail, m_used), _kept(tail_32, m_used)
                if CHUNKS > 1:
                    w_tail = _weights(
                        weight, key_weight, i_row, i_tail, m_kept,
                        HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
                    )  # fmt: skip
                y_tail = z_tail * w_tail
                if CHUNKS > 1:
                    query_tail, key_tail = _add_to(
                        query_tail, key_tail, tail_32 * tail_32, i_row, chunk * BLOCK_HEADS, HEADS
                    )
                    query_tail_along, key_tail_along = _add_to(
                        query_tail_along, key_tail_along, y_tail * tail_32, i_row, chunk * BLOCK_HEADS, HEADS
                    )
                else:
                    squares += tl.sum(tail_32 * tail_32, 2)
                    along += tl.sum(y_tail * tail_32, 2)
        if CHUNKS > 1:
            squares, of_key = tl.sum(query_squares, 2), tl.sum(key_squares, 2)
            along, along_key = tl.sum(query_along, 2), tl.sum(key_along, 2)
            if TAIL > 0:
                squares += tl.sum(query_tail, 2)
                of_key += tl.sum(key_tail, 2)
                along += tl.sum(query_tail_along, 2)
                along_key += tl.sum(key_tail_along, 2)
            squares, along, of_key, along_key = tl.reduce((squares, along, of_key, along_key), 1, _add_four)
        else:
            squares, along = _both_together(squares, along, i_row, HEADS, KEY_HEADS, NORM_ALL)

        # n; the sums of z * n for the weights; and the gradient of the input.
        new_sums, new_tail_sums = (), ()
        for chunk in tl.static_range(CHUNKS):
            i_row = i_row_0 + chunk * BLOCK_HEADS
            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]
            m_used = m_row & m_inside[:, None]
            grad_first, grad_second, first, second = held[chunk]
            z_first, z_second, b_first, b_second = _turned_back(
                grad_first, grad_second, first, second, cos_first, sin_first, cos_second, sin_second, i_pair, m_used,
                TURNED_PAIRS, PAIRS, PACKED,
            )  # fmt: skip
            row_squares, row_along = squares, along
            part = _parts(i_row, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
            if CHUNKS > 1:
                m_query = (i_row < HEADS)[None, :]
                row_squares = tl.where(m_query, squares[:, None], of_key[:, None])
                row_along = tl.where(m_query, along[:, None], along_key[:, None])
                w_first, w_second = _both_weights(
                    weight, key_weight, i_row, i_first, i_second, m_pair,
                    HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
                )  # fmt: skip
            y_first, y_second = z_first * w_first, z_second * w_second
            # Where a tile has no rows it would be 1 / sqrt(eps), which may be 1 / 0, and 0 times that NaN in the
            # weights' gradients: set it to 0.
            reciprocal = tl.where(m_used, tl.rsqrt(row_squares * part + eps), 0.0)[:, :, None]
            row_along = (row_along * part)[:, :, None] * reciprocal
            b_first, b_second = b_first * reciprocal, b_second * reciprocal
            sum_first, sum_second = sums[chunk]
            new_sums = new_sums + ((sum_first + z_first * b_first, sum_second + z_second * b_second),)
            if TAIL > 0:
                grad_tail, b_tail = tails[chunk]
                z_tail, tail_32 = grad_tail.to(tl.float32), b_tail.to(tl.float32)
                if PACKED:
                    z_tail, tail_32 = _kept(z_tail, m_used), _kept(tail_32, m_used)
                if CHUNKS > 1:
                    w_tail = _weights(
                        weight, key_weight, i_row, i_tail, m_kept,
                        HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
                    )  # fmt: skip
                y_tail = z_tail * w_tail
                tail_32 = tail_32 * reciprocal
                new_tail_sums = new_tail_sums + (tail_sums[chunk] + z_tail * tail_32,)
            out_first = (reciprocal * (y_first - b_first * row_along)).to(x.dtype.element_ty)
            out_second = (reciprocal * (y_second - b_second * row_along)).to(x.dtype.element_ty)
            if PACKED:
                out_first = tl.where(m_inside[:, None, None], out_first, grad_first)
                out_second = tl.where(m_inside[:, None, None], out_second, grad_second)
            out_rows = _rows(
                out, key_out, i_batch, i_token, i_row,
                out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
                HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            _store_pairs(
                out_rows + FIRST_FEATURE * out_stride_d, m_row, out_stride_d, out_first, out_second,
                PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
            )  # fmt: skip
            if TAIL > 0:
                out_tail = (reciprocal * (y_tail - tail_32 * row_along)).to(x.dtype.element_ty)
                if PACKED:
                    out_tail = tl.where(m_inside[:, None, None], out_tail, grad_tail)
                tail, m_tail = _tail(out_rows, m_row, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                tl.store(tail, out_tail, mask=m_tail, cache_modifier=STORE_CACHE)
        sums = new_sums
        if TAIL > 0:
            tail_sums = new_tail_sums

    features: tl.constexpr = HEAD_DIM * (rows_of_token if NORM_ALL else (2 if KEY_HEADS > 0 else 1))
    partials += i_program.to(tl.int64) * features
    for chunk in tl.static_range(CHUNKS):
        i_row = i_row_0 + chunk * BLOCK_HEADS
        sum_first, sum_second = sums[chunk]
        _store_part(partials, tl.sum(sum_first, 0), i_row, i_first, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
        _store_part(partials, tl.sum(sum_second, 0), i_row, i_second, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
        if TAIL > 0:
            _store_part(
                partials, tl.sum(tail_sums[chunk], 0), i_row, i_tail, m_kept, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL
            )
