"""Autotuned Triton RoPE and GRU kernels: ``tuned.dispatch`` picks the fastest known one for each call.

from tuned.dispatch import rope
y = rope(x, freqs)
print(tuned.explain(rope, x, freqs))
tuned.warm(model, *example_inputs)  # compiles ahead what the model will launch
"""

from typing import TYPE_CHECKING, Any

from tuned.explanation import Explanation, explain
from tuned.lookup.misses import TunedWarning

if TYPE_CHECKING:
    from tuned.warming import Warmed, warm

__all__ = ["Explanation", "TunedWarning", "Warmed", "explain", "warm"]


def __getattr__(name: str) -> Any:
    """Names of ``__all__`` that are imported when they are first used."""
    if name in ("Warmed", "warm"):
        from tuned import warming  # noqa: PLC0415

        return getattr(warming, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
