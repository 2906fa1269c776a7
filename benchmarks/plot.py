"""Time against sequence length, forward and backward: ``python -m benchmarks.plot`` writes PNGs.

Those of results in benchmarks/results go to benchmarks/results/sweep, which docs/results.md shows; those of another
file go beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import arguments
from benchmarks.plan import DIRECTIONS, SWEEPS, png_path
from benchmarks.session import RESULTS
from benchmarks.table import here, newest

STYLES: dict[str, dict[str, Any]] = {
    "this project": {"color": "#0072b2", "linewidth": 2.4, "marker": "o", "zorder": 5},
    "copy floor": {"color": "#555555", "linewidth": 1.4, "linestyle": "--", "zorder": 4},
    "flash-attention": {"color": "#e69f00", "marker": "s"},
    "TransformerEngine": {"color": "#009e73", "marker": "^"},
    "torch.jit.script": {"color": "#cc79a7", "marker": "v"},
    "eager PyTorch": {"color": "#d55e00", "marker": "D"},
}  # Okabe and Ito's colours, which colour-blind readers can tell apart


def draw(axes: Axes, rows: Sequence[dict[str, Any]], title: str) -> None:
    """One panel: a line for each name, over the sequence lengths at which it has a time."""
    for name, style in STYLES.items():
        times = [(r["sizes"]["seq"], {"this project": r["ours"], "copy floor": r["floor"], **r["peers"]}) for r in rows]
        points = sorted((seq, us[name]) for seq, us in times if name in us)
        if points:
            axes.plot(*zip(*points, strict=True), label=name, markersize=4.5, **style)
    ticks = sorted({row["sizes"]["seq"] for row in rows})
    axes.set(title=title, xlabel="sequence length", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(visible=True, which="major", alpha=0.3)


def folder_of(path: Path) -> Path:
    """The folder of the PNGs of a results file."""
    beside = path.parent
    return RESULTS / "sweep" if beside.resolve() == RESULTS.resolve() else beside


def plot(path: Path) -> list[Path]:
    """A PNG for each model of the sweep, with a panel for each direction. A model without rows gives none."""
    results = json.loads(path.read_text())
    sweep = [row for row in results["rows"] if row["suite"] == "rope-sweep"]
    written = []
    for name, (batch, heads, head_dim) in SWEEPS.items():
        sizes = {"batch": batch, "heads": heads, "head_dim": head_dim}
        rows = [row for row in sweep if sizes.items() <= row["sizes"].items()]
        if not rows:
            continue
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        panels = figure.subplots(1, len(DIRECTIONS), sharey=True)
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            draw(axes, [row for row in rows if row["direction"] == direction], direction)
        panels[0].set_ylabel("device time (us)")
        panels[0].legend(frameon=False)
        figure.suptitle(
            f"RoPE, {name}: batch {batch}, {heads} heads, head dimension {head_dim}, bfloat16, bshd, "
            f"{results['environment']['device']}"
        )
        written.append(folder_of(path) / png_path(path, name).name)
        written[-1].parent.mkdir(exist_ok=True)
        figure.savefig(written[-1], dpi=130)
    return written


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "results",
        nargs="?",
        type=arguments.results("suite"),
        help="a results file; without it, that of the last release",
    )
    which.add_argument("--here", action="store_true", help="that of the GPU that is here")
    options = parser.parse_args(given)
    written = plot(options.results or (here if options.here else newest)(RESULTS)[0])
    if not written:
        print("no row of the suite rope-sweep; run `python -m benchmarks.rope --suite rope-sweep`")
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
