"""tuned.explain asked about a GPU that is not here: what calls would get there, from the tables and the model that ship."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tuned
import tuned.explanation
import tuned.nn
from generator.storage.record import save_winner
from tests.support.records import winner
from tuned import dispatch
from tuned.compat.transformer_engine import apply_rotary_pos_emb
from tuned.lookup.asked import asked
from tuned.lookup.table import tables

H200 = "nvidia_h200"
BF16 = torch.bfloat16
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tuned.explanation, "_there_is_a_gpu", lambda: False)


def rotations(device: str) -> dict[str, tuple[Any, ...]]:
    """Calls whose problems have rows: function, arguments, keyword arguments, kernel."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=device)

    freqs = torch.empty(4096, 64, device=device)
    x, key = empty(2, 4096, 32, 128), empty(2, 4096, 8, 128)
    pair = {"angle_entries": "pair"}
    return {
        "rope": (dispatch.rope, (x, freqs), pair, "rope_bshd_copy_half_freqs"),
        "rope_backward": (dispatch.rope_backward, (x, freqs), pair, "rope_bshd_copy_half_freqs"),
        "rope_qk": (dispatch.rope_qk, (x, key, freqs), {**pair, "inplace": True}, "rope_complete_inplace_half_freqs"),
        "rope_qkv": (dispatch.rope_qkv, (empty(2, 64, 3, 8, 128), freqs), pair, "rope_complete_copy_half_freqs"),
        "transformer_engine": (
            apply_rotary_pos_emb,
            (empty(4096, 2, 32, 128), torch.empty(4096, 1, 1, 128, device=device)),
            {},
            "rope_sbhd_copy_half_freqs",
        ),
    }


def recurrences(device: str) -> dict[str, tuple[Any, ...]]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=device)

    biases = empty(1536), empty(1536)
    module = tuned.nn.GRU(512, 512, dtype=BF16, device=device).requires_grad_(False)
    cell = tuned.nn.GRUCell(1024, 1024, dtype=BF16, device=device).requires_grad_(False)
    step = (empty(64, 1024), empty(64, 1024), empty(3072, 1024), empty(3072, 1024), empty(3072), empty(3072))
    marks = torch.empty(64, dtype=torch.bool, device=device)
    sequence = empty(512, 32, 512), empty(1, 32, 512), [empty(1536, 512), empty(1536, 512), *biases]
    linear = (empty(512, 1024), empty(512, 512)), empty(96, 1536), empty(96)
    return {
        "gru": (dispatch.gru, sequence, {}, "gru_dense_layer_split"),
        "GRU": (module, (empty(512, 32, 512),), {}, "gru_dense_layer_split"),
        "gru_cell": (dispatch.gru_cell, step, {}, "gru_cell_tile"),
        "gru_cell in place": (dispatch.gru_cell, step, {"inplace": True}, "gru_gates_bias_inplace"),
        "gru_cell in place with resets": (dispatch.gru_cell, step, {"inplace": True, "resets": marks}, "gru_cell_tile"),
        "GRUCell": (cell, (empty(64, 1024),), {}, "gru_cell_tile"),
        "linear_cat": (dispatch.linear_cat, linear, {}, "linear_cat_tile"),
    }


@DEVICES
@pytest.mark.parametrize("name", [*rotations("meta"), *recurrences("meta")])
def test_a_call_is_told_as_the_machine_with_that_gpu_would_serve_it(name: str, device: str) -> None:
    function, args, kwargs, kernel = (rotations(device) | recurrences(device))[name]
    found = tuned.explain(function, *args, gpu=H200, **kwargs)
    assert found.kernels == (kernel,)
    assert found.rule != "eager"
    assert found.gpu == H200
    assert str(found).startswith(f"on {H200}, {found.rule}: ")
    assert found.hint is None
    assert asked() is None, "nothing is asked any longer"


def test_a_row_of_that_gpu_counts_there() -> None:
    function, args, kwargs, _ = rotations("meta")["rope"]
    found = tuned.explain(function, *args, gpu=H200, **kwargs)
    assert found.rule == "winner"
    assert found.why == "measured for this spec and size in tuned.tables.nvidia_h200"
    assert found.median_us


def test_a_gradient_has_its_kernels_there() -> None:
    module = tuned.nn.GRU(512, 512, dtype=BF16, device="meta")
    found = tuned.explain(module, torch.empty(512, 32, 512, dtype=BF16, device="meta"), gpu=H200)
    assert found.kernels == ("gru_dense_layer_split", "gru_dense_backward_split")


