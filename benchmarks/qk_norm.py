"""RMSNorm of queries and keys with RoPE, against bars and peers: python -m benchmarks.qk_norm [--seconds 50] [--seed N] [--out FILE] [--dry].

The rows are: models' sizes at three lengths, forward and with the gradients of both tensors and both weights; decode in
place by position; the host's time of a call; random calls. They are timed beside a copy of the bytes that must move
(the gradient moves 1.5 times as much as the forward), the model's code (eager and compiled), our rotation without the
norm, and, if they are installed, vLLM, SGLang, FlashInfer and Liger-Kernel. Decode is timed behind a foreign kernel.
Each result is compared with float64 just before it is timed. ``--dry`` runs everything, tiny, on a CPU, without a
clock. The exit code is 1 where something cannot be measured; the table tells which bars are missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import clock, session
from benchmarks.arguments import duration, output
from benchmarks.record import environment
from generator.disk import write_whole
from generator.measuring.stage import FOREIGN_ELEMENTS, LEAST_US
from tuned.dispatch import qk_norm_rope, rope_qk
from tuned.lookup.record import device_slug

Launch = Callable[[], Any]
Timer = Callable[[Sequence[Launch], int], float]
Judge = Callable[[dict[str, Any]], dict[str, tuple[float, float]]]  # row -> each ratio that has a bar -> (ratio, bar)


@dataclasses.dataclass(frozen=True)
class Model:
    """The heads and the norm of one layer."""

    name: str
    heads: int
    key_heads: int
    dim: int
    norm: str = "head"
    zero_centered: bool = False

    def bytes_of(self, tokens: int) -> int:
        """Bytes of query and key in bfloat16."""
        return 2 * tokens * (self.heads + self.key_heads) * self.dim


MODELS = (
    Model("Qwen3 8B", 32, 8, 128),
    Model("Qwen3 235B", 64, 4, 128),
    Model("Gemma 3 4B", 8, 4, 256, zero_centered=True),
    Model("Gemma 3 27B", 32, 16, 128, zero_centered=True),
    Model("OLMo 2 7B", 32, 32, 128, "all"),
    Model("OLMo 2 32B", 40, 8, 128, "all"),
)
LENGTHS = (4096, 32768, 131072)
DECODES = (1, 16, 64, 512)
# Compiling takes longer than measuring: at the first length each model's forward is compiled, and two models' gradients.
COMPILED_TRAINING = ("Qwen3 8B", "OLMo 2 32B")
BARS = {
    "forward": 1.06,
    "with backward": 1.12,
    "decode": 0.80,
    "decode, our rotation": 1.15,
    "host": 1.2,
    "random": 1.05,
}
BACKWARD_BYTES = 1.5  # times the forward's: the result's gradient and the input read, the input's gradient written
EPS, ROWS, LOOKED_AT = 1e-6, 4096, 64
RANDOM_CALLS = 100
SIZES = ((32, 8, 128), (16, 2, 128), (8, 4, 256), (12, 12, 64), (28, 4, 128), (24, 8, 96))  # of random calls
ERROR = 8.0  # times the largest value times the dtype's epsilon: models' code rounds intermediate results


@dataclasses.dataclass
class Layer:
    """The tensors of one set."""

    q: torch.Tensor  # [tokens, heads, dim]
    k: torch.Tensor
    qkv: torch.Tensor | None  # in decode q and k are views of it
    weights: tuple[torch.Tensor, torch.Tensor]
    cache: torch.Tensor  # [rows, dim], cosines, then sines
    ids: torch.Tensor | None

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The query and the key."""
        return self.q, self.k

    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each token, [tokens, dim / 2]."""
        rows = self.cache[: len(self.q)] if self.ids is None else self.cache[self.ids]
        cos, sin = rows.chunk(2, -1)
        return cos, sin


def make(model: Model, tokens: int, device: str, *, packed: bool = False) -> Layer:
    """A fresh set; weights near 1 (or 0 if zero-centered), like trained ones."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    qkv = None
    if packed:
        qkv = normal(tokens, model.heads + 2 * model.key_heads, model.dim)
        q, k = qkv[:, : model.heads], qkv[:, model.heads : model.heads + model.key_heads]
    else:
        q, k = normal(tokens, model.heads, model.dim), normal(tokens, model.key_heads, model.dim)
    counts = (model.heads, model.key_heads) if model.norm == "all" else (1, 1)
    centre = 0.0 if model.zero_centered else 1.0
    weights = [centre + 0.1 * normal(count * model.dim) for count in counts]
    rates = 1e6 ** -(torch.arange(model.dim // 2, device=device) / (model.dim // 2))
    radians = torch.arange(ROWS if packed else tokens, device=device)[:, None].float() * rates
    cache = torch.cat((radians.cos(), radians.sin()), -1)
    ids = torch.randint(0, ROWS, (tokens,), device=device) if packed else None
    return Layer(q, k, qkv, (weights[0], weights[1]), cache, ids)


# Ours, and the model's own code -----------------------------------------------------------------------------------------


def ours(model: Model, t: Layer, *, inplace: bool = False) -> Any:
    """One call of this project. Out of place, the table's rows are those of the tokens in order."""
    named: dict[str, Any] = {"norm": model.norm, "zero_centered": model.zero_centered, "eps": EPS, "inplace": inplace}
    if t.ids is not None:
        return qk_norm_rope(t.q, t.k, *t.weights, cos_sin_cache=t.cache, positions=t.ids, tensor_format="thd", **named)
    return qk_norm_rope(t.q[None], t.k[None], *t.weights, cos_sin_cache=t.cache, **named)


def rotation(t: Layer, *, inplace: bool = False) -> Any:
    """This project's rotation without the norm."""
    if t.ids is not None:
        return rope_qk(t.q, t.k, cos_sin_cache=t.cache, positions=t.ids, tensor_format="thd", inplace=inplace)
    return rope_qk(t.q[None], t.k[None], cos_sin_cache=t.cache, inplace=inplace)


def own(  # noqa: PLR0913 - what a layer has
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    norm: str, zero_centered: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The code of transformers' modules: the norm in float32, its result cast; the rotation in the dtype of q."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        wide = x.flatten(-2).float() if norm == "all" else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        normed = (wide * (1.0 + weight.float() if zero_centered else weight.float())).to(x.dtype).view(x.shape)
        first, second = normed.chunk(2, -1)
        half = torch.cat((-second, first), -1)
        both = [torch.cat((a, a), -1).to(x.dtype)[:, None] for a in (cos, sin)]
        found.append(normed * both[0] + half * both[1])
    return tuple(found)


def own_of(run: Callable[..., Any], model: Model, t: Layer, *, inplace: bool = False) -> Any:
    """The model's code on a set; in decode it chooses the angles' rows and writes the results back, as a layer does."""
    out = run(*t.both, *t.weights, *t.angles(), model.norm, model.zero_centered)
    return [a.copy_(b) for a, b in zip(t.both, out, strict=True)] if inplace else out


def exact(model: Model, t: Layer) -> list[torch.Tensor]:
    """The right results in float64 for the first and the last tokens of both tensors."""
    at = looked_at(len(t.q), t.q.device)
    cos, sin = (a[at].double() for a in t.angles())
    found = []
    for given, weight in zip(t.both, t.weights, strict=True):
        x = given.detach()[at].double()
        whole = x.flatten(-2) if model.norm == "all" else x
        whole = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + EPS)
        whole = (whole * (weight.detach().double() + float(model.zero_centered))).view(x.shape)
        a, b = whole.chunk(2, -1)
        found.append(torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1))
    return found


def looked_at(tokens: int, device: torch.device) -> torch.Tensor:
    """The indices of the first and the last tokens, which are checked."""
    count = min(tokens, LOOKED_AT)
    return torch.cat((torch.arange(count, device=device), torch.arange(tokens - count, tokens, device=device)))


def check(model: Model, t: Layer, launch: Launch) -> None:
    """Compare the results of a launch with float64.

    Raises:
        WrongResultError: the error is larger than intermediate roundings make it.
    """
    wanted = exact(model, t)  # before the launch: it may overwrite
    for found, right in zip(launch(), wanted, strict=True):
        rows = found.detach().reshape(len(t.q), *right.shape[1:])[looked_at(len(t.q), right.device)]
        unit = torch.finfo(found.dtype).eps * float(right.abs().max())
        error = float((rows.double() - right).abs().max()) / unit
        if not error <= ERROR:
            raise session.WrongResultError(f"largest error {error:.3g} is above {ERROR:.3g}, in units of epsilon")


# Peers ------------------------------------------------------------------------------------------------------------------


def vllm(model: Model, t: Layer) -> Launch:
    """The fused kernel of vLLM, on the packed qkv."""
    run = importlib.import_module("vllm._custom_ops").fused_qk_norm_rope
    assert t.qkv is not None
    flat, cache = t.qkv.view(len(t.q), -1), t.cache.to(t.q.dtype)
    sizes = (model.heads, model.key_heads, model.key_heads, model.dim)

    def launch() -> Any:
        run(flat, *sizes, EPS, *t.weights, cache, True, t.ids)  # noqa: FBT003
        return t.both

    return launch


def flashinfer(model: Model, t: Layer) -> Launch:
    """FlashInfer's norm of each tensor, then its rotation of both."""
    norm = importlib.import_module("flashinfer.norm")
    rope = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
    run = norm.gemma_rmsnorm if model.zero_centered else norm.rmsnorm

    def launch() -> Any:
        normed = [run(x, w, EPS) for x, w in zip(t.both, t.weights, strict=True)]
        flat = [x.view(len(t.q), -1) for x in normed]
        rope(t.ids, *flat, model.dim, t.cache, True)  # noqa: FBT003
        return [f.view(x.shape) for f, x in zip(flat, t.both, strict=True)]

    return launch


def liger(model: Model, t: Layer) -> Launch:
    """Liger's norm of each tensor, then our rotation: Liger's rotation takes no positions."""
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction

    def launch() -> Any:
        offset, casting = float(model.zero_centered), "gemma" if model.zero_centered else "llama"
        q, k = (
            function.apply(x.contiguous(), w, EPS, offset, casting, False)  # noqa: FBT003
            for x, w in zip(t.both, t.weights, strict=True)
        )
        return rotation(dataclasses.replace(t, q=q, k=k), inplace=True)

    return launch


def sglang(model: Model, t: Layer) -> Launch:
    """SGLang's fused kernel, in place on views of one qkv; it has no norm with weight 1 + w."""
    run = importlib.import_module("sglang.jit_kernel.diffusion.qknorm_rope").fused_inplace_qknorm_rope

    def launch() -> Any:
        run(*t.both, *t.weights, t.cache, t.ids, is_neox=True, eps=EPS, head_dim=model.dim, rope_dim=model.dim)
        return t.both

    return launch


PEERS: dict[str, Callable[[Model, Layer], Launch]] = {
    "vLLM": vllm,
    "SGLang": sglang,
    "FlashInfer": flashinfer,
    "Liger-Kernel": liger,
}
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "flashinfer": "flashinfer-python", "liger_kernel": "liger-kernel"}


