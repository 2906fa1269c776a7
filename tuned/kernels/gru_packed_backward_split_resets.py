"""gru_packed_backward_split_resets: a GRU over a PackedSequence, one layer, with resets; units times rows, the columns split over the warps.

@generated from templates/gru_backward.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

The gradient of the recurrence of torch.nn.GRU over a whole sequence, in one launch, from the last step of each row to
its first: step 0 is a row's last one. A step of the forward is
    r = sigmoid(i_r + h_r), z = sigmoid(i_z + h_z), n = tanh(i_n + r h_n), h' = n + z (h - n).
With d the gradient of h', the sum of that of the output and that from the step after it in time, the gradients of what
tanh and the two sigmoids are taken of, and of h_n, are
    d_n = d (1 - z) (1 - n^2), d_z = d (h - n) z (1 - z), d_r = d_n h_n r (1 - r), d_h = d_n r,
and the gradient of h is d z + (d_h, d_r, d_z) @ weight_hh, with the rows of weight_hh in the order n, r, z. All but d
is known before the launch.

A program owns BLOCK_HIDDEN units in one direction, and keeps their columns of weight_hh on chip for all steps. It has
one tile of BLOCK_BATCH rows, or several in turn. It stores d_h, d_r and d_z of its units to grads: the message of a
step, for which the other programs of the rows wait (_wait). One step after its last one, a row only receives a message,
and stores the gradient of its h_0. Where programs wait for each other, all must be on the GPU at once: a cooperative
launch. Arithmetic is in float32, and so is the gradient that a program keeps of its own units; what it stores is
rounded once. Names: i_ index, m_ mask, p_ pointer or offset in elements, w_ weights.
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
def _look(p_row, there, COLUMNS: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """[BLOCK_BATCH, WIDTH]: elements of messages from START on as they are now; 0 past COLUMNS and without one."""
    i_k = START + tl.arange(0, WIDTH)
    # The alignment that rows have because of their width, which the compiler cannot see.
    BYTES: tl.constexpr = COLUMNS * p_row.dtype.element_ty.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if BYTES % 16 == 0 else (8 if BYTES % 8 == 0 else (4 if BYTES % 4 == 0 else 1))
    p = tl.multiple_of(p_row[:, None] + i_k[None, :], (1, ALIGNED))
    return tl.load(p, mask=(i_k < COLUMNS)[None, :] & there[:, None], other=0, volatile=True)


@triton.jit
def _wait(
    x,  # what _look found
    p_row,  # [BLOCK_BATCH] pointers to the first element of a message
    there,  # [BLOCK_BATCH] whether the row has a message
    wait,  # [BLOCK_BATCH] whether the message may not be stored yet
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    EXCHANGE: tl.constexpr,
    THREADS: tl.constexpr,
    PAST: tl.constexpr,
):
    """[BLOCK_BATCH, WIDTH]: elements of messages from START on, once they are stored.

    EXCHANGE says how a program waits for them:
    "spin": until no element has all bits set, with which grads was filled before the launch and which no gradient has;
        the loop is in PTX, one for each thread, so that no thread waits for another. A thread waits for all of its rows
        or for none, so the rows of a tile must end at the same step;
    "poll": as "spin", but with ordinary loads, on any NVIDIA GPU, and each row by itself;
    "counter": the caller has waited until all programs of the rows have counted themselves;
    "none": not at all.

    No memory model orders the loads of "spin" and "poll" after the stores of the step before. The compiled code keeps
    that order, and tests check it: docs/decisions/0030.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    BITS: tl.constexpr = dtype.primitive_bitwidth
    integer: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    if EXCHANGE == "spin":
        # A thread has EACH elements, and the assembly makes up to eight loads at a time, of up to 16 bytes each.
        EACH: tl.constexpr = (p_row.shape[0] * WIDTH) // THREADS
        LOAD: tl.constexpr = EACH if EACH < 128 // BITS else 128 // BITS
        LOADS: tl.constexpr = EACH // LOAD if EACH < 8 * LOAD else 8
        # All elements of a load have one pointer. Past the message it is that of the last elements: weights there are
        # 0.
        i_k = START + tl.arange(0, WIDTH)
        p_load = p_row[:, None] + tl.minimum((i_k // LOAD) * LOAD, COLUMNS - LOAD)[None, :]
        x = x.to(integer, bitcast=True)
        x = tl.inline_asm_elementwise(
            _wait_assembly(BITS, LOAD, LOADS, "none", PAST == "unread"),
            _wait_operands(BITS, LOAD, LOADS),
            [x, p_load, wait[:, None].to(tl.int32)],
            dtype=x.dtype,
            is_pure=True,  # otherwise a change of the result's layout would run it once more
            pack=LOAD * LOADS,
        )
        x = x.to(dtype, bitcast=True)
    if EXCHANGE == "poll":
        while tl.max(tl.max(((x.to(integer, bitcast=True) == -1) & wait[:, None]).to(tl.int32), 1), 0) > 0:
            x = _look(p_row, there, COLUMNS, START, WIDTH)
    return x


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
    # starts: first row of each step in the packed data; rows are sorted by length
    t = tl.where(BACKWARD, length - 1 - i_step, i_step)
    return (tl.load(starts + tl.minimum(tl.maximum(t, 0), seq - 1)) + i_batch) * stride_t


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
def _rows(i_tile, batch, seq, all_starts, all_lengths, BLOCK_BATCH: tl.constexpr, PAST: tl.constexpr):
    """For the rows of a tile: i_batch, m_batch, length, start; and i_spare, the spare row, with its start and length.

    Rows past the end are as in _tile. A row without a token reads the state of the spare row, which has tokens if a row
    of the tile has: all rows that a thread looks at must wait alike.
    """
    i_batch, m_batch = _tile(i_tile, batch, BLOCK_BATCH, PAST)
    return i_batch, m_batch, tl.load(all_lengths + i_batch), all_starts, 0, 0, 0


@triton.jit
def _last_step(t_end, i_set, sets, turns, batch, all_lengths, BLOCK_BATCH: tl.constexpr):
    """The step before which a program ends: t_end of the launch, or the length of its longest row if that is less."""
    longest = 0
    for i_turn in range(turns):
        i_batch = (i_set + i_turn * sets) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
        longest = tl.maximum(longest, tl.max(tl.load(all_lengths + tl.minimum(i_batch, batch - 1)), 0))
    t_end = tl.minimum(t_end, longest)
    return t_end


@triton.jit
def _columns(
    p,  # first element of a matrix [3 * HIDDEN, HIDDEN]
    i_hidden,
    HIDDEN: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[SPLITS, BLOCK_HIDDEN, WIDTH // SPLITS] of weight_hh, with its rows in the order of a message: n, r, z."""
    PART: tl.constexpr = WIDTH // SPLITS
    i_k = START + tl.arange(0, SPLITS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    i_unit = i_hidden[None, :, None]
    # weight_hh itself has the rows of n last.
    i_row = tl.where(i_k < HIDDEN, i_k + 2 * HIDDEN, i_k - HIDDEN)
    mask = (i_unit < HIDDEN) & (i_k < 3 * HIDDEN)
    return _round_tf32(tl.load(p + i_row * HIDDEN + i_unit, mask=mask, other=0), PRECISION)


@triton.jit
def _terms(
    gates,
    hidden,
    before,
    grad_out,
    i_step,
    t_stop,
    i_batch,
    length,
    seq,
    start,
    token_stride_t,
    token_stride_b,
    grad_out_stride_t,
    grad_out_stride_b,
    AGAINST,
    j_hidden,
    mask,
    HIDDEN: tl.constexpr,
):
    """What was stored for a step, 0 where there is no such step; and which elements have the step.

    That is what x and what h give to r, z and n, the state before the step, and the gradient of the output.
    """
    i_token = _token(i_step, i_batch, length, seq, start, token_stride_t, token_stride_b, AGAINST)
    p_grad = _token(i_step, i_batch, length, seq, start, grad_out_stride_t, grad_out_stride_b, AGAINST)
    m_step = mask & (i_step < tl.minimum(t_stop, length))[None, :]
    p_parts = (i_token * (3 * HIDDEN))[None, :] + j_hidden
    x_r = tl.load(gates + p_parts, mask=m_step, other=0)
    x_z = tl.load(gates + p_parts + HIDDEN, mask=m_step, other=0)
    x_n = tl.load(gates + p_parts + 2 * HIDDEN, mask=m_step, other=0)
    h_r = tl.load(hidden + p_parts, mask=m_step, other=0)
    h_z = tl.load(hidden + p_parts + HIDDEN, mask=m_step, other=0)
    h_n = tl.load(hidden + p_parts + 2 * HIDDEN, mask=m_step, other=0)
    h = tl.load(before + (i_token * HIDDEN)[None, :] + j_hidden, mask=m_step, other=0)
    d = tl.load(grad_out + p_grad[None, :] + j_hidden, mask=m_step, other=0)
    return x_r, x_z, x_n, h_r, h_z, h_n, h, d, m_step


@triton.jit
def _factors(x_r, x_z, x_n, h_r, h_z, h_n, h, d, b_r, b_z, b_x, b_h):
    """r, z, f_n, f_z and f_r of a step, where d_n = d f_n, d_z = d f_z, d_r = d_n f_r; the gradient of its output."""
    r = _sigmoid(x_r.to(tl.float32) + h_r.to(tl.float32) + b_r)
    z = _sigmoid(x_z.to(tl.float32) + h_z.to(tl.float32) + b_z)
    part = h_n.to(tl.float32) + b_h
    n = _tanh(x_n.to(tl.float32) + b_x + r * part)
    f_n = (1 - z) * (1 - n * n)
    f_z = (h.to(tl.float32) - n) * z * (1 - z)
    f_r = part * r * (1 - r)
    return r, z, f_n, f_z, f_r, d.to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """In the dtype of a message. Every NaN becomes one pattern of bits, since all ones mean "not stored yet"."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit(do_not_specialize=["tokens", "batch", "seq", "sets", "t_begin", "t_end"])
def gru_packed_backward_split_resets(
    gates,  # 3 * HIDDEN a token and direction: i_r, i_z, i_n without biases
    hidden,  # as gates: h_r, h_z, h_n without biases
    before,  # HIDDEN a token and direction: the state before its step
    weight_hh,  # [DIRECTIONS, 3 * HIDDEN, HIDDEN]
    bias_ih,  # [DIRECTIONS, 3 * HIDDEN]; any pointer if not BIAS
    bias_hh,
    grad_out,  # DIRECTIONS * HIDDEN a token
    grad_h_n,  # [DIRECTIONS, batch, HIDDEN]
    grads,  # 4 * HIDDEN a token and direction: d_h, d_r, d_z, which are the message, and d_n
    grad_h_0,  # as grad_h_n
    states,  # float32 [DIRECTIONS, batch, HIDDEN], contiguous, of any content; any pointer for one turn and one launch
    counters,  # int32, 32 for each tile of rows, 0 before the launch; any pointer if nothing is counted
    all_starts,  # packed: [seq] int64, thd: [batch + 1] int32; any pointer if sequences have one length
    all_lengths,  # [batch] int32, at most seq; any pointer likewise
    tokens,
    batch,
    seq,
    sets,  # programs that share the tiles of rows among them, for each tile of units and direction
    t_begin,  # steps t_begin to t_end - 1 of seq + 1: all, or one where a launch for each step is the barrier
    t_end,
    token_stride_t,  # from one token to the next, in tokens
    token_stride_b,
    weight_hh_stride,
    bias_ih_stride,
    bias_hh_stride,
    grad_out_stride_t,
    grad_out_stride_b,
    grad_h_n_stride_l,
    grad_h_n_stride_b,
    grad_h_0_stride_l,
    grad_h_0_stride_b,
    resets,  # a byte a token: not 0 if the state was 0 before its step
    resets_stride_t,
    resets_stride_b,
    HIDDEN: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,  # of a float32 product: "tf32" or "ieee"
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH_0: tl.constexpr,  # widths of up to three pieces of a message, powers of two; 0: no such piece
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    EXCHANGE: tl.constexpr,
    EARLY: tl.constexpr,  # the terms of the next turn are loaded before waiting for a message, not after it
    IN_TURN: tl.constexpr,  # a program has several tiles of rows, in turn at each step
    THREADS: tl.constexpr,
    PAST: tl.constexpr,  # what is read in the place of rows past the end of the batch: see _tile
):
    dtype: tl.constexpr = grads.dtype.element_ty
    unit_tiles: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    i_program = tl.program_id(0)
    i_hidden = (i_program % unit_tiles) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)
    row_tiles = (batch + BLOCK_BATCH - 1) // BLOCK_BATCH
    i_cell = (i_program // unit_tiles) // sets  # direction
    i_set = (i_program // unit_tiles) % sets
    if IN_TURN:
        turns = (row_tiles - i_set + sets - 1) // sets
    else:
        turns = 1
    # Steps go from a row's last one to its first, so the forward direction is taken against the tokens' order.
    against = i_cell == 0 if DIRECTIONS == 2 else i_cell >= 0

    weight_hh += i_cell.to(tl.int64) * weight_hh_stride
    w_0 = _columns(weight_hh, i_hidden, HIDDEN, 0, WIDTH_0, SPLITS, PRECISION)
    if WIDTH_1 > 0:
        w_1 = _columns(weight_hh, i_hidden, HIDDEN, WIDTH_0, WIDTH_1, SPLITS, PRECISION)
    if WIDTH_2 > 0:
        w_2 = _columns(weight_hh, i_hidden, HIDDEN, WIDTH_0 + WIDTH_1, WIDTH_2, SPLITS, PRECISION)

    # One step more than the longest row has, to receive the last message.
    t_stop = _last_step(t_end - 1, i_set, sets, turns, batch, all_lengths, BLOCK_BATCH) + 1
    i_batch, m_batch, length, start, _, _, _ = _rows(i_set, batch, seq, all_starts, all_lengths, BLOCK_BATCH, PAST)
    next_batch, next_length, next_start = i_batch, length, start

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
    next_mask = mask
    # At step 0 there is no mark: the gradient of h_n belongs to a state that was not reset afterwards.
    marked = _marks(
        resets, t_begin, t_begin > 0, i_batch, length, seq, start, resets_stride_t, resets_stride_b, against
    )  # fmt: skip

    gates += i_cell.to(tl.int64) * tokens * (3 * HIDDEN)
    hidden += i_cell.to(tl.int64) * tokens * (3 * HIDDEN)
    before += i_cell.to(tl.int64) * tokens * HIDDEN
    grads += i_cell.to(tl.int64) * tokens * (4 * HIDDEN)
    grad_out += i_cell * HIDDEN
    grad_h_n += i_cell.to(tl.int64) * grad_h_n_stride_l
    grad_h_0 += i_cell.to(tl.int64) * grad_h_0_stride_l
    states += i_cell.to(tl.int64) * batch * HIDDEN
    p_own = states + j_batch.to(tl.int64) * HIDDEN + j_hidden
    counter = counters + (i_cell * row_tiles + i_set) * 32

    if not IN_TURN:
        own = tl.load(p_own, mask=mask & (t_begin > 0), other=0)
        given = tl.load(grad_h_n + j_batch.to(tl.int64) * grad_h_n_stride_b + j_hidden, mask=mask, other=0)
        own = tl.where(t_begin > 0, own, given.to(tl.float32))

    x_r, x_z, x_n, h_r, h_z, h_n, h, d, m_now = _terms(
        gates, hidden, before, grad_out, t_begin, t_stop, i_batch, length, seq, start, token_stride_t, token_stride_b,
        grad_out_stride_t, grad_out_stride_b, against, j_hidden, mask, HIDDEN,
    )  # fmt: skip
    r, z, f_n, f_z, f_r, g_out = _factors(x_r, x_z, x_n, h_r, h_z, h_n, h, d, b_r, b_z, b_x, b_h)

    for i_turn in range(t_begin * turns, t_stop * turns):
        i_step = i_turn // turns
        if IN_TURN:
            i_tile = i_set + (i_turn % turns) * sets
            i_batch, m_batch, length, start, _, _, _ = _rows(
                i_tile, batch, seq, all_starts, all_lengths, BLOCK_BATCH, PAST
            )
            j_batch = i_batch[None, :]
            mask = m_hidden & m_batch[None, :]
            p_own = states + j_batch.to(tl.int64) * HIDDEN + j_hidden
            counter = counters + (i_cell * row_tiles + i_tile) * 32
            given = tl.load(
                grad_h_n + j_batch.to(tl.int64) * grad_h_n_stride_b + j_hidden, mask=mask & (i_step == 0), other=0
            )
            tl.debug_barrier()  # a thread may read what another thread of this program stored to states
            own = tl.where(i_step > 0, tl.load(p_own, mask=mask & (i_step > 0), other=0), given.to(tl.float32))
            i_next = i_set + ((i_turn + 1) % turns) * sets
            next_batch, m_next_batch, next_length, next_start, _, _, _ = _rows(
                i_next, batch, seq, all_starts, all_lengths, BLOCK_BATCH, PAST
            )
            next_mask = m_hidden & m_next_batch[None, :]
        if EARLY:
            x_r, x_z, x_n, h_r, h_z, h_n, h, d, m_next = _terms(
                gates, hidden, before, grad_out, (i_turn + 1) // turns, t_stop, next_batch, next_length, seq,
                next_start, token_stride_t, token_stride_b, grad_out_stride_t, grad_out_stride_b, against, j_hidden,
                next_mask, HIDDEN,
            )  # fmt: skip

        # The message of the step before: d_h, d_r and d_z of all units. Step 0 has none, nor has a row that has ended.
        # A message that an earlier launch stored is not waited for.
        m_had = (i_step > 0) & (i_step <= length)
        if PAST == "unread":
            m_had &= m_batch
        m_wait = m_had & (i_step > t_begin)
        i_last = tl.maximum(tl.minimum(i_step, length) - 1, 0)
        i_token = _token(i_last, i_batch, length, seq, start, token_stride_t, token_stride_b, against)
        p_message = grads + i_token * (4 * HIDDEN)
        if EXCHANGE == "counter":
            # Each of the unit_tiles programs of these rows adds 1 after it has stored a message (release). Once the
            # count has reached all earlier steps of this launch (acquire), the messages are visible; the barrier holds
            # all threads until then.
            if i_step > t_begin:
                while tl.atomic_add(counter, 0, sem="acquire") < unit_tiles * (i_step - t_begin):
                    pass
                tl.debug_barrier()
        # Once the first piece is there, the others most likely are too: load both, then wait for what is not there.
        COLUMNS: tl.constexpr = 3 * HIDDEN
        d_0 = _look(p_message, m_had, COLUMNS, 0, WIDTH_0)
        d_0 = _wait(d_0, p_message, m_had, m_wait, COLUMNS, 0, WIDTH_0, EXCHANGE, THREADS, PAST)
        if WIDTH_1 > 0:
            d_1 = _look(p_message, m_had, COLUMNS, WIDTH_0, WIDTH_1)
        if WIDTH_2 > 0:
            d_2 = _look(p_message, m_had, COLUMNS, WIDTH_0 + WIDTH_1, WIDTH_2)
        if WIDTH_1 > 0:
            d_1 = _wait(d_1, p_message, m_had, m_wait, COLUMNS, WIDTH_0, WIDTH_1, EXCHANGE, THREADS, PAST)
        if WIDTH_2 > 0:
            d_2 = _wait(d_2, p_message, m_had, m_wait, COLUMNS, WIDTH_0 + WIDTH_1, WIDTH_2, EXCHANGE, THREADS, PAST)
        # Where a state was reset before the next step in time, no gradient comes from that step. Marks are loaded a
        # turn ahead, and behind the wait: loads return in order, and marks come from memory.
        cut = (marked != 0)[None, :]
        own = tl.where(cut, 0, own)
        marked = _marks(
            resets, (i_turn + 1) // turns, (i_turn + 1) // turns > 0, next_batch, next_length, seq, next_start,
            resets_stride_t, resets_stride_b, against,
        )  # fmt: skip
        if not EARLY:
            x_r, x_z, x_n, h_r, h_z, h_n, h, d, m_next = _terms(
                gates, hidden, before, grad_out, (i_turn + 1) // turns, t_stop, next_batch, next_length, seq,
                next_start, token_stride_t, token_stride_b, grad_out_stride_t, grad_out_stride_b, against, j_hidden,
                next_mask, HIDDEN,
            )  # fmt: skip
        acc = tl.zeros((SPLITS, BLOCK_HIDDEN, BLOCK_BATCH), tl.float32)
        acc = _dot(w_0, _operand(d_0, SPLITS, PRECISION), acc, PRECISION)
        if WIDTH_1 > 0:
            acc = _dot(w_1, _operand(d_1, SPLITS, PRECISION), acc, PRECISION)
        if WIDTH_2 > 0:
            acc = _dot(w_2, _operand(d_2, SPLITS, PRECISION), acc, PRECISION)
        own += tl.where(cut, 0, _total(acc))

        # own is now the gradient of the state after the step, without that of the output; one step after a row's last,
        # that of h_0.
        p_first = grad_h_0 + j_batch.to(tl.int64) * grad_h_0_stride_b + j_hidden
        tl.store(p_first, own.to(dtype), mask=mask & (i_step == length)[None, :])
        d_all = own + g_out
        d_n = d_all * f_n
        p_grads = grads + (4 * HIDDEN) * _token(
            i_step, i_batch, length, seq, start, token_stride_t, token_stride_b, against
        )
        p_grads = p_grads[None, :] + j_hidden
        tl.store(p_grads, _rounded(d_n * r, dtype), mask=m_now)
        tl.store(p_grads + HIDDEN, _rounded(d_n * f_r, dtype), mask=m_now)
        tl.store(p_grads + 2 * HIDDEN, _rounded(d_all * f_z, dtype), mask=m_now)
        if EXCHANGE == "counter":
            tl.debug_barrier()  # all threads have stored
            tl.atomic_add(counter, 1, sem="release")
        # d_n is no part of the message: no program waits for it.
        tl.store(p_grads + 3 * HIDDEN, d_n.to(dtype), mask=m_now)
        own = tl.where(m_now, d_all * z, own)
        if IN_TURN:
            tl.store(p_own, own, mask=mask)
        r, z, f_n, f_z, f_r, g_out = _factors(x_r, x_z, x_n, h_r, h_z, h_n, h, d, b_r, b_z, b_x, b_h)
        m_now = m_next

    if not IN_TURN:
        if t_end <= seq:
            tl.store(p_own, own, mask=mask)
