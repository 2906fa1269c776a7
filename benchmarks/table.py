"""Results as text: ``python -m benchmarks.table`` prints the README's tables, ``--write README.md`` puts them there.

A family that has no results yet has no table, and its part of the file stays as it is. ``--bars`` prints every bar with its worst row and by how far it is met or missed.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import bars, calls_table, plan
from benchmarks.calls_plan import SUITES as CALL_SUITES
from benchmarks.cells import grid, microseconds, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parent / "results"
FOLDERS = (RESULTS, RESULTS / "calls", RESULTS / "gru")
COLUMNS = ("TransformerEngine", "flash-attention", "torch.compile", "eager PyTorch")
RATIOS = ("ours / floor", "ours / best peer")
HEADINGS = {"rope": "Shapes that are tuned", "rope-untuned": "Shapes that nothing was tuned for"}


def newest(*folders: Path) -> list[Path]:
    """The results of the device measured last in each folder that has any; at least one must."""
    found = [max(paths, key=lambda path: path.stat().st_mtime) for f in folders if (paths := [*f.glob("*.json")])]
    if not found:
        names = " and ".join(map(str, folders))
        raise SystemExit(
            f"no results in {names}; run `python -m benchmarks.rope`, `benchmarks.rope_calls`"
            " or `benchmarks.gru` on a GPU first"
        )
    return found


def device_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Device rows: ours, the floor, the peers, and the two ratios that matter."""
    header = ("batch, seq, heads, dim, rotated", "pass", "angles", "ours", "floor", *COLUMNS, *RATIOS)
    cells = []
    for row in rows:
        sizes = row["sizes"]
        shape = ", ".join(str(sizes[k]) for k in ("batch", "seq", "heads", "head_dim", "rotary_dim"))
        direction = row["direction"] + (", in place" if row["inplace"] else "")
        times = (row["ours"], row["floor"], *(row["peers"].get(peer) for peer in COLUMNS))
        ratios = (ratio(row["ours_over_floor"]), ratio(row["ours_over_best_peer"]))
        angles = row["angles"].replace("cos_sin pair", "cos, sin").replace("freqs pair", "freqs")
        cells.append((shape, direction, angles, *map(microseconds, times), *ratios))
    return grid(header, cells, 3)


def host_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Host rows: wall time of whole calls."""
    header = ("seq, batch, heads, dim, rotated", "measured", "ours", "eager PyTorch", "torch.add", "ours / eager")
    cells = []
    for row in rows:
        sizes = row["sizes"]
        shape = ", ".join(str(sizes[k]) for k in ("seq", "batch", "heads", "head_dim", "rotary_dim"))
        times = (row["ours"], row["peers"].get("eager PyTorch"), row["peers"].get("torch.add"))
        cells.append((shape, row["measured"], *map(microseconds, times), ratio(row["ours_over_eager"])))
    return grid(header, cells, 2)


def markdown(results: dict[str, Any], *, layouts: Sequence[str] = ("bshd",)) -> str:
    """The README's part: device rows of some layouts, the host rows, and what they were measured with."""
    environment, rows = results["environment"], results["rows"]
    versions = f"PyTorch {environment['torch']}, Triton {environment['triton']}"
    floor = "The floor is a copy in the same run, scaled to the bytes that must move."
    out = [f"Microseconds on one {environment['device']}, bfloat16, {', '.join(layouts)}; {versions}. {floor}"]
    for suite, heading in HEADINGS.items():
        kept = [row for row in rows if row["suite"] == suite and row["layout"] in layouts]
        if kept:
            out += ["", f"**{heading}**", "", *device_table(kept)]
    host = [row for row in rows if row["suite"] == "rope-host" and row["bar"]]
    if host:
        out += ["", "**Wall time of a small call**, float32, sbhd", "", *host_table(host)]
    mean = bars.best_peer_mean(rows)
    if mean is not None:
        out += ["", f"Geometric mean of ours / best peer: {mean[0]:.2f} over {mean[1]} rows of all layouts."]
    return "\n".join(out)


