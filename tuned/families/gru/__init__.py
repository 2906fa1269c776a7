"""A GRU over whole sequences: layers, directions, padded or packed."""

from tuned.families.family import described
from tuned.families.gru import launches, model, spec, variant

FAMILY = described("gru", "Gru", spec, variant, launches, model)
