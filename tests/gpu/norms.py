"""Calls of a rotation with a norm before it, and the same with PyTorch's operators in any precision, on any device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tuned.dispatch import qk_norm_rope

BATCH, SEQ = 2, 37  # no tile divides SEQ
ROWS = 64  # rows of the table
WORSE = 1.1  # times the error (root mean square) of PyTorch's operators in float32
U32 = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Norm:
    """One call: its sizes, its other arguments, and its tensors' strides."""

    heads: int = 3
    key_heads: int = 1
    dim: int = 128
    rotary: int = 128
    norm: str = "head"
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bshd"
    lies: str = "contiguous"  # "gaps", "swapped", "qkv": views of one tensor
    place: str = "order"  # "ids"; "packed", with tokens of no sequence at both ends
    inplace: bool = False
    interleaved: bool = False
    zero_centered: bool = False
    rotated: str = "first"
    eps: float = 1e-6

    @property
    def name(self) -> str:
        fields = dataclasses.fields(self)
        return "-".join(str(getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default) or "usual"


@dataclasses.dataclass
class Made:
    """The tensors of a call."""

    tensors: list[torch.Tensor]  # query and key
    weights: list[torch.Tensor]
    named: dict[str, Any]
    around: list[torch.Tensor]  # the storages that contain the query and the key

    def call(self, *tensors: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = tensors or self.tensors
        found = qk_norm_rope(q, k, *self.weights, **self.named | changes)
        assert found[1] is not None
        return found[0], found[1]


def shape_of(case: Norm, heads: int, seq: int = SEQ) -> tuple[int, ...]:
    shapes = {
        "bshd": (BATCH, seq, heads, case.dim), "sbhd": (seq, BATCH, heads, case.dim), "thd": (BATCH * seq, heads, case.dim),
        "bhsd": (BATCH, heads, seq, case.dim),
    }  # fmt: skip
    return shapes[case.layout]


def make(case: Norm, device: str, seed: int = 0) -> Made:
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    around, tensors = [], []
    axis = 1 if case.layout == "bhsd" else -2
    if case.lies == "qkv":
        whole = normal(*shape_of(case, case.heads + 2 * case.key_heads), dtype=case.dtype)
        tensors = [whole.narrow(axis, 0, case.heads), whole.narrow(axis, case.heads, case.key_heads)]
        around = [whole]
    for heads in (case.heads, case.key_heads) if not tensors else ():
        t = normal(*shape_of(case, heads), dtype=case.dtype)
        if case.lies == "gaps":
            wide = t.new_full((*t.shape[:-1], t.shape[-1] + 24), torch.nan)
            wide[..., 8:-16] = t
            t, base = wide[..., 8:-16], wide
        else:
            t = base = t.transpose(0, 1).contiguous().transpose(0, 1) if case.lies == "swapped" else t
        tensors.append(t)
        around.append(base)
    counts = (case.heads, case.key_heads) if case.norm == "all" else (1, 1)
    centre = 0.0 if case.zero_centered else 1.0
    weights = [(centre + 0.3 * normal(n * case.dim)).to(case.dtype) for n in counts]
    table = 6.3 * torch.rand(
        ROWS if case.layout != "thd" else BATCH * ROWS, case.rotary // 2, generator=draw, device=device
    )
    named: dict[str, Any] = {"cos": table.cos(), "sin": table.sin(), "tensor_format": case.layout, "norm": case.norm}
    named |= {n: getattr(case, n) for n in ("eps", "interleaved", "zero_centered", "rotated", "inplace")}
    if case.place == "ids":
        tokens = {"sbhd": (SEQ, BATCH), "thd": (BATCH * SEQ,)}.get(case.layout, (BATCH, SEQ))
        named["positions"] = torch.randint(0, ROWS, tokens, generator=draw, device=device)
    if case.layout == "thd" and case.place != "ids":
        bounds = (3, 3, 20, 41, BATCH * SEQ - 5) if case.place == "packed" else (0, 30, BATCH * SEQ)
        named["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Made(tensors, weights, named, around)


# By PyTorch's own operators ---------------------------------------------------------------------------------------------


def turned(layout: str, t: torch.Tensor) -> torch.Tensor:
    """To [batch, seq, heads, dim], or back."""
    axes = {"sbhd": (0, 1), "bhsd": (1, 2)}.get(layout)
    return t if axes is None else t.transpose(*axes)


def _rows(case: Norm, named: dict[str, Any], seq: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The table's row for each token, and which tokens a sequence holds."""
    ids, bounds = named.get("positions"), named.get("cu_seqlens")
    if ids is not None:
        return (ids.t() if case.layout == "sbhd" else ids), None
    token = torch.arange(seq, device=named["cos"].device)
    if bounds is None:
        return token, None
    held = (token >= bounds[0]) & (token < bounds[-1])
    sequence = (torch.bucketize(token, bounds, right=True) - 1).clamp(0, len(bounds) - 2)
    return (token - bounds[sequence]).clamp(min=0), held


def own(
    case: Norm, tensors: list[torch.Tensor], weights: list[torch.Tensor], named: dict[str, Any], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Both results, computed in a dtype and not rounded afterwards."""
    found = []
    for given, weight in zip(tensors, weights, strict=True):
        x = turned(case.layout, given).to(dtype)
        rows, held = _rows(case, named, x.shape[-3])
        cos, sin = (named[n].to(dtype)[rows].unsqueeze(-2) for n in ("cos", "sin"))
        whole = x.flatten(-2) if case.norm == "all" else x
        clean = whole if held is None else torch.where(held.view(-1, *(1,) * (whole.ndim - 1)), whole, 1.0)
        normed = clean * torch.rsqrt(clean.pow(2).mean(-1, keepdim=True) + case.eps)
        normed = (normed * (weight.to(dtype) + (1.0 if case.zero_centered else 0.0))).view(x.shape)
        begin = case.dim - case.rotary if case.rotated == "last" else 0
        head = normed[..., begin : begin + case.rotary]
        if case.interleaved:
            a, b = head[..., ::2], head[..., 1::2]
            pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = head.chunk(2, -1)
            pairs = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        out = torch.cat((normed[..., :begin], pairs, normed[..., begin + case.rotary :]), -1)
        if held is not None:
            out = torch.where(held[:, None, None], out, x)
        found.append(turned(case.layout, out))
    return found


def with_gradients(case: Norm, made: Made, grads: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Both results and the four gradients; ours if ``dtype`` is None, else computed in it, rounded unless float64."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in made.tensors]
    weights = [t.detach().clone().requires_grad_() for t in made.weights]
    if dtype is None:
        tensors = [t * 1 for t in leaves] if case.inplace else leaves
        outs = list(dataclasses.replace(made, weights=weights).call(*tensors))
    else:
        outs = own(case, leaves, weights, made.named, dtype)
        outs = outs if dtype == torch.float64 else [t.to(case.dtype) for t in outs]
    if dtype == torch.float64:  # with leaves of float64: a gradient is rounded to the dtype of its leaf
        leaves = [t.detach().double().requires_grad_() for t in leaves]
        weights = [t.detach().double().requires_grad_() for t in weights]
        outs = own(case, leaves, weights, made.named, dtype)
    found = torch.autograd.grad(outs, [*leaves, *weights], [g.to(o.dtype) for g, o in zip(grads, outs, strict=True)])
    return [*(t.detach() for t in outs), *found]


# Judged -----------------------------------------------------------------------------------------------------------------


def rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def assert_as_good(names: tuple[str, ...], ours: list[Any], theirs: list[Any], exact: list[Any]) -> None:
    """Compare the root mean square and the largest error against float64 with those of float32."""
    for name, a, b, c in zip(names, ours, theirs, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert bool(a.isfinite().all()), f"{name} is not finite"
        mine, other, unit = rms(a.double() - c), rms(b.double() - c), U32 * rms(c)
        assert mine <= WORSE * other + unit, f"{name}: {mine:.3g}, of float32 {other:.3g}"
        furthest = [float((t.double() - c).abs().max()) for t in (a, b)]
        most = torch.finfo(a.dtype).eps * float(c.abs().max())
        assert furthest[0] <= 2 * furthest[1] + most, f"{name}: {furthest[0]:.3g}, of float32 {furthest[1]:.3g}"


RESULTS = ("q", "k", "gradient of q", "gradient of k", "gradient of q_weight", "gradient of k_weight")


def judge(case: Norm, device: str, seed: int = 0) -> None:
    """Check a call, its gradients, and the memory around its tensors."""
    made = make(case, device, seed)
    draw = torch.Generator(device).manual_seed(seed + 1)
    grads = [torch.randn(t.shape, generator=draw, device=device).to(t.dtype) for t in made.tensors]
    exact = with_gradients(case, made, grads, torch.float64)
    theirs = with_gradients(case, made, grads, torch.float32)
    for _ in range(2):  # first the plan is made, then it is used
        before = [t.clone() for t in made.around]
        assert_as_good(RESULTS, with_gradients(case, made, grads, None), theirs, exact)
        for t, was in zip(made.around, before, strict=True):
            assert torch.equal(t.nan_to_num(7.0), was.nan_to_num(7.0)), "an input was changed"
    for again in range(2):
        made = make(case, device, seed)
        before = [t.clone() for t in made.around]
        with torch.no_grad():
            found = made.call()
        assert all(a is b for a, b in zip(found, made.tensors, strict=True)) == case.inplace
        assert_as_good(RESULTS[:2], list(found), theirs[:2], exact[:2])
        if case.inplace:  # the call changes nothing but what it overwrites
            for t in made.tensors:
                home = t.untyped_storage().data_ptr()
                was = next(
                    b for a, b in zip(made.around, before, strict=True) if a.untyped_storage().data_ptr() == home
                )
                was.as_strided(t.shape, t.stride(), t.storage_offset()).zero_()
                t.zero_()
        for t, was in zip(made.around, before, strict=True):
            assert torch.equal(t.nan_to_num(7.0), was.nan_to_num(7.0)), f"memory around was changed, call {again}"
