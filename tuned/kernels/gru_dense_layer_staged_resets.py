"""gru_dense_layer_staged_resets: a GRU over sequences of one length, one layer, with resets; units times rows, the columns in pieces and split over the warps.

@generated from templates/gru_staged.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The recurrence of torch.nn.GRU (reset after the product) over a whole sequence, in one launch:
    r = sigmoid(i_r + h_r), z = sigmoid(i_z + h_z), n = tanh(i_n + r h_n), h' = n + z (h - n),
where i = x @ weight_ih.T is given and (h_r, h_z, h_n) = h @ weight_hh.T; the kernel adds the biases.

A program owns BLOCK_HIDDEN units of BLOCK_BATCH rows, and keeps its rows of weight_hh in shared memory for all steps.
The weights leave no room there for the whole state, so it is multiplied in pieces of WIDTH columns, each in the place
of the one before. If not all weights fit, those of the first KEPT pieces stay, and the others are read at each step. A
program computes one direction after the other. It stores h' of its units to the output, where the other programs of the
rows wait for it (_wait). Programs wait for each other, so all must be on the GPU at once: a cooperative launch.
Arithmetic is in float32, and so is the state that a program keeps of its own units; what it stores, and others
multiply, is rounded once.
Names: i_ index, m_ mask, p_ pointer or offset in elements, w_ weights of h.
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
def _round_tf32(x, PRECISION: tl.constexpr):
    """To the nearest TF32: tensor cores only cut the low 13 bits off. NaN, whose bits could overflow, stays NaN."""
    if PRECISION == "tf32":
        x = tl.where(x == x, (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True), x)
    return x


@triton.constexpr_function
def _wait_assembly(bits, width, loads, first, some):
    """PTX: load ``loads`` times ``width`` elements of so many bits, again and again until none has all bits set.

    An element with all bits set is not stored yet. ``first`` says what is loaded before the first look: "all" loads;
    "one" load, again and again until it is there, and then all; or "none", since the elements were loaded before. With
    ``some``, each load is left out by itself unless its last element is to be waited for; otherwise all loads are left
    out unless the last element of the last one is. Operands, in the order of _wait_operands: the results, in words of
    32 bits; the same words as they are if nothing is waited for; a pointer for each element, of which only the first of
    a load is used; for each element, whether to wait. One maximum finds an element with all bits set, since that is the
    largest number; max.u16x2 (sm_90) takes two halves of a word at once.
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
    """The constraints of _wait_assembly. Results have the registers of the words as they are if nothing is awaited."""
    count = width * loads * bits // 32
    each = width * loads
    return ",".join(["=&r"] * count + [str(word) for word in range(count)] + ["l"] * each + ["r"] * each)


