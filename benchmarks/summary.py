"""README's table, measured in one run: python -m benchmarks.summary [--out FILE] [--write README.md] [--plot FILE].

Ten calls are timed, each in turns with what it replaces: RoPE with flash-attention, Liger, torch.compile and eager
PyTorch, if they are installed and take the call; a GRU with torch.nn.GRU. Times are medians in a CUDA graph, and
medians of calls on the wall clock. Without a GPU, --results FILE writes the table and the picture of an earlier run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import arguments, random_gru, random_rope, training
from benchmarks.call import Call
from benchmarks.peers import PACKAGES
from benchmarks.random_gru import Shape
from benchmarks.record import environment
from generator.disk import around, put_between

MARK = "summary"
PEERS = ("flash-attention", "Liger-Kernel", "torch.compile", "eager PyTorch")
LLAMA: dict[str, Any] = {"heads": 32, "key_heads": 0, "head_dim": 128, "rotary_dim": 128, "angles": "cos_sin pair"}
BOTH = {**LLAMA, "key_heads": 8, "inplace": True}
Row = dict[str, Any]


def _rope(**call: Any) -> Callable[[], Row]:
    def measured() -> Row:
        with torch.no_grad():
            found = random_rope.compared(Call(**call), peers=PEERS)
        assert found is not None, "no peer takes the call"
        graph, wall = found["graph_us"], found["call_us"]
        best = {
            which: min((us, name) for name, us in times.items() if name != "ours")
            for which, times in (("graph", graph), ("call", wall))
        }
        return {
            "ours_us": graph["ours"],
            "peer_us": best["graph"][0],
            "peer": best["graph"][1],
            "graph": best["graph"][0] / graph["ours"],
            "call": best["call"][0] / wall["ours"],
            "floor": graph["ours"] / found["floor_us"],
            "all": found,
        }

    return measured


def _gru(  # noqa: PLR0913 - a shape, and whether it trains
    steps: int, batch: int, hidden: int, layers: int = 1, dtype: str = "bfloat16", *, trained: bool = False
) -> Callable[[], Row]:
    shape = Shape(steps, batch, hidden, layers, False, dtype, False)  # noqa: FBT003

    def measured() -> Row:
        if trained:
            found = training.compared(shape, hidden)
        else:
            with torch.no_grad():
                found = random_gru.compared(shape)
        return {
            "ours_us": found["ours_graph_us"],
            "peer_us": found["theirs_graph_us"],
            "peer": "torch.nn.GRU",
            "graph": found["theirs_graph_us"] / found["ours_graph_us"],
            "call": found["theirs_us"] / found["ours_us"],
            "floor": None,
            "all": found,
        }

    return measured


ROWS: dict[str, Callable[[], Row]] = {
    "RoPE of a query, 2 x 4096 tokens, 32 heads of 128": _rope(batch=2, seq=4096, **LLAMA),
    "its gradient": _rope(batch=2, seq=4096, direction="backward", **LLAMA),
    "RoPE of query and key in place, 32 and 8 heads": _rope(batch=2, seq=4096, **BOTH),
    "the same for 64 tokens that are decoded": _rope(batch=64, seq=1, **BOTH),
    "the same for 65,536 tokens in 256 packed sequences": _rope(
        batch=1, seq=65536, layout="thd", sequences=256, **BOTH
    ),
    "RoPE in place of half of the features, 4 x 4096": _rope(
        batch=4, seq=4096, inplace=True, **{**LLAMA, "rotary_dim": 64}
    ),
    "GRU, 512 steps of 32 x 512": _gru(512, 32, 512),
    "GRU of 6 layers, 512 steps of 10 x 256, float32": _gru(512, 10, 256, 6, "float32"),
    "GRU, 512 steps of 32 x 512, forward and backward": _gru(512, 32, 512, trained=True),
    "GRU, 512 steps of 64 x 1024, forward and backward": _gru(512, 64, 1024, trained=True),
}


def table(document: dict[str, Any]) -> str:
    """The table as Markdown, with the device and the versions of PyTorch and Triton."""
    about = document["environment"]
    lines = [
        f"Microseconds in a CUDA graph on one {about['device']}, bfloat16 where nothing else is said; PyTorch {about['torch']}, Triton {about['triton']}.",
        "",
        "| call | ours | best of what it replaces | | times as fast | as a call | ours / floor |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for name, row in document["rows"].items():
        floor = "" if row["floor"] is None else f"{row['floor']:.2f}"
        times = (
            f"{_us(row['ours_us'])} | {_us(row['peer_us'])} | {row['peer']} | {row['graph']:.2f} | {row['call']:.1f}"
        )
        lines.append(f"| {name} | {times} | {floor} |")
    return "\n".join(lines)


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"  # noqa: PLR2004


def draw(document: dict[str, Any], path: Path) -> None:
    """Write ``figure_of`` as a picture."""
    figure_of(document).savefig(path, dpi=140)


def figure_of(document: dict[str, Any]) -> Any:
    """A bar for each row: how many times as fast as what it replaces, in a graph and as a call."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra "bench"

    names, rows = list(document["rows"]), list(document["rows"].values())
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))[::-1]
    for key, shift, color, label in (
        ("graph", 0.2, "#0072b2", "in a CUDA graph"),
        ("call", -0.2, "#e69f00", "as a call"),
    ):
        bars = axes.barh(
            [at + shift for at in places], [row[key] for row in rows], height=0.38, color=color, label=label
        )
        axes.bar_label(bars, fmt="%.2f" if key == "graph" else "%.1f", padding=2, fontsize=7)
    smallest, largest = (of(row[key] for row in rows for key in ("graph", "call")) for of in (min, max))
    left = 0.8 if smallest >= 0.9 else 0.8 * smallest  # noqa: PLR2004 - a slow row has a bar, and a number beside it
    axes.set_yticks(list(places), names, fontsize=8)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set(
        xscale="log",
        xlabel="times as fast as the best of what it replaces",
        xlim=(left, 1.6 * largest),
    )
    # A tick to the left of the axis would widen it.
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if tick >= left]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--results", type=arguments.results("peer"), help="of an earlier run, instead of measuring")
    parser.add_argument("--out", type=arguments.output, help="write the results to this file")
    parser.add_argument("--write", type=arguments.file, help="put the table between its marks in this file")
    parser.add_argument("--plot", type=Path, help="draw the picture into this file")
    options = parser.parse_args(given)
    if options.write is not None:
        try:
            around(options.write, MARK)
        except ValueError as error:
            parser.error(str(error))  # before minutes of measuring
    if options.results is not None:
        document = json.loads(options.results.read_text())
    elif torch.cuda.is_available():
        document = {"environment": environment(PACKAGES), "rows": {name: measured() for name, measured in ROWS.items()}}
    else:
        raise SystemExit(
            "this measures kernels on a GPU, and torch sees none here: --results FILE shows an earlier run"
        )
    print(table(document))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.write is not None:
        put_between(options.write, MARK, table(document))
    if options.plot is not None:
        draw(document, options.plot)


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
