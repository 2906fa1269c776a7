"""Results as text: ``python -m benchmarks.table`` prints the tables of docs/results.md, ``--write docs/results.md`` puts them there.

A family without results gets no table, and its part of the file stays as it is. ``--bars`` prints every bar with its
worst row and by how much it is met or missed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import arguments, bars
from benchmarks.plan import COMPLETE, MODELS, SUITES
from benchmarks.session import RESULTS
from generator.disk import around, put_between
from tuned.lookup.record import device_slug

Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]  # heading, and the function from a row to its cell

FOLDERS = (RESULTS, RESULTS / "gru")  # a suite's rows are taken from the first folder that has it
HEADINGS = {"rope": "Shapes that are tuned", "rope-untuned": "Shapes that nothing was tuned for"}
COMPLETE_HEADINGS = {
    "rope-qk": "Query and key together",
    "rope-thd": "65,536 packed tokens, query and key",
    "rope-prefill": "Prefill: query and key in place in a packed qkv, rows of a float32 cos_sin_cache by position",
    "rope-features": "Other rotations",
}
# Column of the tables of complete calls -> the forms of that peer, which are separate peers in the results.
FORMS = {
    "TransformerEngine": ("TransformerEngine", "TransformerEngine fused qkv"),
    "flash-attention": ("flash-attention", "flash-attention bf16 angles"),
    "Liger": ("Liger-Kernel",),
    "FlashInfer": ("FlashInfer",),
    "vLLM": ("vLLM",),
    "torch.compile": ("torch.compile",),
    "eager": ("eager PyTorch",),
}


def newest(*folders: Path) -> list[Path]:
    """The results of one device in each folder that has them: the device of the last release, else of the newest file."""
    ended = {path.stem: json.loads(path.read_text()).get("ended", "") for path in (RESULTS / "release").glob("*.json")}
    written = {path.stem: path.stat().st_mtime for folder in folders for path in folder.glob("*.json")}
    device = max(written, key=lambda name: (name in ended, ended.get(name), written[name]), default="")
    return of_device(device, *folders)


def here(*folders: Path) -> list[Path]:
    """The results of this machine's GPU in each folder that has them; at least one must."""
    if not torch.cuda.is_available():
        raise SystemExit("--here is for a machine with a GPU, and PyTorch sees none: name a results file")
    return of_device(device_slug(torch.cuda.get_device_name()), *folders)


def of_device(device: str, *folders: Path) -> list[Path]:
    """The results of a device in each folder that has them; at least one must."""
    found = [path for folder in folders if (path := folder / f"{device}.json").exists()]
    if not found:
        names = " and ".join(map(str, folders))
        raise SystemExit(
            f"no results in {names}; run `python -m benchmarks.rope` or `python -m benchmarks.gru` on a GPU first"
        )
    return found


# Cells ----------------------------------------------------------------------------------------------------------------


def microseconds(value: float | str | None) -> str:
    """At least three digits, or a dash."""
    if value is None or isinstance(value, str):
        return "-"
    integral_digits = len(str(int(value)))
    return f"{value:.{max(0, 3 - integral_digits)}f}"


def us(heading: str, *path: str, parts: Callable[[Result], int] = lambda _: 1) -> Column:
    """A column of times, found by the keys of nested dictionaries; the time is divided by the call's number of parts."""

    def show(row: Result) -> str:
        found: Any = functools.reduce(lambda found, key: found.get(key), path, row)  # type: ignore[arg-type, return-value]
        return microseconds(found / parts(row) if isinstance(found, float | int) else None)

    return heading, show


def ratio(heading: str, key: str) -> Column:
    """A column of ratios: two decimals, or a dash."""
    return heading, lambda row: "-" if row[key] is None else f"{row[key]:.2f}"


def sizes(*names: str) -> Callable[[Result], str]:
    """Cells with the named sizes, side by side."""
    return lambda row: ", ".join(str(row["sizes"][name]) for name in names)


def angles(row: Result) -> str:
    """The form of the angles, in short."""
    return str(row["angles"]).replace("cos_sin pair", "cos, sin").replace("freqs pair", "freqs")


def section(heading: str, rows: Sequence[Result], columns: Sequence[Column], left: int) -> list[str]:
    """A Markdown table under a heading; the first ``left`` columns are text, the others numbers. Nothing without rows."""
    if not rows:
        return []
    lines = [[name for name, _ in columns], ["---" if i < left else "---:" for i in range(len(columns))]]
    lines += [[show(row) for _, show in columns] for row in rows]
    return ["", heading, "", *(f"| {' | '.join(cells)} |" for cells in lines)]