@DEVICES
@pytest.mark.parametrize("name", ["rope", "gru", "GRUCell"])
def test_without_a_gpu_it_says_how_to_see_a_kernel_chosen(name: str, device: str) -> None:
    function, args, kwargs, _ = (rotations(device) | recurrences(device))[name]
    found = tuned.explain(function, *args, **kwargs)
    assert (found.rule, found.kernels, found.gpu) == ("eager", (), None)
    assert found.why == f"the tensors are on {device}, the kernels are for GPUs"
    last = str(found).splitlines()[-1]
    assert last == (
        'there is no GPU here: tuned.explain(..., gpu="nvidia_h200") tells which kernel this call gets on that one'
    )


def test_what_no_kernel_serves_there_either_gives_no_hint() -> None:
    x, freqs = torch.empty(1, 8, 2, 64, dtype=torch.float64), torch.empty(8, 32)
    found = tuned.explain(dispatch.rope, x, freqs, angle_entries="pair")
    assert found.hint is None
    there = tuned.explain(dispatch.rope, x, freqs, angle_entries="pair", gpu=H200)
    assert (there.rule, there.why) == ("eager", "no kernel takes torch.float64")
    unpatched = torch.nn.GRU(8, 8)
    assert tuned.explain(unpatched, torch.empty(4, 2, 8)).hint is None
    assert "use tuned.nn.patched()" in tuned.explain(unpatched, torch.empty(4, 2, 8), gpu=H200).why


def test_with_a_gpu_there_is_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.explanation, "_there_is_a_gpu", lambda: True)
    function, args, kwargs, _ = rotations("cpu")["rope"]
    assert tuned.explain(function, *args, **kwargs).hint is None


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("h200", ValueError, "got 'h200'. Did you mean 'nvidia_h200'? There are: nvidia_h200"),
        ("NVIDIA H200", ValueError, "got 'NVIDIA H200'. Did you mean 'nvidia_h200'?"),
        ("amd", ValueError, "got 'amd'. There are: nvidia_h200; the records in a folder that TUNED_TABLES names"),
        ("", ValueError, "got ''. There are: nvidia_h200"),
        (0, TypeError, r"gpu must be the name of a GPU that has a table (nvidia_h200), got int 0"),
    ],
)
def test_a_gpu_that_has_no_table_is_refused(name: Any, error: type[Exception], said: str) -> None:
    function, args, kwargs, _ = rotations("meta")["rope"]
    with pytest.raises(error) as found:
        tuned.explain(function, *args, gpu=name, **kwargs)
    assert said in str(found.value)
    assert asked() is None


def test_what_the_call_would_raise_is_raised() -> None:
    with pytest.raises(ValueError, match="angle_entries"):
        tuned.explain(dispatch.rope, torch.empty(1, 8, 2, 64), torch.empty(8, 32), angle_entries="triple", gpu=H200)
    assert asked() is None


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of TUNED_TABLES with the record of a card that has no row for RoPE."""
    save_winner(winner("gru_cell_1024_64"), tmp_path / "tables")
    monkeypatch.setenv("TUNED_TABLES", str(tmp_path / "tables"))
    tables.cache_clear()
    yield tmp_path
    tables.cache_clear()


def test_records_of_ones_own_can_be_asked_about(another: Path, recwarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = another / "misses.jsonl"
    monkeypatch.setenv("TUNED_RECORD", str(recorded))
    function, args, kwargs, kernel = rotations("meta")["rope"]
    found = tuned.explain(function, *args, gpu="test_gpu", **kwargs)
    assert found.kernels == (kernel,)
    assert found.rule == "similar GPU"
    for name in ("gru", "gru_cell"):
        function, args, kwargs, _ = recurrences("meta")[name]
        assert tuned.explain(function, *args, gpu="test_gpu", **kwargs).gpu == "test_gpu"
    assert not recorded.exists(), "nothing ran, so nothing is to be tuned"
    assert not [w for w in recwarn if issubclass(w.category, tuned.TunedWarning)]


def test_what_a_part_of_a_gpu_allows_is_not_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuned.calls.gru import run  # noqa: PLC0415

    monkeypatch.setattr(run.residents, "allowed", lambda _device: 8)
    function, args, kwargs, _ = recurrences("meta")["gru"]
    assert tuned.explain(function, *args, gpu=H200, **kwargs).rule == "winner"
