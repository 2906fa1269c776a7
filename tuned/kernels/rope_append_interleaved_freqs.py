"""rope_append_interleaved_freqs: RoPE of complete calls, any layout, interleaved pairs, in place; sine and cosine taken here; key and value to a cache.

@generated from templates/rope.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

One tensor or two, a query and a key, in one launch: x and key are [seq, batch, heads, head_dim] by
their strides (in elements), whatever the order in memory. The rows of a token are the heads of x,
then those of key. A program computes tiles of BLOCK_TOKENS tokens and BLOCK_HEADS rows, and waits for
no other program. The kernel of a plain call has x alone: parameters that such a call does not use are
constants. Arithmetic is in float32, and results are rounded once, at the store. Names: i_ index,
m_ mask, p_ offset in elements.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(
    rows, m_row, stride_d, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, DISTANCE: tl.constexpr, EVICT: tl.constexpr,
    ABSENT: tl.constexpr,
):  # fmt: skip
    """Features (2 j, 2 j + 1) of each row: [BLOCK_TOKENS, BLOCK_HEADS, PAIR_BLOCK] twice."""
    i_feature = tl.arange(0, 2 * PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_feature < 2 * PAIRS)[None, None, :]
    pointers = rows[:, :, None] + i_feature[None, None, :] * stride_d
    features = tl.load(pointers, mask=mask, other=ABSENT, eviction_policy=EVICT)
    return tl.split(tl.reshape(features, [rows.shape[0], rows.shape[1], PAIR_BLOCK, 2]))


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
    i_feature = tl.arange(0, 2 * PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_feature < 2 * PAIRS)[None, None, :]
    features = tl.reshape(tl.join(first, second), [rows.shape[0], rows.shape[1], 2 * PAIR_BLOCK])
    pointers = rows[:, :, None] + i_feature[None, None, :] * stride_d
    tl.store(pointers, features, mask=mask, cache_modifier=CACHE)


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
def _slots(slots, i_token, slot_count, cache_slots, stride, wanted):
    """Each token's place in the caches, and whether it has one: [BLOCK_TOKENS] both. None has one unless ``wanted``."""
    mask = (i_token < slot_count) & wanted
    i_slot = tl.load(slots + i_token.to(tl.int64) * stride, mask=mask, other=-1).to(tl.int64)
    return i_slot, (i_slot >= 0) & (i_slot < cache_slots)


@triton.jit
def _places(
    cache, i_slot, i_head, page_stride, slot_stride, head_stride, PAGE_SIZE: tl.constexpr, MULTIPLE: tl.constexpr
):
    """Pointers to the first feature of each row in a cache: [BLOCK_TOKENS, BLOCK_HEADS]."""
    page_stride, slot_stride = _multiple(page_stride, MULTIPLE), _multiple(slot_stride, MULTIPLE)
    head_stride = _multiple(head_stride, MULTIPLE)
    # 64-bit offsets: the slots are int64.
    p_slot = i_slot // PAGE_SIZE * page_stride + i_slot % PAGE_SIZE * slot_stride
    return cache + (p_slot[:, None] + (i_head.to(tl.int64) * head_stride)[None, :])


@triton.jit
def _cached(values, scale, dtype: tl.constexpr, FLOAT8: tl.constexpr, SCALED: tl.constexpr):
    """Float32 values as a cache holds them, rounded once: [BLOCK_TOKENS, BLOCK_HEADS, block]."""
    if SCALED:
        values = tl.div_rn(values, scale + tl.zeros_like(values))
    if FLOAT8:  # values beyond its largest number would become NaN, and are clamped; NaN stays NaN
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)


