"""Tuning of a GRU's gradient: the reference equals autograd's gradient, and right variants are within the bound of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from generator.families.gru_backward import reference
from generator.families.gru_backward.problems import problems
from generator.problem import Problem
from generator.searching.pool import legal_pool
from tests.support.gru_gradients import Sequences, build, tokens_of
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec

pytestmark = pytest.mark.interpreter

HIDDEN = 6
LENGTHS = {"dense": (4, 4, 4), "packed": (4, 2, 1), "thd": (2, 4, 0)}


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_gradient_that_autograd_finds_in_float64(layout: str, directions: int) -> None:
    """torch.nn.GRU runs each sequence alone with the gates as its input: the input's gradient is that of r, z and n."""
    spec = GruSpec("float32", HIDDEN, layout, directions)
    built = build(Sequences(spec, LENGTHS[layout]), "cpu")
    exact = {
        n: t.double() for n, t in vars(built.call).items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    call = dataclasses.replace(built.call, **exact)
    wanted, first = torch.zeros_like(call.out), torch.zeros_like(call.grad_h_0)
    of_hidden = torch.zeros(directions, HIDDEN, HIDDEN, dtype=torch.float64)  # the gradient of weight_hh's rows for n
    for row, direction in itertools.product(range(len(built.case.lengths)), range(directions)):
        module = torch.nn.GRU(3 * HIDDEN, HIDDEN).double()
        with torch.no_grad():
            module.weight_ih_l0.copy_(torch.eye(3 * HIDDEN))
            for name in ("weight_hh", "bias_ih", "bias_hh"):
                getattr(module, f"{name}_l0").copy_(getattr(call, name)[direction])
        places = tokens_of(built, row, direction)[::-1]  # in the order of the forward
        units = slice(direction * HIDDEN, (direction + 1) * HIDDEN)
        if not places:
            first[direction, row] = call.grad_h_n[direction, row]
            continue
        at = (direction, *(torch.tensor(axis) for axis in zip(*places, strict=True)))
        x, h = call.gates[at].requires_grad_(), torch.randn(1, HIDDEN, dtype=torch.float64, requires_grad=True)
        out, h_n = module(x, h)
        last = torch.cat((h, out[:-1])).detach()
        call.before[at], call.hidden[at] = last, last @ call.weight_hh[direction].t()
        found = torch.autograd.grad(
            (out, h_n),
            (x, h, module.weight_hh_l0),
            (call.grad_out[at[1:]][:, units], call.grad_h_n[direction, row][None]),
        )
        wanted[at] = torch.cat((torch.zeros(len(places), HIDDEN), found[0]), -1).double()
        first[direction, row] = found[1][0]
        of_hidden[direction] += found[2][2 * HIDDEN :]
    out, grad_h_0 = reference.gradients(spec, call)
    torch.testing.assert_close(out[..., HIDDEN:], wanted[..., HIDDEN:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad_h_0, first, rtol=1e-10, atol=1e-12)
    # The product of h for n is multiplied by r, so no input has its gradient. The gradient of weight_hh's rows for n shows it.
    d_h, before = out[..., :HIDDEN].reshape(directions, -1, HIDDEN), call.before.reshape(directions, -1, HIDDEN)
    torch.testing.assert_close(d_h.transpose(1, 2) @ before, of_hidden, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "precision", "unit"),
    [
        ("float32", "ieee", 2.0**-18),
        ("float32", "tf32", 2.0**-11),
        ("float16", "tf32", 2.0**-11),
        ("bfloat16", "tf32", 2.0**-8),
    ],
)
def test_the_bound_is_of_six_roundings_of_the_largest_of_a_row(dtype: str, precision: str, unit: float) -> None:
    spec = GruSpec(dtype, HIDDEN, precision=precision)
    wanted, bound = reference.reference(spec, reference.inputs(spec, GruSize(2, 3), "cpu", 0))
    torch.testing.assert_close(bound, unit * (wanted.abs() + 6 * wanted.abs().amax(-1, keepdim=True)))


@pytest.mark.parametrize("problem", list(problems()), ids=lambda p: p.name)
def test_every_problem_has_variants_on_the_cards_that_train(problem: Problem) -> None:
    assert problem.spec.layers == 1
    pool = legal_pool(problem, 90, 132).variants
    assert pool
    assert {variant.strategy for variant in pool} == {"persistent"}


def test_what_is_counted_as_moved_is_what_the_inputs_have() -> None:
    for layout, bias in itertools.product(LAYOUTS, (True, False)):
        spec, size = GruSpec("float16", HIDDEN, layout, 2, bias=bias), GruSize(3, 5)
        call = reference.inputs(spec, size, "meta", 0)
        outside = {"counters", "starts", "lengths", "states"}
        tensors = {n: t for n, t in vars(call).items() if isinstance(t, torch.Tensor) and n not in outside}
        assert sum(t.nbytes for t in tensors.values()) == reference.bytes_moved(spec, size)
        assert reference.tensor_bytes(spec, size) == reference.bytes_moved(spec, size) + call.states.nbytes
