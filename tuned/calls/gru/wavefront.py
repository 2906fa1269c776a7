"""The gradient of a stack of layers, several at once: each layer is a chunk of steps behind the layer above.

The gradient of a recurrence waits for messages, so that one layer keeps few multiprocessors busy. In a group of layers, the highest
computes its last chunk of steps first. While it computes the next chunk, the layer below computes the one whose input is known by
then, and so on. Such a diagonal of chunks is one launch and one library product, which gives the layers below the input of their
next chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.factors import Factor, multiplied, splits
from tuned.calls.gru.project import by_library, project
from tuned.calls.gru.weights import Grads, grad_weights
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import MAX_LOAD, GruVariant, programs
from tuned.families.gru_backward import FAMILY as BACKWARD
from tuned.families.gru_backward.launches import PARTS, RecurrenceGradient, counters_needed
from tuned.families.launch import Fill, ceil_div
from tuned.launching.launcher import run_step
from tuned.lookup import misses

Launcher = Callable[[GruSpec, Any, RecurrenceGradient], None]  # of a gradient whose ``out`` readers may poll already

# Time of a diagonal besides its steps, by bytes of an element: a launch that loads its weights, and a product.
DIAGONAL_US = {2: 10.0, 4: 20.0}
CALLED_DIAGONAL_US = 100.0  # the same as a call, where the host prepares each diagonal
WIDER, TALLER = 1.08, 1.12  # how much longer a step takes with tiles of twice as many units, or rows
PAYS, CALLED_PAYS = 0.8, 0.7  # the most that a wavefront may be thought to take, of the time of layer after layer


@dataclasses.dataclass(frozen=True)
class Wave:
    """How the layers of a stack run at once."""

    variant: GruVariant  # of each launch
    layers: int  # of a group, which run at once
    steps: int  # of a chunk
    us: float  # estimated time of the whole stack


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def planned(  # noqa: PLR0913 - layers, how one is taken, and where
    spec: GruSpec,
    size: GruSize,
    layers: int,
    variant: GruVariant,
    step_us: float,
    capability: int,
    multiprocessors: int,
    *,
    captured: bool,
) -> Wave | None:
    """The fastest ``Wave`` for so many layers of a spec; None if one by one takes less, or is the only way.

    Args:
        spec: of a layer.
        size: of the call.
        layers: of the stack.
        variant: what a layer gets by itself.
        step_us: what a step takes with it, microseconds.
        capability: of the GPU, 90 is 9.0.
        multiprocessors: how many programs may wait for each other.
        captured: in a CUDA graph, which spares the host the launches.
    """
    if layers == 1 or spec.directions > 1 or not spec.dense or spec.resets:
        return None
    # Programs that take tiles in turn already keep their multiprocessors busy. Where rows are no multiple of 16 bytes, each layer's
    # rows are aligned differently.
    if variant.in_turn or spec.hidden * spec.item % MAX_LOAD:
        return None
    beside_us = DIAGONAL_US[spec.item] if captured else CALLED_DIAGONAL_US
    found = []
    for tile, slower in _larger(spec, size, variant, capability):
        at_once = min(layers, multiprocessors // programs(spec, size, tile))
        if at_once > 1:
            tall = ceil_div(layers, ceil_div(layers, at_once))  # equal groups, so that none is needlessly low
            found.append(_wave(tile, size.seq, layers, tall, step_us * slower, beside_us))
    best = min(found, key=lambda wave: wave.us, default=None)
    in_turn_us = layers * (step_us * (size.seq + 1) + beside_us)
    pays = PAYS if captured else CALLED_PAYS
    return best if best is not None and best.us < pays * in_turn_us else None


def _larger(spec: GruSpec, size: GruSize, variant: GruVariant, capability: int) -> Iterator[tuple[GruVariant, float]]:
    """The variant and variants of larger tiles, which are fewer programs; with each, how much longer its step takes."""
    for wider, taller in itertools.product(range(2), range(3)):
        units, rows = variant.block_hidden << wider, variant.block_batch << taller
        tile = dataclasses.replace(variant, block_hidden=units, block_batch=rows)
        if (taller == 0 or rows < 2 * size.batch) and BACKWARD.rejection(spec, size, tile, capability) is None:
            yield tile, WIDER**wider * TALLER**taller


def _wave(variant: GruVariant, seq: int, layers: int, tall: int, step_us: float, beside_us: float) -> Wave:  # noqa: PLR0913
    """The wave in groups of ``tall`` layers, in chunks of the best length."""
    steps = math.sqrt(seq * beside_us / ((tall - 1) * step_us))
    chunks = max(1, round(seq / steps))
    steps = ceil_div(seq, chunks)
    diagonals = sum(ceil_div(seq, steps) + min(tall, layers - first) - 1 for first in range(0, layers, tall))
    return Wave(variant, tall, steps, diagonals * (steps * step_us + beside_us))


def gradients(  # noqa: PLR0913 - a call, what its forward left, and what is given and wanted
    call: GruCall,
    wave: Wave,
    outputs: Sequence[torch.Tensor],
    gates: torch.Tensor,
    wanted: Sequence[bool],
    given: tuple[Any, Any],
    launch: Launcher,
) -> Grads:
    """The gradients of the input, the first states and all weights of a dense call of one direction, None where not wanted.

    Args:
        call: a checked call of several layers.
        wave: what ``planned`` gave.
        outputs: of each layer, as the forward left them.
        gates: the input times the weights of the lowest layer, ``3 * H`` for each token, in the order of the input.
        wanted: whether the gradient of input, of first states and of each weight is wanted.
        given: gradients of output and of h_n, None for none.
        launch: launches the gradient of a recurrence.
    """

    def seq_first(t: Any) -> Any:
        return t.transpose(0, 1) if call.batch_first and t is not None else t

    each = len(call.weights) // call.num_layers
    inputs = [seq_first(t) for t in (call.input, *outputs)]  # of each layer, then the output
    grad, grad_h_n = seq_first(given[0]), given[1]
    carried = torch.zeros_like(call.hx) if grad_h_n is None else grad_h_n.resolve_neg().clone()
    carried = carried.contiguous()
    weights: list[Grads] = []
    for end in range(call.num_layers, 0, -wave.layers):
        begin = max(0, end - wave.layers)
        group = _Group(call, wave, begin, end, inputs[begin : end + 1])
        own = None if begin else seq_first(gates.view(*call.input.shape[:-1], -1))
        group.run(own, grad, carried[begin:end], launch)
        asked = [wanted[2 + each * layer : 2 + each * (layer + 1)] for layer in range(begin, end)]
        weights = [*group.of_weights(asked), *weights]
        grad = group.of_input() if begin or wanted[0] else None
    flat = [t for layer in weights for t in layer]
    return [seq_first(grad), carried if wanted[1] else None, *flat]


class _Group:
    """Layers that run at once, the lowest first.

    Each layer of a buffer has the steps of all chunks, and one step more. In a diagonal, the next layer's chunk lies a layer less a
    chunk further on. Step T, behind the last one, has the last state, which is an input of the layer above. The gradients of step T
    and of further steps, which fill the last chunk, pass unchanged.
    """

    def __init__(self, call: GruCall, wave: Wave, begin: int, end: int, inputs: Sequence[torch.Tensor]) -> None:
        from tuned.calls.gru.run import spec_of, stack  # noqa: PLC0415 - it imports what chooses a wave

        self.spec, size = spec_of(call, 1)
        self.seq, self.batch, self.hidden = size.seq, size.batch, self.spec.hidden
        self.layers, self.steps, self.variant = end - begin, wave.steps, wave.variant
        self.chunks = ceil_div(self.seq, self.steps)
        each = 4 if self.spec.bias else 2
        own = [call.weights[each * layer : each * (layer + 1)] for layer in range(begin, end)]
        self.lowest, self.input = own[0][0], inputs[0].reshape(-1, inputs[0].shape[-1])
        self.above = stack([w[0] for w in own[1:]]) if len(own) > 1 else None  # weight_ih of all but the lowest
        self.weight_hh = stack([w[1] for w in own])
        self.biases = [stack([w[part] for w in own]) for part in (2, 3)] if self.spec.bias else [None, None]
        self.states = self._empty(1)
        self._fill_states(call.hx[begin:end], inputs[1:])

    def _empty(self, parts: int) -> torch.Tensor:
        shape = (self.layers, self.chunks * self.steps + 1, self.batch, parts * self.hidden)
        return self.lowest.new_empty(shape)

    def _fill_states(self, first: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        self.states[:, 0].copy_(first)
        for states, output in zip(self.states, outputs, strict=True):
            states[1 : self.seq + 1].copy_(output)
        self.states[:, self.seq + 1 :].zero_()

    def _tokens(self, t: torch.Tensor, later: int = 0, steps: int | None = None) -> torch.Tensor:
        """[layers, tokens, width] of a buffer: ``steps`` steps, by default all of the sequence, from step ``later`` on."""
        steps = self.seq if steps is None else steps
        return t[:, later : later + steps].flatten(1, 2)

    def _gates(self, gates: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the products of x, the products of h) for the gates. ``gates``: the lowest layer's products of x, if they were kept."""
        of_x, of_h = self._empty(3), self._empty(3)
        steps = self.chunks * self.steps
        if gates is None:
            project(self.input, self.lowest, of_x[0, : self.seq].flatten(0, 1), self.spec.precision)
        else:
            of_x[0, : self.seq].copy_(gates)
        of_x[0, self.seq :].zero_()
        if self.above is not None:
            _project(self._tokens(self.states, 1, steps)[:-1], self.above, self._tokens(of_x, 0, steps)[1:], self.spec)
        _project(self._tokens(self.states, 0, steps), self.weight_hh, self._tokens(of_h, 0, steps), self.spec)
        # Behind the last step z is 1.
        of_x[:, self.seq : steps, :, self.hidden : 2 * self.hidden].fill_(torch.inf)
        return of_x, of_h

    def _diagonal(self, t: torch.Tensor, index: int, layers: range) -> torch.Tensor:
        """[layers, steps, batch, width] of a buffer: the chunks of a diagonal."""
        layer, step, row, _ = t.stride()
        lowest = layers.start
        first = (self.chunks - 1 - index + self.layers - 1 - lowest) * self.steps  # step of the lowest layer
        shape = (len(layers), self.steps, self.batch, t.shape[-1])
        offset = t.storage_offset() + lowest * layer + first * step
        return t.as_strided(shape, (layer - self.steps * step, step, row, 1), offset)

    def run(
        self, gates: torch.Tensor | None, grad: torch.Tensor | None, carried: torch.Tensor, launch: Launcher
    ) -> None:
        """Compute ``grads``. ``grad``: the gradient of the output; ``carried``: that of h_n, then replaced by that of h_0."""
        top, steps, hidden, batch = self.layers - 1, self.steps, self.hidden, self.batch
        x_gates, h_gates = self._gates(gates)
        self.grads = self._empty(PARTS)
        if self.variant.exchange != "counter":
            run_step(Fill(self.grads, -1))
        # Gradients of outputs. The chunks of a diagonal share their rows, so in the layer above a step is ``steps`` rows further on.
        given = self.lowest.new_empty(((self.chunks + top) * steps, batch, self.layers * hidden))
        of_top = given[top * steps :, :, top * hidden :]
        if grad is not None:
            of_top[: self.seq].copy_(grad)
        of_top[0 if grad is None else self.seq :].zero_()
        scratch = torch.empty_like(carried, dtype=torch.float32) if self.variant.in_turn else None
        counters = None
        if self.variant.exchange == "counter":
            of_all = dataclasses.replace(self.spec, layers=self.layers)
            counters = carried.new_empty(counters_needed(of_all, batch), dtype=torch.int32)
        for index in range(self.chunks + top):
            layers = range(max(0, top - index), min(top, top - index + self.chunks - 1) + 1)
            cells, begin = slice(layers.start, layers.stop), (self.chunks + top - index - 1) * steps
            slab = given[begin : begin + steps]
            gradient = RecurrenceGradient(
                gates=self._diagonal(x_gates, index, layers),
                hidden=self._diagonal(h_gates, index, layers),
                before=self._diagonal(self.states, index, layers),
                weight_hh=self.weight_hh[cells],
                grad_out=slab[:, :, cells.start * hidden : cells.stop * hidden],
                grad_h_n=carried[cells],
                out=self._diagonal(self.grads, index, layers),
                grad_h_0=carried[cells],
                batch=batch,
                seq=steps,
                bias_ih=None if self.biases[0] is None else self.biases[0][cells],
                bias_hh=None if self.biases[1] is None else self.biases[1][cells],
                states=None if scratch is None else scratch[cells],
                counters=counters,
            )
            launch(_of_layers(self.spec, len(layers)), self.variant, gradient)
            inner = layers if layers.start else layers[1:]
            if inner and self.above is not None:
                grads = self._diagonal(self.grads, index, inner)[..., hidden:].flatten(1, 2)
                below = slice(inner.start - 1, inner.stop - 1)
                following = given[begin - steps : begin].view(steps * batch, self.layers, hidden)
                torch.bmm(grads, self.above[below], out=following[:, below].transpose(0, 1))

    def of_input(self) -> torch.Tensor:
        """The gradient of the lowest layer's input, ``[T, B, width]``."""
        split = splits(self.spec, self.input)
        grads = Factor.of(self._tokens(self.grads)[0, :, self.hidden :], split=split)
        return multiplied(grads, Factor.of(self.lowest, split=split)).view(self.seq, self.batch, -1)

    def of_weights(self, asked: Sequence[Sequence[bool]]) -> list[Grads]:
        """The gradients of each layer's weights: one layer's products at a time, which the library splits where sums are long."""
        parts = [self._tokens(self.grads), self._tokens(self.states)]
        inputs = [self.input, *self._tokens(self.states, 1)[:-1]]
        found = []
        for grads, before, rows, wanted in zip(*parts, inputs, asked, strict=True):
            split = splits(self.spec, rows)
            factors = Factor.of(grads, split=split), Factor.of(rows, split=split)
            found.append(grad_weights(*factors, before, self.hidden, wanted))
        return found


@functools.lru_cache
def _of_layers(spec: GruSpec, layers: int) -> GruSpec:
    return dataclasses.replace(spec, layers=layers)


def _project(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, spec: GruSpec) -> None:
    """``out = rows @ weights.mT`` of each layer, in the precision that a GRU's products must have."""
    if by_library(rows[..., 0].numel(), weights[0], spec.precision):
        torch.bmm(rows, weights.mT, out=out)
        return
    for of_layer in zip(rows, weights, out, strict=True):
        project(*of_layer, spec.precision)
