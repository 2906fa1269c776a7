"""Training GRUs against torch.nn.GRU: python -m benchmarks.training [--seconds 60] [--shapes 200] [--seed N] [--out FILE].

A step is the forward and the gradients of the input and of all weights, without an optimizer. First come listed shapes,
each with its bar: times as a call and in a CUDA graph, the error of each gradient beside nn.GRU's (root mean square
against float64), and the peak of memory. Then three shapes run with the state reset before one step in a hundred,
beside no resets, and beside nn.GRU over sequences that are cut there. Then come shapes drawn as in
benchmarks.random_gru, until the seconds are over.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import statistics
from typing import Any

import torch

import tuned
import tuned.nn
from benchmarks import session
from benchmarks.random_gru import (
    Shape,
    call_us,
    captured,
    drawn,
    graph_us,
    in_turns,
    kept,
    measure,
    options_of,
    summary,
)
from tuned.calls.gru import eager
from tuned.calls.gru.arguments import gru_call

MOST_ELEMENTS = 2**25  # of the output of a drawn shape
MOST_EXACT = 2**22  # elements of the output of all layers up to which float64 is computed too
# Group -> bars of nn.GRU / ours, as a call and in a graph.
BARS = {
    "to 512 units, batch to 64": (4.0, 2.0),
    "1024 units, batch to 64": (3.0, 1.6),
    "batch 128 to 1024": (2.5, 1.4),
    "KernelBench": (6.0, 3.0),
    "models": (1.0, 1.0),
}


def _shape(steps: int, batch: int, hidden: int, **settings: Any) -> Shape:
    given: dict[str, Any] = {"layers": 1, "bidirectional": False, "dtype": "bfloat16", "packed": False}
    return Shape(steps, batch, hidden, **(given | settings))


# Group, shape, width of the input.
LISTED = (
    *(("to 512 units, batch to 64", _shape(512, batch, 512), 512) for batch in (1, 16, 32, 64)),
    ("to 512 units, batch to 64", _shape(512, 10, 256), 256),
    *(("1024 units, batch to 64", _shape(512, batch, 1024), 1024) for batch in (1, 16, 64)),
    ("batch 128 to 1024", _shape(512, 128, 256), 256),
    ("batch 128 to 1024", _shape(256, 128, 512), 512),
    ("batch 128 to 1024", _shape(128, 1024, 256), 256),
    ("batch 128 to 1024", _shape(64, 1024, 512), 512),
    ("KernelBench", _shape(512, 10, 256, layers=6, dtype="float32"), 128),
    ("KernelBench", _shape(512, 10, 256, layers=6, bidirectional=True, dtype="float32"), 128),
    ("models", _shape(32, 128, 512, bidirectional=True), 256),  # the encoder of a translator
    ("models", _shape(128, 64, 768, layers=5), 512),  # brain to text
    ("models", _shape(64, 16, 600), 600),  # a world model
    ("models", _shape(128, 128, 256), 256),  # a recurrent policy
)

RESET_ODDS, RESET_BAR = 0.01, 1.05  # share of steps that are marked; bar on the time with resets over that without
RESET_SHAPES = ((_shape(512, 32, 512), 512), (_shape(512, 64, 1024), 1024), (_shape(128, 128, 256), 256))


class Pair:
    """Both modules of a shape, with the same weights, and one input."""

    def __init__(self, shape: Shape, features: int) -> None:
        dtype = getattr(torch, shape.dtype)
        made: dict[str, Any] = {"num_layers": shape.layers, "bidirectional": shape.bidirectional}
        made |= {"device": "cuda", "dtype": dtype}
        self.theirs = torch.nn.GRU(features, shape.hidden, **made)
        self.ours = tuned.nn.GRU(features, shape.hidden, **made)
        self.ours.load_state_dict(self.theirs.state_dict())
        self.theirs.flatten_parameters()
        self.ours.flatten_parameters()
        self.data = torch.randn(shape.steps, shape.batch, features, device="cuda", dtype=dtype)
        self.lengths: torch.Tensor | None = None
        if shape.packed:
            steps = [shape.steps - row * shape.steps // (2 * shape.batch) for row in range(shape.batch)]
            self.lengths = torch.tensor(steps)
            self.data = torch.nn.utils.rnn.pack_padded_sequence(self.data, self.lengths).data
        self.data.requires_grad_()
        width = shape.hidden * (2 if shape.bidirectional else 1)
        self.grad = torch.randn(*self.data.shape[:-1], width, device="cuda", dtype=dtype)

    def given(self, data: torch.Tensor) -> Any:
        """The input of a module."""
        if self.lengths is None:
            return data
        sizes = torch.tensor([int((self.lengths > step).sum()) for step in range(int(self.lengths[0]))])
        return torch.nn.utils.rnn.PackedSequence(data, sizes)

    def step(self, module: torch.nn.Module) -> Any:
        """The function that is timed: it gives all gradients."""
        tensors, x = [self.data, *module.parameters()], self.given(self.data)

        def run() -> tuple[torch.Tensor, ...]:
            out = module(x)[0]
            return torch.autograd.grad(out if self.lengths is None else out.data, tensors, self.grad)

        return run


def with_resets(shape: Shape, features: int) -> dict[str, Any]:
    """Our module with and without resets, and torch.nn.GRU over the pieces between resets."""
    pair = Pair(shape, features)
    marks = torch.rand(shape.steps, shape.batch, device="cuda") < RESET_ODDS
    tensors = [pair.data, *pair.ours.parameters()]
    checked = gru_call(pair.data, pair.data.new_zeros(1, shape.batch, shape.hidden), tensors[1:], resets=marks)

    def run(resets: torch.Tensor | None) -> Any:
        return lambda: torch.autograd.grad(pair.ours(pair.data, resets=resets)[0], tensors, pair.grad)

    def cut() -> Any:
        return torch.autograd.grad(eager.gru(checked)[0], tensors, pair.grad)

    plain, reset = run(None), run(marks)
    found: dict[str, Any] = {**dataclasses.asdict(shape), "features": features, "marks": int(marks.sum())}
    found["apart"] = session.apart(reset(), cut(), session.largest(cut()))
    found["plain_us"], found["resets_us"] = in_turns(plain, reset, call_us)
    found["cut_us"] = call_us(cut)
    found["plain_graph_us"], found["resets_graph_us"] = in_turns(captured(plain), captured(reset), graph_us)
    return found


def reset_line(row: dict[str, Any]) -> str:
    """A row of ``with_resets`` beside its bar."""
    call, graph = row["resets_us"] / row["plain_us"], row["resets_graph_us"] / row["plain_graph_us"]
    return (
        f"resets, {row['steps']} steps of {row['batch']} x {row['hidden']}: call {call:.3f}, graph {graph:.3f} of none (bar "
        f"{RESET_BAR}); nn.GRU over {row['marks']} pieces more {row['cut_us'] / row['resets_us']:.2f} times ours"
    )


def errors(pair: Pair) -> list[float]:
    """Our error over nn.GRU's error, for each gradient."""
    exact, data = copy.deepcopy(pair.theirs).double(), pair.data.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(data)[0], [data, *exact.parameters()], pair.grad.double())
    each = []
    for module in (pair.theirs, pair.ours):
        found = pair.step(module)()
        each.append([float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, wanted, strict=True)])
    return [our / max(their, 1e-30) for their, our in zip(*each, strict=True)]


