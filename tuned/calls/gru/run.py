"""Run a GRU over sequences with kernels.

The library (cuBLAS) multiplies the input of a layer by its weights, for all steps at once. The recurrence is then one
launch per layer, for both directions, or one launch for all layers, or whatever else the variant says: see
tuned.families.gru.variant. "As a call" means outside of CUDA graphs, where host time counts too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tuned.calls.gru import eager
from tuned.calls.gru.arguments import GruCall
from tuned.calls.gru.lengths import Lengths, lengths_of, steps_of
from tuned.calls.gru.padding import Padding, padding_of
from tuned.calls.gru.plan import Launched, kept_shape, learn, learn_library, leave
from tuned.calls.gru.project import by_library, of_both, project
from tuned.calls.gru.wide import narrowed, silence, widened, widening_input_us, widening_us, wider_spec, width_of
from tuned.calls.products import name_of, recurrent_precision
from tuned.families.copying import filled
from tuned.families.gru import FAMILY as GRU
from tuned.families.gru.launches import Recurrence, counters_needed
from tuned.families.gru.model import (
    HOST_STEP_US,
    MARGIN,
    MARGIN_STEPS,
    MEASURED,
    called_us,
    margin,
    margin_of_device,
    products_of_input,
    stays_on_chip,
)
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import row_variant, steps_are_alike
from tuned.families.products import DTYPES
from tuned.launching import library, residents
from tuned.launching.copies import launches_of
from tuned.launching.launcher import run_steps
from tuned.launching.plan import launch_known
from tuned.launching.rehearsal import NotedError, listening
from tuned.lookup import misses
from tuned.lookup.asked import asked
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, Gpu, best_kernel, by_steps, choose, modelled, usable
from tuned.lookup.model import library_us, us_of

# Host time of a step of strategy "library" (a library product and a kernel) as a call: on a fast host, and on a slow one, where
# nn.GRU takes 24. Calling torch.mm alone takes a host up to 28 us, whatever it multiplies. docs/decisions/0072
CALLED_STEP_US, SLOW_CALLED_STEP_US = 10.0, 37.0
# Host time of one more layer of a call, on the scale of HOST_STEP_US: the product of its input, and its recurrence.
CALLED_LAYER_US = 10.0
# Device time that kernels must save a call of several layers, for each layer and direction, where cuDNN has one launch for each: our
# kernels take the host longer. Two layers both ways whose kernels saved 56 us took a slow host 41 us more than nn.GRU.
CALLED_LAYER_SAVES_US = 20.0
# Host time of a call of packed sequences beyond that of a call of sequences of one length, on the scale of HOST_STEP_US.
PACKED_US = 64.0
# Host time of nn.GRU for a step of a layer and direction, as long with padded rows as without. First on a slow host, then on
# one that is neither slow nor fast: the H200s' host took 17 for 60 rows of 1742 units (docs/decisions/0078).
SLOW_HOST_STEP_US, PADDED_STEP_US = 24.0, 17.0
# Kernels take this multiple of the model's estimate if rows are no multiple of 16 bytes ("narrow" rows).
NARROW_TAKES = 1.25
LIBRARY_NARROW_TAKES = 1.13  # nn.GRU of narrow rows takes at least this multiple: three layers took 1.13, 1.3 and 2.1
# The model of nn.GRU thinks too little of many units and some rows: 1.24 to 2.35 times less than was measured for narrow rows, and
# 1.1 to 1.7 times less for others (benchmarks/results/tuning/nvidia_h100-narrow-grus.json).
MANY_UNITS, FEW_ROWS, SOME_ROWS = 1024, 4, 128
NARROW_MORE, WIDE_MORE = 1.5, 1.3
# The least multiple of the model's estimate that nn.GRU of narrow rows takes in a graph: nine in ten of 522 random GRUs took so much
# or more, and those of many units in 16 bits took more (docs/decisions/0078).
SOME_UNITS, SOME_LEAST, MANY_LEAST = 512, 1.15, 1.22
ROW_TAKES = 0.95  # kernels of form "row" must take less with padding than this part of their time without
LEFT = Choice("eager", "PyTorch's own takes less with padded rows, and kernels not enough less to be sure of it", None)
MEASURED_RULES = ("winner", "nearest size")  # rules of a choice whose steps were measured
DEVICE_ROWS = 64  # from so many rows on a call of a GRU takes the device longer than the host
ALIGNED_BYTES = 16  # templates/gru_step.py.jinja assumes that rows are so aligned if their width allows it


class Kept(NamedTuple):
    """What a gradient needs of a launch, besides its arguments and its output."""

    gates: torch.Tensor  # in ``kept_shape``: the input times the weights of the lowest layer
    between: torch.Tensor | None  # [layers - 1, *tokens, hidden]: the outputs of the lower layers of a stack


def wide(call: GruCall, *, captured: bool | None = None) -> GruCall:
    """The call, with ``width`` set where it takes less with rows padded to a multiple of 16 bytes.

    Padding is for the rows of states and input, or for those of the input alone. ``captured``: as in ``_parts``.
    """
    hidden, features, item = call.hx.shape[2], call.input.shape[-1], call.input.element_size()
    width = width_of(hidden, item)
    if (width == hidden and width_of(features, item) == features) or call.dropout or not hidden or is_empty(call):
        return call
    if name_of(call.input.dtype) not in DTYPES:
        return call
    captured = capturing(call.input.device) if captured is None else captured
    wider, (spec, size) = dataclasses.replace(call, width=width), spec_of(call, 1)
    narrow = [choice for _, _, choice in _parts(call, captured=captured)]
    if width == hidden:
        return wider if pays_for_input(spec, size, features, narrow, captured=captured) else call
    broad = [choice for _, _, choice in _parts(wider, captured=captured)]
    if pays(spec, size, call.num_layers, narrow, broad, captured=captured):
        return wider
    known = gpu_of(call.input.device).capability  # the time of nn.GRU is known on NVIDIA's GPUs alone
    served = any(choice.variant is not None for choice in narrow)
    if served or not known or not pays_pytorch(spec, size, call.num_layers, captured=captured):
        return call
    return dataclasses.replace(wider, left=any(choice.variant is not None for choice in broad))


def pays_for_input(spec: GruSpec, size: GruSize, features: int, choices: Sequence[Choice], *, captured: bool) -> bool:
    """Whether a call that kernels serve takes less with a padded input. A product of narrow rows takes up to eight times as long."""
    if any(choice.variant is None or not choice.us for choice in choices):
        return False
    return narrow_us(spec, size, features) > widening_input_us(spec, size, features, captured=captured)


def narrow_us(spec: GruSpec, size: GruSize, features: int) -> float:
    """How much longer the product of an input takes than it would with padded rows, microseconds."""
    now, after = (
        us_of(GRU, "projection", products_of_input(spec, size, width))
        for width in (features, width_of(features, spec.item))
    )
    return now - after


def pays(  # noqa: PLR0913 - a call, and what would serve it
    spec: GruSpec, size: GruSize, layers: int, narrow: Sequence[Choice], broad: Sequence[Choice], *, captured: bool
) -> bool:
    """Whether ``layers`` layers of a spec take less with padded rows.

    ``narrow``, ``broad``: the choices for all their launches, without padding and with it.
    """
    if any(choice.variant is None or not choice.us for choice in broad):
        return False
    us = sum(choice.us for choice in broad) + widening_us(spec, size, layers, captured=captured)
    if all(choice.variant is not None for choice in narrow):
        # The model thinks kernels faster than they are, and those of narrow rows by a quarter more than others. Form "row" takes as
        # long with padding as without: only the product of the input differs.
        alike = narrow[0].variant.by_row and broad[0].variant.by_row
        most = ROW_TAKES if alike else NARROW_TAKES if narrow[0].rule == "model" else MARGIN
        return us < most * sum(choice.us for choice in narrow)
    if spec.resets:  # nn.GRU has none
        return True
    least, left = _replaced_us(spec, size, layers, captured=captured), narrow[0]
    if layers == 1 and left.row is not None and left.us:  # nn.GRU was measured
        least = left.us if captured else max(left.us, called_us(spec, size))
    wider, variant = wider_spec(spec), broad[0].variant
    by_steps = variant.strategy == "library" and not captured
    if by_steps and slow_host_us(spec, size, layers) > LIBRARY_NARROW_TAKES * least:
        return False
    return us < min(margin(wider, variant), margin_of_device(wider, size, variant)) * least


def _replaced_us(spec: GruSpec, size: GruSize, layers: int, *, captured: bool) -> float:
    """The time of nn.GRU that a call replaces: ``library_us_of``, raised where the model thinks too little of narrow rows."""
    device_us = library_us_of(spec, size, layers, captured=True)
    if wider_spec(spec) != spec and spec.hidden > SOME_UNITS and FEW_ROWS < size.batch <= SOME_ROWS:
        device_us *= MANY_LEAST if spec.hidden > MANY_UNITS and spec.dtype != "float32" else SOME_LEAST
    return device_us if captured else max(device_us, library_us_of(spec, size, layers, captured=False))


def pays_pytorch(spec: GruSpec, size: GruSize, layers: int, *, captured: bool) -> bool:
    """Whether nn.GRU takes less with padded rows: tensor cores take up to five times as long to multiply narrow ones."""
    if not multiplies_faster(spec):
        return False
    now, after = narrow_and_wide_us(spec, size, layers)
    if not captured:
        after = max(after, size.seq * layers * spec.directions * SLOW_HOST_STEP_US)
    return after + widening_us(spec, size, layers, captured=captured) < MARGIN * now


def multiplies_faster(spec: GruSpec) -> bool:
    """Whether nn.GRU can serve a spec, and its products take less if rows are a multiple of 16 bytes."""
    return not (spec.resets or spec.thd or (spec.dtype == "float32" and spec.precision == "ieee"))


def narrow_and_wide_us(spec: GruSpec, size: GruSize, layers: int) -> tuple[float, float]:
    """The device time of nn.GRU, microseconds: with rows as they are, and with padded rows."""
    narrow, broad = (library_us_of(one, size, layers, captured=True) for one in (spec, wider_spec(spec)))
    if spec.hidden <= MANY_UNITS or not FEW_ROWS < size.batch <= SOME_ROWS:
        return narrow, broad
    return NARROW_MORE * narrow, WIDE_MORE * broad


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def library_us_of(spec: GruSpec, size: GruSize, layers: int, *, captured: bool) -> float:
    """The estimated time of nn.GRU for ``layers`` layers, microseconds: the device's; as a call the host's, if that is longer."""
    if layers == 1:
        theirs_us, host_us = library_us(GRU, spec, size), called_us(spec, size)
    else:
        stack = dataclasses.replace(spec, directions=1, layers=layers, resets=False)
        theirs_us, host_us = (us * spec.directions for us in (library_us(GRU, stack, size), called_us(stack, size)))
    return theirs_us if captured else max(theirs_us, host_us)


def why_not(call: GruCall, *, trained: bool = False) -> str | None:
    """Why no kernel can serve a checked call, or None; ``trained``: it is the forward of a call that needs a gradient."""
    reason = why_eager(call.input, name_of(call.input.dtype) in DTYPES)
    if reason is None and not call.hx.shape[2]:
        return "there is nothing to compute: an axis is empty"
    if reason is not None or is_empty(call):
        return reason
    spec, size, choice = _parts(call, trained=trained)[-1]
    if choice.variant is None:
        return choice.why + units_more(call)
    if not spec.packed or spec.resets or not choice.us or capturing(call.input.device):
        return None
    us = choice.us * call.num_layers / spec.layers
    theirs_us = _replaced_us(spec_of(call.as_given, 1)[0], size, call.num_layers, captured=False)
    if us + PACKED_US <= theirs_us:
        return None
    return f"PyTorch's own takes about {theirs_us:.4g} us, kernels {us:.4g} and the host {PACKED_US:g} for packed sequences"


def kernels_us(call: GruCall, *, trained: bool) -> float:
    """The estimated time of the recurrences of a call that ``why_not`` accepts, microseconds; 0 if the time of one is not known."""
    each = [choice.us for _, _, choice in _parts(call, trained=trained)]
    return sum(each) if all(each) else 0.0


def units_more(call: GruCall) -> str:
    """For a reason why: how many units were added to a padded call; an empty string for a call that is not padded so."""
    more = 0 if call.width is None else call.width - call.hx.shape[2]
    return f"; with {more} units more, so that rows are a multiple of 16 bytes" if more else ""


def remember_eager(call: GruCall) -> None:
    """Let torch.gru serve later calls like one that ``why_not`` refused, without deciding again."""
    served = (
        why_eager(call.input, name_of(call.input.dtype) in DTYPES) is None and call.hx.shape[2] and not is_empty(call)
    )
    if served and may_learn(call.input.device):
        in_graph = wide(call, captured=True)
        kernels = any(choice.variant is not None for _, _, choice in _parts(in_graph, captured=True))
        leave(call, captured=not kernels and not pads_pytorch(in_graph, captured=True))


def pads_pytorch(call: GruCall, *, captured: bool | None = None) -> bool:
    """Whether torch.gru is to serve a call that ``wide`` returned, with padded tensors; ``captured``: as in ``wide``."""
    return call.width is not None and all(choice.variant is None for _, _, choice in _parts(call, captured=captured))


def padded_pytorch(call: GruCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) by torch.gru with padded tensors, for a call of which ``pads_pytorch`` is true."""
    with torch.cuda.device(call.input.device):
        if may_learn(call.input.device):
            in_graph = wide(call.as_given, captured=True)
            learn_library(call, captured=pads_pytorch(in_graph, captured=True))
        padding = padding_of(call, flat=True)
        if padding is None:
            return eager.gru(call.as_given)
        return padding.cut(*eager.gru(_padded(call, padding)))