# Rows -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """Where and how rows are measured."""

    device: str = "cuda"
    dry: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the rows that rotate a whole sequence."""
        return (5,) if self.dry else LENGTHS

    def count(self, touched_bytes: int) -> int:
        """How many sets of tensors are needed so that none is in the L2 when its turn comes."""
        return 1 if self.dry else clock.set_count(touched_bytes)

    def us(self, launches: Sequence[Launch], touched_bytes: int) -> float:
        """Device time of one launch; in a dry run each is run once."""
        if self.dry:
            for launch in launches:
                launch()
            return 1.0
        return clock.cold(launches, touched_bytes).median_us

    def behind_us(self, launches: Sequence[Launch], touched_bytes: int) -> float:
        """Device time of one launch behind a foreign kernel, without the time of the foreign kernel.

        Behind a kernel of its own kind, a kernel of a few microseconds gains half a microsecond, if that kernel lets it
        begin early. Few kernels of a model do so: docs/decisions/0051.
        """
        ones, result = (torch.ones(FOREIGN_ELEMENTS, device=self.device) for _ in range(2))
        foreign = functools.partial(torch.neg, ones, out=result)
        alone = self.us([foreign] * len(launches), touched_bytes)
        both = self.us([functools.partial(_in_turn, foreign, launch) for launch in launches], touched_bytes)
        return max(both - alone, LEAST_US)

    def host_us(self, launch: Launch) -> float:
        """The host's time of one launch."""
        if self.dry:
            launch()
            return 1.0
        return clock.host(launch).median_us

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function compiled by torch.compile for static shapes."""
        torch.compiler.reset()
        return torch.compile(run, dynamic=False, backend="eager" if self.dry else "inductor")


def _in_turn(*launches: Launch) -> Any:
    """Run some launches in turn, and return the result of the last."""
    return [launch() for launch in launches][-1]


def attempt(row: dict[str, Any], name: str, measure: Callable[[], float]) -> None:
    """Put a peer's time into the row, or the reason why there is none; a peer may raise anything."""
    try:
        row[name] = measure()
    except Exception as error:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        row.setdefault("refusals", {})[name] = session.reason(error)


