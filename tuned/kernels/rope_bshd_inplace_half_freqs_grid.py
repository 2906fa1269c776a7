"""rope_bshd_inplace_half_freqs_grid: RoPE, bshd, half pairs, in place; features that do not rotate are not touched; sine and cosine taken here.

@generated from templates/rope.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

x and out are [seq, batch, heads, head_dim] by their strides (in elements), whatever the order in
memory; angles are [angle_rows, rotary_dim // 2], or [angle_rows, rotary_dim] with PER_FEATURE.
Float32 inside, one rounding at the store. Names: i_ index, m_ mask, p_ offset in elements.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(x, p_row, m_row, stride_d, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Features (j, j + HALF) of each row: [BLOCK_TOKENS, BLOCK_HEADS, HALF_BLOCK] twice."""
    i_pair = tl.arange(0, HALF_BLOCK)
    mask = m_row[:, :, None] & (i_pair < HALF)[None, None, :]
    p_first = p_row[:, :, None] + i_pair[None, None, :] * stride_d
    first = tl.load(x + p_first, mask=mask, eviction_policy=EVICT)
    second = tl.load(x + p_first + HALF * stride_d, mask=mask, eviction_policy=EVICT)
    return first, second


@triton.jit
def _store_pairs(
    out, p_row, m_row, stride_d, first, second, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, CACHE: tl.constexpr
):
    """The inverse of _load_pairs."""
    i_pair = tl.arange(0, HALF_BLOCK)
    mask = m_row[:, :, None] & (i_pair < HALF)[None, None, :]
    p_first = p_row[:, :, None] + i_pair[None, None, :] * stride_d
    tl.store(out + p_first, first.to(out.dtype.element_ty), mask=mask, cache_modifier=CACHE)
    tl.store(out + p_first + HALF * stride_d, second.to(out.dtype.element_ty), mask=mask, cache_modifier=CACHE)


@triton.jit
def _sincos(x):
    """Sine and cosine of float32 radians, each within 2.1 * 2^-24. No branch, no table, no stack."""
    # The angle in quarter turns, modulo 4: x is m * 2^e with an integer m of 24 bits, and all that matters of
    # m * 2 / pi are the 64 bits of m * window, in units of 2^-62. The words are floor(2 / pi * 2^230).
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
    window = (high << shift) | ((low >> 1) >> (63 - shift))
    # Rounded to the nearest quarter turn; the rest, of +- half of one, in units of 2^-32.
    turns = m * window + 0x2000000000000000
    quarter = (turns >> 62).to(tl.int32)
    rest = ((turns >> 30) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True) ^ -2147483648
    r = rest.to(tl.float32) * 3.6572951981e-10  # pi / 2 * 2^-32
    # Below pi / 4 there is nothing to reduce.
    small = size < 0.78539816
    r = tl.where(small, size, tl.where(size < float("inf"), r, float("nan")))
    quarter = tl.where(small, 0, quarter)
    # Chebyshev fits on +-pi / 4 of (sin r / r - 1) / r^2 and (cos r - 1 + r^2 / 2) / r^4: errors 1.4e-11 and 7.6e-10.
    z = r * r
    odd = r + r * z * (-0.16666667 + z * (8.3333319e-3 + z * (-1.9840087e-4 + z * 2.7249957e-6)))
    even = 1.0 - 0.5 * z + z * z * (0.041666664 + z * (-1.3888304e-3 + z * 2.4547986e-5))
    swapped = (quarter & 1) != 0
    sine = tl.where(swapped, even, odd)
    cosine = tl.where(swapped, odd, even)
    turned = (quarter & 2) != 0
    sine = tl.where(turned != (x < 0), -sine, sine)
    # Bit 1 of quarter + 1, without the sum: LLVM narrows that to 16 bits and adds two at once (add.s16x2), and ptxas 12.8
    # then loses the constant of some. docs/decisions/0024.
    cosine = tl.where(turned != swapped, -cosine, cosine)
    return sine, cosine


@triton.jit
def _cos_sin(freqs, p_angle, m_angle):
    """Cosine and sine of the angles at p_angle, NaN outside the mask: [BLOCK_TOKENS, HALF_BLOCK] both."""
    sine, cosine = _sincos(tl.load(freqs + p_angle, mask=m_angle, other=float("nan")))
    return cosine, sine


@triton.jit
def _load_features(
    x,
    p_row,
    m_row,
    stride_d,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):
    """All of a tile that is loaded before anything waits: the pairs."""
    first, second = _load_pairs(x, p_row, m_row, stride_d, HALF, HALF_BLOCK, EVICT)
    return first, second


@triton.jit
def _row_offsets(i_row, stride_b, stride_h, HEADS: tl.constexpr):
    """Offset of a head; the program has added its batch entry's: [BLOCK_HEADS] int64."""
    return i_row.to(tl.int64) * stride_h


