"""Warming: all launches of a model are found, compiled ahead and found in the cache; and the model is as before."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import random
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned
import tuned.launching.ahead
import tuned.launching.launcher
import tuned.launching.plan
from generator.families.rope.texts import append_specs
from generator.measuring.compile import same_code
from generator.rendering.structures import load
from generator.workload import WORKLOADS, default_problems
from tests.support import append, warming
from tests.support.compiling import process
from tests.support.gru_machine import Machine, machine
from tests.support.rope_calls import Watch, watch
from tests.support.rope_rows import ROWS, spec_of
from tests.support.run import INTERPRETED
from tuned.calls.gru import ahead, run
from tuned.calls.gru.arguments import gru_call
from tuned.calls.rope import ahead as rope_ahead
from tuned.calls.rope import append as rope_append
from tuned.calls.rope import plan as rope_plan
from tuned.calls.rope.arguments import prepare
from tuned.dispatch import gru, gru_cell, linear_cat, mla_kv_rope, qk_norm_rope, rope, rope_append_, rope_qk
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.launch import Launch
from tuned.families.rope.launches import kernel_name
from tuned.families.rope.spec import RopeSize
from tuned.launching.ahead import Compiled
from tuned.launching.rehearsal import listening
from tuned.lookup.lookup import Choice, Gpu
from tuned.warming import _memory

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator
    from pathlib import Path

    from tuned.launching.rehearsal import Noted

__all__ = ["machine", "watch"]

GPU = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
HIDDEN, FEATURES = 8, 3
POLL = GruVariant("persistent", block_hidden=8, block_batch=8, exchange="poll")
PUBLIC, KNOWN = tuned.launching.launcher.launch_public, tuned.launching.plan.launch_known
without_a_gpu = pytest.mark.skipif(not INTERPRETED, reason="this stands in for a GPU where there is none")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """The launches that would be compiled ahead."""
    found: list[Noted] = []

    def compile_ahead(launches: list[Noted], processes: int | None) -> Compiled:
        del processes
        found.extend(launches)
        return Compiled(tuple(one.launch.kernel for one in launches), (), ())

    monkeypatch.setattr(tuned.launching.ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr("tuned.warming.will_probe", lambda _: False)
    return found


@pytest.fixture
def grus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """GRU calls on stand-ins for a GPU, which launch nothing while a thread collects launches."""

    def launch_public(function: Any, launch: Launch) -> Any:
        return machine.launch_public(function, launch) if listening() is None else PUBLIC(function, launch)

    def launch_known(device: Any, launch: Launch) -> Any:
        return machine.launch(device, launch) if listening() is None else KNOWN(device, launch)

    monkeypatch.setattr(machine, "interpret", lambda _launch: None)
    monkeypatch.setattr(tuned.launching.launcher, "launch_public", launch_public)
    monkeypatch.setattr(run, "launch_known", launch_known)
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("default", "", POLL))
    return machine


@pytest.fixture
def ropes(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """RoPE calls on stand-ins for a GPU, which launch nothing while a thread collects launches."""
    made = watch.run_public

    def run_public(now: Any) -> Any:
        return made(now) if listening() is None else PUBLIC(rope_plan.kernel(now.part.kernel), now.part)

    monkeypatch.setattr(rope_plan, "run_public", run_public)
    return watch


def cell() -> tuple[torch.Tensor, ...]:
    return torch.randn(3 * HIDDEN, HIDDEN), torch.randn(3 * HIDDEN, HIDDEN), *torch.randn(2, 3 * HIDDEN)


# What is found, and what runs ---------------------------------------------------------------------------------------------


@without_a_gpu
def test_each_launch_of_a_model_is_noted_before_any_is_made(grus: Machine, noted: list[Noted]) -> None:
    x, h, weights = torch.randn(3, 2, HIDDEN), torch.randn(2, HIDDEN), cell()
    seen: list[torch.Tensor] = []

    def model(x: torch.Tensor, *, h: torch.Tensor) -> None:
        launched = grus.public
        out, _ = gru(x, h[None], weights)
        seen.append(out)
        seen.append(gru_cell(x[0], h, *weights))
        seen.append(linear_cat((x[0], h), torch.cat(weights[:2], 1)))
        if not noted:
            assert grus.public == launched

    done = tuned.warm(model, x, h=h)
    assert [one.launch.kernel for one in noted] == list(done.compiled)
    assert [name.partition("_")[0] for name in done.compiled] == ["gru", "gru", "linear"]
    assert grus.public == 3, "the second run launches"
    wanted = torch.gru(x, h[None], weights, True, 1, 0.0, False, False, False)[0]
    torch.testing.assert_close(seen[0], wanted)
    torch.testing.assert_close(seen[1], torch.gru_cell(x[0], h, *weights))
    torch.testing.assert_close(seen[2], torch.cat((x[0], h), 1) @ torch.cat(weights[:2], 1).t())
    assert not any(isinstance(value, torch.Tensor) for one in noted for value in one.launch.arguments)
    before = grus.direct
    model(x, h=h)
    assert grus.direct == before + 3, "plans were learnt"


@without_a_gpu
@pytest.mark.parametrize("how", ["patched", "replaced"])
def test_all_layers_of_a_module_are_noted(grus: Machine, noted: list[Noted], how: str) -> None:
    module = torch.nn.GRU(HIDDEN, HIDDEN, num_layers=2, bidirectional=True)
    x = torch.randn(3, 2, HIDDEN)
    with tuned.nn.patched() if how == "patched" else contextlib.nullcontext():
        model = module if how == "patched" else tuned.nn.replace(module)
        tuned.warm(model, x)
        assert [one.launch.kernel.partition("_")[0] for one in noted] == ["gru", "gru"]
        assert (grus.public, grus.direct) == (2, 0)
        tuned.warm(model, x)
        assert len(noted) == 2, "nothing is left to compile where the plan of both layers is known"
        before = grus.direct
        model(x)
        assert (grus.public, grus.direct) == (2, before + 2), "the plan launches both"


@without_a_gpu
def test_a_rotation_in_place_is_undone_and_its_launch_is_noted(ropes: Watch, noted: list[Noted]) -> None:
    q, k, freqs = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 2, 16), torch.randn(4, 1, 1, 16)
    before, rotated = q.clone(), []

    def model(q: torch.Tensor) -> None:
        rope_qk(q, k.clone(), freqs, inplace=True)
        rotated.append(q.clone())

    tuned.warm(model, q)
    assert [one.launch.kernel for one in noted] == ["rope_complete_inplace_half_freqs"]
    assert torch.equal(q, before)
    torch.testing.assert_close(rotated[0], rotated[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(rotated[0], before)
    assert ropes.public == 1


@without_a_gpu
@pytest.mark.parametrize("enabled", [True, False])
def test_the_kernels_of_gradients_are_noted_where_there_will_be_some(
    ropes: Watch, noted: list[Noted], enabled: bool
) -> None:
    x, freqs = torch.randn(2, 4, 4, 16, requires_grad=True), torch.randn(4, 1, 1, 16)
    with torch.set_grad_enabled(enabled):
        tuned.warm(rope, x, freqs)
    assert sorted(one.launch.constants["BACKWARD"] for one in noted) == [False, True][: 1 + enabled]
    assert ropes.public == 1
    assert x.grad is None


@without_a_gpu
@pytest.mark.parametrize("named", [{}, {"inplace": True}, {"tensor_format": "bhsd"}], ids=str)
@pytest.mark.usefixtures("ropes")
def test_the_kernels_of_a_norms_gradient_are_noted(noted: list[Noted], named: dict[str, Any]) -> None:
    q, k = torch.randn(2, 4, 4, 16, requires_grad=True), torch.randn(2, 4, 4, 16, requires_grad=True)
    weight, angle = torch.ones(16, requires_grad=True), torch.randn(4, 8)

    def model(q: torch.Tensor, k: torch.Tensor) -> None:
        qk_norm_rope(q * 1, k * 1, weight, weight, cos=angle.cos(), sin=angle.sin(), **named)

    tuned.warm(model, q, k)
    names = {one.launch.kernel for one in noted}
    assert {"rope_norm_copy_half_cos_sin", "rope_norm_backward_half_cos_sin", "rope_norm_weights"} <= names
    assert weight.grad is None


@without_a_gpu
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.usefixtures("ropes")
def test_the_kernels_of_a_gradient_of_angles_are_noted(noted: list[Noted], inplace: bool) -> None:
    q, k, freqs = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 2, 16), torch.randn(4, 8, requires_grad=True)

    def model(freqs: torch.Tensor) -> None:
        rope_qk(q * 1, k * 1, freqs, angle_entries="pair", inplace=inplace)

    tuned.warm(model, freqs)
    assert {"rope_complete_copy_half_freqs", "rope_angle_gradient_half_freqs"} <= {one.launch.kernel for one in noted}
    assert freqs.grad is None


@without_a_gpu
@pytest.mark.usefixtures("ropes")
def test_the_kernels_of_latent_attention_are_noted(noted: list[Noted]) -> None:
    wide = torch.randn(4, 2, 12 + 16, requires_grad=True)  # k_pe is a slice of it
    kv, q = (torch.randn(4, 2, 3, n, requires_grad=True) for n in (40, 48))
    freqs = torch.randn(4, 16)
    named: dict[str, Any] = {"tensor_format": "sbhd", "deinterleave": True}

    def model(kv: torch.Tensor, q: torch.Tensor) -> None:
        mla_kv_rope(kv, wide[..., None, 12:], freqs, k_dim=32, **named)
        rope(q * 1, freqs, rotated="last", inplace=True, **named)

    tuned.warm(model, kv, q)
    assert sorted(one.launch.kernel for one in noted) == [
        "rope_complete_copy_deinterleave_freqs",
        "rope_complete_inplace_deinterleave_freqs",
        "rope_mla_backward_half_freqs",
        "rope_mla_half_freqs",
    ]


@pytest.mark.usefixtures("ropes")
def test_a_rotation_that_writes_a_cache_is_noted_and_undone(noted: list[Noted]) -> None:
    made = append.make(heads=4, key_heads=2, dim=16, rotary=16)
    before = [t.clone() for t in made.storages]
    tuned.warm(rope_append_, **made.tensors, **made.named)
    assert {one.launch.kernel for one in noted} == {"rope_append_half_cos_sin"}
    assert all(map(torch.equal, made.storages, before))


def test_the_call_made_of_a_recorded_cache_has_its_spec_and_size() -> None:
    size = RopeSize(1, 37)
    for plain in append_specs():
        for cache, layout in (("same", "HND"), ("float8", "NHD")):
            spec = dataclasses.replace(
                plain, cache=cache, cache_layout=layout, key_inplace=layout == "HND", positions="ids"
            )
            given = rope_ahead.given_of(spec, size, torch.int64)
            asked = rope_append.Asked(rope_ahead.settings_of(spec), layout, spec.key_inplace)
            prepared = rope_append.prepare(given, rope_ahead.cached_of(spec, size), asked)
            assert (prepared.spec, prepared.size.tokens) == (spec, 37)
            choice, steps = rope_ahead.steps(spec, size, GPU)
            assert [step.kernel for step in steps] == [
                kernel_name(spec, choice.variant)
            ] * 2  # one for each type of positions


@without_a_gpu
def test_other_threads_launch_while_one_listens(ropes: Watch, noted: list[Noted]) -> None:
    x, freqs = torch.randn(2, 4, 4, 16), torch.randn(4, 1, 1, 16)

    def model() -> None:
        thread = threading.Thread(target=rope, args=(x, freqs))
        thread.start()
        thread.join()
        assert ropes.public == 1

    tuned.warm(model)
    assert noted == []


def test_on_a_cpu_nothing_is_compiled_and_the_reasons_are_told(noted: list[Noted]) -> None:
    x = torch.randn(2, 3, HIDDEN)

    def model(x: torch.Tensor) -> None:
        for _ in range(2):
            tuned.nn.GRU(HIDDEN, HIDDEN)(x)
        gru_cell(x[0], x[0, :, :HIDDEN], *cell())
        linear_cat((x, x), torch.randn(4, 2 * HIDDEN))

    done = tuned.warm(model, x)
    assert noted == []
    assert (done.compiled, done.found, done.undone) == ((), (), ())
    cpu = "the tensors are on cpu, the kernels are for GPUs"
    assert done.left == (
        f"2 calls: gru of [2, 3, 8] float32: {cpu}",
        f"gru_cell of [3, 8] float32: {cpu}",
        f"linear_cat of [2, 3, 8] float32: {cpu}",
    )
    assert str(done).startswith("0 kernels compiled, 0 found in Triton's cache, in ")
    assert "PyTorch's own serves gru_cell of [3, 8] float32" in str(done)
    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()


def _left_calls() -> dict[str, Any]:
    """Functions of x, [2, 3, 2, 8], whose calls PyTorch's operators serve on a CPU."""
    angles = torch.rand(4, 4)
    table, weight = {"cos": angles.cos(), "sin": angles.sin()}, torch.ones(8)
    ids = torch.arange(3)

    def appended(x: torch.Tensor) -> None:
        q, k, cache = x[0].clone(), x[0].clone(), torch.zeros(2, 2, 4, 2, 8)
        rope_append_(q, k, k.clone(), cache[0], cache[1], ids, positions=ids, **table)

    return {
        "rope": lambda x: rope(x, **table),
        "rope of positions": lambda x: rope(x, positions=ids, **table),
        "rope in place": lambda x: rope(x, inplace=True, **table),
        "rope_qk": lambda x: rope_qk(x, x[:, :, :1], **table),
        "qk_norm_rope": lambda x: qk_norm_rope(x, x, weight, weight, **table),
        "rope_append_": appended,
    }


