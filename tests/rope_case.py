"""One RoPE call with tensors of any shape in memory: build it, run it, and hold everything it did against the oracle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.measuring.guard import guarded, intact
from tests import oracle
from tests.run import DEVICE, INTERPRETED, addresses, run, to_numpy, truncates, watched
from tuned.rope.launches import RopeCall, launches

if TYPE_CHECKING:
    from tests.run import Traffic
    from tuned.rope.spec import RopeSpec
    from tuned.rope.variant import RopeVariant

# How a tensor lies in memory, as (what is allocated, how x is seen in it).
VIEWS = ("contiguous", "qkv", "swapped", "transposed", "offset", "expanded")


@dataclasses.dataclass(frozen=True)
class RopeCase:
    """What a call is given besides its spec."""

    spec: RopeSpec
    seq: int  # tokens along the token axis
    batch: int = 1
    angle_rows: int | None = None  # seq when not given
    angle_scale: float = 1.0  # freqs are this times a normal number
    x_view: str = "contiguous"
    out_view: str = "contiguous"
    angle_view: str = "contiguous"  # or "strided": rows and entries apart; or "transposed"
    cu_seqlens: tuple[int, ...] | None = None
    padding: float | None = None  # what x holds in tokens of no sequence, when not a normal number
    seed: int = 0


def _view(shape: tuple[int, ...], dtype: torch.dtype, how: str, heads_axis: int) -> tuple[Any, torch.Tensor]:
    """A tensor of ``shape`` that lies in memory as ``how`` says, and the guarded contiguous one that it is a view of."""
    axes = list(shape)
    if how == "qkv":  # the second of three tensors packed along the heads, as one projection gives them
        axes[heads_axis] *= 3
        base = guarded(tuple(axes), dtype, DEVICE)
        return base.narrow(heads_axis, shape[heads_axis], shape[heads_axis]), base
    if how == "swapped":  # heads before tokens: bhsd seen as bshd, and the like
        before = heads_axis - 1
        axes[before], axes[heads_axis] = axes[heads_axis], axes[before]
        base = guarded(tuple(axes), dtype, DEVICE)
        return base.transpose(before, heads_axis), base
    if how == "transposed":  # the last dimension has the largest stride
        base = guarded((axes[-1], *axes[:-1]), dtype, DEVICE)
        return base.movedim(0, -1), base
    if how == "offset":  # rows wider by three, beginning at the second element: no alignment at all
        base = guarded((*axes[:-1], axes[-1] + 3), dtype, DEVICE)
        return base[..., 1 : 1 + shape[-1]], base
    if how == "expanded":  # one element for all, as the gradient of sum() is
        base = guarded((1,), dtype, DEVICE)
        return base.expand(shape), base
    if how == "contiguous":
        base = guarded(shape, dtype, DEVICE)
        return base, base
    raise ValueError(f"a view is one of {VIEWS}, got {how!r}")


def shape_of(case: RopeCase) -> tuple[int, ...]:
    """The shape of x in the layout of the call."""
    spec = case.spec
    tokens = {"bshd": (case.batch, case.seq), "sbhd": (case.seq, case.batch), "thd": (case.seq,)}[spec.layout]
    return (*tokens, spec.heads, spec.head_dim)


def canonical(tensor: Any, layout: str) -> Any:
    """The same elements seen as [seq, batch, heads, head_dim]."""
    return {"sbhd": lambda: tensor, "bshd": lambda: tensor.transpose(0, 1), "thd": lambda: tensor[:, None]}[layout]()


def _strides(tensor: Any, layout: str) -> tuple[int, int, int, int]:
    seq, batch, heads, dim = canonical(tensor, layout).stride()
    return seq, 0 if layout == "thd" else batch, heads, dim


@dataclasses.dataclass
class Built:
    """The tensors of a case, the call made of them, and what they held before it."""

    case: RopeCase
    call: RopeCall
    bases: dict[str, torch.Tensor]  # name -> the guarded contiguous tensor below
    before: dict[str, torch.Tensor]  # clones of the bases
    x_before: np.ndarray  # canonical, float64
    cos: np.ndarray  # [rows, entries], float64
    sin: np.ndarray

    def run(self, variant: RopeVariant) -> None:
        """All launches of the variant."""
        run(launches(self.case.spec, variant, self.call))


def _angles(case: RopeCase, rows: int, draw: torch.Generator) -> tuple[list[Any], list[torch.Tensor]]:
    spec = case.spec
    width = spec.rotary_dim if spec.angle_entries == "feature" else spec.rotary_dim // 2
    freqs = torch.randn((rows, width), generator=draw, dtype=torch.float64) * case.angle_scale
    values = [freqs] if spec.takes_sine else [freqs.cos(), freqs.sin()]
    views, bases = [], []
    for value in values:
        dtype = getattr(torch, spec.angle_dtype)
        if case.angle_view == "strided":
            base = guarded((2 * rows + 1, 3 * width), dtype, DEVICE)
            view: Any = base[1 : 1 + 2 * rows : 2, ::3]
        elif case.angle_view == "transposed":
            base = guarded((width, rows), dtype, DEVICE)
            view = base.t()
        else:
            base = view = guarded((rows, width), dtype, DEVICE)
        view.copy_(value)
        views.append(view)
        bases.append(base)
    return views, bases


def build(case: RopeCase) -> Built:
    """The tensors of a case: random values where the call may read, NaN and canaries everywhere else."""
    spec = case.spec
    dtype, draw = getattr(torch, spec.dtype), torch.Generator().manual_seed(case.seed)
    heads_axis = 1 if spec.layout == "thd" else 2
    x, x_base = _view(shape_of(case), dtype, case.x_view, heads_axis)
    if case.x_view == "expanded":
        x_base.copy_(torch.randn(1, generator=draw))
    else:
        x.copy_(torch.randn(shape_of(case), generator=draw))
    out, out_base = x, x_base
    if not spec.inplace:
        out, out_base = _view(shape_of(case), dtype, case.out_view, heads_axis)
    if case.padding is not None:
        for token, position in enumerate(oracle.token_positions(case.seq, case.cu_seqlens)):
            if position is None:
                x[token] = case.padding
    rows = case.seq if case.angle_rows is None else case.angle_rows
    views, angle_bases = _angles(case, rows, draw)
    taken = [to_numpy(view) for view in views]
    bounds = None
    if case.cu_seqlens is not None:
        bounds = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=DEVICE)
    call = RopeCall(
        x=x,
        out=out,
        cos=views[0],
        sin=None if spec.takes_sine else views[1],
        seq=case.seq,
        batch=1 if spec.packed else case.batch,
        angle_rows=rows,
        x_strides=_strides(x, spec.layout),
        out_strides=_strides(out, spec.layout),
        angle_strides=views[0].stride(),
        cu_seqlens=bounds,
        sequences=len(case.cu_seqlens) - 1 if case.cu_seqlens is not None else 0,
    )
    bases = {"x": x_base, **{f"angles {index}": base for index, base in enumerate(angle_bases)}}
    if not spec.inplace:
        bases["out"] = out_base
    return Built(
        case=case,
        call=call,
        bases=bases,
        before={name: base.clone() for name, base in bases.items()},
        x_before=to_numpy(canonical(x, spec.layout)),
        cos=np.cos(taken[0]) if spec.takes_sine else taken[0],
        sin=np.sin(taken[0]) if spec.takes_sine else taken[1],
    )


def wanted(built: Built) -> tuple[np.ndarray, np.ndarray]:
    """The result and the error allowed, canonical."""
    case, spec = built.case, built.case.spec
    out = oracle.rope(
        built.x_before,
        built.cos,
        built.sin,
        rotary_dim=spec.rotary_dim,
        style=spec.style,
        entries=spec.angle_entries,
        transposed=spec.direction == "backward",
        cu_seqlens=case.cu_seqlens,
    )
    bound = oracle.rope_tolerance(
        built.x_before,
        out,
        spec.dtype,
        rotary_dim=spec.rotary_dim,
        style=spec.style,
        truncates=truncates(spec.dtype),
    )
    for token, position in enumerate(oracle.token_positions(case.seq, case.cu_seqlens)):
        if position is None:
            bound[token] = 0  # copied, or not touched
    return out, bound


def assert_close(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    """Within the bound, NaN where NaN is right and nowhere else; a bound of zero means equal, infinities too."""
    with np.errstate(invalid="ignore"):
        right = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= bound)
    if not right.all():
        worst = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{int((~right).sum())} of {right.size} elements are wrong, first [seq, batch, head, feature] = "
            f"{list(worst)}: got {got[worst]}, want {want[worst]} to within {bound[worst]:.3g}"
        )


def assert_right(case: RopeCase, variant: RopeVariant) -> None:
    """Run a case and hold it against the oracle: result, canaries, inputs, what lies between, every address touched."""
    built = build(case)
    if INTERPRETED:
        with watched() as traffic:
            built.run(variant)
        assert_traffic_right(built, traffic)
    else:
        built.run(variant)
    assert_memory_right(built)
    assert_close(to_numpy(canonical(built.call.out, case.spec.layout)), *wanted(built))


def assert_memory_right(built: Built) -> None:
    """Canaries stand, inputs are as they were, and what lies between the elements of the output was not written."""
    outside = {name: base.clone() for name, base in built.bases.items()}
    for name, base in built.bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
    written = built.call.out
    name = "x" if built.case.spec.inplace else "out"
    now, before = outside[name], built.before[name].clone()
    for base in (now, before):
        base.as_strided(
            written.shape, written.stride(), written.storage_offset() - built.bases[name].storage_offset()
        ).zero_()
    for name, base in outside.items():
        then = before if base is now else built.before[name]
        assert torch.equal(base.nan_to_num(nan=7.5), then.nan_to_num(nan=7.5)), (
            f"{name} was changed where it must not be"
        )


def assert_traffic_right(built: Built, traffic: Traffic) -> None:
    """No address outside the tensors, each element of x read once and written once, and no race in place."""
    case, spec, call = built.case, built.case.spec, built.call
    loaded, stored = traffic.loaded(), traffic.stored()
    positions = oracle.token_positions(case.seq, case.cu_seqlens)
    held = [token for token, position in enumerate(positions) if position is not None]
    out = addresses(canonical(call.out, spec.layout))
    if spec.inplace:
        out = out[held][..., : spec.rotary_dim]
    outside = int((~np.isin(stored[:, 0], out)).sum())
    assert not outside, f"{outside} stores outside the output"
    assert np.array_equal(np.sort(stored[:, 0]), np.sort(out.ravel())), (
        "not every element of the output is written once"
    )
    x = addresses(canonical(call.x, spec.layout))
    allowed = [x, *(addresses(a) for a in (call.cos, call.sin, call.cu_seqlens) if a is not None)]
    wild = ~np.isin(loaded[:, 0], np.concatenate([np.ravel(a) for a in allowed]))
    assert not wild.any(), f"{int(wild.sum())} loads outside every tensor of the call"
    from_x = loaded[np.isin(loaded[:, 0], x)]
    if case.x_view != "expanded":
        assert len(np.unique(from_x[:, 0])) == len(from_x), "an element of x is read twice"
    if spec.inplace:
        reader = {address: (program, order) for address, program, order in from_x.tolist()}
        for address, program, order in stored.tolist():
            reading_program, read = reader[address]
            assert reading_program == program, "a program writes what another reads"
            assert read < order, "a program writes a feature before it reads it"