def measured_with(results: Result) -> str:
    """The versions of PyTorch and Triton, for the first line of a part."""
    return f"PyTorch {results['environment']['torch']}, Triton {results['environment']['triton']}"


def of(results: Result, suite: str) -> list[Result]:
    """The rows of a suite."""
    return [row for row in results["rows"] if row["suite"] == suite]


# RoPE -----------------------------------------------------------------------------------------------------------------

OVER = (ratio("ours / floor", "ours_over_floor"), ratio("ours / best peer", "ours_over_best_peer"))
ONE_TENSOR: tuple[Column, ...] = (
    ("batch, seq, heads, dim, rotated", sizes("batch", "seq", "heads", "head_dim", "rotary_dim")),
    ("pass", lambda row: row["direction"] + (", in place" if row["inplace"] else "")),
    ("angles", angles),
    us("ours", "ours"),
    us("floor", "floor"),
    *(us(name, "peers", name) for name in ("TransformerEngine", "flash-attention", "torch.compile", "eager PyTorch")),
    *OVER,
)
LAYOUT: Column = ("layout", lambda row: str(row["layout"]))  # after the sizes, in a table of several layouts
SMALL_CALLS: tuple[Column, ...] = (
    ("seq, batch, heads, dim, rotated", sizes("seq", "batch", "heads", "head_dim", "rotary_dim")),
    ("measured", lambda row: str(row["measured"])),
    us("ours", "ours"),
    *(us(name, "peers", name) for name in ("eager PyTorch", "torch.add")),
    ratio("ours / eager", "ours_over_eager"),
)
HOST: tuple[Column, ...] = (
    ("call", lambda row: str(row["bar"])),
    us("ours", "ours"),
    *(
        us(name, "peers", name)
        for name in ("torch.add", "C++ extension", "torch.compile", "eager PyTorch", "flash-attention")
    ),
)


def rope_markdown(results: Result, layouts: Sequence[str] = ("bshd",)) -> str:
    """The part on one tensor: device rows of some layouts, the host rows, and the device and versions."""
    columns = ONE_TENSOR if len(layouts) == 1 else (ONE_TENSOR[0], LAYOUT, *ONE_TENSOR[1:])
    text = len(columns) - len(ONE_TENSOR) + 3
    floor = "The floor is a copy in the same run, scaled to the bytes that must move."
    device = results["environment"]["device"]
    out = [f"Microseconds on one {device}, bfloat16, {', '.join(layouts)}; {measured_with(results)}. {floor}"]
    for suite, heading in HEADINGS.items():
        out += section(f"**{heading}**", [r for r in of(results, suite) if r["layout"] in layouts], columns, text)
    host = [row for row in of(results, "rope-host") if row["bar"]]
    out += section("**Wall time of a small call**, float32, sbhd", host, SMALL_CALLS, 2)
    mean = bars.best_peer_mean(results["rows"])
    if mean is not None:
        out += ["", f"Geometric mean of ours / best peer: {mean[0]:.2f} over {mean[1]} rows of all layouts."]
    return "\n".join(out)


def fastest(row: Result, forms: Sequence[str]) -> float | None:
    """The time of the fastest form of a peer."""
    return min((row["peers"][form] for form in forms if form in row["peers"]), default=None)


def shape(row: Result) -> str:
    """The sizes of a complete call in a cell."""
    sizes = row["sizes"]
    heads = f"{sizes['heads']} + {sizes['key_heads']}" if sizes["key_heads"] else str(sizes["heads"])
    ragged = f" in {sizes['sequences']}" if sizes["sequences"] > 1 else ""
    first = f"{sizes['seq']} tokens{ragged}" if row["layout"] == "thd" else f"{sizes['batch']}, {sizes['seq']}"
    rotated = f", {sizes['rotary_dim']} rotate" if sizes["rotary_dim"] != sizes["head_dim"] else ""
    name = f" ({row['name']})" if row["name"] and row["suite"] == "rope-features" else ""
    return f"{first}, {heads}, {sizes['head_dim']}{rotated}{name}"


