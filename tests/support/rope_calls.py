"""What the tests of RoPE's hot path share: CPU tensors that take the code path of GPU tensors, and a watch on every launch.

A public launch stands for compiling. Each direct launch is compared with a launch that is derived afresh, without any cache,
from the tensors of the same call: the kernel, what it was compiled for, the grid, the pointers and the numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

import tuned.calls.rope.append
import tuned.calls.rope.arguments
import tuned.calls.rope.call
import tuned.calls.rope.lengths
import tuned.calls.rope.plan
import tuned.launching.plan
from tuned.calls.rope.arguments import Given, Settings, prepare
from tuned.families.rope.eager import append, rotate
from tuned.families.rope.launches import RopeCall, launches
from tuned.launching.launcher import kernel, launch_public
from tuned.lookup.lookup import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuned.families.launch import Launch
    from tuned.families.rope.spec import RopeSpec

PLAIN = (torch.Tensor, torch.nn.Parameter)
STREAM = 7
GPU = Gpu("nvidia_h200", 90, 132, "NVIDIA H200")  # a GPU that has a table


def kinds(launch: Launch) -> tuple[Any, ...]:
    """What Triton specialises on for an NVIDIA GPU, as Triton itself answers: a type and a kind for each argument."""
    from triton._C.libtriton import native_specialize_impl  # noqa: PLC0415 - only where launches are made
    from triton.backends.nvidia.compiler import CUDABackend  # noqa: PLC0415

    function = kernel(launch.kernel)
    unspecialised = function.kwargs["do_not_specialize"] or ()
    return tuple(
        native_specialize_impl(CUDABackend, value, False, name not in unspecialised, True)
        for name, value in zip(function.arg_names, launch.arguments, strict=False)
    )


def strides_unused(spec: RopeSpec, call: RopeCall) -> set[str]:
    """Strides that are only ever multiplied by the index 0. A plan keeps their values, which change nothing.

    PyTorch calls tensors contiguous whatever the strides of their axes of length 1.
    """
    lengths = {"s": call.seq, "b": call.batch, "h": spec.heads}
    angles = {"s": call.angle_rows, "b": call.batch, "d": call.cos.shape[-1]}
    places = {"s": call.seq, "b": call.batch if spec.layout != "thd" else call.sequences}
    owners = {
        "x": lengths, "out": lengths, "key": lengths | {"h": spec.key_heads}, "key_out": lengths | {"h": spec.key_heads},
        "angle": angles, "position": places,
    }  # fmt: skip
    return {f"{name}_stride_{axis}" for name, axes in owners.items() for axis, length in axes.items() if length <= 1}


class Compiled:
    """Stands for a compiled kernel: what it was compiled for, and the watch that its launches are reported to."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, watch: Watch, launch: Launch) -> None:
        self.watch, self.kernel, self.kinds = watch, launch.kernel, kinds(launch)
        self.constants, self.options = dict(launch.constants), dict(launch.options)

    def run(self, *given: Any) -> None:
        """A direct launch."""
        programs, *grid, stream, function, metadata = given[:6]
        assert (grid, stream, function, metadata) == ([1, 1], STREAM, self.function, self.packed_metadata)
        assert given[6:9] == (None, None, None)
        self.watch.direct_launch(self, programs, given[9:])


