"""That every fault still applies; that its tests fail is what ``python -m tests.faults`` says."""

from __future__ import annotations

import ast
import contextlib
import functools
import types
from pathlib import Path
from typing import Any

import pytest

from tests.faults.__main__ import caught, shares
from tests.faults.listed import FAULTS, ROOT, Fault, faulty

LEAST = 60
COVERED = (
    "templates/rope,templates/sincos",
    "templates/gru",
    "templates/linear_cat",
    "tuned/families/",
    "tuned/lookup/",
    "tuned/launching/",
    "tuned/calls/rope/",
    "tuned/calls/gru/",
    "tuned/calls/gru_cell/",
    "tuned/calls/linear_cat/",
    "tuned/compat/",
    "tuned/nn.py",
    "tuned/dispatch.py",
    "generator/families/",
    "generator/rendering/",
    "generator/measuring/",
    "generator/processes/",
    "generator/storage/",
    "generator/searching/",
    "generator/estimating/",
    "generator/evaluation/",
    "generator/publishing/",
    "generator/reporting/",
    "generator/commands.py",
    "benchmarks/",
    "tests/fuzz/",
    "examples/",
)


@functools.cache
def functions(path: Path) -> frozenset[str]:
    """The tests of a file."""
    return frozenset(node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(node, "name"))


def test_there_are_enough_each_of_one_name_and_in_every_package() -> None:
    assert len(FAULTS) >= LEAST
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS)
    for package in COVERED:
        assert any(fault.file.startswith(tuple(package.split(","))) for fault in FAULTS), f"no fault in {package}"


@functools.cache
def tree(file: str) -> str:
    """What a file means as it stands: some have many faults."""
    return ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.thinned_on_gpu(every=10)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_is_python(fault: Fault) -> None:
    changed = faulty(fault)
    # A template is valid Python as it stands. The trees differ: it is more than a comment.
    assert ast.dump(ast.parse(changed)) != tree(fault.file)
    assert fault.would.endswith(".")
    assert fault.render == fault.file.startswith("templates/")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert function.partition("[")[0] in functions(ROOT / path)


FAULT = Fault("one", "a.py", "x = 1\n", "x = 2\n", ("tests/test_a.py::test_a",), "Nothing.")


@pytest.mark.parametrize("text", ["x = 1\nx = 1\n", "x = 3\n"])
def test_a_text_that_is_there_twice_or_not_at_all_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"must occur once in a\.py, found [02]"):
        faulty(FAULT, tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (1, "F\nFAILED tests/test_a.py::test_a - assert 2 == 1\n1 failed", "caught"),
        (0, "1 passed", "SURVIVED"),
        (0, "1 skipped", "SURVIVED"),
        (1, "ERROR tests/test_a.py::test_a - a fixture\n1 error", "no verdict"),
        (2, "ERROR tests/test_a.py - NameError\n1 error", "no verdict"),
        (4, "ERROR: not found: tests/test_a.py::test_a", "no verdict"),
        (5, "no tests ran", "no verdict"),
        (None, "", "no verdict"),  # it hung
    ],
)
def test_a_fault_is_caught_by_a_test_that_fails_and_by_nothing_else(
    tmp_path: Path, code: int | None, output: str, verdict: str
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    runs: Any = types.SimpleNamespace(
        copy=lambda _name: contextlib.nullcontext(tmp_path), pytest=lambda *_arguments: (code, output)
    )
    assert caught(runs, FAULT)[0] == verdict
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == "x = 2\n"


def test_tests_of_a_file_are_run_together_and_once() -> None:
    assert shares(["b::2", "a::1", "b::1", "a::1", "c::1"], 2) == [["a::1", "c::1"], ["b::1", "b::2"]]
    assert shares(["a::1"], 2) == [["a::1"]]
