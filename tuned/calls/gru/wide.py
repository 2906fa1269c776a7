"""Pad a GRU whose rows are no multiple of 16 bytes, so that kernels load and exchange 16 bytes at a time, and not 2 or 4.

The units that are added have weights, biases and first states of 0. So their states stay 0, and change no other unit
(docs/decisions/0066). An infinite input times a weight of 0 is NaN: where ``silence`` does not set that to 0, the input weights of added
units repeat those of the last unit.
"""

from __future__ import annotations

import dataclasses

import torch

from tuned.calls.gru.arguments import GruCall
from tuned.families.copying import MOST
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.launch import ceil_div
from tuned.families.products import ITEM_SIZE

ROW_BYTES = 16  # rows of the state are to be a multiple of this
# What padding takes beside the kernels: launches, tensors whose addresses are passed, and bytes. A launch takes time of the device in
# a graph, and of the host in a call, on the scale of HOST_STEP_US.
CAPTURED_LAUNCH_US, CALLED_LAUNCH_US, CALLED_TENSOR_US = 2.0, 3.0, 1.0
# For ``widened``, which autograd follows: an operator takes 15 us on a host where nn.GRU takes 23 a step.
OPERATORS, OPERATORS_OF_STACK, CALLED_OPERATOR_US = 16, 22, 6.0
BYTES_PER_US = 2.5e6
SECTOR = 32  # bytes that a store to memory takes at least


def width_of(hidden: int, item: int) -> int:
    """The next size whose rows are a multiple of 16 bytes; ``item``: bytes of an element."""
    step = ROW_BYTES // item
    return ceil_div(hidden, step) * step


def wider_spec(spec: GruSpec) -> GruSpec:
    """The spec of a GRU that is padded."""
    return dataclasses.replace(spec, hidden=width_of(spec.hidden, ITEM_SIZE[spec.dtype]))


def widening_us(spec: GruSpec, size: GruSize, layers: int, *, captured: bool, autograd: bool = False) -> float:
    """What padding a call and cutting its result take, microseconds; with ``autograd`` PyTorch does both, an operator at a time."""
    cells, tokens, item = layers * spec.directions, size.batch * size.seq * spec.directions, ITEM_SIZE[spec.dtype]
    wide = (spec.hidden + width_of(spec.hidden, item)) * item
    # Bytes of the result, the input and the weights; an input is taken to be as wide as the state, as most are.
    moved = tokens * (wide + 3 * SECTOR) + tokens // spec.directions * wide + cells * 6 * spec.hidden * wide
    if autograd:
        launches = OPERATORS if cells == 1 else OPERATORS_OF_STACK
        return launches * (CAPTURED_LAUNCH_US if captured else CALLED_OPERATOR_US) + moved / BYTES_PER_US
    tensors = cells * (4 if spec.bias else 2) + 2
    return _launching_us(tensors, ceil_div(tensors, MOST) + 1, captured=captured) + moved / BYTES_PER_US


def widening_input_us(spec: GruSpec, size: GruSize, features: int, *, captured: bool) -> float:
    """What padding the input of a call alone takes, microseconds."""
    item = ITEM_SIZE[spec.dtype]
    moved = size.batch * size.seq * (features + width_of(features, item)) * item
    return _launching_us(1 + spec.directions, 1, captured=captured) + moved / BYTES_PER_US


def _launching_us(tensors: int, launches: int, *, captured: bool) -> float:
    return launches * CAPTURED_LAUNCH_US if captured else launches * CALLED_LAUNCH_US + tensors * CALLED_TENSOR_US


