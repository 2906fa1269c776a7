"""GRU steps and linears over segments, of random shapes, against PyTorch's: python -m benchmarks.random_steps [--seconds 60] [--shapes 240] [--seed N].

Shapes are drawn log-uniform, not rounded. A step has 1 to 1024 rows, 32 to 2048 inputs and 32 to 2048 units, and runs
by torch.nn.GRUCell and by tuned.nn.GRUCell. A linear has 1 to 1024 rows of two or three segments of 16 to 1024
features, and 16 to 8192 outputs, and runs by torch.nn.functional.linear of their torch.cat and by
tuned.dispatch.linear_cat. Dtypes are bfloat16, and float32 with torch's default precision of products. The rest is as
in benchmarks.random_gru; each measurement is of 20 calls.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

import tuned
import tuned.nn
from benchmarks import session
from benchmarks.random_gru import call_us, captured, graph_us, in_turns, run, summary
from tuned.dispatch import linear_cat

CALLS = 20
SHAPES = 240  # of both kinds, so that 100 of each are among them


def drawn(draw: random.Random) -> dict[str, Any]:
    """A step or a linear, chosen at random."""

    def between(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    made: dict[str, Any] = {"kind": draw.choice(("step", "linear")), "rows": between(1, 1024)}
    made["dtype"] = draw.choice(("bfloat16", "float32"))
    if made["kind"] == "step":
        return made | {"inputs": [between(32, 2048)], "outputs": between(32, 2048)}
    return made | {"inputs": [between(16, 1024) for _ in range(draw.choice((2, 3)))], "outputs": between(16, 8192)}


def both(shape: dict[str, Any]) -> tuple[Any, Any, str]:
    """PyTorch's call, our call, and the rule that serves our call."""
    made: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, shape["dtype"])}
    rows, inputs, outputs = shape["rows"], shape["inputs"], shape["outputs"]
    xs = tuple(torch.randn(rows, width, **made) for width in inputs)
    if shape["kind"] == "step":
        theirs, ours = torch.nn.GRUCell(inputs[0], outputs, **made), tuned.nn.GRUCell(inputs[0], outputs, **made)
        ours.load_state_dict(theirs.state_dict())
        h = torch.randn(rows, outputs, **made)
        return lambda: theirs(xs[0], h), lambda: ours(xs[0], h), tuned.explain(ours, xs[0], h).rule
    layer = torch.nn.Linear(sum(inputs), outputs, **made)
    weight, bias = layer.weight, layer.bias
    rule = tuned.explain(linear_cat, xs, weight, bias).rule
    return lambda: layer(torch.cat(xs, -1)), lambda: linear_cat(xs, weight, bias), rule


def repeated(call: Any) -> Any:
    """CALLS calls in one function, so that the clock's overhead does not count."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    return calls


def served(shape: dict[str, Any]) -> None:
    """Run our call for one shape, as a call and in a graph, so that its kernels are compiled."""
    with torch.no_grad():
        _, ours, _ = both(shape)
        ours()
        captured(ours)


def compared(shape: dict[str, Any]) -> dict[str, Any]:
    """Both calls for one shape: microseconds as a call and in a graph, the rule that served, the difference of results."""
    theirs, ours, rule = both(shape)
    exact = theirs()
    apart = session.apart([ours()], [exact], max(1.0, session.largest([exact])))
    one, other = repeated(theirs), repeated(ours)
    as_calls = in_turns(one, other, call_us)
    in_graphs = in_turns(captured(one), captured(other), graph_us)
    names = ("theirs_us", "ours_us", "theirs_graph_us", "ours_graph_us")
    times = dict(zip(names, (us / CALLS for us in (*as_calls, *in_graphs)), strict=True))
    return {**shape, "apart": apart, "rule": rule, **times}


def told(rows: list[dict[str, Any]]) -> str:
    """A summary for each kind (step or linear) and dtype."""
    lines = []
    for kind, dtype in sorted({(row["kind"], row["dtype"]) for row in rows}):
        alike = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
        lines.append(f"{kind}s in {dtype}\n{summary(alike, 'PyTorch')}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(__doc__, drawn, served, compared, told, SHAPES)
