"""The faster interpreter of the tests gives and refuses what Triton's interpreter does."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.pythons import python

pytestmark = pytest.mark.interpreter


def told(how: str) -> dict[str, str]:
    """What a process says of the kernels. Tests use the faster interpreter, so it takes a process to see Triton's."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "tests.support.interpreting", how, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_interpreter_in_less_time_gives_and_refuses_the_same() -> None:
    wanted = told("as it is")
    assert told("quick") == wanted
    assert wanted["add most torch.int8"] == "[2, 3, 4, -128]", "of an overflow Triton says nothing"
    assert "Cannot make_shape_compatible" in wanted["shapes 2 torch.float32"]
    assert "power of 2" in wanted["no power of two"]
    assert sum("Error" in text for text in wanted.values()) < len(wanted) / 2
