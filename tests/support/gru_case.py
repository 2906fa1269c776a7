"""One step of a GRU with tensors of any strides, checked against the oracle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.measuring.check import guarded, intact
from generator.measuring.mended import mended_interpreter
from tests.support import oracle
from tests.support.rope_case import assert_close
from tests.support.run import DEVICE, INTERPRETED, addresses, among, run, to_numpy, truncates, watched
from tuned.families.copying import MOST
from tuned.families.gru_cell.launches import GruCellCall, launches
from tuned.families.launch import Launch
from tuned.launching.launcher import run_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.support.run import Traffic
    from tuned.families.gru_cell.spec import GruCellSpec
    from tuned.families.gru_cell.variant import GruCellVariant
    from tuned.families.launch import Step

WATCHED = 64  # the largest hidden size at which every address is checked: millions take a minute


@dataclasses.dataclass(frozen=True)
class GruCase:
    """What a step is given besides its spec."""

    spec: GruCellSpec
    batch: int
    view: str = (
        "contiguous"  # or "wide": rows apart; or "transposed": h by columns, which only the library's form takes
    )
    scale: float = 1.0  # of x and h: large ones drive the sigmoids and tanh to their ends
    seed: int = 0


def build(case: GruCase) -> tuple[GruCellCall, dict[str, Any]]:
    """The call, and the guarded tensors that its tensors are views of."""
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

    wide, scale = 3 * spec.hidden, spec.hidden**-0.5
    x = tuple(tensor(f"x{index}", (case.batch, width), case.scale) for index, width in enumerate(spec.inputs))
    h = tensor("h", (case.batch, spec.hidden), case.scale, columns=True)
    weights = tensor("weight_ih", (wide, spec.input_size), scale), tensor("weight_hh", (wide, spec.hidden), scale)
    out = h if spec.inplace else tensor("out", (case.batch, spec.hidden), 0.0, columns=True)
    biases = [tensor(name, (wide,), 1.0) for name in ("bias_ih", "bias_hh")] if spec.bias else []
    return GruCellCall.of(x, h, *weights, out, *biases), bases


def operand_error(spec: Any) -> float:
    """Relative error of a product of two operands: that of a float32 sum of K terms, and the rounding of operands to TF32.

    The interpreter multiplies the rounded operands exactly. Each is off by 2^-11 at most, and the errors hardly ever all have
    one sign.
    """
    terms = 2.0**-24 * (spec.input_size + 8)
    return terms + (2 * 2.0**-11 if spec.precision == "tf32" else 0.0)


def wanted(spec: GruCellSpec, call: GruCellCall, *, stored: bool) -> tuple[np.ndarray, np.ndarray]:
    """h' and the error allowed, from the present values of the tensors; ``stored``: both products are rounded to the dtype."""
    no_bias = np.zeros(3 * spec.hidden)
    b_ih, b_hh = (to_numpy(call.bias_ih), to_numpy(call.bias_hh)) if spec.bias else (no_bias, no_bias)
    x, h = np.concatenate([to_numpy(t) for t in call.segments], -1), to_numpy(call.h)
    w_ih, w_hh = to_numpy(call.weight_ih), to_numpy(call.weight_hh)
    gates_x, gates_h = x @ w_ih.T, h @ w_hh.T
    out, arithmetic = oracle.gru_gates(gates_x, gates_h, h, b_ih, b_hh)
    half = 0.5 if stored else 0.0
    relative = operand_error(spec) + 2.0**-24 * spec.hidden
    error_x = relative * (np.abs(x) @ np.abs(w_ih).T) + half * oracle.ulp(gates_x, spec.dtype)
    error_h = relative * (np.abs(h) @ np.abs(w_hh).T) + half * oracle.ulp(gates_h, spec.dtype)
    hidden = spec.hidden
    error = error_x + error_h
    g_n = gates_h[:, 2 * hidden :] + b_hh[2 * hidden :]
    # A sigmoid has slope 1/4 and is never off by more than 1, a tanh slope 1 and never off by more than 2.
    error_r, error_z = (np.minimum(0.25 * error[:, i * hidden : (i + 1) * hidden], 1) for i in range(2))
    error_n = np.minimum(error[:, 2 * hidden :] + error_r * np.abs(g_n), 2)
    products = error_n + error_z * (np.abs(h) + 1)
    return out, oracle.gru_tolerance(out, arithmetic + products, spec.dtype, truncates=truncates(spec.dtype))


def run_steps(steps: Iterable[Step]) -> None:
    """Run every step in order, with kernels as the templates render them now."""
    for step in steps:
        run_step(step, lambda launch: run([launch]))


def assert_right(case: GruCase, variant: GruCellVariant) -> torch.Tensor:
    """Run a case and check it against the oracle; returns h'."""
    call, bases = build(case)
    before = {name: base.clone() for name, base in bases.items()}
    library = variant.by_library
    want = wanted(case.spec, call, stored=library)
    steps = launches(case.spec, variant, call)
    if INTERPRETED and case.spec.hidden > WATCHED:
        with mended_interpreter():
            run_steps(steps)
    elif INTERPRETED:
        with watched() as traffic, mended_interpreter():
            run_steps(steps)
        *copying, launch = (step for step in steps if isinstance(step, Launch))
        gates = launch.arguments[:2] if library else ()
        assert_traffic_right(case, call, gates, traffic, copying)
    else:
        run_steps(steps)
    assert_close(to_numpy(call.out), *want)
    written = "h" if case.spec.inplace else "out"
    for name, base in bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        if name != written:
            assert torch.equal(base.nan_to_num(nan=7.5), before[name].nan_to_num(nan=7.5)), f"{name} was changed"
    return call.out  # type: ignore[no-any-return]


def assert_traffic_right(
    case: GruCase, call: GruCellCall, gates: tuple[Any, ...], traffic: Traffic, copying: Sequence[Launch] = ()
) -> None:
    """No address outside the tensors, each element of h' and of copies written once, every operand read, and no race in place."""
    loaded, stored = traffic.loaded(), traffic.stored()
    out, h = addresses(call.out).ravel(), addresses(call.h).ravel()
    sources = [t for copy in copying for t in copy.arguments[: 2 * MOST : 2]]
    copies = [copying[0].arguments[1]] if copying else []  # the first copy's memory is that of all
    written = np.concatenate([out, *(addresses(t).ravel() for t in copies)])
    assert np.array_equal(np.sort(stored[:, 0]), np.sort(written)), "not every element of h' is written once"
    weights = (*gates, *sources) if gates else (*call.segments, call.weight_ih, call.weight_hh, *copies)
    tensors = (*weights, call.h, call.bias_ih, call.bias_hh)
    allowed = np.concatenate([addresses(t).ravel() for t in tensors if t is not None])
    assert among(loaded[:, 0], allowed).all(), "a load outside every tensor of the call"
    for tensor in weights:
        assert among(addresses(tensor).ravel(), loaded[:, 0]).all(), "an element of an operand is never read"
    if case.spec.inplace:
        from_h = loaded[among(loaded[:, 0], h)]
        reader = {address: (program, order) for address, program, order in from_h.tolist()}
        assert len(reader) == len(from_h), "an element of h is read twice"
        for address, program, order in stored.tolist():
            reading_program, read = reader[address]
            assert reading_program == program, "a program writes what another reads"
            assert read < order, "a program writes an element before it reads it"