def copy_us(bench: Bench, sets: Sequence[Layer], timed: Timer | None = None) -> float:
    """Microseconds of a copy of both tensors, read once and written once: the floor of a forward."""
    return moved_us(bench, sum(x.numel() for x in sets[0].both), timed)


def moved_us(bench: Bench, elements: int, timed: Timer | None = None) -> float:
    """Microseconds of a copy of so many bfloat16 elements, read once and written once."""
    nbytes = 2 * 2 * elements
    pairs = [
        [torch.randn(elements, device=bench.device).bfloat16() for _ in range(2)] for _ in range(bench.count(nbytes))
    ]
    launches = [functools.partial(torch.neg, a, out=b) for a, b in pairs]
    copies = [functools.partial(b.copy_, a) for a, b in pairs]
    timed = timed or bench.us
    return min(timed(launches, nbytes), timed(copies, nbytes))


def _grads(run: Callable[[Layer], Any], t: Layer, grads: Sequence[torch.Tensor]) -> Any:
    """A forward and all gradients; it makes the leaves itself, so that under capture none belongs to another stream."""
    q, k, q_weight, k_weight = (x.detach().requires_grad_() for x in (*t.both, *t.weights))
    outs = run(dataclasses.replace(t, q=q, k=k, weights=(q_weight, k_weight)))
    shaped = [g.view(o.shape) for g, o in zip(grads, outs, strict=True)]
    return torch.autograd.grad(list(outs), [q, k, q_weight, k_weight], shaped)


