"""One call of the GRU gates with tensors of any shape in memory, held against the oracle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.measuring.guard import guarded, intact
from tests import oracle
from tests.rope_case import assert_close
from tests.run import DEVICE, INTERPRETED, addresses, run, to_numpy, truncates, watched
from tuned.gru_cell.launches import GruCellCall, launches

if TYPE_CHECKING:
    from tests.run import Traffic
    from tuned.gru_cell.spec import GruCellSpec
    from tuned.gru_cell.variant import GruCellVariant


@dataclasses.dataclass(frozen=True)
class GruCase:
    """What a call is given besides its spec."""

    spec: GruCellSpec
    batch: int
    view: str = "contiguous"  # or "wide": rows of gates and h apart; or "transposed": h by columns
    scale: float = 1.0  # of the gates: large ones drive the sigmoids and tanh to their ends
    seed: int = 0


def build(case: GruCase) -> tuple[GruCellCall, dict[str, Any]]:
    """The call, and the guarded tensors below its tensors."""
    spec, dtype = case.spec, getattr(torch, case.spec.dtype)
    draw = torch.Generator().manual_seed(case.seed)
    bases: dict[str, Any] = {}

    def tensor(name: str, shape: tuple[int, ...], scale: float, *, columns: bool = False) -> Any:
        if case.view == "wide" and len(shape) > 1:
            bases[name] = guarded((shape[0], shape[1] + 5), dtype, DEVICE)
            view = bases[name][:, : shape[1]]
        elif case.view == "transposed" and columns:
            bases[name] = guarded(shape[::-1], dtype, DEVICE)
            view = bases[name].t()
        else:
            view = bases[name] = guarded(shape, dtype, DEVICE)
        return view.copy_(torch.randn(shape, generator=draw) * scale) if scale else view

    wide = 3 * spec.hidden
    h = tensor("h", (case.batch, spec.hidden), 1.0, columns=True)
    call = GruCellCall(
        gates_x=tensor("gates_x", (case.batch, wide), case.scale),
        gates_h=tensor("gates_h", (case.batch, wide), case.scale),
        h=h,
        out=h if spec.inplace else tensor("out", (case.batch, spec.hidden), 0.0, columns=True),
        batch=case.batch,
        bias_ih=tensor("bias_ih", (wide,), 1.0) if spec.bias else None,
        bias_hh=tensor("bias_hh", (wide,), 1.0) if spec.bias else None,
    )
    return call, bases


def wanted(spec: GruCellSpec, call: GruCellCall) -> tuple[np.ndarray, np.ndarray]:
    """h' and the error allowed, from the tensors as they are now."""
    no_bias = np.zeros(3 * spec.hidden)
    biases = (to_numpy(call.bias_ih), to_numpy(call.bias_hh)) if spec.bias else (no_bias, no_bias)
    out, arithmetic = oracle.gru_gates(to_numpy(call.gates_x), to_numpy(call.gates_h), to_numpy(call.h), *biases)
    return out, oracle.gru_tolerance(out, arithmetic, spec.dtype, truncates=truncates(spec.dtype))


def assert_right(case: GruCase, variant: GruCellVariant) -> torch.Tensor:
    """Run a case and hold it against the oracle; returns h'."""
    call, bases = build(case)
    before = {name: base.clone() for name, base in bases.items()}
    want = wanted(case.spec, call)
    steps = launches(case.spec, variant, call)
    if INTERPRETED:
        with watched() as traffic:
            run(steps)
        assert_traffic_right(case, call, traffic)
    else:
        run(steps)
    assert_close(to_numpy(call.out), *want)
    written = "h" if case.spec.inplace else "out"
    for name, base in bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        if name != written:
            assert torch.equal(base.nan_to_num(nan=7.5), before[name].nan_to_num(nan=7.5)), f"{name} was changed"
    return call.out  # type: ignore[no-any-return]


def assert_traffic_right(case: GruCase, call: GruCellCall, traffic: Traffic) -> None:
    """No address outside the tensors, each element of h' written once, and no race in place."""
    loaded, stored = traffic.loaded(), traffic.stored()
    out, h = addresses(call.out).ravel(), addresses(call.h).ravel()
    assert np.array_equal(np.sort(stored[:, 0]), np.sort(out)), "not every element of h' is written once"
    tensors = (call.gates_x, call.gates_h, call.h, call.bias_ih, call.bias_hh)
    allowed = np.concatenate([addresses(t).ravel() for t in tensors if t is not None])
    assert np.isin(loaded[:, 0], allowed).all(), "a load outside every tensor of the call"
    if case.spec.inplace:
        from_h = loaded[np.isin(loaded[:, 0], h)]
        reader = {address: (program, order) for address, program, order in from_h.tolist()}
        assert len(reader) == len(from_h), "an element of h is read twice"
        for address, program, order in stored.tolist():
            reading_program, read = reader[address]
            assert reading_program == program, "a program writes what another reads"
            assert read < order, "a program writes an element before it reads it"
