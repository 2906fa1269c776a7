"""gru_cell_padded: one step of a GRU in one kernel, on tensor cores, all of K in every warp, of rows that are padded to 16 bytes.

@generated from templates/gru_cell.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

torch.nn.GRUCell (reset after the product), the products and the gates in one launch:
    r = sigmoid(i_r + g_r), z = sigmoid(i_z + g_z), n = tanh(i_n + r g_n), h' = n + z (h - n),
with i = x @ weight_ih.T + bias_ih and g = h @ weight_hh.T + bias_hh. x is up to four inputs side by side.

A program computes BLOCK_HIDDEN units of BLOCK_BATCH rows over all of K, the columns of x and of h; no program waits for
another. SCHEDULE = "two": one loop over x, then one over h; "one": a single loop over both, so that loads never pause;
"joint": each turn of the loop takes a block of x and one of h. Sums are in float32, and the result is rounded once, at
the store. Names: i_ index, m_ mask, p_ pointer, w_ weights, s_ sum.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Hyperbolic tangent: an odd polynomial where |x| < 0.5, else 1 - 2 / (1 + e^(2 x)).

    Where e^(2 x) overflows, or is 0, the second formula gives 1, or -1, and not NaN. Its error is a rounding of 1,
    which is much of a small result. The polynomial's error is within 2 roundings of its result.
    """
    y = x * x
    near = x * (1 + y * (-0.3333315 + y * (0.1332599 + y * (-0.05305295 + y * 0.01725699))))
    return tl.where(tl.abs(x) < 0.5, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _segment(
    block,
    x0,
    x1,
    x2,
    x3,
    x0_stride_b,
    x1_stride_b,
    x2_stride_b,
    x3_stride_b,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    WIDTH3: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Where block ``block`` of the columns of x0 to x3 lies: the inputs count as side by side, and none is copied.

    Each input is padded to whole blocks of BLOCK_K columns, so a block lies in one input; one of width 0 has no block.
    Returns the input's pointer and row stride, the block's first column in that input and in the weights, and how many
    columns the input has from there on: the caller masks the others.
    """
    BEFORE1: tl.constexpr = (WIDTH0 + BLOCK_K - 1) // BLOCK_K
    BEFORE2: tl.constexpr = BEFORE1 + (WIDTH1 + BLOCK_K - 1) // BLOCK_K
    BEFORE3: tl.constexpr = BEFORE2 + (WIDTH2 + BLOCK_K - 1) // BLOCK_K
    p, stride, width, column, start = x0, x0_stride_b, WIDTH0, block * BLOCK_K, 0
    if WIDTH1 > 0:
        later = block >= BEFORE1
        p, stride, width = tl.where(later, x1, p), tl.where(later, x1_stride_b, stride), tl.where(later, WIDTH1, width)
        column, start = tl.where(later, (block - BEFORE1) * BLOCK_K, column), tl.where(later, WIDTH0, start)
    if WIDTH2 > 0:
        later = block >= BEFORE2
        p, stride, width = tl.where(later, x2, p), tl.where(later, x2_stride_b, stride), tl.where(later, WIDTH2, width)
        column, start = tl.where(later, (block - BEFORE2) * BLOCK_K, column), tl.where(later, WIDTH0 + WIDTH1, start)
    if WIDTH3 > 0:
        later = block >= BEFORE3
        p, stride, width = tl.where(later, x3, p), tl.where(later, x3_stride_b, stride), tl.where(later, WIDTH3, width)
        column, start = (
            tl.where(later, (block - BEFORE3) * BLOCK_K, column),
            tl.where(later, WIDTH0 + WIDTH1 + WIDTH2, start),
        )
    return p, stride, column, start + column, width - column


@triton.jit
def _nearest_tf32(a):
    """Float32 values rounded to the nearest TF32, with 10 bits of fraction: tensor cores only cut off the other 13."""
    bits = (a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(a == a, bits.to(tl.float32, bitcast=True), a)  # NaN stays NaN: its bits could overflow


@triton.jit
def _sum_parts(a, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[PARTS, ROWS, COLUMNS] -> the sum over PARTS, at most 8: one change of layout, then additions within threads."""
    # tl.split makes Triton convert to a layout in which one thread has all parts of an element. tl.sum would reduce
    # across warps, which is several times slower here.
    a = tl.permute(a, (1, 2, 0))
    if PARTS == 8:
        even, odd = tl.split(tl.reshape(a, (ROWS, COLUMNS, 2, 2, 2)))
        even, odd = tl.split(even + odd)
        even, odd = tl.split(even + odd)
        total = even + odd
    elif PARTS == 4:
        even, odd = tl.split(tl.reshape(a, (ROWS, COLUMNS, 2, 2)))
        even, odd = tl.split(even + odd)
        total = even + odd
    else:
        even, odd = tl.split(a)
        total = even + odd
    return total


@triton.jit
def _accumulate(
    p,
    p_weight,
    left,
    k,
    k_weight,
    m_batch,
    p_r,
    p_z,
    p_n,
    s_r,
    s_z,
    s_n,
    STACKED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of one block of K to the sums of the three gates; if STACKED, s_r has those of r, then of z.

    p and p_weight point to the block's first column; p_r, p_z and p_n are offsets of the gates' rows of weights; the
    input has ``left`` columns from there on.
    """
    p_weight += k_weight
    if MASKED:
        m_weight = k_weight < left
        a = tl.load(p + k, mask=m_batch & (k < left), other=0)
        w_r = tl.load(p_weight + p_r, mask=m_weight, other=0)
        w_n = tl.load(p_weight + p_n, mask=m_weight, other=0)
    else:
        a = tl.load(p + k, mask=m_batch, other=0)
        w_r = tl.load(p_weight + p_r)
        w_n = tl.load(p_weight + p_n)
    if PRECISION == "tf32":
        a, w_r, w_n = _nearest_tf32(a), _nearest_tf32(w_r), _nearest_tf32(w_n)
    s_r = tl.dot(a, w_r, s_r, input_precision=PRECISION)
    if not STACKED:
        if MASKED:
            w_z = tl.load(p_weight + p_z, mask=k_weight < left, other=0)
        else:
            w_z = tl.load(p_weight + p_z)
        if PRECISION == "tf32":
            w_z = _nearest_tf32(w_z)
        s_z = tl.dot(a, w_z, s_z, input_precision=PRECISION)
    s_n = tl.dot(a, w_n, s_n, input_precision=PRECISION)
    return s_r, s_z, s_n


@triton.jit(do_not_specialize=["batch"])
def gru_cell_padded(
    x0,  # [batch, WIDTH0], last stride 1; x1 to x3 alike, any pointer where the width is 0
    x1,
    x2,
    x3,
    h,  # [batch, HIDDEN], last stride 1
    weight_ih,  # [3 * HIDDEN, WIDTH0 + WIDTH1 + WIDTH2 + WIDTH3], last stride 1, gates in the order r, z, n
    weight_hh,  # [3 * HIDDEN, HIDDEN], last stride 1
    bias_ih,  # [3 * HIDDEN], contiguous; any pointer without BIAS
    bias_hh,
    out,  # [batch, HIDDEN], last stride 1; not h, which other programs still read
    batch,
    x0_stride_b,
    x1_stride_b,
    x2_stride_b,
    x3_stride_b,
    h_stride_b,
    weight_ih_stride,
    weight_hh_stride,
    out_stride_b,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    WIDTH3: tl.constexpr,
    HIDDEN: tl.constexpr,
    BIAS: tl.constexpr,
    ALIGN: tl.constexpr,  # in elements: divides the row strides of all inputs, of h and of both weights
    BLOCK_BATCH: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # BLOCK_K is split over so many groups of warps
    SCHEDULE: tl.constexpr,
    STACKED: tl.constexpr,  # one product for the gates r and z together
    ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS_X: tl.constexpr = (
        (WIDTH0 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH1 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH2 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH3 + BLOCK_K - 1) // BLOCK_K
    )
    BLOCKS_H: tl.constexpr = (-(-HIDDEN // ALIGN) * ALIGN + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = BLOCKS_X if BLOCKS_X > BLOCKS_H else BLOCKS_H
    TAIL: tl.constexpr = (WIDTH0 % BLOCK_K + WIDTH1 % BLOCK_K + WIDTH2 % BLOCK_K + WIDTH3 % BLOCK_K) > 0
    MASKED: tl.constexpr = TAIL or HIDDEN % BLOCK_K > 0 or (SCHEDULE == "joint" and BLOCKS_X != BLOCKS_H)
    TILES: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    if PDL:
        # Dependent launch: the next kernel's programs may take places that fall free. This kernel reads and writes
        # nothing before the previous one has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # ALIGN divides these strides: they keep their values, and the compiler knows how wide loads may be.
    x0_stride_b, x1_stride_b = x0_stride_b // ALIGN * ALIGN, x1_stride_b // ALIGN * ALIGN
    x2_stride_b, x3_stride_b = x2_stride_b // ALIGN * ALIGN, x3_stride_b // ALIGN * ALIGN
    h_stride_b = h_stride_b // ALIGN * ALIGN
    weight_ih_stride, weight_hh_stride = weight_ih_stride // ALIGN * ALIGN, weight_hh_stride // ALIGN * ALIGN

    # This program's tile. Units past the end read the last unit's weights, and are not stored.
    if ORDER == "units":
        i_tile = tl.program_id(0) % TILES
        i_batch_tile = tl.program_id(0) // TILES
    else:
        batch_tiles = tl.cdiv(batch, BLOCK_BATCH)
        i_tile = tl.program_id(0) // batch_tiles
        i_batch_tile = tl.program_id(0) % batch_tiles
    i_unit = i_tile * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    i_batch = i_batch_tile * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH).to(tl.int64)
    m_out = (i_batch < batch)[:, None] & (i_unit < HIDDEN)[None, :]
    i_row_r = tl.minimum(i_unit, HIDDEN - 1)  # of weight_ih and weight_hh, which have under 2^31 elements
    i_row = i_batch[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    k_weight = tl.arange(0, BLOCK_K)[:, None]
    zero = tl.zeros((BLOCK_BATCH, BLOCK_HIDDEN), tl.float32)
    s_r, s_z, s_x, s_h = zero, zero, zero, zero
    i_row_z, i_row_n = i_row_r[None, :] + HIDDEN, i_row_r[None, :] + 2 * HIDDEN
    if STACKED:  # the weights of r, then of z, for the same units
        i_both = tl.arange(0, 2 * BLOCK_HIDDEN)
        i_row_r = tl.minimum(i_tile * BLOCK_HIDDEN + i_both % BLOCK_HIDDEN, HIDDEN - 1)
        i_row_r += (i_both // BLOCK_HIDDEN) * HIDDEN
        s_r = tl.zeros((BLOCK_BATCH, 2 * BLOCK_HIDDEN), tl.float32)
    i_row_r = i_row_r[None, :]
    m_row = i_row < batch
    p_ir, p_iz, p_in = i_row_r * weight_ih_stride, i_row_z * weight_ih_stride, i_row_n * weight_ih_stride
    p_hr, p_hz, p_hn = i_row_r * weight_hh_stride, i_row_z * weight_hh_stride, i_row_n * weight_hh_stride

    # The old state and the biases are needed at the end. Loaded here, they arrive while the products are made.
    before = tl.load(h + i_batch[:, None] * h_stride_b + i_unit[None, :], mask=m_out, other=0)
    if BIAS:
        m_unit = i_unit < HIDDEN
        b_ir = tl.load(bias_ih + i_unit, mask=m_unit, other=0)
        b_iz = tl.load(bias_ih + HIDDEN + i_unit, mask=m_unit, other=0)
        b_in = tl.load(bias_ih + 2 * HIDDEN + i_unit, mask=m_unit, other=0)
        b_hr = tl.load(bias_hh + i_unit, mask=m_unit, other=0)
        b_hz = tl.load(bias_hh + HIDDEN + i_unit, mask=m_unit, other=0)
        b_hn = tl.load(bias_hh + 2 * HIDDEN + i_unit, mask=m_unit, other=0)

    if SCHEDULE == "one":
        for block in tl.range(0, BLOCKS_X + BLOCKS_H):
            p, stride, column, start, left = _segment(
                block, x0, x1, x2, x3, x0_stride_b, x1_stride_b, x2_stride_b, x3_stride_b,
                WIDTH0, WIDTH1, WIDTH2, WIDTH3, BLOCK_K,
            )  # fmt: skip
            of_h = block >= BLOCKS_X
            column = tl.where(of_h, (block - BLOCKS_X) * BLOCK_K, column)
            left = tl.where(of_h, -(-HIDDEN // ALIGN) * ALIGN - (block - BLOCKS_X) * BLOCK_K, left)
            p, stride = tl.where(of_h, h, p), tl.where(of_h, h_stride_b, stride)
            p_weight = tl.where(of_h, weight_hh, weight_ih) + tl.where(of_h, column, start)
            # Where h begins, the sum of n so far is that over x: keep it as s_x, and begin the sum over h at 0.
            s_x = tl.where(block == BLOCKS_X, s_h, s_x)
            s_h = tl.where(block == BLOCKS_X, 0.0, s_h)
            s_r, s_z, s_h = _accumulate(
                p + column + i_row * stride, p_weight, left, k, k_weight, m_row,
                tl.where(of_h, p_hr, p_ir), tl.where(of_h, p_hz, p_iz), tl.where(of_h, p_hn, p_in),
                s_r, s_z, s_h, STACKED, MASKED, PRECISION,
            )  # fmt: skip
    elif SCHEDULE == "two":
        for block in tl.range(0, BLOCKS_X):
            p, stride, column, start, left = _segment(
                block, x0, x1, x2, x3, x0_stride_b, x1_stride_b, x2_stride_b, x3_stride_b,
                WIDTH0, WIDTH1, WIDTH2, WIDTH3, BLOCK_K,
            )  # fmt: skip
            s_r, s_z, s_x = _accumulate(
                p + column + i_row * stride, weight_ih + start, left, k, k_weight, m_row, p_ir, p_iz, p_in,
                s_r, s_z, s_x, STACKED, MASKED, PRECISION,
            )  # fmt: skip
        for block in tl.range(0, BLOCKS_H):
            column = block * BLOCK_K
            s_r, s_z, s_h = _accumulate(
                h + column + i_row * h_stride_b, weight_hh + column, -(-HIDDEN // ALIGN) * ALIGN - column, k, k_weight, m_row,
                p_hr, p_hz, p_hn, s_r, s_z, s_h, STACKED, MASKED, PRECISION,
            )  # fmt: skip
    else:
        for block in tl.range(0, BLOCKS):
            p, stride, column, start, left = _segment(
                block, x0, x1, x2, x3, x0_stride_b, x1_stride_b, x2_stride_b, x3_stride_b,
                WIDTH0, WIDTH1, WIDTH2, WIDTH3, BLOCK_K,
            )  # fmt: skip
            s_r, s_z, s_x = _accumulate(
                p + column + i_row * stride, weight_ih + start, left, k, k_weight, m_row, p_ir, p_iz, p_in,
                s_r, s_z, s_x, STACKED, MASKED, PRECISION,
            )  # fmt: skip
            column = block * BLOCK_K
            s_r, s_z, s_h = _accumulate(
                h + column + i_row * h_stride_b, weight_hh + column, -(-HIDDEN // ALIGN) * ALIGN - column, k, k_weight, m_row,
                p_hr, p_hz, p_hn, s_r, s_z, s_h, STACKED, MASKED, PRECISION,
            )  # fmt: skip

    if STACKED:
        s_r, s_z = tl.split(tl.permute(tl.reshape(s_r, (BLOCK_BATCH, 2, BLOCK_HIDDEN)), (0, 2, 1)))
    if BIAS:
        s_r += (b_ir.to(tl.float32) + b_hr.to(tl.float32))[None, :]
        s_z += (b_iz.to(tl.float32) + b_hz.to(tl.float32))[None, :]
        s_x += b_in.to(tl.float32)[None, :]
        s_h += b_hn.to(tl.float32)[None, :]
    r, z = _sigmoid(s_r), _sigmoid(s_z)
    n = _tanh(s_x + r * s_h)
    after = n + z * (before.to(tl.float32) - n)
    tl.store(out + i_batch[:, None] * out_stride_b + i_unit[None, :], after.to(out.dtype.element_ty), mask=m_out)
