"""tuned.calls.gru.run without a GPU: stacked weights, lengths, the launches of a call, and where its results go."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.rendering.structures import structures
from tests.support.gru_running import FEATURES, VARIANTS, B, H, T, assert_as_pytorch, call_of, interpreted
from tests.support.run import DEVICE, INTERPRETED
from tuned.calls.gru import run
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, alone, default_variant, rejection
from tuned.families.launch import Launch
from tuned.lookup.lookup import Choice, Gpu

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.interpreter

__all__ = ["interpreted"]

GPU = Gpu("some_gpu", 90, 132, "Some GPU")


# Weights ------------------------------------------------------------------------------------------------------------


def test_weights_that_lie_evenly_in_one_memory_are_seen_and_not_copied() -> None:
    memory = torch.randn(3, 50)
    parts = [memory[index, 5:45].view(8, 5) for index in range(3)]
    stacked = run.stack(parts)
    assert stacked.data_ptr() == parts[0].data_ptr()
    assert stacked.stride() == (50, 5, 1)
    assert torch.equal(stacked, torch.stack(parts))
    one = run.stack(parts[:1])
    assert one.data_ptr() == parts[0].data_ptr()
    assert one.shape == (1, 8, 5)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.randn(4, 2) for _ in range(3)],
        [*torch.randn(2, 4, 2).unbind(), *torch.randn(1, 4, 2).unbind()],
        [part for index, part in enumerate(torch.randn(4, 4, 2).unbind()) if index != 2],
        list(torch.randn(3, 4, 2).unbind()[::-1]),
        list(torch.randn(3, 2, 4).transpose(1, 2).unbind()),
        [torch.zeros(4, 2)] * 3,
    ],
    ids=["apart", "two memories", "uneven", "backwards", "transposed", "the same"],
)
def test_other_weights_are_copied_together(parts: list[torch.Tensor]) -> None:
    stacked = run.stack(parts)
    assert torch.equal(stacked, torch.stack(parts))
    assert stacked.is_contiguous()
    assert stacked.data_ptr() not in {t.data_ptr() for t in parts}


def test_weights_of_two_memories_are_never_seen_as_one() -> None:
    memory = torch.randn(4, 8)
    halves = [torch.from_numpy(memory.numpy()[:2]), torch.from_numpy(memory.numpy()[2:])]  # one after another
    assert torch.equal(run.stack(halves), memory.view(2, 2, 8))
    assert run.stack(halves).untyped_storage().nbytes() == memory.untyped_storage().nbytes()


def test_a_state_is_taken_as_it_is_only_with_rows_that_are_aligned() -> None:
    memory = torch.randn(4 * 6 * 8 + 1)
    aligned, moved = memory[:-1].view(4, 6, 8), memory[1:].view(4, 6, 8)
    assert aligned.data_ptr() % 16 == 0
    assert run._rows(aligned).data_ptr() == aligned.data_ptr()
    for given in (moved, aligned.transpose(0, 1), aligned[:, :, :4]):
        found = run._rows(given)
        assert torch.equal(found, given)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


# Which launches -----------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[GruSpec], GruVariant | None]], None]:
    """Makes every choice the one that a function of the spec returns; None is eager."""

    def install(variant_of: Callable[[GruSpec], GruVariant | None]) -> None:
        def choose(spec: GruSpec, _size: GruSize, _gpu: Gpu) -> Choice:
            variant = variant_of(spec)
            return Choice("winner" if variant else "eager", f"for {spec}", variant)

        monkeypatch.setattr(run, "_choose", choose)
        monkeypatch.setattr(run, "gpu_of", lambda _device: GPU)

    return install


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are made as while a CUDA graph is captured."""
    monkeypatch.setattr(run, "capturing", lambda _device: True)


def layers_of(call: GruCall) -> list[int]:
    return [spec.layers for spec, _, _ in run._parts(call)]


