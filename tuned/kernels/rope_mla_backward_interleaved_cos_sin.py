"""rope_mla_backward_interleaved_cos_sin: MLA's key and value of kv, any layout, interleaved pairs; cosine and sine given.

@generated from templates/rope_mla_backward.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The transpose of templates/rope_mla.py.jinja, in one launch: given the gradients of the key and of the value, it
computes those of kv and of the key head that all heads share. The latter is the sum over heads, rotated back. A program
has all heads of its tokens, and takes BLOCK_HEADS at a time; the sum is in float32 and in one order, and rounded once,
at the store: the same bits in each run.
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
def _cos_sin(cos, sin, p_angle, m_angle, EVICT: tl.constexpr):
    """Cosine and sine at p_angle, NaN outside the mask: [BLOCK_TOKENS, PAIR_BLOCK] both, float32."""
    b_cos = tl.load(cos + p_angle, mask=m_angle, other=float("nan"), eviction_policy=EVICT)
    b_sin = tl.load(sin + p_angle, mask=m_angle, other=float("nan"), eviction_policy=EVICT)
    return b_cos.to(tl.float32), b_sin.to(tl.float32)


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
def _load_neighbours(rows, m_row, stride_d, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Features (2 j, 2 j + 1) of each row, whatever the style: [*rows.shape, PAIR_BLOCK] twice."""
    i_feature = tl.arange(0, 2 * PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_feature < 2 * PAIRS)[None, None, :]
    features = tl.load(rows[:, :, None] + i_feature[None, None, :] * stride_d, mask=mask, eviction_policy=EVICT)
    return tl.split(tl.reshape(features, [rows.shape[0], rows.shape[1], PAIR_BLOCK, 2]))


@triton.jit
def _store_neighbours(
    rows, m_row, stride_d, first, second, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """The inverse of _load_neighbours; if the pairs are of one row, each token's pairs are stored to all rows."""
    i_feature = tl.arange(0, 2 * PAIR_BLOCK)
    mask = m_row[:, :, None] & (i_feature < 2 * PAIRS)[None, None, :]
    features = tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1], 2 * PAIR_BLOCK])
    pointers = rows[:, :, None] + i_feature[None, None, :] * stride_d
    tl.store(pointers, tl.broadcast_to(features, pointers.shape), mask=mask, cache_modifier=CACHE)