def whole_row(bench: Bench, model: Model, tokens: int, *, training: bool) -> dict[str, Any]:
    """One model at one length, all tokens of a sequence, out of place."""
    touched = model.bytes_of(tokens) * (5 if training else 2)
    sets = [make(model, tokens, bench.device) for _ in range(bench.count(touched))]
    kind = "with backward" if training else "forward"
    row: dict[str, Any] = {"kind": kind, "model": model.name, "tokens": tokens}

    def measured(run: Callable[[Layer], Any], *, judged: bool = True) -> float:
        if judged:
            check(model, sets[0], lambda: run(sets[0]))
        if not training:
            return bench.us([functools.partial(run, t) for t in sets], touched)
        grads = [[torch.randn_like(x) for x in t.both] for t in sets]
        steps = [functools.partial(_grads, run, t, g) for t, g in zip(sets, grads, strict=True)]
        return bench.us(steps, touched)

    with torch.set_grad_enabled(training):
        row["floor"] = copy_us(bench, sets) * (1 + BACKWARD_BYTES if training else 1)
        row["ours"] = measured(functools.partial(ours, model))
        if not training:
            row["our rotation"] = measured(rotation, judged=False)
        attempt(row, "eager", lambda: measured(functools.partial(own_of, own, model)))
        if tokens == bench.lengths[0] and (not training or model.name in COMPILED_TRAINING):
            attempt(row, "torch.compile", lambda: measured(functools.partial(own_of, bench.compiled(own), model)))
    return row


def decode_row(bench: Bench, model: Model, tokens: int) -> dict[str, Any]:
    """A few tokens in place by their positions; query and key are views of one qkv."""
    touched = 2 * model.bytes_of(tokens)
    row: dict[str, Any] = {"kind": "decode", "model": model.name, "tokens": tokens}
    with torch.no_grad():

        def measured(launch_of: Callable[[Layer], Launch]) -> float:
            fresh = make(model, tokens, bench.device, packed=True)
            check(model, fresh, launch_of(fresh))
            sets = [make(model, tokens, bench.device, packed=True) for _ in range(bench.count(touched))]
            return bench.behind_us([launch_of(t) for t in sets], touched)

        row["ours"] = measured(lambda t: lambda: ours(model, t, inplace=True))
        sets = [make(model, tokens, bench.device, packed=True) for _ in range(bench.count(touched))]
        row["our rotation"] = bench.behind_us([functools.partial(rotation, t, inplace=True) for t in sets], touched)
        row["floor"] = copy_us(bench, sets, bench.behind_us)
        attempt(row, "eager", lambda: measured(lambda t: lambda: own_of(own, model, t, inplace=True)))

        def compiled_us() -> float:
            run = bench.compiled(_decoded)
            return measured(lambda t: lambda: _by_ids(run, model, t))

        attempt(row, "torch.compile", compiled_us)
        for name, peer in PEERS.items():
            attempt(row, name, functools.partial(measured, functools.partial(peer, model)))
    return row


