"""The Ray actor with one GPU. Its fork server and its search import torch and Triton at the same time.

The fork server, from which worker and compilers are forked, takes seconds to import them, and so does the search in
this process. This module imports neither torch nor Triton, so that both can start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuner import Letter


class RemoteTuner:
    """A Tuner whose module is imported only after the fork server was started."""

    def __init__(self, begin: Callable[[], object]) -> None:
        """``begin`` finds or starts the fork server, before this process imports the search."""
        begin()
        from .tuner import Tuner  # noqa: PLC0415 - takes seconds, see above

        self.tuner = Tuner()

    def start(self, *given: Any) -> Iterator[Letter]:
        """As Tuner.start."""
        yield from self.tuner.start(*given)

    def tune(self, *given: Any) -> Iterator[Letter]:
        """As Tuner.tune."""
        yield from self.tuner.tune(*given)
