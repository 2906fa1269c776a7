"""linear_cat_outer: a linear layer over several inputs, without tensor cores.

@generated from templates/linear_cat_outer.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

y = x @ weight.T + bias, where x is up to four inputs side by side, none of them copied. A program computes
BLOCK_COLUMNS columns of BLOCK_ROWS rows of y over all of K, the columns of x. Sums are in float32, and the result is
rounded once, at the store. Names: i_ index, m_ mask, p_ pointer, s sum.
"""

import triton
import triton.language as tl


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


@triton.jit(  # ALIGN tells all of the strides: if one input had wider loads than another, threads would exchange each block
    do_not_specialize=["rows", "x0_stride", "x1_stride", "x2_stride", "x3_stride", "weight_stride", "out_stride"]
)
def linear_cat_outer(
    x0,  # [rows, WIDTH0], last stride 1; x1 to x3 alike, any pointer where the width is 0
    x1,
    x2,
    x3,
    weight,  # [COLUMNS, WIDTH0 + WIDTH1 + WIDTH2 + WIDTH3], last stride 1, under 2^31 elements
    bias,  # [COLUMNS], contiguous; any pointer without BIAS
    out,  # [rows, COLUMNS], last stride 1
    rows,
    x0_stride,
    x1_stride,
    x2_stride,
    x3_stride,
    weight_stride,
    out_stride,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    WIDTH3: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    ALIGN: tl.constexpr,  # in elements: divides the row strides of all inputs and of weight
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (
        (WIDTH0 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH1 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH2 + BLOCK_K - 1) // BLOCK_K
        + (WIDTH3 + BLOCK_K - 1) // BLOCK_K
    )
    MASKED: tl.constexpr = (WIDTH0 % BLOCK_K + WIDTH1 % BLOCK_K + WIDTH2 % BLOCK_K + WIDTH3 % BLOCK_K) > 0
    TILES: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    if PDL:
        # Dependent launch: the next kernel's programs may take places that fall free. This kernel reads and writes
        # nothing before the previous one has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # ALIGN divides these strides: they keep their values, and the compiler knows how wide loads may be.
    x0_stride, x1_stride = x0_stride // ALIGN * ALIGN, x1_stride // ALIGN * ALIGN
    x2_stride, x3_stride = x2_stride // ALIGN * ALIGN, x3_stride // ALIGN * ALIGN
    weight_stride = weight_stride // ALIGN * ALIGN

    # This program's tile. Columns past the end read the last one's weights, and are not stored.
    i_column = (tl.program_id(0) % TILES) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    i_row = (tl.program_id(0) // TILES) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    m_out = (i_row < rows)[:, None] & (i_column < COLUMNS)[None, :]
    if BIAS:  # loaded here, it arrives while the products are made
        b = tl.load(bias + i_column, mask=i_column < COLUMNS, other=0)

    # Tiles are [FRONT, columns of a warp, rows, BACK, K], where FRONT or BACK is the warps: a warp owns whole columns of all
    # rows, and its lanes lie along K. So a thread multiplies each of its rows by each of its columns, and sums stay within a
    # warp. ``0 * i_warp`` makes a tile of x for each warp, loaded from L1: its layout is then that of the weights, and threads
    # exchange nothing.
    EACH: tl.constexpr = BLOCK_COLUMNS // WARPS
    FRONT: tl.constexpr = WARPS if WARPS_FIRST else 1
    BACK: tl.constexpr = WARPS // FRONT
    UNROLLED: tl.constexpr = BLOCKS // ((BLOCKS + 7) // 8)  # blocks whose loads are in flight together, at most 8
    i_warp = tl.arange(0, FRONT)[:, None, None, None, None] + tl.arange(0, BACK)[None, None, None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, None, None, :]
    i_own = (tl.program_id(0) % TILES) * BLOCK_COLUMNS + tl.arange(0, EACH)[None, :, None, None, None] * WARPS + i_warp
    p_own = tl.minimum(i_own, COLUMNS - 1) * weight_stride
    i_row_5d = i_row[None, None, :, None, None]
    m_row = i_row_5d < rows
    s = tl.zeros((FRONT, EACH, BLOCK_ROWS, BACK, BLOCK_K), tl.float32)
    for block in tl.range(0, BLOCKS, loop_unroll_factor=UNROLLED):
        p, stride, column, start, left = _segment(
            block, x0, x1, x2, x3, x0_stride, x1_stride, x2_stride, x3_stride,
            WIDTH0, WIDTH1, WIDTH2, WIDTH3, BLOCK_K,
        )  # fmt: skip
        p += column + i_row_5d * stride + k + 0 * i_warp
        if MASKED:
            w = tl.load(weight + start + p_own + k, mask=k < left, other=0)
            a = tl.load(p, mask=m_row & (k < left), other=0)
        else:
            w = tl.load(weight + start + p_own + k)
            a = tl.load(p, mask=m_row, other=0)
        s += w.to(tl.float32) * a.to(tl.float32)
    s = tl.reshape(tl.permute(tl.sum(s, 4), (2, 1, 0, 3)), (BLOCK_ROWS, BLOCK_COLUMNS))
    if BIAS:
        s += b.to(tl.float32)[None, :]
    tl.store(out + i_row[:, None] * out_stride + i_column[None, :], s.to(out.dtype.element_ty), mask=m_out)
