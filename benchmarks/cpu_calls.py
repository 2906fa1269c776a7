"""Small calls on a CPU beside what a user writes in PyTorch: python -m benchmarks.cpu_calls [--rounds N].

Each call and its formula take turns in one run, on one thread. The ratios of the medians and of the fastest rounds are
printed. A call is timed only if its result is close to the formula's. A rotation's bar is 1.3 of the formula.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks import arguments
from tuned.dispatch import gru_cell, linear_cat, rope, rope_qk

CALLS = 30  # in a round
SHAPE, KEY_SHAPE = (1, 16, 4, 64), (1, 16, 2, 64)
FEATURES, UNITS = 64, 64


@dataclasses.dataclass(frozen=True)
class Pair:
    """A call of ours, and the formula that it replaces."""

    name: str
    ours: Callable[[], Any]
    formula: Callable[[], Any]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """``rotate_half`` as in Hugging Face transformers."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotation by cosines and sines of pairs, [seq, pairs]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def whole(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotation by cosines and sines of features, [seq, 1, features]."""
    return x * cos + rotate_half(x) * sin


def by_freqs(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """A rotation by angles of features, [seq, features]."""
    return whole(x, freqs.cos().to(x.dtype)[:, None], freqs.sin().to(x.dtype)[:, None])


def rotations(dtype: torch.dtype) -> Iterator[Pair]:
    """Rotations, with angles in the dtype of x if the formula takes them in that dtype."""
    x, k = torch.randn(SHAPE).to(dtype), torch.randn(KEY_SHAPE).to(dtype)
    radians = torch.randn(SHAPE[1], SHAPE[-1] // 2)
    freqs = torch.cat((radians, radians), -1)
    cos, sin = radians.cos().to(dtype), radians.sin().to(dtype)
    wide = freqs.cos().to(dtype)[:, None], freqs.sin().to(dtype)[:, None]
    kind = str(dtype).removeprefix("torch.")
    pairs: dict[str, Any] = {"cos": cos, "sin": sin}
    yield Pair(f"rope, cos and sin, split and cat, {kind}", lambda: rope(x, **pairs), lambda: split(x, cos, sin))
    yield Pair(f"rope, cos and sin, rotate_half, {kind}", lambda: rope(x, **pairs), lambda: whole(x, *wide))
    yield Pair(f"rope, freqs, rotate_half, {kind}", lambda: rope(x, freqs), lambda: by_freqs(x, freqs))
    yield Pair(
        f"rope_qk, cos and sin, split and cat, {kind}",
        lambda: rope_qk(x, k, **pairs),
        lambda: (split(x, cos, sin), split(k, cos, sin)),
    )
    yield Pair(
        f"rope_qk, cos and sin, rotate_half, {kind}",
        lambda: rope_qk(x, k, **pairs),
        lambda: (whole(x, *wide), whole(k, *wide)),
    )


def products() -> Iterator[Pair]:
    """A step of a GRU beside torch.nn.GRUCell, and a linear over two segments beside a linear of their concatenation."""
    cell = torch.nn.GRUCell(FEATURES, UNITS)
    weights = [t.detach() for t in (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)]
    x, h = torch.randn(1, FEATURES), torch.randn(1, UNITS)
    weight, bias = torch.randn(UNITS, FEATURES + UNITS), torch.randn(UNITS)
    cell.requires_grad_(requires_grad=False)
    yield Pair("gru_cell, float32", lambda: gru_cell(x, h, *weights), lambda: cell(x, h))
    yield Pair(
        "linear_cat, float32",
        lambda: linear_cat((x, h), weight, bias),
        lambda: torch.nn.functional.linear(torch.cat((x, h), -1), weight, bias),
    )


def timed(pair: Pair, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of a call of ours and of the formula, in rounds that take turns."""
    found: tuple[list[float], list[float]] = [], []
    for index in range(rounds + 1):
        for function, times in zip((pair.ours, pair.formula), found, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            if index:  # the first warms up
                times.append((time.perf_counter() - start) / CALLS * 1e6)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=arguments.count, default=500, help="of each pair (default: 500)")
    rounds = parser.parse_args(given).rounds
    torch.set_num_threads(1)
    print(f"{'call':52} {'medians':>8} {'fastest':>8} {'ours us':>8} {'its us':>8}")
    for pair in (*rotations(torch.float32), *rotations(torch.bfloat16), *products()):
        torch.testing.assert_close(pair.ours(), pair.formula(), rtol=0.05, atol=0.1)
        ours, its = timed(pair, rounds)
        medians = statistics.median(ours), statistics.median(its)
        ratios = medians[0] / medians[1], min(ours) / min(its)
        print(f"{pair.name:52} {ratios[0]:8.2f} {ratios[1]:8.2f} {min(ours):8.1f} {min(its):8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