@triton.jit(
    do_not_specialize=[
        "offset", "seq", "batch", "angle_rows", "sequences", "cp_size", "cp_rank", "scaling",
        "position_stride_s", "position_stride_b",
    ]
)  # fmt: skip
def rope_mla_backward_interleaved_cos_sin(
    x,  # the gradient of the key
    out,  # that of kv
    cos,
    sin,
    cu_seqlens,  # int32 [sequences + 1], PACKED
    key,  # the gradient of the value
    key_out,  # that of the key head that all heads share
    positions,  # int32 or int64: ids, starts, or one offset
    offset,
    seq,
    batch,
    angle_rows,
    x_stride_s,
    x_stride_b,
    x_stride_h,
    stride_d,
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
    key_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_d,
    angle_stride_b,
    position_stride_s,
    position_stride_b,
    key_out_stride_s,
    key_out_stride_b,
    key_out_stride_h,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,  # PAIRS padded to a power of two
    TAIL: tl.constexpr,  # features of a head of kv that belong to the key
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
    KEY_HEADS: tl.constexpr,  # none
    COPIED_HEADS: tl.constexpr,  # none
    TURNED_PAIRS: tl.constexpr,  # PAIRS
    PAIR_DISTANCE: tl.constexpr,  # features between the two of a pair, style half
    FIRST_FEATURE: tl.constexpr,  # the first feature of a key that rotates: TAIL
    TAIL_FEATURE: tl.constexpr,  # 0
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
    VALUE: tl.constexpr,  # features of a value
    VALUE_BLOCK: tl.constexpr,
    DEINTERLEAVES: tl.constexpr,  # pairs are (2 j, 2 j + 1) in k_pe, and halves in the key
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
    if isinstance(key_stride_d, tl.tensor):
        key_stride_d = key_stride_d.to(tl.int64)
    if isinstance(angle_stride_d, tl.tensor):
        angle_stride_d = angle_stride_d.to(tl.int64)
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)

    # This program's tokens, and their angles.
    i_program = tl.program_id(0)
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    i_batch = (i_program // token_tiles).to(tl.int64)
    i_token = (i_program % token_tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    m_token = i_token < seq

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
    p_first = (i_pair * (2 if PER_FEATURE else 1))[None, :] * angle_stride_d
    p_second = p_first + angle_stride_d
    if POSITIONS == "axes":
        p_angle = i_position.to(tl.int64) * _multiple(angle_stride_s, ANGLE_MULTIPLE)
    else:
        p_angle = (i_position.to(tl.int64) * _multiple(angle_stride_s, ANGLE_MULTIPLE))[:, None]
    if ANGLES_PER_BATCH:
        p_angle += i_batch * _multiple(angle_stride_b, ANGLE_MULTIPLE)
    cos_first, sin_first = _cos_sin(cos, sin, p_angle + p_first, m_angle, ANGLE_EVICT)
    cos_second, sin_second = cos_first, sin_first
    if PER_FEATURE:
        cos_second, sin_second = _cos_sin(cos, sin, p_angle + p_second, m_angle, ANGLE_EVICT)
    if SCALED:
        cos_first, sin_first = cos_first * scaling, sin_first * scaling
        cos_second, sin_second = cos_second * scaling, sin_second * scaling
    if CONJUGATE:
        sin_first, sin_second = -sin_first, -sin_second
    # [BLOCK_TOKENS, 1, PAIR_BLOCK]: the rows of a token share its angles.
    cos_first, sin_first = cos_first[:, None, :], sin_first[:, None, :]
    cos_second, sin_second = cos_second[:, None, :], sin_second[:, None, :]

    sum_first = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, PAIR_BLOCK], tl.float32)
    sum_second = sum_first
    for begin in range(0, HEADS, BLOCK_HEADS):
        i_row = begin + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
        m_row = m_token[:, None] & (i_row < HEADS)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
        rows = _rows(
            x, x, i_batch, i_token, i_row,
            x_stride_s, x_stride_b, x_stride_h, x_stride_s, x_stride_b, x_stride_h, HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
        value_rows = _rows(
            key, key, i_batch, i_token, i_row,
            key_stride_s, key_stride_b, key_stride_h, key_stride_s, key_stride_b, key_stride_h,
            HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
        out_rows = _rows(
            out, out, i_batch, i_token, i_row,
            out_stride_s, out_stride_b, out_stride_h, out_stride_s, out_stride_b, out_stride_h,
            HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
        kept, m_kept = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
        b_kept = tl.load(kept, mask=m_kept, eviction_policy=LOAD_EVICT)
        value, m_value = _tail(value_rows, m_row, key_stride_d, 0, VALUE, VALUE_BLOCK)
        b_value = tl.load(value, mask=m_value, eviction_policy=LOAD_EVICT)
        first, second = _load_pairs(
            rows + FIRST_FEATURE * stride_d, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, None
        )
        # Rows that the tile lacks were not loaded, and have any value: they add nothing.
        sum_first += tl.where(m_row[:, :, None], first.to(tl.float32), 0.0)
        sum_second += tl.where(m_row[:, :, None], second.to(tl.float32), 0.0)
        kept, m_kept = _tail(out_rows, m_row, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
        tl.store(kept, b_kept, mask=m_kept, cache_modifier=STORE_CACHE)
        value, m_value = _tail(out_rows, m_row, out_stride_d, TAIL, VALUE, VALUE_BLOCK)
        tl.store(value, b_value, mask=m_value, cache_modifier=STORE_CACHE)

    b_first, b_second = tl.sum(sum_first, 1)[:, None, :], tl.sum(sum_second, 1)[:, None, :]
    out_first = b_first * cos_first + b_second * sin_second
    out_second = b_second * cos_second - b_first * sin_first
    if PACKED:  # tokens that no sequence holds were copied
        out_first = tl.where(m_inside[:, None, None], out_first, b_first)
        out_second = tl.where(m_inside[:, None, None], out_second, b_second)
    out_first, out_second = out_first.to(x.dtype.element_ty), out_second.to(x.dtype.element_ty)
    shared = _rows(
        key_out, key_out, i_batch, i_token, tl.arange(0, 1),
        key_out_stride_s, key_out_stride_b, key_out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
        1, KEY_HEADS, MULTIPLE,
    )  # fmt: skip
    if DEINTERLEAVES:
        _store_neighbours(shared, m_token[:, None], out_stride_d, out_first, out_second, PAIRS, PAIR_BLOCK, STORE_CACHE)
    else:
        _store_pairs(
            shared, m_token[:, None], out_stride_d, out_first, out_second, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE
        )
