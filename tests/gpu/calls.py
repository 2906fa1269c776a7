"""Complete RoPE calls on a GPU, through the public call and autograd, against the oracle; in separate processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.support import pairwise
from tests.support.rope_case import Built, assert_close, assert_memory_right, build, canonical, wanted
from tests.support.rope_rows import AXES, case_of, given_of, possible, row_id, settings_of
from tests.support.run import to_numpy
from tuned.calls.rope.call import call

TIMES = 9  # times the tokens of a row of tests/support/rope_rows.py: enough for several tiles of any variant
SEEDS = 3  # calls of one row: from the second on they use the plan of the first
# Sizes of models, and some sizes that no tile divides.
DIMS = ((128, 128), (128, 64), (256, 64), (96, 24), (80, 20), (64, 64), (5, 4))
HEADS = ((32, 8, 0), (8, 1, 0), (28, 4, 0), (5, 0, 2), (3, 0, 0), (1, 3, 0))
ROWS = pairwise.covering(pairwise.sample({**AXES, "dims": DIMS, "heads": HEADS}, possible, pairwise.on_a_gpu(6000)))


def too_few(row: dict[str, Any]) -> bool:
    """Whether the angles are too few for the call, as far as its arguments show without their values."""
    spec = case_of(row).spec
    return row["rows"] == "too few" and spec.positions in ("order", "shifted") and not spec.packed


def run_row(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row: with its calls, and if they are out of place with their gradients."""
    case, wrong = case_of(row, TIMES), []
    for seed in range(SEEDS):
        built = build(dataclasses.replace(case, seed=seed))
        try:
            _forward(built)
            if not case.spec.inplace:
                _backward(built)
        except Exception as error:  # noqa: BLE001 - the other rows still say something
            wrong.append(f"{row_id(row)}, call {seed}: {type(error).__name__}: {error}")
            break
    return wrong


def _results(built: Built, results: Any) -> None:
    outs = results if isinstance(results, tuple) else (results,)
    befores = (None, built.key_before) if built.key_before is not None else (None,)
    for out, before in zip(outs, befores, strict=True):
        assert_close(to_numpy(canonical(out, built.case.spec.layout)), *wanted(built, before))


def _unchanged(built: Built) -> None:
    for name, base in built.bases.items():
        assert torch.equal(base.nan_to_num(), built.before[name].nan_to_num()), f"{name} was changed"


def _forward(built: Built) -> None:
    given = given_of(built)
    results = call(*given, tuple(settings_of(built)))
    _results(built, results)
    if built.case.spec.inplace:
        assert_memory_right(built)
        outs = results if isinstance(results, tuple) else (results,)
        assert all(a is b for a, b in zip(outs, (given.x, given.key), strict=False)), "another tensor came back"
    else:
        _unchanged(built)


def _backward(built: Built) -> None:
    """Gradients: the transpose applied to the results' gradients, compared with the oracle as a separate call."""
    spec = built.case.spec
    turned = "backward" if spec.direction == "forward" else "forward"
    case = dataclasses.replace(built.case, spec=dataclasses.replace(spec, direction=turned), seed=built.case.seed + 10)
    transposed = build(case)
    # The seed draws the same angles and positions again, besides the tensors.
    transposed = dataclasses.replace(transposed, cos=built.cos, sin=built.sin)
    given = given_of(built)
    leaves = [t.detach().requires_grad_() for t in (given.x, given.key) if t is not None]
    results = call(*given._replace(x=leaves[0], key=leaves[1] if len(leaves) > 1 else None), tuple(settings_of(built)))
    arriving = [t for t in (transposed.call.x, transposed.call.key) if t is not None]
    outs = results if isinstance(results, tuple) else (results,)
    _results(transposed, torch.autograd.grad(outs, leaves, arriving))
    _unchanged(built)
    _unchanged(transposed)


def refused(row: dict[str, Any]) -> bool:
    """Whether a call with too few angles raises and writes nothing."""
    built = build(case_of(row, TIMES))
    try:
        call(*given_of(built), tuple(settings_of(built)))
    except ValueError as error:
        _unchanged(built)
        return "too short" in str(error)
    return False
