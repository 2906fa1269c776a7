"""RoPE of multi-head latent attention, against bars and peers: python -m benchmarks.mla [--out FILE] [--dry].

The sizes are DeepSeek V3's heads at 4,096 tokens. The query's last 64 of 192 features are rotated in place, beside
three kernels that read and write the same addresses. Key and value are made from kv, forward and with the gradient,
beside a copy of as many bytes, the model's code (eager and compiled), and Megatron's kernels if they are installed. The
host's time of a call is measured too. Each result is compared with float64 just before it is timed. ``--dry`` runs
everything, tiny, on a CPU, without a clock. The exit code is 1 where something cannot be measured.
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
import triton
import triton.language as tl

from benchmarks import session
from benchmarks.arguments import output
from benchmarks.qk_norm import Bench, Launch, attempt, looked_at, measured, moved_us, told, write
from tuned.dispatch import mla_kv_rope, rope, rope_qk

KEPT, TURNED, VALUE = 128, 64, 128  # features of a head
HEADS, TOKENS = (128, 16), (4096, 32768)  # heads: all, and those of one of 8 ranks
BARS = {"same addresses": 1.05, "floor": 1.05, "best peer": 0.95, "host": 1.2}
STYLES = ("apart", "interleaved")  # pairs as in Megatron's keys; as in DeepSeek's code
ERROR = 4.0  # times the largest value times the dtype's epsilon: code in bfloat16 rounds intermediate results
PACKAGES = {"megatron": "megatron-core"}


@dataclasses.dataclass
class Layer:
    """The tensors of one set; sequence, batch, heads, features."""

    q: torch.Tensor  # [tokens, 1, heads, KEPT + TURNED]
    kv: torch.Tensor  # [tokens, 1, heads, KEPT + VALUE]
    k_pe: torch.Tensor  # [tokens, 1, 1, TURNED], a view of a wider tensor
    cos: torch.Tensor  # float32 [tokens, TURNED / 2]
    sin: torch.Tensor


def make(heads: int, tokens: int, device: str) -> Layer:
    """A fresh set."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, 1, *shape, device=device, dtype=torch.bfloat16)

    rates = 1e4 ** -(torch.arange(TURNED // 2, device=device) / (TURNED // 2))
    radians = torch.arange(tokens, device=device)[:, None].float() * rates
    k_pe = normal(512 + TURNED)[..., None, 512:]
    return Layer(normal(heads, KEPT + TURNED), normal(heads, KEPT + VALUE), k_pe, radians.cos(), radians.sin())


def named(style: str) -> dict[str, Any]:
    """The arguments of our functions for a style."""
    return {"tensor_format": "sbhd"} | ({"deinterleave": True} if style == "apart" else {"interleaved": True})


def our_query(style: str, t: Layer) -> Any:
    """Our query, in place."""
    return (rope(t.q, cos=t.cos, sin=t.sin, rotated="last", inplace=True, **named(style)),)


def our_key(style: str, t: Layer) -> Any:
    """Our key and value."""
    return mla_kv_rope(t.kv, t.k_pe, cos=t.cos, sin=t.sin, k_dim=KEPT, **named(style))


# The model's own code, in any dtype -------------------------------------------------------------------------------------


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """Pairs of neighbours, rotated; left interleaved, or put apart."""
    cos, sin = cos.to(x.dtype)[:, None, None], sin.to(x.dtype)[:, None, None]
    first, second = x[..., 0::2], x[..., 1::2]
    pairs = first * cos - second * sin, second * cos + first * sin
    return torch.cat(pairs, -1) if style == "apart" else torch.stack(pairs, -1).flatten(-2)


def own_query(style: str, t: Layer) -> Any:
    """The model's query, out of place."""
    return (torch.cat((t.q[..., :KEPT], turned(t.q[..., KEPT:], t.cos, t.sin, style)), -1),)


def own_key(style: str, t: Layer) -> Any:
    """The model's key and value."""
    shared = turned(t.k_pe, t.cos, t.sin, style).expand(*t.kv.shape[:-1], TURNED)
    return torch.cat((t.kv[..., :KEPT], shared), -1), t.kv[..., KEPT:].contiguous()


def check(run: Callable[[Layer], Any], own: Callable[[str, Layer], Any], style: str, t: Layer) -> None:
    """Compare the first and the last tokens of a run's results with float64.

    Raises:
        WrongResultError: the error is larger than intermediate roundings make it.
    """
    at = looked_at(len(t.q), t.q.device)
    wide = Layer(*(getattr(t, f.name).detach()[at].double() for f in dataclasses.fields(t)))
    for found, right in zip(run(t), own(style, wide), strict=True):
        unit = torch.finfo(found.dtype).eps * float(right.abs().max())
        error = float((found.detach()[at].double() - right).abs().max()) / unit
        if not error <= ERROR:
            raise session.WrongResultError(f"largest error {error:.3g} is above {ERROR:.3g}, in units of epsilon")


# What reads and writes the same addresses --------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _touch(x, rows, stride, FEATURES: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pointers = x + i_row[:, None] * stride + tl.arange(0, FEATURES)[None, :]
    mask = (i_row < rows)[:, None]
    tl.store(pointers, -tl.load(pointers, mask=mask), mask=mask)


def touch(view: torch.Tensor, at_once: int = 32) -> None:
    """A kernel that negates the features of all rows, which are equally far apart; on a CPU PyTorch's operator."""
    if not view.is_cuda:
        view.copy_(-view)
        return
    rows = view.numel() // view.shape[-1]
    _touch[(triton.cdiv(rows, at_once),)](view, rows, view.stride(-2), view.shape[-1], at_once)


SAME = {
    "view.mul_(1)": lambda view: view.mul_(1),
    "torch.neg": lambda view: torch.neg(view, out=view),
    "a kernel that turns signs": touch,
}


# Peers ------------------------------------------------------------------------------------------------------------------


def _megatron() -> Any:
    return importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")


def _doubled(t: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as Megatron takes them: [tokens, 1, 1, TURNED], in the dtype of the model."""
    cos, sin = (torch.cat((a, a), -1)[:, None, None].to(t.q.dtype) for a in (t.cos, t.sin))
    return cos, sin


def megatron_query(t: Layer) -> Any:
    """Megatron's query, in place."""
    return (_megatron().fused_apply_mla_rope_for_q(t.q, *_doubled(t), KEPT, TURNED),)


def megatron_key(t: Layer) -> Any:
    """Megatron's key and value."""
    return _megatron().fused_apply_mla_rope_for_kv(t.kv, t.k_pe, *_doubled(t), TURNED, KEPT, VALUE)


# Rows -------------------------------------------------------------------------------------------------------------------


def query_row(bench: Bench, heads: int, tokens: int, style: str) -> dict[str, Any]:
    """The query in place."""
    touched = 2 * 2 * tokens * heads * TURNED
    row: dict[str, Any] = {"kind": "query", "model": f"{heads} heads, {style}", "tokens": tokens}
    with torch.no_grad():

        def timed(run: Callable[[Layer], Any]) -> float:
            check(run, own_query, style, make(heads, tokens, bench.device))
            sets = [make(heads, tokens, bench.device) for _ in range(bench.count(touched))]
            return bench.us([functools.partial(run, t) for t in sets], touched)

        row["ours"] = timed(functools.partial(our_query, style))
        for name, same in SAME.items():
            views = [make(heads, tokens, bench.device).q[..., KEPT:] for _ in range(bench.count(touched))]
            row[name] = bench.us([functools.partial(same, view) for view in views], touched)
        row["same addresses"] = min(row[name] for name in SAME)
        attempt(row, "eager", lambda: timed(functools.partial(own_query, style)))
        if style == "apart":
            attempt(row, "Megatron", lambda: timed(megatron_query))
    return row


def _grads(run: Callable[[Layer], Any], t: Layer, grads: Sequence[torch.Tensor]) -> Any:
    """A forward and both gradients; it makes the leaves itself, so that under capture none belongs to another stream."""
    kv, k_pe = t.kv.detach().requires_grad_(), t.k_pe.detach().requires_grad_()
    return torch.autograd.grad(list(run(dataclasses.replace(t, kv=kv, k_pe=k_pe))), [kv, k_pe], list(grads))


def key_row(bench: Bench, heads: int, tokens: int, style: str, *, training: bool) -> dict[str, Any]:
    """Key and value, forward, or with the gradients."""
    features = heads * (KEPT + VALUE + KEPT + TURNED + VALUE) + TURNED  # of a token, read and written
    touched = 2 * tokens * features * (2 if training else 1)
    kind = "with backward" if training else "key and value"
    row: dict[str, Any] = {"kind": kind, "model": f"{heads} heads, {style}", "tokens": tokens}
    sets = [make(heads, tokens, bench.device) for _ in range(bench.count(touched))]

    def timed(run: Callable[[Layer], Any]) -> float:
        check(run, own_key, style, sets[0])
        if not training:
            return bench.us([functools.partial(run, t) for t in sets], touched)
        shapes = (KEPT + TURNED, VALUE)
        grads = [[torch.randn_like(t.kv[..., :1].expand(*t.kv.shape[:-1], n)) for n in shapes] for t in sets]
        return bench.us([functools.partial(_grads, run, t, g) for t, g in zip(sets, grads, strict=True)], touched)

    with torch.set_grad_enabled(training):
        row["floor"] = moved_us(bench, tokens * features // 2) * (2 if training else 1)
        row["ours"] = timed(functools.partial(our_key, style))
        attempt(row, "eager", lambda: timed(functools.partial(own_key, style)))
        compiled = bench.compiled(_own_key)
        attempt(row, "torch.compile", lambda: timed(functools.partial(_of_tensors, compiled, style)))
        if style == "apart":
            attempt(row, "Megatron", lambda: timed(megatron_key))
    return row


def _own_key(kv: torch.Tensor, k_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> Any:
    return own_key(style, Layer(kv, kv, k_pe, cos, sin))


def _of_tensors(run: Callable[..., Any], style: str, t: Layer) -> Any:
    return run(t.kv, t.k_pe, t.cos, t.sin, style)


def host_row(bench: Bench) -> dict[str, Any]:
    """The host's time of a repeated call (its plan is cached), beside a rotation of a query and a key in place."""
    t = make(HEADS[-1], 1, bench.device)
    both = t.q[..., :KEPT].contiguous(), t.q[:, :, :1, :KEPT].contiguous()
    table: dict[str, Any] = {"cos": t.cos.repeat(1, KEPT // TURNED), "sin": t.sin.repeat(1, KEPT // TURNED)}
    key_table: dict[str, Any] = {"cos": t.cos, "sin": t.sin, **named("apart")}
    calls: dict[str, Launch] = {  # nothing but the calls
        "ours": functools.partial(mla_kv_rope, t.kv, t.k_pe, k_dim=KEPT, **key_table),
        "our rotation": functools.partial(rope_qk, *both, **table, tensor_format="sbhd", inplace=True),
    }
    with torch.no_grad():
        rounds = [{name: bench.host_us(call) for name, call in calls.items()} for _ in range(1 if bench.dry else 7)]
    times = {name: statistics.median(one[name] for one in rounds) for name in calls}
    return {"kind": "host", "model": "16 heads, apart", "tokens": 1, **times}


# Reports ----------------------------------------------------------------------------------------------------------------

KNOWN = {"kind", "model", "tokens", "refusals", "ours", "floor", "our rotation", "same addresses", *SAME}


def ratios(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Each ratio of a row that has a bar -> (ratio, bar)."""
    if row["kind"] == "host":
        return {"our rotation": (row["ours"] / row["our rotation"], BARS["host"])}
    of = "same addresses" if row["kind"] == "query" else "floor"
    peers = [us for name, us in row.items() if name not in KNOWN]
    found = {of: (row["ours"] / row[of], BARS[of])}
    return found | ({"best peer": (row["ours"] / min(peers), BARS["best peer"])} if peers else {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mla", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=output, default=None, help="by default benchmarks/results/mla/<device>.json")
    parser.add_argument("--dry", action="store_true", help="run all of it, tiny, on a CPU, without a clock")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("benchmarks.mla measures on a GPU, and PyTorch sees none here; --dry runs it without a clock")
        return 1
    torch.manual_seed(0)
    bench = Bench("cpu", dry=True) if options.dry else Bench()
    heads, lengths = ((3,), (5,)) if options.dry else (HEADS, TOKENS[:1])
    sizes = [(n, tokens) for n in heads for tokens in lengths] + ([] if options.dry else [(HEADS[0], TOKENS[-1])])
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for (n, tokens), style in ((size, style) for size in sizes for style in STYLES):
        todo.append((f"query of {n}, {tokens}", functools.partial(query_row, bench, n, tokens, style)))
        for training in (False, True):
            row = functools.partial(key_row, bench, n, tokens, style, training=training)
            todo.append((f"key of {n}, {tokens}", row))
    todo.append(("host", functools.partial(host_row, bench)))
    rows, failed = measured(todo, asked=ratios, dry=options.dry)
    print(told(rows, failed, ratios, dry=options.dry))
    write("mla", options.out, {"bars": BARS, "rows": rows, "failed": failed}, PACKAGES, dry=options.dry)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
