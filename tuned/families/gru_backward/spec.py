"""The gradient of a recurrence has the recurrence's GruSpec, of one layer, and its GruSize."""

from tuned.families.gru.spec import GruSize, GruSpec

__all__ = ["GruSize", "GruSpec"]