def gru_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sequences: microseconds a time step, all layers and directions in it."""
    header = (
        "steps, batch, input, hidden", "layers", "dtype", "ours", "in a graph", "nn.GRU", "in a graph",
        "nn.GRU / ours", "nn.GRU in a graph / ours",
    )  # fmt: skip
    cells = []
    for row in rows:
        sizes, peers = row["sizes"], row["peers"]
        shape = ", ".join(str(sizes[k]) for k in ("steps", "batch", "input", "hidden"))
        layers = f"{sizes['layers']}{', both ways' if sizes['directions'] > 1 else ''}"
        notes = "".join(f", {text}" for text in (row["name"], row["layout"]) if text not in ("", "seq first"))
        ours_in_a_graph = None if isinstance(row["ours_in_a_graph"], str) else row["ours_in_a_graph"]
        times = (row["ours"], ours_in_a_graph, peers["nn.GRU"], peers.get("nn.GRU in a CUDA graph"))
        steps = [None if us is None else us / sizes["steps"] for us in times]
        ratios = (ratio(row["speedup"]), ratio(row["speedup_over_graph"]))
        cells.append((shape + notes, layers, row["dtype"], *map(microseconds, steps), *ratios))
    return grid(header, cells, 3)


def step_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Single steps: device time with cold weights, and the host's time."""
    header = ("call", "ours", "floor", "best peer", "it is", "peer / ours", "host, ours", "host, peer")
    cells = []
    for row in rows:
        sizes, peer = row["sizes"], row["best_peer"]
        segments = " + ".join(map(str, sizes["segments"]))
        call = f"{row['operation']}: batch {sizes['batch']}, {segments} to {sizes['outputs']}"
        times = (row["ours"], row["floor"], row["peers"][peer])
        host = (row["ours_host"], row["host"][peer])
        ours_and_peer = (*map(microseconds, times), peer, ratio(row["speedup"]), *map(microseconds, host))
        cells.append((call, *ours_and_peer))
    return grid(header, cells, 1)


def extremes(rows: Sequence[dict[str, Any]], key: str, against: str) -> str:
    """The geometric mean of a speed-up with its worst and its best row, as a sentence."""
    ranked = sorted((row for row in rows if row.get(key) is not None), key=lambda row: row[key])
    if not ranked:
        return f"* Against {against}: no row."
    mean = math.exp(math.fsum(math.log(row[key]) for row in ranked) / len(ranked))
    ends = [f"{row[key]:.2f} at {bars.where(row)}" for row in (ranked[0], ranked[-1])]
    return f"* Against {against}, times as fast: geometric mean {mean:.2f} of {len(ranked)}; worst {ends[0]}; best {ends[1]}."


def gru_markdown(results: dict[str, Any]) -> str:
    """The README's part on GRU: sequences, then single steps, then the worst and the best of each."""
    environment, rows = results["environment"], results["rows"]
    sequences = [row for row in rows if row["suite"] == "gru"]
    steps = [row for row in rows if row["suite"] == "gru_cell"]
    out = [
        f"On one {environment['device']}; PyTorch {environment['torch']}, Triton {environment['triton']}; no gradient."
    ]
    if sequences:
        heading = "**Sequences, microseconds a time step**, the projection of the input counted in"
        out += ["", heading, "", *gru_table(sequences), "", extremes(sequences, "speedup", "nn.GRU as users call it")]
        out += [extremes(sequences, "speedup_over_graph", "nn.GRU in a CUDA graph")]
    if steps:
        heading = "**Single steps, microseconds**, bfloat16, on the device with cold weights, then on the host"
        out += ["", heading, "", *step_table(steps), "", extremes(steps, "speedup", "the best peer")]
    served = [row for row in rows if row["rule"] == "eager"]
    out += [f"* No kernel served {bars.where(row)}: {row['why']}." for row in served]
    return "\n".join(out)


def write(path: Path, name: str, text: str) -> None:
    """Put the text between the marks of this name in a file, and leave the rest alone."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before = path.read_text()
    if before.count(begin) != 1 or before.count(end) != 1:
        raise SystemExit(f"{path} must hold the marks {begin} and {end} once each")
    head, rest = before.split(begin)
    tail = rest.split(end)[1]
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several results, and what they skipped."""
    rows = [row for document in documents for row in document["rows"]]
    skipped = {key: text for document in documents for key, text in document["skipped"].items()}
    return {"rows": rows, "skipped": skipped}


def parts(documents: Sequence[dict[str, Any]], layouts: Sequence[str]) -> dict[str, str]:
    """The README's parts that have results, by the name of their marks."""
    found = {}
    for document in documents:
        suites = {row["suite"] for row in document["rows"]}
        if suites & plan.SUITES.keys():
            found["benchmark"] = markdown(document, layouts=layouts)
        if suites & CALL_SUITES.keys():
            found["benchmark-calls"] = calls_table.markdown(document)
        if suites & {"gru", "gru_cell"}:
            found["benchmark-gru"] = gru_markdown(document)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, help="a results file; without it, the newest of each family")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--bars", action="store_true", help="judge the bars instead of printing the tables")
    parser.add_argument("--all", action="store_true", help="the rows of every layout")
    instead.add_argument("--write", type=Path, metavar="FILE", help="put each table between its marks in this file")
    options = parser.parse_args(arguments)
    paths = [options.results] if options.results else newest(*FOLDERS)
    documents = [json.loads(path.read_text()) for path in paths]
    layouts = ("bshd", "sbhd", "thd") if options.all else ("bshd",)
    texts = {"bars": bars.report(merged(documents))} if options.bars else parts(documents, layouts)
    for name, text in texts.items():
        if options.write:
            write(options.write, name, text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
