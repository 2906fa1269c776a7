"""GruSpec: what a caller of a GRU over sequences asks for, which tuning may not change."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuned.families.products import DTYPES, ITEM_SIZE, PRECISIONS, Rows

LAYOUTS = ("dense", "packed", "thd")


@dataclasses.dataclass(frozen=True)
class GruSpec:
    """The recurrence of a GRU, given ``x @ weight_ih.T`` of its lowest layer, for any batch size and length.

    Layout "dense": all sequences have one length; any strides, so both seq-first and batch-first. "packed": the rows of a
    PackedSequence. "thd": sequences one after the other, with cu_seqlens.
    """

    dtype: str
    hidden: int
    layout: str = "dense"
    directions: int = 1  # 2: both in one launch
    layers: int = 1  # more than 1: a stack in one launch, each layer one step behind the layer below
    bias: bool = True
    precision: str = (
        "tf32"  # of the products of float32: "tf32", or "ieee" as torch.backends.cudnn.allow_tf32 = False asks
    )
    resets: bool = False  # the state is 0 before steps that are marked

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("layout", LAYOUTS),
            ("directions", (1, 2)),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.hidden < 1 or self.layers < 1:
            raise ValueError(f"hidden and layers must be at least 1, got {self.hidden} and {self.layers}")
        if self.layers > 1 and self.directions > 1:
            raise ValueError("a stack has one direction: the backward one needs the whole sequence of the layer below")
        if self.layers > 1 and self.resets:
            raise ValueError("a stack has no resets: its layers are launched one by one")

    @property
    def stacked(self) -> bool:
        """Several layers in one launch."""
        return self.layers > 1

    @property
    def dense(self) -> bool:
        """All sequences have one length."""
        return self.layout == "dense"

    @property
    def packed(self) -> bool:
        """Rows are those of a PackedSequence."""
        return self.layout == "packed"

    @property
    def thd(self) -> bool:
        """Sequences lie one after the other, any of them may be empty."""
        return self.layout == "thd"

    @property
    def turned(self) -> str:
        """In a template: the states that a turn changes; those of sequences that have ended stay as they are."""
        return "own, mask=mask" if self.dense else "after, mask=m_now"

    def turned_before(self, variant: Any) -> str:
        """In a template: the elements whose state an earlier turn of this launch stored; not of sequences that ended before."""
        ran = "(i_step > t_begin)"
        return ran if self.dense else f"({ran} & (length > t_begin))[{variant.row_axes}]"

    def waiting(self, variant: Any) -> str:
        """In a template: which rows of a tile wait for what a step gave; all or none.

        Only where tiles take turns can a step come to a tile without a token. It waits for nothing: its spare row belongs to another
        tile, whose turn may come later.
        """
        alike = "(length >= 0) & (i_step > t_begin)"
        return f"{alike} & (tl.max(length, 0) > 0)" if variant.in_turn else alike

    @property
    def sum_r(self) -> str:
        """In a template: what the state gives to r; 0 if it is reset."""
        return self._of_state("_total(a_r)")

    @property
    def sum_z(self) -> str:
        """As sum_r, for z."""
        return self._of_state("_total(a_z)")

    @property
    def sum_n(self) -> str:
        """As sum_r, for n."""
        return self._of_state("_total(a_n)")

    @property
    def sum_d(self) -> str:
        """In a template: what later steps give to the gradient of a state; 0 if the state is reset before the next step."""
        return self._of_state("_total(acc)")

    @property
    def own_of_turn(self) -> str:
        """In a template: the state before a turn's step."""
        return self._of_state("tl.where(first, before.to(tl.float32), own)")

    def marks(self, variant: Any) -> str:
        """In a template: whether each row's state is reset before a step; loaded a step ahead, or now where tiles take turns."""
        now = "resets, i_step, m_cut, i_batch, length, seq, starts, resets_stride_t, resets_stride_b, backward"
        return f"_marks({now})" if variant.in_turn else "marked"

    def _of_state(self, value: str) -> str:
        return f"tl.where(cut, 0, {value})" if self.resets else value

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZE[self.dtype]

    def summary(self, variant: Any) -> str:
        """One sentence for the header of the generated module."""
        what = {"dense": "sequences of one length", "packed": "a PackedSequence", "thd": "sequences in a row"}[
            self.layout
        ]
        how = {
            "split": "units times rows, the columns split over the warps",
            "tile": "rows times units",
            "staged": "units times rows, the columns in pieces and split over the warps",
            "row": "a row times units, weights in registers",
        }[variant.form]
        parts = f"{'a stack of layers' if self.stacked else 'one layer'}{', with resets' if self.resets else ''}"
        return f"a GRU over {what}, {parts}; {how}."


@dataclasses.dataclass(frozen=True)
class GruSize(Rows):
    """The batch and the longest sequence. ``tokens`` is the batch: the time of a step, and so the choice, depends on it."""

    seq: int  # steps
