"""The GRU by PyTorch's own operators: on a CPU, and if a gradient is needed.

It calls torch.gru. tuned.nn.patched replaces that of torch._VF, which would call back here.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from tuned.calls.gru.arguments import GruCall, check_lengths
from tuned.launching.plan import tracing


def gru(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) of a checked call, differentiable."""
    if call.resets is not None:
        return _by_pieces(call, call.resets)
    if call.cu_seqlens is not None:
        return _shapes(call) if call.cu_seqlens.is_meta else _by_bounds(call, call.cu_seqlens.tolist())
    # cuDNN computes gradients in training mode only; dropout is 0 already if the caller does not train. A trace may run
    # with gradients or without, whatever it was made with, and torch.jit.trace compares one run of each.
    train = call.dropout > 0 or tracing() is not None
    train = train or (torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors))
    # For cuDNN, torch requires contiguous states and flattens weights by views. oneDNN assumes that 16-bit states are
    # contiguous, and would read what lies between their rows. Elsewhere a copy would round differently than torch does.
    weights = [w.contiguous() for w in call.weights] if call.hx.is_cuda else list(call.weights)
    hx = call.hx.contiguous() if call.hx.is_cuda or call.hx.element_size() == 2 else call.hx  # noqa: PLR2004
    if call.batch_sizes is not None:
        return torch.gru(
            call.input,
            call.batch_sizes,
            hx,
            weights,
            call.has_biases,
            call.num_layers,
            call.dropout,
            train,
            call.bidirectional,
        )
    return torch.gru(
        call.input,
        hx,
        weights,
        call.has_biases,
        call.num_layers,
        call.dropout,
        train,
        call.bidirectional,
        call.batch_first,
    )


def _by_pieces(call: GruCall, resets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that are cut before each mark: a piece is a sequence of its own, and begins with a state of 0.

    The first piece of a sequence has its first state, of the direction that goes backwards the last piece has; unless
    there is a mark before it.
    """
    if resets.is_meta:
        return gru(dataclasses.replace(call, resets=None))
    sequences = _sequences(call)
    order = [token for tokens in sequences for token in tokens]
    marks = resets.reshape(-1).tolist()
    bounds, firsts, lasts = [0], [], []  # pieces, and which of them are a sequence's first and last
    begins: list[int] = []  # of each piece the sequence whose first state it has, or one behind them for none
    for sequence, tokens in enumerate(sequences):
        cuts = [step for step, token in enumerate(tokens) if step and marks[token]]
        firsts.append(len(bounds) - 1)
        at = bounds[-1]
        bounds += [at + step for step in (*cuts, len(tokens))]
        lasts.append(len(bounds) - 2)
        begins += [len(sequences) if tokens and marks[tokens[0]] else sequence, *(len(sequences),) * len(cuts)]
    ends = [len(sequences)] * len(begins)
    for sequence, piece in enumerate(lasts):
        ends[piece] = sequence

    device, hidden = call.input.device, call.hx.shape[2]
    with torch.autocast(
        device.type, enabled=False
    ):  # states keep their dtype, and autocast's promotion lacks some on a CPU
        states = torch.cat((call.hx, call.hx.new_zeros((len(call.hx), 1, hidden))), 1)
    ways = ((begins, lasts), (ends, firsts))[: 2 if call.bidirectional else 1]
    taken = [torch.tensor(which, device=device, dtype=torch.int64) for which, _ in ways]
    given = torch.tensor(order, device=device, dtype=torch.int64)
    cells = [states[cell : cell + 1].index_select(1, taken[cell % len(ways)]) for cell in range(len(call.hx))]
    with torch.autocast(device.type, enabled=False):
        first = torch.cat(cells)
    pieces = dataclasses.replace(
        call,
        input=call.input.reshape(-1, call.input.shape[-1]).index_select(0, given),
        hx=first,
        batch_first=False,
        batch_sizes=None,
        max_seqlen=max((after - before for before, after in itertools.pairwise(bounds)), default=0),
        resets=None,
    )
    output, h_n = _by_bounds(pieces, bounds)
    kept = [torch.tensor(which, device=device, dtype=torch.int64) for _, which in ways]
    with torch.autocast(device.type, enabled=False):
        last = torch.stack([h_n[cell].index_select(0, kept[cell % len(ways)]) for cell in range(len(h_n))])
    return output.index_select(0, given.argsort()).view(*resets.shape, output.shape[-1]), last


def _sequences(call: GruCall) -> list[list[int]]:
    """Of each sequence its tokens in order, as rows of the input with one axis of tokens."""
    if call.cu_seqlens is not None:
        return [list(range(*bounds)) for bounds in itertools.pairwise(call.cu_seqlens.tolist())]
    if call.batch_sizes is not None:
        alive = call.batch_sizes.tolist()
        starts = list(itertools.accumulate(alive, initial=0))
        return [[starts[step] + b for step, count in enumerate(alive) if b < count] for b in range(alive[0])]
    first, second = call.resets.shape if call.resets is not None else call.input.shape[:2]
    if call.batch_first:
        return [[b * second + t for t in range(second)] for b in range(first)]
    return [[t * second + b for t in range(first)] for b in range(second)]


def _shapes(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The result on "meta", where cu_seqlens has no values: the output of one sequence, and a state for each sequence."""
    rows, sequences = call.input.shape[0], call.hx.shape[1]
    if not rows or not sequences:
        return _by_bounds(call, [0] * (sequences + 1))
    whole = dataclasses.replace(
        call, input=call.input.unsqueeze(1), hx=call.hx[:, :1], cu_seqlens=None, max_seqlen=None, batch_first=False
    )
    output, h_n = gru(whole)
    return output.squeeze(1), call.hx.to(h_n.dtype) + h_n


def _by_bounds(call: GruCall, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences given by their bounds in rows: reordered to torch's packed order, and the output back again."""
    check_lengths(bounds, call.input.shape[0], call.max_seqlen or 0)
    lengths = [after - before for before, after in itertools.pairwise(bounds)]
    order = sorted((b for b, length in enumerate(lengths) if length), key=lambda b: -lengths[b])  # longest first
    if not order:
        features = call.hx.shape[2] * (2 if call.bidirectional else 1)
        return call.input.new_empty((0, features)), call.hx.clone()
    steps = [[b for b in order if lengths[b] > step] for step in range(lengths[order[0]])]
    device = call.input.device
    rows = torch.tensor([bounds[b] + step for step, alive in enumerate(steps) for b in alive], device=device)
    sequences = torch.tensor(order, device=device)
    packed = dataclasses.replace(
        call,
        input=call.input.index_select(0, rows),
        hx=call.hx.index_select(1, sequences),
        batch_sizes=torch.tensor([len(alive) for alive in steps], device="cpu"),  # not the default device
        cu_seqlens=None,
        max_seqlen=None,
    )
    output, h_n = gru(packed)
    # Undo the permutation of the rows; an empty sequence keeps its state.
    return output.index_select(0, rows.argsort()), call.hx.to(h_n.dtype).index_copy(1, sequences, h_n)
