"""MLA on a GPU: right, the same in each run, in graphs, on streams, compiled, between canaries, and when large."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tuned
from generator.families.rope.texts import mla_specs
from generator.measuring.check import check, inputs_of, probe
from generator.workload import WORKLOADS
from tests.support.run import run
from tuned.dispatch import mla_kv_rope, rope
from tuned.families.rope.launches import launches
from tuned.families.rope.spec import RopeSize
from tuned.families.rope.variant import default_variant

if TYPE_CHECKING:
    from collections.abc import Callable

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BATCH, SEQ, ROWS = 2, 37, 160  # rows differ from the number of heads, which the call would warn of
BOUNDS = (3, 3, 20, 41, BATCH * SEQ - 5)  # there are tokens of no sequence at both ends
REPLAYS = 1000
WORSE = 1.1  # times the error (root mean square) of PyTorch's operators in float32


@dataclasses.dataclass(frozen=True)
class Latent:
    """One call: its sizes, its other arguments, and its tensors' strides."""

    heads: int = 16
    kept: int = 128
    turned: int = 64
    value: int = 128
    dtype: torch.dtype = BF16
    layout: str = "sbhd"
    style: str = "deinterleave"  # or "interleaved", "half"
    lies: str = "contiguous"  # "gaps", "swapped"
    place: str = "order"  # "ids", "packed"
    entries: str = "pair"

    @property
    def name(self) -> str:
        fields = dataclasses.fields(self)
        return "-".join(str(getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default) or "usual"

    @property
    def tokens(self) -> tuple[int, ...]:
        return {"bshd": (BATCH, SEQ), "sbhd": (SEQ, BATCH), "thd": (BATCH * SEQ,)}[self.layout]

    @property
    def words(self) -> dict[str, Any]:
        return {"tensor_format": self.layout, "angle_entries": self.entries, self.style: True} if self.style != "half" else {
            "tensor_format": self.layout, "angle_entries": self.entries,
        }  # fmt: skip


CASES = [
    Latent(),
    Latent(128, layout="thd", place="packed"),
    Latent(128, style="interleaved", layout="bshd"),
    Latent(3, 20, 12, 8, F32, "bshd", "half", "gaps"),
    Latent(5, 128, 64, 128, F16, "sbhd", "deinterleave", "swapped", "ids"),
    Latent(17, 72, 40, 56, F32, "thd", "interleaved", "gaps", "packed"),
    Latent(1, 7, 2, 5, F16, "thd", "deinterleave", "gaps", "ids"),
    Latent(16, 64, 64, 64, F32, entries="feature"),
]
SMALL = Latent(5, 16, 8, 16, F32)


@dataclasses.dataclass
class Made:
    """The tensors of a call: kv and k_pe, a query, angles."""

    kv: torch.Tensor
    k_pe: torch.Tensor
    q: torch.Tensor
    named: dict[str, Any]


def lying(t: torch.Tensor, lies: str) -> torch.Tensor:
    if lies == "gaps":
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 24), torch.nan)
        wide[..., 8:-16] = t
        return wide[..., 8:-16]
    return t.transpose(0, 1).contiguous().transpose(0, 1) if lies == "swapped" else t


