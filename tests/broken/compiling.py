"""A compiler that is broken on purpose, for the variants that are next fastest after those with a deed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests.broken.server import DEEDS, ranked
from tests.support.fakes import fine
from tests.support.processes import hang

if TYPE_CHECKING:
    from generator.measuring.compile import Resources
    from generator.problem import Problem

DEEDS_OF_COMPILERS = ("hangs", "crashes", "complains")


def compile_variant(problem: Problem, variant: Any, architecture: str) -> tuple[Resources, ...] | str:
    """Stands for generator.processes.compiler.compile_variant."""
    del architecture
    place = ranked(problem).index(variant) - len(DEEDS)
    match DEEDS_OF_COMPILERS[place] if 0 <= place < len(DEEDS_OF_COMPILERS) else "":
        case "hangs":
            hang()
        case "crashes":
            os.write(2, b"LLVM ERROR: out of registers")
            os.abort()
        case "complains":
            return "CompilationError: at 1:1"
    return fine(problem, variant)
