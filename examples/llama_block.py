"""Llama blocks, trained with PyTorch's RoPE and with tuned's kernel from the same start: same losses? how fast?

    python examples/llama_block.py   # learns to copy, in some seconds on a CPU; and on a GPU:
    python examples/llama_block.py --dtype bfloat16 --hidden 4096 --heads 32 --kv-heads 8 --seq 4096 --batch 2

The script generates the task: the second half of a text repeats the first half, which is random, so that a model has to
learn how far back to look. A block is Llama's: RMSNorm, attention in which groups of heads share keys and values,
SwiGLU.

Exit code 1: at the start, where the two models are the same, their gradients differ by more than rounding.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import shared
import torch
from torch import nn

import tuned
from tuned.dispatch import rope_qk

DTYPES = {name: shared.DTYPES[name] for name in ("float32", "bfloat16")}
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}  # of a parameter's gradient, relative; a wrong rotation gives about 1
COMPILING = 3  # first steps, in which kernels are compiled and memory is allocated: their times are left out


class Block(shared.Layers):
    """Attention and a feed-forward layer. B texts, S positions, E hidden, D features a head."""

    def forward(self, x: torch.Tensor, rotate: Callable[..., Any]) -> torch.Tensor:
        """[B, S, E] from x [B, S, E]; ``rotate`` rotates q and k."""
        q, k, v = self.project(x)
        q, k = rotate(q, k)
        heads = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.added(x, heads.transpose(1, 2).flatten(2))


class Llama(shared.Decoder):
    """Plain PyTorch."""

    freqs: torch.Tensor

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, Block, options.seq)
        self.dtype = DTYPES[options.dtype]
        self.register_buffer("freqs", self.angles)  # [S, D / 2] radians

    def rotation(self) -> partial[Any]:
        """The function that rotates q and k, made once for all blocks; cos and sin have the dtype of q and k."""
        angles = torch.cat((self.freqs, self.freqs), -1)[:, None]
        return partial(shared.apply_rotary_pos_emb, cos=angles.cos().to(self.dtype), sin=angles.sin().to(self.dtype))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, symbols] of the symbol after each position of a text [B, S]."""
        with torch.autocast(text.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            rotate, x = self.rotation(), self.embedding(text)
            for block in self.blocks:
                x = block(x, rotate)
            return self.output(self.norm(x))


class TunedLlama(Llama):
    """The same model; q and k are rotated in one launch, which computes cos and sin of the angles itself."""

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
    """The largest difference of a parameter's gradients in the two models, relative to the norm of the first's gradient."""
    gradients = (torch.autograd.grad(loss_of(model, text), list(model.parameters())) for model in models)
    apart = [(first - second).norm() / first.norm() for first, second in zip(*gradients, strict=True)]
    return torch.stack(apart).max().item()  # NaN if any is NaN, which Python's max() may miss


def train_step(model: Llama, optimiser: torch.optim.Optimizer, text: torch.Tensor) -> torch.Tensor:
    """Forward, backward and an update. Returns the loss before the update."""
    optimiser.zero_grad()
    loss = loss_of(model, text)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def train(models: Sequence[Llama], options: argparse.Namespace, random: torch.Generator) -> None:
    """Train both models on the same texts, one step of each in turn; print losses and the median times of a step."""
    wait = shared.waiting_for(options.device)
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
    apart = torch.tensor(losses, dtype=torch.float64).diff(dim=0).abs().max().item()
    print(f"largest difference of losses: {apart:.2g}")
    before, after = (statistics.median(taken[COMPILING:] or taken) for taken in times)
    print(f"\n{'':<36} {'PyTorch':>9} {'tuned':>9} {'ratio':>9}")
    print(f"{'milliseconds a training step, median':<36} {before:9.3f} {after:9.3f} {before / after:9.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare gradients, then train both models. Returns the exit code."""
    parser = shared.parser_of(
        __doc__,
        tuple(DTYPES),
        "of autocast; parameters are float32",
        hidden=(64, None),
        heads=(4, None),
        kv_heads=(2, None),
        layers=(2, None),
        seq=(32, "symbols in a text, an even number", 4),
        batch=(32, "texts a step"),
        symbols=(16, "in the alphabet", 2),
        steps=(100, "of training"),
        rate=(2e-3, "of learning; a wide model wants a lower one", 0.0, 1.0),
    )
    options = parser.parse_args(arguments)
    shared.check_heads(parser, options)
    if options.seq % 2:
        parser.error(f"--seq must be even, since its halves are alike, got {options.seq}")

    torch.manual_seed(options.seed)
    random = torch.Generator().manual_seed(options.seed)
    before = Llama(options).to(options.device)
    after = TunedLlama(options).to(options.device)
    after.load_state_dict(before.state_dict())
    apart = gradients_apart((before, after), examples(options, random))
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
    shared.run(main)
