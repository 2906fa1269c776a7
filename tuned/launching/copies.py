"""Make the copies of repeated calls by launches in which only addresses change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tuned.families.copying import MOST, Rows, copy_launch, filled
from tuned.families.padded import Pads
from tuned.launching.launcher import as_integers
from tuned.launching.plan import direct_launch, launch_known, maker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Fire = Callable[[tuple[int, ...]], None]  # the addresses of x and y of each copy, in this order
    # Of each side the input and the weight in the memory, bytes; None: as they are.
    Places = tuple[tuple[int, int] | None, ...]

MOST_NUMBER = 2**31  # from here on a number has 64 bits, which needs another compiled kernel
_COMPILED: dict[Any, Any] = {}  # (device, dtype) -> the kernel


def launches_of(every: Sequence[Rows], like: torch.Tensor) -> Fire | None:
    """A function that makes all copies of ``every``, with item size and device of ``like``; None if launches must be public."""
    index = like.get_device()
    # Compiled once for all calls: for addresses that are aligned to their elements only, and not specialised on numbers.
    apart = as_integers(like.new_empty(2)[1:])
    key = index, apart.dtype
    compiled = _COMPILED.get(key) or launch_known(index, copy_launch([(apart, apart, filled(1, 1, 0))]))
    if compiled is None:  # this thread listens, and the launch was noted
        return None
    _COMPILED[key] = compiled
    parts = []
    for begin in range(0, len(every), MOST):
        some = every[begin : begin + MOST]
        direct = direct_launch(copy_launch([(apart, apart, rows) for rows in some]), compiled, index)
        if direct is None or any(number >= MOST_NUMBER for rows in some for number in rows):
            return None
        # A launch takes six copies. In the place of missing ones it gets the first one's addresses again, and copies nothing there.
        parts.append((slice(2 * begin, 2 * (begin + len(some))), MOST - len(some), direct))

    def fire(addresses: tuple[int, ...]) -> None:
        for where, missing, (run, function, head, programs, rest, stream_of, _, _) in parts:
            given = addresses[where]
            run(programs, 1, 1, stream_of(index), function, *head, *given, *(given[:2] * missing), *rest)

    return fire


def padded_by(pads: Pads, like: torch.Tensor) -> tuple[Callable[[Sequence[int]], torch.Tensor], Places] | None:
    """A function from the addresses of tensors, in the order of ``pads``, to the memory with their padded copies, and the ``Places``.

    None if launches must be public.
    """
    fire, make = launches_of([rows for _, _, rows in pads.copies], like), maker((pads.elements,), like)
    if fire is None:
        return None
    item = like.element_size()
    taken = [(position, at * item) for position, at, _ in pads.copies]

    def pad(addresses: Sequence[int]) -> torch.Tensor:
        memory = make()
        base = memory.data_ptr()
        fire(tuple([address for position, at in taken for address in (addresses[position], base + at)]))
        return memory

    return pad, tuple(
        None if side is None else (side[0].offset * item, side[1].offset * item) for side in pads.operands
    )
