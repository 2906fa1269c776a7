"""Where nn.GRU trains in less time than kernels, though a row says that kernels take less backward.

A row is of another size, and of the gradient of the recurrence alone: a training by kernels has more launches and products beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tuned.calls.gru import run
from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.factors import splits
from tuned.calls.gru.wide import width_of
from tuned.calls.products import precision_of
from tuned.families.gru.model import LAYER_OVER_FIRST, ONE_LAUNCH_HIDDEN, called_us
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import MAX_LOAD
from tuned.families.gru_backward.variant import step_us
from tuned.lookup.lookup import LEAD, Choice
from tuned.lookup.table import Row

if TYPE_CHECKING:
    from tuned.calls.gru.wavefront import Wave

# With fewer steps than these, what does not depend on steps decides. In a call that is host time: by bytes of an element; and for
# packed sequences and padded rows, which take the host longer. In a graph it is the time of some 20 launches. docs/decisions/0082
CALLED_STEPS, OTHER_STEPS, CAPTURED_STEPS = {2: 28, 4: 32}, 56, 8
# For layers that cuDNN has in one launch for all steps, backward too: rows up to which its time rises little, and time that kernels
# must save a graph of each layer, which has more launches beside them.
ONE_LAUNCH_ROWS, ONE_LAUNCH_SAVES_US = 128, 70.0
# By how much kernels must lead where torch.gru computes the output, so that the backward multiplies the input by its weights again.
BEGUN_LEAD = 1.5
# nn.GRU's backward takes at most this multiple of the model's estimate of its forward; measured with up to 128 rows.
BACKWARD_TAKES = 2.0
# A fast host's time for a step of a layer and direction of nn.GRU, forward and backward: docs/decisions/0082.
HOST_STEP_US = 38.0
# Multiplications of float32 products in a microsecond, without tensor cores and by parts: docs/decisions/0088.
WHOLE_PER_US, SPLIT_PER_US = 24e6, 50e6
# Time of a slow host for a training call, in us: once, and for each layer and direction, of which cuDNN has one launch each; the
# forward and the backward by kernels are several launches and products each. A row is of another size, so kernels must lead by
# CALLED_LEAD. docs/decisions/0073
CALL_HOST_US, CELL_HOST_US = 1000.0, 1250.0
CUDNN_CALL_HOST_US, CUDNN_CELL_HOST_US = 900.0, 620.0
CALLED_LEAD = 1.2


def slower(  # noqa: PLR0911, PLR0913 - one return per rule; a call, and what was decided of it
    call: GruCall,
    spec: GruSpec,
    size: GruSize,
    choice: Choice,
    planned: Callable[[], Wave | None],
    *,
    begun: bool = False,
) -> str | None:
    """Why nn.GRU takes less even so, or None.

    Args:
        call: a checked call.
        spec: of one layer.
        size: of the call.
        choice: of the gradient of a layer.
        planned: how the call's layers would run at once, if they may.
        begun: torch.gru computes the output.
    """
    if spec.resets:  # nn.GRU has none
        return None
    captured, row = run.capturing(call.input.device), choice.row
    if size.seq * spec.directions < _least_steps(call, spec, captured=captured):
        return f"{size.seq} steps take PyTorch's own no longer than all that kernels are launched beside"
    if row is None:
        return None
    if _one_launch(spec) and spec.directions == 1 and size.batch < row.size.batch and size.batch <= ONE_LAUNCH_ROWS:
        return f"PyTorch's own is one launch for all steps, and {row.size.batch} rows say nothing of what {size.batch} take it"
    ours_us, theirs_us = _steps_us(call, spec, size, choice, row)
    # BEGUN_LEAD is that of kernels without the products beside them.
    all_us, lead = (ours_us, BEGUN_LEAD) if begun else (ours_us + _products_us(call, spec, size) / size.seq, LEAD)
    if not captured and all_us < HOST_STEP_US:  # the products end before PyTorch's own has launched all steps
        all_us = ours_us
    if is_aligned(call) and theirs_us < lead * all_us:
        return f"the closest row says for this size that PyTorch's own takes {theirs_us:.3g} us a step, and kernels {all_us:.3g}"
    if not captured:  # host time decides
        return _slower_called(spec, size, row, call.num_layers)
    if _one_launch(spec) and size.seq * (theirs_us - ours_us) < ONE_LAUNCH_SAVES_US:
        return f"PyTorch's own is one launch for all steps, {theirs_us:.3g} us each, and kernels are not one: {ours_us:.3g}"
    return _slower_captured(spec, size, row, call.num_layers, planned)


def _steps_us(call: GruCall, spec: GruSpec, size: GruSize, choice: Choice, row: Row) -> tuple[float, float]:
    """The time of a backward step of a layer, by a row of another size: by kernels at least, and by nn.GRU at most."""
    longer = step_us(spec, size, choice.variant) / step_us(row.spec, row.size, row.variant)
    theirs_us = row.eager_us / row.size.seq
    if _one_launch(spec) and row.size.batch > ONE_LAUNCH_ROWS:  # beyond these its time rises with the rows
        theirs_us *= max(1.0, size.batch / row.size.batch)
    narrow = row.spec.hidden * row.spec.item % MAX_LOAD
    if narrow and not _one_launch(spec) and is_aligned(call):  # the row's nn.GRU took longer, since its rows are narrow
        aligned_us = BACKWARD_TAKES * run.library_us_of(spec, size, 1, captured=True)
        theirs_us = min(theirs_us, aligned_us / size.seq)
    return row.median_us * longer / row.size.seq, theirs_us


def _products_us(call: GruCall, spec: GruSpec, size: GruSize) -> float:
    """The time of the float32 products after a layer's recurrence: nn.GRU's time of a row includes them, that of kernels does not."""
    if spec.dtype != "float32" or precision_of(torch.float32) == "tf32":
        return 0.0
    products = size.batch * size.seq * spec.directions * 3 * spec.hidden * (2 * call.input.shape[-1] + spec.hidden)
    return products / (SPLIT_PER_US if splits(spec, call.input) else WHOLE_PER_US)


def _slower_captured(
    spec: GruSpec, size: GruSize, row: Row, layers: int, planned: Callable[[], Wave | None]
) -> str | None:
    """Why nn.GRU takes less in a graph, or None: it may, where it runs layers side by side."""
    if layers == 1 or spec.directions > 1:
        return None
    beside = layers / (1 + LAYER_OVER_FIRST * (layers - 1))
    wave = planned()
    us = layers * row.median_us if wave is None else wave.us * row.size.seq / size.seq
    if layers * row.eager_us < LEAD * beside * us:
        return f"PyTorch's own runs {layers} layers side by side, {beside:.2g} at a time"
    return None


def _least_steps(call: GruCall, spec: GruSpec, *, captured: bool) -> int:
    """The fewest steps of a layer, both directions together, from which on kernels may take less."""
    if captured:
        return CAPTURED_STEPS
    return CALLED_STEPS[spec.item] if spec.dense and call.width is None else OTHER_STEPS


def _one_launch(spec: GruSpec) -> bool:
    """Whether cuDNN has one launch for all steps of a layer forward, and one backward."""
    return spec.dtype == "float32" and spec.dense and spec.hidden <= ONE_LAUNCH_HIDDEN[0]


def _slower_called(spec: GruSpec, size: GruSize, row: Row, layers: int) -> str | None:
    """Why nn.GRU takes less as a call, or None: where it has one launch for all steps, the host takes longer for kernels."""
    if called_us(spec, size):
        return None
    cells = layers * spec.directions
    longer = layers * spec.directions / row.spec.directions * size.seq / row.size.seq
    ours = max(CALL_HOST_US + CELL_HOST_US * cells, row.median_us * longer)
    theirs = max(CUDNN_CALL_HOST_US + CUDNN_CELL_HOST_US * cells, row.eager_us * longer)
    if CALLED_LEAD * ours <= theirs:
        return None
    return (
        f"PyTorch's own is one launch for all steps of each of {cells} layers and directions, and takes a call "
        f"{theirs:.4g} us, kernels {ours:.4g}; a CUDA graph spares the host that"
    )


def is_aligned(call: GruCall) -> bool:
    """Whether the rows of a call's state are a multiple of 16 bytes, without padding."""
    return call.width is None and width_of(call.hx.shape[2], call.input.element_size()) == call.hx.shape[2]
