"""The README's part on complete RoPE calls: whole calls on the device, decode in one small table, calls on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import bars
from benchmarks.calls_plan import MODELS
from benchmarks.cells import grid, microseconds, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

# A peer of the calls that are in one table, with the other forms of it that are columns of their own in the results.
COLUMNS = {
    "TransformerEngine": ("TransformerEngine", "TransformerEngine fused qkv"),
    "flash-attention": ("flash-attention", "flash-attention bf16 angles"),
    "Liger": ("Liger-Kernel",),
    "FlashInfer": ("FlashInfer",),
    "vLLM": ("vLLM",),
    "torch.compile": ("torch.compile",),
    "eager": ("eager PyTorch",),
}
HOST_COLUMNS = ("torch.add", "C++ extension", "torch.compile", "eager PyTorch", "flash-attention")
HEADINGS = {
    "rope-qk": "Query and key together",
    "rope-thd": "65,536 packed tokens, query and key",
    "rope-prefill": "Prefill: query and key in place in a packed qkv, rows of a float32 cos_sin_cache by position",
    "rope-features": "Other rotations",
}


def shape(row: dict[str, Any]) -> str:
    """The sizes of a row in a cell."""
    sizes = row["sizes"]
    heads = f"{sizes['heads']} + {sizes['key_heads']}" if sizes["key_heads"] else str(sizes["heads"])
    if row["layout"] == "thd":
        first = f"{sizes['seq']} tokens" + (f" in {sizes['sequences']}" if sizes["sequences"] > 1 else "")
    else:
        first = f"{sizes['batch']}, {sizes['seq']}"
    rotated = f", {sizes['rotary_dim']} rotate" if sizes["rotary_dim"] != sizes["head_dim"] else ""
    name = f" ({row['name']})" if row["name"] and row["suite"] == "rope-features" else ""
    return f"{first}, {heads}, {sizes['head_dim']}{rotated}{name}"


def device_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Device rows: ours, the floor, the peers that have a time in any row, and the two ratios that matter."""

    def fastest(row: dict[str, Any], forms: tuple[str, ...]) -> float | None:
        return min((row["peers"][form] for form in forms if form in row["peers"]), default=None)

    shown = {name: forms for name, forms in COLUMNS.items() if any(fastest(row, forms) for row in rows)}
    header = ("tokens, heads, dim", "place", "angles", "ours", "floor", *shown, "ours / floor", "ours / best peer")
    cells = []
    for row in rows:
        place = "in place" if row["inplace"] else "out of place"
        angles = row["angles"].replace("cos_sin pair", "cos, sin").replace("freqs pair", "freqs")
        times = (row["ours"], row["floor"], *(fastest(row, forms) for forms in shown.values()))
        ratios = (ratio(row["ours_over_floor"]), ratio(row["ours_over_best_peer"]))
        cells.append((shape(row), place, angles, *map(microseconds, times), *ratios))
    return grid(header, cells, 3)


def decode_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each number of tokens, and for each model ours, the best peer's time and the peer."""
    by_place = {(row["name"], row["sizes"]["seq"]): row for row in rows}
    names = [name for name in MODELS if any(name == model for model, _ in by_place)]
    header = ("tokens", *(text for name in names for text in (f"{name}: ours", "best peer", "it is")))

    def best(row: dict[str, Any] | None) -> tuple[str, str, str]:
        if row is None or row["best_peer"] is None:
            return (microseconds(row["ours"] if row else None), "-", "-")
        return (microseconds(row["ours"]), microseconds(row["peers"][row["best_peer"]]), row["best_peer"])

    cells = [
        (str(tokens), *(text for name in names for text in best(by_place.get((name, tokens)))))
        for tokens in sorted({tokens for _, tokens in by_place})
    ]
    return grid(header, cells, 1)


def host_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Host rows: wall time of whole calls."""
    header = ("call", "ours", *HOST_COLUMNS)
    cells = [
        (row["bar"], *map(microseconds, (row["ours"], *(row["peers"].get(peer) for peer in HOST_COLUMNS))))
        for row in rows
    ]
    return grid(header, cells, 1)


def markdown(results: dict[str, Any]) -> str:
    """All of it, and the two geometric means."""
    environment, rows = results["environment"], results["rows"]
    versions = f"PyTorch {environment['torch']}, Triton {environment['triton']}"
    floor = "The floor is a copy of as many elements in the same run, scaled to the bytes that must move."
    out = ["**Complete calls**", "", f"Microseconds on one {environment['device']}, bfloat16; {versions}. {floor}"]

    def of(suite: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["suite"] == suite]

    for suite, heading in HEADINGS.items():
        if of(suite):
            out += ["", f"**{heading}**", "", *device_table(of(suite))]
    if of("rope-decode"):
        heading = "**Decode**: as prefill, with a random position below 131,072 for each token"
        out += ["", heading, "", *decode_table(of("rope-decode"))]
    if of("rope-calls-host"):
        heading = "**Wall time of a call** of one token, 32 heads (and 8 of the key) of 128"
        out += ["", heading, "", *host_table(of("rope-calls-host"))]
    means = {name: bars.call_mean(rows, below_us) for name, (below_us, *_) in bars.CALL_MEANS.items()}
    texts = [f"{mean[0]:.2f} over {mean[1]} rows {name}" for name, mean in means.items() if mean is not None]
    if texts:
        out += ["", f"Geometric mean of best peer / ours: {', '.join(texts)}."]
    return "\n".join(out)
