"""GruCellSpec: what a caller of one GRU step asks for, which tuning may not change."""

from __future__ import annotations

import dataclasses

from tuned.families.products import Rows, check_products


@dataclasses.dataclass(frozen=True)
class GruCellSpec:
    """One step of torch.nn.GRUCell, for any batch size."""

    dtype: str
    hidden: int
    inputs: tuple[int, ...]  # widths of the segments of x, which are taken as if concatenated
    bias: bool = True
    inplace: bool = False  # h is overwritten
    precision: str = ""  # of float32: "tf32" or "ieee"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # JSON has lists
        check_products(self.dtype, self.inputs, self.precision)
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")

    @property
    def input_size(self) -> int:
        """Width of all segments together."""
        return sum(self.inputs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of the rows that are multiplied: of each segment, and of the state."""
        return (*self.inputs, self.hidden)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(elements of a row, results) of the products of PyTorch's operator, for which the segments are concatenated."""
        return (self.input_size, 3 * self.hidden), (self.hidden, 3 * self.hidden)

    @property
    def weights(self) -> int:
        """Elements of the weights of one gate."""
        return self.hidden * sum(self.widths)

    @property
    def summary(self) -> str:
        """One sentence for the header of the generated module of the gates."""
        place = "over h, in place" if self.inplace else "out of place"
        return f"the gates of a GRU cell {'with' if self.bias else 'without'} bias, {place}."


class GruCellSize(Rows):
    """The batch of a step."""
