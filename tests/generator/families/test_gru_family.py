"""Tuning of the GRU over sequences: its reference is that of nn.GRU, and it counts the bytes of its inputs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from generator.families.gru import reference as gru
from generator.families.gru.problems import problems as gru_problems
from generator.measuring.check import inputs_of
from generator.measuring.interpret import interpreted
from generator.problem import Problem
from generator.rendering.structures import structures
from generator.searching.pool import legal_pool
from generator.workload import WORKLOADS
from tuned.families.gru.launches import Recurrence
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, programs, rejection, row_variant

pytestmark = pytest.mark.interpreter

SIZE = GruSize(batch=3, seq=7)
HIDDEN, FEATURES = 20, 11
SHAPES = [(layout, *rest) for layout in LAYOUTS for rest in ((1, 1), (2, 1), (1, 3))]  # layout, directions, layers


def as_torch_runs_it(spec: GruSpec, call: Recurrence) -> tuple[Recurrence, torch.Tensor]:
    """The call with the gates of a random input, and the output of torch.nn.GRU in float64 on that input."""
    directions, layers = spec.directions, spec.layers
    module = torch.nn.GRU(FEATURES, HIDDEN, layers, bidirectional=directions > 1).double()
    torch.manual_seed(1)
    x = torch.randn(*call.out.shape[:-1], FEATURES, dtype=torch.float64)
    with torch.no_grad():
        for layer, direction in itertools.product(range(layers), range(directions)):
            name, index = f"_l{layer}{'_reverse' if direction else ''}", layer * directions + direction
            getattr(module, f"weight_hh{name}").copy_(call.weight_hh[index])
            for bias in ("bias_ih", "bias_hh"):
                getattr(module, bias + name).copy_(getattr(call, bias)[index])
            if layer:
                getattr(module, f"weight_ih{name}").copy_(call.weight_ih[layer - 1])
        names = ("weight_ih_l0", "weight_ih_l0_reverse")[:directions]
        gates = torch.stack([x @ getattr(module, name).t() for name in names])
        h_0 = call.h_0.double()
        if spec.layout == "dense":
            out = module(x, h_0)[0]
        elif spec.layout == "packed":
            sizes = torch.tensor([int((call.lengths > step).sum()) for step in range(call.seq)])
            out = module(torch.nn.utils.rnn.PackedSequence(x, sizes), h_0)[0].data
        else:
            parts = x.split(call.lengths.tolist())
            out = torch.cat([module(part, h_0[:, row])[0] for row, part in enumerate(parts)])
    return dataclasses.replace(call, gates=gates), out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_what_torch_computes_in_float64(shape: tuple[str, int, int]) -> None:
    layout, directions, layers = shape
    spec = GruSpec("float32", HIDDEN, layout=layout, directions=directions, layers=layers)
    call, expected = as_torch_runs_it(spec, gru.inputs(spec, SIZE, "cpu", 0))
    wanted, bound = gru.reference(spec, call)
    assert wanted.shape == call.out.shape
    assert (wanted - expected).abs().max() < 1e-14
    assert bool((bound > 0).all())
    assert bound.max() < 0.01


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_counted_are_those_of_the_tensors(shape: tuple[str, int, int]) -> None:
    layout, directions, layers = shape
    spec = GruSpec("bfloat16", HIDDEN, layout=layout, directions=directions, layers=layers)
    call = gru.inputs(spec, SIZE, "meta", 0)
    floats = [t for t in vars(call).values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    products = 0 if layout == "dense" or layers > 1 else 3 * SIZE.batch * HIDDEN * 2  # counted even if unused
    assert gru.tensor_bytes(spec, SIZE) == sum(t.numel() * t.element_size() for t in floats) + products
    made = gru.inputs(spec, SIZE, "cpu", 0)
    for field in dataclasses.fields(call):
        before, after = getattr(call, field.name), getattr(made, field.name)
        if isinstance(before, torch.Tensor):
            assert (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)


def test_lengths_fall_from_all_steps_to_half_and_need_not_be_sorted_with_cu_seqlens() -> None:
    size = GruSize(batch=5, seq=9)
    assert gru.lengths_of(GruSpec("bfloat16", 8), size) == [9] * 5
    packed, thd = (GruSpec("bfloat16", 8, layout=layout) for layout in ("packed", "thd"))
    assert gru.lengths_of(packed, size) == [9, 8, 7, 6, 4]
    assert gru.lengths_of(thd, size) == [4, 6, 7, 8, 9]
    assert gru.starts_of(thd, [4, 6, 7]) == [0, 4, 10, 17]
    assert gru.starts_of(packed, [3, 1]) == [0, 2, 3]


def test_what_must_not_change_leaves_out_what_launches_write() -> None:
    call = gru.inputs(GruSpec("bfloat16", 8, layers=2, layout="thd"), SIZE, "cpu", 0)
    named = {"gates", "weight_hh", "weight_ih", "h_0", "bias_ih", "bias_hh", "starts", "lengths"}
    assert set(inputs_of(call)) == named


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_baseline_gives_what_a_call_gives(layout: str) -> None:
    spec = GruSpec("float32", HIDDEN, layout=layout, directions=2)
    call = gru.inputs(spec, SIZE, "cpu", 0)
    out = gru.eager(spec, call)()
    assert (out if layout == "dense" else out.data).shape == call.out.shape


def test_default_problems_have_pools_of_kernels_that_there_are() -> None:
    problems = list(gru_problems())
    assert len({p.name for p in problems}) == len({(p.spec, p.size) for p in problems}) == len(problems)
    names = WORKLOADS["gru"].family.kernel_names
    for problem in problems:
        variants = legal_pool(problem, 90, 132).variants
        assert variants, problem.name
        missing = {name for v in variants for name in names(problem.spec, v) if name not in structures()}
        assert not missing, problem.name


def test_a_pool_is_of_grids_that_fit_the_gpu() -> None:
    problem = Problem("fits", "gru", GruSpec("bfloat16", 512), GruSize(batch=64, seq=8))
    pools = {count: legal_pool(problem, 90, count).variants for count in (16, 132)}
    waiting = {count: [v for v in pool if v.strategy == "persistent"] for count, pool in pools.items()}
    for count, variants in waiting.items():
        assert 0 < max(programs(problem.spec, problem.size, v) for v in variants) <= count
    too_many = [v for v in waiting[132] if programs(problem.spec, problem.size, v) > 16]
    assert too_many
    for variant in too_many:
        assert "16 multiprocessors" in str(rejection(problem.spec, problem.size, variant, 90, 16))


# Several programs of a case wait for each other, although the interpreter runs one after the other.
CASES: list[tuple[GruSpec, GruVariant]] = [
    (GruSpec("bfloat16", 96), GruVariant("persistent", "split", 16, 16, "spin")),
    (GruSpec("float32", 96, layout="packed", directions=2), GruVariant("persistent", "tile", 32, 32, "counter")),
    (GruSpec("float16", 96, layout="thd", layers=2), GruVariant("persistent", "split", 16, 16, "probe")),
    (GruSpec("bfloat16", 96, layers=3), GruVariant("persistent", "split", 32, 8, "counter")),
    (GruSpec("bfloat16", 40), GruVariant("steps", "split", 16, 8)),
    (GruSpec("float16", 40, directions=2), GruVariant()),
]


def test_the_interpreter_checks_sequences() -> None:
    cases: list[tuple[Any, Any]] = [(Problem(str(i), "gru", s, GruSize(20, 40)), v) for i, (s, v) in enumerate(CASES)]
    assert interpreted(cases) == [None] * len(cases)


@pytest.mark.parametrize(("hidden", "measured_us"), [(32, 0.21), (64, 0.29), (128, 0.61)])
def test_a_step_of_form_row_is_estimated_by_its_multiplications(hidden: int, measured_us: float) -> None:
    """The measured times are those of docs/decisions/0068 for one row, at 1.75 GHz."""
    variant = row_variant(hidden)
    (found,) = gru.work(Problem("few units", "gru", GruSpec("float32", hidden), GruSize(1, 100)), variant)
    us = (found.chain_us + found.chain_clocks / 1750) / 100
    assert 0.7 * measured_us < us < 1.3 * measured_us
