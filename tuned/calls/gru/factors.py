"""Large float32 products of a gradient on tensor cores, each as three products of bfloat16 parts.

torch.nn.GRU multiplies in TensorFloat-32 unless ``torch.backends.cudnn`` forbids it. torch's setting for its own products is IEEE by
default, holds for a whole process, and so cannot be changed for one product. A float32 number is the sum of two bfloat16 numbers,
but for its last bits; their products are summed in float32. The error is an eighth to a sixtieth of that of TensorFloat-32, and the
products take 0.33 to 0.84 of the time that they take without tensor cores: docs/decisions/0088.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from tuned.calls.gru.run import capturing
from tuned.calls.products import precision_of
from tuned.families.gru.spec import GruSpec

# Of tokens and of columns, at least: with fewer, splitting takes as long as it saves. With a number of columns that is no multiple
# of EIGHT, rows of bfloat16 are not aligned, and nothing is saved. Outside a graph, parts take the host a dozen launches more for
# each layer and direction: a product must have so many multiplications.
LEAST_TOKENS, LEAST_COLUMNS, EIGHT = 2048, 320, 8
CALLED_PRODUCT = 2**31


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """A matrix that is multiplied several times; ``parts`` are bfloat16 and add up to it, or there are none."""

    whole: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, whole: torch.Tensor, *, split: bool) -> Factor:
        """A float32 matrix, split or not."""
        if not split:
            return cls(whole)
        high = whole.to(torch.bfloat16)
        # Without a temporary tensor: the difference is computed in float32 and rounded at the store.
        return cls(whole, (high, torch.sub(whole, high, out=torch.empty_like(high))))

    def columns(self, begin: int, end: int | None = None) -> Factor:
        """Some columns of the matrix."""
        high, low = self.parts or (None, None)
        parts = None if high is None or low is None else (high[:, begin:end], low[:, begin:end])
        return Factor(self.whole[:, begin:end], parts)

    def t(self) -> Factor:
        """The transposed matrix."""
        return Factor(self.whole.t(), None if self.parts is None else (self.parts[0].t(), self.parts[1].t()))


def multiplied(
    a: Factor, b: Factor, *, to: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``a @ b``; added ``to`` a tensor, which may be overwritten, or written to ``out``. Both are split or neither is."""
    if a.parts is None or b.parts is None:
        return torch.mm(a.whole, b.whole, out=out) if to is None else to.addmm_(a.whole, b.whole)
    (high, low), (of_high, of_low) = a.parts, b.parts
    # The smallest first. low @ of_low is smaller than the error of the others.
    found = _product(low, of_high, to)
    found = _product(high, of_low, found)
    found = _product(high, of_high, found)
    return found if out is None else out.copy_(found)


def _product(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor | None) -> torch.Tensor:
    """``a @ b`` of bfloat16 matrices in float32, added ``to`` another."""
    if to is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(to, a, b, out_dtype=torch.float32)


def splits(spec: GruSpec, given: torch.Tensor) -> bool:
    """Whether the products of a layer's gradient take less in parts. ``given``: its input, features last."""
    tokens, features = math.prod(given.shape[:-1]), given.shape[-1]
    if spec.dtype != "float32" or spec.precision != "tf32" or tokens < LEAST_TOKENS:
        return False
    if min(features, spec.hidden) < LEAST_COLUMNS or features % EIGHT or spec.hidden % EIGHT:
        return False
    if not given.is_cuda or torch.version.hip is not None or precision_of(given.dtype) != "ieee":
        return False
    return tokens * features * spec.hidden >= CALLED_PRODUCT or capturing(given.device)
