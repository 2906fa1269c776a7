"""The peers: each turns a call and its buffer sets into one launch a set, or says in a sentence why it cannot.

A launch takes no argument and returns what it rotated (the first tensor, where the call rotates two). Every peer is
imported from its own public package inside its function, so that one that is not installed costs nothing.
"""

# ruff: noqa: PLC0415 (a peer is imported where it is used: one that is missing, or slow to import, costs nothing)

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from benchmarks import formula
from benchmarks.call import Buffers, Call

R = TypeVar("R")
Launch = Callable[[], torch.Tensor]
Peer = Callable[[Call, Sequence[Buffers]], "list[Launch] | str"]

MAX_HEAD_DIM = 256  # flash-attention's and flash-linear-attention's kernels assert it


def private_copy(run: Callable[..., R]) -> Callable[..., R]:
    """The same function with a code object of its own: compilers keep their caches and recompile limits by it."""
    if not isinstance(run, types.FunctionType):
        raise TypeError(f"only a plain function can be copied, got {run!r}")
    copy = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    copy.__annotations__ = run.__annotations__
    copy.__module__ = run.__module__
    return copy


def _one_tensor(call: Call) -> str | None:
    return "rotates one tensor a call; not timed on a query and a key" if call.key_heads else None


def _formula(call: Call, x: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    angles = formula.broadcast(freqs, call.layout, positions)
    run = formula.ROTATIONS[call.direction, call.interleaved]
    if not call.inplace:
        return run(x, angles)
    rotated = x[..., : call.rotary_dim]
    rotated.copy_(run(rotated, angles))
    return x


def eager(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """The formula, one PyTorch operation after another."""
    return _one_tensor(call) or [functools.partial(_formula, call, b.x, b.feature_freqs, b.positions) for b in sets]


def scripted(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """The formula through ``torch.jit.script``; only the angles of packed tokens are gathered outside."""
    if call.inplace:
        return "a copy after the formula: no faster than out of place, where it is timed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and still what users have
        run = torch.jit.script(private_copy(formula.ROTATIONS[call.direction, call.interleaved]))

    def launch(b: Buffers) -> torch.Tensor:
        rotated: torch.Tensor = run(b.x, formula.broadcast(b.feature_freqs, call.layout, b.positions))
        return rotated

    return _one_tensor(call) or [functools.partial(launch, b) for b in sets]


@functools.cache
def _compiled(call: Call) -> Callable[..., torch.Tensor]:
    def rotate(x: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return _formula(call, x, freqs, positions)

    return torch.compile(private_copy(rotate), fullgraph=True, dynamic=False)


def compiled(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """The formula through ``torch.compile``, for this very shape."""
    run = _compiled(dataclasses.replace(call, angles="freqs pair"))  # it is given the same freqs whatever ours gets
    return _one_tensor(call) or [functools.partial(run, b.x, b.feature_freqs, b.positions) for b in sets]


def _seq_second(call: Call, x: torch.Tensor) -> torch.Tensor:
    """View x as [B, S, H, D], for kernels that know no other order; thd stays [T, H, D]."""
    return x.transpose(0, 1) if call.layout == "sbhd" else x


def _flash_attention(angle_dtype: torch.dtype, call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    if call.head_dim > MAX_HEAD_DIM:
        return f"head_dim {call.head_dim} is above the {MAX_HEAD_DIM} that it offers"
    from flash_attn.ops.triton.rotary import apply_rotary

    def launch(b: Buffers, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated = [
            apply_rotary(
                _seq_second(call, x),
                cos,
                sin,
                cu_seqlens=b.cu_seqlens,
                max_seqlen=call.seq if b.cu_seqlens is not None else None,
                interleaved=call.interleaved,
                inplace=call.inplace,
                conjugate=call.direction == "backward",
            )
            for x in b.tensors
        ]
        return _seq_second(call, rotated[0])

    return [functools.partial(launch, b, b.cos.to(angle_dtype), b.sin.to(angle_dtype)) for b in sets]


def transformer_engine(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """The fused CUDA kernels."""
    if call.inplace:
        return "it always allocates its output"
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc, apply_rotary_pos_emb

    def forward(b: Buffers) -> torch.Tensor:
        rotated: torch.Tensor = apply_rotary_pos_emb(
            b.x,
            b.feature_freqs,
            tensor_format=call.layout,
            interleaved=call.interleaved,
            fused=True,
            cu_seqlens=b.cu_seqlens,
        )
        return rotated

    def backward(b: Buffers) -> torch.Tensor:
        # What autograd would hand to their function, so that the backward kernel is timed alone.
        context = types.SimpleNamespace(
            saved_tensors=(b.feature_freqs, b.cu_seqlens, None),
            tensor_format=call.layout,
            interleaved=call.interleaved,
            cp_size=1,
            cp_rank=0,
        )
        rotated: torch.Tensor = FusedRoPEFunc.backward(context, b.x)[0]
        return rotated

    run = forward if call.direction == "forward" else backward
    return _one_tensor(call) or [functools.partial(run, b) for b in sets]


def liger(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """Liger-Kernel: query and key in one kernel, in place."""
    if not (call.key_heads and call.inplace) or call.layout != "bshd" or call.interleaved:
        return "it rotates a query and a key together, bshd in place, by halves"
    from liger_kernel.ops.rope import LigerRopeFunction

    def launch(b: Buffers) -> torch.Tensor:
        query, key = (x.transpose(1, 2) for x in b.tensors)
        rotated: torch.Tensor = LigerRopeFunction.apply(query, key, b.cos, b.sin, None, 1, call.rotary_dim)[0]
        return rotated.transpose(1, 2)

    return [functools.partial(launch, b) for b in sets]


def flash_linear_attention(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """flash-linear-attention: Triton, autotuned over warps and stages, angles of the type of x."""
    if call.head_dim > MAX_HEAD_DIM:
        return f"head_dim {call.head_dim} is above the {MAX_HEAD_DIM} that it offers"
    if call.layout != "bshd" or call.inplace:
        return "timed on bshd out of place, where it needs neither copies nor an angle row for every packed token"
    from fla.modules.rotary.ops import rotary_embedding_fwdbwd

    def launch(b: Buffers, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = rotary_embedding_fwdbwd(
            b.x, cos, sin, interleaved=call.interleaved, conjugate=call.direction == "backward"
        )
        return rotated

    return _one_tensor(call) or [functools.partial(launch, b, b.cos.to(call.dtype), b.sin.to(call.dtype)) for b in sets]


def flashinfer(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """Flashinfer: query and key in one kernel, in place, cosines and sines by position."""
    if not (call.key_heads and call.inplace) or call.layout != "bshd":
        return "it rotates a query and a key together, in place, by token"
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    def launch(b: Buffers, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        query, key = (x.flatten(0, 1).flatten(1) for x in b.tensors)  # views [B S, H D]
        apply_rope_with_cos_sin_cache_inplace(positions, query, key, call.head_dim, cache, not call.interleaved)
        return b.x

    positions = torch.arange(call.seq, device=sets[0].x.device).repeat(call.batch)
    return [functools.partial(launch, b, positions, torch.cat((b.cos, b.sin), dim=-1)) for b in sets]


def quack(call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """Quack: CuTe DSL, the interface of flash-attention."""
    if call.layout != "bshd" or call.direction == "backward":
        return "timed forward on bshd"
    from quack.rotary import apply_rotary_emb

    def launch(b: Buffers) -> torch.Tensor:
        rotated: torch.Tensor = apply_rotary_emb(b.x, b.cos, b.sin, interleaved=call.interleaved, inplace=call.inplace)
        return rotated

    return _one_tensor(call) or [functools.partial(launch, b) for b in sets]


PEERS: dict[str, Peer] = {
    "eager PyTorch": eager,
    "torch.jit.script": scripted,
    "torch.compile": compiled,
    "flash-attention": functools.partial(_flash_attention, torch.float32),
    "flash-attention bf16 angles": functools.partial(_flash_attention, torch.bfloat16),
    "TransformerEngine": transformer_engine,
    "Liger-Kernel": liger,
    "flash-linear-attention": flash_linear_attention,
    "flashinfer": flashinfer,
    "quack": quack,
}
QUERY_AND_KEY = ("Liger-Kernel", "flashinfer")  # these rotate two tensors in one kernel, and nothing else
REQUIRED = ("torch.compile", "flash-attention", "TransformerEngine")  # a row without them does not count for the mean

PACKAGES = {  # import name to distribution
    "flash_attn": "flash-attn",
    "transformer_engine": "transformer-engine",
    "liger_kernel": "liger-kernel",
    "fla": "fla-core",
    "flashinfer": "flashinfer-python",
    "vllm": "vllm",
    "quack": "quack-kernels",
}


def launches(name: str, call: Call, sets: Sequence[Buffers]) -> list[Launch] | str:
    """One launch a set, or the reason why there is none: the shape, or a package that cannot be imported."""
    try:
        return PEERS[name](call, sets)
    except ImportError as error:
        return f"not installed: {error}"


def versions() -> dict[str, str]:
    """What is installed of the peers that are packages of their own."""
    found = {}
    for package, distribution in PACKAGES.items():
        try:
            module: Any = importlib.import_module(package)
        except ImportError:
            continue
        try:
            found[package] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[package] = str(getattr(module, "__version__", "unknown"))
    return found
