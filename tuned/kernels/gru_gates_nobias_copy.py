"""gru_gates_nobias_copy: the gates of a GRU cell without bias, out of place.

@generated from templates/gru_gates.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The gates of torch.nn.GRUCell (reset after the product), after the two library GEMMs:
    r = sigmoid(i_r + h_r), z = sigmoid(i_z + h_z), n = tanh(i_n + r h_n), h' = n + z (h - n).
A program computes BLOCK_HIDDEN units of BLOCK_BATCH rows. Arithmetic is in float32, and the result is rounded once, at
the store. Names: i_ index, m_ mask, p_ offset in elements.
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


@triton.jit(do_not_specialize=["batch"])
def gru_gates_nobias_copy(
    gates_x,  # [batch, 3 * HIDDEN], x @ weight_ih.T, gates in the order r, z, n
    gates_h,  # [batch, 3 * HIDDEN], h @ weight_hh.T
    h,  # [batch, HIDDEN]
    out,  # [batch, HIDDEN]
    batch,
    gates_x_stride_b,
    gates_h_stride_b,
    h_stride_b,
    h_stride_d,
    out_stride_b,
    out_stride_d,
    HIDDEN: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    # The caller chooses the strides of a state that is overwritten, so offsets of features are 64-bit too. Triton makes
    # a stride of 1 a constant, which is no tensor.
    if isinstance(h_stride_d, tl.tensor):
        h_stride_d = h_stride_d.to(tl.int64)
    if isinstance(out_stride_d, tl.tensor):
        out_stride_d = out_stride_d.to(tl.int64)
    hidden_tiles: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    i_program = tl.program_id(0)
    i_hidden = (i_program % hidden_tiles) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    i_batch = (i_program // hidden_tiles) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH).to(tl.int64)
    m_hidden = i_hidden < HIDDEN
    mask = (i_batch < batch)[:, None] & m_hidden[None, :]  # [BLOCK_BATCH, BLOCK_HIDDEN]
    p_x = gates_x + i_batch[:, None] * gates_x_stride_b + i_hidden[None, :]
    p_h = gates_h + i_batch[:, None] * gates_h_stride_b + i_hidden[None, :]
    x_r = tl.load(p_x, mask=mask, other=0).to(tl.float32)
    x_z = tl.load(p_x + HIDDEN, mask=mask, other=0).to(tl.float32)
    x_n = tl.load(p_x + 2 * HIDDEN, mask=mask, other=0).to(tl.float32)
    h_r = tl.load(p_h, mask=mask, other=0).to(tl.float32)
    h_z = tl.load(p_h + HIDDEN, mask=mask, other=0).to(tl.float32)
    h_n = tl.load(p_h + 2 * HIDDEN, mask=mask, other=0).to(tl.float32)
    before = tl.load(h + i_batch[:, None] * h_stride_b + i_hidden[None, :] * h_stride_d, mask=mask, other=0)
    r, z = _sigmoid(x_r + h_r), _sigmoid(x_z + h_z)
    n = _tanh(x_n + r * h_n)
    after = n + z * (before.to(tl.float32) - n)
    p_out = i_batch[:, None] * out_stride_b + i_hidden[None, :] * out_stride_d
    tl.store(out + p_out, after.to(out.dtype.element_ty), mask=mask)
