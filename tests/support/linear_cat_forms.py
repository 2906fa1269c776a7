"""Calls of the linear layer over segments, compared with float64; the oracle gives the tolerance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from generator.measuring.check import guarded, intact
from generator.measuring.mended import mended_interpreter
from tests.support import oracle
from tests.support.rope_case import assert_close
from tests.support.run import DEVICE, INTERPRETED, addresses, among, run, to_numpy, truncates, watched
from tuned.families.linear_cat.launches import LinearCatCall, launches
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant

TILE = LinearCatVariant("tile", 16, 32, 64, num_stages=2)

VECTOR = LinearCatVariant("vector", 4, 8, 256)

OUTER = LinearCatVariant("outer", 4, 8, num_warps=2)

PADDED = dataclasses.replace(TILE, form="padded")

FORMS = {"tile": TILE, "padded": PADDED, "vector": VECTOR, "outer": OUTER}


def build(spec: LinearCatSpec, rows: int, view: str) -> tuple[LinearCatCall, dict[str, Any]]:
    """The call, and the guarded tensors that its tensors are views of; view "wide": gaps between rows."""
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, spec.dtype)
    bases: dict[str, Any] = {}

    def tensor(name: str, shape: tuple[int, ...], scale: float) -> Any:
        wide = view == "wide" and len(shape) > 1
        bases[name] = guarded((*shape[:-1], shape[-1] + 5) if wide else shape, dtype, DEVICE)
        part = bases[name][:, : shape[1]] if wide else bases[name]
        return part.copy_(torch.randn(shape, generator=draw) * scale) if scale else part

    x = tuple(tensor(f"x{index}", (rows, width), 1.0) for index, width in enumerate(spec.inputs))
    weight = tensor("weight", (spec.outputs, spec.input_size), spec.input_size**-0.5)
    out = tensor("out", (rows, spec.outputs), 0.0)
    return LinearCatCall.of(x, weight, out, *([tensor("bias", (spec.outputs,), 1.0)] if spec.bias else [])), bases


def assert_right(spec: LinearCatSpec, rows: int, variant: LinearCatVariant, view: str = "contiguous") -> None:
    """Run a case and check it against float64: result, canaries, inputs, every address touched."""
    call, bases = build(spec, rows, view)
    before = {name: base.clone() for name, base in bases.items()}
    x, weight = np.concatenate([to_numpy(t) for t in call.segments], -1), to_numpy(call.weight)
    bias = to_numpy(call.bias) if spec.bias else np.zeros(spec.outputs)
    want = x @ weight.T + bias
    relative = oracle.U32 * (spec.input_size + 8) + (2 * 2.0**-11 if spec.precision == "tf32" else 0.0)
    arithmetic = relative * (np.abs(x) @ np.abs(weight).T + np.abs(bias))
    bound = oracle.gru_tolerance(want, arithmetic, spec.dtype, truncates=truncates(spec.dtype))
    if INTERPRETED:
        with watched() as traffic, mended_interpreter():
            steps = launches(spec, variant, call)
            run(steps)
        copies = steps[-1].arguments[0], steps[-1].arguments[4]  # of x and weight, in form "padded"
        written = [addresses(t).ravel() for t in (call.out, *(copies if variant.pads else ()))]
        loaded, stored = traffic.loaded()[:, 0], traffic.stored()[:, 0]
        assert np.array_equal(np.sort(stored), np.sort(np.concatenate(written))), "not each element written once"
        operands = [addresses(t).ravel() for t in (*call.segments, call.weight, call.bias) if t is not None]
        assert among(loaded, np.concatenate([*operands, *written[1:]])).all(), "a load outside every tensor of the call"
        assert all(among(operand, loaded).all() for operand in operands), "an element of an operand is never read"
    else:
        run(launches(spec, variant, call))
    assert_close(to_numpy(call.out), want, bound)
    for name, base in bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        if name != "out":
            assert torch.equal(base.nan_to_num(nan=7.5), before[name].nan_to_num(nan=7.5)), f"{name} was changed"
