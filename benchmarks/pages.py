"""A page of results for each device: ``python -m benchmarks.pages`` writes docs/results-DEVICE.md and its pictures.

It needs no GPU: everything is drawn from benchmarks/results, which is committed. Pictures come first, then the tables
of the same rows. Benchmarks that were not run on a device are left out of its page, and pictures that no row has the
times for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import arguments, plot, summary, table
from benchmarks.plan import DIRECTIONS, SWEEPS
from benchmarks.session import RESULTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
Rows = list[dict[str, Any]]
OURS, OTHER, GREY = "#0072b2", "#e69f00", "#777777"
# Runs on shapes that nothing was tuned for: title -> kind, and the seed that the decisions cite.
RANDOM = {
    "RoPE, against flash-attention and Liger": ("rope-", "576504408"),
    "GRUs, against nn.GRU": ("", "1172418058"),
    "GRUs in training, against nn.GRU": ("training-", "764501023"),
    "steps and linears, against PyTorch": ("steps-", "740564813"),
}


MEASURED = (
    "Measured on one {device} ({multiprocessors} multiprocessors) with PyTorch {torch} and Triton {triton}. Times are medians of "
    "the device, in CUDA graphs, where nothing else is said. [Results](results.md) says how to read them, and what is not current; "
    "the [glossary](glossary.md) has the words."
)
EQUAL = 1.02  # two times within this ratio count as equal


FOLDERS = ("", "gru", "summary")  # of the files that a page is made of


def devices(results: Path) -> list[str]:
    """The devices that have rows in any of FOLDERS."""
    paths = [path for folder in FOLDERS for path in (results / folder).glob("*.json")]
    return sorted({path.stem for path in paths if json.loads(path.read_text())["rows"]})


def read(results: Path, device: str, folder: str = "") -> dict[str, Any] | None:
    """One file of results; None if it does not exist."""
    path = results / folder / f"{device}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def read_random(results: Path, device: str, commit: str | None = None) -> dict[str, Rows]:
    """Title -> rows of a random run: the run of the device's release if there was one, else the run that decisions cite.

    The title of a run that was cut says so. ``commit``: the commit of a release that has not ended yet.
    """
    stamp = read(results, device, "release")
    if commit is None and stamp is not None:
        commit = str(stamp["commit"])
    found = {}
    for title, (kind, cited) in RANDOM.items():
        of_release = [] if commit is None else [str(int(commit[:7], 16))]  # as benchmarks.release_plan draws them
        names = [f"{device}-{kind}{seed}" for seed in (*of_release, cited)]
        run = next((run for name in names if (run := read(results / "random", name))), None)
        if run is not None:
            rows = list(run["rows"])
            found[f"{title} (cut after {len(rows)} shapes)" if run.get("cut") else title] = rows
    return found


# Pictures -------------------------------------------------------------------------------------------------------------


def beside_floor(rows: Rows) -> Rows:
    """The rows of the device that have a floor."""
    return [row for row in rows if row["kind"] == "device" and row.get("ours_over_floor")]


def floors(rows: Rows, axes: Axes) -> str:
    """Draw the ratio of each rotation to its floor against its time; return one sentence about it."""
    found = beside_floor(rows)
    for label, color, chosen in (
        ("one tensor", OURS, [r for r in found if not r["sizes"].get("key_heads")]),
        ("query and key", OTHER, [r for r in found if r["sizes"].get("key_heads")]),
    ):
        axes.scatter([r["ours"] for r in chosen], [r["ours_over_floor"] for r in chosen], 14, color, label=label)
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="microseconds", ylabel="ours / floor")
    axes.legend(frameon=False, fontsize=8)
    ratios = [r["ours_over_floor"] for r in found]
    return (
        f"{len(found)} rotations: {statistics.median(ratios):.2f} of the floor in the median, {max(ratios):.2f} at most. "
        "Below 1 dependent launch hides part of the start, which the copy pays in full."
    )


def beside_peers(rows: Rows) -> Rows:
    """The rows of the device that a peer has a time for."""
    return [row for row in rows if row["kind"] == "device" and row["peers"]]


def peers(rows: Rows, axes: Axes) -> str:
    """Draw how many times as fast as each peer, a point for each call; return one sentence about it."""
    found: dict[str, list[float]] = {}
    taken = beside_peers(rows)
    for row in taken:
        for name, us in row["peers"].items():
            found.setdefault(name, []).append(us / row["ours"])
    ordered = sorted(found, key=lambda name: statistics.geometric_mean(found[name]), reverse=True)
    for place, name in enumerate(ordered):
        axes.scatter(found[name], [place] * len(found[name]), 12, OURS, alpha=0.5)
        axes.scatter([statistics.geometric_mean(found[name])], [place], 70, OTHER, marker="|", linewidths=2.5)
    axes.set_yticks(range(len(ordered)), [f"{name} ({len(found[name])})" for name in ordered], fontsize=7)
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="times as fast as the peer; the mark is the geometric mean")
    best = [min(row["peers"].values()) / row["ours"] for row in taken]
    slower = sum(ratio < 1 for ratio in best)
    return (
        f"{len(best)} calls of RoPE: {statistics.geometric_mean(best):.2f} times as fast as the best peer of each, in the "
        f"geometric mean; in {slower} a peer is faster. In brackets: the calls that a peer takes."
    )


def beside_nn_gru(rows: Rows) -> Rows:
    """The GRUs over sequences that were timed beside nn.GRU both in CUDA graphs and as calls."""
    ratios = ("speedup_graph_over_graph", "speedup")
    return [row for row in rows if row["suite"] == "gru" and all(row[key] is not None for key in ratios)]


def recurrences(rows: Rows, axes: Axes) -> str:
    """Draw how many times as fast as nn.GRU, in a graph and as calls, a line for each shape; return its sentences."""
    found = sorted(beside_nn_gru(rows), key=lambda r: r["speedup_graph_over_graph"])
    absent = sum(r["suite"] == "gru" for r in rows) - len(found)
    places = range(len(found))
    for key, color, label in (
        ("speedup_graph_over_graph", OURS, "both in a CUDA graph"),
        ("speedup", OTHER, "both as calls"),
    ):
        axes.scatter([r[key] for r in found], places, 16, color, label=label)
    axes.set_yticks(places, [r["name"] or r["problem"] for r in found], fontsize=6)
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="times as fast as nn.GRU")
    axes.legend(frameon=False, fontsize=8)
    graph, calls = ([r[key] for r in found] for key in ("speedup_graph_over_graph", "speedup"))
    return (
        f"{len(found)} GRUs over sequences, without a gradient: {statistics.geometric_mean(graph):.1f} times as fast as nn.GRU "
        f"in CUDA graphs and {statistics.geometric_mean(calls):.1f} as calls, in the geometric mean; "
        f"{min(graph):.2f} and {min(calls):.2f} at worst."
        + (f" Left out, because one of the four times is missing: {absent}." if absent else "")
    )


def ratio_of(row: dict[str, Any]) -> float | None:
    """The best peer's time in a CUDA graph over ours, for a row of a random run; None if there is no such time."""
    if "graph_us" in row:
        others = [us for name, us in row["graph_us"].items() if name != "ours"]
        return min(others) / row["graph_us"]["ours"] if others else None
    return row["theirs_graph_us"] / row["ours_graph_us"] if row.get("ours_graph_us") else None  # type: ignore[no-any-return]