def make(case: Latent, device: str = "cuda", seed: int = 0) -> Made:
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((*case.tokens, *shape), generator=draw, device=device).to(case.dtype)

    kv = lying(normal(case.heads, case.kept + case.value), case.lies)
    k_pe = (
        normal(1, 512 + case.turned)[..., 512:]
        if case.lies == "contiguous"
        else lying(normal(1, case.turned), case.lies)
    )
    q = lying(normal(case.heads, case.kept + case.turned), case.lies)
    entries = case.turned if case.entries == "feature" else case.turned // 2
    table = 6.3 * torch.rand(ROWS, entries, generator=draw, device=device)
    named: dict[str, Any] = {"cos": table.cos(), "sin": table.sin(), **case.words}
    if case.place == "ids":
        named["positions"] = torch.randint(0, ROWS, case.tokens, generator=draw, device=device)
    elif case.layout == "thd":
        bounds = BOUNDS if case.place == "packed" else (0, 30, BATCH * SEQ)
        named["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Made(kv, k_pe, q, named)


# By PyTorch's own operators ---------------------------------------------------------------------------------------------


def turned(case: Latent, x: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    """Rotates X, all of whose features rotate, in its dtype."""
    seq = SEQ if case.layout != "thd" else BATCH * SEQ
    rows, held = torch.arange(seq, device=x.device), None
    if "positions" in named:
        rows = named["positions"]
    elif "cu_seqlens" in named:
        bounds = named["cu_seqlens"]
        held = (rows >= bounds[0]) & (rows < bounds[-1])
        rows = (rows - bounds[(torch.bucketize(rows, bounds, right=True) - 1).clamp(0, len(bounds) - 2)]).clamp(min=0)
    elif case.layout == "sbhd":
        rows = rows[:, None].expand(SEQ, BATCH)
    cos, sin = (named[n].to(x.dtype)[rows].unsqueeze(-2) for n in ("cos", "sin"))
    if held is not None:
        cos, sin = (torch.where(held[:, None, None], t, still) for t, still in ((cos, 1.0), (sin, 0.0)))
    a, b = x.chunk(2, -1) if case.style == "half" else (x[..., ::2], x[..., 1::2])
    half = case.turned // 2
    together = case.style == "interleaved"
    if case.entries == "pair":
        of_cos, of_sin = (cos, cos), (sin, sin)
    elif together:
        of_cos, of_sin = (cos[..., ::2], cos[..., 1::2]), (sin[..., ::2], sin[..., 1::2])
    else:
        of_cos, of_sin = cos.split(half, -1), sin.split(half, -1)  # type: ignore[assignment]
    pairs = a * of_cos[0] - b * of_sin[0], b * of_cos[1] + a * of_sin[1]
    return torch.stack(pairs, -1).flatten(-2) if together else torch.cat(pairs, -1)


def own(case: Latent, kv: torch.Tensor, k_pe: torch.Tensor, named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    shared = turned(case, k_pe, named).expand(*case.tokens, case.heads, -1)
    return torch.cat((kv[..., : case.kept], shared), -1), kv[..., case.kept :]


def own_query(case: Latent, q: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    return torch.cat((q[..., : case.kept], turned(case, q[..., case.kept :], named)), -1)


def grads_of(case: Latent, seed: int = 1, device: str = "cuda") -> list[torch.Tensor]:
    draw = torch.Generator(device).manual_seed(seed)
    widths = case.kept + case.turned, case.value
    return [torch.randn(*case.tokens, case.heads, n, generator=draw, device=device).to(case.dtype) for n in widths]


def trained(case: Latent, made: Made, grads: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Key, value and both gradients; ours if ``dtype`` is None, else computed in it, rounded unless it is float64."""
    wide = dtype or made.kv.dtype
    leaves = [t.detach().to(wide).requires_grad_() for t in (made.kv, made.k_pe)]
    if dtype is None:
        leaves = [t.detach().requires_grad_() for t in (made.kv, made.k_pe)]
        outs = mla_kv_rope(*leaves, k_dim=case.kept, **made.named)
    else:
        outs = own(case, *leaves, made.named)
    found = [*outs, *torch.autograd.grad(outs, leaves, [g.to(o.dtype) for g, o in zip(grads, outs, strict=True)])]
    return [t.detach() if dtype in (None, torch.float64) else t.detach().to(case.dtype) for t in found]


def rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def as_good(names: tuple[str, ...], ours: list[Any], theirs: list[Any], exact: list[Any]) -> None:
    for name, a, b, c in zip(names, ours, theirs, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        mine, other = rms(a.double() - c), rms(b.double() - c)
        assert mine <= WORSE * other + 2.0**-24 * rms(c), f"{name}: {mine:.3g}, of float32 {other:.3g}"


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients_are_as_good_as_float32s(case: Latent) -> None:
    made, grads = make(case), grads_of(case)
    theirs, exact = (trained(case, made, grads, dtype) for dtype in (F32, torch.float64))
    names = ("key", "value", "gradient of kv", "gradient of k_pe")
    for _ in range(3):  # first the plan is made, then it is used
        ours = trained(case, made, grads, None)
        as_good(names, ours, theirs, exact)
        assert torch.equal(ours[1], made.kv[..., case.kept :])
        assert torch.equal(ours[0][..., : case.kept], made.kv[..., : case.kept])


@pytest.mark.gpu_sample
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_queries_in_place_are_as_good_as_float32s(case: Latent) -> None:
    """In place, a program writes where its other threads read: run many times, the bits must be those out of place."""
    made = make(case)
    exact, theirs = (own_query(case, made.q.to(dtype), made.named) for dtype in (torch.float64, F32))
    wanted = rope(made.q, rotated="last", **made.named)
    as_good(("query",), [wanted], [theirs.to(case.dtype)], [exact])
    before = made.q.clone()
    for _ in range(50):
        q = lying(before.clone(), case.lies)
        assert rope(q, rotated="last", inplace=True, **made.named) is q
        assert torch.equal(q, wanted)
    leaf = made.q.detach().clone().requires_grad_()
    weight = torch.randn_like(wanted)
    (ours,) = torch.autograd.grad(rope(leaf * 1, rotated="last", inplace=True, **made.named), leaf, weight)
    wide = made.q.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(own_query(case, wide, made.named), wide, weight.double())
    other = made.q.detach().float().requires_grad_()
    (near,) = torch.autograd.grad(own_query(case, other, made.named), other, weight.float())
    as_good(("gradient",), [ours], [near.to(case.dtype)], [right])


@pytest.mark.gpu_sample
@pytest.mark.parametrize("angles", ["cos_sin", "freqs", "inv_freq"])
def test_nothing_is_read_or_written_around_the_tensors(angles: str) -> None:
    """Results lie between canaries and are NaN before the call, as in each measurement of a variant."""
    work, size = WORKLOADS["rope"], RopeSize(2, 37)
    for plain in mla_specs():
        if plain.angles != angles:
            continue
        for heads, kept, rotary, value in ((5, 20, 12, 9), (17, 128, 64, 128), (128, 128, 64, 128)):
            spec = dataclasses.replace(
                plain, heads=heads, head_dim=kept + rotary, rotary_dim=rotary, value_dim=value if plain.splits else 0
            )
            call = probe(work.inputs(spec, size, "cuda", 0))
            wanted, bound = work.reference(spec, call)
            before = {name: tensor.clone() for name, tensor in inputs_of(call).items()}
            run(launches(spec, default_variant(spec, size), call))
            check(call.out, wanted, bound, {n: (t, before[n]) for n, t in inputs_of(call).items()})


def same(a: Any, b: Any) -> torch.Tensor:
    """Whether all have the same bits, computed on the device; NaN equals NaN."""
    return torch.stack([((x == y) | (x.isnan() & y.isnan())).all() for x, y in zip(a, b, strict=True)]).all()


@pytest.mark.gpu_sample
def test_each_run_has_the_same_bits() -> None:
    case = Latent(128)
    made, grads = make(case), grads_of(case)
    first = trained(case, made, grads, None)
    for _ in range(20):
        poisoned = [torch.full_like(t, torch.nan) for t in first]
        del poisoned  # the next results get this memory
        assert bool(same(trained(case, made, grads, None), first))


# In graphs, on streams, compiled ------------------------------------------------------------------------------------------


def forward(case: Latent, made: Made, grads: list[torch.Tensor]) -> Any:
    del grads
    with torch.no_grad():
        return mla_kv_rope(made.kv, made.k_pe, k_dim=case.kept, **made.named)


def training(case: Latent, made: Made, grads: list[torch.Tensor]) -> Any:
    with torch.enable_grad():
        return trained(case, made, grads, None)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("place", ["order", "ids"])
@pytest.mark.parametrize("step", [forward, training])
def test_a_graph_is_replayed_a_thousand_times_with_new_values(step: Callable[..., Any], place: str) -> None:
    case = dataclasses.replace(SMALL, place=place)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made, grads = make(case), grads_of(case)
        for _ in range(3):
            step(case, made, grads)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = step(case, made, grads)
    right = torch.ones((), dtype=torch.bool, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            for t in (made.kv, made.k_pe, *grads):
                t.normal_()
            if place == "ids":
                made.named["positions"].random_(0, ROWS)
            graph.replay()
            right &= same(outs, step(case, made, grads))
    torch.cuda.synchronize()
    assert bool(right)


@pytest.mark.gpu_sample
def test_no_call_waits_for_the_gpu() -> None:
    for case in (Latent(layout="thd", place="packed"), Latent(place="ids")):
        made, grads = make(case), grads_of(case)
        trained(case, made, grads, None)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(2):
                trained(case, made, grads, None)
                rope(made.q.clone(), rotated="last", inplace=True, **made.named)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu_sample
def test_streams_do_not_meet() -> None:
    made = [make(SMALL, seed=seed) for seed in range(4)]
    grads = [grads_of(SMALL, seed) for seed in range(4)]
    wanted = [trained(SMALL, m, g, None) for m, g in zip(made, grads, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in made]
    right = []
    for _ in range(50):
        for stream, m, g, want in zip(streams, made, grads, wanted, strict=True):
            with torch.cuda.stream(stream):
                right.append(same(trained(SMALL, m, g, None), want))
    torch.cuda.synchronize()
    assert all(map(bool, right))


@pytest.mark.gpu_sample
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_is_one_operator_with_the_same_bits(dynamic: bool) -> None:
    case = Latent()
    made, grads = make(case), grads_of(case)

    def step(kv: torch.Tensor, k_pe: torch.Tensor) -> Any:
        return mla_kv_rope(kv, k_pe, k_dim=case.kept, **made.named)

    compiled = torch.compile(step, dynamic=dynamic, fullgraph=True)
    found = []
    for function in (step, compiled):
        leaves = [t.detach().requires_grad_() for t in (made.kv, made.k_pe)]
        outs = function(*leaves)
        found.append([*(t.detach() for t in outs), *torch.autograd.grad(outs, leaves, grads)])
    assert bool(same(*found))


@pytest.mark.gpu_sample
def test_a_gradient_of_a_gradient_is_the_formulas() -> None:
    made = make(SMALL)
    found = []
    for dtype in (F32, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (made.kv, made.k_pe)]
        outs = mla_kv_rope(*leaves, k_dim=SMALL.kept, **made.named) if dtype == F32 else own(SMALL, *leaves, made.named)
        weights = [
            torch.linspace(-1, 1, t.numel(), device="cuda", dtype=dtype).view(t.shape).requires_grad_() for t in outs
        ]
        grads = torch.autograd.grad(outs, leaves, weights, create_graph=True)
        found.append([g.double() for g in torch.autograd.grad([g.square().sum() for g in grads], weights)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu_sample
def test_a_kernel_serves_it() -> None:
    made = make(Latent())
    told = tuned.explain(mla_kv_rope, made.kv, made.k_pe, k_dim=128, **made.named)
    assert told.kernels == ("rope_mla_half_cos_sin",)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_token(value: float) -> None:
    made, grads = make(SMALL), grads_of(SMALL)
    clean = trained(SMALL, made, grads, None)
    made.k_pe = made.k_pe.clone()
    made.k_pe[7, 1, 0, 3] = value
    grads[0][9, 0, 2, SMALL.kept + 1] = value
    found = trained(SMALL, made, grads, None)
    reached = [torch.zeros_like(t, dtype=torch.bool) for t in found]
    reached[0][7, 1, :, SMALL.kept :] = True
    reached[3][9, 0] = True
    for a, b, where in zip(found, clean, reached, strict=True):
        assert bool(same([a[~where]], [b[~where]]))
        assert not where.any() or not bool(a[where].isfinite().all())


HEADS, TOKENS = 128, 2**31 // (128 * 192) + 3  # elements of the key pass 2^31 before the last tokens


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_more_than_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 14 * 2**30:
        pytest.skip("needs 14 GiB of free memory")
    looked_at = torch.tensor([0, 1, TOKENS // 2, *range(TOKENS - 5, TOKENS)], device="cuda")
    draw = torch.Generator("cuda").manual_seed(0)
    kv = torch.empty(TOKENS, HEADS, 256, dtype=BF16, device="cuda")
    for part in kv.split(2**12):
        part.normal_(generator=draw)
    k_pe = torch.randn(TOKENS, 1, 64, device="cuda", generator=draw).to(BF16)
    rates = 10000.0 ** -(torch.arange(32, device="cuda") / 32)
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        key, value = mla_kv_rope(
            kv, k_pe, inv_freq=rates, k_dim=128, tensor_format="thd", cu_seqlens=bounds, deinterleave=True
        )
    radians = (looked_at[:, None].float() * rates).double()
    a, b = k_pe[looked_at].double()[..., ::2], k_pe[looked_at].double()[..., 1::2]
    cos, sin = radians.cos()[:, None], radians.sin()[:, None]
    shared = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).expand(-1, HEADS, -1)
    assert torch.equal(key[looked_at][..., :128], kv[looked_at][..., :128])
    assert torch.equal(value[looked_at], kv[looked_at][..., 128:])
    torch.testing.assert_close(key[looked_at][..., 128:].double(), shared, rtol=4e-3, atol=1e-3)