class Watch:
    """Counts launches and computes what each would: in Triton's interpreter if ``interpreted``, else by the formula."""

    def __init__(self, genuine: Any) -> None:
        self.genuine = genuine
        self.public = self.direct = 0
        self.interpreted = False
        self.listeners = types.SimpleNamespace(calls=[]), types.SimpleNamespace(calls=[])
        self._under_way = threading.local()

    def call(self, *arguments: Any) -> Any:
        """Take the place of tuned.calls.rope.call.call."""
        stack = self._under_way.__dict__.setdefault("stack", [])
        stack.append((Given(*arguments[:-1]), Settings(*arguments[-1])))
        try:
            return self.genuine(*arguments)
        finally:
            stack.pop()

    def run_public(self, now: Any) -> Compiled:
        """Take the place of tuned.calls.rope.plan.run_public."""
        self.public += 1
        self._execute(now.part, now.spec, now.call)
        return Compiled(self, now.part)

    def direct_launch(self, compiled: Compiled, programs: int, values: tuple[Any, ...]) -> None:
        """Compare a direct launch with one derived afresh, then compute what it would."""
        self.direct += 1
        given, settings = self._under_way.stack[-1]
        try:
            prepared = prepare(given, settings, make_out=torch.empty_like)
        except (ValueError, TypeError) as error:
            raise AssertionError(f"a launch where there should be a refusal: {error}") from error
        for t in given:
            if isinstance(t, torch.Tensor):
                assert type(t) in PLAIN
                assert not is_functorch_wrapped_tensor(t)
        assert forward_ad._current_level < 0
        choice = tuned.calls.rope.plan.choice_of(prepared, None)
        assert choice.variant is not None, "a launch where eager PyTorch should serve"
        call = prepared.call
        (fresh,) = launches(prepared.spec, choice.variant, call)
        assert compiled.kernel == fresh.kernel
        assert list(compiled.constants.items()) == list(fresh.constants.items())
        assert compiled.options == fresh.options
        assert programs == fresh.programs
        assert len(values) == len(fresh.arguments) + len(fresh.constants)
        assert list(values[len(fresh.arguments) :]) == list(fresh.constants.values())
        places: dict[str, int] = {}
        names, unused = kernel(fresh.kernel).arg_names, strides_unused(prepared.spec, call)
        taken = []
        for name, value, wanted in zip(names, values, fresh.arguments, strict=False):
            taken.append(wanted if isinstance(wanted, torch.Tensor) else value)
            if name in unused:
                continue
            if wanted is call.out and not settings.inplace:
                assert places.setdefault("out", value) == value
            elif wanted is call.key_out and wanted is not None and not settings.inplace:
                assert places.setdefault("key_out", value) == value
            else:
                assert value == (wanted.data_ptr() if isinstance(wanted, torch.Tensor) else wanted), name
                assert type(value) is (float if isinstance(wanted, float) else int)
        assert compiled.kinds == kinds(dataclasses.replace(fresh, arguments=tuple(taken)))
        assert len(set(places.values())) == len(places), "two results in one place"
        self._execute(fresh, prepared.spec, call)
        for name, place in places.items():
            out = getattr(call, name)
            assert place % 16 == out.data_ptr() % 16
            extent = sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True)) + 1
            ctypes.memmove(place, out.data_ptr(), extent * out.element_size() if out.numel() else 0)

    def _execute(self, part: Launch, spec: Any, call: RopeCall) -> None:
        read = [t for t in (call.x, call.key, call.cos, call.sin) if t is not None]
        assert not any(t.is_neg() for t in read), "a kernel reads memory, which is not negated"
        if self.interpreted:
            constants = part.constants | {"PDL": False}  # the interpreter has no dependent launch
            with np.errstate(all="ignore"):
                launch_public(kernel(part.kernel), dataclasses.replace(part, constants=constants))
            return
        if spec.appends:
            with torch.no_grad():
                append(spec, call)
            return
        with torch.no_grad():
            results = rotate(spec, call)
        # .data: a kernel's writes do not raise a tensor's version counter.
        for out, result in zip((call.out, call.key_out), results, strict=True):
            if out is not None:
                out.data.copy_(result)


def specialised(name: str) -> tuple[bool, ...]:
    function = kernel(name)
    return tuple(parameter not in (function.kwargs["do_not_specialize"] or ()) for parameter in function.arg_names)


def with_parameters(name: str) -> Any:
    """The parameters of a kernel, which the interpreter's functions lack."""
    return types.SimpleNamespace(params=[types.SimpleNamespace(name=parameter) for parameter in kernel(name).arg_names])


def forget() -> None:
    """Drop all plans and all compiled kernels."""
    tuned.calls.rope.lengths._CLASSES.clear()
    tuned.calls.rope.call._PLANS.clear()
    tuned.calls.rope.append._PLANS.clear()
    tuned.calls.rope.plan._COMPILED.clear()


_chosen = functools.cache(tuned.calls.rope.plan.choose)


def interpret(launched: tuple[Launch, ...], _launch: Any = None) -> None:
    """Run launches of a gradient in Triton's interpreter."""
    for one in launched:
        with np.errstate(all="ignore"):
            launch_public(kernel(one.kernel), dataclasses.replace(one, constants=one.constants | {"PDL": False}))