def _decoded(  # noqa: PLR0913 - what a layer has
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor,
    norm: str, zero_centered: bool,  # noqa: FBT001
) -> None:  # fmt: skip
    cos, sin = cache[ids].chunk(2, -1)
    for x, out in zip((q, k), own(q, k, q_weight, k_weight, cos, sin, norm, zero_centered), strict=True):
        x.copy_(out)


def _by_ids(run: Callable[..., Any], model: Model, t: Layer) -> Any:
    run(*t.both, *t.weights, t.cache, t.ids, model.norm, model.zero_centered)
    return t.both


def host_row(bench: Bench, model: Model) -> dict[str, Any]:
    """The host's time of a repeated call (its plan is cached), with the norm and without."""
    t = make(model, 1, bench.device, packed=True)
    named: dict[str, Any] = {
        "cos_sin_cache": t.cache, "positions": t.ids, "tensor_format": "thd", "inplace": True,
    }  # fmt: skip
    calls = {  # nothing but the calls
        "ours": functools.partial(qk_norm_rope, *t.both, *t.weights, eps=EPS, **named),
        "our rotation": functools.partial(rope_qk, *t.both, **named),
    }
    with torch.no_grad():
        rounds = [{name: bench.host_us(call) for name, call in calls.items()} for _ in range(1 if bench.dry else 7)]
    times = {name: statistics.median(one[name] for one in rounds) for name in calls}
    return {"kind": "host", "model": model.name, "tokens": 1, **times}


def random_row(bench: Bench, draw: random.Random) -> dict[str, Any]:
    """A forward of random length, beside what it replaces: the model's code, and PyTorch's norm with our rotation."""
    heads, key_heads, dim = draw.choice(SIZES)
    model = Model("random", heads, key_heads, dim, draw.choice(("head", "head", "all")))
    tokens = 3 if bench.dry else round(math.exp(draw.uniform(0.0, math.log(65536))))
    touched = 2 * model.bytes_of(tokens)
    sets = [make(model, tokens, bench.device) for _ in range(bench.count(touched))]
    row: dict[str, Any] = {"kind": "random", "model": f"{heads}+{key_heads} x {dim} {model.norm}", "tokens": tokens}

    def normed(t: Layer) -> Any:
        shapes = [x.shape[-2:] if model.norm == "all" else x.shape[-1:] for x in t.both]
        q, k = (
            torch.nn.functional.rms_norm(x, list(shape), w.view(shape), EPS)
            for x, w, shape in zip(t.both, t.weights, shapes, strict=True)
        )
        return rotation(dataclasses.replace(t, q=q, k=k), inplace=True)

    runs: dict[str, Callable[[Layer], Any]] = {
        "ours": functools.partial(ours, model),
        "eager": functools.partial(own_of, own, model),
        "norm, rotation": normed,
    }
    with torch.no_grad():
        for name, run in runs.items():
            check(model, sets[0], functools.partial(run, sets[0]))
            row[name] = bench.us([functools.partial(run, t) for t in sets], touched)
    return row


# Reports ----------------------------------------------------------------------------------------------------------------

KNOWN = {"kind", "model", "tokens", "refusals", "ours", "floor", "our rotation"}


