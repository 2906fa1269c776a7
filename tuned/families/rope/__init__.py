"""Rotary position embedding: spec, variants, launches, and the same by PyTorch's operators."""

from tuned.families.family import described
from tuned.families.rope import launches, spec, variant

FAMILY = described("rope", "Rope", spec, variant, launches)
