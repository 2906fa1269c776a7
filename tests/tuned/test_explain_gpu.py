"""tuned.explain asked about a GPU that is not here: what calls would get there, by the shipped tables and model."""

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
THERE = ", ".join(sorted(tables()))  # GPUs with a table
BF16 = torch.bfloat16
DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tuned.explanation, "_there_is_a_gpu", lambda: False)


def rotations(device: str) -> dict[str, tuple[Any, ...]]:
    """Calls whose problems have rows: function, arguments, keyword arguments, kernel's name."""

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
        "qkv_norm_rope_": (
            dispatch.qkv_norm_rope_,
            (empty(2, 64, 48, 128), empty(128), empty(128), freqs),
            {**pair, "kv_heads": 8},
            "rope_norm_inplace_half_freqs",
        ),
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
    first = min(tables())
    assert last == (
        f'there is no GPU here: tuned.explain(..., gpu="{first}") tells which kernel this call gets on that one'
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
        ("h200", ValueError, "got 'h200'. Did you mean 'nvidia_h200'? There are: " + THERE),
        ("NVIDIA H200", ValueError, "got 'NVIDIA H200'. Did you mean 'nvidia_h200'?"),
        ("amd", ValueError, f"got 'amd'. There are: {THERE}; the records in a folder that TUNED_TABLES names"),
        ("", ValueError, f"got ''. There are: {THERE}"),
        (0, TypeError, f"gpu must be the name of a GPU that has a table ({THERE}), got int 0"),
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


def _negative(*shape: int) -> torch.Tensor:
    view = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


def _unread() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Calls that a kernel would serve if it could read the memory of one tensor: function, reason, arguments."""
    angle, x, ones = torch.rand(8, 4), torch.randn(2, 5, 3, 8), torch.ones(8)
    table = {"cos": angle.cos(), "sin": angle.sin()}
    packed = {name: torch.randn(5, 3, 8) for name in "qkv"}
    cache = {"key_cache": torch.zeros(2, 4, 3, 8), "value_cache": torch.zeros(2, 4, 3, 8)}
    places = {"slot_mapping": torch.arange(5), "positions": torch.arange(5), **cache, **table}
    lazy, empty = "a tensor has the negative or conjugate bit", "a tensor is empty"
    norm = {"q_weight": ones, "k_weight": ones, **table}
    return {
        "empty": (dispatch.rope, empty, {"x": x[:0], **table}),
        "both empty": (dispatch.qk_norm_rope, empty, {"q": x[:, :0], "k": x[:, :0], **norm}),
        "negative": (dispatch.rope, lazy, {"x": _negative(2, 5, 3, 8), **table}),
        "negative key": (
            dispatch.rope_qk,
            lazy,
            {"q": x.new_empty(2, 5, 3, 16)[..., ::2], "k": _negative(2, 5, 1, 8), **table},
        ),
        "negative cosines": (dispatch.rope, lazy, {"x": x, "cos": _negative(8, 4), "sin": _negative(8, 4)}),
        "conjugate": (dispatch.rope, lazy, {"x": x, "freqs_cis": torch.polar(torch.ones(8, 4), angle).conj()}),
        "packed negative": (dispatch.qkv_norm_rope_, lazy, {"qkv": _negative(2, 5, 3, 2, 8), **norm}),
        "empty for a cache": (dispatch.rope_append_, empty, {**packed, **places, "slot_mapping": torch.arange(0)}),
        "negative for a cache": (
            dispatch.rope_append_,
            lazy,
            {**{name: _negative(5, 3, 8) for name in "qkv"}, **places},
        ),
    }


@pytest.mark.parametrize("name", _unread())
def test_what_no_kernel_can_read_is_told(name: str) -> None:
    function, why, named = _unread()[name]
    found = tuned.explain(function, **named, gpu=H200)
    assert (found.rule, found.kernels) == ("eager", ())
    assert found.why.startswith(why)


def test_beside_an_empty_key_a_query_gets_the_kernel_of_its_own() -> None:
    x, angle, ones = torch.randn(2, 5, 3, 8), torch.rand(8, 4), torch.ones(8)
    table = {"cos": angle.cos(), "sin": angle.sin(), "gpu": H200}
    alone = tuned.explain(dispatch.rope, x, **table)
    assert alone.kernels == ("rope_bshd_copy_half_cos_sin",)
    for given in ((x, x[:, :, :0]), (x[:, :, :0], x)):
        assert tuned.explain(dispatch.rope_qk, *given, **table) == alone
        found = tuned.explain(dispatch.qk_norm_rope, *given, ones, ones, **table)
        assert found == tuned.explain(dispatch.qk_norm_rope, x, None, ones, None, **table)


@pytest.mark.parametrize(
    ("freqs", "tensor_format", "error", "said"),
    [
        (torch.rand(8, 1, 1, 8), "bhsd", ValueError, "tensor_format must be one of"),
        (torch.rand(8, 1, 1, 8) + 0j, "sbhd", TypeError, "freqs must be real"),
        ([1.0], "sbhd", TypeError, "freqs must be a tensor"),
    ],
    ids=["bhsd", "complex", "list"],
)
def test_what_transformer_engines_would_raise_is_raised(
    freqs: Any, tensor_format: str, error: type[Exception], said: str
) -> None:
    arguments = torch.randn(5, 2, 3, 8), freqs, tensor_format
    with pytest.raises(error, match=said) as called:
        apply_rotary_pos_emb(*arguments)
    with pytest.raises(error, match=said) as explained:
        tuned.explain(apply_rotary_pos_emb, *arguments, gpu=H200)
    assert str(called.value) == str(explained.value)


def test_a_packed_norm_is_refused_as_the_call_refuses_it() -> None:
    qkv, ones, freqs = torch.randn(2, 5, 3, 2, 8), torch.ones(8), torch.rand(8, 8)
    for wrong in ({"inplace": True}, {"kv_heads": 0}, {"norm": "token"}):
        with pytest.raises((TypeError, ValueError)) as called:
            dispatch.qkv_norm_rope_(qkv, ones, ones, freqs, **wrong)
        with pytest.raises(type(called.value)) as explained:
            tuned.explain(dispatch.qkv_norm_rope_, qkv, ones, ones, freqs, gpu=H200, **wrong)
        assert str(called.value) == str(explained.value)


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for TUNED_TABLES with the record of a card that has no rows for RoPE."""
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
