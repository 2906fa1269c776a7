"""The answer of a command for programs: with --json, one object on stdout; text for people goes to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_FACTS: ContextVar[dict[str, Any] | None] = ContextVar("facts", default=None)


@contextlib.contextmanager
def collected() -> Iterator[dict[str, Any]]:
    """Inside the block, ``put`` adds its facts to the dictionary that this yields."""
    facts: dict[str, Any] = {}
    token = _FACTS.set(facts)
    try:
        yield facts
    finally:
        _FACTS.reset(token)


def put(**facts: Any) -> None:
    """Add facts to the answer of this command; without --json they are dropped."""
    if (found := _FACTS.get()) is not None:
        found.update(facts)


def text_of(facts: Mapping[str, Any]) -> str:
    """One object of strict JSON, without NaN and infinities, so that any JSON reader takes it."""
    return json.dumps(plain(facts), indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """A value as JSON types: a dataclass as its fields, NaN and infinities as null, any unknown type as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(one) for one in value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else _words(value)


def _words(value: Any) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
