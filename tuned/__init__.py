"""Autotuned Triton RoPE and GRU kernels: ``tuned.dispatch`` picks the fastest known one for each call.

In a model::

    from tuned.dispatch import rope
    y = rope(x, freqs)
    print(tuned.explain(rope, x, freqs))
    tuned.warm(model, *example_inputs)  # compiles ahead what the model will launch

The pages in docs tell more.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuned import dispatch, nn, own
    from tuned.explanation import Explanation, explain
    from tuned.lookup.misses import TunedWarning
    from tuned.warming import Warmed, warm

    __version__: str

__all__ = ["Explanation", "TunedWarning", "Warmed", "dispatch", "explain", "nn", "own", "warm"]

# Where the names are that are imported when they are first used: torch takes seconds, and the command line asks for few of them.
_NAMES = {
    "Explanation": "tuned.explanation",
    "TunedWarning": "tuned.lookup.misses",
    "Warmed": "tuned.warming",
    "explain": "tuned.explanation",
    "warm": "tuned.warming",
}
_MODULES = frozenset({"compat", "dispatch", "nn", "own"})


def _version() -> str:
    """That of the package as it is installed; of files beside no installation none is known."""
    from importlib import metadata  # noqa: PLC0415 - takes milliseconds

    try:
        return metadata.version("tuned-kernels")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return importlib.import_module(f"tuned.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