def complete_columns(rows: Sequence[Result]) -> list[Column]:
    """The columns: ours, the floor, each peer that has a time in any row, and the ratios to the floor and the best peer."""
    peers = {name: forms for name, forms in FORMS.items() if any(fastest(row, forms) for row in rows)}
    return [
        ("tokens, heads, dim", shape),
        ("place", lambda row: "in place" if row["inplace"] else "out of place"),
        ("angles", angles),
        us("ours", "ours"),
        us("floor", "floor"),
        *((name, lambda row, forms=forms: microseconds(fastest(row, forms))) for name, forms in peers.items()),  # type: ignore[misc]
        *OVER,
    ]


def decode_section(heading: str, rows: Sequence[Result]) -> list[str]:
    """A line for each number of tokens, with our time, the best peer's time and the peer for each model."""
    by_tokens: dict[int, Result] = {}
    for row in sorted(rows, key=lambda row: row["sizes"]["seq"]):
        best = row["best_peer"]
        shown = {"ours": row["ours"], "peer": row["peers"].get(best), "it is": best or "-"}
        by_tokens.setdefault(row["sizes"]["seq"], {"tokens": row["sizes"]["seq"]})[row["name"]] = shown
    columns: list[Column] = [("tokens", lambda row: str(row["tokens"]))]
    for model in (model for model in MODELS if any(model in line for line in by_tokens.values())):
        columns += [
            (f"{model}: ours", lambda row, m=model: microseconds(row.get(m, {}).get("ours"))),  # type: ignore[misc]
            ("best peer", lambda row, m=model: microseconds(row.get(m, {}).get("peer"))),  # type: ignore[misc]
            ("it is", lambda row, m=model: row.get(m, {}).get("it is", "-")),  # type: ignore[misc]
        ]
    return section(heading, list(by_tokens.values()), columns, 1)


def complete_markdown(results: Result) -> str:
    """The part on complete calls: times on the device, decode in one small table, times on the host, two geometric means."""
    floor = "The floor is a copy of as many elements in the same run, scaled to the bytes that must move."
    device = results["environment"]["device"]
    out = ["**Complete calls**", "", f"Microseconds on one {device}, bfloat16; {measured_with(results)}. {floor}"]
    for suite, heading in COMPLETE_HEADINGS.items():
        rows = of(results, suite)
        out += section(f"**{heading}**", rows, complete_columns(rows), 3)
    heading = "**Decode**: as prefill, with a random position below 131,072 for each token"
    out += decode_section(heading, of(results, "rope-decode"))
    heading = "**Wall time of a call** of one token, 32 heads (and 8 of the key) of 128"
    out += section(heading, of(results, "rope-calls-host"), HOST, 1)
    means = {name: bars.call_mean(results["rows"], below_us) for name, (below_us, *_) in bars.CALL_MEANS.items()}
    texts = [f"{mean[0]:.2f} over {mean[1]} rows {name}" for name, mean in means.items() if mean is not None]
    return "\n".join([*out, *(["", f"Geometric mean of best peer / ours: {', '.join(texts)}."] if texts else [])])


# GRU ------------------------------------------------------------------------------------------------------------------


per_step = functools.partial(us, parts=lambda row: row["sizes"]["steps"])  # a step of all layers and directions


def sequence(row: Result) -> str:
    """The sizes of a sequence in a cell, with its name if it has one, and its layout if not the usual one."""
    notes = "".join(f", {text}" for text in (row["name"], row["layout"]) if text not in ("", "seq first"))
    return sizes("steps", "batch", "input", "hidden")(row) + notes


def step(row: Result) -> str:
    """The sizes of a single step in a cell."""
    segments = " + ".join(map(str, row["sizes"]["segments"]))
    return f"{row['operation']}: batch {row['sizes']['batch']}, {segments} to {row['sizes']['outputs']}"


SEQUENCE: tuple[Column, ...] = (
    ("steps, batch, input, hidden", sequence),
    ("layers", lambda row: f"{row['sizes']['layers']}{', both ways' if row['sizes']['directions'] > 1 else ''}"),
    ("dtype", lambda row: str(row["dtype"])),
    per_step("ours", "ours"),
    per_step("in a graph", "ours_in_a_graph"),
    per_step("nn.GRU", "peers", "nn.GRU"),
    per_step("in a graph", "peers", "nn.GRU in a CUDA graph"),
    ratio("nn.GRU / ours", "speedup"),
    ratio("both in a graph", "speedup_graph_over_graph"),
)
STEP: tuple[Column, ...] = (
    ("call", step),
    us("ours", "ours"),
    us("floor", "floor"),
    ("best peer", lambda row: microseconds(row["peers"][row["best_peer"]])),
    ("it is", lambda row: str(row["best_peer"])),
    ratio("peer / ours", "speedup"),
    us("host, ours", "ours_host"),
    ("host, peer", lambda row: microseconds(row["host"][row["best_peer"]])),
)


