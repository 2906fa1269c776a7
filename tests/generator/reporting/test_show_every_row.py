"""`tune.py show` of every row of the records: a file has all names that it uses, and launches what a call launches."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

from generator.reporting.show import standalone
from generator.storage.record import read_record, recorded_devices
from generator.workload import WORKLOADS
from tests.support.shown_gru import CASES, GRADIENTS, load
from tuned.families.launch import Launch
from tuned.lookup.record import RecordError

if TYPE_CHECKING:
    from pathlib import Path

    from tuned.lookup.record import Winner

GRUS = ("gru", "gru_backward")
IN_FILE = ("EXCHANGE", "PACK")  # constants that a shown function chooses by the GPU and the tensors that it is given


def rows(*families: str) -> list[Winner]:
    """The rows of families, one of each problem and variant, whatever the device."""
    found = {(w.family, w.spec, w.size, w.variant): w for device in recorded_devices() for w in read_record(device)}
    return [w for w in found.values() if w.family in families]


def missing(text: str) -> set[str]:
    """The names that a function of a file loads and nobody gives."""
    parts = [loaded(part) for part in text.split("\n\n\n")]  # two empty lines are between functions
    known = {"torch", "triton", "tl", *vars(builtins), *(name for names, _ in parts for name in names)}
    return {name for _, names in parts for name in names} - known


@functools.cache
def loaded(part: str) -> tuple[frozenset[str], frozenset[str]]:
    """The functions and constants of a part of a file, and the names that its functions load and do not give.

    Files of many rows share parts.
    """
    body = ast.parse(part).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    constants = {t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    found: set[str] = set()
    for function in functions:
        nodes = list(ast.walk(function))
        own = {n.arg for n in nodes if isinstance(n, ast.arg)}
        own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        found |= {n.id for n in nodes if isinstance(n, ast.Name)} - own
    return frozenset({f.name for f in functions} | constants), frozenset(found)


class Recorder:
    """Stands for a kernel in a shown file, and notes its grids, arguments and named arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **named: self.launches.append((grid[0], arguments, named))


def launched(winner: Winner, call: Any, folder: Path) -> list[tuple[int, tuple[Any, ...], dict[str, Any]]]:
    """What the shown function of a GRU launches for a call."""
    (kernel,) = WORKLOADS[winner.family].family.kernel_names(winner.spec, winner.variant)
    module, recorder = load(standalone(winner), folder), Recorder()
    setattr(module, kernel, recorder)
    sizes = torch.full((call.seq,), call.batch) if winner.spec.packed else None
    given = {"batch_sizes": sizes, "cu_seqlens": call.starts}
    function = getattr(module, winner.family)
    function(*(given[p] if p in given else getattr(call, p) for p in inspect.signature(function).parameters))
    return recorder.launches


def plain(argument: Any) -> Any:
    """A number as it is; of a tensor its dtype, shape and strides, for no two kinds of tensors of a call are alike in all."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride()
    return argument


@pytest.mark.parametrize("family", sorted(WORKLOADS))
def test_a_file_has_every_name_that_it_uses_or_is_refused_by_a_sentence(family: str) -> None:
    for winner in rows(family):
        if getattr(winner.spec, "plain", True):
            assert not missing(standalone(winner)), winner.name
        else:
            with pytest.raises(RecordError, match="is a complete RoPE call: show writes out plain ones only"):
                standalone(winner)


@pytest.mark.parametrize("family", GRUS)
def test_a_file_launches_what_a_call_launches(family: str, tmp_path: Path) -> None:
    work, some = WORKLOADS[family], rows(family)
    cases = CASES if family == "gru" else GRADIENTS  # of kinds that no row has, too
    some += [dataclasses.replace(some[0], name=n, spec=spec, variant=v) for n, (spec, v) in cases.items()]
    for winner in some:
        size = dataclasses.replace(winner.size, seq=2)
        call = work.inputs(winner.spec, size, "meta", 0)
        wanted = [s for s in work.family.launches(winner.spec, winner.variant, call) if isinstance(s, Launch)]
        found = launched(dataclasses.replace(winner, size=size), call, tmp_path)
        for (grid, arguments, named), launch in zip(found, wanted, strict=True):
            assert grid == launch.programs, winner.name
            # A call has counters for every variant, a file for its own.
            pairs = [(x, y) for x, y in zip(arguments, launch.arguments, strict=True) if y is not call.counters]
            assert [plain(x) for x, _ in pairs] == [plain(y) for _, y in pairs], winner.name
            assert {name: value for name, value in named.items() if name not in IN_FILE} == launch.options, winner.name
            assert named.get("PACK", 1) == launch.constants.get("PACK", 1), winner.name


def test_every_form_of_a_row_is_shown_and_run() -> None:
    """Those of test_show_gru run in the interpreter."""

    def kind(spec: Any, variant: Any) -> tuple[Any, ...]:
        return variant.strategy, variant.form, variant.in_turn, spec.stacked

    assert {kind(w.spec, w.variant) for w in rows("gru")} <= {kind(*case) for case in CASES.values()}


def test_weights_that_are_not_aligned_are_loaded_one_by_one(tmp_path: Path) -> None:
    winner = next(w for w in rows("gru") if w.variant.by_row)
    call = WORKLOADS["gru"].inputs(winner.spec, dataclasses.replace(winner.size, seq=2), "cpu", 0)
    ((_, _, named),) = launched(winner, call, tmp_path)
    assert named["PACK"] > 1
    flat = torch.zeros(call.weight_hh.numel() + 1, dtype=call.weight_hh.dtype)
    odd = dataclasses.replace(call, weight_hh=flat[1:].view(call.weight_hh.shape))
    ((_, _, named),) = launched(winner, odd, tmp_path)
    assert named["PACK"] == 1
