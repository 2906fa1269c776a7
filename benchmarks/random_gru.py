"""GRUs of random shapes against torch.nn.GRU: python -m benchmarks.random_gru [--seconds 60] [--shapes 200] [--seed N] [--out FILE].

Each shape is drawn log-uniform, not rounded: 16 to 2000 steps, a batch of 1 to 512, 32 to 2048 units, one to three
layers, one or both directions, bfloat16 or float32 (TF32), one in six as a PackedSequence. Both modules run the same
weights and inputs, in turns, as calls (wall time, synchronized) and in CUDA graphs (device time; PackedSequence as
calls only). Tuning has seen none of the shapes; the seed is new for each run, and printed. Kernels are compiled before,
for at most half as long as is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tuned
import tuned.nn
from benchmarks import ahead, session
from benchmarks.arguments import count, duration, output
from benchmarks.record import environment  # of the device and the packages
from benchmarks.verify import INTERRUPTED
from generator.disk import write_whole

SHAPES = 200  # that the bar asks for
MOST_ELEMENTS = 2**27  # of gates, for each direction
TIMES = 5  # timings of each module, in turns; the median counts
AGAIN = 5  # times as many timings for a row that would miss the bar
LEAST_RATIO = 0.98
ALLOWED_US = 1.0  # a call may be slower by this much


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GRU and its input, which is as wide as the state."""

    steps: int
    batch: int
    hidden: int
    layers: int
    bidirectional: bool
    dtype: str
    packed: bool


def drawn(draw: random.Random) -> Shape:
    """A random shape whose tensors fit into memory many times."""

    def between(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    while True:
        shape = Shape(
            between(16, 2000),
            between(1, 512),
            between(32, 2048),
            draw.choice((1, 1, 1, 2, 3)),
            draw.random() < 1 / 3,
            draw.choice(("bfloat16", "float32")),
            draw.random() < 1 / 6,
        )
        if shape.steps * shape.batch * shape.hidden * 3 <= MOST_ELEMENTS:
            return shape


def call_us(run: Any) -> float:
    """Wall time of one call, until the device has finished it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def captured(run: Any) -> Any:
    """A CUDA graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def graph_us(graph: Any) -> float:
    """Device time of one replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def in_turns(one: Any, other: Any, clock: Any) -> tuple[float, float]:
    """Medians of two calls, timed in turns after a warm-up; if the second seems slower, over five times as many turns."""
    clock(one), clock(other)
    times: list[tuple[float, float]] = []
    for rounds in (TIMES, (AGAIN - 1) * TIMES):
        times += [(clock(one), clock(other)) for _ in range(rounds)]
        first, second = (statistics.median(column) for column in zip(*times, strict=True))
        if first >= LEAST_RATIO * second:
            break
    return first, second


def module_of(kind: Any, shape: Shape) -> Any:
    """A GRU of a shape; ``kind`` is torch.nn.GRU or tuned.nn.GRU."""
    made: dict[str, Any] = {"num_layers": shape.layers, "bidirectional": shape.bidirectional}
    return kind(shape.hidden, shape.hidden, **made, device="cuda", dtype=getattr(torch, shape.dtype))


def input_of(shape: Shape) -> Any:
    """Random input; for a packed shape a PackedSequence with lengths from all steps down to half."""
    dtype = getattr(torch, shape.dtype)
    x: Any = torch.randn(shape.steps, shape.batch, shape.hidden, device="cuda", dtype=dtype)
    if shape.packed:
        lengths = [shape.steps - row * shape.steps // (2 * shape.batch) for row in range(shape.batch)]
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
    return x


def served(shape: Shape) -> None:
    """Run our module for one shape, as a call and in a graph, so that its kernels are compiled."""
    ours, x = module_of(tuned.nn.GRU, shape), input_of(shape)
    with torch.no_grad():
        ours(x)
        if not shape.packed:
            captured(lambda: ours(x))


def compared(shape: Shape) -> dict[str, Any]:
    """Both modules for one shape: microseconds as a call and in a graph, the rule that served, the difference of results."""
    theirs, ours, x = module_of(torch.nn.GRU, shape), module_of(tuned.nn.GRU, shape), input_of(shape)
    ours.load_state_dict(theirs.state_dict())
    theirs.flatten_parameters()
    ours.flatten_parameters()
    first, second = theirs(x), ours(x)
    wanted, got = ([pair[0].data if shape.packed else pair[0], pair[1]] for pair in (first, second))
    found = {**dataclasses.asdict(shape), "apart": session.apart(got, wanted), "rule": tuned.explain(ours, x).rule}
    found["theirs_us"], found["ours_us"] = in_turns(lambda: theirs(x), lambda: ours(x), call_us)
    if not shape.packed:
        graphs = captured(lambda: theirs(x)), captured(lambda: ours(x))
        found["theirs_graph_us"], found["ours_graph_us"] = in_turns(*graphs, graph_us)
    return found


def summary(rows: list[dict[str, Any]], theirs: str) -> str:
    """Share served by kernels, geometric means, and the worst rows below the bar."""
    lines = []
    for what, more in (("", ALLOWED_US), ("_graph", 0.0)):
        both = [(r, r[f"theirs{what}_us"], r[f"ours{what}_us"]) for r in rows if f"ours{what}_us" in r]
        if not both:
            continue
        ratios = [theirs_us / ours_us for _, theirs_us, ours_us in both]
        under = [(t / o, r) for r, t, o in both if t / o < LEAST_RATIO and o - t > more]
        name = "in a graph" if what else "as a call"
        lines.append(
            f"{name}: {len(both)} shapes, {theirs} / ours {statistics.geometric_mean(ratios):.2f} in the geometric mean, "
            f"least {min(ratios):.3f}; {len(under)} under the bar"
        )
        lines += [f"    {ratio:.3f} {row}" for ratio, row in sorted(under, key=lambda one: one[0])[:12]]
    served = sum(row["rule"] != "eager" for row in rows)
    lines.append(f"kernels serve {served} of {len(rows)}; results at most {max(r['apart'] for r in rows):.3g} apart")
    return "\n".join(lines)


@contextlib.contextmanager
def kept(path: Path | None, content: dict[str, Any], told: Callable[[Any], str]) -> Iterator[None]:
    """Print a summary of the content's rows and write the content, with the environment, however the measuring ends.

    If Ctrl-C, SIGTERM or an error cut the run, the file has ``"cut": true``; after the first two the exit code is 130.
    Without a path nothing is written.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = content | {"environment": environment({}), "cut": True}
    try:
        yield
        del whole["cut"]
    except KeyboardInterrupt:
        print("interrupted: what was measured before counts")
        raise SystemExit(INTERRUPTED) from None
    finally:
        if content["rows"]:
            print(told(content["rows"]))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(whole, indent=1) + "\n").encode())