def ratios_of(rows: Rows) -> list[float]:
    """The ratios of a random run, in order; none of calls that have none, such as packed sequences."""
    return sorted(ratio for row in rows if (ratio := ratio_of(row)) is not None)


def random_shapes(runs: dict[str, Rows], axes: Axes) -> str:
    """Draw the share of random shapes that are at most so many times as fast, a line for each run; return its sentences."""
    said = []
    for (title, rows), color in zip(runs.items(), (OURS, OTHER, "#009e73", "#cc79a7"), strict=False):
        ratios = ratios_of(rows)
        axes.step(
            ratios, [100 * (i + 1) / len(ratios) for i in range(len(ratios))], where="post", color=color, label=title
        )
        slower = sum(ratio < 1 / EQUAL for ratio in ratios)
        said.append(
            f"{title}: {len(ratios)} shapes, {statistics.geometric_mean(ratios):.2f} times as fast in the geometric mean, "
            f"{slower} slower by more than 2 percent"
        )
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlabel="times as fast, in a CUDA graph", ylabel="percent of the shapes")
    axes.legend(frameon=False, fontsize=7)
    return "; ".join(said) + "."


def sweeps(rows: Rows, figure: Figure) -> str:
    """Draw time against sequence length, a row of panels for each model; return the shapes in words."""
    models = [(n, s) for n, s in SWEEPS.items() if any(_is_of(row, s) for row in rows)]
    grid = figure.subplots(len(models), len(DIRECTIONS), squeeze=False)
    for panels, (name, shape) in zip(grid, models, strict=True):
        for axes, direction in zip(panels, DIRECTIONS, strict=True):
            plot.draw(
                axes, [r for r in rows if _is_of(r, shape) and r["direction"] == direction], f"{name}, {direction}"
            )
        panels[0].set_ylabel("microseconds")
    grid[0][0].legend(frameon=False, fontsize=7)
    shapes = "; ".join(f"{name}: batch {b}, {h} heads of {d}" for name, (b, h, d) in models)
    return f"{shapes}."


def _is_of(row: dict[str, Any], shape: tuple[int, int, int]) -> bool:
    return tuple(row["sizes"][k] for k in ("batch", "heads", "head_dim")) == shape


