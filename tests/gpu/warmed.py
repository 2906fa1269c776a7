"""`python -m tests.gpu.warmed` prints as JSON what a new, warmed process compiles; TRITON_CACHE_DIR is its cache."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton.runtime.build
from triton import knobs

import tuned
import tuned.nn
from tuned.dispatch import rope, rope_qk


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = tuned.nn.GRU(256, 512, batch_first=True)
        self.cell = tuned.nn.GRUCell(512, 512)

    def forward(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> list[torch.Tensor]:
        out, h_n = self.gru(x)
        return [out, self.cell(out[:, -1], h_n[0]), rope(q, freqs), *rope_qk(q, k, freqs, offset=3)]


def main() -> None:
    events: list[bool] = []  # for each use of Triton's compiler: whether the cache had the kernel
    built: list[str] = []  # launchers made by a C compiler, which Triton 3.6 needs
    build: Any = triton.runtime.build._build

    def heard(name: str, *given: Any, **named: Any) -> Any:
        built.append(name)
        return build(name, *given, **named)

    triton.runtime.build._build = heard
    knobs.compilation.listener = lambda **given: events.append(given["cache_hit"])
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    model = Model().to(**options)
    q, k = torch.randn(2, 64, 8, 128, **options), torch.randn(2, 64, 2, 128, **options)
    given = torch.randn(16, 32, 256, **options), q, k, torch.randn(80, 1, 1, 128, device="cuda")
    state = torch.cuda.get_rng_state()
    done = tuned.warm(model, *given)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.is_initialized()
    events.clear()
    ahead = len(built)
    with torch.no_grad():
        out = model(*given)
        by_torch = torch.nn.GRU(256, 512, batch_first=True, **options)
        by_torch.load_state_dict(model.gru.state_dict())
        torch.testing.assert_close(out[0], by_torch(given[0])[0], rtol=2e-2, atol=5e-2)
    told = {"compiled": done.compiled, "found": done.found, "left": done.left, "built": ahead}
    print(json.dumps({**told, "compiled_later": len(events), "built_later": len(built) - ahead}))  # noqa: T201


if __name__ == "__main__":
    main()
