"""gru_thd_layer_row: a GRU over sequences in a row, one layer; a row times units, weights in registers.

@generated from templates/gru_row.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The recurrence of torch.nn.GRU (reset after the product) over a whole sequence, in one launch:
    r = sigmoid(i_r + h_r), z = sigmoid(i_z + h_z), n = tanh(i_n + r h_n), h' = n + z (h - n),
where i = x @ weight_ih.T is given and (h_r, h_z, h_n) = h @ weight_hh.T; the kernel adds the biases.

A program has one row of the batch in one direction, and all weights of h in registers: a thread holds those of one
unit, for all columns or one half of them. So the state makes one trip through shared memory at each step, and no
program waits for another. Arithmetic is in float32, and so is the state that is multiplied; the output is rounded once,
at the store.
Names: i_ index, m_ mask, p_ pointer or offset in elements, w_ weights of h.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "seq", "weight_hh_stride_k"])
def gru_thd_layer_row(
    gates,  # x @ weight_ih.T, 3 * HIDDEN a token and direction, gates in the order r, z, n
    weight_hh,  # [DIRECTIONS, 3 * HIDDEN, HIDDEN]
    bias_ih,  # [DIRECTIONS, 3 * HIDDEN]; any pointer if not BIAS
    bias_hh,
    h_0,  # [DIRECTIONS, batch, HIDDEN]
    out,  # DIRECTIONS * HIDDEN a token
    h_n,  # as h_0
    starts,  # packed: [seq] int64, thd: [batch + 1] int32
    lengths,  # [batch] int32, at most seq
    batch,
    seq,
    gates_stride_d,
    gates_stride_t,
    gates_stride_b,
    weight_hh_stride,
    weight_hh_stride_k,  # 1, which the compiler must not know: see _weights
    bias_ih_stride,
    bias_hh_stride,
    h_0_stride_l,
    h_0_stride_b,
    out_stride_t,
    out_stride_b,
    h_n_stride_l,
    h_n_stride_b,
    HIDDEN: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PACK: tl.constexpr,  # weights that are loaded as one integer of 8 bytes; 1: each by itself
):
    dtype: tl.constexpr = out.dtype.element_ty
    i_program = tl.program_id(0)
    i_batch = i_program % batch
    i_cell = (i_program // batch).to(tl.int64)  # direction
    backward = i_cell == 1 if DIRECTIONS == 2 else i_cell < 0
    i_hidden = tl.arange(0, BLOCK_HIDDEN)
    mask = i_hidden < HIDDEN
    length = tl.load(lengths + i_batch)
    starts = tl.load(starts + i_batch).to(tl.int64)

    weight_hh += i_cell * weight_hh_stride
    w_r = _weights(weight_hh, i_hidden, weight_hh_stride_k, HIDDEN, BLOCK_HIDDEN, PACK)
    w_z = _weights(weight_hh + HIDDEN * HIDDEN, i_hidden, weight_hh_stride_k, HIDDEN, BLOCK_HIDDEN, PACK)
    w_n = _weights(weight_hh + 2 * HIDDEN * HIDDEN, i_hidden, weight_hh_stride_k, HIDDEN, BLOCK_HIDDEN, PACK)

    b_r = tl.zeros((BLOCK_HIDDEN,), tl.float32)
    b_z = b_r
    b_x = b_r
    b_h = b_r
    if BIAS:
        p_ih = bias_ih + i_cell * bias_ih_stride + i_hidden
        p_hh = bias_hh + i_cell * bias_hh_stride + i_hidden
        b_r += tl.load(p_ih, mask=mask, other=0).to(tl.float32)
        b_r += tl.load(p_hh, mask=mask, other=0).to(tl.float32)
        b_z += tl.load(p_ih + HIDDEN, mask=mask, other=0).to(tl.float32)
        b_z += tl.load(p_hh + HIDDEN, mask=mask, other=0).to(tl.float32)
        b_x += tl.load(p_ih + 2 * HIDDEN, mask=mask, other=0).to(tl.float32)
        b_h += tl.load(p_hh + 2 * HIDDEN, mask=mask, other=0).to(tl.float32)

    out += tl.where(backward, HIDDEN, 0)
    gates += tl.where(backward, 1, 0).to(tl.int64) * gates_stride_d
    p_h_0 = h_0 + i_cell * h_0_stride_l + i_batch.to(tl.int64) * h_0_stride_b + i_hidden
    own = tl.load(p_h_0, mask=mask, other=0).to(tl.float32)

    # Gates are loaded two steps ahead, to two sets of registers (x_ and y_), which steps use in turn: copying one set
    # to the other would wait for the loads.
    x_r, x_z, x_n, x_token = _coming(
        gates, 0, i_batch, length, seq, starts, gates_stride_t, gates_stride_b, backward, i_hidden, HIDDEN
    )
    y_r, y_z, y_n, y_token = _coming(
        gates, 1, i_batch, length, seq, starts, gates_stride_t, gates_stride_b, backward, i_hidden, HIDDEN
    )
    # Not a "for" loop: in one, Triton computes the state in two layouts, which saves a trip through shared memory but
    # is twice the work.
    i_step = 0
    while i_step < length:
        i_next = i_step + 2
        r, z, n, token = x_r.to(tl.float32), x_z.to(tl.float32), x_n.to(tl.float32), x_token
        x_r, x_z, x_n, x_token = _coming(
            gates, i_next, i_batch, length, seq, starts, gates_stride_t, gates_stride_b, backward, i_hidden, HIDDEN
        )
        own = _step(own, r + b_r, z + b_z, n + b_x, b_h, w_r, w_z, w_n)
        p_out = _place(token, i_step, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
        tl.store(out + p_out + i_hidden, own.to(dtype), mask=mask)

        i_step += 1
        i_next = i_step + 2
        r, z, n, token = y_r.to(tl.float32), y_z.to(tl.float32), y_n.to(tl.float32), y_token
        y_r, y_z, y_n, y_token = _coming(
            gates, i_next, i_batch, length, seq, starts, gates_stride_t, gates_stride_b, backward, i_hidden, HIDDEN
        )
        there = i_step < length  # false behind the last step, if the number of steps is odd
        after = _step(own, r + b_r, z + b_z, n + b_x, b_h, w_r, w_z, w_n)
        p_out = _place(token, i_step, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
        tl.store(out + p_out + i_hidden, after.to(dtype), mask=mask & there)
        own = tl.where(there, after, own)
        i_step += 1

    p_h_n = h_n + i_cell * h_n_stride_l + i_batch.to(tl.int64) * h_n_stride_b + i_hidden
    tl.store(p_h_n, own.to(dtype), mask=mask)


@triton.jit
def _weights(
    p,  # first element of a matrix [HIDDEN, HIDDEN]
    i_hidden,
    stride_k,  # 1
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PACK: tl.constexpr,
):
    """[BLOCK_HIDDEN, 2, BLOCK_HIDDEN // 2]: a gate's weights, with the columns in two halves.

    A thread shall have all columns of a half, so that it adds them up without other threads. For this, threads must run
    along the units first, then along the halves. Triton orders the axes by how many neighbours in memory they are said
    to have, which is why max_contiguous says (8, 4, 1); and since it does not know that stride_k is 1, it gives no
    thread two elements of a row at a time. Threads then read addresses as far apart as rows, and a load takes as many
    trips as there are threads. That is why PACK elements are loaded as one integer of 8 bytes.
    """
    HALF: tl.constexpr = BLOCK_HIDDEN // 2 // PACK
    i_k = tl.arange(0, 2)[None, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    mask = (i_hidden < HIDDEN)[:, None, None] & (i_k < HIDDEN // PACK)
    i_element = i_hidden[:, None, None] * (HIDDEN // PACK) + i_k * stride_k
    if PACK == 1:
        found = tl.load(tl.max_contiguous(p + i_element, (8, 4, 1)), mask=mask, other=0).to(tl.float32)
    else:
        p_words = p.to(tl.pointer_type(tl.int64)) + i_element
        words = tl.load(tl.max_contiguous(p_words, (8, 4, 1)), mask=mask, other=0)
        if PACK == 2:
            parts = tl.join(_element(words, 0, p), _element(words, 1, p))
        else:
            # Joined so that reshape puts elements 0, 1, 2, 3 in this order.
            even = tl.join(_element(words, 0, p), _element(words, 2, p))
            parts = tl.join(even, tl.join(_element(words, 1, p), _element(words, 3, p)))
        found = tl.reshape(parts, (BLOCK_HIDDEN, 2, BLOCK_HIDDEN // 2))
    return found


@triton.jit
def _element(words, INDEX: tl.constexpr, p):
    """Element INDEX of each word of 8 bytes, which holds elements of the type that p points to; in float32."""
    dtype: tl.constexpr = p.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    return (words >> (INDEX * BITS)).to(integer).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _step(own, x_r, x_z, x_n, b_h, w_r, w_z, w_n):
    """[BLOCK_HIDDEN]: the state after a step, from the one before (own) and what x and biases give to the gates."""
    h = tl.reshape(own, (2, own.shape[0] // 2))[None, :, :]
    r = _sigmoid(_sum(h * w_r) + x_r)
    z = _sigmoid(_sum(h * w_z) + x_z)
    n = _tanh(x_n + r * (_sum(h * w_n) + b_h))
    return n + z * (own - n)


@triton.jit
def _sum(products):
    """[BLOCK_HIDDEN, 2, BLOCK_HIDDEN // 2] -> [BLOCK_HIDDEN]: each half summed by the thread that has it, then both."""
    first, second = tl.split(tl.sum(products, 2))
    return first + second


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
def _token(
    i_step,
    i_batch,
    length,
    seq,
    starts,
    stride_t,
    stride_b,
    BACKWARD,
):
    """[BLOCK_BATCH], int64: offset of the token that each row takes at a step, in a tensor with these strides."""
    # starts: first token of each row's sequence
    t = tl.where(BACKWARD, length - 1 - i_step, i_step)
    return (starts + tl.maximum(t, 0)) * stride_t


@triton.jit
def _coming(
    gates,
    i_step,
    i_batch,
    length,
    seq,
    starts,
    stride_t,
    stride_b,
    BACKWARD,
    i_hidden,
    HIDDEN: tl.constexpr,
):
    """What x gives to r, z and n at a step, 0 past the end; and the step's token, 0 if it is not read from memory."""
    token = _token(i_step, i_batch, length, seq, starts, 1, 0, BACKWARD)
    p = gates + _place(token, i_step, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD) + i_hidden
    mask = (i_hidden < HIDDEN) & (i_step < length)
    r = tl.load(p, mask=mask, other=0)
    z = tl.load(p + HIDDEN, mask=mask, other=0)
    n = tl.load(p + 2 * HIDDEN, mask=mask, other=0)
    return r, z, n, token


@triton.jit
def _place(token, i_step, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD):
    """Offset of a step's token, as ``_coming`` returned it, in a tensor with these strides; int64."""
    return token * stride_t
