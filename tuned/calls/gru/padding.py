"""Pad, fill and cut tensors of repeated calls by launches in which only addresses change: tuned.calls.gru.wide says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.wide import width_of
from tuned.families.copying import Rows, filled, padded
from tuned.launching.copies import launches_of
from tuned.launching.plan import maker

NOWHERE = -1
_GRU_MODE = 3  # CUDNN_GRU, as torch.backends.cudnn.rnn.get_cudnn_mode has it


class Padding(NamedTuple):
    """Functions that pad the tensors of calls like a given one, and that cut their results."""

    pad: Callable[[Any, Any, Sequence[Any]], tuple[Any, Any, Sequence[Any]]]
    cut: Callable[[Any, Any], tuple[Any, Any]]


def padding_of(call: GruCall, *, flat: bool = False, places: bool = False) -> Padding | None:
    """The ``Padding`` of calls like one that has a ``width``; None if launches must be public.

    ``flat``: weights follow each other in cuDNN's order, or cuDNN would copy them; None if its order is another one.
    ``places``: of the padded weights only weight_ih, which the library multiplies by, are tensors; the others are addresses.
    """
    assert call.width is not None, "the call is to stay as it is"
    given = [t if _in_rows(t) else t.contiguous() for t in call.tensors]
    apart = [position for position, t in enumerate(call.tensors) if not _in_rows(t)]
    layout = _Layout(call, given, flat=flat)
    if flat and not layout.is_cudnns(call):
        return None
    item = call.input.element_size()
    pads = launches_of([part.rows for part in layout.parts], call.input)
    make = maker((layout.elements,), call.input)
    given_at = [(part.position, part.offset * item) for part in layout.parts]
    each = 4 if call.has_biases else 2
    as_place = {part.position for part in layout.parts if places and part.position > 1 and (part.position - 2) % each}
    seen = [part for part in layout.parts if part.position not in as_place | {NOWHERE}]
    views = [(part.position, part.shape, part.strides, part.offset) for part in seen]
    addresses = [(part.position, part.offset * item) for part in layout.parts if part.position in as_place]
    as_strided = torch.as_strided

    def pad(x: Any, hx: Any, weights: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
        tensors: list[Any] = [x, hx, *weights]
        for position in apart:
            tensors[position] = tensors[position].contiguous()
        memory = make()
        base = memory.data_ptr()
        pads(tuple([at for position, offset in given_at for at in (tensors[position].data_ptr(), base + offset)]))  # type: ignore[misc]
        for position, shape, strides, offset in views:
            tensors[position] = as_strided(memory, shape, strides, offset)
        for position, offset in addresses:
            tensors[position] = _Place(base + offset)
        return tensors[0], tensors[1], tensors[2:]

    cut = _cut_of(call, call.width)
    return None if pads is None or cut is None else Padding(pad, cut)


class _Place:
    """Has what a launch asks of a tensor, its address: making a tensor takes ten times as long."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at

    def data_ptr(self) -> int:
        return self.at


def _cut_of(call: GruCall, width: int) -> Callable[[Any, Any], tuple[Any, Any]] | None:
    hidden, directions = call.hx.shape[2], 2 if call.bidirectional else 1
    if width == hidden:  # the input alone was padded
        return lambda output, h_n: (output, h_n)
    tokens, states = call.input.shape[:-1], call.hx.shape[:2]
    wide, narrow = directions * width, directions * hidden
    cuts = launches_of(
        [
            padded((1, tokens.numel(), wide), (0, wide), hidden, directions),
            padded((1, states.numel(), width), (0, width), hidden),
        ],
        call.input,
    )
    make_output, make_states = maker((*tokens, narrow), call.input), maker((*states, hidden), call.input)
    if cuts is None:
        return None

    def cut(output: Any, h_n: Any) -> tuple[Any, Any]:
        cut_output, last = make_output(), make_states()
        output = output.contiguous()  # cuDNN's, with batch_first, is not
        cuts((output.data_ptr(), cut_output.data_ptr(), h_n.data_ptr(), last.data_ptr()))  # type: ignore[misc]
        return cut_output, last

    return cut