@triton.jit(do_not_specialize=["seq", "batch", "angle_rows", "sequences"])
def rope_bshd_inplace_half_freqs_grid(
    x,
    freqs,
    seq,
    batch,
    angle_rows,
    x_stride_s,
    x_stride_b,
    x_stride_h,
    x_stride_d,
    angle_stride_s,
    angle_stride_d,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # ROTARY_DIM // 2 padded to a power of two
    TAIL_BLOCK: tl.constexpr,  # HEAD_DIM - ROTARY_DIM padded to a power of two
    PER_FEATURE: tl.constexpr,  # the two entries of a pair may differ
    BACKWARD: tl.constexpr,  # apply the transpose of the forward map
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEAD_STEPS: tl.constexpr,
    ORDER: tl.constexpr,
    LOAD_EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    ROWS_PER_PROGRAM: tl.constexpr = BLOCK_HEADS * HEAD_STEPS
    if PDL:
        # Let the next kernel's programs take places that fall free; read nothing before the kernel before has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 64-bit offsets of features and entries too: a few may lie further apart than 2^31. A stride of 1 is a constant.
    if isinstance(x_stride_d, tl.tensor):
        x_stride_d = x_stride_d.to(tl.int64)
    if isinstance(angle_stride_d, tl.tensor):
        angle_stride_d = angle_stride_d.to(tl.int64)
    # A program reads both features of a pair before it writes either, and no other program touches them.
    out, out_stride_s, out_stride_b, out_stride_h, out_stride_d = x, x_stride_s, x_stride_b, x_stride_h, x_stride_d
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)

    # This program's tile of positions and first row.
    i_program = tl.program_id(0)
    token_tiles = tl.cdiv(seq, BLOCK_TOKENS)
    # Rows are the heads of one batch entry; a packed call has one entry.
    rows: tl.constexpr = HEADS
    row_tiles: tl.constexpr = (HEADS + ROWS_PER_PROGRAM - 1) // ROWS_PER_PROGRAM
    if ORDER == "tokens":
        i_token_tile = i_program % token_tiles
        i_row_tile = (i_program // token_tiles) % row_tiles
        i_batch = (i_program // (token_tiles * row_tiles)).to(tl.int64)
    else:
        i_row_tile = i_program % row_tiles
        i_token_tile = (i_program // row_tiles) % token_tiles
        i_batch = (i_program // (row_tiles * token_tiles)).to(tl.int64)
    i_token = i_token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    m_token = i_token < seq
    i_row = i_row_tile * ROWS_PER_PROGRAM + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    # 64-bit offsets: tokens x heads x head_dim may pass 2^31.
    p_x_token = i_batch * x_stride_b + i_token.to(tl.int64) * x_stride_s  # [BLOCK_TOKENS]
    p_out_token = i_batch * out_stride_b + i_token.to(tl.int64) * out_stride_s

    # In flight while the angles are found and their sines taken.
    p_x = p_x_token[:, None] + _row_offsets(i_row, x_stride_b, x_stride_h, HEADS)[None, :]
    m_row = m_token[:, None] & (i_row < rows)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
    features = _load_features(x, p_x, m_row, x_stride_d, HALF, HALF_BLOCK, HEAD_DIM, TAIL_BLOCK, LOAD_EVICT)
    i_position = i_token

    # Angles of the tile, [BLOCK_TOKENS, HALF_BLOCK]; past the rows that there are, NaN.
    i_pair = tl.arange(0, HALF_BLOCK)
    m_angle = (m_token & (i_position < angle_rows))[:, None] & (i_pair < HALF)[None, :]
    p_angle = i_position.to(tl.int64)[:, None] * angle_stride_s
    p_first = p_angle + i_pair[None, :] * angle_stride_d
    p_second = p_first + HALF * angle_stride_d
    cos_first, sin_first = _cos_sin(freqs, p_first, m_angle)
    cos_second, sin_second = cos_first, sin_first
    if PER_FEATURE:
        cos_second, sin_second = _cos_sin(freqs, p_second, m_angle)
    # [BLOCK_TOKENS, 1, HALF_BLOCK]: the rows of a position share its angles.
    cos_first, sin_first = cos_first[:, None, :], sin_first[:, None, :]
    cos_second, sin_second = cos_second[:, None, :], sin_second[:, None, :]

    for i_step in tl.range(0, HEAD_STEPS):
        i_step_row = i_row + i_step * BLOCK_HEADS
        m_row = m_token[:, None] & (i_step_row < rows)[None, :]  # [BLOCK_TOKENS, BLOCK_HEADS]
        p_x = p_x_token[:, None] + _row_offsets(i_step_row, x_stride_b, x_stride_h, HEADS)[None, :]
        p_out = p_out_token[:, None] + _row_offsets(i_step_row, out_stride_b, out_stride_h, HEADS)[None, :]
        b_first, b_second = features[0].to(tl.float32), features[1].to(tl.float32)
        if BACKWARD:
            # The transpose: the sines of the pair change places, and their signs turn.
            out_first = b_first * cos_first + b_second * sin_second
            out_second = b_second * cos_second - b_first * sin_first
        else:
            out_first = b_first * cos_first - b_second * sin_first
            out_second = b_second * cos_second + b_first * sin_second
        _store_pairs(out, p_out, m_row, out_stride_d, out_first, out_second, HALF, HALF_BLOCK, STORE_CACHE)