def options_of(about: str | None, shapes: int = SHAPES) -> argparse.Namespace:
    """The options of a benchmark of random calls; without --seed the seed is new. The seed is printed."""
    parser = argparse.ArgumentParser(description=(about or "").partition(":")[0])
    parser.add_argument("--seconds", type=duration, default=60.0, help="of measuring random shapes")
    parser.add_argument(
        "--shapes", type=count, default=shapes, help="compiled ahead, and measured at most: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=output, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this compares GPUs' kernels, and torch sees no GPU here: run it on a machine that has one")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    print(f"seed {options.seed}", flush=True)
    return options


def measure(rows: list[dict[str, Any]], options: argparse.Namespace, draw: Any, serve: Any, compare: Any) -> None:
    """Compile the shapes that ``draw`` gives, then measure them until the time is over. Without a peer there is no row."""
    chance = random.Random(options.seed)  # noqa: S311 - shapes, no secrets
    shapes = [draw(chance) for _ in range(options.shapes)]
    print(ahead.compile_ahead(shapes, serve, ahead.processes_here(), options.seconds / 2), flush=True)
    end = time.monotonic() + options.seconds
    for shape in shapes:
        if time.monotonic() >= end:
            break
        if (row := compare(shape)) is not None:
            rows.append(row)


def run(about: str | None, draw: Any, serve: Any, compare: Any, told: Any, shapes: int = SHAPES) -> None:  # noqa: PLR0913
    """Run a benchmark of random calls: read its options, measure, print the summary, write the file."""
    options = options_of(about, shapes)
    rows: list[dict[str, Any]] = []
    with kept(options.out, {"seed": options.seed, "rows": rows}, told), torch.no_grad():
        measure(rows, options, draw, serve, compare)


if __name__ == "__main__":
    run(__doc__, drawn, served, compared, lambda rows: summary(rows, "nn.GRU"))
