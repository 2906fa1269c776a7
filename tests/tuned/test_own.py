"""A user's own family as a function: which calls get a kernel, which PyTorch's operators, and that both are right."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
import tuned.own
from tests.support.outside import changed, copied, tune
from tuned.families.outside import load
from tuned.launching.rehearsal import Heard, listen
from tuned.lookup.lookup import Choice, Gpu
from tuned.lookup.table import Row

if TYPE_CHECKING:
    from pathlib import Path

GPU = Gpu("test_gpu", 90, 132, "Test GPU")


# Kernels are interpreted where there is no GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def kernel_rows(*shape: int) -> torch.Tensor:
    return rows(*shape, device=DEVICE)


@pytest.fixture
def module(tmp_path: Path) -> Any:
    return load(str(copied("softmax", tmp_path)))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose kernels have been generated."""
    file = copied("softmax", tmp_path_factory.mktemp("rendered"))
    done = tune(file.parent, "--family", file.name, "--render")
    assert done.returncode == 0, done.stdout + done.stderr
    return file


@pytest.fixture
def served(rendered: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same family in a process that treats the CPU as its GPU: kernels run in Triton's interpreter."""
    monkeypatch.setattr(tuned.own, "why_eager", lambda _t, **_: None)
    monkeypatch.setattr(tuned.own, "gpu_of", lambda _: GPU)
    monkeypatch.setattr(tuned.own, "modes", lambda device: (False, device))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    found = load(str(rendered))
    monkeypatch.setattr(found.softmax, "_learn", lambda *_: None)
    return found


@pytest.fixture
def rendered_rmsnorm(served: Any, tmp_path: Path) -> Any:
    """An RMSNorm whose kernels have been generated, served as softmax is."""
    del served
    file = copied("rmsnorm", tmp_path)
    assert tune(tmp_path, "--family", file.name, "--render").returncode == 0
    return load(str(file)).rmsnorm


def test_a_cpu_gets_the_operators(module: Any) -> None:
    x = rows(2, 3, 40)
    assert torch.equal(module.softmax(x), torch.softmax(x, -1))
    found = tuned.explain(module.softmax, x)
    assert (found.rule, found.kernels) == ("eager", ())
    assert "on cpu" in found.why


def test_gradients_of_the_operators(module: Any) -> None:
    x = rows(3, 40).double().requires_grad_()
    assert torch.autograd.gradcheck(module.softmax, (x,))


@pytest.mark.compiler
def test_torch_compile_traces_the_operators(module: Any) -> None:
    x = rows(3, 40)
    compiled = torch.compile(lambda x: module.softmax(2 * x) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.softmax(2 * x, -1) + 1)


def test_transforms_copies_and_pickles(module: Any) -> None:
    x = rows(3, 40)
    torch.testing.assert_close(torch.func.vmap(module.softmax)(x), torch.softmax(x, -1))
    for other in (copy.deepcopy(module.softmax), pickle.loads(pickle.dumps(module.softmax))):
        assert torch.equal(other(x), module.softmax(x))


def test_without_operators_a_call_that_no_kernel_takes_is_an_error(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path)
    file.write_text(file.read_text() + "\ndel eager\n")
    with pytest.raises(TypeError, match=r"no kernel of .* can serve this call, the tensors are on cpu.* has no eager"):
        load(str(file)).softmax(rows(3, 40))


def test_without_kernels_the_operators_serve_and_explain_says_how_to_get_them(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned.own, "why_eager", lambda _t, **_: None)
    found = tuned.explain(module.softmax, rows(3, 40))
    assert found.rule == "eager"
    assert "no kernel of softmax was rendered yet: python tune.py --family" in found.why


@pytest.mark.interpreter
@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced", "expanded"])
def test_a_kernel_serves_any_strides(served: Any, view: str) -> None:
    x = {
        "contiguous": kernel_rows(3, 2, 40),
        "transposed": kernel_rows(40, 2, 3).permute(2, 1, 0),
        "sliced": kernel_rows(3, 2, 90)[..., 1:81:2],
        "expanded": kernel_rows(3, 1, 40).expand(3, 2, 40),
    }[view]
    found = tuned.explain(served.softmax, x)
    assert (found.rule, found.kernels) == ("default", ("softmax_split",))
    torch.testing.assert_close(served.softmax(x), torch.softmax(x, -1))


@pytest.mark.interpreter
def test_what_only_operators_can_do_they_do(served: Any) -> None:
    x = kernel_rows(3, 40)
    assert tuned.explain(served.softmax, x[:0]).why == "a tensor is empty"
    z = torch.randn(3, 40, dtype=torch.complex64, device=DEVICE).conj().imag
    assert tuned.explain(served.softmax, z).why == "a tensor is a lazy negation or conjugate"
    torch.testing.assert_close(served.softmax(z), torch.softmax(z, -1))
    y = x.clone().requires_grad_()
    served.softmax(y).square().sum().backward()
    wanted = x.clone().requires_grad_()
    torch.softmax(wanted, -1).square().sum().backward()
    torch.testing.assert_close(y.grad, wanted.grad)
    with torch.autocast("cuda", enabled=True) if torch.cuda.is_available() else contextlib.nullcontext():
        torch.testing.assert_close(served.softmax(x), torch.softmax(x, -1))


@pytest.mark.interpreter
def test_named_tensors_are_arguments_like_any_other(rendered_rmsnorm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rmsnorm = rendered_rmsnorm
    monkeypatch.setattr(rmsnorm, "_learn", lambda *_: None)
    x, weight = kernel_rows(3, 40), kernel_rows(40)
    wanted = torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)
    for found in (rmsnorm(x, weight=weight), rmsnorm(x=x, weight=weight), rmsnorm(weight=weight, x=x, eps=1e-6)):
        torch.testing.assert_close(found, wanted)
    leaf = weight.clone().requires_grad_()
    for found in (rmsnorm(x, leaf), rmsnorm(x, weight=leaf), rmsnorm(x=x, weight=leaf)):
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
        torch.testing.assert_close(gradient, (wanted / weight).sum(0))
    assert tuned.explain(rmsnorm, x, weight=leaf).why == tuned.own.GRADIENT
    for wrong in ({"x": x}, {}):
        with pytest.raises(TypeError, match="missing"):
            rmsnorm(**wrong)


@pytest.mark.interpreter
def test_numbers_that_are_equal_and_of_another_kind_are_other_calls(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel launched for the integer 1 divides by it differently than by 1.0 or True."""
    monkeypatch.setattr(tuned.own, "modes", lambda device: (False, device))
    x = torch.zeros(2, 3)
    for given in (lambda n: ((x, n), {}), lambda n: ((x,), {"scale": n})):
        for alike in ((1, 1.0, True), (0.0, -0.0), ((1,), (1.0,), (True,)), ((0.0, 2), (-0.0, 2))):
            keys = [module.softmax._key(*given(n)) for n in alike]
            assert len(set(keys)) == len(alike)
            assert keys == [module.softmax._key(*given(n)) for n in alike]


def test_a_gradient_of_the_family_is_used(rendered: Path, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del rendered
    asked = []

    def gradient(above: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        asked.append(tuple(x.shape))
        y = torch.softmax(x, -1)
        return (y * (above - (y * above).sum(-1, keepdim=True)),)

    monkeypatch.setattr(served, "gradient", gradient, raising=False)
    x = kernel_rows(3, 40).requires_grad_()
    served.softmax(x).square().sum().backward()
    wanted = x.detach().clone().requires_grad_()
    torch.softmax(wanted, -1).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
    assert asked == [(3, 40)]


@pytest.mark.parametrize("bias", [None, torch.ones(2)], ids=["None", "tensor"])
def test_a_gradient_gets_the_arguments_of_the_call_in_their_places(bias: torch.Tensor | None) -> None:
    asked = []

    class Served:
        """Stands for a family whose kernel serves every call."""

        @staticmethod
        def gradient(above: torch.Tensor, *given: Any) -> tuple[Any, ...]:
            asked.append(given)
            x, _, _, scale = given
            return above * scale, None, None, above * x

        module = types.SimpleNamespace(gradient=gradient)

        def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, eps: float, scale: torch.Tensor) -> torch.Tensor:
            del bias, eps
            return x * scale

    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    out = tuned.own._Differentiable.apply(Served(), x, bias, 1e-6, scale)
    out.sum().backward()
    assert [*map(_told, asked[0])] == [*map(_told, (x, bias, 1e-6, scale))]
    assert (_told(x.grad), _told(scale.grad)) == ([3.0, 3.0], [1.0, 1.0])


def _told(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Recorded:
    """Stands for a direct launch and records its arguments."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def direct(self, launch: Any, _compiled: Any, _device: int) -> Any:
        silent = types.SimpleNamespace(calls=[])
        numbers = tuple(v for v in launch.arguments if not isinstance(v, torch.Tensor))
        rest = (*numbers, *launch.constants.values())
        return tuned.own.DirectLaunch(
            lambda *given: self.given.append(given), 0, (), launch.programs, rest, lambda _: 7, silent, silent
        )


@pytest.fixture
def recorded(served: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorded]:
    told = Recorded()
    monkeypatch.setattr(tuned.own, "direct_launch", told.direct)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(served.softmax, "_learn")
    served.softmax._plans.clear()
    return served, told


@pytest.mark.interpreter
def test_a_known_call_is_its_launches_on_its_own_tensors(recorded: tuple[Any, Recorded]) -> None:
    served, told = recorded
    served.softmax(kernel_rows(3, 2, 40))
    assert not told.given
    x = kernel_rows(3, 2, 40)
    out = served.softmax(x)
    first, second = (given[-10:] for given in told.given)  # three pointers, two numbers, five constants
    x_pointer, out_pointer, parts, count, stride, columns = first[:6]
    assert (x_pointer, out_pointer, second[2]) == (x.data_ptr(), out.data_ptr(), parts)
    assert parts not in (x_pointer, out_pointer)
    assert (count, stride, columns, tuple(out.shape), first[-1], second[-1]) == (6, 40, 40, (3, 2, 40), 0, 1)
    served.softmax(kernel_rows(4, 2, 40))
    served.softmax(kernel_rows(3, 2, 41)[..., :40])
    assert len(told.given) == 2, "another length and other strides are looked at again"


class Config:
    """An argument that may change: its hash is its identity."""

    eps = 1e-6


def test_a_call_with_an_argument_that_may_change_has_no_plan(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call launched the numbers that such an argument held before."""
    monkeypatch.setattr(tuned.own, "modes", lambda device: (False, device))
    x = torch.zeros(2, 3)
    for given in (Config(), (1, Config()), [1], x.numpy(), (x,), lambda: 1):
        assert module.softmax._key((x, given), {}) is None
        assert module.softmax._key((x,), {"config": given}) is None
    for given in (None, 3, 0.5, "text", torch.bfloat16, (3, (None, "text"))):
        key = module.softmax._key((x, given), {"named": given})
        assert key is not None
        hash(key)


@pytest.mark.interpreter
def test_what_an_argument_holds_now_counts(recorded: tuple[Any, Recorded], rendered_rmsnorm: Any) -> None:
    rmsnorm, told, config = rendered_rmsnorm, recorded[1], Config()
    x, weight, call = kernel_rows(3, 40), kernel_rows(40), rmsnorm.module.call
    rmsnorm.module.call = lambda x, weight, config: call(x, weight, config.eps)
    for config.eps in (1e-6, 1.0):
        wanted = torch.nn.functional.rms_norm(x, (40,), weight, config.eps)
        torch.testing.assert_close(rmsnorm(x, weight, config), wanted)
    assert not told.given


@pytest.mark.interpreter
def test_a_call_that_a_row_leaves_is_known_again(
    recorded: tuple[Any, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, asked = recorded[0], []
    row = Row(None, None, None, None, 2.0, "a table")

    def choose(*_: Any) -> Choice:
        asked.append(1)
        return Choice("eager", "PyTorch's own took less", None, row)

    monkeypatch.setattr(tuned.own, "choose", choose)
    for _ in range(3):
        x = kernel_rows(3, 2, 40)
        assert torch.equal(served.softmax(x), torch.softmax(x, -1))
    assert len(asked) == 1
    with listen(heard := Heard()):
        served.softmax(kernel_rows(3, 2, 40))
    assert list(heard.left) == ["softmax of [3, 2, 40] float32: PyTorch's own took less"]


@pytest.mark.interpreter
def test_what_is_copied_first_is_copied_each_time(recorded: tuple[Any, Recorded]) -> None:
    served, told = recorded
    for _ in range(2):
        x = kernel_rows(40, 3).t()
        torch.testing.assert_close(served.softmax(x), torch.softmax(x, -1))
    assert not told.given
    assert not served.softmax._plans


@pytest.mark.interpreter
def test_what_was_called_beside_another_device_is_looked_at_again(
    recorded: tuple[Any, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, told = recorded
    monkeypatch.setattr(tuned.own, "modes", lambda device: (False, device + 1))
    for _ in range(2):
        served.softmax(kernel_rows(3, 40))
    assert not told.given


@pytest.mark.interpreter
def test_two_arguments_over_one_memory_are_looked_at_each_time(
    recorded: tuple[Any, Recorded], rendered_rmsnorm: Any
) -> None:
    rmsnorm, told = rendered_rmsnorm, recorded[1]
    weight = kernel_rows(40)
    for _ in range(2):
        found = rmsnorm(weight.view(1, 40), weight)
        torch.testing.assert_close(found[0], torch.nn.functional.rms_norm(weight, (40,), weight, 1e-6))
    assert not rmsnorm._plans
    x = kernel_rows(1, 40)
    rmsnorm(x, weight)
    rmsnorm(x, weight)
    (given,) = told.given
    assert given[-11:-9] == (x.data_ptr(), weight.data_ptr()), "before the result, three numbers and five constants"


def test_a_broken_description_is_an_error_at_the_first_call(tmp_path: Path) -> None:
    file = changed(copied("softmax", tmp_path), ('TEXT = ("strategy",)', "TEXT = 3"))
    with pytest.raises(TypeError):
        _ = load(str(file)).softmax.family
