"""gru_cell_outer: one step of a GRU in one kernel, without tensor cores.

@generated from templates/gru_cell_outer.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

torch.nn.GRUCell (reset after the product) in one launch and without tensor cores:
    r = sigmoid(i_r + g_r), z = sigmoid(i_z + g_z), n = tanh(i_n + r g_n), h' = n + z (h - n),
with i = x @ weight_ih.T + bias_ih and g = h @ weight_hh.T + bias_hh. x is up to four inputs side by side.

A program computes BLOCK_HIDDEN units of BLOCK_BATCH rows over all of K, the columns of x and of h; no program waits for
another. Tiles are [FRONT, units of a warp, rows, BACK, K], where FRONT or BACK is the warps: a warp owns whole units of
all rows, and its lanes lie along K. So a thread multiplies each of its rows by the weights of each of its units, and sums
stay within a warp. Arithmetic is in float32, and the result is rounded once, at the store. Names: i_ index, m_ mask,
p_ pointer, w_ weights, s_ sum.
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


# Where a tile has its warps. Triton spreads them over the axis that comes after the contiguous one, and of axes alike 3.6 takes
# the first, 3.7 the last. So such tiles have an axis at both ends, of which one has length 1.
WARPS_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


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
def _accumulate(p, p_weight, left, k, m_batch, p_r, p_z, p_n, s_r, s_z, s_n, MASKED: tl.constexpr):
    """Add the products of one block of K to the sums of the three gates.

    p has the rows' pointers for each warp, p_weight points to the block's first column; p_r, p_z and p_n are offsets of
    the gates' rows of weights; the input has ``left`` columns from there on.
    """
    p_weight += k
    if MASKED:
        m_k = k < left
        w_r = tl.load(p_weight + p_r, mask=m_k, other=0)
        w_z = tl.load(p_weight + p_z, mask=m_k, other=0)
        w_n = tl.load(p_weight + p_n, mask=m_k, other=0)
        a = tl.load(p + k, mask=m_batch & m_k, other=0).to(tl.float32)
    else:
        w_r = tl.load(p_weight + p_r)
        w_z = tl.load(p_weight + p_z)
        w_n = tl.load(p_weight + p_n)
        a = tl.load(p + k, mask=m_batch, other=0).to(tl.float32)
    s_r += w_r.to(tl.float32) * a
    s_z += w_z.to(tl.float32) * a
    s_n += w_n.to(tl.float32) * a
    return s_r, s_z, s_n


@triton.jit
def _total(s, BATCH: tl.constexpr, HIDDEN: tl.constexpr):
    """The sums over lanes, as [BATCH, HIDDEN]: neighbouring units are on neighbouring warps."""
    return tl.reshape(tl.permute(tl.sum(s, 4), (2, 1, 0, 3)), (BATCH, HIDDEN))


@triton.jit(  # ALIGN tells all of the strides: if one input had wider loads than another, threads would exchange each block
    do_not_specialize=[
        "batch",
        *("x0_stride_b", "x1_stride_b", "x2_stride_b", "x3_stride_b", "h_stride_b"),
        *("weight_ih_stride", "weight_hh_stride", "out_stride_b"),
    ]
)
def gru_cell_outer(
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
    WARPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    BLOCKS_X: tl.constexpr = (
        (WIDTH0 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH1 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH2 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH3 + BLOCK_K - 1) // BLOCK_K
    )
    BLOCKS_H: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    MASKED_X: tl.constexpr = (WIDTH0 % BLOCK_K + WIDTH1 % BLOCK_K + WIDTH2 % BLOCK_K + WIDTH3 % BLOCK_K) > 0
    MASKED_H: tl.constexpr = HIDDEN % BLOCK_K > 0
    TILES: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    EACH: tl.constexpr = BLOCK_HIDDEN // WARPS
    FRONT: tl.constexpr = WARPS if WARPS_FIRST else 1
    BACK: tl.constexpr = WARPS // FRONT
    # Blocks whose loads are in flight together, at most 8.
    UNROLLED_X: tl.constexpr = BLOCKS_X // ((BLOCKS_X + 7) // 8)
    UNROLLED_H: tl.constexpr = BLOCKS_H // ((BLOCKS_H + 7) // 8)
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

    # This program's tile. Units past the end read the last unit's weights, and are not stored. Weights have under 2^31
    # elements, so their offsets are 32-bit.
    i_unit = (tl.program_id(0) % TILES) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    i_batch = (tl.program_id(0) // TILES) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH).to(tl.int64)
    m_out = (i_batch < batch)[:, None] & (i_unit < HIDDEN)[None, :]
    i_warp = tl.arange(0, FRONT)[:, None, None, None, None] + tl.arange(0, BACK)[None, None, None, :, None]
    i_own = (tl.program_id(0) % TILES) * BLOCK_HIDDEN + tl.arange(0, EACH)[None, :, None, None, None] * WARPS + i_warp
    i_row_r = tl.minimum(i_own, HIDDEN - 1)
    i_row_z, i_row_n = i_row_r + HIDDEN, i_row_r + 2 * HIDDEN
    # ``0 * i_warp`` makes a tile of the inputs for each warp, loaded from L1: its layout is then that of the weights, and
    # threads exchange nothing.
    i_row = i_batch[None, None, :, None, None] + 0 * i_warp
    m_row = i_row < batch
    k = tl.arange(0, BLOCK_K)[None, None, None, None, :]
    zero = tl.zeros((FRONT, EACH, BLOCK_BATCH, BACK, BLOCK_K), tl.float32)
    s_r, s_z, s_x, s_h = zero, zero, zero, zero

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

    p_r, p_z, p_n = i_row_r * weight_ih_stride, i_row_z * weight_ih_stride, i_row_n * weight_ih_stride
    for block in tl.range(0, BLOCKS_X, loop_unroll_factor=UNROLLED_X):
        p, stride, column, start, left = _segment(
            block, x0, x1, x2, x3, x0_stride_b, x1_stride_b, x2_stride_b, x3_stride_b,
            WIDTH0, WIDTH1, WIDTH2, WIDTH3, BLOCK_K,
        )  # fmt: skip
        s_r, s_z, s_x = _accumulate(
            p + column + i_row * stride, weight_ih + start, left, k, m_row, p_r, p_z, p_n, s_r, s_z, s_x, MASKED_X
        )
    p_r, p_z, p_n = i_row_r * weight_hh_stride, i_row_z * weight_hh_stride, i_row_n * weight_hh_stride
    for block in tl.range(0, BLOCKS_H, loop_unroll_factor=UNROLLED_H):
        p = h + block * BLOCK_K + i_row * h_stride_b
        left = HIDDEN - block * BLOCK_K
        s_r, s_z, s_h = _accumulate(
            p, weight_hh + block * BLOCK_K, left, k, m_row, p_r, p_z, p_n, s_r, s_z, s_h, MASKED_H
        )

    g_r, g_z = _total(s_r, BLOCK_BATCH, BLOCK_HIDDEN), _total(s_z, BLOCK_BATCH, BLOCK_HIDDEN)
    g_x, g_h = _total(s_x, BLOCK_BATCH, BLOCK_HIDDEN), _total(s_h, BLOCK_BATCH, BLOCK_HIDDEN)
    if BIAS:
        g_r += (b_ir.to(tl.float32) + b_hr.to(tl.float32))[None, :]
        g_z += (b_iz.to(tl.float32) + b_hz.to(tl.float32))[None, :]
        g_x += b_in.to(tl.float32)[None, :]
        g_h += b_hn.to(tl.float32)[None, :]
    r, z = _sigmoid(g_r), _sigmoid(g_z)
    n = _tanh(g_x + r * g_h)
    after = n + z * (before.to(tl.float32) - n)
    tl.store(out + i_batch[:, None] * out_stride_b + i_unit[None, :], after.to(out.dtype.element_ty), mask=m_out)