def flatten(weights: list[torch.Tensor], call: GruCall) -> torch.Tensor | None:
    """Lay the weights of a call like this one out one after the other in cuDNN's order; returns the memory that has them.

    None where cuDNN does not serve such a call.
    """
    # Not ``cudnn.is_acceptable``, which does not know bfloat16.
    if not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available() and call.input.is_cuda):
        return None
    each, (rows, features) = len(weights) // len(call.hx), weights[0].shape
    settings = (rows // 3, 0, call.num_layers, call.batch_first, call.bidirectional)
    # What torch.nn.GRU calls for its own weights.
    return torch._cudnn_rnn_flatten_weight(weights, each, features, _GRU_MODE, *settings)  # noqa: SLF001


class _Part(NamedTuple):
    """Where one tensor of a call goes."""

    position: int  # among the tensors of the call, or NOWHERE
    rows: Rows
    offset: int  # in the buffer, elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Layout:
    """Where all tensors go in one buffer: weights of a kind one after the other, as those of ``wide.widened``, or ``flat``."""

    def __init__(self, call: GruCall, given: Sequence[torch.Tensor], *, flat: bool) -> None:
        assert call.width is not None
        self.parts: list[_Part] = []
        self.elements = 0
        hidden, width, features = call.hx.shape[2], call.width, call.input.shape[-1]
        broad = width_of(features, call.input.element_size())
        directions, each = 2 if call.bidirectional else 1, 4 if call.has_biases else 2
        cells, kinds = range(len(call.hx)), range(each)
        matrices_first = [(cell, kind) for some in (kinds[:2], kinds[2:]) for cell in cells for kind in some]
        for cell, kind in matrices_first if flat else [(cell, kind) for kind in kinds for cell in cells]:
            position, first = 2 + cell * each + kind, kind == 0 and cell < directions
            if width == hidden and (not first or broad == features):
                continue
            if kind > 1:
                self._add(position, padded((1, 3, hidden), (0, hidden), width), (3 * width,))
                continue
            # The elements of a part of a row, now and padded, and the number of parts.
            held, part, parts = (features, broad, 1) if first else (hidden, width, 1 if kind else directions)
            row, columns = given[position].stride(0), parts * part
            # With weights of 0 an infinite input would make NaN of the added units, and these of all: the last unit's are repeated.
            units = (width, hidden - 1) if first else (hidden, hidden - 1)
            rows = Rows(3 * width, width, *units, hidden * row, row, columns, columns, part, held)
            self._add(position, rows, (3 * width, columns))
        if flat and not call.has_biases:  # cuDNN reads biases even so
            self._add(NOWHERE, filled(1, 6 * width * len(call.hx), 0), (6 * width * len(call.hx),))
        if broad != features:
            self._add(0, padded(*_in_groups(given[0]), broad), (*given[0].shape[:-1], broad))
        if width != hidden:
            self._add(1, padded(*_in_groups(given[1]), width), (*given[1].shape[:-1], width))

    def _add(self, position: int, rows: Rows, shape: tuple[int, ...]) -> None:
        strides = torch.empty(shape, device="meta").stride()
        self.parts.append(_Part(position, rows, self.elements, shape, strides))
        self.elements += torch.Size(shape).numel()

    def is_cudnns(self, call: GruCall) -> bool:
        """Whether cuDNN lays weights of these shapes out in the same places, one after the other from the first."""
        places = {part.position - 2: part for part in self.parts}
        if any(i not in places for i in range(len(call.weights))):
            return False
        weights = [call.input.new_empty(places[i].shape) for i in range(len(call.weights))]
        memory = flatten(weights, call)
        if memory is None:
            return False
        apart = [weight.data_ptr() - memory.data_ptr() for weight in weights]
        return apart == [places[i].offset * memory.element_size() for i in range(len(weights))]


def _in_groups(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a tensor as ``[groups, rows, features]``."""
    return (t.shape, t.stride()) if t.dim() > 2 else ((1, *t.shape), (0, *t.stride()))  # noqa: PLR2004


def _in_rows(t: torch.Tensor) -> bool:
    """Whether the elements of a row are neighbours."""
    return t.stride(-1) == 1 or t.shape[-1] == 1
