"""rope_table: cosine and sine of a table of angles, float32 in and out.

@generated from templates/rope_table.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The first of two launches of RoPE with sine="table": the second reads what this one wrote.
"""

import triton
import triton.language as tl


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
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_entry = i_entry < rows.to(tl.int64) * WIDTH
    p_angle = (i_entry // WIDTH) * freqs_stride_s + (i_entry % WIDTH) * freqs_stride_d
    angle = tl.load(freqs + p_angle, mask=m_entry)
    tl.store(cos + i_entry, tl.cos(angle), mask=m_entry)
    tl.store(sin + i_entry, tl.sin(angle), mask=m_entry)
