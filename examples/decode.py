"""A Llama decodes from its KV cache with PyTorch's RoPE and tuned's, eagerly and by a CUDA graph: same tokens? how fast?

    python examples/decode.py                            # some seconds on a CPU, where there is no graph
    python examples/decode.py --hidden 4096 --heads 32 --kv-heads 8 --layers 8 --dtype bfloat16   # on a GPU

The model is a Llama with random weights, and writes one token per step. A step needs nothing from the host: position,
tokens and caches are tensors on the device, which the step itself advances, so that the same graph serves every
position. RoPE overwrites q and k in the result of the packed projection.

Exit code 1: a graph wrote other tokens than the same step without a graph; or, in float32, the kernels wrote other
tokens than PyTorch.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
import dataclasses
import statistics
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from shared import DTYPES, Decoder, Layers, apply_rotary_pos_emb, check_heads, parser_of, run, waiting_for
from torch import nn

import tuned
from tuned.dispatch import rope_qk

RUNS = 3  # the median of them is printed
WARM_UP = 3  # steps before a graph is captured: kernels are compiled and libraries loaded in them


@dataclasses.dataclass(frozen=True)
class State:
    """The tensors that a step reads and overwrites, all on the device. B texts, T tokens to write, L layers."""

    token: torch.Tensor  # [B] int64, the last token written
    position: torch.Tensor  # [] int64, position of that token
    written: torch.Tensor  # [B, T] int64
    caches: torch.Tensor  # [L, 2, B, kv_heads, T, D]: keys and values

    def restart(self, first: torch.Tensor) -> None:
        """Prepare for the first step; ``first`` [B] stands at position 0. The caches may stay: no step reads ahead."""
        self.token.copy_(first)
        self.position.zero_()
        self.written.zero_()


class Block(Layers):
    """Attention to the cache, and a feed-forward layer. E hidden, D features a head."""

    def forward(
        self, x: torch.Tensor, rotate: Callable[..., Any], state: State, cache: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """[B, 1, E] from x [B, 1, E] and the layer's cache [2, B, kv_heads, T, D]; ``seen`` [1, T] marks what is read."""
        q, k, v = self.project(x)
        q, k = rotate(q, k)
        here = state.position.view(1)
        for kept, new in zip(cache, (k, v), strict=True):
            kept.index_copy_(2, here, new.transpose(1, 2))
        # The query heads that share a key head take the axis of queries, so that keys and values need not be repeated.
        groups = q.reshape(len(x), self.kv_heads, self.heads // self.kv_heads, -1)  # [B, kv_heads, group, D]
        heads = nn.functional.scaled_dot_product_attention(groups, cache[0], cache[1], attn_mask=seen)
        return self.added(x, heads.flatten(1)[:, None])


class Llama(Decoder):
    """Plain PyTorch."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, Block, options.tokens)
        # Not a buffer, which to(dtype) would round.
        self.cos_sin_cache = torch.cat((self.angles.cos(), self.angles.sin()), -1).to(options.device)  # [T, D] float32

    def rotation(self, position: torch.Tensor) -> partial[Any]:
        """The function that rotates q and k, made once for all blocks; cos and sin have the dtype of q and k."""
        row = self.cos_sin_cache.index_select(0, position.view(1))[0]  # cos_sin_cache[position] would synchronize
        cos, sin = (half.repeat(2).to(self.output.weight.dtype) for half in row.chunk(2))
        return partial(apply_rotary_pos_emb, cos=cos, sin=sin)

    def forward(self, state: State) -> torch.Tensor:
        """Logits [B, symbols] of the token after the state's token, whose keys and values go to the caches."""
        rotate, x = self.rotation(state.position), self.embedding(state.token)[:, None]
        seen = (torch.arange(state.written.shape[1], device=x.device) <= state.position)[None]  # [1, T]
        for block, cache in zip(self.blocks, state.caches, strict=True):
            x = block(x, rotate, state, cache, seen)
        return self.output(self.norm(x[:, 0]))

    def advance(self, state: State) -> None:
        """Write the likeliest next token of each text."""
        state.token.copy_(self(state).argmax(-1))
        state.written.index_copy_(1, state.position.view(1), state.token[:, None])
        state.position.add_(1)


class TunedLlama(Llama):
    """The same model; q and k are rotated in place by one launch, which reads the position on the device."""

    def rotation(self, position: torch.Tensor) -> partial[Any]:
        """As Llama's."""
        return partial(rope_qk, cos_sin_cache=self.cos_sin_cache, offset=position, inplace=True)


def empty_state(options: argparse.Namespace) -> State:
    """A state of zeros, to be restarted."""
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
    # The steps before a capture must run on another stream than the default one.
    side = torch.cuda.Stream()
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


def written_by(step: Callable[[], object], state: State, first: torch.Tensor) -> torch.Tensor:
    """The tokens [B, T] that the steps write; it waits until the device is done."""
    state.restart(first)
    for _ in range(state.written.shape[1]):
        step()
    waiting_for(first.device.type)()
    return state.written.clone()


def same_tokens(what: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Print and return whether two runs wrote the same tokens, and print how many texts differ."""
    same = torch.equal(one, other)
    more = "" if same else f", {(one != other).any(1).sum()} of {len(one)} texts differ"
    print(f"same tokens {what}: {same}{more}", flush=True)
    return same


def ways(models: Sequence[Llama], state: State, first: torch.Tensor) -> dict[str, list[Callable[[], object]]]:
    """Way to run a step -> the step of each model, for each way that the device has."""
    eager: list[Callable[[], object]] = [partial(model.advance, state) for model in models]
    if first.device.type == "cuda":
        return {"eager": eager, "CUDA graph": [captured(step, state, first) for step in eager]}
    print("A CUDA graph needs a GPU: here the steps run eagerly, and both columns PyTorch's own operators.\n")
    return {"eager": eager}


def compare(models: Sequence[Llama], options: argparse.Namespace, first: torch.Tensor) -> bool:
    """Print whether all ways write the same tokens, and how many a second. Returns whether all that must agree agree."""
    state = empty_state(options)
    steps = ways(models, state, first)
    tokens = {way: [written_by(step, state, first) for step in both] for way, both in steps.items()}  # compiles
    same = same_tokens("with the kernels and without", *tokens["eager"])
    if not same and options.dtype != "float32":
        print("That is allowed: the formula rounds cos, sin and each product, the kernel its result only.")
        same = True
    if "CUDA graph" in tokens:
        for name, eager, graph in zip(("PyTorch", "tuned"), *tokens.values(), strict=True):
            same &= same_tokens(f"in a CUDA graph and without, {name}", eager, graph)
    print(f"\n{'tokens a second':<20} {'PyTorch':>11} {'tuned':>11} {'tuned / PyTorch':>16}")
    for way, both in steps.items():
        runs = [timeit.repeat(partial(written_by, step, state, first), number=1, repeat=RUNS) for step in both]
        before, after = (first.numel() * options.tokens / statistics.median(seconds) for seconds in runs)
        print(f"{way:<20} {before:11.0f} {after:11.0f} {after / before:16.2f}", flush=True)
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Write with both models in every way that the device has. Returns the exit code."""
    parser = parser_of(
        __doc__,
        tuple(DTYPES),
        hidden=(256, None),
        heads=(8, None),
        kv_heads=(2, None),
        layers=(4, None),
        batch=(4, None),
        tokens=(128, "to write, a text", 2),
        symbols=(1024, "in the alphabet", 2),
    )
    options = parser.parse_args(arguments)
    check_heads(parser, options)

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
    run(main)