@without_a_gpu
@pytest.mark.parametrize("name", _left_calls())
def test_calls_that_were_made_before_are_told_of_too(name: str, noted: list[Noted]) -> None:
    x, call = torch.randn(2, 3, 2, 8), _left_calls()[name]

    def model(x: torch.Tensor) -> None:
        call(x)
        call(x)

    model(x)
    found = [tuned.warm(model, x).left for _ in range(2)]
    shape = [3, 2, 8] if name == "rope_append_" else [2, 3, 2, 8]
    assert found == [(f"2 calls: rope of {shape} float32: the tensors are on cpu, the kernels are for GPUs",)] * 2
    assert noted == []


@without_a_gpu
@pytest.mark.usefixtures("ropes")
def test_what_no_kernel_reads_is_told_of_although_a_kernel_serves_others() -> None:
    angles = torch.rand(3, 4)
    x = torch.randn(2, 3, 2, 8, dtype=torch.complex64)
    for t in (x.imag, x.conj().imag):
        rope(t, cos=angles.cos(), sin=angles.sin())
    (left,) = tuned.warm(rope, x.conj().imag, cos=angles.cos(), sin=angles.sin()).left
    assert left.startswith("rope of [2, 3, 2, 8] float32: a tensor has the negative or conjugate bit")
    angles = torch.polar(torch.ones(3, 4), angles)
    (left,) = tuned.warm(rope, x.imag, freqs_cis=angles.conj()).left
    assert left.startswith("rope of [2, 3, 2, 8] float32: a tensor has the negative or conjugate bit")
    made = append.make(heads=2, key_heads=2)
    lazy = {name: torch.complex(t, -t).conj().imag for name, t in made.tensors.items() if name in "qkv"}
    (left,) = tuned.warm(rope_append_, **{**made.tensors, **lazy}, **made.named).left
    assert left.startswith("rope of [7, 2, 8] float32: a tensor has the negative or conjugate bit")