@triton.jit
def _wait(
    p_row,  # [BLOCK_BATCH] pointers to the first element of a row
    wait,  # [BLOCK_BATCH] whether the row may not be stored yet
    m_batch,  # [BLOCK_BATCH] whether there is such a row: see _tile
    HIDDEN: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    EXCHANGE: tl.constexpr,
    THREADS: tl.constexpr,
    PAST: tl.constexpr,
):
    """[BLOCK_BATCH, WIDTH]: elements of each row from START on, once they are stored; any value past HIDDEN.

    The programs of the rows store h' to the output, and all of them read it from there at the next step. EXCHANGE says
    how they wait for it:
    "spin": until no element has all bits set, with which the output was filled before the launch and which no result
        has; the loop is in PTX, one for each thread, so that no thread waits for another;
    "probe": as "spin", but first for one load of each thread, so that large tiles are not loaded in vain;
    "poll": as "spin", but with ordinary loads, on any NVIDIA GPU;
    "counter": the caller has waited until all programs of the rows have counted themselves;
    "none": not at all.

    No memory model orders the loads of "spin", "probe" and "poll" after the stores of the step before. The compiled
    code keeps that order, and tests check it: docs/decisions/0030.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    i_k = START + tl.arange(0, WIDTH)
    mask = (i_k < HIDDEN)[None, :]
    if PAST == "unread":
        mask &= m_batch[:, None]
        wait &= m_batch
    # The alignment that rows have because of their width, which the compiler cannot see (the caller sees to that of
    # h_0). Because of it Triton gives a thread as many neighbouring elements, and _wait_assembly depends on that.
    BYTES: tl.constexpr = HIDDEN * BITS // 8
    ALIGNED: tl.constexpr = 16 if BYTES % 16 == 0 else (8 if BYTES % 8 == 0 else (4 if BYTES % 4 == 0 else 1))
    p = tl.multiple_of(p_row[:, None] + i_k[None, :], (1, ALIGNED))
    if EXCHANGE == "spin" or EXCHANGE == "probe":
        # A thread has EACH elements, and the assembly makes up to eight loads at a time, of up to 16 bytes each.
        EACH: tl.constexpr = (p_row.shape[0] * WIDTH) // THREADS
        LOAD: tl.constexpr = EACH if EACH < 128 // BITS else 128 // BITS
        LOADS: tl.constexpr = EACH // LOAD if EACH < 8 * LOAD else 8
        # Rows that are not waited for. The layout of this load is that of the assembly's result, and its value an
        # operand, which keeps the assembly behind it: docs/decisions/0016 and 0030.
        x = tl.load(p, mask=mask & (wait == 0)[:, None], other=0).to(integer, bitcast=True)
        # All elements of a load have one pointer. Past HIDDEN it is that of the last elements: weights there are 0.
        p_load = p_row[:, None] + tl.minimum((i_k // LOAD) * LOAD, HIDDEN - LOAD)[None, :]
        x = tl.inline_asm_elementwise(
            _wait_assembly(BITS, LOAD, LOADS, "one" if EXCHANGE == "probe" else "all", PAST == "unread"),
            _wait_operands(BITS, LOAD, LOADS),
            [x, p_load, wait[:, None].to(tl.int32)],
            dtype=x.dtype,
            is_pure=True,  # otherwise a change of the result's layout would run it once more
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
    """As _wait, for rows that were stored before the launch: plain loads."""
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
    """Weights of r, z, n, [SPLITS, BLOCK_HIDDEN, WIDTH // SPLITS] each: a warp multiplies its part of the columns."""
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
    """[BLOCK_BATCH, WIDTH] of h as the second factor of _dot, [SPLITS, WIDTH // SPLITS, BLOCK_BATCH]."""
    h = tl.reshape(_round_tf32(h, PRECISION), (h.shape[0], SPLITS, h.shape[1] // SPLITS))
    return tl.permute(h, (1, 2, 0))


@triton.jit
def _dot(w, h, acc, PRECISION: tl.constexpr):
    # One product for each split, [BLOCK_HIDDEN, BLOCK_BATCH]: each warp multiplies its own part of the columns.
    return tl.dot(w, h, acc, input_precision=PRECISION)


@triton.jit
def _total(acc):
    """The sum over the splits, [BLOCK_HIDDEN, BLOCK_BATCH].

    tl.split makes Triton convert once, to a layout in which one thread has all splits of an element. A reduction across
    warps, as of tl.sum, takes several times as long.
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
    """The three sums, with the products of some more columns of h added."""
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
    """[BLOCK_BATCH], int64: offset of the token that each row takes at a step, in a tensor with these strides."""
    t = tl.where(BACKWARD, seq - 1 - i_step, i_step).to(tl.int64)
    return t * stride_t + i_batch.to(tl.int64) * stride_b


@triton.jit
def _marks(resets, i_step, m_step, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD):
    """[BLOCK_BATCH]: not 0 where a row's state is reset before a step; 0 outside of ``m_step``.

    A token's mark cuts between this token and the one before. Against the tokens' order, a row crosses that cut when it
    leaves the marked token, so the mark of the step before counts. The result is bytes, as they are in memory: a
    comparison here would wait for them, a step before they are needed.
    """
    i_marked = i_step - tl.where(BACKWARD, 1, 0)
    p_marked = _token(i_marked, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD)
    p_marked = resets.to(tl.pointer_type(tl.int8), bitcast=True) + p_marked
    return tl.load(p_marked, mask=m_step & (i_marked >= 0) & (i_marked < length), other=0)


@triton.jit
def _tile(i_tile, batch, BLOCK_BATCH: tl.constexpr, PAST: tl.constexpr):
    """The rows of a tile, [BLOCK_BATCH], and which of them are stored.

    Rows past the end of the batch are not stored, and existing rows are read in their place. All programs read a row
    from one place, and the more often they read it the longer that takes. PAST says what is read:
    "others": the tile's existing rows in turn; if all were the last row, a step would take up to half as long again;
    "last": the last row again; where tiles take turns, finding the others at each turn takes longer than it saves;
    "unread": the last row again, but nothing of the state (_wait leaves these rows out); for tiles with few rows.
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
    """What x gives to r, z and n at a step, and which elements have that step; 0 for others, and without ``use``."""
    p_token = _token(i_step, i_batch, length, seq, starts, stride_t, stride_b, BACKWARD)
    m_step = i_step < tl.minimum(t_stop, length)
    p = gates + p_token[None, :] + j_hidden
    m_step = mask & m_step[None, :]
    r = tl.load(p, mask=m_step & use, other=0)
    z = tl.load(p + HIDDEN, mask=m_step & use, other=0)
    n = tl.load(p + 2 * HIDDEN, mask=m_step & use, other=0)
    return r, z, n, m_step


@triton.jit(do_not_specialize=["batch", "seq", "t_begin", "t_end"])
def gru_dense_layer_staged_resets(
    all_gates,  # x @ weight_ih.T, 3 * HIDDEN a token and direction, gates in the order r, z, n
    all_weight_hh,  # [DIRECTIONS, 3 * HIDDEN, HIDDEN]
    bias_ih,  # [DIRECTIONS, 3 * HIDDEN]; any pointer if not BIAS
    bias_hh,
    all_h_0,  # [DIRECTIONS, batch, HIDDEN]
    all_out,  # DIRECTIONS * HIDDEN a token
    all_h_n,  # as all_h_0
    counters,  # int32, 32 for each direction and tile of rows, 0 before the launch; any pointer if nothing is counted
    batch,
    seq,
    t_begin,  # steps t_begin to t_end - 1: all, or one where a launch for each step is the barrier
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
    resets,  # a byte a token: not 0 if the state is 0 before its step
    resets_stride_t,
    resets_stride_b,
    HIDDEN: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,  # of a float32 product: "tf32" or "ieee"
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a piece, a power of two
    LAST: tl.constexpr,  # columns of the last piece, a power of two
    STAGES: tl.constexpr,  # pieces, at least two
    KEPT: tl.constexpr,  # so many pieces, from the first on, have their weights in shared memory; others are read
    EXCHANGE: tl.constexpr,
    EARLY: tl.constexpr,  # the gates of the next step are loaded before waiting for h, not after it
    THREADS: tl.constexpr,
    PAST: tl.constexpr,  # what is read in the place of rows past the end of the batch: see _tile
):
    dtype: tl.constexpr = all_out.dtype.element_ty
    unit_tiles: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    # This program's units and rows.
    i_program = tl.program_id(0)
    i_hidden = (i_program % unit_tiles) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    row_tiles = (batch + BLOCK_BATCH - 1) // BLOCK_BATCH
    i_tile = i_program // unit_tiles
    i_batch, m_batch = _tile(i_tile, batch, BLOCK_BATCH, PAST)
    out = all_out
    starts = out  # any pointer: nothing reads it
    length = tl.full((BLOCK_BATCH,), 0, tl.int32) + seq
    t_stop = t_end

    for i_direction in range(DIRECTIONS):
        i_cell = tl.zeros((), tl.int32) + i_direction
        backward = i_cell == 1 if DIRECTIONS == 2 else i_cell < 0
        weight_hh = all_weight_hh + i_cell.to(tl.int64) * weight_hh_stride
        h_0 = all_h_0 + i_cell.to(tl.int64) * h_0_stride_l
        out = all_out + tl.where(backward, HIDDEN, 0)
        gates = all_gates + tl.where(backward, 1, 0).to(tl.int64) * gates_stride_d
        counter = counters + (i_cell * row_tiles + i_tile) * 32
        marked = _marks(
            resets, t_begin, t_begin < length, i_batch, length, seq, starts, resets_stride_t, resets_stride_b, backward
        )  # fmt: skip
        weights = ()  # those of r, z and n, for each piece that is kept
        for i_piece in tl.static_range(KEPT):
            of_piece = _weights(
                weight_hh, i_hidden, HIDDEN, i_piece * WIDTH, WIDTH if i_piece + 1 < STAGES else LAST, SPLITS, PRECISION
            )
            weights += (of_piece,)

        # Indices and masks of results: j_hidden, j_batch, m_hidden, mask. Biases: b_r, b_z, and b_x and b_h of n.
        # Results are [BLOCK_HIDDEN, BLOCK_BATCH] if warps split the columns, else [BLOCK_BATCH, BLOCK_HIDDEN].
        j_hidden, j_batch = i_hidden[:, None], i_batch[None, :]
        m_hidden = (i_hidden < HIDDEN)[:, None]
        mask = m_hidden & m_batch[None, :]
        # The two biases of n stay apart: r multiplies only that of h.
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

        # Each row's state before this launch: where the last launch stored it, or h_0.
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

            # Wait for the state before this step, and multiply it, piece by piece. Compute r, z and the sum a_n.
            m_cut = i_step < length
            marks = marked
            # A row that is reset before this step: its own state is 0, and so is what the products below give it.
            cut = (marks != 0)[None, :]
            own = tl.where(cut, 0, own)
            # Where each row's state is: h_0 before its first step, else the output of its last step. Neither h_0 nor
            # what an earlier launch stored is waited for.
            done = tl.minimum(i_step, length)
            p_last = _token(done - 1, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
            p_state = tl.where(done == 0, h_0 + i_batch.to(tl.int64) * h_0_stride_b, out + p_last)
            m_wait = (done > 0) & (i_step > t_begin)
            if EXCHANGE == "counter":
                # Each of the unit_tiles programs of these rows adds 1 after the stores of a step (release). Once the
                # count has reached all earlier steps of this launch (acquire), the stores are visible; the barrier
                # holds all threads until then.
                if i_step > t_begin:
                    while tl.atomic_add(counter, 0, sem="acquire") < unit_tiles * (i_step - t_begin):
                        pass
                    tl.debug_barrier()
            # While one piece of the state is multiplied from shared memory, the next one is loaded to registers, and so
            # are its weights if they are not kept.
            if KEPT < STAGES:
                of_next = _weights(
                    weight_hh, i_hidden, HIDDEN, KEPT * WIDTH, WIDTH if KEPT + 1 < STAGES else LAST, SPLITS, PRECISION
                )
            h = _wait(p_state, m_wait, m_batch, HIDDEN, 0, WIDTH, EXCHANGE, THREADS, PAST)
            # Load the next step's marks behind the wait: loads return in order, and marks come from memory, so before
            # the wait they would make it longer. Where tiles take turns, nothing reads these.
            m_cut = i_step + 1 < length
            marked = _marks(
                resets, i_step + 1, m_cut, i_batch, length, seq, starts, resets_stride_t, resets_stride_b, backward
            )

            if not EARLY:  # else the caller has loaded them before the wait
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
            r = _sigmoid(tl.where(cut, 0, _total(a_r)) + x_r)
            z = _sigmoid(tl.where(cut, 0, _total(a_z)) + x_z)
            n = _tanh(x_n + r * (tl.where(cut, 0, _total(a_n)) + b_h))
            after = n + z * (own - n)
            # Keep the new state as own, in float32, and store it, rounded, for the other programs.
            own = after
            # Every NaN is stored as one pattern of bits, since all ones mean "not stored yet" to readers.
            bits = tl.where(own == own, own.to(tl.int32, bitcast=True), 0x7FC00000)
            rounded = bits.to(tl.float32, bitcast=True).to(dtype)
            p_out = _token(i_step, i_batch, length, seq, starts, out_stride_t, out_stride_b, backward)
            tl.store(out + p_out[None, :] + j_hidden, rounded, mask=m_now)
            if EXCHANGE == "counter":
                # After the barrier all threads have stored; the release makes their stores visible to readers.
                tl.debug_barrier()
                tl.atomic_add(counter, 1, sem="release")
            x_r, x_z, x_n = y_r.to(tl.float32) + b_r, y_z.to(tl.float32) + b_z, y_n.to(tl.float32) + b_x
            m_now = m_next

        if t_end >= seq:
            h_n = all_h_n + i_cell.to(tl.int64) * h_n_stride_l
            tl.store(h_n + j_batch.to(tl.int64) * h_n_stride_b + j_hidden, own.to(dtype), mask=mask)
