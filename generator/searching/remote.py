"""The Ray actor with one GPU, in a process that starts two imports of torch and Triton at one time.

What forks its worker and its compilers imports them, and so does the search: seconds each. Nothing here imports either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuner import Letter


class RemoteTuner:
    """A Tuner that is not imported before the process that forks is on its way."""

    def __init__(self, begin: Callable[[], object]) -> None:
        """``begin`` finds or starts what forks, before this process imports the search."""
        begin()
        from .tuner import Tuner  # noqa: PLC0415 - takes seconds, see above

        self.tuner = Tuner()

    def start(self, *given: Any) -> Iterator[Letter]:
        """As Tuner.start."""
        yield from self.tuner.start(*given)

    def tune(self, *given: Any) -> Iterator[Letter]:
        """As Tuner.tune."""
        yield from self.tuner.tune(*given)
