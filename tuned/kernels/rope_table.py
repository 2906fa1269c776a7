"""rope_table: cosine and sine of a table of angles, float32 in and out.

@generated from templates/rope_table.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

tuned.launching.launcher launches this kernel to try a way of launching, and the tests of sine and cosine run it.
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


@triton.jit(do_not_specialize=["rows"])
def rope_table(
    freqs,  # float32 [rows, WIDTH] by its strides, in elements
    cos,  # float32 [rows, WIDTH], contiguous
    sin,  # float32 [rows, WIDTH], contiguous
    rows,
    freqs_stride_s,
    freqs_stride_d,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Dependent launch: the next kernel's programs may take places that fall free. This kernel reads and writes
        # nothing before the previous one has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_entry = i_entry < rows.to(tl.int64) * WIDTH
    p_angle = (i_entry // WIDTH) * freqs_stride_s + (i_entry % WIDTH) * freqs_stride_d
    sine, cosine = _sincos(tl.load(freqs + p_angle, mask=m_entry))
    tl.store(cos + i_entry, cosine, mask=m_entry)
    tl.store(sin + i_entry, sine, mask=m_entry)