def test_a_stack_is_one_launch_where_that_is_offered_else_one_a_layer(chosen: Any) -> None:
    chosen(lambda _: GruVariant("persistent"))
    assert layers_of(call_of(layers=3)) == [3]
    assert layers_of(call_of(layers=1)) == [1]
    assert layers_of(call_of(layers=3, directions=2)) == [1, 1, 1], "the backward one needs all of the layer below"
    assert layers_of(call_of(layers=3, dropout=0.5, training=True)) == [1, 1, 1]
    assert layers_of(call_of(layers=3, dropout=0.5)) == [3], "nothing is dropped in evaluation"
    chosen(lambda spec: None if spec.stacked else GruVariant("persistent"))
    assert layers_of(call_of(layers=3)) == [1, 1, 1]


@pytest.mark.parametrize("processors", [4, 24, 132])
def test_a_grid_that_waits_fits_the_gpu(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    gpu = dataclasses.replace(GPU, multiprocessors=processors)
    monkeypatch.setattr(run, "gpu_of", lambda _device: gpu)
    for layout, layers, directions in (("dense", 1, 1), ("packed", 1, 2), ("thd", 3, 1), ("packed", 4, 1)):
        call = call_of(layout, layers, directions)
        for batch in (1, 16, 300):
            wide = dataclasses.replace(call, hx=torch.zeros(layers * directions, batch, 512, device=DEVICE))
            for spec, size, choice in run._parts(wide):
                if choice.variant is None or choice.variant.strategy != "persistent" or alone(spec, choice.variant):
                    continue
                assert run.GRU.rejection(spec, size, choice.variant, 90, processors) is None


def test_a_call_that_nothing_serves_says_why(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(lambda _: None)
    monkeypatch.setattr(run, "why_eager", lambda _x, supported: None if supported else "no kernel takes it")
    assert str(run.why_not(call_of())).startswith("for GruSpec(")
    doubled = dataclasses.replace(call_of(), input=torch.zeros(T, B, FEATURES, dtype=torch.float64))
    assert run.why_not(doubled) == "no kernel takes it"
    chosen(lambda _: GruVariant("persistent"))
    assert run.why_not(call_of()) is None
    chosen(lambda _: GruVariant())
    assert "takes less only in a CUDA graph" in str(run.why_not(call_of()))
    monkeypatch.setattr(run, "capturing", lambda _device: True)
    assert run.why_not(call_of()) is None
    nothing = dataclasses.replace(call_of(), hx=torch.zeros(1, B, 0))
    assert "empty" in str(run.why_not(nothing))


def test_packed_calls_that_take_the_host_longer_than_pytorchs_own_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture the host's time does not count, and with resets there is no other way to serve the call."""
    served = Choice("model", "", GruVariant("persistent"), us=10.0)
    monkeypatch.setattr(run, "_choose", lambda *_: served)
    monkeypatch.setattr(run, "gpu_of", lambda _device: GPU)
    monkeypatch.setattr(run, "why_eager", lambda *_: None)
    for steps, layers, resets, captured, left in (
        (8, 1, False, False, True),
        (8, 3, False, False, False),
        (20, 1, False, False, False),
        (8, 1, True, False, False),
        (8, 1, False, True, False),
    ):
        monkeypatch.setattr(run, "capturing", lambda _device, captured=captured: captured)
        call = dataclasses.replace(
            call_of("packed", layers),
            input=torch.zeros(steps, FEATURES),
            batch_sizes=torch.ones(steps, dtype=torch.int64),
            hx=torch.zeros(layers, 1, H),
            resets=torch.zeros(steps, dtype=torch.bool) if resets else None,
        )
        reason = run.why_not(call)
        assert ("the host 64 for packed sequences" in str(reason)) is left, (steps, layers, resets, captured)


def test_the_precision_is_that_of_torchs_setting() -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert run.spec_of(call_of(), 1)[0].precision == "ieee"
    with torch.backends.cudnn.flags(allow_tf32=True):
        assert run.spec_of(call_of(), 1)[0].precision == "tf32"
        half = dataclasses.replace(call_of(), input=torch.zeros(T, B, FEATURES).half())
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert run.spec_of(half, 1)[0].precision == "tf32", "one spec for 16 bits, whatever the setting"


# Whole calls, by the interpreter --------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru.py has these on a GPU")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("layout", ["dense", "first", "packed", "thd"])
def test_a_call_gives_what_pytorch_gives(
    chosen: Any, interpreted: list[Launch], layout: str, shape: tuple[int, int]
) -> None:
    chosen(lambda _: VARIANTS["persistent"])
    layers, directions = shape
    bias, first = layout in {"dense", "packed"}, layout == "first"
    call = call_of("dense" if first else layout, layers, directions, bias=bias, first=first)
    assert_as_pytorch(call, run.forward(call))
    assert len(interpreted) == (layers if directions == 2 else 1)


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru.py has these on a GPU")
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("strategy", ["steps", "library"])
@pytest.mark.parametrize("layers", [1, 2])
def test_every_strategy_gives_what_pytorch_gives(
    chosen: Any, interpreted: list[Launch], layers: int, strategy: str
) -> None:
    chosen(lambda spec: None if spec.stacked else VARIANTS[strategy])
    for directions in (1, 2):
        interpreted.clear()
        call = call_of(layers=layers, directions=directions)
        assert_as_pytorch(call, run.forward(call))
        per_layer = T * (directions if strategy == "library" else 1)
        assert len(interpreted) == layers * per_layer


@pytest.mark.usefixtures("captured")
@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_gpu_gru.py has these on a GPU")
def test_what_is_between_layers_is_dropped_and_the_first_input_is_not(chosen: Any, interpreted: list[Launch]) -> None:
    chosen(lambda _: VARIANTS["steps"])
    call = call_of(layers=2, dropout=1.0, training=True)
    output, h_n = run.forward(call)
    weights = [torch.zeros_like(w) if index == 4 else w for index, w in enumerate(call.weights)]
    cut = dataclasses.replace(call, weights=tuple(weights), dropout=0.0)
    assert_as_pytorch(cut, (output, h_n))
    assert len(interpreted) == 2 * T


@pytest.fixture
def decided_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of tensors on "meta" are decided as on a GPU."""
    monkeypatch.setattr(run, "gpu_of", lambda _device: GPU)
    monkeypatch.setattr(run, "limit_of", lambda _device: ())


@pytest.mark.usefixtures("decided_for_a_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [37, 128, 540, 1024, 2048, 4096])
def test_what_cu_seqlens_bounds_has_a_kernel_in_a_graph_whatever_its_size(hidden: int, dtype: torch.dtype) -> None:
    """PyTorch's operators would have to read the bounds on the host, which a capture does not allow."""
    made = torch.nn.GRU(8, hidden, device="meta", dtype=dtype)
    for batch in (1, 16, 100):
        x, hx = (torch.empty(*n, device="meta", dtype=dtype) for n in ((batch * 20, 8), (1, batch, hidden)))
        bounds = torch.empty(batch + 1, device="meta", dtype=torch.int32)
        call = gru_call(x, hx, made._flat_weights, cu_seqlens=bounds, max_seqlen=20)
        ((spec, size, choice),) = run._parts(call, captured=True)
        legal = rejection(spec, size, default_variant(spec, size), GPU.capability, GPU.multiprocessors) is None
        assert (choice.variant is not None) or not legal, choice.why
        assert choice.variant is not None or hidden > 1024


@pytest.mark.usefixtures("decided_for_a_gpu")
@pytest.mark.parametrize(
    ("sizes", "settings", "dtype", "left"),
    [
        ((162, 18, 707), {"num_layers": 3}, torch.bfloat16, True),
        ((22, 91, 759), {"bidirectional": True}, torch.float32, True),
        ((462, 294, 130), {}, torch.float32, True),
        ((512, 32, 512), {}, torch.bfloat16, False),
    ],
)
def test_what_a_graph_leaves_to_pytorch_is_set_up_by_a_call_that_kernels_serve(
    sizes: tuple[int, int, int],
    settings: dict[str, Any],
    dtype: torch.dtype,
    left: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN cannot be initialised in a capture, and a call that kernels serve does not initialise it."""
    asked: list[torch.device] = []
    monkeypatch.setattr(run, "library", types.SimpleNamespace(set_up_recurrences=asked.append))
    steps, batch, hidden = sizes
    made = torch.nn.GRU(hidden, hidden, **settings, device="meta", dtype=dtype)
    cells = settings.get("num_layers", 1) * (2 if "bidirectional" in settings else 1)
    x, hx = (torch.empty(*n, hidden, device="meta", dtype=dtype) for n in ((steps, batch), (cells, batch)))
    call = run.wide(gru_call(x, hx, made._flat_weights, **settings), captured=False)
    parts = run._parts(call, captured=False)
    assert all(choice.variant is not None for _, _, choice in parts)
    assert run._alike_in_graph(call, parts) is not left
    assert asked == [x.device] * left


def few_units(layers: int, steps: int, dtype: torch.dtype = torch.bfloat16) -> GruCall:
    """A call of 64 units on the device "meta"."""
    made = torch.nn.GRU(64, 64, layers, device="meta", dtype=dtype)
    x, hx = (torch.empty(n, 3, 64, device="meta", dtype=dtype) for n in (steps, layers))
    return gru_call(x, hx, made._flat_weights, num_layers=layers)


@pytest.mark.usefixtures("decided_for_a_gpu")
def test_layers_of_few_units_are_launched_one_by_one_where_that_takes_less() -> None:
    for layers, steps, captured, one_by_one in (
        (2, 500, False, True),
        (2, 500, True, True),
        (3, 16, False, False),
        (9, 500, True, False),
    ):
        parts = run._parts(few_units(layers, steps), captured=captured)
        assert len(parts) == (layers if one_by_one else 1), (layers, steps)
        assert all(choice.variant.by_row is one_by_one for _, _, choice in parts)


@pytest.mark.usefixtures("decided_for_a_gpu")
def test_layers_of_a_short_call_are_left_where_pytorchs_own_is_one_launch_each() -> None:
    """The kernels took a host 397 us and nn.GRU 356; in a graph they took 77 and 101."""
    for steps, layers, captured, served in (
        (60, 2, False, False),
        (60, 2, True, True),
        (60, 1, False, True),
        (500, 2, False, True),
    ):
        (*_, choice), *_ = run._parts(few_units(layers, steps, torch.float32), captured=captured)
        assert (choice.variant is not None) == served, (steps, layers, captured, choice)
        assert served or "one launch a layer" in choice.why


@pytest.mark.parametrize("shape", [(0, B), (T, 0)], ids=str)
def test_no_token_at_all_leaves_the_state(shape: tuple[int, int]) -> None:
    call = call_of()
    empty = dataclasses.replace(call, input=torch.zeros(*shape, FEATURES), hx=torch.randn(1, shape[1], H))
    output, h_n = run.forward(empty)
    assert output.shape == (*shape, H)
    assert torch.equal(h_n, empty.hx)
    assert h_n.data_ptr() != empty.hx.data_ptr() or not h_n.numel()
    assert run.choice_of(empty)[0].rule == "eager"


# Keys of compiled kernels ---------------------------------------------------------------------------------------------


def test_steps_and_sizes_compile_nothing_anew() -> None:
    for name, kernel in structures().items():
        if name.startswith(("gru_dense", "gru_packed", "gru_thd")):
            sets = '"sets", ' if "turns" in name or "backward" in name else ""
            tokens = '"tokens", ' if "backward" in name else ""
            expected = f'@triton.jit(do_not_specialize=[{tokens}"batch", "seq", {sets}"t_begin", "t_end"])'
            if "row" in name:
                expected = '@triton.jit(do_not_specialize=["batch", "seq", "weight_hh_stride_k"])'
            assert expected in kernel.source
