"""The operators tuned::rope and tuned::rope_qk, and RoPE under torch.compile, torch.export and tracers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.rope_calls import Case, build, watch
from tests.support.rope_forms import FORMS, angles, assert_same, leaves, turned
from tuned.calls.rope import call as rope_call
from tuned.calls.rope import ops
from tuned.compat.flash_attn import apply_rotary_emb_qkv_
from tuned.dispatch import qk_norm_rope, rope, rope_append_, rope_qk, rope_qkv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._dynamo.testing import CompileCounterWithBackend

    from tuned.calls.rope.arguments import Given, Settings

pytestmark = pytest.mark.compiler

__all__ = ["watch"]

B, S, H, K, D = 2, 5, 4, 2, 16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from torch._inductor import config  # noqa: PLC0415 - 2 s of every process that collects
    from torch._inductor.utils import fresh_cache  # noqa: PLC0415

    torch._dynamo.reset()
    torch.manual_seed(0)
    # Inductor's caches on disk know a graph by its operators, not by what ours do below: a change there would be missed.
    # And C++ is compiled without vector instructions, since finding out which a processor has takes ten seconds.
    # Precompiled headers, in each fresh cache, take longer than the few files that include them.
    quick = {"cpp.simdlen": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with fresh_cache(), config.patch(quick):
        yield
    torch._dynamo.reset()


# The operators ----------------------------------------------------------------------------------------------------------

CHECKED = {
    **FORMS,
    "plain": Case(key_heads=None),
    "strided": Case(view="packed", key_view="packed"),
    "swapped": Case(view="swapped", key_view="swapped", source="cos_sin"),
    "expanded": Case(key_heads=None, view="expanded"),
    "apart": Case(key_heads=None, view="apart"),
    "half": Case(dtype=torch.bfloat16),
    "empty": Case(batch=0),
    "backward": Case(key_heads=None, direction="backward", entries="feature"),
}


def operands(given: Given, settings: Settings) -> tuple[Any, tuple[Any, ...]]:
    """The operator that serves a call, and its arguments."""
    seen: list[Any] = []
    genuine = ops.rope, ops.rope_qk, ops.rope_, ops.rope_qk_
    ops.rope, ops.rope_qk, ops.rope_, ops.rope_qk_ = (
        lambda *a, of=of: seen.append((of, a)) or of(*a) for of in genuine
    )
    try:
        ops.call(given, settings)
    finally:
        ops.rope, ops.rope_qk, ops.rope_, ops.rope_qk_ = genuine
    ((operator, arguments),) = seen
    return operator, arguments


@pytest.mark.thinned_on_gpu(every=4)
@pytest.mark.parametrize("grad", ["none", "leaf"])
@pytest.mark.parametrize("name", CHECKED)
def test_the_operators_keep_the_rules_of_operators(name: str, grad: str) -> None:
    given, settings, _ = build(dataclasses.replace(CHECKED[name], x_grad=grad, key_grad=grad))
    operator, arguments = operands(given, settings)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests if grad == "leaf" else tests[:3])


@pytest.mark.parametrize("name", CHECKED)
def test_an_operator_computes_what_the_call_does_with_its_gradients(name: str) -> None:
    given, settings, made = build(dataclasses.replace(CHECKED[name], x_grad="made", key_grad="made"))
    operator, arguments = operands(given, settings)
    results = []
    for out in (operator(*arguments), rope_call.call(*given, tuple(settings))):
        outs = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad([t.float().pow(3).sum() for t in outs], made, create_graph=True)
        second = torch.autograd.grad([g.float().pow(2).sum() for g in grads], made, retain_graph=True)
        results.append((*outs, *grads, *second))
    torch.testing.assert_close(*results, rtol=2e-2 if given.x.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_the_operators_launch_kernels(request: pytest.FixtureRequest) -> None:
    seen = request.getfixturevalue("watch")
    given, settings, _ = build(Case(x_grad="leaf", key_grad="leaf"))
    for _ in range(3):
        q, k = ops.call(given, settings)
        (q.sum() + k.sum()).backward()
    assert seen.public + seen.direct == 6


# torch.compile ----------------------------------------------------------------------------------------------------------

rotate = functools.partial(rope, angle_entries="pair")
rotate_qk = functools.partial(rope_qk, angle_entries="pair")


def compiled(function: Callable[..., Any], **kwargs: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415 - as above

    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **kwargs), counter


def test_batch_and_length_make_no_graph_beyond_the_first_dynamic_one() -> None:
    freqs = angles()

    def step(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = rotate_qk(q * 2, k, table)
        return a + 1, b, rotate(a, table)

    fast, counter = compiled(step)
    for batch, seq in ((2, 5), (3, 7), (4, 4), (5, 8), (7, 3)):
        q, k = torch.randn(batch, seq, H, D, requires_grad=True), torch.randn(batch, seq, K, D, requires_grad=True)
        found, wanted = fast(q, k, freqs), step(q, k, freqs)
        assert_same(found, wanted)
        assert_same(*(torch.autograd.grad([t.pow(2).sum() for t in outs], (q, k)) for outs in (found, wanted)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("source", ["freqs", "inv_freq"])
def test_an_offset_that_grows_makes_no_graph_beyond_the_first_dynamic_one(source: str) -> None:
    table = {"freqs": torch.rand(64, D // 2), "inv_freq": torch.rand(D // 2)}[source]
    fast, counter = compiled(lambda x, offset: rope(x, **{source: table}, angle_entries="pair", offset=offset) + 1)
    x = torch.randn(B, 1, H, D)
    for offset in (3, 4, 5, 17, 40, 62):
        assert_same(fast(x, offset), rope(x, **{source: table}, angle_entries="pair", offset=offset) + 1)
    assert counter.frame_count <= 2


def test_positions_on_the_device_make_one_graph() -> None:
    table = torch.rand(64, D)
    fast, counter = compiled(
        lambda x, ids, start: (rope(x, cos_sin_cache=table, positions=ids), rope(x, cos_sin_cache=table, offset=start))
    )
    x = torch.randn(B, 1, H, D)
    for start in (3, 17, 40):
        ids, offset = torch.full((B, 1), start), torch.tensor(start)
        wanted = rope(x, cos_sin_cache=table, offset=start)
        assert_same(fast(x, ids, offset), (wanted, wanted))
    assert counter.frame_count == 1


def test_packed_sequences_make_no_graph_beyond_the_first_dynamic_one() -> None:
    freqs = torch.rand(64, D // 2)

    def step(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return rotate(x, freqs, tensor_format="thd", cu_seqlens=bounds) * 2

    fast, counter = compiled(step)
    for lengths in ((3, 4), (2, 5, 3), (4, 4, 4, 1), (6, 3, 2, 2, 5)):
        x = torch.randn(sum(lengths), H, D)
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        assert_same(fast(x, bounds), step(x, bounds))
    assert counter.frame_count <= 2


def _views(qkv: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = qkv * 1
    q, k = both[:, :, :H], both[:, :, H : H + K]
    out = rotate_qk(q, k, freqs, inplace=True)
    return (both, *out)


def _packed(qkv: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = qkv * 1
    return both, rope_qkv(both, freqs, kv_heads=K, angle_entries="pair", inplace=True)


def _one(qkv: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = qkv * 1
    rotate(both, freqs, inplace=True)
    return (both,)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("run", [_views, _packed, _one])
def test_in_place_under_compile_is_in_place_in_eager(run: Callable[..., Any], grad: bool) -> None:
    freqs = angles()
    qkv = torch.randn(B, S, H + 2 * K, D, requires_grad=grad)
    found, wanted = torch.compile(run, backend="aot_eager", fullgraph=True)(qkv, freqs), run(qkv, freqs)
    assert_same(found, wanted)
    if grad:
        assert_same(*(torch.autograd.grad([t.pow(2).sum() for t in outs], qkv) for outs in (found, wanted)))


def test_arguments_given_in_place_are_overwritten_by_a_compiled_call() -> None:
    freqs = angles()
    q, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    wanted = turned(q, freqs), turned(k, freqs)
    torch.compile(functools.partial(rotate_qk, inplace=True), backend="aot_eager", fullgraph=True)(q, k, freqs)
    assert_same((q, k), wanted)


OVERWRITING: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "one": (lambda t, x: rotate(x, t, inplace=True), lambda: [torch.randn(B, S, H, D)]),
    "two": (
        lambda t, q, k: rotate_qk(q, k, t, inplace=True),
        lambda: [torch.randn(B, S, H, D), torch.randn(B, S, K, D)],
    ),
    "views of one": (
        lambda t, x: rotate_qk(x[:, :, :H], x[:, :, H : H + K], t, inplace=True),
        lambda: [torch.randn(B, S, H + 2 * K, D)],
    ),
    "a view": (lambda t, x: rotate(x[..., :D], t, inplace=True), lambda: [torch.randn(B, S, H, 2 * D)]),
    "packed": (
        lambda t, x: rope_qkv(x, t, angle_entries="pair", kv_heads=K, inplace=True),
        lambda: [torch.randn(B, S, H + 2 * K, D)],
    ),
    "flash-attention's": (lambda t, x: apply_rotary_emb_qkv_(x, t, t), lambda: [torch.randn(B, S, 3, H, D)]),
}


def code_of(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and the code that Inductor made for it."""
    from torch._inductor.utils import run_and_get_code  # noqa: PLC0415 - as above

    return run_and_get_code(function)


