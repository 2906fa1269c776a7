"""A bounded part of the fuzz without a GPU, by PyTorch's operators and interpreted kernels; and it finds defects."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tuned.calls.gru.run
import tuned.calls.rope.plan
import tuned.lookup.lookup
from generator.rendering.structures import load
from tests.fuzz import case as cases
from tests.fuzz import draw, draw_rope, forced, formula, originals
from tests.fuzz.__main__ import FIRST_TURN, SWEEPS
from tests.fuzz.draw import CPU, GPU, case, index_of
from tests.fuzz.given import FLOOR, STORED, UNIT, Given, Part, Wrong, largest_of
from tests.fuzz.interpreted import interpreted_families
from tests.fuzz.planted import GRU as PLANTED_IN_GRU
from tests.fuzz.planted import PLANTS, planted
from tests.fuzz.worlds import FAMILIES, KERNELS, ROPE, SEED, assert_right
from tests.support import oracle
from tests.support.pythons import python
from tests.support.rope_calls import Watch, watch
from tests.support.run import INTERPRETED
from tuned import dispatch
from tuned.calls.rope import norm, saved
from tuned.families.gru.variant import steps_are_alike
from tuned.families.registry import FAMILIES as FAMILIES_OF
from tuned.families.rope.eager import norm_gradient
from tuned.families.rope.launches import WEIGHTS, kernel_names
from tuned.lookup.lookup import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interpreter

__all__ = ["watch"]
TURNS = range(FIRST_TURN, FIRST_TURN + 2 * SWEEPS, 2)  # the turns of a sweep with one case for each row
TRUNCATES = dataclasses.replace(GPU, truncates=True)  # calls as on a GPU, by Triton's interpreter where it must


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are so small that several threads would only slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_calls_by_pytorchs_operators_are_right() -> None:
    assert assert_right(CPU, range(140)) > 500


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_rope_by_kernels_is_right(watch: Watch) -> None:
    watch.interpreted = True
    assert assert_right(ROPE, range(36), 1) > 60
    assert watch.direct > 10


@pytest.fixture
def launched(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of norms that calls of CPU tensors launch; gradients are interpreted, or by PyTorch's operators."""
    names: set[str] = set()
    execute, kernels = watch._execute, norm._by_kernels

    def forward(part: Any, spec: Any, call: Any) -> None:
        names.add(part.kernel)
        execute(part, spec, call)

    def backward(spec: Any, variant: Any, prepared: Any, grad: Any, key_grad: Any) -> Any:
        names.update(kernel_names(spec, variant))
        if not watch.interpreted:
            return norm_gradient(prepared.eager_spec, prepared.call, grad, key_grad)
        return kernels(spec, variant, prepared, grad, key_grad)

    def interpreted(steps: Any, _launch: Any) -> None:
        for step in steps:
            with np.errstate(all="ignore"):
                load(step.kernel)[(step.programs,)](*step.arguments, **step.constants | {"PDL": False})

    monkeypatch.setattr(watch, "_execute", forward)
    monkeypatch.setattr(norm, "_by_kernels", backward)
    monkeypatch.setattr(saved, "run_steps", interpreted)
    return names


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_norms_by_kernels_are_right(watch: Watch, launched: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch.interpreted = True
    monkeypatch.setattr(draw, "NORMED", 1.0)
    assert assert_right(dataclasses.replace(KERNELS, kinds=("rope",)), range(40), 1) > 60
    assert len(launched) > 10
    assert WEIGHTS in launched


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_gradients_of_angles_by_kernels_are_right(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    interpreted = saved.run_steps

    def run(steps: Any, launch: Any) -> None:
        launched.extend(step.kernel for step in steps)
        interpreted(steps, launch)

    monkeypatch.setattr(saved, "run_steps", run)
    monkeypatch.setattr(draw_rope, "LEARNED", 1.0)
    for name in ("NORMED", "LATENT", "APPENDED"):
        monkeypatch.setattr(draw, name, 0.0)
    watch.interpreted = True
    assert assert_right(dataclasses.replace(KERNELS, kinds=("rope",), modes=("grad",)), range(24), 1) > 36
    assert len(set(launched)) > 2


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_caches_by_kernels_are_right(watch: Watch, launched: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch.interpreted = True
    monkeypatch.setattr(draw, "APPENDED", 1.0)
    assert assert_right(dataclasses.replace(KERNELS, kinds=("rope",)), range(30), 1) > 45
    assert {name for name in launched if "append" in name} == launched
    assert len(launched) > 6


def test_every_kernel_of_a_norm_or_a_cache_or_whole_rows_is_launched_by_calls_of_the_fuzz(launched: set[str]) -> None:
    """For a kernel that no row has, a row is made; some of the calls like that row must reach the kernel."""
    kernels = forced.all_kernels()
    ships = {name for name in kernels if name.startswith(("rope_norm_", "rope_append_")) or "_rows_" in name}
    for index, row in enumerate(forced.rows("rope")):
        if not (row.spec.normed or row.spec.appends or row.variant.whole_rows):
            continue
        launched.clear()
        wanted = set(kernel_names(row.spec, row.variant))
        for turn in TURNS:  # kernels take no key that lies otherwise than the query
            for call in case(TRUNCATES, SEED, index_of(TRUNCATES, "rope", index, turn)).calls:
                if not wanted <= launched:
                    with forced.forced("rope", index):
                        cases.perform(call, SEED, "cpu")
        assert wanted <= launched
        ships -= wanted
    assert not ships


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_latent_attention_by_kernels_is_right(
    watch: Watch, launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.interpreted = True
    monkeypatch.setattr(draw, "NORMED", 0.0)
    monkeypatch.setattr(draw, "LATENT", 1.0)
    assert assert_right(dataclasses.replace(KERNELS, kinds=("rope",)), range(30), 1) > 40
    assert len({name for name in launched if "mla" in name or "deinterleave" in name}) > 8


def test_every_kernel_of_latent_attention_is_launched_by_calls_of_the_fuzz(launched: set[str]) -> None:
    ships = {name for name in forced.all_kernels() if "_mla_" in name or "_deinterleave_" in name}
    assert len(ships) == 18
    for index, row in enumerate(forced.rows("rope")):
        if not row.spec.splits and not row.spec.deinterleaves:
            continue
        launched.clear()
        wanted = set(kernel_names(row.spec, row.variant))
        for turn in TURNS:
            for call in case(TRUNCATES, SEED, index_of(TRUNCATES, "rope", index, turn)).calls:
                if not wanted <= launched:
                    with forced.forced("rope", index):
                        cases.perform(call, SEED, "cpu")
        assert wanted <= launched
        ships -= wanted
    assert not ships


@functools.cache
def drawn_layouts() -> frozenset[tuple[str, str, bool]]:
    """(function, format, whether in place) of the calls in many cases."""
    calls = [call for index in range(3000) for call in case(CPU, SEED, index).calls if call.check != "check_refused"]
    told = ((c.function, c.arguments.get("tensor_format", "bshd"), c.arguments.get("inplace", False)) for c in calls)
    return frozenset(told)


@pytest.mark.parametrize(
    "kind", ["rope", "rope_qk", "rope_backward", "qk_norm_rope", "of_views", "qkv_norm_rope_", "mla_kv_rope"]
)
def test_every_way_to_lay_queries_and_keys_is_drawn(kind: str) -> None:
    drawn = [laid for function, *laid in drawn_layouts() if function.endswith(f".{kind}")]
    formats = {layout for layout, _ in drawn}
    assert formats == {"bshd", "sbhd", "thd", *(("bhsd",) if kind not in ("qkv_norm_rope_", "mla_kv_rope") else ())}
    places = {place for _, place in drawn}
    assert kind == "rope_backward" or len(places) == 1 + (kind not in ("qkv_norm_rope_", "mla_kv_rope"))


@pytest.mark.skipif(not INTERPRETED, reason="python -m tests.fuzz runs kernels on a GPU")
def test_the_gru_families_by_kernels_are_right() -> None:
    with interpreted_families():
        assert assert_right(FAMILIES, range(12), 1) > 20


# The fuzz itself ------------------------------------------------------------------------------------------------------

QUICK = dataclasses.replace(CPU, most=3000, hidden=8, long=0, modes=("plain", "no_grad", "grad"))
ROOT = Path(__file__).parents[2]


def found(name: str, most: int = 60) -> cases.Failure:
    """The first failure found with a defect planted."""
    world = dataclasses.replace(QUICK, kinds=("gru",) if PLANTS[name][0] == PLANTED_IN_GRU else ("rope",))
    with planted(name), pytest.MonkeyPatch.context() as patch:
        if name.endswith("norm"):
            patch.setattr(draw, "NORMED", 1.0)
        for index in range(most):
            _, failure = cases.run(case(world, SEED, index), "cpu")
            if failure is not None:
                return failure
    raise AssertionError(f"{name} was not found in {most} cases")


def test_planted_defects_are_found_and_their_scripts_fail_elsewhere_too(tmp_path: Path) -> None:
    failures = {name: found(name) for name in PLANTS}
    for name, failure in failures.items():
        (tmp_path / f"{name}.short.py").write_text(failure.script, encoding="utf-8")
        (tmp_path / f"{name}.whole.py").write_text(failure.whole, encoding="utf-8")
        assert len(failure.script.splitlines()) < 40
    done = python("-m", "tests.fuzz.planted", str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in PLANTS:
        (short, without), (whole, without_whole) = told[f"{name}.short"], told[f"{name}.whole"]
        assert (whole, without, without_whole) == (True, False, False), name
        assert short or name == "stale", name


@pytest.mark.parametrize(("theirs", "right"), [(1.0, True), (1.0 + 2**-20, False), (None, False)])
def test_only_pytorchs_own_bits_may_be_far_from_float64(theirs: float | None, right: bool) -> None:
    """cuDNN itself is at times further off than its settings say. A result with other bits must be near float64."""
    given = Given(SEED, device="cpu", mode="no_grad")
    reference = None if theirs is None else torch.tensor([theirs])
    given._as_good("result", torch.tensor([1.0]), reference, torch.tensor([1.1], dtype=torch.float64), 1e-7, 1)
    if right:
        given._settle()
    else:
        with pytest.raises(Wrong, match="result is wrong"):
            given._settle()


def test_a_case_is_a_seed_and_an_index() -> None:
    for index in range(40):
        first, again = (case(CPU, SEED, index) for _ in range(2))
        assert first == again
        assert cases.script(first, "cpu") == cases.script(again, "cpu")
    assert len({call.key() for index in range(100) for call in case(CPU, SEED, index).calls}) > 150
    assert case(CPU, SEED, 1) != case(CPU, SEED + 1, 1)


def test_no_call_without_a_position_is_to_be_refused_for_where_it_starts() -> None:
    drawn = (call for index in range(3000) for call in case(CPU, SEED, index).calls)
    refused = [call for call in drawn if call.named.get("text") == "values past the table"]
    assert len(refused) > 40
    for call in refused:
        name = next(name for name in ("x", "q", "qkv", "grad_output") if name in call.views)
        axis = {"bshd": 1, "bhsd": 2}.get(call.arguments.get("tensor_format", "bshd"), 0)
        assert call.views[name].shape[axis]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd", "bhsd"])
def test_the_formula_is_the_oracles(layout: str) -> None:
    """Compares two references that share no code, over everything that decides which angle turns a feature."""
    draw = torch.Generator().manual_seed(3)
    bounds = (2, 2, 8, 14) if layout == "thd" else None
    for style, entries, rotated, transposed, ranks in itertools.product(
        ("half", "interleaved"), ("pair", "feature"), oracle_rotated(), (False, True), ((1, 0), (2, 1))
    ):
        if rotated == "proportional" and style == "interleaved":
            continue
        cp_size, cp_rank = ranks
        seq, batch, head_dim, rotary = (8 if cp_size > 1 else 14, 1, 12, 8) if bounds else (6, 2, 12, 8)
        whole = None if bounds is None else tuple(b - b % (2 * cp_size) for b in bounds)
        x = torch.randn(seq, batch, 3, head_dim, generator=draw)
        table = torch.randn(60, rotary if entries == "feature" else rotary // 2, generator=draw)
        starts = (3, 1, 2) if bounds else (4, 0)
        places = oracle.call_positions(seq, batch, cu_seqlens=whole, starts=starts, cp_size=cp_size, cp_rank=cp_rank)
        cos, sin = (oracle.rows_at(f(table.double()).numpy(), places) for f in (torch.cos, torch.sin))
        turned = oracle.features(head_dim, rotary, style, rotated)
        held = np.array([row[0] is not None for row in places])
        want = oracle.rope(
            x.double().numpy(), cos, sin, turned=turned, style=style, entries=entries, transposed=transposed, held=held
        )
        call = formula.Rope(
            layout, style == "interleaved", entries, rotated, transposed=transposed, cp_size=cp_size, cp_rank=cp_rank
        )
        given = {"freqs": table, "starts": torch.tensor(starts)}
        given |= {} if whole is None else {"cu_seqlens": torch.tensor(whole, dtype=torch.int32)}
        as_laid = {
            "bshd": lambda t: t.transpose(0, 1), "sbhd": lambda t: t, "thd": lambda t: t[:, 0],
            "bhsd": lambda t: t.permute(1, 2, 0, 3),
        }[layout]  # fmt: skip
        got, bound = formula.rope(call, as_laid(x), given)
        torch.testing.assert_close(got, as_laid(torch.from_numpy(want)), rtol=1e-12, atol=1e-12)
        allowed = oracle.rope_tolerance(x.double().numpy(), want, "float32", turned=turned)
        assert bool((bound <= as_laid(torch.from_numpy(allowed)) * (1 + 1e-9)).all())
        assert bool((bound > 0).any())


def oracle_rotated() -> tuple[str, ...]:
    return "first", "last", "proportional"


def test_every_row_is_what_lookups_give_while_it_is_forced() -> None:
    gpu = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")
    walk = forced.every_row()
    assert {family for family, _ in walk} == set(FAMILIES_OF)
    assert len(walk) > 100
    assert all(forced.rows(name)[index].median_us > 0 for name, index in walk), "no row of a table takes no time"
    for name, index in walk:
        family, row = FAMILIES_OF[name], forced.rows(name)[index]
        before = tuned.lookup.lookup.choose(family, row.spec, row.size, gpu)
        with forced.forced(name, index):
            assert tuned.calls.rope.plan.choose(family, row.spec, row.size, gpu).variant == row.variant
            assert tuned.calls.gru.run.choose(family, row.spec, row.size, gpu).rule == "winner"
        assert tuned.calls.rope.plan.choose is tuned.lookup.lookup.choose
        assert tuned.lookup.lookup.choose(family, row.spec, row.size, gpu) == before
    assert set(walk) <= forced.SERVED
    assert set().union(*(forced.kernels_of(*row) for row in walk)) <= forced.all_kernels()


def test_a_launch_for_each_step_serves_calls_while_its_row_is_forced() -> None:
    """Most such rows are for graphs only: the forced lookup does not count the host's time."""
    gpu, rows = Gpu("nvidia_h200", 90, 132, "NVIDIA H200"), forced.rows("gru")
    by_steps = [index for index, row in enumerate(rows) if row.variant.strategy == "library"]
    assert by_steps
    for index in by_steps:
        spec, size = rows[index].spec, rows[index].size
        with forced.forced("gru", index):
            choice = tuned.calls.gru.run.choose(FAMILIES_OF["gru"], spec, size, gpu)
            served = tuned.calls.gru.run.timely(choice, spec, size, captured=False)
        assert (served == choice) == (steps_are_alike(spec) and spec.dense), rows[index]


def test_all_that_is_known_of_calls_is_forgotten_for_a_case_that_is_forced() -> None:
    """This covers every table of plans in the modules of calls, whatever its name."""
    kept = {"_CAPTURED", "_FORMULAS"}  # one is read by captured graphs, compiled operators are made of the other
    modules = [m for name, m in sys.modules.items() if name.startswith(("tuned.calls.", "tuned.launching.plan"))]
    tables = {
        n for m in modules for n, kind in vars(m).get("__annotations__", {}).items() if kind.startswith("dict[Any")
    }
    assert "_TRAINED" in tables
    assert tables - kept <= set(forced.PLANS)


def test_a_forced_row_serves_calls_that_are_far_from_it() -> None:
    """Calls of the fuzz are small, beyond the reach of most rows, so the variants of those rows were never used."""
    gpu, rope = Gpu("nvidia_h200", 90, 132, "NVIDIA H200"), FAMILIES_OF["rope"]
    row = forced.rows("rope")[0]
    far = dataclasses.replace(row.size, seq=64 * row.size.seq)
    assert tuned.lookup.lookup.choose(rope, row.spec, far, gpu).row != row
    with forced.forced("rope", 0):
        assert tuned.lookup.lookup.choose(rope, row.spec, far, gpu).why == "forced by the fuzz"


def test_a_row_is_drawn_calls_that_kernels_serve() -> None:
    """The library's GEMM serves linear_cat of one segment, but a GRU's projection has rows with one segment."""
    rows = forced.rows("linear_cat")
    assert any(len(row.spec.inputs) == 1 for row in rows)
    for index, row in enumerate(rows):
        call = case(GPU, 3, index_of(GPU, "linear_cat", index, 0)).calls[0]
        widths = [t.shape[-1] for name, t in call.views.items() if name.startswith("x")]
        assert len(widths) > 1
        assert sum(widths) == sum(row.spec.inputs)


def test_a_table_without_rows_has_a_gradient_to_judge() -> None:
    """All sequences are empty, so no result depends on the table, and it is in no graph."""
    given = Given(7, mode="grad")
    cu_seqlens = given.tensor("cu_seqlens", (3,), torch.int32, (1,), 0, 3, values=(0, 0, 0))
    cos, sin = (given.tensor(name, (0, 4), torch.float32, (4, 1), 0, 8, grad="leaf") for name in ("cos", "sin"))
    x = given.tensor("x", (2, 2, 8), torch.float32, (16, 8, 1), 0, 32, grad="leaf")
    given.run(dispatch.rope, x=x, cu_seqlens=cu_seqlens, cos=cos, sin=sin, tensor_format="thd")
    angles = {"cos": "cos", "sin": "sin", "cu_seqlens": "cu_seqlens"}
    given.check_rope(Part("x", "x", formula.Rope(layout="thd"), angles), results=("x",))


@pytest.mark.parametrize(("name", "place"), [("x", 3), ("x", 36), ("cos", 0), ("cos", 4)])
def test_a_write_into_an_input_or_around_it_is_wrong(name: str, place: int) -> None:
    """Planted defects also show in their results, which come from changed inputs; here the results are right."""
    given = Given(7)
    x = given.tensor("x", (1, 2, 2, 8), torch.float32, (32, 16, 8, 1), 4, 40)
    cos, sin = (given.tensor(angle, (2, 4), torch.float32, (4, 1), 4, 16) for angle in ("cos", "sin"))

    def writing(**arguments: torch.Tensor) -> torch.Tensor:
        out = dispatch.rope(**arguments)
        arguments[name].as_strided((1,), (1,), place).fill_(1.0)
        return out

    given.run(writing, x=x, cos=cos, sin=sin)
    with pytest.raises(Wrong, match=f"{name}, or the memory around it, was changed"):
        given.check_rope(Part("x", "x", formula.Rope(), {"cos": "cos", "sin": "sin"}), results=("x",))


def test_the_command_counts_and_a_process_that_dies_is_told_and_started_again(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "5", "--processes", "1", "--calls", "30", "--classes", "8"]
    # On a CPU even where there is a GPU: there one process would go on until every row has been chosen.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--out", str(out), "--crash", "2"],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    told = json.loads(out.read_text(encoding="utf-8"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert (told["wrong"], told["seed"]) == (1, 5)
    assert told["calls"] >= 30
    assert told["classes"] >= 8
    (failure,) = told["failures"]
    assert failure["index"] == 2
    assert "ended with 9" in failure["message"]
    assert "given.run" in done.stdout


def test_a_reference_on_another_device_gets_the_gradients_that_the_call_got() -> None:
    """The same seed gives other numbers on another device."""
    given = Given(7, mode="grad")
    x = given.tensor("x", (3, 8), torch.float32, (8, 1), 0, 24, grad="leaf")
    w = given.tensor("w", (5, 8), torch.float32, (8, 1), 0, 40, grad="leaf")
    given.run(dispatch.linear_cat, inputs=(x,), weight=w)
    (drawn,) = given.grad_outputs.values()
    given.grad_outputs = {0: drawn + 1}  # as another generator would draw it
    reference = given._original("linear_cat", doubled=True, device="cpu")
    torch.testing.assert_close(reference.grads["x"], (drawn + 1).double() @ w.detach().double())


def test_gradients_of_a_cells_weights_are_judged_by_the_largest_of_them() -> None:
    grads = {
        "weight_ih_1_0": torch.tensor([0.1, -0.02]),
        "b_ih_1_0": torch.tensor([-3.0]),
        "b_hh_1_0": None,
        "weight_ih_0_0": torch.tensor([50.0]),
        "weight_ih_1_01": torch.tensor([70.0]),
        "input": torch.tensor([-9.0]),
        "hx": torch.empty(0),
    }
    wanted = {"weight_ih_1_0": 3.0, "b_ih_1_0": 3.0, "weight_ih_0_0": 50.0, "input": 9.0, "hx": 0.0}
    assert {name: float(largest_of(name, grads)) for name in wanted} == wanted


def test_sums_of_rounded_gates_are_within_the_bound_and_those_that_lack_a_term_are_not() -> None:
    """Steps of one unit in float16: the gates' gradients are stored rounded, and may cancel in a weight's gradient."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    calls, tokens, unit = 20_000, 25, UNIT[torch.float16]
    gates, states = 0.3 * normal(calls, tokens, 3), normal(calls, tokens, 1).tanh().half().double()
    exact, biases = (gates * states).sum(1), gates.sum(1)
    found = (gates.half().double() * states).sum(1).half().double()
    grads = {"weight_ih_1_0": exact, "b_ih_1_0": biases}
    old = torch.stack([largest_of("own", {"own": one}) for one in exact])
    new = torch.stack([largest_of("weight_ih_1_0", {n: t[call] for n, t in grads.items()}) for call in range(calls)])

    def beyond(error: torch.Tensor, largest: torch.Tensor) -> float:
        return float((error.abs().amax(1) > FLOOR * STORED * unit * largest).double().mean())

    assert beyond(found - exact, old) > 0, "sums that cancel"
    assert beyond(found - exact, new) == 0
    assert beyond((gates * states)[:, 0], new) > 0.95


def test_a_sum_of_gradients_that_cancel_may_err_by_the_roundings_of_what_is_summed() -> None:
    """For a head whose features are all one number, the norm's gradient gives terms that add up to nearly nothing."""
    given = Given(16, mode="grad")
    q = given.tensor("q", (3, 7, 2, 4), torch.float16, (672, 96, 3, 0), 20, 1960, grad="made")
    k = given.tensor("k", (3, 7, 2, 4), torch.float16, (56, 8, 4, 1), 17, 201)
    weights = [given.tensor(n, (4,), torch.float32, (1,), 16, 36) for n in ("q_weight", "k_weight")]
    rates = given.tensor("inv_freq", (2,), torch.float32, (1,), 16, 34, function="rates")
    given.run(dispatch.qk_norm_rope, q=q, k=k, q_weight=weights[0], k_weight=weights[1], inv_freq=rates)
    given.check_pytorch("qk_norm_rope")


def test_what_lies_on_meta_has_nothing_to_ask_and_leaves_the_rest_asked() -> None:
    given = object.__new__(Given)
    given.flags = []
    given._flag("a result of no elements", torch.ones(2, dtype=torch.bool, device="meta"))
    given._flag("nothing", torch.zeros(2, dtype=torch.bool))
    given._settle()
    given._flag("this", torch.tensor([False, True]))
    with pytest.raises(Wrong, match=r"^this$"):
        given._settle()


def test_a_reference_has_what_lies_on_meta_in_its_own_dtype_too() -> None:
    """torch.nn.GRU compares the dtypes of its input and its weights on any device."""
    given = Given(7, mode="no_grad")
    x = given.tensor("x", (3, 8), torch.float16, (8, 1), 0, 24, device="meta")
    given.tensor("w", (5, 8), torch.float16, (8, 1), 0, 40)
    given.run(dispatch.linear_cat, inputs=(x,), weight=given.built["w"].tensor)
    reference = given._original("linear_cat", doubled=True)
    assert reference.arguments["inputs"][0].dtype == reference.arguments["weight"].dtype == torch.float64


STRIDED = "view size is not compatible with input tensor's size and stride (at least one dimension)"


@pytest.mark.parametrize(
    ("ours", "besides", "right"),
    [
        ("of two dtypes", "of two dtypes", True),
        ("of two dtypes", "of two shapes", False),
        ("of two dtypes", None, False),
        (STRIDED, None, True),
    ],
)
def test_what_pytorch_would_refuse_besides_what_is_taken_is_to_be_refused_in_its_words(
    ours: str, besides: str | None, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch names one of two reasons; if it names strides that kernels take, a call may be refused for the other."""

    def theirs(inputs: Any, weight: torch.Tensor) -> torch.Tensor:
        if not weight.is_contiguous():
            raise RuntimeError(STRIDED)
        if besides is not None:
            raise RuntimeError(besides)
        return torch.nn.functional.linear(torch.cat(inputs, -1), weight)

    def refused(**_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(ours)

    monkeypatch.setattr(originals, "linear_cat", theirs)
    given = Given(7, mode="no_grad")
    x = given.tensor("x", (3, 8), torch.float32, (8, 1), 0, 24)
    given.tensor("w", (5, 8), torch.float32, (1, 5), 0, 40)
    given.run(refused, inputs=(x,), weight=given.built["w"].tensor)
    with nullcontext() if right else pytest.raises(Wrong, match="of two dtypes"):
        given.check_pytorch("linear_cat", must=True, text=True)