@triton.jit(
    do_not_specialize=[
        "offset", "seq", "batch", "angle_rows", "sequences", "cp_size", "cp_rank", "scaling",
        "position_stride_s", "position_stride_b",
        "slot_count", "cache_slots",
    ]
)  # fmt: skip
def rope_append_interleaved_freqs(
    x,
    freqs,
    cu_seqlens,  # int32 [sequences + 1], PACKED
    key,
    positions,  # int32 or int64: ids, starts, or one offset
    value,  # as many heads as the key
    key_cache,  # pages: a place in them is page * PAGE_SIZE + slot
    value_cache,
    slots,  # int32 or int64 [slot_count]: each token's place, or negative
    key_scale,  # float32, one in all or one a head, if CACHE_SCALED
    value_scale,
    offset,
    seq,
    batch,
    angle_rows,
    x_stride_s,
    x_stride_b,
    x_stride_h,
    stride_d,  # of x and of key
    angle_stride_s,
    angle_stride_d,
    sequences,
    cp_size,  # ranks; if POSITIONS is "axes", elements of positions from one axis to the next
    cp_rank,
    scaling,
    key_stride_s,
    key_stride_b,
    key_stride_h,
    angle_stride_b,
    position_stride_s,
    position_stride_b,
    slot_count,
    cache_slots,  # that the pages have
    slot_stride,
    value_stride_s,
    value_stride_h,
    key_page_stride,
    key_slot_stride,
    key_head_stride,
    value_page_stride,
    value_slot_stride,
    value_head_stride,
    cache_stride_d,  # of both caches
    key_scale_stride,
    value_scale_stride,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # pairs that are read and written
    PAIR_BLOCK: tl.constexpr,  # PAIRS padded to a power of two
    TAIL: tl.constexpr,  # features that are copied beside the pairs
    TAIL_BLOCK: tl.constexpr,
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
    SEARCH_STEPS: tl.constexpr,
    SEARCH_FAN: tl.constexpr,  # SEARCH_FAN ** SEARCH_STEPS > sequences
    KEY_HEADS: tl.constexpr,
    COPIED_HEADS: tl.constexpr,  # the last of HEADS are copied: v of a packed qkv
    TURNED_PAIRS: tl.constexpr,  # the first of PAIRS rotate, the others are copied
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
    WRITTEN_HEADS: tl.constexpr,  # the first rows, of the query or of query and key, which are overwritten
    TAIL_HEADS: tl.constexpr,  # rows before this one keep their features that do not rotate; 0 with a norm
    PAGE_SIZE: tl.constexpr,
    CACHE_MULTIPLE: tl.constexpr,  # as MULTIPLE, of both caches
    FLOAT8: tl.constexpr,
    CACHE_SCALED: tl.constexpr,
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
    if isinstance(cache_stride_d, tl.tensor):
        cache_stride_d = cache_stride_d.to(tl.int64)
    # Safe in place: a program reads both features of a pair before it writes either, and no other program touches them.
    out, key_out, out_stride_d = x, key, stride_d
    out_stride_s, out_stride_b, out_stride_h = x_stride_s, x_stride_b, x_stride_h
    key_out_stride_s, key_out_stride_b, key_out_stride_h = key_stride_s, key_stride_b, key_stride_h
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)

    ABSENT: tl.constexpr = None  # the value of a tile where there is no row or feature

    # This program's tile of tokens and of rows.
    i_program = tl.program_id(0)
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    # Rows are the heads of one batch entry; a packed call has one entry.
    rows_of_token: tl.constexpr = HEADS + 2 * KEY_HEADS
    row_tiles: tl.constexpr = (rows_of_token + BLOCK_HEADS - 1) // BLOCK_HEADS
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
    i_row = i_row_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]

    # Loads of rows come first: they are on their way while the angles are found and their sines computed.
    m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
    rows = _rows(
        x, key, i_batch, i_token, i_row,
        x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
    )  # fmt: skip
    # Rows are those of the query, then the key, then the value. A tile of the query's rows alone needs no
    # slots.
    i_value = i_row - HEADS - KEY_HEADS
    of_value = _rows(
        value, value, i_batch, i_token, i_value,
        value_stride_s, 0, value_stride_h, 0, 0, 0, HEADS, 0, MULTIPLE,
    )  # fmt: skip
    rows = tl.where((i_value >= 0)[None, :], of_value, rows)
    to_cache = (i_row_tile + 1) * BLOCK_HEADS > HEADS
    i_slot, m_slot = _slots(slots, i_token, slot_count, cache_slots, slot_stride, to_cache)
    pairs = rows + FIRST_FEATURE * stride_d
    first, second = _load_pairs(pairs, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, ABSENT)
    if TAIL > 0:
        tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
        m_tail = m_tail & (i_row >= TAIL_HEADS)[None, :, None]
        b_tail = tl.load(tail, mask=m_tail, other=ABSENT, eviction_policy=LOAD_EVICT)

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
    if PACKED:  # tokens that no sequence holds stay as they are, unwritten
        m_token = m_token & m_inside

    # Cosines and sines, [BLOCK_TOKENS, PAIR_BLOCK]; NaN past the tokens, and past the rows of a table.
    m_known = m_token[:, None] if POSITIONS == "axes" else m_token
    m_known = m_known & (i_position < angle_rows)
    m_known = m_known & (i_position >= 0)
    m_known = m_known & (i_row_tile * BLOCK_HEADS < HEADS + KEY_HEADS)  # rows of the value need none
    if POSITIONS == "axes":
        m_angle = m_known & (i_pair < TURNED_PAIRS)[None, :]
    else:
        m_angle = m_known[:, None] & (i_pair < TURNED_PAIRS)[None, :]
    p_first = (i_pair * (2 if PER_FEATURE else 1))[None, :] * angle_stride_d
    p_second = p_first + angle_stride_d
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

    m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]
    b_first, b_second = first.to(tl.float32), second.to(tl.float32)
    if BACKWARD:
        # The transpose: the two sines of a pair change places, and their signs change.
        out_first = b_first * cos_first + b_second * sin_second
        out_second = b_second * cos_second - b_first * sin_first
    else:
        out_first = b_first * cos_first - b_second * sin_first
        out_second = b_second * cos_second + b_first * sin_second
    # What goes to the cache stays float32 up to the store. Rows of the value do not rotate.
    m_wide = (i_value < 0)[None, :, None] & (i_pair < TURNED_PAIRS)[None, None, :]
    wide_first, wide_second = tl.where(m_wide, out_first, b_first), tl.where(m_wide, out_second, b_second)
    # Features and heads that are copied keep their bits.
    out_first, out_second = out_first.to(first.dtype), out_second.to(first.dtype)
    if TURNED_PAIRS < PAIRS:
        m_turned = (i_pair < TURNED_PAIRS)[None, None, :]
        out_first = tl.where(m_turned, out_first, first)
        out_second = tl.where(m_turned, out_second, second)
    if COPIED_HEADS > 0:
        m_turned = (i_row < HEADS - COPIED_HEADS)[None, :, None]
        out_first = tl.where(m_turned, out_first, first)
        out_second = tl.where(m_turned, out_second, second)
    out_rows = _rows(
        out, key_out, i_batch, i_token, i_row,
        out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
        HEADS, KEY_HEADS, MULTIPLE,
    )  # fmt: skip
    out_pairs = out_rows + FIRST_FEATURE * out_stride_d
    if i_row_tile * BLOCK_HEADS < WRITTEN_HEADS:
        m_written = m_row & (i_row < WRITTEN_HEADS)[None, :]
        _store_pairs(
            out_pairs, m_written, out_stride_d, out_first, out_second,
            PAIRS if TAIL_HEADS == 0 else TURNED_PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
        )  # fmt: skip
        if TAIL > 0 and TAIL_HEADS == 0:
            to_tail, m_written = _tail(out_rows, m_written, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
            tl.store(to_tail, b_tail.to(first.dtype), mask=m_written, cache_modifier=STORE_CACHE)
    if to_cache:
        key_places = _places(
            key_cache, i_slot, i_row - HEADS, key_page_stride, key_slot_stride, key_head_stride, PAGE_SIZE,
            CACHE_MULTIPLE,
        )  # fmt: skip
        value_places = _places(
            value_cache, i_slot, i_value, value_page_stride, value_slot_stride, value_head_stride, PAGE_SIZE,
            CACHE_MULTIPLE,
        )  # fmt: skip
        places = tl.where((i_value >= 0)[None, :], value_places, key_places)
        m_place = m_row & m_slot[:, None] & (i_row >= HEADS)[None, :]
        scale = 1.0
        if CACHE_SCALED:
            p_scale = tl.where(
                i_value >= 0,
                value_scale + i_value * value_scale_stride,
                key_scale + (i_row - HEADS) * key_scale_stride,
            )
            scale = tl.load(p_scale, mask=(i_row >= HEADS) & (i_row < rows_of_token), other=1.0)[None, :, None]
        dtype = key_cache.dtype.element_ty
        to_first = _cached(wide_first, scale, dtype, FLOAT8, CACHE_SCALED)
        to_second = _cached(wide_second, scale, dtype, FLOAT8, CACHE_SCALED)
        _store_pairs(
            places + FIRST_FEATURE * cache_stride_d, m_place, cache_stride_d, to_first, to_second,
            PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
        )  # fmt: skip
        if TAIL > 0:
            place, m_place = _tail(places, m_place, cache_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
            tail_rows = _cached(b_tail.to(tl.float32), scale, dtype, FLOAT8, CACHE_SCALED)
            tl.store(place, tail_rows, mask=m_place, cache_modifier=STORE_CACHE)
