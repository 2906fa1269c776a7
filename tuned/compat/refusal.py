"""The error for what is no tensor, made where a call has failed already: asking before it would cost each call time."""

from __future__ import annotations

from typing import Any

import torch


def no_tensor(**named: Any) -> TypeError:
    """The error that names the first of these arguments that is no tensor."""
    for name, given in named.items():
        if not isinstance(given, torch.Tensor):
            return TypeError(
                f"{name} must be a tensor, got {type(given).__name__}: convert it with torch.as_tensor(...), on the device of the others"
            )
    return TypeError(
        f"{' and '.join(named)} must be plain tensors, got {[type(t).__name__ for t in named.values()]}: convert them"
    )
