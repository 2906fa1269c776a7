"""The RoPE examples train and decode, compare with PyTorch's operators, report what they found, and notice a wrong swap."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from examples import decode, llama_block
from tests.support.processes import complaints
from tests.support.pythons import python
from tuned.dispatch import rope_qk

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EAGER = "RoPE of q and k: eager: the tensors are on cpu, the kernels are for GPUs"
BLOCK = ["--hidden", "32", "--seq", "16", "--batch", "16", "--symbols", "8"]
DECODE = ["--hidden", "32", "--heads", "4", "--layers", "2", "--tokens", "24", "--symbols", "32"]


def run(script: str, *options: str) -> str:
    """The output of an example, which must succeed without a warning."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (f"examples/{script}.py", "--device", "cpu", *options)
    done = python(*command, cwd=ROOT, environment=environment, new=script == "decode")
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    return done.stdout


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "RUNS", 1)


def test_a_user_sees_that_the_block_learns_and_that_the_kernel_changes_nothing() -> None:
    out = run("llama_block", *BLOCK, "--steps", "100")
    assert "same gradients at the start: True" in out
    assert EAGER in out
    assert "The kernel needs a GPU" in out
    lines = [[float(x) for x in line] for line in re.findall(r"step \d+ +([\d.]+) +([\d.]+) +([\d.e-]+)", out)]
    for losses in zip(*(line[:2] for line in lines), strict=True):
        assert losses[-1] < 0.5 * losses[0]
    apart = re.search(r"largest difference of losses: (\S+)\n", out)
    assert apart is not None
    assert max(line[2] for line in lines) <= float(apart[1]) < 0.01
    assert re.search(r"^milliseconds a training step, median +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)


WRONG_BLOCKS: dict[str, Callable[..., Any]] = {
    "keys are not numbers": lambda q, k, **_: (q, k * torch.nan),
    "nothing is rotated": lambda q, k, **_: (q, k),
    "keys are not rotated": lambda q, k, freqs: (rope_qk(q, k, freqs=freqs, angle_entries="pair")[0], k),
    "keys are rotated backwards": lambda q, k, freqs: (
        rope_qk(q, None, freqs=freqs, angle_entries="pair")[0],
        rope_qk(k, None, freqs=freqs, angle_entries="pair", conjugate=True)[0],
    ),
    "other pairs": partial(rope_qk, angle_entries="pair", interleaved=True),
}


@pytest.mark.parametrize("dtype", sorted(llama_block.DTYPES))
@pytest.mark.parametrize("wrong", sorted(WRONG_BLOCKS))
def test_a_block_that_rotates_otherwise_is_seen(
    wrong: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ["--device", "cpu", *BLOCK, "--steps", "1", "--dtype", dtype]
    assert llama_block.main(right) == 0
    assert "same gradients at the start: True" in capsys.readouterr().out

    monkeypatch.setattr(llama_block.tuned, "explain", lambda *_, **__: "not of interest")
    monkeypatch.setattr(llama_block.TunedLlama, "rotation", lambda self: partial(WRONG_BLOCKS[wrong], freqs=self.freqs))
    assert llama_block.main(right) == 1
    assert "same gradients at the start: False" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = iter([1.0, 1.0, 1.0, torch.nan])
    monkeypatch.setattr(llama_block, "train_step", lambda *_: torch.tensor(next(steps)))
    llama_block.main(["--device", "cpu", *BLOCK, "--steps", "2"])
    assert "largest difference of losses: nan" in capsys.readouterr().out


@pytest.mark.parametrize("example", [llama_block, decode], ids=["llama_block", "decode"])
@pytest.mark.parametrize("wrong", [["--hidden", "36"], ["--kv-heads", "3"]], ids=" ".join)
def test_heads_that_do_not_divide_are_refused(
    example: Any, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(["--device", "cpu", "--heads", "4", *wrong])
    assert (
        "--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads" in capsys.readouterr().err
    )


def test_a_user_sees_that_decoding_writes_the_same_tokens_and_how_fast() -> None:
    out = run("decode", *DECODE)
    assert EAGER in out
    assert "A CUDA graph needs a GPU: here the steps run eagerly" in out
    assert "same tokens with the kernels and without: True" in out
    assert re.search(r"^eager +\d+ +\d+ +[\d.]+$", out, re.MULTILINE)


def whole_text(model: decode.Llama, text: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, symbols] of a text [B, T] read at once: no cache, RoPE as a product of complex numbers."""
    x = model.embedding(text)
    cos, sin = model.cos_sin_cache[:, None].to(x.dtype).chunk(2, -1)
    for block in model.blocks:
        assert isinstance(block, decode.Block)
        q, k, v = block.project(x)
        q, k = (
            torch.cat(((turned := torch.complex(*t.chunk(2, -1)) * torch.complex(cos, sin)).real, turned.imag), -1)
            for t in (q, k)
        )
        k, v = (t.repeat_interleave(block.heads // block.kv_heads, 2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        x = x + block.attended(torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).flatten(2))
        gate, up = block.gate_and_up(block.feed_forward_norm(x)).chunk(2, -1)
        x = x + block.down(gate * gate.sigmoid() * up)
    return model.output(model.norm(x))


@pytest.mark.parametrize("kind", [decode.Llama, decode.TunedLlama])
def test_steps_from_the_cache_give_what_the_whole_text_gives(
    kind: type[decode.Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode.DTYPES, "float64", torch.float64)
    options = argparse.Namespace(
        device="cpu", hidden=24, heads=6, kv_heads=2, layers=2, batch=3, tokens=13, symbols=32, dtype="float64"
    )
    torch.manual_seed(0)
    model, state = kind(options).double(), decode.empty_state(options)
    first = torch.randint(options.symbols, (options.batch,))
    state.caches.fill_(100.0)  # wrong values: a step must not read positions that are not written yet
    state.restart(first)
    text, logits = [], []
    with torch.no_grad():
        for _ in range(options.tokens):
            text.append(state.token.clone())
            logits.append(model(state))
            model.advance(state)
        text = torch.stack(text, 1)
        expected = whole_text(model, text)
    torch.testing.assert_close(torch.stack(logits, 1), expected)
    assert torch.equal(text[:, 0], first)
    assert torch.equal(state.written, expected.argmax(-1))
    assert state.position == options.tokens


def stuck(model: decode.TunedLlama, position: torch.Tensor) -> Any:
    return partial(rope_qk, cos_sin_cache=model.cos_sin_cache, offset=torch.zeros_like(position), inplace=True)


def out_of_place(model: decode.TunedLlama, position: torch.Tensor) -> Any:
    def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope_qk(q, k, cos_sin_cache=model.cos_sin_cache, offset=position)
        return q, k

    return rotate


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrong", [stuck, out_of_place])
def test_decoding_that_rotates_otherwise_is_seen_where_rounding_does_not_excuse_it(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode.tuned, "explain", lambda *_, **__: "not of interest")
    monkeypatch.setattr(decode.TunedLlama, "rotation", lambda model, position: partial(wrong(model, position)))
    assert decode.main(["--device", "cpu", *DECODE]) == 1
    out = capsys.readouterr().out
    assert re.search(r"same tokens with the kernels and without: False, [1-4] of 4 texts differ\n", out)
    assert "That is allowed" not in out
    assert decode.main(["--device", "cpu", *DECODE, "--dtype", "bfloat16"]) == 0
    assert re.search(r"without: False, [1-4] of 4 texts differ\nThat is allowed", capsys.readouterr().out)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("model", [0, 1], ids=["PyTorch", "tuned"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_that_replays_one_position_is_seen_in_any_dtype(
    model: int, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = decode.ways

    def with_graph(*given: Any) -> dict[str, list[Callable[[], object]]]:
        eager, state = ways(*given)["eager"], given[1]
        wrong = list(eager)

        def step() -> None:
            position = state.position.clone()
            state.position.zero_()
            eager[model]()
            state.written.index_copy_(1, position.view(1), state.token[:, None])
            state.position.copy_(position + 1)

        wrong[model] = step
        return {"eager": eager, "CUDA graph": wrong}

    monkeypatch.setattr(decode, "ways", with_graph)
    assert decode.main(["--device", "cpu", *DECODE, "--dtype", dtype]) == 1
    out = capsys.readouterr().out
    for i, name in enumerate(("PyTorch", "tuned")):
        assert f"same tokens in a CUDA graph and without, {name}: {i != model}" in out
    assert re.search(r"^CUDA graph +\d+ +\d+ +[\d.]+$", out, re.MULTILINE)


@pytest.mark.gpu_sample
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", sorted(decode.DTYPES))
def test_on_a_gpu_a_graph_decodes_what_single_steps_decode(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--device", "cuda", *DECODE, "--hidden", "128", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert "RoPE of q and k: eager" not in out
    for name in ("PyTorch", "tuned"):
        assert f"same tokens in a CUDA graph and without, {name}: True" in out
    assert re.search(r"^CUDA graph +\d+ +\d+ +[\d.]+$", out, re.MULTILINE)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("dtype", sorted(llama_block.DTYPES))
def test_on_a_gpu_the_block_has_the_same_gradients(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert llama_block.main(["--device", "cuda", "--hidden", "128", "--steps", "5", "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert "same gradients at the start: True" in out
    assert "RoPE of q and k: eager" not in out
