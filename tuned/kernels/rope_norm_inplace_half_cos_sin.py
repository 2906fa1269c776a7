"""rope_norm_inplace_half_cos_sin: RoPE of complete calls, any layout, half pairs, in place; cosine and sine given; RMSNorm before it.

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


@triton.jit(
    do_not_specialize=[
        "offset", "seq", "batch", "angle_rows", "sequences", "cp_size", "cp_rank", "scaling",
        "position_stride_s", "position_stride_b",
    ]
)  # fmt: skip
def rope_norm_inplace_half_cos_sin(
    x,
    cos,
    sin,
    cu_seqlens,  # int32 [sequences + 1], PACKED
    key,
    positions,  # int32 or int64: ids, starts, or one offset
    weight,  # of the norm of x: [HEAD_DIM], or [HEADS * HEAD_DIM] if NORM_ALL
    key_weight,  # of the norm of the key; any pointer without a key
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
    eps,
    key_stride_s,
    key_stride_b,
    key_stride_h,
    angle_stride_b,
    position_stride_s,
    position_stride_b,
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
    HEAD_DIM: tl.constexpr,
    NORM_ALL: tl.constexpr,  # the heads of a tensor are normalised together, not each by itself
    ZERO_CENTERED: tl.constexpr,  # features are multiplied by 1 + weight
    ROUNDING: tl.constexpr,  # "once": at the store; "product": also after the norm's weight; "each": also before it
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
    # Safe in place: a program reads both features of a pair before it writes either, and no other program touches them.
    out, key_out, out_stride_d = x, key, stride_d
    out_stride_s, out_stride_b, out_stride_h = x_stride_s, x_stride_b, x_stride_h
    key_out_stride_s, key_out_stride_b, key_out_stride_h = key_stride_s, key_stride_b, key_stride_h
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)

    ABSENT: tl.constexpr = 0.0  # the value of a tile where there is no row or feature

    # This program's tile of tokens and of rows.
    i_program = tl.program_id(0)
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    # Rows are the heads of one batch entry; a packed call has one entry. A program keeps its rows, and takes every
    # ``turns``-th tile of the tokens of all batch entries.
    rows_of_token: tl.constexpr = HEADS + KEY_HEADS
    row_tiles: tl.constexpr = (rows_of_token + BLOCK_HEADS - 1) // BLOCK_HEADS
    turns = tl.num_programs(0) // row_tiles
    if ORDER == "tokens":
        i_tile_0 = i_program % turns
        i_row_tile = i_program // turns
    else:
        i_row_tile = i_program % row_tiles
        i_tile_0 = i_program // row_tiles
    # Load the weights before the tokens: loaded after the sums of squares, they would be one more wait.
    i_own = i_row_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # rows, [BLOCK_HEADS]
    i_first, i_second = _features(PAIR_BLOCK, PAIR_DISTANCE, FIRST_FEATURE)
    m_pair = tl.arange(0, PAIR_BLOCK) < PAIRS
    w_first = _weights(
        weight, key_weight, i_own, i_first, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS
    )
    w_second = _weights(
        weight, key_weight, i_own, i_second, m_pair, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS
    )
    if TAIL > 0:
        i_tail = TAIL_FEATURE + tl.arange(0, TAIL_BLOCK)
        m_kept = tl.arange(0, TAIL_BLOCK) < TAIL
        w_tail = _weights(
            weight, key_weight, i_own, i_tail, m_kept, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS
        )
    if STAGES > 1:  # tile after tile: the next ones are loaded to shared memory while one is computed
        for i_tile in tl.range(i_tile_0, token_tiles * batch, turns, num_stages=STAGES):
            i_batch = (i_tile // token_tiles).to(tl.int64)
            i_token_tile = i_tile % token_tiles
            i_token = i_token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
            m_token = i_token < seq
            i_row = i_row_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]

            # Loads of rows come first: they are on their way while the angles are found and their sines computed.
            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
            rows = _rows(
                x, key, i_batch, i_token, i_row,
                x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            pairs = rows + FIRST_FEATURE * stride_d
            first, second = _load_pairs(pairs, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, ABSENT)
            if TAIL > 0:
                tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
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

            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]
            b_first, b_second = first.to(tl.float32), second.to(tl.float32)
            # Features of a head that do not rotate are normalised too. Tokens that no sequence holds are only copied.
            raw_first, raw_second = first, second
            squares = tl.sum(b_first * b_first + b_second * b_second, 2)
            if TAIL > 0:
                raw_tail = b_tail
                tail_32 = b_tail.to(tl.float32)
                squares += tl.sum(tail_32 * tail_32, 2)
            reciprocal = _reciprocal_norms(squares, i_row, eps, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
            b_first = _scaled(b_first, reciprocal, w_first, first.dtype, ROUNDING)
            b_second = _scaled(b_second, reciprocal, w_second, first.dtype, ROUNDING)
            first, second = b_first.to(first.dtype), b_second.to(first.dtype)
            if TAIL > 0:
                b_tail = _scaled(tail_32, reciprocal, w_tail, first.dtype, ROUNDING).to(first.dtype)
            if BACKWARD:
                # The transpose: the two sines of a pair change places, and their signs change.
                out_first = b_first * cos_first + b_second * sin_second
                out_second = b_second * cos_second - b_first * sin_first
            else:
                out_first = b_first * cos_first - b_second * sin_first
                out_second = b_second * cos_second + b_first * sin_second
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
            first, second = raw_first, raw_second
            if PACKED and TAIL > 0:
                b_tail = tl.where(m_inside[:, None, None], b_tail, raw_tail)
            out_rows = _rows(
                out, key_out, i_batch, i_token, i_row,
                out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
                HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            out_pairs = out_rows + FIRST_FEATURE * out_stride_d
            _store_pairs(
                out_pairs, m_row, out_stride_d, out_first, out_second, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
            )  # fmt: skip
            if TAIL > 0:
                tail, m_tail = _tail(out_rows, m_row, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                tl.store(tail, b_tail, mask=m_tail, cache_modifier=STORE_CACHE)
    elif CHUNKS > 1:  # this branch loads its own weights; the compiler drops the loads above
        i_batch = (i_program // token_tiles).to(tl.int64)
        i_token_tile = i_program % token_tiles
        # All heads of some tokens, BLOCK_HEADS at a time. They are read twice: for the sums of their squares, and then, from L1,
        # to be rotated. Held in registers in between, they would leave room for fewer programs.
        FIRST_EVICT: tl.constexpr = "evict_last" if LOAD_EVICT == "evict_first" else LOAD_EVICT
        i_token = i_token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        m_token = i_token < seq
        query_squares = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, PAIR_BLOCK], tl.float32)
        key_squares = query_squares
        if TAIL > 0:
            query_tail = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, TAIL_BLOCK], tl.float32)
            key_tail = query_tail
        for chunk in tl.static_range(CHUNKS):
            i_row = chunk * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
            rows = _rows(
                x, key, i_batch, i_token, i_row,
                x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            pairs = rows + FIRST_FEATURE * stride_d
            first, second = _load_pairs(
                pairs, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, FIRST_EVICT, ABSENT,
            )  # fmt: skip
            b_first, b_second = first.to(tl.float32), second.to(tl.float32)
            squares = b_first * b_first + b_second * b_second
            query_squares, key_squares = _add_to(query_squares, key_squares, squares, i_row, chunk * BLOCK_HEADS, HEADS)
            if TAIL > 0:
                tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                tail_32 = tl.load(tail, mask=m_tail, other=ABSENT, eviction_policy=FIRST_EVICT).to(tl.float32)
                squares = tail_32 * tail_32
                query_tail, key_tail = _add_to(query_tail, key_tail, squares, i_row, chunk * BLOCK_HEADS, HEADS)

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

        of_query, of_key = tl.sum(query_squares, 2), tl.sum(key_squares, 2)
        if TAIL > 0:
            of_query += tl.sum(query_tail, 2)
            of_key += tl.sum(key_tail, 2)
        of_query, of_key = tl.reduce((of_query, of_key), 1, _add_two)
        for chunk in tl.static_range(CHUNKS):
            i_row = chunk * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]
            w_first, w_second = _both_weights(
                weight, key_weight, i_row, i_first, i_second, m_pair,
                HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
            )  # fmt: skip
            rows = _rows(
                x, key, i_batch, i_token, i_row,
                x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            pairs = rows + FIRST_FEATURE * stride_d
            first, second = _load_pairs(
                pairs, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, "evict_first", ABSENT,
            )  # fmt: skip
            b_first, b_second = first.to(tl.float32), second.to(tl.float32)
            raw_first, raw_second = first, second
            if TAIL > 0:
                w_tail = _weights(
                    weight, key_weight, i_row, i_tail, m_kept,
                    HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL, ZERO_CENTERED, BLOCK_TOKENS,
                )  # fmt: skip
                tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                raw_tail = tl.load(tail, mask=m_tail, other=ABSENT, eviction_policy="evict_first")
                tail_32 = raw_tail.to(tl.float32)
            squares = tl.where((i_row < HEADS)[None, :], of_query[:, None], of_key[:, None])
            part = _parts(i_row, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
            reciprocal = tl.rsqrt(squares * part + eps)[:, :, None]
            b_first = _scaled(b_first, reciprocal, w_first, first.dtype, ROUNDING)
            b_second = _scaled(b_second, reciprocal, w_second, first.dtype, ROUNDING)
            first, second = b_first.to(first.dtype), b_second.to(first.dtype)
            if TAIL > 0:
                b_tail = _scaled(tail_32, reciprocal, w_tail, first.dtype, ROUNDING).to(first.dtype)
            if BACKWARD:
                # The transpose: the two sines of a pair change places, and their signs change.
                out_first = b_first * cos_first + b_second * sin_second
                out_second = b_second * cos_second - b_first * sin_first
            else:
                out_first = b_first * cos_first - b_second * sin_first
                out_second = b_second * cos_second + b_first * sin_second
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
            first, second = raw_first, raw_second
            if PACKED and TAIL > 0:
                b_tail = tl.where(m_inside[:, None, None], b_tail, raw_tail)
            out_rows = _rows(
                out, key_out, i_batch, i_token, i_row,
                out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
                HEADS, KEY_HEADS, MULTIPLE,
            )  # fmt: skip
            out_pairs = out_rows + FIRST_FEATURE * out_stride_d
            _store_pairs(
                out_pairs, m_row, out_stride_d, out_first, out_second, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
            )  # fmt: skip
            if TAIL > 0:
                tail, m_tail = _tail(out_rows, m_row, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
                tl.store(tail, b_tail, mask=m_tail, cache_modifier=STORE_CACHE)
    else:  # one tile: a loop would cost registers
        i_batch = (i_tile_0 // token_tiles).to(tl.int64)
        i_token_tile = i_tile_0 % token_tiles
        i_token = i_token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
        m_token = i_token < seq
        i_row = i_row_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]

        # Loads of rows come first: they are on their way while the angles are found and their sines computed.
        m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
        rows = _rows(
            x, key, i_batch, i_token, i_row,
            x_stride_s, x_stride_b, x_stride_h, key_stride_s, key_stride_b, key_stride_h, HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
        pairs = rows + FIRST_FEATURE * stride_d
        first, second = _load_pairs(pairs, m_row, stride_d, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, LOAD_EVICT, ABSENT)
        if TAIL > 0:
            tail, m_tail = _tail(rows, m_row, stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
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

        m_row = m_token[:, None] & (i_row < rows_of_token)[None, :]
        b_first, b_second = first.to(tl.float32), second.to(tl.float32)
        # Features of a head that do not rotate are normalised too. Tokens that no sequence holds are only copied.
        raw_first, raw_second = first, second
        squares = tl.sum(b_first * b_first + b_second * b_second, 2)
        if TAIL > 0:
            raw_tail = b_tail
            tail_32 = b_tail.to(tl.float32)
            squares += tl.sum(tail_32 * tail_32, 2)
        reciprocal = _reciprocal_norms(squares, i_row, eps, HEADS, KEY_HEADS, HEAD_DIM, NORM_ALL)
        b_first = _scaled(b_first, reciprocal, w_first, first.dtype, ROUNDING)
        b_second = _scaled(b_second, reciprocal, w_second, first.dtype, ROUNDING)
        first, second = b_first.to(first.dtype), b_second.to(first.dtype)
        if TAIL > 0:
            b_tail = _scaled(tail_32, reciprocal, w_tail, first.dtype, ROUNDING).to(first.dtype)
        if BACKWARD:
            # The transpose: the two sines of a pair change places, and their signs change.
            out_first = b_first * cos_first + b_second * sin_second
            out_second = b_second * cos_second - b_first * sin_first
        else:
            out_first = b_first * cos_first - b_second * sin_first
            out_second = b_second * cos_second + b_first * sin_second
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
        first, second = raw_first, raw_second
        if PACKED and TAIL > 0:
            b_tail = tl.where(m_inside[:, None, None], b_tail, raw_tail)
        out_rows = _rows(
            out, key_out, i_batch, i_token, i_row,
            out_stride_s, out_stride_b, out_stride_h, key_out_stride_s, key_out_stride_b, key_out_stride_h,
            HEADS, KEY_HEADS, MULTIPLE,
        )  # fmt: skip
        out_pairs = out_rows + FIRST_FEATURE * out_stride_d
        _store_pairs(
            out_pairs, m_row, out_stride_d, out_first, out_second, PAIRS, PAIR_BLOCK, PAIR_DISTANCE, STORE_CACHE,
        )  # fmt: skip
        if TAIL > 0:
            tail, m_tail = _tail(out_rows, m_row, out_stride_d, TAIL_FEATURE, TAIL, TAIL_BLOCK)
            tl.store(tail, b_tail, mask=m_tail, cache_modifier=STORE_CACHE)