def modelled_steps(call: GruCall) -> bool:
    """Whether the model, and no row, gives a launch for each step to a call that needs a gradient and that ``why_not`` accepts."""
    choice = _parts(call, trained=True)[-1][2]
    return choice.rule == "model" and choice.variant is not None and choice.variant.strategy == "library"


def choice_of(call: GruCall, *, trained: bool = False) -> tuple[Choice, tuple[str, ...]]:
    """The choice for a call that ``why_not`` accepts, or for a training's forward; and the modules of tuned.kernels that it launches."""
    if is_empty(call):
        return Choice("eager", "there is no step to compute", None), ()
    spec, _, choice = _parts(call, trained=trained)[-1]
    if call.width is not None:
        why = f"with {call.width - call.hx.shape[2]} units more, so that rows are a multiple of 16 bytes: {choice.why}"
        choice = dataclasses.replace(choice, why=why)
    return choice, () if choice.variant is None else GRU.kernel_names(spec, choice.variant)


def forward(call: GruCall, kept: list[Kept] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, h_n) by kernels, for a call that ``why_not`` accepts; for each launch ``kept`` gets what its gradient needs.

    Raises:
        NotedError: this thread listens, and the launches were noted instead.
    """
    directions = 2 if call.bidirectional else 1
    if is_empty(call):
        return call.input.new_empty((*call.input.shape[:-1], directions * call.hx.shape[2])), call.hx.clone()
    with torch.cuda.device(call.input.device):
        try:
            return _forward(call, kept)
        except RuntimeError as error:
            if not residents.too_large(error):
                raise
        # The driver allows fewer resident programs than it said, or could not be asked. All layers are alike, so the
        # first cooperative launch has failed, before any dropout drew random numbers.
        residents.forbid(call.input.device.index or 0)
        return _forward(call, kept)


def _forward(call: GruCall, kept: list[Kept] | None) -> tuple[torch.Tensor, torch.Tensor]:
    parts, directions = _parts(call, trained=kept is not None), 2 if call.bidirectional else 1
    if any(choice.variant is None for _, _, choice in parts):  # a limit was met after ``why_not`` accepted the call
        return eager.gru(call)
    lengths, index = lengths_of(call), call.input.get_device()
    if listening() is not None:  # note the kernel by which plans fill tensors, too
        launches_of([filled(1, 1, 0)], call.input)
    padding = None if call.width is None or kept is not None or index < 0 else padding_of(call)
    served = call if call.width is None else widened(call) if padding is None else _padded(call, padding)
    x, h_n = served.input, torch.empty_like(served.hx, memory_format=torch.contiguous_format)
    layer, learnt = 0, []
    for spec, size, choice in parts:
        if layer and call.dropout:
            x = torch.nn.functional.dropout(x, call.dropout)
        cells = slice(layer * directions, (layer + spec.layers) * directions)
        x, what, part = _recur(cells_of(served, x, cells), spec, size, choice.variant, h_n[cells], lengths)
        learnt.append(part)
        if kept is not None:
            kept.append(what)
        layer += spec.layers
    if listening() is not None:  # all launches of the call are noted, and none was made
        raise NotedError
    # If a training was widened before, its plan would have the key of a GRU that really is as wide: no plan is made.
    widened_before = call.units is not None
    if may_learn(call.input.device):
        captured = kept is None and _alike_in_graph(call, parts)
        if not (call.dropout and len(parts) > 1) and not widened_before:
            learn(call, learnt, captured=captured, gradient=kept is not None)
    if served is call:
        return x, h_n
    return narrowed(call, x, h_n) if padding is None else padding.cut(x, h_n)


def _alike_in_graph(call: GruCall, parts: Sequence[tuple[GruSpec, GruSize, Choice]]) -> bool:
    """Whether a call without a gradient makes the same launches in a CUDA graph. If torch.gru serves there, cuDNN is set up."""
    in_graph = _parts(wide(call.as_given, captured=True), captured=True)
    if any(choice.variant is None for _, _, choice in in_graph):
        library.set_up_recurrences(call.input.device)
    return [(spec, choice.variant) for spec, _, choice in in_graph] == [(spec, c.variant) for spec, _, c in parts]


def _padded(call: GruCall, padding: Padding) -> GruCall:
    """``widened(call)``, in one launch or a few."""
    x, hx, weights = padding.pad(call.input, call.hx, call.weights)
    return dataclasses.replace(call, input=x, hx=hx, weights=tuple(weights), width=None)


def cells_of(call: GruCall, x: torch.Tensor, cells: slice) -> GruCall:
    """The part of a call that the cells of some whole layers compute from an input x; without dropout."""
    directions, each = 2 if call.bidirectional else 1, 4 if call.has_biases else 2
    return dataclasses.replace(
        call,
        input=x,
        hx=call.hx[cells],
        weights=call.weights[cells.start * each : cells.stop * each],
        num_layers=(cells.stop - cells.start) // directions,
        dropout=0.0,
        units=None if cells.start else call.units,  # outputs of lower layers are finite
    )


def in_one_launch(call: GruCall) -> bool:
    """Whether all layers of a call are one launch if no gradient is needed; true of a call of one layer."""
    return call.num_layers == 1 or (len(parts := _parts(call)) == 1 and parts[0][2].variant is not None)


def is_empty(call: GruCall) -> bool:
    """Whether the call has no token, so that its state stays as it is."""
    return not call.input.shape[:-1].numel() or not call.hx.shape[1]


def spec_of(call: GruCall, layers: int) -> tuple[GruSpec, GruSize]:
    """The spec of ``layers`` layers of a call in one launch, and the size."""
    layout = "packed" if call.batch_sizes is not None else "thd" if call.cu_seqlens is not None else "dense"
    directions = 2 if call.bidirectional else 1
    precision = recurrent_precision() if call.input.dtype == torch.float32 else "tf32"
    spec = _spec(
        name_of(call.input.dtype),
        call.hidden,
        layout,
        directions,
        layers,
        bias=call.has_biases,
        precision=precision,
        resets=call.resets is not None,
    )
    return spec, GruSize(call.hx.shape[1], steps_of(call))


_spec = functools.lru_cache(maxsize=misses.MAX_CHOICES)(GruSpec)  # checking a spec takes as long as a whole lookup


def _parts(
    call: GruCall, *, captured: bool | None = None, trained: bool = False
) -> list[tuple[GruSpec, GruSize, Choice]]:
    """The launches of a call, lowest layer first: one for all layers if a variant can, else one per layer.

    ``captured``: in a CUDA graph; by default if one is being captured. ``trained``: a gradient follows.
    """
    if call.left:
        return [(*spec_of(call, 1), LEFT)] * call.num_layers
    gpu = gpu_of(call.input.device)
    limit = limit_of(call.input.device)
    captured = capturing(call.input.device) if captured is None else captured
    if call.num_layers > 1 and not call.bidirectional and not call.dropout and call.resets is None:
        spec, size = spec_of(call, call.num_layers)
        stack = timely(_choose(spec, size, gpu, *limit), spec, size, captured)
        if stack.variant is not None and not _by_layers(call, stack, gpu, limit, captured):
            return [(spec, size, stack)]
    spec, size = spec_of(call, 1)
    padded = call.width is not None and call.width != call.hx.shape[2]
    choice = timely(_choose(spec, size, gpu, *limit), spec, size, captured, padded=padded, trained=trained)
    if call.num_layers > 1 and choice.variant is not None and choice.us and call.resets is None:
        theirs_us, us = library_us_of(spec, size, call.num_layers, captured=captured), choice.us * call.num_layers
        if us > _share(choice, spec, size, captured) * theirs_us:
            why = f"PyTorch's own runs {call.num_layers} layers side by side, in about {theirs_us:.4g} us"
            choice = _left(choice, why)
        elif not captured and not called_us(spec, size) and theirs_us - us < CALLED_LAYER_SAVES_US * len(call.hx):
            why = f"as a call PyTorch's own is one launch a layer, and kernels save the device {theirs_us - us:.4g} us"
            choice = _left(choice, why)
    if padded and not (captured or trained):
        narrow, _ = spec_of(call.as_given, 1)
        choice = padded_call(choice, narrow, size, call.num_layers)
    return [(spec, size, choice)] * call.num_layers


def _by_layers(call: GruCall, stack: Choice, gpu: Gpu, limit: tuple[int, ...], captured: bool) -> bool:  # noqa: FBT001
    """Whether the layers of a stack take less one by one: a layer of few units can take form "row", and a stack cannot."""
    spec, size = spec_of(call, 1)
    if not stack.us or row_variant(spec.hidden) is None:
        return False
    one = timely(_choose(spec, size, gpu, *limit), spec, size, captured)
    if one.variant is None or not one.variant.by_row:
        return False
    beside_us = 0.0 if captured else (call.num_layers - 1) * CALLED_LAYER_US
    return call.num_layers * one.us + beside_us < stack.us


def limit_of(device: torch.device) -> tuple[int, ...]:
    """The number of programs that may wait for each other on a part of the GPU; empty if the process has all of it."""
    found = residents.allowed(device.index or 0) if asked() is None else None  # tuned.explain asks about whole GPUs
    return () if found is None else (found,)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def timely(  # noqa: PLR0913 - a choice, and how it is called
    choice: Choice,
    spec: GruSpec,
    size: GruSize,
    captured: bool,  # noqa: FBT001
    *,
    padded: bool = False,
    trained: bool = False,
) -> Choice:
    """The choice as a call or a CUDA graph needs it: one launch, a launch for each step, or torch.gru.

    Args:
        choice: what the lookup gave.
        spec: of one launch.
        size: of the call.
        captured: a CUDA graph spares the host a launch for each step.
        padded: units were added. The call replaces nn.GRU of narrow rows, which takes longer: ``pays`` weighs that.
        trained: a gradient follows. For it nn.GRU has a launch for each step again, and we have one for all.
    """
    found = _timely(choice, spec, size, captured, trained=trained)
    measured = choice.rule in MEASURED_RULES or (choice.rule == "eager" and choice.row is not None)
    steps = None if measured or choice.gpu is None else _by_steps(spec, size, choice.gpu)
    if steps is None or not (captured or steps_are_alike(spec)):
        return found
    us = steps.us if captured else max(steps.us, size.seq * spec.directions * CALLED_STEP_US)
    # For a padded call ``pays`` holds the time of a slow host against nn.GRU of narrow rows.
    slow_us = 0.0 if captured or padded else slow_host_us(spec, size)
    if max(steps.us, slow_us) > MARGIN_STEPS * library_us_of(spec, size, 1, captured=True):
        return found
    if found.variant is not None and found.us <= us:
        return found
    return dataclasses.replace(steps, why=f"{steps.why}; {found.why}", us=us)


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _by_steps(spec: GruSpec, size: GruSize, gpu: Gpu) -> Choice | None:
    """The choice of a launch for each step; None on GPUs of a lower capability than those that it was measured on."""
    return by_steps(GRU, spec, size, gpu) if gpu.capability >= MEASURED else None


def _timely(
    choice: Choice,
    spec: GruSpec,
    size: GruSize,
    captured: bool,  # noqa: FBT001
    *,
    trained: bool,
) -> Choice:
    """The choice; where no CUDA graph spares the host a launch for each step, the best kernel in one launch or torch.gru.

    Strategy "library" stays where it takes less even so: with many rows, the device decides the time of a step.
    """
    if choice.variant is None or spec.resets:
        return choice if captured or spec.resets else _called(choice, spec, size)
    if choice.variant.strategy == "persistent":
        share = _share(choice, spec, size, captured)
        if share == 1 or choice.us <= share * library_us_of(spec, size, 1, captured=captured):
            return choice
        return _left(choice, f"the model errs, and {share} of PyTorch's time is what it must be thought to take here")
    other = None if choice.gpu is None else _modelled(spec, size, choice.gpu)
    # A row was measured in a graph. torch.gru needs the values of cu_seqlens on the host, which no capture allows.
    in_graph = captured and (choice.rule in MEASURED_RULES or spec.thd)
    if in_graph or (not captured and _serves_a_call(choice, other, spec, size, trained=trained)):
        return choice
    why = f"a launch for each of {size.seq} steps takes less only in a CUDA graph, where it was measured"
    if other is None or other.variant is None:
        left = _left(choice, why)
        return left if captured else _called(left, spec, size)
    return dataclasses.replace(other, why=f"{why}; {other.why}")


def _called(choice: Choice, spec: GruSpec, size: GruSize) -> Choice:
    """The choice, which is torch.gru; or the best kernel in one launch, if it takes the device less than nn.GRU takes the host."""
    host_us = called_us(spec, size)
    best = _best_kernel(spec, size, choice.gpu) if choice.gpu is not None and host_us else None
    if (
        best is None
        or not best.us
        or best.us > (1.0 if best.row is not None else margin_of_device(spec, size, best.variant)) * host_us
    ):
        return choice
    why = f"{best.why}; as a call PyTorch's own takes the host {host_us:.4g} us, at {HOST_STEP_US:g} a step of a layer and direction"
    return dataclasses.replace(best, why=why)


def padded_call(choice: Choice, narrow: GruSpec, size: GruSize, layers: int) -> Choice:
    """The choice for each layer of a padded call; or the best kernel in one launch, instead of a launch for each step.

    The call replaces nn.GRU of ``narrow`` rows. The steps of nn.GRU take the host as long with padded rows, or longer. A kernel in
    one launch takes the host no longer for more steps.
    """
    variant = choice.variant
    in_one_launch = variant is not None and variant.strategy == "persistent"
    if in_one_launch or narrow.resets or choice.gpu is None or not called_us(narrow, size):
        return choice
    left, spec = [LEFT], wider_spec(narrow)
    if variant is not None and pays(narrow, size, layers, left, [choice] * layers, captured=False):
        return choice
    best = _best_kernel(spec, size, choice.gpu)
    if best is None or not pays(narrow, size, layers, left, [best] * layers, captured=False):
        return choice
    if pays_pytorch(narrow, size, layers, captured=False):
        host_us = size.seq * layers * spec.directions * PADDED_STEP_US
        theirs_us = max(library_us_of(spec, size, layers, captured=True), host_us)
        if layers * best.us > margin_of_device(spec, size, best.variant) * theirs_us:
            return choice
    why = f"{best.why}; a launch for each step takes a host as long with padded rows as without"
    return dataclasses.replace(best, why=why)


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _best_kernel(spec: GruSpec, size: GruSize, gpu: Gpu) -> Choice | None:
    return best_kernel(GRU, spec, size, gpu)


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _modelled(spec: GruSpec, size: GruSize, gpu: Gpu) -> Choice | None:
    return modelled(GRU, spec, size, gpu)


def _serves_a_call(choice: Choice, other: Choice | None, spec: GruSpec, size: GruSize, *, trained: bool) -> bool:
    """Whether a launch for each step takes less, as a call, than nn.GRU and than ``other``, the model's best in one launch.

    Strategy "library" has plans only if its steps are one compiled kernel. A choice without a time is of no family with a model.
    """
    if choice.variant.strategy != "library" or not choice.us or not steps_are_alike(spec):
        return False
    row, theirs_us = choice.row, library_us(GRU, spec, size)
    if row is not None and row.eager_us:
        theirs_us = row.eager_us * size.seq / row.size.seq
    us = max(choice.us, size.seq * spec.directions * CALLED_STEP_US)
    most_us = max(us, 0.0 if trained else slow_host_us(spec, size))
    return most_us < max(theirs_us, called_us(spec, size)) and (other is None or us < other.us)


def slow_host_us(spec: GruSpec, size: GruSize, layers: int = 1) -> float:
    """The time of a slow host for strategy "library". If nn.GRU takes the device less than this, it takes such a host less too."""
    return size.seq * layers * spec.directions * SLOW_CALLED_STEP_US


def _share(choice: Choice, spec: GruSpec, size: GruSize, captured: bool) -> float:  # noqa: FBT001
    """The most that a choice may take, by its estimate, as a part of nn.GRU's time; less if the model chose and the device decides.

    In a call of few rows the host decides, and kernels take a third of nn.GRU's host time: docs/decisions/0050.
    """
    if choice.rule == "model" and choice.variant.strategy == "library":
        return MARGIN_STEPS
    few = not captured and size.batch < DEVICE_ROWS and not stays_on_chip(spec, size)
    if choice.rule != "model" or spec.thd or few:
        return 1.0
    return margin_of_device(spec, size, choice.variant)


def _left(choice: Choice, why: str) -> Choice:
    """The choice changed to torch.gru, for the reason ``why``."""
    return dataclasses.replace(choice, rule="eager", why=f"{why}; else {choice.rule}: {choice.why}", variant=None)


@functools.lru_cache(maxsize=misses.MAX_CHOICES)
def _choose(spec: GruSpec, size: GruSize, gpu: Gpu, limit: int | None = None) -> Choice:
    """The choice, made once for all equal calls; ``limit`` is the number of programs that may wait for each other."""
    if spec.resets:
        plain = dataclasses.replace(spec, resets=False)
        return _with_resets(
            _choose(plain, size, gpu, limit),
            spec,
            size,
            dataclasses.replace(gpu, multiprocessors=gpu.multiprocessors if limit is None else limit),
        )
    if limit is None:
        choice = choose(GRU, spec, size, gpu)
        misses.note(GRU, spec, size, choice)
        return choice
    choice = choose(GRU, spec, size, dataclasses.replace(gpu, multiprocessors=limit))
    part = f"{limit} of {gpu.multiprocessors} programs may wait for each other here, on a part of the GPU"
    return dataclasses.replace(choice, why=f"{part}: {choice.why}")


def _with_resets(choice: Choice, spec: GruSpec, size: GruSize, gpu: Gpu) -> Choice:
    """The choice made without resets, whose time hardly counts; else a kernel that supports them, since cuDNN does not."""

    def fits(variant: Any) -> bool:
        return variant is not None and usable(GRU, spec, size, variant, gpu.capability, gpu.multiprocessors)

    if fits(choice.variant) and choice.variant.strategy == "persistent":
        return choice
    why = "PyTorch's own has no resets"
    best = best_kernel(GRU, dataclasses.replace(spec, resets=False), size, gpu)
    if best is not None and fits(best.variant):
        return dataclasses.replace(best, why=f"{why}; {best.why}")
    default = GRU.fit(GRU.default_variant(spec, size), spec, gpu.capability)
    if fits(default):
        return Choice("default", f"{why}, and neither a row nor a model has a kernel", default, gpu=gpu)
    return dataclasses.replace(
        choice, rule="eager", why=f"{why}, and no kernel fits: sequences are cut at them", variant=None
    )


def _recur(  # noqa: PLR0913 - a part of a call
    call: GruCall, spec: GruSpec, size: GruSize, variant: Any, h_n: torch.Tensor, lengths: Lengths
) -> tuple[torch.Tensor, Kept, Launched]:
    """(output ``[*tokens, directions * hidden]``, what a gradient needs, launch) of one part of a call; ``h_n`` gets its last states."""
    x, each = call.input, 4 if call.has_biases else 2
    rows, shape = x.reshape(-1, x.shape[-1]), (spec.directions, *x.shape[:-1], 3 * spec.hidden)
    both = spec.directions > 1 and by_library(len(rows), call.weights[0], spec.precision)
    at_once = of_both(rows, call.weights[::each]) if both else None
    gates = x.new_empty(shape) if at_once is None else at_once.view(shape)
    for direction in range(spec.directions if at_once is None else 0):
        project(rows, call.weights[direction * each], gates[direction].view(-1, 3 * spec.hidden), spec.precision)
    silence(gates, call.units)
    out = x.new_empty((*x.shape[:-1], spec.directions * spec.hidden))
    recurrence = recurrence_of(call, spec, size, variant, gates, out, slice(None), h_n, lengths)
    compiled = run_steps(GRU.launches(spec, variant, recurrence), functools.partial(launch_known, x.device.index))
    between = recurrence.between
    if between is not None and recurrence.out is not out:  # batch_first
        between = between.transpose(1, 2)
    kept = Kept(gates.view(kept_shape(spec, len(rows))), between)
    return out, kept, Launched(call, spec, variant, recurrence, compiled)


def recurrence_of(  # noqa: PLR0913 - a part of a call, after the projection of its input
    call: GruCall,
    spec: GruSpec,
    size: GruSize,
    variant: Any,
    gates: torch.Tensor,
    out: torch.Tensor,
    cells: slice,
    h_n: torch.Tensor,
    lengths: Lengths,
) -> Recurrence:
    """The tensors of one part of a call as its kernels take them."""
    each = 4 if call.has_biases else 2
    weights = [call.weights[cell * each : (cell + 1) * each] for cell in range(len(call.hx))[cells]]
    turned = call.batch_first and lengths.layout == "dense"
    between = out.new_empty((spec.layers - 1, *out.shape)) if spec.stacked else None
    return Recurrence(
        gates=gates.transpose(1, 2) if turned else gates,
        weight_ih=stack([w[0] for w in weights[1:]]) if spec.stacked else None,
        weight_hh=stack([w[1] for w in weights]),
        bias_ih=stack([w[2] for w in weights]) if spec.bias else None,
        bias_hh=stack([w[3] for w in weights]) if spec.bias else None,
        h_0=_rows(call.hx[cells]),
        out=out.transpose(0, 1) if turned else out,
        between=between.transpose(1, 2) if turned and between is not None else between,
        h_n=h_n,
        batch=size.batch,
        seq=size.seq,
        starts=lengths.starts,
        lengths=lengths.lengths,
        resets=marks_of(call),
        states=out.new_empty(call.hx[cells].shape, dtype=torch.float32) if variant.in_turn else None,
        counters=out.new_empty(counters_needed(spec, size.batch), dtype=torch.int32)
        if variant.exchange == "counter"
        else None,
        products=out.new_empty((size.batch, 3 * spec.hidden)) if variant.strategy == "library" else None,
    )


def marks_of(call: GruCall) -> torch.Tensor | None:
    """The resets of a call as kernels take them: ``[T, B]`` or ``[tokens]``, any strides."""
    return call.resets.t() if call.batch_first and call.resets is not None else call.resets


def may_learn(device: torch.device) -> bool:
    """Whether the direct launcher can be probed; during graph capture it cannot, and the next call decides."""
    return device.type == "cuda" and not capturing(device)


def _rows(h_0: torch.Tensor) -> torch.Tensor:
    """The initial states, contiguous and 16-byte aligned: itself or a copy."""
    if h_0.is_contiguous() and h_0.data_ptr() % ALIGNED_BYTES == 0:
        return h_0
    return h_0.clone(memory_format=torch.contiguous_format)


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors of all cells as one: a view if they lie at equal distances in one storage, as torch.nn.GRU's do; or a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.contiguous().unsqueeze(0)
    item = first.element_size()
    apart = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors)}
    together = {t.untyped_storage().data_ptr() for t in tensors}
    if len(apart) == len(together) == 1 and all(t.is_contiguous() for t in tensors):
        (step,) = apart
        if step > 0 and step % item == 0:
            return first.as_strided((len(tensors), *first.shape), (step // item, *first.stride()))
    return torch.stack(list(tensors))
