"""A Llama decodes from its KV cache, with PyTorch's RoPE and tuned's, eagerly and by a CUDA graph: same? how fast?

    python examples/decode.py                            # some seconds on a CPU, where there is no graph
    python examples/decode.py --hidden 4096 --heads 32 --kv-heads 8 --layers 8 --dtype bfloat16   # on a GPU

The model is Llama's with random weights, and writes a token a step. A step asks the host for nothing: position, tokens
and caches are tensors on the device, which the step itself advances, so that the same graph serves every position. RoPE
overwrites q and k where the packed projection left them.

Exit code 1: a graph wrote other tokens than the same step without one; or, in float32, the kernels other than PyTorch.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tuned
from tuned.dispatch import rope_qk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
THETA = 10_000.0  # of the first Llama
RUNS = 3  # of which the median is printed
WARM_UP = 3  # steps before a graph is captured: kernels are compiled and libraries loaded in them


@dataclasses.dataclass(frozen=True)
class State:
    """What a step reads and overwrites, all of it on the device. B texts, T tokens to write, L layers."""

    token: torch.Tensor  # [B] int64, the last one written
    position: torch.Tensor  # [] int64, that of token
    written: torch.Tensor  # [B, T] int64
    caches: torch.Tensor  # [L, 2, B, kv_heads, T, D]: keys and values

    def restart(self, first: torch.Tensor) -> None:
        """Before the first step; first [B] stands at position 0. The caches may stay: no step looks ahead of itself."""
        self.token.copy_(first)
        self.position.zero_()
        self.written.zero_()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The other feature of each pair, with its sign: (-x2, x1) for the halves x1 and x2 of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual formula for q [B, 1, heads, D] and k [B, 1, kv_heads, D]; cos and sin [D], both halves alike."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Block(nn.Module):
    """Attention to the cache, and a feed-forward layer. E hidden, D features a head."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden, head_dim = options.hidden, options.hidden // options.heads
        inner = 64 * math.ceil(hidden / 24)  # 8/3 of hidden, up to a multiple of 64
        self.heads, self.kv_heads = options.heads, options.kv_heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (options.heads + 2 * options.kv_heads) * head_dim, bias=False)
        self.attended = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.gate_and_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The q [B, 1, heads, D], k and v [B, 1, kv_heads, D] of x [B, 1, E]: views of one tensor."""
        packed = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        return packed.split((self.heads, self.kv_heads, self.kv_heads), 2)  # type: ignore[no-any-return]

    def forward(
        self, x: torch.Tensor, rotate: Callable[..., Any], state: State, cache: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """[B, 1, E] from the same and the layer's cache [2, B, kv_heads, T, D], read where ``seen`` [1, T]."""
        q, k, v = self.project(x)
        q, k = rotate(q, k)
        here = state.position.view(1)
        for kept, new in zip(cache, (k, v), strict=True):
            kept.index_copy_(2, here, new.transpose(1, 2))
        # The query heads that share a key head stand where a longer text has its queries: nothing is repeated.
        groups = q.reshape(len(x), self.kv_heads, self.heads // self.kv_heads, -1)  # [B, kv_heads, group, D]
        heads = nn.functional.scaled_dot_product_attention(groups, cache[0], cache[1], attn_mask=seen)
        x = x + self.attended(heads.flatten(1)[:, None])
        gate, up = self.gate_and_up(self.feed_forward_norm(x)).chunk(2, -1)
        following: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return following


class Llama(nn.Module):
    """Plain PyTorch: embedding, blocks, output layer."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.symbols, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        self.output = nn.Linear(options.hidden, options.symbols, bias=False)
        head_dim = options.hidden // options.heads
        angles = torch.outer(torch.arange(options.tokens), THETA ** (-torch.arange(0, head_dim, 2) / head_dim))
        # No buffer: to(dtype) would round it.
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1).to(options.device)  # [T, D] float32

    def rotation(self, position: torch.Tensor) -> partial[Any]:
        """What rotates q and k, made once for all blocks; cos and sin in the dtype of these, as is usual."""
        row = self.cos_sin_cache.index_select(0, position.view(1))[0]  # cos_sin_cache[position] would ask the host
        cos, sin = (half.repeat(2).to(self.output.weight.dtype) for half in row.chunk(2))
        return partial(apply_rotary_pos_emb, cos=cos, sin=sin)

    def forward(self, state: State) -> torch.Tensor:
        """Logits [B, symbols] of what follows the state's token; its keys and values go to the caches."""
        rotate, x = self.rotation(state.position), self.embedding(state.token)[:, None]
        seen = (torch.arange(state.written.shape[1], device=x.device) <= state.position)[None]  # [1, T]
        for block, cache in zip(self.blocks, state.caches, strict=True):
            x = block(x, rotate, state, cache, seen)
        logits: torch.Tensor = self.output(self.norm(x[:, 0]))
        return logits

    def advance(self, state: State) -> None:
        """Write the likeliest token of each text."""
        state.token.copy_(self(state).argmax(-1))
        state.written.index_copy_(1, state.position.view(1), state.token[:, None])
        state.position.add_(1)


class TunedLlama(Llama):
    """The same; q and k are rotated in place by one launch, which reads the position on the device."""

    def rotation(self, position: torch.Tensor) -> partial[Any]:
        """As Llama's."""
        return partial(rope_qk, cos_sin_cache=self.cos_sin_cache, offset=position, inplace=True)


def empty_state(options: argparse.Namespace) -> State:
    """A state to be restarted."""
    count = (options.batch, options.tokens)
    cache = (options.batch, options.kv_heads, options.tokens, options.hidden // options.heads)
    return State(
        token=torch.zeros(options.batch, dtype=torch.int64, device=options.device),
        position=torch.zeros((), dtype=torch.int64, device=options.device),
        written=torch.zeros(count, dtype=torch.int64, device=options.device),
        caches=torch.zeros((options.layers, 2, *cache), dtype=DTYPES[options.dtype], device=options.device),
    )


def captured(step: Callable[[], object], state: State, first: torch.Tensor) -> Callable[[], object]:
    """The same step as one launch of a CUDA graph."""
    # Capture wants the steps before it on another stream than the default one.
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            state.restart(first)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def written_by(step: Callable[[], object], state: State, first: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The tokens [B, T] that the steps write, and the seconds that they take."""
    wait: Callable[[], object] = torch.cuda.synchronize if first.device.type == "cuda" else int  # int() does nothing
    state.restart(first)
    wait()
    begun = time.perf_counter()
    for _ in range(state.written.shape[1]):
        step()
    wait()
    return state.written.clone(), time.perf_counter() - begun


def same_tokens(what: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Print whether two runs wrote the same, and in how many texts not."""
    same = torch.equal(one, other)
    more = "" if same else f", {(one != other).any(1).sum()} of {len(one)} texts differ"
    print(f"same tokens {what}: {same}{more}", flush=True)
    return same


def ways(models: Sequence[Llama], state: State, first: torch.Tensor) -> dict[str, list[Callable[[], object]]]:
    """For each way to take a step that the device has, the step of each model."""
    eager: list[Callable[[], object]] = [partial(model.advance, state) for model in models]
    if first.device.type == "cuda":
        return {"eager": eager, "CUDA graph": [captured(step, state, first) for step in eager]}
    print("A CUDA graph needs a GPU: here the steps run eagerly, and both columns PyTorch's own operators.\n")
    return {"eager": eager}


def compare(models: Sequence[Llama], options: argparse.Namespace, first: torch.Tensor) -> bool:
    """Print whether all ways write the same tokens, and how many a second; whether those that must do so do."""
    state = empty_state(options)
    steps = ways(models, state, first)
    tokens = {way: [written_by(step, state, first)[0] for step in both] for way, both in steps.items()}  # compiles
    same = same_tokens("with the kernels and without", *tokens["eager"])
    if not same and options.dtype != "float32":
        print("That is allowed: the formula rounds cos, sin and each product, the kernel its result only.")
        same = True
    if "CUDA graph" in tokens:
        for name, eager, graph in zip(("PyTorch", "tuned"), *tokens.values(), strict=True):
            same &= same_tokens(f"in a CUDA graph and without, {name}", eager, graph)
    print(f"\n{'tokens a second':<20} {'PyTorch':>11} {'tuned':>11} {'tuned / PyTorch':>16}")
    for way, both in steps.items():
        runs = [[written_by(step, state, first)[1] for step in both] for _ in range(RUNS)]
        before, after = (
            first.numel() * options.tokens / statistics.median(seconds) for seconds in zip(*runs, strict=True)
        )
        print(f"{way:<20} {before:11.0f} {after:11.0f} {after / before:16.2f}", flush=True)
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Write with both models in every way that the device has; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="to write, a text")
    parser.add_argument("--symbols", type=int, default=1024, help="in the alphabet")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.hidden % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error("--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads")

    torch.manual_seed(options.seed)
    models = [kind(options).to(options.device, DTYPES[options.dtype]) for kind in (Llama, TunedLlama)]
    models[1].load_state_dict(models[0].state_dict())
    first = torch.randint(options.symbols, (options.batch,)).to(options.device)
    with torch.no_grad():
        axes = options.batch, 1, options.heads + 2 * options.kv_heads, options.hidden // options.heads
        packed = torch.empty(axes, dtype=DTYPES[options.dtype], device=options.device)
        q, k = packed[:, :, : options.heads], packed[:, :, options.heads : options.heads + options.kv_heads]
        rotation = models[1].rotation(torch.zeros((), dtype=torch.int64, device=options.device))
        print(f"RoPE of q and k: {tuned.explain(rotation.func, q, k, **rotation.keywords)}")
        same = compare(models, options, first)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