@pytest.fixture
def chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up each spec and size in the tables once: the tables do not change during these tests."""
    monkeypatch.setattr(tuned.calls.rope.plan, "choose", _chosen)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """CPU tensors take the code path of GPU tensors, and every launch is watched."""
    if torch.cuda.is_available():
        pytest.skip("the way of GPU tensors is tested on GPU tensors there")
    made = Watch(tuned.calls.rope.call.call)
    monkeypatch.setattr(tuned.calls.rope.call, "call", made.call)
    plan = tuned.calls.rope.plan
    monkeypatch.setattr(
        plan, "why_eager", lambda x, supported: None if supported and type(x) in PLAIN else "no kernel takes it"
    )
    for module in (plan, tuned.calls.rope.lengths, tuned.calls.rope.append):
        monkeypatch.setattr(module, "gpu_of", lambda _device: GPU)
    monkeypatch.setattr(plan, "capturing", lambda: False)
    # A CUDA build of torch raises where there is no driver.
    for module in (tuned.calls.rope.call, tuned.calls.rope.append):
        monkeypatch.setattr(module, "current_device", lambda: -1)
    # tests.support.append watches the direct launches of calls that write a cache.
    monkeypatch.setattr(tuned.calls.rope.append, "direct_launch", lambda *_: None)
    monkeypatch.setattr(tuned.calls.rope.lengths, "kernel", with_parameters)
    monkeypatch.setattr(plan, "run_public", made.run_public)
    monkeypatch.setattr(tuned.calls.rope.saved, "run_steps", interpret)
    monkeypatch.setattr(tuned.launching.plan, "_specialised", specialised)
    # Dispatch never waits for a GPU, so it does not check the values of positions.
    monkeypatch.setattr(tuned.calls.rope.arguments, "_values_reach", lambda *_: None)
    # The questions that tuned.launching.plan.direct_launch asks the device and Triton.
    monkeypatch.setattr(tuned.launching.plan, "hooks", lambda: made.listeners)
    monkeypatch.setattr(tuned.launching.plan, "direct_supported", lambda _device: True)
    monkeypatch.setattr(tuned.launching.plan, "raw_stream", lambda: lambda _device: STREAM)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as the index of a CPU device
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    forget()
    yield made
    forget()


# Calls by their properties ------------------------------------------------------------------------------------------

ROWS = 40  # positions in the tables of angles
OFFSET = 3


class Marked(torch.Tensor):
    """A tensor subclass: dispatch must assume that it overrides operators."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: all properties in which two calls may differ. The first choice of a field in CHOICES is its default."""

    layout: str = "bshd"
    batch: int = 2
    seq: int = 4
    heads: int = 4
    head_dim: int = 16
    key_heads: int | None = 2  # None: no key
    kv_heads: int | None = None  # KV heads of a packed qkv, which has no key; 0: qkv has an axis of length 3
    dtype: torch.dtype = torch.float32
    key_dtype: torch.dtype | None = None  # None: the dtype of x
    view: str = "contiguous"  # of x; see ``seen``
    key_view: str = "contiguous"
    kind: str = "tensor"  # or "parameter", "subclass"
    x_grad: str = "none"  # or "leaf", "made"
    key_grad: str = "none"
    mode: str = "grad"  # or "no_grad", "inference"
    source: str = "freqs"
    batched: bool = False  # cos and sin of [batch, rows, entries]
    entries: str = "pair"
    rotary: int = 16
    rows: int = ROWS
    angle_dtype: torch.dtype = torch.float32
    angle_view: str = "contiguous"
    angle_grad: bool = False
    angle_kind: str = "tensor"  # or "subclass"
    sine_view: str = "contiguous"
    place: str = "order"  # or "shifted", "offset", "starts", "ids", "shared"
    index_dtype: torch.dtype = torch.int64
    index_view: str = "contiguous"
    number: int = OFFSET  # the offset of "shifted"
    sequences: int = 2  # of the layout "thd"
    bounds_view: str = "contiguous"
    max_seqlen: int | None = None
    scaling: float = 1.0
    cp_size: int = 1
    cp_rank: int = 0
    rotated: str = "first"
    conjugate: bool = False
    interleaved: bool = False
    inplace: bool = False
    direction: str = "forward"
    shares: bool = False  # key is x itself


CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("bshd", "sbhd", "thd"),
    "batch": (2, 1, 3, 0),
    "seq": (4, 1, 6, 10, 0),
    "heads": (4, 1, 3),
    "head_dim": (16, 24),
    "key_heads": (2, None, 1, 4),
    "kv_heads": (None, 1, 0),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "key_dtype": (None, torch.float16),
    "view": ("contiguous", "swapped", "packed", "offset", "expanded", "apart", "odd"),
    "key_view": ("contiguous", "swapped", "packed", "offset", "expanded", "odd"),
    "kind": ("tensor", "parameter", "subclass"),
    "x_grad": ("none", "leaf", "made"),
    "key_grad": ("none", "leaf", "made"),
    "mode": ("grad", "no_grad", "inference"),
    "source": ("freqs", "cos_sin", "cache", "inv_freq"),
    "batched": (False, True),
    "entries": ("pair", "feature"),
    "rotary": (16, 8),
    "rows": (ROWS, ROWS + 1, 1),
    "angle_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "angle_view": ("contiguous", "offset", "packed", "swapped", "odd"),
    "angle_grad": (False, True),
    "angle_kind": ("tensor", "subclass"),
    "sine_view": ("contiguous", "offset", "packed", "swapped", "odd"),
    "place": ("order", "shifted", "offset", "starts", "ids", "shared"),
    "index_dtype": (torch.int64, torch.int32),
    "index_view": ("contiguous", "offset", "apart", "odd"),
    "number": (OFFSET, 0, 5, ROWS),
    "sequences": (2, 1, 3, 63, 64),
    "bounds_view": ("contiguous", "offset"),
    "max_seqlen": (None, 12, ROWS + 1),
    "scaling": (1.0, 1.5, 0.5),
    "cp_size": (1, 2),
    "cp_rank": (0, 1),
    "rotated": ("first", "last", "proportional"),
    "conjugate": (False, True),
    "interleaved": (False, True),
    "inplace": (False, True),
    "direction": ("forward", "backward"),
    "shares": (False, True),
}


def seen(t: torch.Tensor, view: str) -> torch.Tensor:  # noqa: PLR0911 - one return a view
    """The values of t in other memory or with other strides."""
    if view == "swapped" and t.ndim > 1:  # the first two axes (of angles: [rows, entries]) are swapped in memory
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if view == "packed" and t.ndim > 1:  # a part of something wider
        wide = t.new_zeros(*t.shape[:-2], t.shape[-2] + 3, t.shape[-1] + 16 * (t.ndim < 3))
        part = wide[..., : t.shape[-2], : t.shape[-1]]
        return part.copy_(t)
    if view == "odd":  # axes of length 1 may have any strides, and the tensor is contiguous all the same
        steps = [
            (step, 40, 1)[(n == 1) * (1 + axis % 2)]
            for axis, (n, step) in enumerate(zip(t.shape, t.stride(), strict=True))
        ]
        return t.new_zeros(t.numel() + 1).as_strided(t.shape, steps).copy_(t)
    if view == "apart":
        wide = t.new_zeros(*t.shape, 3)
        wide[..., 0] = t
        return wide[..., 0]
    if view == "offset":  # not aligned to 16 bytes
        return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if view == "expanded" and t.ndim > 1 and t.numel():
        return t[:1].clone().expand(t.shape)
    return t.clone()


