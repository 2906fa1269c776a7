"""gru_packed_layer_staged: a GRU over a PackedSequence, one layer; units times rows, the columns in pieces and split over the warps.

@generated from templates/gru_staged.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The recurrence of torch.nn.GRU (reset after the product) over a whole sequence, in one launch:
r = sigmoid(i_r + h_r), z = sigmoid(i_z + h_z), n = tanh(i_n + r h_n), h' = n + z (h - n), where i = x @ weight_ih.T
is given. A program owns BLOCK_HIDDEN units of BLOCK_BATCH rows, and keeps its rows of weight_hh in shared memory for
all steps. They leave no room there for the whole state: it is multiplied in pieces of WIDTH columns, each where the
one before it was. Of KEPT pieces alone the weights stay, if all have no room; the others are read at each step. One
direction comes after the other. h' goes to the output, where the other programs of the rows wait for it (_wait). All
programs must be on the GPU at once: a cooperative launch. Float32 inside and for a unit's own state, one rounding at
the store. Names: i_ index, m_ mask, p_ pointer or offset in elements, w_ weights of h.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Hyperbolic tangent: an odd polynomial near 0, else 1 - 2 / (1 + e^(2 x)), which is right at both ends, with no overflow to NaN.

    The second errs by a rounding of 1, which is much of a small result. The polynomial is within 2 roundings of its own.
    """
    y = x * x
    near = x * (1 + y * (-0.3333315 + y * (0.1332599 + y * (-0.05305295 + y * 0.01725699))))
    return tl.where(tl.abs(x) < 0.5, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _round_tf32(x, PRECISION: tl.constexpr):
    """To the nearest TF32, since the tensor cores only cut the low 13 bits off; NaN stays NaN, its bits could overflow."""
    if PRECISION == "tf32":
        x = tl.where(x == x, (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True), x)
    return x


@triton.constexpr_function
def _wait_assembly(bits, width, loads, first, some):
    """PTX: load ``loads`` times ``width`` elements of so many bits, until none of them is all ones.

    ``first``: what is loaded before it is looked at for the first time: "all" of them; "one", again and again, then all; or
    "none", which were loaded before. ``some``: a load is left out unless its last element is to be waited for; otherwise
    all are unless the last one of all is. Operands, in the order of _wait_operands: the elements, in words of 32 bits; the
    same, as they are if nothing is waited for; a pointer for each element, of which the first of a load counts; for each
    element whether to wait. The largest element tells whether one is all ones; max.u16x2 (sm_90) takes two halves at once.
    """
    words = width * bits // 32
    count = words * loads
    waits = 2 * count + width * loads
    maximum = "max.u16x2" if bits == 16 else "max.u32"
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    only = [f"@p{load} " if some else "" for load in range(loads)]
    lines = [".reg .pred missing;", ".reg .b32 most;"]
    if some:
        lines.append(f".reg .pred p<{loads}>;")
        lines += [f"setp.ne.u32 p{load}, ${waits + (load + 1) * width - 1}, 0;" for load in range(loads)]
    else:
        lines += [f"setp.eq.u32 missing, ${waits + loads * width - 1}, 0;", "@missing bra there;"]
    if first == "none":
        lines.append("bra look;")
    for label, loaded in (("probe", 1), ("again", loads)) if first == "one" else (("again", loads),):
        lines.append(f"{label}:")
        for load in range(loaded):
            into = ", ".join(f"${load * words + word}" for word in range(words))
            p_load = f"${2 * count + load * width}"
            lines.append(f"{only[load]}ld.relaxed.gpu.global{vector}.b32 " + "{" + into + "}" + f", [{p_load}];")
        if first == "none":
            lines.append("look:")
        lines.append("mov.b32 most, 0;" if some else "mov.b32 most, $0;")
        lines += [
            f"{only[word // words]}{maximum} most, most, ${word};" for word in range(0 if some else 1, words * loaded)
        ]
        if bits == 16:
            lines += ["setp.ge.u32 missing, most, 0xFFFF0000;", "and.b32 most, most, 0xFFFF;"]
            lines += ["setp.eq.or.u32 missing, most, 0xFFFF, missing;"]
        else:
            lines += ["setp.eq.u32 missing, most, 0xFFFFFFFF;"]
        lines.append(f"@missing bra {label};")
    return "\n".join(["{", *lines, "there:", "}"])


@triton.constexpr_function
def _wait_operands(bits, width, loads):
    """The constraints of _wait_assembly: results in the registers of what is there if nothing is waited for."""
    count = width * loads * bits // 32
    each = width * loads
    return ",".join(["=&r"] * count + [str(word) for word in range(count)] + ["l"] * each + ["r"] * each)


@triton.jit
def _wait(
    p_row,  # [BLOCK_BATCH] pointers to the first element of a row
    wait,  # [BLOCK_BATCH] whether it is still to come
    m_batch,  # [BLOCK_BATCH] whether there is such a row: see _tile
    HIDDEN: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    EXCHANGE: tl.constexpr,
    THREADS: tl.constexpr,
    PAST: tl.constexpr,
):
    """[BLOCK_BATCH, WIDTH]: elements from START on of each row, once they are there; anything past HIDDEN.

    The other programs of the rows write h' to the output, from where it is read at the next step. How it is waited for:
    EXCHANGE = "spin": until no 16 bytes of it hold the bits 11..1, with which the output was filled before the launch
        and which no result has; the loop is in PTX, one for each thread, so that nothing else waits;
    "probe": for the same, first for one load of each thread, so that large tiles are not loaded in vain;
    "poll": for the same with ordinary loads, on any GPU;
    "counter": until all programs of the rows have counted themselves, before this is called;
    "none": not at all.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    i_k = START + tl.arange(0, WIDTH)
    mask = (i_k < HIDDEN)[None, :]
    if PAST == "unread":
        mask &= m_batch[:, None]
        wait &= m_batch
    # What alignment rows have because of their width, where the compiler cannot see it (the caller sees to h_0's): it
    # gives a thread as many neighbours, and _wait_assembly depends on that.
    BYTES: tl.constexpr = HIDDEN * BITS // 8
    ALIGNED: tl.constexpr = 16 if BYTES % 16 == 0 else (8 if BYTES % 8 == 0 else (4 if BYTES % 4 == 0 else 1))
    p = tl.multiple_of(p_row[:, None] + i_k[None, :], (1, ALIGNED))
    if EXCHANGE == "spin" or EXCHANGE == "probe":
        # A thread has so many elements, of which it loads up to 16 bytes at a time, and eight loads at a time.
        EACH: tl.constexpr = (p_row.shape[0] * WIDTH) // THREADS
        LOAD: tl.constexpr = EACH if EACH < 128 // BITS else 128 // BITS
        LOADS: tl.constexpr = EACH // LOAD if EACH < 8 * LOAD else 8
        x = tl.load(p, mask=mask & (wait == 0)[:, None], other=0).to(integer, bitcast=True)
        # The same pointer for all elements of a load; past HIDDEN the last ones again, for the weights there are 0.
        p_load = p_row[:, None] + tl.minimum((i_k // LOAD) * LOAD, HIDDEN - LOAD)[None, :]
        x = tl.inline_asm_elementwise(
            _wait_assembly(BITS, LOAD, LOADS, "one" if EXCHANGE == "probe" else "all", PAST == "unread"),
            _wait_operands(BITS, LOAD, LOADS),
            [x, p_load, wait[:, None].to(tl.int32)],
            dtype=x.dtype,
            is_pure=True,  # or a change of its layout would run it once more
            pack=LOAD * LOADS,
        )
        return x.to(dtype, bitcast=True)
    else:
        x = tl.load(p, mask=mask, other=0, volatile=True)
        if EXCHANGE == "poll":
            while tl.max(tl.max(((x.to(integer, bitcast=True) == -1) & wait[:, None]).to(tl.int32), 1), 0) > 0:
                x = tl.load(p, mask=mask, other=0, volatile=True)
        return x


@triton.jit
def _plain(p_row, HIDDEN: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """As _wait, for rows that were there before the launch."""
    i_k = START + tl.arange(0, WIDTH)
    return tl.load(p_row[:, None] + i_k[None, :], mask=(i_k < HIDDEN)[None, :], other=0)


@triton.jit
def _weights(
    p,  # first element of a matrix [3 * HIDDEN, HIDDEN]
    i_hidden,
    HIDDEN: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Three gates of [SPLITS, BLOCK_HIDDEN, WIDTH // SPLITS]: a warp multiplies its own part of the columns."""
    PART: tl.constexpr = WIDTH // SPLITS
    i_k = START + tl.arange(0, SPLITS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    mask = (i_hidden < HIDDEN)[None, :, None] & (i_k < HIDDEN)
    p = p + i_hidden[None, :, None] * HIDDEN + i_k
    r = tl.load(p, mask=mask, other=0)
    z = tl.load(p + HIDDEN * HIDDEN, mask=mask, other=0)
    n = tl.load(p + 2 * HIDDEN * HIDDEN, mask=mask, other=0)
    return _round_tf32(r, PRECISION), _round_tf32(z, PRECISION), _round_tf32(n, PRECISION)


@triton.jit
def _operand(h, SPLITS: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_BATCH, WIDTH] of h as the other factor, [SPLITS, WIDTH // SPLITS, BLOCK_BATCH]."""
    h = tl.reshape(_round_tf32(h, PRECISION), (h.shape[0], SPLITS, h.shape[1] // SPLITS))
    return tl.permute(h, (1, 2, 0))


@triton.jit
def _dot(w, h, acc, PRECISION: tl.constexpr):
    return tl.dot(w, h, acc, input_precision=PRECISION)


@triton.jit
def _total(acc):
    """The sum over the splits, [BLOCK_HIDDEN, BLOCK_BATCH].

    Through tl.split, since that makes one conversion to a layout with all splits of an element in one thread;
    a reduction across warps takes several times as long.
    """
    SPLITS: tl.constexpr = acc.shape[0]
    acc = tl.permute(acc, (1, 2, 0))
    if SPLITS == 16:
        a, b = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1], 2, 2, 2, 2)))
        a, b = tl.split(a + b)
        a, b = tl.split(a + b)
        a, b = tl.split(a + b)
        return a + b
    elif SPLITS == 8:
        a, b = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1], 2, 2, 2)))
        a, b = tl.split(a + b)
        a, b = tl.split(a + b)
        return a + b
    elif SPLITS == 4:
        a, b = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1], 2, 2)))
        a, b = tl.split(a + b)
        return a + b
    elif SPLITS == 2:
        a, b = tl.split(acc)
        return a + b
    else:
        return tl.reshape(acc, (acc.shape[0], acc.shape[1]))