# The model is as before ---------------------------------------------------------------------------------------------------


class Stateful(torch.nn.Module):
    """A module that changes everything that a forward may change, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        self.count += 1
        self.last = x * self.weight
        self.register_buffer("made", torch.zeros(1), persistent=True)
        out = torch.nn.functional.dropout(self.norm(x), 0.5) + random.random() + np.random.random()  # noqa: NPY002
        self.eval()
        self.weight.grad = torch.ones(HIDDEN)
        return out


def test_state_inputs_and_generators_are_as_before() -> None:
    model, x = Stateful(), torch.randn(4, HIDDEN)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002 - what models draw from
    before = x.clone()
    tuned.warm(model, x)
    assert torch.equal(x, before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert model.training
    assert model.norm.training
    assert model.last is None
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert [random.getstate(), str(np.random.get_state())] == drawn[1:]  # noqa: NPY002


def test_only_what_was_changed_is_written_back(tmp_path: Path) -> None:
    """A write to a tensor in read-only memory, as numpy's of a file, ended the process; and a view was copied whole."""
    np.save(tmp_path / "x.npy", np.full((5, 2, FEATURES), np.nan, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="r"))
    tuned.warm(torch.nn.Sequential(tuned.nn.GRU(FEATURES, HIDDEN)), x)
    large = torch.zeros(1000, 7)
    part = large[500:502, ::3]
    ((now, copy),) = _memory([part, part, torch.empty(0)])
    assert now.data_ptr() == part.data_ptr()
    assert copy.numel() == (7 + 6 + 1) * 4


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, that nested tensors are a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_model_of_nested_tensors_is_warmed(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=layout)
    seen: list[int] = []
    tuned.warm(lambda t: seen.append((t * 2).values().sum().int().item()), nested)
    assert seen == [16]


