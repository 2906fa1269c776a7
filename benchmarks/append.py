"""RoPE that writes the cache, against bars and peers: python -m benchmarks.append [--out FILE] [--dry].

Prefill of 4,096 to 32,768 tokens is timed beside a copy of the bytes that must move: query read and written, key and
value read, both caches written. Decode is timed beside our rotation followed by vLLM's or FlashInfer's append, if they
are installed, and beside PyTorch's operators, eager and compiled. The host's time of a call is measured beside that of
``rope_qk`` in place. Each result is compared with float64 just before it is timed. ``--dry`` runs everything, tiny, on
a CPU, without a clock. The exit code is 1 where something cannot be measured; the table tells which bars are missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import session
from benchmarks.arguments import output
from benchmarks.qk_norm import Bench, attempt, line, looked_at, measured, moved_us, told, write
from tuned.dispatch import rope_append_, rope_qk

Launch = Callable[[], Any]
PAGE_SIZE, ROWS, SPARE = 16, 32768, 4
FLOAT8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Kind:
    """The heads and the cache of one layer: 32 + 8 heads of 128, bfloat16."""

    name: str
    float8: bool = False
    layout: str = "NHD"
    heads: int = 32
    key_heads: int = 8
    dim: int = 128

    def elements(self, tokens: int) -> int:
        """Elements of 2 bytes that a copy reads and writes if it moves as many bytes as the call."""
        q, k = (count * self.dim for count in (self.heads, self.key_heads))
        return tokens * (2 * q + 2 * k + 2 * k // (2 if self.float8 else 1)) // 2


KINDS = (Kind("NHD"), Kind("HND", layout="HND"), Kind("float8", float8=True))
PREFILLS, DECODES = (4096, 8192, 16384, 32768), (1, 16, 64, 512)
BARS = {"prefill": 1.08, "decode": 0.80, "host": 1.2}
PACKAGES = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
ERROR = 2.0  # times the largest value times the epsilon of the dtype that it is stored in


@dataclasses.dataclass
class Step:
    """The tensors of one set."""

    q: torch.Tensor  # [tokens, heads, dim]; q, k and v are views of one qkv
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor  # [rows, dim], cosines, then sines
    ids: torch.Tensor
    slots: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]  # [pages, ...]: keys, and values
    scales: tuple[torch.Tensor, torch.Tensor]


def make(kind: Kind, tokens: int, device: str) -> Step:
    """A fresh set: few tokens have random slots, many have consecutive slots within pages."""
    qkv = torch.randn(tokens, kind.heads + 2 * kind.key_heads, kind.dim, device=device).bfloat16()
    q, k, v = qkv.split((kind.heads, kind.key_heads, kind.key_heads), 1)
    rates = 5e5 ** -(torch.arange(kind.dim // 2, device=device) / (kind.dim // 2))
    radians = torch.arange(max(ROWS if tokens > max(DECODES) else 4096, tokens), device=device)[:, None].float() * rates
    pages = -(-tokens // PAGE_SIZE) + SPARE
    page = (PAGE_SIZE, kind.key_heads) if kind.layout == "NHD" else (kind.key_heads, PAGE_SIZE)
    caches = torch.zeros(2, pages, *page, kind.dim, device=device, dtype=FLOAT8 if kind.float8 else torch.bfloat16)
    if tokens <= max(DECODES):
        slots = torch.randperm(pages * PAGE_SIZE, device=device)[:tokens]
        ids = torch.randint(0, len(radians), (tokens,), device=device)
    else:
        blocks = torch.randperm(pages, device=device)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)
        slots, ids = blocks.flatten()[:tokens].contiguous(), torch.arange(tokens, device=device)
    scales = torch.full((), 0.05, device=device), torch.full((), 0.04, device=device)
    return Step(q, k, v, torch.cat((radians.cos(), radians.sin()), -1), ids, slots, (caches[0], caches[1]), scales)


def ours(kind: Kind, t: Step) -> Any:
    """One call of this project."""
    named: dict[str, Any] = {"key_scale": t.scales[0], "value_scale": t.scales[1]} if kind.float8 else {}
    return rope_append_(
        t.q, t.k, t.v, *t.caches, t.slots, cos_sin_cache=t.table, positions=t.ids, cache_layout=kind.layout, **named
    )  # fmt: skip


def rotation(t: Step) -> Any:
    """This project's rotation without the cache."""
    return rope_qk(t.q, t.k, cos_sin_cache=t.table, positions=t.ids, tensor_format="thd", inplace=True)


