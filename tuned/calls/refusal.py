"""Tell errors of argument checks from errors of what runs afterwards.

PyTorch's modules, and its functions while they are patched, raise their own errors for wrong arguments. So a call there
that our checks refuse is passed on to PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MARK = "refused_by_tuned"


def refuses(check: Callable[..., T]) -> Callable[..., T]:
    """``check``, with its TypeErrors and ValueErrors marked, so that ``was_refused`` is true for them."""

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> T:
        try:
            return check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            setattr(error, _MARK, True)
            raise

    return checked


def was_refused(error: Exception) -> bool:
    """Whether an error comes from an argument check, so that nothing has run."""
    return getattr(error, _MARK, False)
