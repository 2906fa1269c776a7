"""Autotuned Triton RoPE and GRU kernels: ``tuned.dispatch`` picks the fastest known one for each call.

from tuned.dispatch import rope
y = rope(x, freqs)
print(tuned.explain(rope, x, freqs))
"""

from tuned.explanation import Explanation, explain
from tuned.lookup.misses import TunedWarning

__all__ = ["Explanation", "TunedWarning", "explain"]
