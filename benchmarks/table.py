"""Results as text: ``python -m benchmarks.table`` prints the README's table, ``--write README.md`` puts it there.

``--bars`` prints every bar with its worst row and by how far it is met or missed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import bars

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
COLUMNS = ("TransformerEngine", "flash-attention", "torch.compile", "eager PyTorch")
RATIOS = ("ours / floor", "ours / best peer")
HEADINGS = {"rope": "Shapes that are tuned", "rope-untuned": "Shapes that nothing was tuned for"}


def newest(folder: Path) -> Path:
    """The results of the device measured last."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"{folder} holds no results; run `python -m benchmarks.rope` on a GPU first")
    return found[-1]


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A Markdown table whose first columns are text and the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def microseconds(value: float | None) -> str:
    """At least three digits, or a dash."""
    if value is None:
        return "-"
    integral_digits = len(str(int(value)))
    return f"{value:.{max(0, 3 - integral_digits)}f}"


def ratio(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"


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


def write(path: Path, text: str) -> None:
    """Put the text between the marks of a file, and leave the rest alone."""
    before = path.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise SystemExit(f"{path} must hold the marks {BEGIN} and {END} once each")
    head, rest = before.split(BEGIN)
    tail = rest.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, help="a results file; without it, the newest")
    parser.add_argument("--bars", action="store_true", help="judge the bars instead of printing the table")
    parser.add_argument("--all", action="store_true", help="the rows of every layout")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    options = parser.parse_args(arguments)
    path = options.results or newest(Path(__file__).parent / "results")
    results = json.loads(path.read_text())
    layouts = ("bshd", "sbhd", "thd") if options.all else ("bshd",)
    text = bars.report(results) if options.bars else markdown(results, layouts=layouts)
    if options.write:
        write(options.write, text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
