"""Errors of what checks arguments, told from those of what runs afterwards.

PyTorch's modules, and its functions while they are patched, raise errors of their own for the same arguments: what our
checks refuse there is PyTorch's to answer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_MARK = "refused_by_tuned"


def refuses(check: Callable[..., T]) -> Callable[..., T]:
    """``check``, whose TypeError and ValueError say that arguments are not allowed: ``was_refused`` knows them."""

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> T:
        try:
            return check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            setattr(error, _MARK, True)
            raise

    return checked


def was_refused(error: Exception) -> bool:
    """Whether an error says that arguments are not allowed, and so nothing has run."""
    return getattr(error, _MARK, False)