def _rotated(
    case: Case, heads: int, dtype: torch.dtype, view: str, grad: str, generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor to rotate, and the leaf that gets its gradient, or None."""
    leading = {"bshd": (case.batch, case.seq), "sbhd": (case.seq, case.batch), "thd": (case.batch * case.seq,)}
    shape: tuple[int, ...] = (*leading[case.layout], heads, case.head_dim)
    if case.kv_heads is not None:
        middle = (3, heads) if case.kv_heads == 0 else (heads + 2 * case.kv_heads,)
        shape = (*leading[case.layout], *middle, case.head_dim)
    t = torch.randn(shape, generator=generator).to(device, dtype)
    if grad == "made":
        leaf = t.requires_grad_()
        return seen(leaf, view), leaf
    t = seen(t, view)
    if case.kind == "parameter":
        t = torch.nn.Parameter(t, requires_grad=grad == "leaf")
    if case.kind == "subclass":
        t = t.as_subclass(Marked)
    t.requires_grad_(grad == "leaf")
    return t, t if grad == "leaf" else None


def _bounds(tokens: int, case: Case) -> torch.Tensor:
    cuts = torch.linspace(0, tokens * case.cp_size, case.sequences + 1).floor()
    step = 2 * case.cp_size
    return (cuts // step * step if case.cp_size > 1 else cuts).to(torch.int32)


def build(  # noqa: PLR0912 - one branch a property
    case: Case, device: str = "cpu"
) -> tuple[Given, Settings, list[torch.Tensor]]:
    """New tensors for a case, its settings, and the leaves that get gradients; RoPE does not accept every case."""
    generator = torch.Generator().manual_seed(0)
    x, leaf = _rotated(case, case.heads, case.dtype, case.view, case.x_grad, generator, device)
    key, key_leaf = None, None
    if case.key_heads is not None and case.kv_heads is None:
        key_dtype = case.key_dtype or case.dtype
        key, key_leaf = _rotated(case, case.key_heads, key_dtype, case.key_view, case.key_grad, generator, device)
        if case.shares:
            key, key_leaf = x, None
    width = case.rotary if case.entries == "feature" else case.rotary // 2
    rows = (case.batch, case.rows) if case.batched else (case.rows,)
    angle = torch.rand(*rows, width, generator=generator).to(device)
    angles: dict[str, Any] = {}
    if case.source == "freqs":
        angles["freqs"] = seen(angle, case.angle_view)
    elif case.source == "cos_sin":
        angles["cos"] = seen(angle.cos().to(case.angle_dtype), case.angle_view)
        angles["sin"] = seen(angle.sin().to(case.angle_dtype), case.sine_view)
    elif case.source == "cache":
        cache = torch.cat((angle.cos(), angle.sin()), -1).to(case.angle_dtype)
        angles["cos_sin_cache"] = seen(cache, case.angle_view)
    else:
        angles["inv_freq"] = seen(angle.reshape(-1, width)[0], case.angle_view)
    if case.angle_kind == "subclass":
        angles = {name: t.as_subclass(Marked) for name, t in angles.items()}
    leaves = [t for t in (leaf, key_leaf) if t is not None]
    if case.angle_grad:
        leaves.append(next(iter(angles.values())).requires_grad_())
    tokens = case.batch * case.seq if case.layout == "thd" else case.seq
    positions, offset, bounds = None, 0, None
    count = case.sequences if case.layout == "thd" else case.batch
    if case.place == "shifted":
        offset = case.number
    elif case.place == "offset":
        offset = torch.tensor([0, OFFSET], dtype=case.index_dtype, device=device)[1]
        offset = offset if case.index_view == "offset" else offset.clone()
    elif case.place == "starts":
        starts = torch.randint(0, 9, (count,), generator=generator, dtype=case.index_dtype)
        offset = seen(starts.to(device), case.index_view)
    elif case.place in ("ids", "shared"):
        whole = {"bshd": (case.batch, case.seq), "sbhd": (case.seq, case.batch), "thd": (tokens,)}[case.layout]
        shape = (tokens,) if case.place == "shared" else whole
        ids = torch.randint(0, ROWS, shape, generator=generator, dtype=case.index_dtype)
        positions = seen(ids.to(device), case.index_view)
    if case.layout == "thd" and positions is None:
        bounds = seen(_bounds(tokens, case).to(device), case.bounds_view)
    settings = Settings(
        case.layout, case.interleaved, case.inplace, None, case.entries, case.max_seqlen, case.scaling, case.cp_size,
        case.cp_rank, case.rotated, case.conjugate, kv_heads=case.kv_heads, direction=case.direction,
    )  # fmt: skip
    return Given(x, key, **angles, cu_seqlens=bounds, positions=positions, offset=offset), settings, leaves


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """A gradient mode."""
    if name == "grad":
        with torch.enable_grad():
            yield
    elif name == "no_grad":
        with torch.no_grad():
            yield
    else:
        with torch.inference_mode():
            yield