def extremes(rows: Sequence[Result], key: str, against: str) -> str:
    """The geometric mean of a speed-up with its worst and its best row, as a sentence."""
    ranked = sorted((row for row in rows if row.get(key) is not None), key=lambda row: row[key])
    mean = bars.geometric_mean([row[key] for row in ranked])
    if mean is None:
        return f"* Against {against}: no row."
    ends = [f"{row[key]:.2f} at {bars.where(row)}" for row in (ranked[0], ranked[-1])]
    return f"* Against {against}, times as fast: geometric mean {mean[0]:.2f} of {mean[1]}; worst {ends[0]}; best {ends[1]}."


def gru_markdown(results: Result) -> str:
    """The part on GRU: sequences, then single steps, then the worst and the best of each."""
    sequences, steps = of(results, "gru"), of(results, "gru_cell")
    out = [f"On one {results['environment']['device']}; {measured_with(results)}; no gradient."]
    heading = "**Sequences, microseconds a time step**, the projection of the input counted in"
    out += section(heading, sequences, SEQUENCE, 3)
    if sequences:
        out += ["", extremes(sequences, "speedup", "nn.GRU as users call it")]
        out += [extremes(sequences, "speedup_graph_over_graph", "nn.GRU, both in a CUDA graph")]
    heading = "**Single steps, microseconds**, bfloat16, on the device with cold weights, then on the host"
    out += section(heading, steps, STEP, 1)
    if steps:
        out += ["", extremes(steps, "speedup", "the best peer")]
    served = [row for row in results["rows"] if row["rule"] == "eager"]
    out += [f"* No kernel served {bars.where(row)}: {row['why']}." for row in served]
    return "\n".join(out)


# The command ----------------------------------------------------------------------------------------------------------


def read(paths: Sequence[Path]) -> list[Result]:
    """Results; each file's rows of suites that an earlier file has are left out."""
    seen: set[str] = set()
    documents = []
    for path in paths:
        document = json.loads(path.read_text())
        document["rows"] = [row for row in document["rows"] if row["suite"] not in seen]
        seen |= {row["suite"] for row in document["rows"]}
        documents.append(document)
    return documents


def merged(documents: Sequence[Result]) -> Result:
    """The rows and the skipped rows of several results."""
    rows = [row for document in documents for row in document["rows"]]
    skipped = {key: text for document in documents for key, text in document["skipped"].items()}
    return {"rows": rows, "skipped": skipped}


def parts(documents: Sequence[Result], layouts: Sequence[str]) -> dict[str, str]:
    """Name of a part's marks -> its text, for the parts that have results."""
    known = (
        ("benchmark", SUITES.keys() - COMPLETE, functools.partial(rope_markdown, layouts=layouts)),
        ("benchmark-calls", COMPLETE, complete_markdown),
        ("benchmark-gru", {"gru", "gru_cell"}, gru_markdown),
    )
    return {
        name: markdown(document)
        for document in documents
        for name, suites, markdown in known
        if suites & {row["suite"] for row in document["rows"]}
    }


def main(given: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "results",
        nargs="?",
        type=arguments.results("suite"),
        help="a results file; without it, those of the last release",
    )
    which.add_argument("--here", action="store_true", help="those of the GPU that is here")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--bars", action="store_true", help="judge the bars instead of printing the tables")
    parser.add_argument("--all", action="store_true", help="the rows of every layout")
    instead.add_argument(
        "--write", type=arguments.file, metavar="FILE", help="put each table between its marks in this file"
    )
    options = parser.parse_args(given)
    documents = read([options.results] if options.results else (here if options.here else newest)(*FOLDERS))
    layouts = ("bshd", "sbhd", "thd") if options.all else ("bshd",)
    texts = {"bars": bars.report(merged(documents))} if options.bars else parts(documents, layouts)
    if options.write:
        try:
            for name in texts:  # all tables are written, or none
                around(options.write, name)
        except ValueError as error:
            raise SystemExit(str(error)) from error
    for name, text in texts.items():
        if options.write:
            put_between(options.write, name, text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(arguments.ended(main))