def own(kind: Kind, t: Step) -> None:
    """The call by PyTorch's operators, as models write it: a rotation in float32, and a scatter of key and value by slot."""
    cos, sin = t.table[t.ids][:, None].chunk(2, -1)
    for x in (t.q, t.k):
        a, b = x.float().chunk(2, -1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    page, slot = torch.div(t.slots, PAGE_SIZE, rounding_mode="floor"), t.slots % PAGE_SIZE
    for cache, rows, scale in zip(t.caches, (t.k, t.v), t.scales, strict=True):
        pages = cache if kind.layout == "NHD" else cache.transpose(1, 2)
        stored = (rows.float() / scale).clamp(-448, 448).to(FLOAT8).view(torch.uint8) if kind.float8 else rows
        (pages.view(torch.uint8) if kind.float8 else pages)[page, slot] = stored


def check(kind: Kind, t: Step, launch: Launch) -> None:
    """Compare the results of a launch with float64: the query, and the rows of both caches.

    Raises:
        WrongResultError: the error is larger than roundings make it.
    """
    at = looked_at(len(t.q), t.q.device)
    cos, sin = t.table[t.ids[at]].double()[:, None].chunk(2, -1)
    wanted = []
    for x in (t.q, t.k):
        a, b = x[at].double().chunk(2, -1)
        wanted.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    wanted.append(t.v[at].double())
    launch()
    found, page, slot = [t.q[at]], t.slots[at] // PAGE_SIZE, t.slots[at] % PAGE_SIZE
    for cache, scale in zip(t.caches, t.scales, strict=True):
        rows = (
            (cache if kind.layout == "NHD" else cache.transpose(1, 2)).view(torch.uint8)[page, slot].view(cache.dtype)
        )
        found.append(rows.double() * scale.double() if kind.float8 else rows)
    for rows, right, coarse in zip(found, wanted, (False, kind.float8, kind.float8), strict=True):
        epsilon = torch.finfo(FLOAT8 if coarse else torch.bfloat16).eps
        error = float((rows.double() - right).abs().max()) / (epsilon * float(right.abs().max()))
        if not error <= ERROR:
            raise session.WrongResultError(f"largest error {error:.3g} is above {ERROR:.3g}, in units of epsilon")


# Peers ------------------------------------------------------------------------------------------------------------------


def vllm(kind: Kind, t: Step) -> Launch:
    """Our rotation, then vLLM's kernel."""
    run = importlib.import_module("vllm._custom_ops").reshape_and_cache_flash
    caches = [c if kind.layout == "NHD" else c.transpose(1, 2) for c in t.caches]
    caches = [c.view(torch.uint8) for c in caches] if kind.float8 else caches

    def launch() -> None:
        rotation(t)
        run(t.k, t.v, *caches, t.slots, "fp8" if kind.float8 else "auto", *t.scales)

    return launch


def flashinfer(kind: Kind, t: Step) -> Launch:
    """Our rotation, then FlashInfer's kernel, for one sequence that has all pages of the cache."""
    if kind.float8:
        raise NotImplementedError("it casts nothing")
    run = importlib.import_module("flashinfer.page").append_paged_kv_cache
    pages, device = t.caches[0].shape[0], t.q.device
    numbers = {
        "batch": torch.zeros(len(t.q), dtype=torch.int32, device=device), "place": t.slots.int(),
        "pages": torch.arange(pages, dtype=torch.int32, device=device),
        "bounds": torch.tensor([0, pages], dtype=torch.int32, device=device),
        "last": torch.tensor([PAGE_SIZE], dtype=torch.int32, device=device),
    }  # fmt: skip
    batch, place, all_pages, bounds, last = numbers.values()

    def launch() -> None:
        rotation(t)
        run(t.k, t.v, batch, place, t.caches, all_pages, bounds, last, kind.layout)

    return launch


PEERS: dict[str, Callable[[Kind, Step], Launch]] = {"rotation, vLLM": vllm, "rotation, FlashInfer": flashinfer}


# Rows -------------------------------------------------------------------------------------------------------------------


def row_of(bench: Bench, kind: Kind, tokens: int, word: str) -> dict[str, Any]:
    """One length of one kind, beside the floor and the peers; in decode also beside PyTorch, eager and compiled."""
    touched = 4 * kind.elements(tokens)
    row: dict[str, Any] = {"kind": word, "model": kind.name, "tokens": tokens}

    def timed(launch_of: Callable[[Step], Launch], *, judged: bool = True) -> float:
        if judged:
            fresh = make(kind, tokens, bench.device)
            check(kind, fresh, launch_of(fresh))
        sets = [make(kind, tokens, bench.device) for _ in range(bench.count(touched))]
        return bench.us([launch_of(t) for t in sets], touched)

    with torch.no_grad():
        row["ours"] = timed(lambda t: functools.partial(ours, kind, t))
        row["floor"] = moved_us(bench, kind.elements(tokens))
        row["our rotation"] = timed(lambda t: functools.partial(rotation, t), judged=False)
        if word == "decode":
            attempt(row, "eager", lambda: timed(lambda t: functools.partial(own, kind, t)))
            run = bench.compiled(own)
            attempt(row, "torch.compile", lambda: timed(lambda t: functools.partial(run, kind, t)))
        for name, peer in PEERS.items():
            attempt(row, name, functools.partial(timed, functools.partial(peer, kind)))
    return row


def host_row(bench: Bench) -> dict[str, Any]:
    """The host's time of a repeated call (its plan is cached), with the cache and without."""
    t = make(KINDS[0], 1, bench.device)
    calls = {"ours": functools.partial(ours, KINDS[0], t), "our rotation": functools.partial(rotation, t)}
    with torch.no_grad():
        rounds = [{name: bench.host_us(call) for name, call in calls.items()} for _ in range(1 if bench.dry else 7)]
    times = {name: statistics.median(one[name] for one in rounds) for name in calls}
    return {"kind": "host", "model": KINDS[0].name, "tokens": 1, **times}


KNOWN = {"kind", "model", "tokens", "refusals", "ours", "floor", "our rotation"}


def ratios(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Each ratio of a row that has a bar -> (ratio, bar)."""
    kind, peers = row["kind"], {n: us for n, us in row.items() if n not in KNOWN}
    if kind == "prefill":
        return {"floor": (row["ours"] / row["floor"], BARS[kind])}
    if kind == "host":
        return {"our rotation": (row["ours"] / row["our rotation"], BARS[kind])}
    return {"best peer": (row["ours"] / min(peers.values()), BARS[kind])} if peers else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.append", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=output, default=None, help="by default benchmarks/results/append/<device>.json")
    parser.add_argument("--dry", action="store_true", help="run all of it, tiny, on a CPU, without a clock")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("benchmarks.append measures on a GPU, and PyTorch sees none here; --dry runs it without a clock")
        return 1
    torch.manual_seed(0)
    bench = Bench("cpu", dry=True) if options.dry else Bench()
    lengths = {"prefill": (17,) if options.dry else PREFILLS, "decode": (2,) if options.dry else DECODES}
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"{word} of {tokens}, {kind.name}", functools.partial(row_of, bench, kind, tokens, word))
        for word, many in lengths.items()
        for kind in KINDS
        for tokens in many
    ]
    rows, failed = measured([*todo, ("host", functools.partial(host_row, bench))], asked=ratios, dry=options.dry)
    print(told(rows, failed, ratios, dry=options.dry))
    write("append", options.out, {"bars": BARS, "rows": rows, "failed": failed}, PACKAGES, dry=options.dry)
    return int(bool(failed) or not rows)


__all__ = ["line", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