def ratios(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Each ratio of a row that has a bar -> (ratio, bar)."""
    kind, peers = row["kind"], {n: us for n, us in row.items() if n not in KNOWN}
    if kind in ("forward", "with backward"):
        return {"floor": (row["ours"] / row["floor"], BARS[kind])}
    if kind == "host":
        return {"our rotation": (row["ours"] / row["our rotation"], BARS[kind])}
    found = {"best peer": (row["ours"] / min(peers.values()), BARS[kind])} if peers else {}
    if kind == "decode":
        found["our rotation"] = row["ours"] / row["our rotation"], BARS["decode, our rotation"]
    return found


Ratios = Callable[[dict[str, Any]], dict[str, tuple[float, float]]]


def line(row: dict[str, Any], asked: Ratios = ratios) -> str:
    """A row beside its bars."""
    others = ", ".join(
        f"{n} {us:.2f}" for n, us in row.items() if n not in {"kind", "model", "tokens", "refusals", "ours"}
    )
    judged = ", ".join(
        f"{100 * ratio:.1f}% of {of} (bar {100 * bar:.0f}%{'' if ratio <= bar else ', MISSED'})"
        for of, (ratio, bar) in asked(row).items()
    )
    return f"{row['kind']:<13} {row['model']:<18} {row['tokens']:>6}  {row['ours']:>9.2f} us: {judged}; {others}"


def summary(rows: Sequence[dict[str, Any]], asked: Ratios = ratios) -> str:
    """For each bar, how many rows meet it, and the worst ratio."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for of, pair in asked(row).items():
            found.setdefault(f"{row['kind']} / {of}", []).append(pair)
    return "\n".join(
        f"{name}: {sum(r <= bar for r, bar in pairs)} of {len(pairs)} within {pairs[0][1]}, most {max(r for r, _ in pairs):.3f}"
        for name, pairs in found.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qk_norm", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--seconds", type=duration, default=50.0, help="for the random calls, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls")
    parser.add_argument("--out", type=output, default=None, help="by default benchmarks/results/qk_norm/<device>.json")
    parser.add_argument("--dry", action="store_true", help="run all of it, tiny, on a CPU, without a clock")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("benchmarks.qk_norm measures on a GPU, and PyTorch sees none here; --dry runs it without a clock")
        return 1
    torch.manual_seed(0)
    bench = Bench("cpu", dry=True) if options.dry else Bench()
    draw = random.Random(options.seed)  # noqa: S311 - no secrets
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"{model.name}, {tokens}", functools.partial(whole_row, bench, model, tokens, training=training))
        for model in MODELS
        for tokens in bench.lengths
        for training in (False, True)
    ]
    decodes = (2,) if options.dry else DECODES
    todo += [(f"decode of {tokens}", functools.partial(decode_row, bench, MODELS[0], tokens)) for tokens in decodes]
    todo.append(("host", functools.partial(host_row, bench, MODELS[0])))
    rows, failed = measured(todo, dry=options.dry)
    more = [("random", functools.partial(random_row, bench, draw))] * (2 if options.dry else RANDOM_CALLS)
    found, wrong = measured(more, options.seconds, dry=options.dry)
    rows, failed = rows + found, failed | wrong
    print(told(rows, failed, dry=options.dry))
    out = options.out
    content = {"seed": options.seed, "bars": BARS, "rows": rows, "failed": failed}
    write("qk_norm", out, content, PACKAGES, dry=options.dry)
    return int(bool(failed) or not found)


def told(rows: Sequence[dict[str, Any]], failed: Mapping[str, str], asked: Ratios = ratios, *, dry: bool) -> str:
    """The summary of the rows, and why others were not measured; a dry run has no times to sum up."""
    ran = f"{len(rows)} calls ran and were compared with float64; a dry run times nothing"
    return "\n".join(
        (ran if dry else summary(rows, asked), *(f"not measured: {name}: {why}" for name, why in failed.items()))
    )


def write(name: str, out: Path | None, content: dict[str, Any], packages: dict[str, str], *, dry: bool) -> None:
    """Write the results, by default to this device's file; those of a dry run only if a path is given."""
    if out is None and not dry:
        out = session.RESULTS / name / f"{device_slug(torch.cuda.get_device_name())}.json"
    if out is not None:
        content = {"environment": {} if dry else environment(packages)} | content
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, (json.dumps(content, indent=1) + "\n").encode())


def measured(
    todo: Sequence[tuple[str, Callable[[], dict[str, Any]]]],
    seconds: float = math.inf,
    asked: Ratios = ratios,
    *,
    dry: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows that could be measured, and why others could not; no row is begun after ``seconds``."""
    rows, failed, end = list[dict[str, Any]](), dict[str, str](), time.monotonic() + seconds
    for number, (name, measure) in enumerate(todo):
        if time.monotonic() > end:
            break
        try:
            rows.append(measure())
            print(f"{name}: ran" if dry else line(rows[-1], asked), flush=True)
        except Exception as error:  # noqa: BLE001 (one row that fails must not cost the others)
            failed[f"{number}: {name}"] = session.reason(error)
            print(f"{name}: {session.reason(error)}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows, failed


if __name__ == "__main__":
    raise SystemExit(main())
