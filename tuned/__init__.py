"""Autotuned Triton RoPE and GRU kernels: ``tuned.dispatch`` picks the fastest known one for each call.

In a model::

    from tuned.dispatch import rope
    y = rope(x, freqs)
    print(tuned.explain(rope, x, freqs))
    tuned.warm(model, *example_inputs)  # compiles ahead what the model will launch

The pages in docs say more.
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

# Name -> its module, which is imported when the name is first used: torch takes seconds, and the command line needs few names.
_NAMES = {
    "Explanation": "tuned.explanation",
    "TunedWarning": "tuned.lookup.misses",
    "Warmed": "tuned.warming",
    "explain": "tuned.explanation",
    "warm": "tuned.warming",
}
_MODULES = frozenset({"compat", "dispatch", "nn", "own"})


def _version() -> str:
    """The version of the installed package; unknown if the files were not installed."""
    from importlib import metadata  # noqa: PLC0415 - takes milliseconds

    try:
        return metadata.version("tuned-kernels")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """The version, a module or a name that is imported when it is first used."""
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return importlib.import_module(f"tuned.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
