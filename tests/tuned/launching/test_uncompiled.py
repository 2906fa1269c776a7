"""A kernel that does not compile: PyTorch's operators serve its calls, it is said once, and it is not tried again."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import tuned
import tuned.calls.gru.project
import tuned.calls.gru.run
import tuned.calls.rope.saved
import tuned.explanation
import tuned.launching.launcher
import tuned.launching.uncompiled
from tests.fuzz import draw
from tests.fuzz.interpreted import interpreted_families
from tests.fuzz.worlds import FAMILIES, KERNELS, ROPE, assert_right
from tests.support.rope_calls import Watch, watch
from tuned.dispatch import rope
from tuned.explanation import Explanation
from tuned.families.launch import Launch
from tuned.launching.launcher import launch_public
from tuned.launching.uncompiled import UncompiledError

__all__ = ["watch"]
KERNEL = "rope_bshd_copy_half_cos_sin"
ERRORS = {
    "a pass": RuntimeError("PassManager::run failed"),
    "shared memory": OutOfResources(300_000, 232_448, "shared memory"),
    "the assembler": PTXASError("ptxas exit code 255"),
    "the front end": CompilationError("", None, "no such thing"),
}


class Function:
    """A @triton.jit function that cannot be launched."""

    def __init__(self, error: Exception) -> None:
        self.error, self.tried = error, 0

    def __getitem__(self, _grid: Any) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.tried += 1
        raise self.error


def parameters_of_ours(kernel: str) -> tuple[bool, ...]:
    assert kernel == KERNEL, "no other kernel is looked up by its name"
    return (True,) * 9


@pytest.fixture(autouse=True)
def _none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.launching.uncompiled, "_UNCOMPILED", {})
    monkeypatch.setattr("tuned.launching.plan._specialised", parameters_of_ours)


def part(size: int = 16, kernel: str = KERNEL) -> Launch:
    return Launch(kernel, 1, (torch.zeros(size), size), {"N": 4}, {"num_warps": 1})


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_it_is_said_once_and_not_tried_again(error: Exception) -> None:
    function = Function(error)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (16, 16, 32, 17):  # the last is compiled anew
            with pytest.raises(UncompiledError):
                launch_public(function, part(size))
    assert [warning.category for warning in said] == [tuned.TunedWarning]
    assert re.search(f"cannot compile {KERNEL} .*PyTorch's own operators serve", str(said[0].message))
    assert said[0].filename == __file__
    assert function.tried == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: invalid argument"), ValueError("x"), OSError(28, "full")]
)
def test_other_errors_are_raised_as_they_are(error: Exception) -> None:
    function = Function(error)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            launch_public(function, part())
        assert raised.value is error
    assert function.tried == 2


@pytest.mark.filterwarnings("error")
def test_whoever_writes_a_kernel_is_told_what_the_compiler_says() -> None:
    error = ERRORS["a pass"]
    with pytest.raises(RuntimeError) as raised:
        launch_public(Function(error), part(kernel="somebodys_softmax"))
    assert raised.value is error


def test_a_kernel_from_outside_is_launched_after_one_of_ours_did_not_compile() -> None:
    """The plan of our kernels finds parameters by name; a kernel from outside has them at other places."""
    with pytest.warns(tuned.TunedWarning), pytest.raises(UncompiledError):
        launch_public(Function(ERRORS["a pass"]), part())
    launched: list[Any] = []
    launch_public({(1,): lambda *given, **named: launched.append((given, named))}, part(kernel="somebodys_softmax"))
    assert len(launched) == 1


def test_explain_says_that_a_kernel_did_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Explanation("winner", "measured", (KERNEL,), None, 1.0)
    monkeypatch.setattr(tuned.explanation, "_explained", lambda *_, **__: found)
    x = torch.zeros(1, 4, 2, 8)
    assert tuned.explain(rope, x, x) == found
    with pytest.warns(tuned.TunedWarning), pytest.raises(UncompiledError):
        launch_public(Function(ERRORS["the assembler"]), part())
    said = (
        f"in this process Triton cannot compile {KERNEL} for a call (PTXASError: PTXAS error: ptxas exit code 255): PyTorch's own "
        "operators serve that call"
    )
    assert str(tuned.explain(rope, x, x)).splitlines()[-1] == said
    monkeypatch.setattr(
        tuned.explanation, "_explained", lambda *_, **__: dataclasses.replace(found, kernels=("rope_other",))
    )
    assert tuned.explain(rope, x, x).hint is None, "another kernel"


def refuse(*_: Any, **__: Any) -> Any:
    refuse.count += 1  # type: ignore[attr-defined]
    raise UncompiledError("this kernel does not compile")


@pytest.fixture(autouse=True)
def _counted() -> None:
    refuse.count = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["rope", "norm", "cache", "latent", "angles"])
def test_rotations_are_right_where_nothing_compiles(watch: Watch, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    named = {"norm": "NORMED", "cache": "APPENDED", "latent": "LATENT"}
    for name in named.values():
        monkeypatch.setattr(draw, name, float(named.get(kind) == name))
    monkeypatch.setattr("tests.fuzz.draw_rope.LEARNED", float(kind == "angles"))
    monkeypatch.setattr(tuned.calls.rope.plan, "run_public", refuse)
    monkeypatch.setattr(tuned.calls.rope.saved, "run_steps", refuse)
    world = ROPE if kind == "rope" else dataclasses.replace(KERNELS, kinds=("rope",))
    assert assert_right(dataclasses.replace(world, truncates=False), range(40), 2) > 60
    assert refuse.count > 10  # type: ignore[attr-defined]
    assert not watch.direct


def test_recurrent_calls_are_right_where_nothing_compiles() -> None:
    # The fixture monkeypatch would end after the block, and leave the block's stand-ins for a launch to later tests.
    with interpreted_families(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned.launching.launcher, "launch_public", refuse)
        for module in (tuned.calls.gru.run, tuned.calls.gru.project):
            patch.setattr(module, "launch_known", refuse)
        assert assert_right(dataclasses.replace(FAMILIES, truncates=False), range(30), 2) > 50
    assert refuse.count > 10  # type: ignore[attr-defined]
