"""Other libraries' calls under torch.compile with all sizes open: one whole graph, right at sizes not traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tuned.compat import flash_attn, flashinfer, liger, transformer_engine, transformers, vllm
from tuned.compat.rotary_style import Style, rotate
from tuned.dispatch import rope, rope_backward, rope_qkv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.compiler

H, K, D = 4, 2, 16
ROWS = 80


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def table(width: int = D // 2) -> torch.Tensor:
    return torch.linspace(0, 1, ROWS * width).view(ROWS, width)


def bounds(s: int) -> torch.Tensor:
    return torch.tensor([0, 1, s], dtype=torch.int32)


# (b, s) -> the arguments of a call
FLASH: dict[str, tuple[Callable[..., Any], Callable[[int, int], tuple[Any, ...]]]] = {
    "one": (flash_attn.apply_rotary_emb, lambda b, s: (torch.randn(b, s, H, D), table(), table())),
    "one in place": (
        lambda x, c: flash_attn.apply_rotary_emb(x, c, c, inplace=True),
        lambda b, s: (torch.randn(b, s, H, D), table()),
    ),
    "starts": (
        lambda x, c, o: flash_attn.apply_rotary_emb(x, c, c, seqlen_offsets=o),
        lambda b, s: (torch.randn(b, s, H, D), table(), torch.arange(b)),
    ),
    "offset": (
        lambda x, c, o: flash_attn.apply_rotary_emb(x, c, c, seqlen_offsets=o),
        lambda b, s: (torch.randn(b, s, H, D), table(), s - 2),
    ),
    "packed": (
        lambda x, c, o, n: flash_attn.apply_rotary_emb(x, c, c, cu_seqlens=o, max_seqlen=n),
        lambda b, s: (torch.randn(b * s, H, D), table(), bounds(b * s), b * s),
    ),
    "qkv": (
        lambda x, c: flash_attn.apply_rotary_emb_qkv_(x, c, c, num_heads_q=x.shape[2] // 2),
        lambda b, s: (torch.randn(b, s, 4 + 4 * b, D), table()),
    ),
    "qkv of so many heads": (
        lambda x, c, h: flash_attn.apply_rotary_emb_qkv_(x, c, c, num_heads_q=h),
        lambda b, s: (torch.randn(b, s, b + 2 * K, D), table(), b),
    ),
    "qkv and another table": (
        lambda x, c, d: flash_attn.apply_rotary_emb_qkv_(x, c, c, d, d, num_heads_q=x.shape[2] // 2),
        lambda b, s: (torch.randn(b, s, 4 + 4 * b, D), table(), table().sqrt()),
    ),
    "qkv of five axes": (
        lambda x, c: flash_attn.apply_rotary_emb_qkv_(x, c, c),
        lambda b, s: (torch.randn(b, s, 3, 2 + b, D), table()),
    ),
    "qkv apart": (
        lambda x, c: flash_attn.apply_rotary_emb_qkv_(x.transpose(2, 3), c, c),
        lambda b, s: (torch.randn(b, s, 2 + b, 3, D), table()),
    ),
    "kv": (
        lambda x, c: flash_attn.apply_rotary_emb_kv_(x, c, c),
        lambda b, s: (torch.randn(b, s, 2, 2 + b, D), table()),
    ),
}
OTHERS: dict[str, tuple[Callable[..., Any], Callable[[int, int], tuple[Any, ...]]]] = {
    "TransformerEngine": (
        lambda x, f: transformer_engine.apply_rotary_pos_emb(x, f, "bshd", cp_size=2, cp_rank=1),
        lambda b, s: (torch.randn(b, 2 * s, H, D), table(D)[:, None, None]),
    ),
    "TransformerEngine packed": (
        lambda x, f, o: transformer_engine.apply_rotary_pos_emb(x, f, "thd", cu_seqlens=o),
        lambda b, s: (torch.randn(b * s, H, D), table(D)[:, None, None], bounds(b * s)),
    ),
    "Liger": (
        liger.liger_rotary_pos_emb,
        lambda b, s: (torch.randn(b, H, s, D), torch.randn(b, K, s, D), *(table(D)[None, :s],) * 2),
    ),
    "Liger of each sequence": (
        liger.liger_rotary_pos_emb,
        lambda b, s: (torch.randn(b, H, s, D), torch.randn(b, K, s, D), *torch.randn(2, b, s, D)),
    ),
    "Liger's vision": (
        liger.liger_rotary_pos_emb_vision,
        lambda b, s: (torch.randn(s, 2 + b, D), torch.randn(s, K, D), *(table(D)[:s],) * 2),
    ),
    "transformers": (
        transformers.RotaryPosEmb(),
        lambda b, s: (torch.randn(b, H, s, D), torch.randn(b, K, s, D), *torch.randn(2, b, s, D)),
    ),
    "transformers, halves": (
        lambda q, k, c, s: rotate(Style(interleaved=False, entries="half"), q, k, (c, s), 1),
        lambda b, s: (torch.randn(b, H, s, D), torch.randn(b, K, s, D), *torch.randn(2, b, s, D)),
    ),
    "vLLM": (
        lambda i, q, k, c: vllm.rotary_embedding(i, q, k, D, c, True),
        lambda b, s: (torch.arange(s), torch.randn(s, (2 + b) * D), torch.randn(s, K * D), table(D)),
    ),
    "vLLM, a part of each head": (
        lambda i, q, k, c: vllm.rotary_embedding(i, q, k, D, c, False, 8),
        lambda b, s: (torch.arange(s).repeat(b, 1), torch.randn(b, s, H, D), torch.randn(b, s, K * D), table()),
    ),
    "FlashInfer": (
        lambda i, q, k, c: flashinfer.apply_rope_with_cos_sin_cache_inplace(i, q, k, D, c),
        lambda b, s: (torch.arange(b * s), torch.randn(b * s, H * D), torch.randn(b * s, K * D), table(D)),
    ),
    "rope_qkv": (
        lambda x, f: rope_qkv(x, f, kv_heads=x.shape[2] // 4, inplace=True),
        lambda b, s: (torch.randn(b, s, 8 * b, D), table(D)),
    ),
    "rope_backward": (
        lambda x, f: rope_backward(x, f, cp_size=2),
        lambda b, s: (torch.randn(b, 2 * s, H, D), table(D)),
    ),
    "rope": (
        lambda x, f, o: rope(x, f, rotary_dim=f.shape[-1], cp_size=o.shape[0] // o.shape[0], offset=o[0]),
        lambda b, s: (torch.randn(b, s, H, D), table(D), torch.arange(b)),
    ),
}
CALLS = FLASH | OTHERS


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_open_sizes_is_compiled_whole(name: str) -> None:
    function, arguments = CALLS[name]
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415 - 2 s of every process that collects

    counter = CompileCounterWithBackend("eager")
    fast = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for sizes in ((2, 5), (3, 7), (4, 9)):
        torch.manual_seed(0)
        given, wanted = arguments(*sizes), None
        again = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
        found, wanted = fast(*given), function(*again)
        torch.testing.assert_close((found, list(given)), (wanted, again), msg=f"{name} {sizes}")
    assert counter.frame_count <= 3, "sizes that heads depend on make a graph each, no other does"