def test_gradients_are_as_before_where_the_model_adds_to_them() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda module, *_: (module.weight.grad.add_(1), None)[1])
    model.weight.grad = torch.zeros(2, 2)
    tuned.warm(model, torch.zeros(1, 2))
    assert not model.weight.grad.any()


def test_a_model_with_a_scripted_part_is_warmed() -> None:
    scripted = torch.jit.script(torch.nn.BatchNorm1d(FEATURES))
    tuned.warm(torch.nn.Sequential(scripted, tuned.nn.GRUCell(FEATURES, HIDDEN)), torch.randn(4, FEATURES))
    assert not scripted.running_mean.any()


@pytest.mark.parametrize("alone", [False, True])
def test_a_model_with_a_frozen_part_is_warmed(alone: bool) -> None:
    """It has no ``training``."""
    frozen = torch.jit.freeze(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()))
    model = frozen if alone else torch.nn.Sequential(frozen, torch.nn.Linear(2, 2))
    tuned.warm(model, torch.zeros(1, 2))
    assert alone or model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_memory_and_shapes_are_as_before_where_the_model_replaces_them(mode: Any) -> None:
    """Only what lies in the memory of before was put back."""

    class Replacing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3))
            self.register_buffer("none", torch.zeros(0))

        def forward(self, x: torch.Tensor, view: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(2)
            self.mean.data = self.mean * 0.9
            self.none.data = torch.ones(1, dtype=torch.float64)
            view.mul_(0).t_()
            whole.set_(torch.ones(5))
            return x.unsqueeze_(0).mul_(2) + self.mean

    with mode():
        model, of_view = Replacing(), torch.ones(4, 3)
        inputs = torch.ones(2, 3), of_view[1:3], torch.zeros(4)
        mean, addresses = model.mean, [t.data_ptr() for t in inputs]
        tuned.warm(model, *inputs)
        assert model.mean is mean
        assert torch.equal(mean, torch.ones(3))
        assert (model.none.shape, model.none.dtype) == ((0,), torch.float32)
        assert [t.shape for t in inputs] == [(2, 3), (2, 3), (4,)]
        assert [t.data_ptr() for t in inputs] == addresses
        assert inputs[0].eq(1).all()
        assert of_view.eq(1).all()
        assert not inputs[2].any()


def test_an_exception_of_the_model_comes_out_as_it_is_and_undoes_the_run() -> None:
    error = KeyError("of the model")

    class Broken(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise error

    model, x = Broken(), torch.zeros(4, HIDDEN)
    with pytest.raises(KeyError) as raised:
        tuned.warm(model, x)
    assert raised.value is error
    assert not x.any()
    assert model.count == 0
    assert listening() is None


def test_a_parameter_that_was_overwritten_is_told_of() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda module, *_: (module.weight.zero_(), None)[1])
    with pytest.raises(RuntimeError, match=r"must not overwrite its parameters.* overwrote weight: warm a copy"):
        tuned.warm(model, torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"lazy parameters.*call it once before"):
        tuned.warm(torch.nn.LazyLinear(2), torch.zeros(1, 2))


# Problems -----------------------------------------------------------------------------------------------------------------


def line(problem: Any) -> str:
    return json.dumps(
        {"family": problem.family, **{n: dataclasses.asdict(getattr(problem, n)) for n in ("spec", "size")}}
    )


PROBLEMS = [default_problems(name)[0] for name in WORKLOADS]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("tuned.warming.gpu_of", lambda _: GPU)


@pytest.mark.usefixtures("on_a_gpu")
def test_problems_come_as_a_path_a_list_or_by_the_variable(
    noted: list[Noted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "misses.jsonl"
    file.write_text("\n".join([*map(line, PROBLEMS), "", line(PROBLEMS[0])]))
    monkeypatch.setenv("TUNED_RECORD", str(file))
    ways = file, str(file), [json.loads(line(p)) for p in PROBLEMS], PROBLEMS, None
    found = []
    for given in ways:
        tuned.warm(given)
        found.append({(one.launch.kernel, one.device) for one in noted})
        noted.clear()
    assert len(found[0]) >= len(PROBLEMS)
    assert all(kernels == found[0] for kernels in found)
    assert {device for _, device in found[0]} == {0}
    monkeypatch.setenv("TUNED_RECORD", str(tmp_path / "none yet"))
    assert tuned.warm().compiled == ()


def test_what_a_problem_launches_is_what_tuning_compiles_for_it() -> None:
    """The specialisations are those of the tensors that tuning makes."""
    missing = []
    aligned = [problem for problem in default_problems() if problem.family != "gru" or _is_aligned(problem.spec)]
    for problem in aligned[::12]:
        ahead = importlib.import_module(f"tuned.calls.{problem.family}.ahead")
        choice, steps = ahead.steps(problem.spec, problem.size, GPU)
        if choice.variant is None:
            assert steps == ()
            continue
        workload = WORKLOADS[problem.family]
        theirs = workload.family.launches(
            problem.spec, choice.variant, workload.inputs(problem.spec, problem.size, "meta", 0)
        )
        ours, wanted = ({_kinds(step) for step in every if isinstance(step, Launch)} for every in (steps, theirs))
        if not wanted <= ours:
            missing.append(problem.name)
    assert missing == []


def _is_aligned(spec: Any) -> bool:
    """Whether the rows of a call are multiples of 16 bytes: other calls are widened, which tuning does not know."""
    return bool(spec.hidden * spec.item % 16 == 0)


def test_what_a_narrow_problem_launches_is_what_a_wide_one_does() -> None:
    ahead = importlib.import_module("tuned.calls.gru.ahead")
    size = GruSize(4, 256)
    found, wanted = (ahead.steps(GruSpec("bfloat16", hidden), size, GPU) for hidden in (1001, 1008))
    assert found[0].variant == wanted[0].variant
    assert [type(step) for step in found[1]] == [type(step) for step in wanted[1]]
    ours, theirs = ([_kinds(step) for step in steps if isinstance(step, Launch)] for _, steps in (found, wanted))
    assert ours == theirs
    assert ours


def test_a_narrow_problem_whose_steps_take_the_host_as_long_padded_launches_what_its_call_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow, wide = GruSpec("bfloat16", 918), GruSpec("bfloat16", 920)
    choice, steps = ahead.steps(narrow, GruSize(179, 237), GPU)
    assert choice.variant.strategy == "persistent"
    assert [step.constants["HIDDEN"] for step in steps if isinstance(step, Launch) and "HIDDEN" in step.constants] == [
        920
    ]
    made = torch.nn.GRU(918, 918, dtype=torch.bfloat16, device="meta")
    x, hx = (torch.empty(n, 179, 918, dtype=torch.bfloat16, device="meta") for n in (237, 1))
    call = gru_call(x, hx, list(made.parameters()))
    monkeypatch.setattr(run, "gpu_of", lambda _device: GPU)
    ((spec, _, served),) = run._parts(run.wide(call))
    assert (spec, served.variant) == (wide, choice.variant)


def _kinds(step: Launch) -> Any:
    function = load(step.kernel)
    if hasattr(function, "params"):
        return same_code(function, step)
    free = function.kwargs["do_not_specialize"] or ()
    kinds = [
        tuned.launching.plan.kind_of(v, n not in free) for n, v in zip(function.arg_names, step.arguments, strict=False)
    ]
    return step.kernel, *kinds, *step.constants.items(), *step.options.items()


def test_the_call_made_of_a_recorded_rotation_has_its_spec_and_size() -> None:
    checked = 0
    for row in ROWS:
        spec, size = spec_of(row), RopeSize(2, 6)
        if spec.conjugate and spec.angle_entries == "pair" and not spec.inplace:
            continue  # a call has it the other way round
        for dtype in rope_ahead.INDEX_DTYPES:
            given, settings = rope_ahead.given_of(spec, size, dtype), rope_ahead.settings_of(spec)
            prepared = prepare(given, settings, make_out=torch.empty_like)
            assert prepared.spec == spec
            assert spec.layout == "thd" or prepared.size == size
            checked += 1
    assert checked > 50


def test_without_a_gpu_problems_are_left_undone_with_the_reason(
    noted: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = tuned.warm(PROBLEMS)
    assert done.undone == (
        f"{len(PROBLEMS)} problems: torch sees no GPU, and kernels are compiled for the GPU that runs them",
    )
    assert "\nnot done: " in str(done)
    assert noted == []
    assert str(tuned.warm([])).count("\n") == 0


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNED_RECORD", raising=False)
    (tmp_path / "bad").write_text('{"family": "rope"}')
    for given, kind, said in (
        ((), ValueError, "TUNED_RECORD names, which is not set: set it, or give a model"),
        ((3,), TypeError, "give a model or function, a path, or a list of problems, got int 3"),
        ((tmp_path / "none",), ValueError, "none cannot be read .* a model run with TUNED_RECORD=.*none writes it"),
        ((tmp_path / "bad",), ValueError, "bad line 1 must have the fields"),
        (([{"family": "none", "spec": {}, "size": {}}],), ValueError, r"problems\[0\]: family must be one of"),
        (([], torch.zeros(1)), TypeError, "example inputs are for a model or function that can be called, got list"),
    ):
        with pytest.raises(kind, match=said):
            tuned.warm(*given)
    for processes in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"processes must be an int of at least 0, or None .* got {processes}"):
            tuned.warm(rope, processes=processes)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot compile while a CUDA graph is captured: call it before"):
        tuned.warm(rope)


# Compiling ----------------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_no_process() -> None:
    compilers: list[Any] = []

    def stopped() -> None:
        with tuned.launching.ahead._compilers(2) as started:
            compilers.extend(started)
            assert all(one.poll() is None for one in started)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [one.returncode for one in compilers] == [-9, -9]


@pytest.fixture(scope="module")
def compiler() -> Iterator[concurrent.futures.Executor]:
    with process() as pool:
        yield pool


@pytest.mark.compiler
def test_real_calls_compile_nothing_and_another_process_finds_all_in_the_cache(
    compiler: concurrent.futures.Executor, tmp_path: Path
) -> None:
    assert compiler.submit(warming.lazily_imported).result()
    cache = str(tmp_path)
    first = compiler.submit(warming.warmed, cache, 1).result()
    assert len(first["compiled"]) == 2, first
    assert (first["found"], first["here"], first["later"]) == ((), 1, 0), "one here, one in the other process"
    second = compiler.submit(warming.warmed, cache, 1).result()
    assert second == {"compiled": (), "found": first["compiled"], "here": 0, "later": 0, "hook": True}


@pytest.mark.compiler
def test_a_process_that_is_lost_is_made_up_for(compiler: concurrent.futures.Executor, tmp_path: Path) -> None:
    found = compiler.submit(warming.warmed_although_a_compiler_is_lost, str(tmp_path)).result()
    assert len(found["compiled"]) == 2, found
    assert (found["here"], found["later"]) == (2, 0)
