"""The outcome of a call, so that two calls can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """The type and the words of what a call raises, or the shapes that it gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = call()
        except Exception as error:  # noqa: BLE001 - all of them are compared
            return type(error).__name__, str(error)
    found = found if isinstance(found, tuple) else (found,)
    return "served", [tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in found]
