"""A Problem: a Spec with sizes, named after the model that it comes from."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call worth timing."""

    name: str  # unique: model, tensor, layout, size
    family: str
    spec: Any
    size: Any