def saved(figure: Figure, path: Path) -> None:
    """Write a picture with plain numbers at its axes; the same data and the same matplotlib give the same bytes."""
    for axes in figure.axes:
        axis: Any
        for axis in (axes.xaxis, axes.yaxis):
            labelled = axis.get_label_text() == "sequence length" or "replaces" in axis.get_label_text()
            if axis.get_scale() == "log" and not labelled:
                axis.set_major_formatter("{x:g}")
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def one(draw: Callable[[Axes], str], path: Path, size: tuple[float, float]) -> str:
    """Draw a picture of one panel, and return its sentence."""
    figure = Figure(figsize=size, layout="constrained")
    said = draw(figure.subplots())
    saved(figure, path)
    return said


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Path, device: str, images: Path, commit: str | None = None) -> str:
    """The text of a device's page, whose pictures are written into ``images``; ``commit`` as in ``read_random``."""
    documents = {name: found for name in FOLDERS if (found := read(results, device, name)) and found["rows"]}
    rope, gru = (documents[name]["rows"] if name in documents else [] for name in ("", "gru"))
    runs = {title: rows for title, rows in read_random(results, device, commit).items() if ratios_of(rows)}
    about = next(iter(documents.values()))["environment"]
    lines = [
        f"# Results: {about['device']}",
        "",
        "<!-- @generated by python -m benchmarks.pages from benchmarks/results. Do not edit. -->",
        "",
        MEASURED.format(**about),
    ]

    def picture(title: str, name: str, draw: Callable[[Path], str]) -> None:
        path = images / f"{device}-{name}.svg"
        said = draw(path)
        lines.extend(["", f"## {title}", "", f"![{title}](images/{path.name})", "", said])

    if found := documents.get("summary"):
        picture("The calls of the README", "calls", lambda path: _summary(found, path))
    if beside_floor(rope):
        picture("RoPE and the floor", "floor", lambda path: one(lambda a: floors(rope, a), path, (7, 3.6)))
    if beside_peers(rope):
        picture("RoPE and its peers", "peers", lambda path: one(lambda a: peers(rope, a), path, (7.5, 4.2)))
    if sweep := [r for r in rope if r["suite"] == "rope-sweep" and any(_is_of(r, shape) for shape in SWEEPS.values())]:
        picture("RoPE against sequence length", "sweep", lambda path: _sweep(sweep, path))
    if beside_nn_gru(gru):
        picture("GRUs", "gru", lambda path: one(lambda a: recurrences(gru, a), path, (7.5, 4.6)))
    if runs:
        picture(
            "Shapes that nothing was tuned for",
            "random",
            lambda path: one(lambda a: random_shapes(runs, a), path, (7, 3.8)),
        )
    return "\n".join([*lines, "", *_tables(documents)])


def _summary(document: dict[str, Any], path: Path) -> str:
    saved(summary.figure_of(document), path)
    ratios = [row["graph"] for row in document["rows"].values()]
    slower = sum(ratio < 1 for ratio in ratios)
    are, most = ("is", "") if slower == 1 else ("are", " at most")
    told = f"; {slower} {are} slower, by {100 * (1 - min(ratios)):.0f} percent{most}" if slower else ""
    return (
        f"{len(ratios)} calls: {statistics.geometric_mean(ratios):.1f} times as fast as the best of what each replaces, in the "
        f"geometric mean of CUDA graphs{told}."
    )


def _sweep(rows: Rows, path: Path) -> str:
    models = sum(any(_is_of(row, shape) for row in rows) for shape in SWEEPS.values())
    figure = Figure(figsize=(9, 3.2 * math.ceil(max(models, 1))), layout="constrained")
    said = sweeps(rows, figure)
    saved(figure, path)
    return said


def _tables(documents: dict[str, Any]) -> list[str]:
    lines = ["## Tables", ""]
    if found := documents.get("summary"):
        lines += ["### The calls of the README", "", summary.table(found), ""]
    titles = {"benchmark": "RoPE of one tensor", "benchmark-calls": "Complete calls of RoPE", "benchmark-gru": "GRU"}
    there = [documents[name] for name in ("", "gru") if name in documents]
    for mark, text in table.parts(there, ("bshd", "sbhd", "thd")).items():
        lines += [f"### {titles[mark]}", "", text, ""]
    return lines


def write(results: Path, docs: Path, released: tuple[str, str] = ("", "")) -> list[Path]:
    """Write the page of every device that has results; ``released``: a device, and the commit of its release under way."""
    written = []
    (docs / "images").mkdir(parents=True, exist_ok=True)
    for device in devices(results):
        path = docs / f"results-{device}.md"
        path.write_text(page(results, device, docs / "images", released[1] if device == released[0] else None))
        written.append(path)
    return written


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--results", type=arguments.folder, default=RESULTS, help="the folder of results")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    parser.add_argument(
        "--released",
        nargs=2,
        default=("", ""),
        metavar=("DEVICE", "COMMIT"),
        help="a release that has not ended, whose random runs the page of its device shows",
    )
    options = parser.parse_args(given)
    if not devices(options.results):
        parser.error(f"no device has results in {options.results}")
    print(*write(options.results, options.docs, tuple(options.released)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
