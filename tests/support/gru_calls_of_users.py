"""Calls of every public function of the GRU families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.gru_calls import FEATURES, B, H, T, weights_of
from tuned.dispatch import gru, gru_cell, linear_cat

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS = [0, 1, 3, 6]


def tensors(device: str = "cpu") -> dict[str, Any]:
    """The tensors that the calls below take."""
    return {
        "x": torch.randn(T, B, FEATURES, device=device),
        "rows": torch.randn(6, FEATURES, device=device),
        "row": torch.randn(B, FEATURES, device=device),
        "hx": torch.randn(2, B, H, device=device),
        "h": torch.randn(B, H, device=device),
        "weight": torch.randn(7, 2 * FEATURES, device=device),
        "weights": weights_of(1, 1, device=device),
        "deep": weights_of(2, 1, device=device),
        "bounds": torch.tensor(BOUNDS, dtype=torch.int32, device=device),
    }


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gru": lambda t: gru(t["x"], t["hx"], t["deep"], num_layers=2),
    "packed": lambda t: gru(
        t["rows"], t["hx"], t["deep"], num_layers=2, batch_sizes=torch.tensor([3, 2, 1], device="cpu")
    ),
    "thd": lambda t: gru(t["rows"], t["hx"], t["deep"], num_layers=2, cu_seqlens=t["bounds"], max_seqlen=3),
    "cell": lambda t: gru_cell(t["row"], t["h"], *t["weights"]),
    "segments": lambda t: gru_cell((t["row"][:, :2], t["row"][:, 2:]), t["h"], *t["weights"]),
    "linear_cat": lambda t: linear_cat((t["x"], t["x"]), t["weight"]),
}


class Model(torch.nn.Module):
    """A model of PyTorch's layers that does not use tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = torch.nn.GRU(FEATURES, H, 2, batch_first=True), torch.nn.GRUCell(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the last step, after one more step of the cell."""
        output, h_n = self.encoder(x)
        return self.cell(output[:, -1], h_n[0])