@triton.jit
def _products(w_r, w_z, w_n, h, a_r, a_z, a_n, PRECISION: tl.constexpr):
    """The three sums with the products of more columns."""
    return _dot(w_r, h, a_r, PRECISION), _dot(w_z, h, a_z, PRECISION), _dot(w_n, h, a_n, PRECISION)


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
    """[BLOCK_BATCH] offset of the token that a row takes at a step, in a tensor with these strides; int64."""
    # starts: first row of each step in the packed data; rows are sorted by length
    t = tl.where(BACKWARD, length - 1 - i_step, i_step)
    return (tl.load(starts + tl.minimum(tl.maximum(t, 0), seq - 1)) + i_batch) * stride_t


@triton.jit
def _tile(i_tile, batch, BLOCK_BATCH: tl.constexpr, PAST: tl.constexpr):
    """[BLOCK_BATCH] rows of a tile, and which of them are stored.

    Rows past the end are not stored. All programs read a row from one place, which takes longer the more often they do. PAST:
    "others": they are the tile's other rows in turn; if all were the last one, a step would take up to half as long again;
    "last": the last row again. Where tiles take turns, finding the others at each turn takes longer than it saves;
    "unread": none of them is read from the state (_wait), where a tile has few rows.
    """
    i_row = tl.arange(0, BLOCK_BATCH)
    i_batch = i_tile * BLOCK_BATCH + i_row
    m_batch = i_batch < batch
    if PAST == "others":
        i_batch = i_tile * BLOCK_BATCH + i_row % tl.minimum(batch - i_tile * BLOCK_BATCH, BLOCK_BATCH)
    else:
        i_batch = tl.minimum(i_batch, batch - 1)
    return i_batch, m_batch


