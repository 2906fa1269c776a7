"""Tell which kernel a call gets, from which row, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned import dispatch
from tuned.family import FAMILIES


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call; ``str()`` gives it as text."""

    rule: str  # "winner", "nearest size", "closest spec", "similar GPU", "portfolio", "default" or "eager"
    why: str
    kernels: tuple[str, ...]  # modules of tuned.kernels, in order; none for eager
    variant: Any
    median_us: float | None  # of the row that was taken, as measured

    def __str__(self) -> str:
        """Rule, reason, kernels and numbers, a line each."""
        lines = [f"{self.rule}: {self.why}"]
        if self.kernels:
            lines.append(f"kernels: {', '.join(self.kernels)}")
            lines.append(f"variant: {self.variant}")
        if self.median_us is not None:
            lines.append(f"that row was measured at {self.median_us:g} us")
        return "\n".join(lines)


def explain(function: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel ``function(*args, **kwargs)`` gets, without running it.

    Args:
        function: rope, rope_backward, apply_rotary_pos_emb or gru_cell of tuned.dispatch.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: for any other function.
        ValueError: what the call itself would raise.
    """
    if function in (dispatch.rope, dispatch.rope_backward):
        direction = "forward" if function is dispatch.rope else "backward"
        family = FAMILIES["rope"]
        choice, spec = dispatch.explain_rope(*args, direction=direction, **kwargs)
    elif function is dispatch.apply_rotary_pos_emb:
        kwargs = {"tensor_format": "sbhd", "angle_entries": "feature", **kwargs}
        kwargs.pop("fused", None)
        family = FAMILIES["rope"]
        choice, spec = dispatch.explain_rope(*args, **kwargs)
    elif function is dispatch.gru_cell:
        family = FAMILIES["gru_cell"]
        choice, spec = dispatch.explain_gru_cell(*args, **kwargs)
    else:
        raise TypeError(f"explain knows rope, rope_backward, apply_rotary_pos_emb and gru_cell, got {function!r}")
    kernels = () if choice.variant is None else family.kernel_names(spec, choice.variant)
    return Explanation(choice.rule, choice.why, kernels, choice.variant, choice.row.median_us if choice.row else None)
