"""The recurrence on a real GPU: every way to run it against float64 and PyTorch's GRU, in graphs, on streams, long."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import tuned
import tuned.nn
from tests.support import pairwise
from tests.support.as_good import assert_as_good
from tests.support.gru_sequences import Sequences, assert_memory_right, assert_steps_right, build
from tests.support.run import run as run_launches
from tuned import dispatch
from tuned.calls.gru import eager, run
from tuned.calls.gru.arguments import GruCall, gru_call
from tuned.families.choices import choices
from tuned.families.gru.launches import launches
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, alone, default_variant, programs, rejection
from tuned.launching.launcher import run_step
from tuned.lookup.gpu import gpu_of
from tuned.lookup.lookup import Choice

pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")  # torch.nn.GRU warns of weights of its own

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuned.families.launch import Launch

ROOT = Path(__file__).parents[2]
FEATURES = 24
PROCESS_SECONDS = 240  # until a hang shows; most of the time is importing and compiling beside other tests
RUNS = 5
LARGEST = 2**20  # tokens times units, which the oracle computes on the CPU
SHAPES = {"layer": (1, 1), "both": (2, 1), "stack": (1, 3)}  # directions, layers
NUMBERS = {
    "brain": ("bfloat16", "tf32"),
    "half": ("float16", "tf32"),
    "tf32": ("float32", "tf32"),
    "ieee": ("float32", "ieee"),
}
SPLIT = GruVariant("persistent", "split", 16, 16, "spin")
STAGED = GruVariant("persistent", "staged", 16, 64, "spin", num_warps=8)


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


# Variants by name ---------------------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "shape": tuple(SHAPES),
    "numbers": tuple(NUMBERS),
    "bias": (True, False),
    "hidden": (20, 200, 256, 600, 1024),
    "rows": (1, 3, 17, 129),
    "seq": (1, 2, 7, 65),
    "view": ("steps", "rows", "apart"),
    "strategy": ("persistent", "steps"),
    **{name: choices(GruVariant)[name] for name in ("form", "exchange", "prefetch", "num_warps")},
    "block_hidden": (8, 16, 32, 64, 128),
    "block_batch": (8, 16, 32, 64),
}


def parts(knobs: dict[str, Any]) -> tuple[GruSpec, GruVariant, tuple[int, ...]]:
    directions, layers = SHAPES[knobs["shape"]]
    dtype, precision = NUMBERS[knobs["numbers"]]
    spec = GruSpec(dtype, knobs["hidden"], knobs["layout"], directions, layers, knobs["bias"], precision)
    variant = GruVariant(**{name: knobs[name] for name in choices(GruVariant) if name in knobs})
    rows, seq = knobs["rows"], knobs["seq"]
    if spec.layout == "dense":
        return spec, variant, (seq,) * rows
    falling = [max(1, seq - row) for row in range(rows)]
    if spec.layout == "packed":
        return spec, variant, tuple(falling)
    return spec, variant, tuple(0 if row % 3 == 1 else n for row, n in enumerate([seq, *falling[:0:-1]]))


def possible(knobs: dict[str, Any]) -> bool:
    """Whether kernels can do it on a GPU of 132 multiprocessors, even if it would never be tried for speed."""
    spec, variant, lengths = parts(knobs)
    if sum(lengths) * spec.hidden > LARGEST:
        return False
    tried = variant if variant.exchange != "poll" else dataclasses.replace(variant, exchange="counter")
    if rejection(spec, None, tried, 90) is not None:
        return False
    waits = variant.strategy == "persistent" and not alone(spec, variant)
    if not waits and variant.exchange != GruVariant.exchange:
        return False
    return not waits or programs(spec, GruSize(len(lengths), 1), variant) <= 132


STAGED_AXES = AXES | {  # a draw of all choices does not meet these
    "form": ("staged",),
    "hidden": (1032, 1288, 1544, 2048),
    "strategy": ("persistent",),
    "block_hidden": (16,),
    "block_batch": (8, 16, 32, 64),
    "num_warps": (8,),
}
COMBINATIONS = [
    *pairwise.covering(pairwise.sample(AXES, possible, pairwise.on_a_gpu(1500))),
    *pairwise.covering(pairwise.sample(STAGED_AXES, possible, pairwise.on_a_gpu(300))),
]


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(
            knobs,
            marks=pytest.mark.gpu if index % 3 else pytest.mark.gpu_sample,
            id="-".join(str(value) for value in knobs.values()),
        )
        for index, knobs in enumerate(COMBINATIONS)
    ],
)
def test_every_choice_computes_what_the_oracle_does_again_and_again(knobs: dict[str, Any]) -> None:
    spec, variant, lengths = parts(knobs)
    count = programs(spec, GruSize(len(lengths), 1), variant)
    reason = rejection(spec, None, variant, capability()) if capability() < 90 else None
    if reason is not None or count > processors():
        pytest.skip(reason or f"{count} programs")
    built = build(Sequences(spec, lengths, knobs["view"]), "cuda")
    before = {name: base.clone() for name, base in built.bases.items()}
    found = []
    for _ in range(RUNS):
        for step in launches(spec, variant, built.call):
            run_step(step, lambda launch: run_launches([launch]))
        found.append([t.clone() for t in built.written().values()])
    torch.cuda.synchronize()
    assert_steps_right(built, rounds_products=variant.strategy == "library")
    assert_memory_right(built, before)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True)), "it differs from run to run"


@pytest.mark.gpu_sample
def test_a_grid_that_is_too_large_is_an_error_and_no_hang() -> None:
    built = build(Sequences(GruSpec("bfloat16", 512), (2,) * 4096), "cuda")
    assert programs(built.case.spec, GruSize(4096, 2), SPLIT) > 8 * processors()
    *_, launch = launches(built.case.spec, SPLIT, built.call)
    with pytest.raises(RuntimeError, match="cooperative"):
        run_launches([cast("Launch", launch)])
    torch.cuda.synchronize()
    assert float(torch.ones(4, device="cuda").sum()) == 4, "the GPU can be used after it"


# Whole calls --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """A module of PyTorch's, the same module in float64, and a call of each with the same numbers."""

    call: GruCall
    exact: GruCall

    def assert_as_good(self, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The error is at most PyTorch's in the same dtype."""
        assert_as_good(found, eager.gru(self.call), eager.gru(self.exact))


def model_of(
    hidden: int,
    layout: str = "dense",
    lengths: tuple[int, ...] = (7,) * 3,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 1,
    both: bool = False,
    first: bool = False,
) -> Model:
    torch.manual_seed(0)
    module = torch.nn.GRU(FEATURES, hidden, layers, bidirectional=both, device="cuda", dtype=dtype)
    kwargs: dict[str, Any] = {"num_layers": layers, "bidirectional": both}
    rows = [torch.randn(n, FEATURES, device="cuda", dtype=dtype) for n in lengths]
    if layout == "dense":
        x, kwargs["batch_first"] = torch.stack(rows, 0 if first else 1), first
    elif layout == "packed":
        packed = pack_sequence(rows)
        x, kwargs["batch_sizes"] = packed.data, packed.batch_sizes
    else:
        bounds = [0, *itertools.accumulate(lengths)]
        x, kwargs["max_seqlen"] = torch.cat(rows), max(lengths)
        kwargs["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    hx = torch.randn(layers * (2 if both else 1), len(lengths), hidden, device="cuda", dtype=dtype)

    def call(of: torch.nn.GRU, x: torch.Tensor, hx: torch.Tensor) -> GruCall:
        return gru_call(x, hx, [w.detach() for w in of._flat_weights if w is not None], **kwargs)

    return Model(call(module, x, hx), call(copy.deepcopy(module).double(), x.double(), hx.double()))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[GruVariant], None]:
    """Makes one variant the choice for every call that it can serve."""

    def force(variant: GruVariant) -> None:
        def choose(spec: GruSpec, _size: GruSize, _gpu: Any) -> Choice:
            reason = rejection(spec, None, variant, capability())
            return Choice("winner", str(reason), None if reason else variant)

        monkeypatch.setattr(run, "_choose", choose)
        if variant.strategy != "persistent":  # this variant is launched for each step, in CUDA graphs only
            monkeypatch.setattr(run, "capturing", lambda _device: True)

    return force


CALLS: list[tuple[dict[str, Any], GruVariant]] = [
    ({"hidden": 256, "lengths": (65,) * 17}, SPLIT),
    ({"hidden": 256, "lengths": (65,) * 129, "first": True}, GruVariant("persistent", "tile", 32, 32, "spin")),
    ({"hidden": 200, "lengths": (65,) * 3, "both": True, "dtype": torch.float16}, SPLIT),
    ({"hidden": 600, "lengths": (65,)}, dataclasses.replace(SPLIT, block_batch=8)),
    (
        {"hidden": 256, "lengths": (65,) * 10, "layers": 3, "dtype": torch.float32},
        dataclasses.replace(SPLIT, block_hidden=32),
    ),
    ({"hidden": 256, "layout": "packed", "lengths": (65, 40, 7, 1), "both": True, "layers": 2}, SPLIT),
    ({"hidden": 256, "layout": "thd", "lengths": (3, 65, 0, 40), "layers": 2}, SPLIT),
    ({"hidden": 60, "lengths": (65,) * 17}, GruVariant("persistent", block_hidden=64)),
    ({"hidden": 1096, "lengths": (65,) * 45, "both": True}, STAGED),
    (
        {"hidden": 1536, "layout": "packed", "lengths": (65, 40, 7, 1), "dtype": torch.float16},
        dataclasses.replace(STAGED, block_batch=32),
    ),
    ({"hidden": 2048, "layout": "thd", "lengths": (3, 65, 0, 40)}, dataclasses.replace(STAGED, block_batch=16)),
    ({"hidden": 100, "lengths": (65,) * 5}, dataclasses.replace(SPLIT, exchange="counter")),
    ({"hidden": 512, "lengths": (7,) * 33, "first": True, "layers": 2}, GruVariant()),
    ({"hidden": 512, "layout": "packed", "lengths": (7, 6, 2)}, GruVariant("steps")),
    ({"hidden": 1, "lengths": (2,)}, dataclasses.replace(SPLIT, exchange="counter")),
]


@pytest.mark.gpu_sample
@pytest.mark.parametrize(
    ("shape", "variant"), CALLS, ids=lambda v: "-".join(str(x) for x in v.values()) if isinstance(v, dict) else v.form
)
def test_a_call_errs_no_more_than_pytorch(
    forced: Callable[[GruVariant], None], shape: dict[str, Any], variant: GruVariant
) -> None:
    forced(variant)
    model = model_of(**shape)
    assert run.why_not(model.call) is None
    found = run.forward(model.call)
    model.assert_as_good(found)
    for _ in range(RUNS - 1):
        again = run.forward(model.call)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("layout", ["packed", "thd"])
def test_any_number_of_sequences(layout: str) -> None:
    for count in (1, 2, 3, 17, 64, 129, 200):
        model = model_of(128, layout, tuple(max(1, 30 - row // 3) for row in range(count)))
        model.assert_as_good(run.forward(model.call))


@pytest.mark.gpu_sample
def test_no_sequence_at_all() -> None:
    call = model_of(64).call
    output, h_n = run.forward(dataclasses.replace(call, input=call.input[:, :0], hx=call.hx[:, :0]))
    assert (output.shape, h_n.shape) == ((7, 0, 64), (1, 0, 64))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("rows", [0, 3])
def test_without_a_token_kernels_and_pytorch_give_the_same_dtypes(rows: int) -> None:
    module = torch.nn.GRU(8, 16, bias=False).cuda()
    x, hx = torch.randn(rows, 8, device="cuda"), torch.randn(1, 1, 16, device="cuda")
    weights = [w.detach() for w in module._flat_weights if w is not None]
    bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    with torch.autocast("cuda", torch.float16):
        ours = dispatch.gru(x, hx, weights, bias=False, cu_seqlens=bounds, max_seqlen=rows)
        theirs = eager.gru(gru_call(x, hx, weights, bias=False, cu_seqlens=bounds, max_seqlen=rows))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs] == [torch.float16] * 2


@pytest.mark.gpu_sample
@pytest.mark.parametrize("layers", [1, 3])
def test_a_smaller_gpu_gets_what_fits_it(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    gpu = dataclasses.replace(gpu_of(torch.device("cuda", 0)), multiprocessors=24, device="another_gpu", name="Another")
    monkeypatch.setattr(run, "gpu_of", lambda _device: gpu)
    for batch in (1, 16, 200):
        model = model_of(512, lengths=(5,) * batch, layers=layers)
        for spec, size, choice in run._parts(model.call):
            waits = choice.variant is not None and not alone(spec, choice.variant)
            assert not waits or programs(spec, size, choice.variant) <= 24
        model.assert_as_good(run.forward(model.call))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twenty_thousand_steps_drift_no_more_than_pytorch(
    forced: Callable[[GruVariant], None], dtype: torch.dtype
) -> None:
    forced(SPLIT)
    model = model_of(256, lengths=(20_000,) * 4, dtype=dtype)
    found, theirs, exact = (f for f in (run.forward(model.call), eager.gru(model.call), eager.gru(model.exact)))
    for steps in (slice(0, 100), slice(-100, None)):
        assert_as_good((found[0][steps],), (theirs[0][steps],), (exact[0][steps],))
    assert_as_good(found, theirs, exact)


# In a model ---------------------------------------------------------------------------------------------------------


def module_of(hidden: int, layers: int = 1, *, both: bool = False) -> Any:
    torch.manual_seed(0)
    return tuned.nn.GRU(FEATURES, hidden, layers, bidirectional=both, device="cuda", dtype=torch.bfloat16).eval()


@pytest.mark.gpu_sample
@pytest.mark.parametrize("scale", [1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_states_are_as_precise_as_pytorchs(dtype: torch.dtype, scale: float) -> None:
    """The error is relative to the states, which are small: tanh of a number near 0 must be near that number."""
    torch.manual_seed(0)
    theirs = torch.nn.GRU(512, 512, bias=False, device="cuda", dtype=dtype).requires_grad_(False)
    ours = tuned.nn.GRU(512, 512, bias=False, device="cuda", dtype=dtype).requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(16, 32, 512, device="cuda", dtype=dtype) * scale
    assert tuned.explain(ours, x).kernels
    exact = copy.deepcopy(theirs).double()(x.double())[0]
    errors = [float((m(x)[0].double() - exact).norm() / exact.norm()) for m in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1], errors


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"bidirectional": True, "batch_first": True}, {"num_layers": 2, "bias": False}]
)
def test_steps_of_many_rows_give_the_same_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The call is decided in full, known by its properties, known at once, captured; and has a gradient."""

    def choose(spec: GruSpec, *_: Any) -> Choice:
        return Choice("eager", "one by one", None) if spec.stacked else Choice("winner", "", GruVariant())

    monkeypatch.setattr(run, "_choose", choose)
    monkeypatch.setattr(run, "timely", lambda choice, *_, **__: choice)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, **settings}
    module = tuned.nn.GRU(FEATURES, 96, **made)
    theirs = torch.nn.GRU(FEATURES, 96, **made)
    theirs.load_state_dict(module.state_dict())
    shape = (9, 300) if settings.get("batch_first") else (300, 9)  # with so many steps kernels train
    x = torch.randn(*shape, FEATURES, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = [module(x) for _ in range(4)]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append(module(x))
        graph.replay()
        wanted = theirs(x)
    found += [module(x) for _ in range(3)]  # these keep what a gradient needs
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))
        for got, want in zip(one, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-2)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 3, "bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True}]
)
def test_rows_of_no_multiple_of_16_bytes_are_right_where_they_are_widened(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Decided in full, known by properties, at once, captured; an input is infinite; weights change in place."""
    variant = dataclasses.replace(SPLIT, block_hidden=32)
    monkeypatch.setattr(run, "_choose", lambda *_: Choice("winner", "", variant, us=1.0))
    monkeypatch.setattr(run, "pays", lambda *_, **__: True)
    made: dict[str, Any] = {"device": "cuda", "dtype": dtype, **settings}
    module, theirs = tuned.nn.GRU(FEATURES + 1, 101, **made), torch.nn.GRU(FEATURES + 1, 101, **made)
    shape = (9, 40) if settings.get("batch_first") else (40, 9)
    x = torch.randn(*shape, FEATURES + 1, device="cuda", dtype=dtype)
    x[3, 2, 1] = torch.inf
    with torch.no_grad():
        assert "units more, so that rows are a multiple of 16 bytes" in tuned.explain(module, x).why
        for _ in range(4):
            for weight in module.parameters():
                weight.mul_(0.9)
            theirs.load_state_dict(module.state_dict())
            found, wanted = [module(x)], theirs(x)
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found.append(module(x))
            graph.replay()
            for one in found:
                assert one[0].is_contiguous()
                for got, want in zip(one, wanted, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.gpu
def test_a_graph_replayed_a_thousand_times_gives_what_calls_give(forced: Callable[[GruVariant], None]) -> None:
    forced(SPLIT)
    module = module_of(256, 2)
    other = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(other):  # the graph runs on another stream than the input's
            x = torch.randn(33, 3, FEATURES, device="cuda", dtype=torch.bfloat16)
        torch.cuda.current_stream().wait_stream(other)
        inputs = [torch.randn_like(x) for _ in range(16)]
        wanted = [module(given) for given in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, h_n = module(x)
        right = torch.ones((), dtype=torch.bool, device="cuda")
        for index in range(1000):
            x.copy_(inputs[index % 16])
            graph.replay()
            right &= (output == wanted[index % 16][0]).all() & (h_n == wanted[index % 16][1]).all()
    assert bool(right)


@pytest.mark.gpu
def test_a_model_as_it_is_runs_on_the_kernels() -> None:
    ours = module_of(256, 2, both=True)
    theirs = torch.nn.GRU(FEATURES, 256, 2, bidirectional=True, device="cuda", dtype=torch.bfloat16).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(9, 3, FEATURES, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), tuned.nn.patched():
        found = theirs(x)
    with torch.no_grad():
        assert tuned.explain(ours, x).rule != "eager"
        assert all(torch.equal(a, b) for a, b in zip(found, ours(x), strict=True))


@pytest.mark.gpu
def test_a_compiled_model_gives_what_the_call_gives() -> None:
    module = module_of(256, 2)
    x = torch.randn(9, 3, FEATURES, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(lambda given: module(given * 2)[0] + 1, fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x * 2)[0] + 1, rtol=0, atol=0)


# Processes that may hang --------------------------------------------------------------------------------------------


def process(deed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.gru_stress", deed]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)


@pytest.mark.gpu
@pytest.mark.parametrize("deed", ["two_streams", "beside_others", "delays", "no_numbers", "empty_tiles"])
def test_nothing_hangs_and_results_stay_right(deed: str) -> None:
    done = process(deed)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.gpu_sample
def test_the_default_of_every_text_runs() -> None:
    for layout, layers in itertools.product(LAYOUTS, (1, 2)):
        spec = GruSpec("bfloat16", 128, layout, layers=layers)
        lengths = (3,) * 2
        variant = default_variant(spec, GruSize(2, 3))
        built = build(Sequences(spec, lengths), "cuda")
        call = dataclasses.replace(built.call, products=built.call.h_0.new_empty(2, 3 * 128))
        for step in launches(spec, variant, call):
            run_step(step, lambda launch: run_launches([launch]))
        assert_steps_right(built, rounds_products=variant.strategy == "library")
