"""One step of a GRU: two library GEMMs, and a kernel for the gates; or all in one kernel."""

from tuned.families.family import described
from tuned.families.gru_cell import launches, spec, variant

FAMILY = described("gru_cell", "GruCell", spec, variant, launches)
