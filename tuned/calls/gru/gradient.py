"""Launch the gradient of a recurrence: directly, where one with the same properties was launched before."""

from __future__ import annotations

import functools
import operator
from typing import Any

from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_backward import FAMILY as BACKWARD
from tuned.families.gru_backward.launches import RecurrenceGradient, before
from tuned.families.launch import Launch
from tuned.launching.launcher import run_step, run_steps
from tuned.launching.plan import ALIGNED_BYTES, direct_launch, launch_known, remember
from tuned.launching.rehearsal import NotedError, listening

_KNOWN: dict[Any, Any] = {}  # properties of a gradient -> what launches it, given the addresses of its tensors
_tensors = operator.attrgetter(  # the tensors that come first in a kernel's signature; then resets, which comes after numbers
    "gates", "hidden", "before", "weight_hh", "bias_ih", "bias_hh", "grad_out", "grad_h_n", "out", "grad_h_0", "states", "counters",
    "starts", "lengths", "resets",
)  # fmt: skip


def launch(
    index: int, spec: GruSpec, variant: GruVariant, gradient: RecurrenceGradient, *, filled: bool = False
) -> None:
    """Launch a gradient on the current stream of a device, which is the current one.

    Args:
        index: of the device.
        spec: of one layer, or of as many as run at once.
        variant: of the kernel.
        gradient: its tensors.
        filled: ``out`` already holds the bits that programs wait to see replaced.

    Raises:
        NotedError: this thread listens, and the launch was noted instead.
    """
    tensors = _tensors(gradient)
    addresses = tuple([0 if t is None else t.data_ptr() for t in tensors])
    key = (
        index, spec, variant, gradient.batch, gradient.seq, gradient.out.shape, gradient.starts is None or gradient.starts.dtype,
        tuple([t is not None and t.stride() for t in tensors]), tuple([address % ALIGNED_BYTES for address in addresses]),
    )  # fmt: skip
    direct = None if listening() is not None else _KNOWN.get(key)
    fills = [fill for fill in before(variant, gradient) if not (filled and fill.tensor is gradient.out)]
    if direct is not None:
        run, function, head, programs, rest, stream_of, enter, leave, pointers, marks = direct
        if not (enter.calls or leave.calls):  # a profiler has hooks: only the public launcher calls them
            for fill in fills:
                run_step(fill)
            numbers = rest if marks is None else (*rest[:marks], addresses[-1], *rest[marks:])
            run(programs, 1, 1, stream_of(index), function, *head, *pointers(addresses), *numbers)
            return
    (*_, last) = BACKWARD.launches(spec, variant, gradient)
    compiled = run_steps((*fills, last), functools.partial(launch_known, index))
    if listening() is not None:
        raise NotedError
    if compiled is not None:
        _learn(key, index, last, compiled, tensors)


def _learn(key: Any, index: int, last: Any, compiled: Any, tensors: tuple[Any, ...]) -> None:
    assert isinstance(last, Launch), "a gradient ends with its kernel"
    direct = direct_launch(last, compiled, index)
    if direct is None:
        return
    # The place of each pointer of the signature among the tensors. For one that is not read, another tensor is given again.
    first, behind = last.arguments[: len(tensors) - 1], last.arguments[len(tensors) - 1 :]
    places = [next(place for place, t in enumerate(tensors) if t is pointer) for pointer in first]
    marks = next((at for at, value in enumerate(behind) if value is tensors[-1]), None)  # None without resets
    remember(_KNOWN, key, (*direct, operator.itemgetter(*places), marks))
