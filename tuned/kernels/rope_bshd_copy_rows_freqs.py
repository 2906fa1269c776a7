"""rope_bshd_copy_rows_freqs: RoPE of plain calls, bshd, half pairs, out of place; sine and cosine taken here.

@generated from templates/rope.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

One tensor or two, a query and a key, in one launch: x and key are [seq, batch, heads, head_dim] by
their strides (in elements), whatever the order in memory. The rows of a token are the heads of x,
then those of key. A program computes tiles of BLOCK_TOKENS tokens and BLOCK_HEADS rows, and waits for
no other program. The kernel of a plain call has x alone: parameters that such a call does not use are
constants. Arithmetic is in float32, and results are rounded once, at the store. Names: i_ index,
m_ mask, p_ offset in elements.
A tile has the features of a row in order, and beside each the other feature of its pair.
"""

import triton
import triton.language as tl


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
def _rows_side_by_side(
    x, i_batch, i_token, i_first_row, stride_s, stride_b,
    MULTIPLE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As _rows, of the rows of one tensor from i_first_row on, which are HEAD_STRIDE apart: [BLOCK_TOKENS, BLOCK]."""
    starts = x + (i_batch * _multiple(stride_b, MULTIPLE) + i_token.to(tl.int64) * _multiple(stride_s, MULTIPLE))
    return starts[:, None] + i_first_row.to(tl.int64) * HEAD_STRIDE + (tl.arange(0, BLOCK) * HEAD_STRIDE)[None, :]


@triton.jit(
    do_not_specialize=[
        "offset", "seq", "batch", "angle_rows", "sequences", "cp_size", "cp_rank", "scaling",
        "position_stride_s", "position_stride_b",
    ]
)  # fmt: skip
def rope_bshd_copy_rows_freqs(
    x,
    out,
    freqs,
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
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # pairs that are read and written
    ROW: tl.constexpr,  # features that are read and written
    ROW_BLOCK: tl.constexpr,  # ROW padded to a power of two
    HEAD_STRIDE: tl.constexpr,  # from head to head in all tensors, if heads lie side by side; else 0
    PER_FEATURE: tl.constexpr,  # the two entries of a pair may differ
    BACKWARD: tl.constexpr,  # apply the transpose of the forward map
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ORDER: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    PDL: tl.constexpr,
    MULTIPLE: tl.constexpr,  # divides all strides of rows; 1 if 16 does, which the compiler sees itself
    ANGLE_MULTIPLE: tl.constexpr,  # the same for the strides of angles
):
    # Constants in the place of the parameters that a plain call does not use; nothing reads the pointers.
    KEY_HEADS: tl.constexpr = 0
    COPIED_HEADS: tl.constexpr = 0
    TURNED_PAIRS: tl.constexpr = PAIRS
    PAIR_DISTANCE: tl.constexpr = PAIRS
    FIRST_FEATURE: tl.constexpr = 0
    TAIL_FEATURE: tl.constexpr = 2 * PAIRS
    CONJUGATE: tl.constexpr = False
    SCALED: tl.constexpr = False
    ANGLES_PER_BATCH: tl.constexpr = False
    POSITIONS: tl.constexpr = "order"
    SECTION_1: tl.constexpr = 0
    SECTION_2: tl.constexpr = 0
    SECTION_3: tl.constexpr = 0
    SECTIONS_INTERLEAVED: tl.constexpr = False
    PACKED: tl.constexpr = False
    CONTEXT_PARALLEL: tl.constexpr = False
    ANGLE_EVICT: tl.constexpr = ""
    key, key_stride_s, key_stride_b, key_stride_h = x, x_stride_s, x_stride_b, x_stride_h
    positions, offset, cp_size, cp_rank, scaling = x, 0, 1, 0, 1.0
    angle_stride_b, position_stride_s, position_stride_b = 0, 0, 0
    key_out, key_out_stride_s, key_out_stride_b, key_out_stride_h = x, x_stride_s, x_stride_b, x_stride_h
    cu_seqlens, sequences = x, 0
    SEARCH_STEPS: tl.constexpr = 1
    SEARCH_FAN: tl.constexpr = 1
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

    ABSENT: tl.constexpr = None  # the value of a tile where there is no row or feature

    # This program's tile of tokens and of rows.
    i_program = tl.program_id(0)
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    # Rows are the heads of one batch entry; a packed call has one entry.
    rows_of_token: tl.constexpr = HEADS + KEY_HEADS
    row_tiles: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS + (KEY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    # Both parts of the tile come from i_program by divisions that do not wait for each other: dividing first for the
    # tile within the entry, and then for its parts, took 40 ns of a decode step.
    i_batch = (i_program // (row_tiles * token_tiles)).to(tl.int64)
    if ORDER == "tokens":
        i_token_tile = i_program % token_tiles
        i_row_tile = (i_program // token_tiles) % row_tiles
    else:
        i_row_tile = i_program % row_tiles
        i_token_tile = (i_program // row_tiles) % token_tiles
    i_token = i_token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    m_token = i_token < seq
    # A tile has rows of one tensor, x or key: if it had some of both, each row would need its own pointer.
    i_first_row, rows_there, i_shift = i_row_tile * BLOCK_HEADS, rows_of_token, 0
    from_x, from_stride_s, from_stride_b = x, x_stride_s, x_stride_b
    to_out, to_stride_s, to_stride_b = out, out_stride_s, out_stride_b
    if KEY_HEADS > 0:
        X_TILES: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
        of_key = i_row_tile >= X_TILES
        i_first_row -= tl.where(of_key, X_TILES * BLOCK_HEADS, 0)
        rows_there, i_shift = tl.where(of_key, KEY_HEADS, HEADS), tl.where(of_key, HEADS, 0)
        from_x, to_out = tl.where(of_key, key, x), tl.where(of_key, key_out, out)
        from_stride_s = tl.where(of_key, key_stride_s, x_stride_s)
        from_stride_b = tl.where(of_key, key_stride_b, x_stride_b)
        to_stride_s = tl.where(of_key, key_out_stride_s, out_stride_s)
        to_stride_b = tl.where(of_key, key_out_stride_b, out_stride_b)
    i_row = i_first_row + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    m_there = i_row < rows_there

    # [ROW_BLOCK]: the features of a row in order, so that a store writes neighbours in memory; and the pair of each
    # feature. Pairs from TURNED_PAIRS on do not rotate.
    i_feature = tl.arange(0, ROW_BLOCK)
    m_feature = tl.arange(0, ROW_BLOCK) < ROW
    i_turned = i_feature - FIRST_FEATURE
    m_second = i_turned >= PAIR_DISTANCE
    i_pair = tl.where(m_second, i_turned - PAIR_DISTANCE, i_turned)
    m_turned = i_turned < 2 * TURNED_PAIRS
    if PAIR_DISTANCE > TURNED_PAIRS:
        m_turned = i_pair < TURNED_PAIRS
    if FIRST_FEATURE > 0:
        m_turned = m_turned & (i_turned >= 0)
        i_pair = tl.where(m_turned, i_pair, TURNED_PAIRS)
    i_other = tl.where(m_second, i_feature - PAIR_DISTANCE, i_feature + PAIR_DISTANCE)

    # Loads of x come first: they are on their way while the angles are found and their sines computed. The other
    # feature of each pair comes from L1, since the load of ``own`` reads the same row.
    m_row = (m_token[:, None] & m_there[None, :])[:, :, None]
    if HEAD_STRIDE > 0:
        rows = _rows_side_by_side(
            from_x, i_batch, i_token, i_first_row, from_stride_s, from_stride_b, MULTIPLE, HEAD_STRIDE, BLOCK_HEADS
        )
    else:
        rows = _rows(
            x, key, i_batch, i_token, i_row + i_shift,
            x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
    m_own, m_other = m_row & m_feature[None, None, :], m_row & m_turned[None, None, :]
    own = tl.load(rows[:, :, None] + i_feature[None, None, :] * stride_d, mask=m_own, eviction_policy=LOAD_EVICT)
    other = tl.load(
        rows[:, :, None] + i_other[None, None, :] * stride_d, mask=m_other, other=0.0, eviction_policy=LOAD_EVICT
    )

    # The position of each token, and whether it has one: [BLOCK_TOKENS] both. With axes, each pair has the
    # position of its axis: i_position is [BLOCK_TOKENS, PAIR_BLOCK].
    m_inside = m_token
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

    cosine, sine = cos_first, sin_first
    m_plus = m_second[None, None, :] != BACKWARD
    if PER_FEATURE:
        # The transpose turns a feature by the sine of the other of its pair.
        cosine = tl.where(m_second[None, None, :], cos_second, cos_first)
        sine = tl.where(m_plus, sin_second, sin_first)
    sine = tl.where(m_plus, sine, -sine)
    if ROW > 2 * TURNED_PAIRS:
        # Features that are copied get cosine 1 and sine -0, and ``other`` is 0: x * 1 + 0 * -0 is x, also for zeros of
        # both signs and infinities. A choice between results would cost more, since it is made for each row.
        cosine = tl.where(m_turned[None, None, :], cosine, 1.0)
        sine = tl.where(m_turned[None, None, :], sine, -0.0)
    if PACKED and tl.min(m_inside.to(tl.int32), 0) == 0:  # tokens that no sequence holds are copied as they are
        other = tl.where(m_inside[:, None, None], other, 0.0)
        cosine = tl.where(m_inside[:, None, None], cosine, 1.0)
        sine = tl.where(m_inside[:, None, None], sine, -0.0)
    result = (own.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(own.dtype)
    if COPIED_HEADS > 0:
        result = tl.where((i_row < HEADS - COPIED_HEADS)[None, :, None], result, own)
    m_own = (m_token[:, None] & m_there[None, :])[:, :, None] & m_feature[None, None, :]
    if HEAD_STRIDE > 0:
        out_rows = _rows_side_by_side(
            to_out, i_batch, i_token, i_first_row, to_stride_s, to_stride_b, MULTIPLE, HEAD_STRIDE, BLOCK_HEADS
        )
    else:
        out_rows = _rows(
            out, key_out, i_batch, i_token, i_row + i_shift,
            out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
            HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
    to_own = out_rows[:, :, None] + i_feature[None, None, :] * out_stride_d
    tl.store(to_own, result, mask=m_own, cache_modifier=STORE_CACHE)
