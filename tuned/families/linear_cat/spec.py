"""LinearCatSpec: what a caller of a linear over segments asks for, which tuning may not change."""

from __future__ import annotations

import dataclasses

from tuned.families.products import Rows, check_products


@dataclasses.dataclass(frozen=True)
class LinearCatSpec:
    """y = cat(inputs, -1) @ weight.T + bias, for any number of rows."""

    dtype: str
    inputs: tuple[int, ...]  # widths of the segments
    outputs: int  # columns of y
    bias: bool = True
    precision: str = ""  # of float32: "tf32" or "ieee"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # JSON has lists
        check_products(self.dtype, self.inputs, self.precision)
        if self.outputs < 1:
            raise ValueError(f"outputs must be at least 1, got {self.outputs}")

    @property
    def input_size(self) -> int:
        """Width of all segments together."""
        return sum(self.inputs)

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of the rows that are multiplied: of each segment, and of the weight."""
        return (*self.inputs, self.input_size)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(elements of a row, results) of the product of PyTorch's operator, for which the segments are concatenated."""
        return ((self.input_size, self.outputs),)

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.input_size * self.outputs


class LinearCatSize(Rows):
    """The rows of the segments."""
