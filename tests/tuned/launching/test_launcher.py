"""Each kind of step in a call does what it says and nothing else."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned.launching.launcher
from tuned.families.launch import Copy, Fill, Launch, Product
from tuned.launching.launcher import as_integers, run_step, unwrapped

if TYPE_CHECKING:
    from tuned.families.launch import Step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("bits", [0, -1])
def test_a_fill_sets_every_bit_of_a_tensor_of_any_strides(dtype: torch.dtype, bits: int) -> None:
    whole = torch.full((4, 3, 6), 5, dtype=dtype)
    part = whole.transpose(0, 1)[:, 1:3, ::2]
    run_step(Fill(part, bits))
    ones = (1 << 8 * part.element_size()) - 1
    wanted = 0 if bits == 0 else ones
    assert all(int(word) & ones == wanted for word in as_integers(part).flatten())
    assert int((as_integers(whole) == as_integers(torch.tensor(5, dtype=dtype))).sum()) == whole.numel() - part.numel()


def test_a_product_is_written_where_it_should_be() -> None:
    a, b = torch.randn(5, 3), torch.randn(4, 3)
    out = torch.zeros(5, 8)
    run_step(Product(a, b, out[:, 2:6]))
    torch.testing.assert_close(out[:, 2:6], a @ b.t())
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


def test_a_copy_takes_any_strides() -> None:
    x, out = torch.randn(4, 6), torch.zeros(6, 4)
    run_step(Copy(x.t(), out))
    assert torch.equal(out, x.t())


def test_a_launch_is_public_unless_another_way_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch("a_kernel", 3, (1, 2), {"N": 4}, {"num_warps": 1})
    seen: list[Any] = []
    monkeypatch.setattr(tuned.launching.launcher, "kernel", lambda name: f"the kernel {name}")
    monkeypatch.setattr(tuned.launching.launcher, "launch_public", lambda function, part: seen.append((function, part)))
    steps: list[Step] = [launch, Fill(torch.zeros(1), 0)]
    for step in steps:
        run_step(step)
    assert seen == [("the kernel a_kernel", launch)]
    run_step(launch, seen.append)
    assert seen[1:] == [launch]


def test_on_an_amd_gpu_no_launch_tells_the_compiler_that_a_tensor_is_small() -> None:
    """Triton marks such a tensor, which would be part of the kernel's key and make its offsets 32 bits."""
    backend = pytest.importorskip("triton.backends.amd.compiler").HIPBackend
    tensor = torch.zeros(16)
    assert "S" in backend.get_tensor_specialization(tensor, align=True)
    with tuned.launching.launcher._offsets_of_64_bits():
        assert "S" not in backend.get_tensor_specialization(tensor, align=True)
    assert "S" in backend.get_tensor_specialization(tensor, align=True)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_launch_on_an_amd_gpu_compiles_for_tensors_of_any_size(
    hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    before, seen = triton.knobs.amd.use_buffer_ops, []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **named: seen.append((grid, arguments, named, triton.knobs.amd.use_buffer_ops))

    monkeypatch.setattr(torch.version, "hip", hip)
    tuned.launching.launcher.launch_public(Kernel(), Launch("a_kernel", 3, (1, 2), {"N": 4}, {"num_warps": 1}))
    assert seen == [((3,), (1, 2), {"N": 4, "num_warps": 1}, before and hip is None)]
    assert triton.knobs.amd.use_buffer_ops == before


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_probe_may_wait_where_nothing_else_may(monkeypatch: pytest.MonkeyPatch, mode: int, *, broken: bool) -> None:
    """A probe works under torch.cuda.set_sync_debug_mode("error"), which users set to find where a model waits.

    The default mode, 0, is not set again, because torch warns in each process that sets a mode.
    """
    module, modes = tuned.launching.launcher, [mode]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    genuine = module.probe_launch
    monkeypatch.setattr(module, "probe_launch", lambda _device: genuine("cpu"))
    monkeypatch.setattr(module, "kernel", lambda _name: None)
    monkeypatch.setattr(module, "launch_public", lambda _kernel, launch: launch.arguments[1].fill_(1.0))

    def direct(compiled: torch.Tensor, _device: int) -> Any:
        assert modes[-1] == 0
        if broken:
            raise TypeError("of another Triton")
        return lambda _programs, _values: compiled.fill_(1.0)

    monkeypatch.setattr(module, "direct_launcher", direct)
    assert module._probe(0) is not broken
    assert modes == ([mode, 0, mode] if mode else [0])


class Spreading:
    """A launcher as in Triton 3.6: its facts about the kernel, then the values one by one."""

    launch_pdl, scratch = True, None

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.launch = lambda *given: self.launched.append(given)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_pdl, self.scratch, *given)


class Gathering(Spreading):
    """A launcher as in Triton 3.7: the values in one tuple."""

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, a: Any, b: Any, c: Any, d: Any, *given: Any
    ) -> None:
        self.launch(x, y, z, stream, function, self.launch_pdl, a, b, c, d, given)


class Allocating(Spreading):
    """A launcher that adds another argument to each launch."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        self.launch(x, y, z, stream, function, object(), *given)


class Turning(Spreading):
    """A launcher that passes the values in another order."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        self.launch(x, y, z, stream, function, *reversed(given))


class Other(Spreading):
    """A launcher that takes other arguments."""

    def __call__(self, grid: Any, *given: Any) -> None:
        raise TypeError(grid, given)


@pytest.mark.parametrize("kind", [Spreading, Gathering, Allocating, Turning, Other])
def test_a_launcher_is_left_out_only_where_the_c_function_gets_what_it_would_get(kind: type[Spreading]) -> None:
    wrapper = kind()
    compiled = types.SimpleNamespace(run=wrapper, function=77, packed_metadata=("metadata",))
    run, head = unwrapped(compiled)
    assert (run is wrapper) == (kind in (Allocating, Turning, Other))
    assert wrapper.launched == [], "asking launches nothing"
    if kind in (Spreading, Gathering):
        run(9, 1, 1, 123, 77, *head, 1, 2, 3)
        wrapper(9, 1, 1, 123, 77, ("metadata",), None, None, None, 1, 2, 3)
        ours, theirs = wrapper.launched
        assert ours == theirs
        assert ours[-3:] == (1, 2, 3) or ours[-1] == (1, 2, 3)


def test_a_launcher_that_needs_scratch_is_not_left_out() -> None:
    wrapper = Spreading()
    wrapper.global_scratch_size = 128  # type: ignore[attr-defined]
    compiled = types.SimpleNamespace(run=wrapper, function=77, packed_metadata=("metadata",))
    assert unwrapped(compiled) == (wrapper, (("metadata",), None, None, None))