# Each call of one and of two tensors has fixed sizes and open sizes; the other calls have one of the two in turn.
SIZED = [(name, bool(n % 2)) for n, name in enumerate(OVERWRITING)] + [("one", True), ("two", False)]


@pytest.mark.parametrize(("name", "dynamic"), SIZED)
def test_in_place_without_a_gradient_inductor_makes_one_launch_and_no_copy(name: str, dynamic: bool) -> None:
    function, tensors = OVERWRITING[name]
    freqs, given = angles(), tensors()
    again = [t.clone() for t in given]
    if name == "one":
        given[0].requires_grad_()  # no gradient of it is needed now
    with torch.no_grad():
        fast = torch.compile(function, fullgraph=True, dynamic=dynamic)
        found, (code,) = code_of(lambda: fast(freqs, *given))
        wanted = function(freqs, *again)
    assert_same(given, again)
    assert_same(found, wanted)
    called = [line for line in code.split("def call", 1)[1].splitlines() if "torch.ops." in line or ".copy_(" in line]
    assert len(called) == 1, called
    assert re.search(r"torch\.ops\.tuned\.rope(_qk)?_\.default", called[0])
    assert "empty_strided_cpu(" not in code.split("def call", 1)[1], "memory for a copy"
    assert "cpp_fused" not in code


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for .grad
@pytest.mark.parametrize(
    ("name", "needing"),
    [*((name, (True, True)) for name in OVERWRITING), ("two", (True, False)), ("two", (False, True))],
    ids=str,
)
def test_arguments_that_a_compiled_call_overwrites_get_their_gradients(name: str, needing: tuple[bool, bool]) -> None:
    function, tensors = OVERWRITING[name]
    freqs, made = angles(), tensors()
    fast = torch.compile(function, backend="aot_eager", fullgraph=True)

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_(need) for t, need in zip(made, needing, strict=False)]
        given = [t * 1 for t in leaves]
        out = function(freqs, *given)
        results = (*given, *(out if isinstance(out, tuple) else (out,)))
        return gradients(results, [t for t in leaves if t.requires_grad])

    assert_same(run(fast), run(function))


