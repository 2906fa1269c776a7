"""rope_norm_weights: the gradients of the weights of two norms, from the parts of them that programs summed.

@generated from templates/rope_norm_weights.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

A program sums BLOCK columns over all parts. Sums are in float32 and in one order, whichever program stored its part
first: the same bits in each run.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs"])
def rope_norm_weights(
    partials,  # float32 [programs, WIDTH + KEY_WIDTH]
    weight_grad,  # [WIDTH], any dtype
    key_weight_grad,  # [KEY_WIDTH]; any pointer without a key
    programs,
    WIDTH: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Dependent launch: the next kernel's programs may take places that fall free. This kernel reads and writes
        # nothing before the previous one has ended.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_part = tl.arange(0, BLOCK_PROGRAMS)
    total = tl.zeros([BLOCK_PROGRAMS, BLOCK], tl.float32)
    for begin in range(0, programs, BLOCK_PROGRAMS):
        p_part = (begin + i_part).to(tl.int64)[:, None] * (WIDTH + KEY_WIDTH) + i_column[None, :]
        mask = (begin + i_part < programs)[:, None] & (i_column < WIDTH + KEY_WIDTH)[None, :]
        total += tl.load(partials + p_part, mask=mask, other=0.0)
    result = tl.sum(total, 0)
    tl.store(weight_grad + i_column, result.to(weight_grad.dtype.element_ty), mask=i_column < WIDTH)
    if KEY_WIDTH > 0:
        m_key = (i_column >= WIDTH) & (i_column < WIDTH + KEY_WIDTH)
        tl.store(key_weight_grad + (i_column - WIDTH), result.to(key_weight_grad.dtype.element_ty), mask=m_key)
