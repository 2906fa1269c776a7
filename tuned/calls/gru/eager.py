"""The GRU by PyTorch's own operators: on a CPU, and wherever no kernel serves.

It calls torch.gru, and not torch._VF.gru, which tuned.nn.patched replaces: that would call back here.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from tuned.calls.gru.arguments import GruCall, check_lengths
from tuned.launching.plan import tracing, transforms_active


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
            call.batch_sizes.contiguous(),  # PyTorch reads its memory one value after the other
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


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Sequences as pieces between marks, each a sequence of its own; the pieces of a sequence follow each other."""

    order: list[int]  # the tokens of all pieces, one piece after the other
    bounds: list[int]  # where pieces begin and end in ``order``
    first: list[int]  # of each sequence its first piece
    last: list[int]  # and its last one
    marked: list[bool]  # of each piece whether there is a mark before it

    def begun_by(self, *, against: bool) -> list[int]:
        """For each piece the sequence whose first state it begins with; the number of sequences stands for a state of 0.

        Against the tokens' order a sequence's last piece begins with its first state, whether the piece is marked or not.
        """
        begun = [len(self.first)] * len(self.marked)
        for sequence, piece in enumerate(self.last if against else self.first):
            if against or not self.marked[piece]:
                begun[piece] = sequence
        return begun


def _pieces(call: GruCall, resets: torch.Tensor) -> _Pieces:
    sequences, marks = _sequences(call), resets.reshape(-1).tolist()
    found = _Pieces([token for tokens in sequences for token in tokens], [0], [], [], [])
    for tokens in sequences:
        cuts = [step for step, token in enumerate(tokens) if step and marks[token]]
        found.first.append(len(found.marked))
        found.marked.extend([bool(tokens) and marks[tokens[0]], *(True for _ in cuts)])
        found.last.append(len(found.marked) - 1)
        begin = found.bounds[-1]
        found.bounds.extend(begin + step for step in (*cuts, len(tokens)))
    return found


def _by_pieces(call: GruCall, resets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The call with its sequences cut before each mark, which is what a reset means."""
    if resets.is_meta or not resets.numel():
        return gru(dataclasses.replace(call, resets=None))
    pieces, device = _pieces(call, resets), call.input.device

    def index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int64)

    ways = [(index(pieces.begun_by(against=False)), index(pieces.last))]
    if call.bidirectional:
        ways.append((index(pieces.begun_by(against=True)), index(pieces.first)))
    given = index(pieces.order)
    exact = torch.autocast(device.type, enabled=False)  # states keep their dtype; its promotion lacks some on a CPU
    with exact:
        states = torch.cat((call.hx, call.hx.new_zeros((len(call.hx), 1, call.hx.shape[2]))), 1)
        hx = _of_each_cell(states, [begun for begun, _ in ways])
    cut = dataclasses.replace(
        call,
        input=call.input.reshape(-1, call.input.shape[-1]).index_select(0, given),
        hx=hx,
        batch_first=False,
        batch_sizes=None,
        max_seqlen=max((after - before for before, after in itertools.pairwise(pieces.bounds)), default=0),
        resets=None,
    )
    output, h_n = _by_bounds(cut, pieces.bounds)
    with exact:
        last = _of_each_cell(h_n, [ends for _, ends in ways])
    return output.index_select(0, given.argsort()).view(*resets.shape, output.shape[-1]), last


def _of_each_cell(states: torch.Tensor, ways: list[torch.Tensor]) -> torch.Tensor:
    """Of the states ``[cells, n, hidden]`` of each cell those that ``ways`` has for its direction; directions take turns."""
    return torch.stack([state.index_select(0, ways[cell % len(ways)]) for cell, state in enumerate(states)])


def _sequences(call: GruCall) -> list[list[int]]:
    """For each sequence its tokens in order, as rows of the input with one axis of tokens."""
    if call.cu_seqlens is not None:
        ends = call.cu_seqlens.tolist()
        check_lengths(ends, call.input.shape[0], call.max_seqlen or 0)
        return [list(range(*bounds)) for bounds in itertools.pairwise(ends)]
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


def _by_no_step(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """An output without tokens, and unchanged states, in the dtypes that torch.autocast gives to those of calls with tokens."""
    one = dataclasses.replace(
        call,
        input=call.input.new_zeros((1, 1, call.input.shape[-1])),
        hx=call.hx.new_zeros((len(call.hx), 1, call.hx.shape[2])),
        dropout=0.0,  # draws no random number
        batch_first=False,
        cu_seqlens=None,
        max_seqlen=None,
    )
    output, h_n = gru(one)
    return output[0, :0], call.hx.to(h_n.dtype, copy=True)


def _one_by_one(call: GruCall, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences given by their bounds, each as a separate call: transforms of torch.func cannot follow a packed torch.gru."""
    outputs, states = [], []
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = call.input[begin:end], call.hx[:, b : b + 1]
        one = dataclasses.replace(call, input=part[0], hx=part[1], cu_seqlens=None, max_seqlen=None)
        if begin == end:
            output, h_n = _by_no_step(one)
        else:
            output, h_n = gru(dataclasses.replace(one, input=part[0].unsqueeze(1)))
            output = output.squeeze(1)
        outputs.append(output)
        states.append(h_n)
    return torch.cat(outputs), torch.cat(states, 1)


def _by_bounds(call: GruCall, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences given by their bounds in rows: reordered to torch's packed order, and the output back again."""
    check_lengths(bounds, call.input.shape[0], call.max_seqlen or 0)
    lengths = [after - before for before, after in itertools.pairwise(bounds)]
    order = sorted((b for b, length in enumerate(lengths) if length), key=lambda b: -lengths[b])  # longest first
    if not order:
        return _by_no_step(call)
    if transforms_active():
        return _one_by_one(call, bounds)
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
