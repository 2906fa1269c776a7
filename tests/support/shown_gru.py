"""GRUs, and gradients of GRUs, whose shown files the interpreter can run; and how a shown file is loaded."""

from __future__ import annotations

import hashlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, row_variant

if TYPE_CHECKING:
    from pathlib import Path

SIZE = GruSize(batch=3, seq=4)
# One program has all rows and units, so it waits for no other: in the interpreter several would wait for ever.
WHOLE = {"block_hidden": 32, "block_batch": 16}


def case(strategy: str, exchange: str = "poll", *, dtype: str = "float32", **spec: Any) -> tuple[GruSpec, GruVariant]:
    return GruSpec(dtype, 20, **spec), GruVariant(strategy, "split", exchange=exchange, **WHOLE)


def row(hidden: int, dtype: str = "float32", **spec: Any) -> tuple[GruSpec, GruVariant]:
    only = row_variant(hidden)
    assert only is not None
    return GruSpec(dtype, hidden, **spec), only


def staged(exchange: str, **spec: Any) -> tuple[GruSpec, GruVariant]:
    return GruSpec("float16", 16, **spec), GruVariant("persistent", "staged", 16, 16, exchange)


def in_turn(exchange: str, **spec: Any) -> tuple[GruSpec, GruVariant]:
    return GruSpec("float32", 20, **spec), GruVariant("persistent", "split", 32, 8, exchange, turns=2)


def size_of(variant: GruVariant) -> GruSize:
    """With turns there is a tile for each of them, and a third one."""
    return GruSize(batch=19, seq=3) if variant.in_turn else SIZE


CASES = {
    "poll": case("persistent"),
    "counter-packed-both-no-bias": case("persistent", "counter", layout="packed", directions=2, bias=False),
    "stack-poll": case("persistent", layers=2),
    "stack-counter-thd": case("persistent", "counter", layout="thd", layers=2, dtype="float16"),
    "steps-thd": case("steps", layout="thd", dtype="float16"),
    "alone": (GruSpec("float32", 64), GruVariant("persistent", "split", 64, 8)),
    "alone-tile": (GruSpec("float16", 64), GruVariant("persistent", "tile", 64, 32)),
    "library": (GruSpec("float32", 20, directions=2), GruVariant()),
    "row": row(20),
    "row-both-packed-no-bias": row(32, "float16", layout="packed", directions=2, bias=False),
    "row-thd": row(64, layout="thd"),
    "row-resets": row(21, resets=True),
    # Of 16 units there is one tile, so a program waits only for itself.
    "staged-poll-both": staged("poll", directions=2),
    "staged-counter-packed": staged("counter", layout="packed"),
    "staged-thd-both": staged("poll", layout="thd", directions=2),
    "staged-resets": staged("counter", resets=True),
    "in-turn-poll": in_turn("poll"),
    "in-turn-counter-both-packed": in_turn("counter", layout="packed", directions=2),
    "in-turn-thd-resets": in_turn("poll", layout="thd", resets=True),
    "poll-resets": case("persistent", resets=True),
    "steps-packed-resets": case("steps", layout="packed", directions=2, resets=True),
}


def gradient(exchange: str, turns: int = 1, hidden: int = 20, **spec: Any) -> tuple[GruSpec, GruVariant]:
    """One program has all units of its rows, so it waits for no other: in the interpreter several would wait for ever."""
    variant = GruVariant("persistent", "split", 32, 8, exchange, num_warps=2, turns=turns)
    return GruSpec("float32", hidden, **spec), variant


GRADIENTS = {
    "poll": gradient("poll"),
    "poll-packed-both-in-turn": gradient("poll", turns=2, layout="packed", directions=2),
    "counter-thd-no-bias": gradient("counter", layout="thd", bias=False),
    "counter-both-in-turn": gradient("counter", turns=2, directions=2),
    "poll-resets": gradient("poll", resets=True),
    "counter-packed-resets": gradient("counter", layout="packed", directions=2, resets=True),
    "poll-thd-in-turn-resets": gradient("poll", turns=2, layout="thd", resets=True),
}


def load(text: str, folder: Path) -> Any:
    """A shown file as a module, written into a folder."""
    # A name of its own: of two texts in one file, of one size and second, Python would take the first's bytecode twice.
    path = folder / f"shown_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
