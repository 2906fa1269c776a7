"""Llama blocks, trained with PyTorch's RoPE and with tuned's kernel from the same start: same losses? how fast?

    python examples/llama_block.py   # learns to copy, in some seconds on a CPU; and on a GPU:
    python examples/llama_block.py --dtype bfloat16 --hidden 4096 --heads 32 --kv-heads 8 --seq 4096 --batch 2

The task is made here: the second half of a text repeats the first, which is random, so that a model has to learn how
far back to look. A block is Llama's: RMSNorm, attention in which groups of heads share keys and values, SwiGLU.

Exit code 1: at the start, where the two models are the same, their gradients differ by more than rounding.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}  # in a parameter's gradient, relative; a wrong rotation gives about 1
THETA = 10_000.0  # of the first Llama
COMPILING = 3  # first steps, in which kernels are compiled and memory is allocated: their times are left out


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The other feature of each pair, with its sign: (-x2, x1) for the halves x1 and x2 of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual formula for q [B, S, heads, D] and k [B, S, kv_heads, D]; cos and sin [S, 1, D], both halves alike."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Block(nn.Module):
    """Attention and a feed-forward layer. B texts, S positions, E hidden, D features a head."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden, head_dim = options.hidden, options.hidden // options.heads
        inner = 64 * math.ceil(hidden / 24)  # 8/3 of hidden, up to a multiple of 64
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, options.heads * head_dim, bias=False)
        self.k = nn.Linear(hidden, options.kv_heads * head_dim, bias=False)
        self.v = nn.Linear(hidden, options.kv_heads * head_dim, bias=False)
        self.attended = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, rotate: Callable[..., Any]) -> torch.Tensor:
        """[B, S, E] from the same, given what rotates q and k."""
        normed = self.attention_norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, k)
        heads = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.attended(heads.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        following: torch.Tensor = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return following


class Llama(nn.Module):
    """Plain PyTorch: embedding, blocks, output layer."""

    freqs: torch.Tensor

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.dtype = DTYPES[options.dtype]
        self.embedding = nn.Embedding(options.symbols, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        self.output = nn.Linear(options.hidden, options.symbols, bias=False)
        head_dim = options.hidden // options.heads
        inv_freq = THETA ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("freqs", torch.outer(torch.arange(options.seq), inv_freq))  # [S, D / 2] radians

    def rotation(self) -> partial[Any]:
        """What rotates q and k, made once for all blocks; cos and sin in the dtype of these, as is usual."""
        angles = torch.cat((self.freqs, self.freqs), -1)[:, None]
        return partial(apply_rotary_pos_emb, cos=angles.cos().to(self.dtype), sin=angles.sin().to(self.dtype))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, symbols] of what follows each position of a text [B, S]."""
        with torch.autocast(text.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            rotate, x = self.rotation(), self.embedding(text)
            for block in self.blocks:
                x = block(x, rotate)
            logits: torch.Tensor = self.output(self.norm(x))
        return logits


class TunedLlama(Llama):
    """The same; q and k are rotated in one launch, which takes cos and sin of the angles itself."""

    def rotation(self) -> partial[Any]:
        """As Llama's."""
        return partial(rope_qk, freqs=self.freqs, angle_entries="pair")


def examples(options: argparse.Namespace, random: torch.Generator) -> torch.Tensor:
    """A batch of texts, [B, S]."""
    half = torch.randint(options.symbols, (options.batch, options.seq // 2), generator=random)
    return half.repeat(1, 2).to(options.device)


def loss_of(model: Llama, text: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the second half, nats a symbol."""
    half = text.shape[1] // 2
    logits = model(text)[:, half - 1 : -1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, half:].flatten())


def gradients_apart(models: Sequence[Llama], text: torch.Tensor) -> float:
    """The largest difference of a parameter's gradients in the two models, relative to the first's norm."""
    for model in models:
        model.zero_grad()
        loss_of(model, text).backward()  # type: ignore[no-untyped-call]
    apart = []
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        first, second = (parameter.grad for parameter in parameters)
        assert first is not None
        assert second is not None
        apart.append((first - second).norm() / first.norm())
    return torch.stack(apart).max().item()  # NaN if there is one, where Python's max() may pass over it


def train_step(model: Llama, optimiser: torch.optim.Optimizer, text: torch.Tensor) -> torch.Tensor:
    """Forward, backward and an update; the loss before it."""
    optimiser.zero_grad()
    loss = loss_of(model, text)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def train(models: Sequence[Llama], options: argparse.Namespace, random: torch.Generator) -> None:
    """Train the two on the same texts, a step of each in turn; print losses and the median times of a step."""
    wait: Callable[[], object] = torch.cuda.synchronize if options.device == "cuda" else int  # int() does nothing
    runs = [(model, torch.optim.AdamW(model.parameters(), lr=options.rate)) for model in models]
    times: list[list[float]] = [[] for _ in models]
    losses: list[list[float]] = [[] for _ in models]
    print(f"\n{'loss, nats a symbol':<36} {'PyTorch':>9} {'tuned':>9} {'apart':>9}")
    for step in range(options.steps):
        text = examples(options, random)
        for (model, optimiser), taken, seen in zip(runs, times, losses, strict=True):
            wait()
            begun = time.perf_counter()
            loss = train_step(model, optimiser, text)
            wait()
            taken.append((time.perf_counter() - begun) * 1e3)
            seen.append(loss.item())
        if step in {0, options.steps - 1} or (step + 1) % (options.steps // 5 or 1) == 0:
            before, after = (seen[-1] for seen in losses)
            print(f"{f'step {step + 1}':<36} {before:9.4f} {after:9.4f} {abs(before - after):9.2g}", flush=True)
    apart = max(abs(before - after) for before, after in zip(*losses, strict=True))
    print(f"largest difference of losses: {apart:.2g}")
    before, after = (statistics.median(taken[COMPILING:] or taken) for taken in times)
    print(f"\n{'':<36} {'PyTorch':>9} {'tuned':>9} {'ratio':>9}")
    print(f"{'milliseconds a training step, median':<36} {before:9.3f} {after:9.3f} {before / after:9.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare gradients, then train both; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32, help="symbols in a text, an even number")
    parser.add_argument("--batch", type=int, default=32, help="texts a step")
    parser.add_argument("--symbols", type=int, default=16, help="in the alphabet")
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning; a wide model wants a lower one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of autocast; parameters are float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.hidden % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error("--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads")
    if options.seq % 2:
        parser.error(f"--seq must be even, since its halves are alike, got {options.seq}")

    torch.manual_seed(options.seed)
    random = torch.Generator().manual_seed(options.seed)
    before = Llama(options).to(options.device)
    after = TunedLlama(options).to(options.device)
    after.load_state_dict(before.state_dict())
    text = examples(options, random)
    apart = gradients_apart((before, after), text)
    same = apart <= ROUNDING[options.dtype]
    print(f"same gradients at the start: {same} (largest relative difference {apart:.2g})")

    shapes = (
        (options.batch, options.seq, heads, options.hidden // options.heads)
        for heads in (options.heads, options.kv_heads)
    )
    q, k = (
        torch.empty(shape, dtype=DTYPES[options.dtype], device=options.device, requires_grad=True) for shape in shapes
    )
    rotation = after.rotation()
    print(f"RoPE of q and k: {tuned.explain(rotation.func, q, k, **rotation.keywords)}")
    if options.device == "cpu":
        print("The kernel needs a GPU: here both columns run PyTorch's own operators.")
    train((before, after), options, random)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