@pytest.mark.thinned_on_gpu(every=4)  # compiles C++ for a minute
@pytest.mark.parametrize("name", ["one", "views of one", "a view", "packed"])
def test_in_place_with_a_gradient_inductor_makes_no_copy_either(name: str) -> None:
    function, tensors = OVERWRITING[name]
    freqs, given = angles(), tensors()
    weights = [torch.randn(t.shape[-1], t.shape[-1], requires_grad=True) for t in given]

    def run(*weights: torch.Tensor) -> Any:
        made = [t @ w for t, w in zip(given, weights, strict=True)]  # models rotate the results of a projection
        function(freqs, *made)
        return tuple(made)

    fast = torch.compile(run, fullgraph=True)
    found, codes = code_of(lambda: gradients(fast(*weights), weights))
    assert_same(found, gradients(run(*weights), weights))
    body = codes[0].split("def call", 1)[1]
    called = re.findall(r"torch\.ops\.tuned\.(\w+)", body)
    assert called == ["rope_qk_" if name == "views of one" else "rope_"]
    assert "cpp_fused" not in body
    assert body.count("empty_strided_cpu(") == len(given), "memory for more than the products"


def gradients(results: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, and gradients whose weights differ for each element."""
    ends = [(r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in results if r.requires_grad]
    return [r.detach() for r in results] + list(torch.autograd.grad(ends, leaves))


def test_in_place_with_a_gradient_the_operators_are_the_same() -> None:
    x, freqs = torch.randn(B, S, H, D, requires_grad=True), angles()
    with Listener() as listener:
        rotate(x * 1, freqs, inplace=True)
        rotate_qk(x * 1, x[:, :, :K] * 1, freqs, inplace=True)
        rotate_qk(x * 1, torch.randn(B, S, K, D), freqs, inplace=True)  # the graph contains only one of the two tensors
    one, both = "tuned.rope_.default", "tuned.rope_qk_.default"
    assert [name for name in listener.heard if "tuned" in name] == [one, both, both]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for .grad
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", ["mode", "given", "made inside"])
def test_in_place_tensors_that_overlap_are_refused_whatever_follows_operators(way: str, grad: bool) -> None:
    given, freqs = torch.randn(B, S, H + K, D, requires_grad=grad), angles()

    def overwrite(x: torch.Tensor) -> torch.Tensor:
        rotate_qk(x[:, :, : H + 1], x[:, :, H:], freqs, inplace=True)
        return x

    def listened(x: torch.Tensor) -> None:
        with Listener():
            overwrite(x)

    ways = {
        "mode": listened,
        "given": torch.compile(overwrite, backend="aot_eager", fullgraph=True),
        "made inside": torch.compile(lambda x: overwrite(x * 1), backend="aot_eager", fullgraph=True),
    }
    x = given * 1
    before = x.detach().clone()
    with pytest.raises(ValueError, match="share memory"):
        ways[way](x)
    assert torch.equal(x, before), "nothing is written"


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("needing", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_in_place_under_an_operator_mode_gives_values_gradients_and_versions(
    needing: tuple[bool, bool], *, views: bool
) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        leaves = [torch.randn(B, S, n, D, requires_grad=need) for n, need in zip((H, K), needing, strict=True)]
        made = [t * 2 for t in leaves]
        given = [t[..., :] for t in made] if views else made
        versions = [t._version for t in made]
        rotate_qk(*given, angles(), inplace=True)
        assert all(t._version > before for t, before in zip(made, versions, strict=True)), "autograd would miss it"
        assert [t.requires_grad for t in made] == list(needing)
        wanted = [t for t in leaves if t.requires_grad]
        return gradients(made, wanted) if wanted else made

    with Listener() as listener:
        found = run()
    assert sum("tuned" in name for name in listener.heard) > 0
    assert_same(found, run())


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_compiled_whole(name: str) -> None:
    given, settings, _ = build(FORMS[name])
    tensors = {n: t for n, t in given._asdict().items() if isinstance(t, torch.Tensor)}

    def run(**named: Any) -> Any:
        return rope_call.call(*given._replace(**named), tuple(settings))

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(**tensors)
    assert_same(found, run(**tensors))


def test_angles_that_need_a_gradient_get_one_under_compile() -> None:
    x, freqs = torch.randn(B, S, H, D), angles().requires_grad_()
    fast = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(run(x, freqs).pow(3).sum(), freqs) for run in (fast, turned)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


def test_checkpointing_and_autocast_are_compiled_whole() -> None:
    (x,), freqs = leaves(H), angles()

    def run(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda u: rotate(u * 2, freqs).pow(2).sum(), t, use_reentrant=False)  # type: ignore[no-any-return]

    fast = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same(*(torch.autograd.grad(f(x), x) for f in (fast, run)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.compile(lambda t: rotate(t, freqs), backend="aot_eager", fullgraph=True)(x)
    assert out.dtype == torch.float32


# Tracers and modes --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A module that rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", angles())

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = rotate_qk(q * 2, k * 1, self.freqs)
        return (*out, rotate(q * 1, self.freqs, inplace=True))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_has_the_operators_and_any_batch(strict: bool) -> None:
    block, batch = Block(), torch.export.Dim("batch", min=2)
    q, k = torch.randn(B, S, H, D), torch.randn(B, S, K, D)
    program = torch.export.export(block, (q, k), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "tuned.rope_qk.default" in targets
    assert "tuned.rope_.default" in targets
    q, k = torch.randn(7, S, H, D), torch.randn(7, S, K, D)
    assert_same(program.module()(q, k), block(q, k))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_operator(tracing: str) -> None:
    freqs = angles()
    graph = make_fx(rotate, tracing_mode=tracing)(torch.randn(B, S, H, D), freqs)
    assert any("tuned.rope" in str(node.target) for node in graph.graph.nodes)
    x = torch.randn(B, S, H, D)
    assert_same(graph(x, freqs), turned(x, freqs))


@pytest.mark.parametrize("name", CHECKED)
def test_fake_tensors_have_the_shapes_of_real_ones(name: str) -> None:
    given, settings, _ = build(CHECKED[name])
    real = rope_call.call(*given, tuple(settings))
    with FakeTensorMode() as mode:
        faked = type(given)(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given))
        fake = rope_call.call(*faked, tuple(settings))
    for found, wanted in zip(*(out if isinstance(out, tuple) else (out,) for out in (fake, real)), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


class Listener(TorchDispatchMode):
    """Notes each operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("inplace", [False, True])
def test_a_mode_that_listens_hears_the_operator_whatever_is_known(inplace: bool) -> None:
    q, k, freqs = torch.randn(B, S, H, D), torch.randn(B, S, K, D), angles()
    wanted = turned(q, freqs), turned(k, freqs)
    for _ in range(3):
        a, b = q.clone(), k.clone()
        with Listener() as listener:
            out = rotate_qk(a, b, freqs, inplace=inplace)
        assert listener.heard.count(f"tuned.rope_qk{'_' * inplace}.default") == 1
        assert_same(out, wanted)
        assert (out[0] is a) == inplace
        rotate_qk(q.clone(), k.clone(), freqs, inplace=inplace)


LAZY: dict[str, Callable[..., Any]] = {
    "one": lambda q, *_, **named: rope(q, tensor_format="thd", inplace=True, **named),
    "two": lambda q, k, *_, **named: rope_qk(q, k, tensor_format="thd", inplace=True, **named),
    "norm": lambda q, k, weight, *_, **named: qk_norm_rope(
        q, k, weight, weight, tensor_format="thd", inplace=True, **named
    ),
    "cache": lambda q, k, _, cache, other, **named: rope_append_(q, k, k, cache, other, named["positions"], **named),
}


@pytest.mark.parametrize("negative", [(0,), (0, 1), (0, 1, 3), (0, 4, 6)])
@pytest.mark.parametrize("name", LAZY)
def test_a_mode_that_listens_may_overwrite_what_is_negated_lazily(name: str, negative: tuple[int, ...]) -> None:
    shapes = (S, H, D), (S, K, D), (D,), (1, S, K, D), (1, S, K, D), (S, D // 2), (S, D // 2)
    made = [torch.randn(shape) for shape in shapes]

    def written(*, listens: bool) -> list[torch.Tensor]:
        given = [torch.complex(t, -t).conj().imag if at in negative else t.clone() for at, t in enumerate(made)]
        *others, cos, sin = given
        with Listener() if listens else contextlib.nullcontext():
            LAZY[name](*others, cos=cos, sin=sin, positions=torch.arange(S))
        return given

    for found, wanted in zip(written(listens=True), written(listens=False), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("keep", [False, True])
def test_selective_checkpointing_keeps_the_operator_or_runs_it_again(keep: bool) -> None:
    (x,), freqs = leaves(H), angles()
    asked: list[str] = []

    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        asked.append(str(operator))
        wanted = operator == torch.ops.tuned.rope.default and keep
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda t: rotate(t * 2, freqs).pow(2), x, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert "tuned.rope.default" in asked
    assert_same(found, 8 * x.detach())