@triton.jit
def _gates(
    gates,
    i_step,
    t_stop,
    i_batch,
    length,
    seq,
    starts,
    stride_t,
    stride_b,
    BACKWARD,
    use,
    j_hidden,
    mask,
    HIDDEN: tl.constexpr,
):
    """What x gives to the gates r, z and n of a step, and which elements have such a step; 0 where it is not used."""
    p_token = _token(i_step, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD)
    m_step = i_step < tl.minimum(t_stop, length)
    p = gates + p_token[None, :] + j_hidden
    m_step = mask & m_step[None, :]
    r = tl.load(p, mask=m_step & use, other=0)
    z = tl.load(p + HIDDEN, mask=m_step & use, other=0)
    n = tl.load(p + 2 * HIDDEN, mask=m_step & use, other=0)
    return r, z, n, m_step


@triton.jit(do_not_specialize=["batch", "seq", "t_begin", "t_end"])
def gru_packed_layer_staged(
    all_gates,  # x @ weight_ih.T, 3 * HIDDEN a token, gates in the order r, z, n; for each direction
    all_weight_hh,  # [DIRECTIONS, 3 * HIDDEN, HIDDEN]
    bias_ih,  # [DIRECTIONS, 3 * HIDDEN]; any pointer if not BIAS
    bias_hh,
    all_h_0,  # [DIRECTIONS, batch, HIDDEN]
    all_out,  # DIRECTIONS * HIDDEN a token
    all_h_n,  # as all_h_0
    counters,  # int32, 32 for each direction and row of programs, 0 before the launch; any pointer if nothing is counted
    starts,  # packed: [seq] int64, thd: [batch + 1] int32
    lengths,  # [batch] int32, at most seq
    batch,
    seq,
    t_begin,  # the steps of this launch: all, where no launch of one program each is a barrier
    t_end,
    gates_stride_d,
    gates_stride_t,
    gates_stride_b,
    weight_hh_stride,
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
    PRECISION: tl.constexpr,  # of a float32 product: "tf32" or "ieee"
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a piece, a power of two
    LAST: tl.constexpr,  # those of the last one
    STAGES: tl.constexpr,  # pieces, at least two
    KEPT: tl.constexpr,  # of these, the weights of so many stay in shared memory; the others are read at each step
    EXCHANGE: tl.constexpr,
    EARLY: tl.constexpr,  # the gates of the next step are loaded before waiting for h, not after it
    THREADS: tl.constexpr,
    PAST: tl.constexpr,  # what rows past the end of a tile are: see _tile
):
    dtype: tl.constexpr = all_out.dtype.element_ty
    unit_tiles: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    # Which units of which rows.
    i_program = tl.program_id(0)
    i_hidden = (i_program % unit_tiles) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    row_tiles = (batch + BLOCK_BATCH - 1) // BLOCK_BATCH
    i_tile = i_program // unit_tiles
    i_batch, m_batch = _tile(i_tile, batch, BLOCK_BATCH, PAST)
    out = all_out
    length = tl.load(lengths + i_batch)
    t_stop = tl.minimum(t_end, tl.max(length, 0))

    for i_direction in range(DIRECTIONS):
        i_cell = tl.zeros((), tl.int32) + i_direction
        backward = i_cell == 1 if DIRECTIONS == 2 else i_cell < 0
        weight_hh = all_weight_hh + i_cell.to(tl.int64) * weight_hh_stride
        h_0 = all_h_0 + i_cell.to(tl.int64) * h_0_stride_l
        out = all_out + tl.where(backward, HIDDEN, 0)
        gates = all_gates + tl.where(backward, 1, 0).to(tl.int64) * gates_stride_d
        counter = counters + (i_cell * row_tiles + i_tile) * 32
        weights = ()  # of each piece that is kept
        for i_piece in tl.static_range(KEPT):
            of_piece = _weights(
                weight_hh, i_hidden, HIDDEN, i_piece * WIDTH, WIDTH if i_piece + 1 < STAGES else LAST, SPLITS, PRECISION
            )
            weights += (of_piece,)

        # The shape of results: j_hidden, j_batch, m_hidden, mask. The biases: b_r, b_z, b_x of x, b_h of h.
        # Results are [BLOCK_HIDDEN, BLOCK_BATCH] where the columns are split, otherwise [BLOCK_BATCH, BLOCK_HIDDEN].
        j_hidden, j_batch = i_hidden[:, None], i_batch[None, :]
        m_hidden = (i_hidden < HIDDEN)[:, None]
        mask = m_hidden & m_batch[None, :]
        b_r = tl.zeros(mask.shape, tl.float32)
        b_z = tl.zeros(mask.shape, tl.float32)
        b_x = tl.zeros(mask.shape, tl.float32)
        b_h = tl.zeros(mask.shape, tl.float32)
        if BIAS:
            p_ih = bias_ih + i_cell.to(tl.int64) * bias_ih_stride + j_hidden
            p_hh = bias_hh + i_cell.to(tl.int64) * bias_hh_stride + j_hidden
            b_r += tl.load(p_ih, mask=m_hidden, other=0).to(tl.float32)
            b_r += tl.load(p_hh, mask=m_hidden, other=0).to(tl.float32)
            b_z += tl.load(p_ih + HIDDEN, mask=m_hidden, other=0).to(tl.float32)
            b_z += tl.load(p_hh + HIDDEN, mask=m_hidden, other=0).to(tl.float32)
            b_x += tl.load(p_ih + 2 * HIDDEN, mask=m_hidden, other=0).to(tl.float32)
            b_h += tl.load(p_hh + 2 * HIDDEN, mask=m_hidden, other=0).to(tl.float32)

        # Where each row's state was left: by the last launch, or h_0.
        done = tl.minimum(t_begin, length)
        p_last = _token(done - 1, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
        p_state = tl.where(done == 0, h_0 + i_batch.to(tl.int64) * h_0_stride_b, out + p_last)  # [BLOCK_BATCH]
        own = tl.load(p_state[None, :] + j_hidden, mask=mask, other=0).to(tl.float32)

        use = True
        x_r, x_z, x_n, m_now = _gates(
            gates, t_begin, t_stop, i_batch, length, seq, starts, gates_stride_t, gates_stride_b,
            backward, use, j_hidden, mask, HIDDEN,
        )  # fmt: skip
        x_r, x_z, x_n = x_r.to(tl.float32) + b_r, x_z.to(tl.float32) + b_z, x_n.to(tl.float32) + b_x

        for i_step in range(t_begin, t_stop):
            if EARLY:
                y_r, y_z, y_n, m_next = _gates(
                    gates, i_step + 1, t_stop, i_batch, length, seq, starts, gates_stride_t, gates_stride_b,
                    backward, use, j_hidden, mask, HIDDEN,
                )  # fmt: skip
            a_r = tl.zeros((SPLITS, BLOCK_HIDDEN, BLOCK_BATCH), tl.float32)
            a_z = a_r
            a_n = a_r

            # What the last step gave, once it is there, piece by piece. Then r and z, and a_n.
            done = tl.minimum(i_step, length)
            p_last = _token(done - 1, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
            p_state = tl.where(done == 0, h_0 + i_batch.to(tl.int64) * h_0_stride_b, out + p_last)
            m_wait = (done > 0) & (i_step > t_begin)
            if EXCHANGE == "counter":
                if i_step > t_begin:
                    while tl.atomic_add(counter, 0, sem="acquire") < unit_tiles * (i_step - t_begin):
                        pass
                    tl.debug_barrier()
            # One piece is multiplied from shared memory while the next one comes to registers. So do weights that are not kept.
            if KEPT < STAGES:
                of_next = _weights(
                    weight_hh, i_hidden, HIDDEN, KEPT * WIDTH, WIDTH if KEPT + 1 < STAGES else LAST, SPLITS, PRECISION
                )
            h = _wait(p_state, m_wait, m_batch, HIDDEN, 0, WIDTH, EXCHANGE, THREADS, PAST)

            if not EARLY:
                y_r, y_z, y_n, m_next = _gates(
                    gates, i_step + 1, t_stop, i_batch, length, seq, starts, gates_stride_t, gates_stride_b,
                    backward, use, j_hidden, mask, HIDDEN,
                )  # fmt: skip
            for i_piece in tl.static_range(STAGES):
                if i_piece + 1 < STAGES:
                    h_next = _wait(
                        p_state, m_wait, m_batch, HIDDEN, (i_piece + 1) * WIDTH, WIDTH if i_piece + 2 < STAGES else LAST,
                        EXCHANGE, THREADS, PAST,
                    )  # fmt: skip
                w_r, w_z, w_n = weights[i_piece] if i_piece < KEPT else of_next
                if i_piece >= KEPT and i_piece + 1 < STAGES:
                    of_next = _weights(
                        weight_hh, i_hidden, HIDDEN, (i_piece + 1) * WIDTH, WIDTH if i_piece + 2 < STAGES else LAST, SPLITS,
                        PRECISION,
                    )  # fmt: skip
                a_r, a_z, a_n = _products(w_r, w_z, w_n, _operand(h, SPLITS, PRECISION), a_r, a_z, a_n, PRECISION)
                if i_piece + 1 < STAGES:
                    h = h_next
            r = _sigmoid(_total(a_r) + x_r)
            z = _sigmoid(_total(a_z) + x_z)
            n = _tanh(x_n + r * (_total(a_n) + b_h))
            after = n + z * (own - n)
            # The new state: own, which stays here, and what the other programs read.
            own = tl.where(m_now, after, own)
            # NaN gets one pattern of bits, which is not the one that readers wait to see go away.
            bits = tl.where(own == own, own.to(tl.int32, bitcast=True), 0x7FC00000)
            rounded = bits.to(tl.float32, bitcast=True).to(dtype)
            p_out = _token(i_step, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
            tl.store(out + p_out[None, :] + j_hidden, rounded, mask=m_now)
            if EXCHANGE == "counter":
                tl.debug_barrier()
                tl.atomic_add(counter, 1, sem="release")
            x_r, x_z, x_n = y_r.to(tl.float32) + b_r, y_z.to(tl.float32) + b_z, y_n.to(tl.float32) + b_x
            m_now = m_next

        if t_end >= seq:
            h_n = all_h_n + i_cell.to(tl.int64) * h_n_stride_l
            tl.store(h_n + j_batch.to(tl.int64) * h_n_stride_b + j_hidden, own.to(dtype), mask=mask)
