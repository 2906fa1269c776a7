"""The gradient of a GRU over whole sequences: a layer of it, both directions, padded or packed."""

from tuned.families.family import described
from tuned.families.gru_backward import launches, spec, variant

FAMILY = described("gru_backward", "Gru", spec, variant, launches)
