"""What is asked of a gradient is what is asked of the recurrence: its GruSpec, of one layer, and its GruSize."""

from tuned.families.gru.spec import GruSize, GruSpec

__all__ = ["GruSize", "GruSpec"]