def peak_bytes(run: Any) -> int:
    """The most memory that a step allocates, in addition to what was allocated before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compared(shape: Shape, features: int, *, whole: bool = False) -> dict[str, Any]:
    """Both modules for one shape. ``whole``: with errors and memory too."""
    pair = Pair(shape, features)
    found: dict[str, Any] = {**dataclasses.asdict(shape), "features": features}
    found["rule"] = tuned.explain(pair.ours, pair.given(pair.data)).rule
    theirs, ours = pair.step(pair.theirs), pair.step(pair.ours)
    found["apart"] = session.apart(ours(), theirs(), session.largest(theirs()))
    if whole:
        found["theirs_bytes"], found["ours_bytes"] = peak_bytes(theirs), peak_bytes(ours)
        if shape.steps * shape.batch * shape.hidden * shape.layers <= MOST_EXACT:
            found["errors"] = errors(pair)
    found["theirs_us"], found["ours_us"] = in_turns(theirs, ours, call_us)
    if not shape.packed:
        graphs = captured(theirs), captured(ours)
        found["theirs_graph_us"], found["ours_graph_us"] = in_turns(*graphs, graph_us)
    return found


def served(shape: Shape) -> None:
    """Run our module for a random shape, as a call and in a graph, so that its kernels are compiled."""
    pair = Pair(shape, shape.hidden)
    run = pair.step(pair.ours)
    run()
    if not shape.packed:
        captured(run)


def drawn_here(draw: random.Random) -> Shape:
    """A shape of ``random_gru`` whose gradients fit into memory as well."""
    while True:
        shape = drawn(draw)
        if shape.steps * shape.batch * shape.hidden <= MOST_ELEMENTS:
            return shape


def line(group: str, row: dict[str, Any]) -> str:
    """A listed row beside its bar."""
    name = f"{row['steps']} steps of {row['batch']} x {row['hidden']}, {row['layers']} layers, {row['dtype']}"
    call, graph = row["theirs_us"] / row["ours_us"], row["theirs_graph_us"] / row["ours_graph_us"]
    bars = BARS[group]
    told = f"{name}{', both ways' if row['bidirectional'] else ''}: call {call:.2f} (bar {bars[0]}), graph {graph:.2f} (bar {bars[1]})"
    told += (
        f", {row['ours_graph_us'] / row['steps']:.2f} us a step; memory {row['ours_bytes'] / row['theirs_bytes']:.2f}"
    )
    if "errors" in row:
        told += f"; errors {statistics.geometric_mean(row['errors']):.2f}, most {max(row['errors']):.2f}"
    return told


def main() -> None:
    """Measure, print, write."""
    options = options_of(__doc__)
    found: dict[str, list[dict[str, Any]]] = {"listed": [], "resets": [], "rows": []}
    with kept(options.out, {"seed": options.seed, **found}, lambda rows: summary(rows, "nn.GRU")):
        for group, shape, features in LISTED:
            found["listed"].append({"group": group, **compared(shape, features, whole=True)})
            print(line(group, found["listed"][-1]), flush=True)
        for shape, features in RESET_SHAPES:
            found["resets"].append(with_resets(shape, features))
            print(reset_line(found["resets"][-1]), flush=True)
        measure(found["rows"], options, drawn_here, served, lambda shape: compared(shape, shape.hidden))


if __name__ == "__main__":
    main()
