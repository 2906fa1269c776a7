"""Code that the examples share: command-line options, and the layers of a Llama with the usual formula of RoPE."""

# ruff: noqa: INP001 - lies beside the scripts that import it

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import benchmark

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
THETA = 10_000.0  # base of RoPE's frequencies in the first Llama
MOST = 2**31 - 1  # of an option that has no other limit
SECONDS = 0.2  # a call is timed for at least so long


def device_named(name: str) -> str:
    """The name of a device; "auto" becomes "cuda" if torch sees a GPU, else "cpu"."""
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here: pass cpu, or auto")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def between(kind: type, least: float = 1, most: float = MOST) -> Callable[[str], float]:
    """A converter for argparse, which refuses NaN and numbers out of ``least`` to ``most``."""

    def number(text: str) -> float:
        value: float = kind(text)
        if least <= value <= most:
            return value
        limit = f"most {most}" if value > most else f"least {least}"
        raise argparse.ArgumentTypeError(f"must be at {limit}, got {text}")

    number.__name__ = kind.__name__  # argparse prints this name if a text is no number
    return number


def parser_of(
    about: str | None, dtypes: Sequence[str], dtype_help: str | None = None, **numbers: tuple[Any, ...]
) -> argparse.ArgumentParser:
    """The command line of an example.

    ``numbers``: option -> (default, help), (default, help, least) or (default, help, least, most). The default has the
    option's type; least is 1 and most MOST if they are left out.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", type=device_named)
    for name, (default, text, *limits) in numbers.items():
        kind = between(type(default), *limits)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    parser.add_argument("--dtype", choices=tuple(dtypes), default="float32", help=dtype_help)
    parser.add_argument("--seed", type=between(int, -(2**63), 2**64 - 1), default=0)  # the limits are torch's
    return parser


def run(main: Callable[[], int]) -> NoReturn:
    """End the script with main's exit code, and without a traceback if the reader of its output has gone, as head does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest when it ends
        code = 1
    raise SystemExit(code)


def milliseconds(call: Callable[[], object]) -> float:
    """The median time of a call. The timer waits for the GPU, and makes one call before it begins, which compiles."""
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median * 1e3


def waiting_for(device: str) -> Callable[[], object]:
    """A function that waits until the device has done all work; on a CPU there is nothing to wait for."""
    return torch.cuda.synchronize if device == "cuda" else int  # int() does nothing


def check_heads(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error if the sizes of a Llama do not divide each other."""
    if options.hidden % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error("--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads")


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The other feature of each pair, with its sign: (-x2, x1) for the halves x1 and x2 of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, *, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual formula for q [B, S, heads, D], k [B, S, kv_heads, D]; cos and sin are [D] or [S, 1, D], of equal halves."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Layers(nn.Module):
    """The layers of a block: attention and a feed-forward layer. B texts, S positions, E hidden, D features a head."""

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
        """The q [B, S, heads, D], k and v [B, S, kv_heads, D] of x [B, S, E]: views of one tensor."""
        packed = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        return packed.split((self.heads, self.kv_heads, self.kv_heads), 2)

    def added(self, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """The block's output [B, S, E], from its input x [B, S, E] and the result of its heads [B, S, heads * D]."""
        x = x + self.attended(heads)
        gate, up = self.gate_and_up(self.feed_forward_norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Embedding, blocks, output layer."""

    def __init__(self, options: argparse.Namespace, block: type[Layers], positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.symbols, options.hidden)
        self.blocks = nn.ModuleList(block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        self.output = nn.Linear(options.hidden, options.symbols, bias=False)
        head_dim = options.hidden // options.heads
        # Radians, [positions, D / 2].
        self.angles = torch.outer(torch.arange(positions), THETA ** (-torch.arange(0, head_dim, 2) / head_dim))