def widened(call: GruCall, *, alike: bool = False) -> GruCall:
    """The call with ``call.width`` units, which may be as many as it has, and with a padded input. Autograd follows it.

    Weights of one kind are parts of one tensor, as those of nn.GRU are: kernels read them where they lie. ``alike``: the input
    weights of added units repeat those of the last unit, for torch.gru, after whose products nothing calls ``silence``.
    """
    assert call.width is not None, "the call is to stay as it is"
    hidden, more = call.hx.shape[2], call.width - call.hx.shape[2]
    features = call.input.shape[-1]
    beside = width_of(features, call.input.element_size()) - features
    directions, each = 2 if call.bidirectional else 1, 4 if call.has_biases else 2
    kinds = [call.weights[kind::each] for kind in range(each)]
    first = _padded(_joined(kinds[0][:directions]), (3, hidden), (0, beside, 0, 0 if alike else more))
    if alike and more:
        first = first.view(directions, 3, hidden, -1)
        first = torch.cat((first, first[:, :, -1:].detach().expand(-1, -1, more, -1)), 2)
    wide = [[first.view(directions, 3 * call.width, -1)]]
    if call.num_layers > 1:
        upper = _padded(_joined(kinds[0][directions:]), (3, hidden, directions, hidden), (0, more, 0, 0, 0, more))
        wide[0].append(upper.view(-1, 3 * call.width, directions * call.width))
    wide.append([_padded(_joined(kinds[1]), (3, hidden), (0, more, 0, more)).view(-1, 3 * call.width, call.width)])
    wide += [[_padded(_joined(kind), (3, hidden), (0, more)).view(-1, 3 * call.width)] for kind in kinds[2:]]
    of_kinds = [[cell for part in parts for cell in part.unbind()] for parts in wide]
    return dataclasses.replace(
        call,
        input=torch.nn.functional.pad(call.input, (0, beside)) if beside else call.input,
        hx=torch.nn.functional.pad(call.hx, (0, more)) if more else call.hx,
        weights=tuple(weight for cell in zip(*of_kinds, strict=True) for weight in cell),
        width=None,
        units=hidden if more else None,
    )


def flat(call: GruCall) -> GruCall:
    """The call with its weights one after the other in cuDNN's order, or cuDNN copies them and PyTorch warns. Autograd follows it."""
    each, cells = 4 if call.has_biases else 2, range(len(call.hx))
    # As ``tuned.calls.gru.padding`` has them: matrices first.
    order = [cell * each + kind for kinds in ((0, 1), (2, 3)[: each - 2]) for cell in cells for kind in kinds]
    parts = [call.weights[i].reshape(-1) for i in order]
    if not call.has_biases:  # cuDNN reads biases even so
        parts.append(call.hx.new_zeros(6 * call.hx.shape[2] * len(cells)))
    placed = zip(order, torch.cat(parts).split([len(part) for part in parts]), strict=False)
    weights = {i: part.view(call.weights[i].shape) for i, part in placed}
    return dataclasses.replace(call, weights=tuple(weights[i] for i in range(len(call.weights))))


def narrowed(call: GruCall, output: torch.Tensor, h_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) of a call, given those of ``widened(call)``."""
    hidden = call.hx.shape[2]
    parts = output.unflatten(-1, (-1, h_n.shape[2]))[..., :hidden]
    return parts.reshape(*output.shape[:-1], -1).contiguous(), h_n[..., :hidden].contiguous()


def silence(gates: torch.Tensor, units: int | None) -> None:
    """Set the input's part of the gates of units beyond ``units`` to 0: an infinite input times a weight of 0 is NaN.

    ``gates``: ``[..., 3 * width]``, the input times its weights. Nothing happens where ``units`` is None.
    """
    if units is not None:
        gates.unflatten(-1, (3, -1))[..., units:].zero_()


def _joined(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _padded(weights: torch.Tensor, rows: tuple[int, ...], more: tuple[int, ...]) -> torch.Tensor:
    """Weights of several cells, ``[cells, 3 * H, ...]``, split into ``rows`` and padded with zeros; ``more``: as of F.pad."""
    shape = (len(weights), *rows) if len(rows) > 2 else (len(weights), *rows, *weights.shape[2:])  # noqa: PLR2004
    return torch.nn.functional.pad(weights.reshape(shape), more) if any(more) else weights
