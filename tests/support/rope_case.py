"""One RoPE call with tensors of any shape in memory: build it, run it, and check everything it did against the oracle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.measuring.check import guarded, intact
from tests.support import oracle
from tests.support.run import DEVICE, INTERPRETED, addresses, among, run, to_numpy, truncates, watched
from tuned.families.rope.launches import RopeCall, launches

if TYPE_CHECKING:
    from tests.support.run import Traffic
    from tuned.families.rope.spec import RopeSpec
    from tuned.families.rope.variant import RopeVariant

# How a tensor lies in memory: see _view.
VIEWS = ("contiguous", "qkv", "swapped", "transposed", "offset", "thirds", "expanded")


@dataclasses.dataclass(frozen=True)
class RopeCase:
    """What a call is given besides its spec. The key has its own view, or is part of the same tensor as x ("packed")."""

    spec: RopeSpec
    seq: int  # tokens along the token axis
    batch: int = 1
    angle_rows: int | None = None  # seq when not given
    angle_scale: float = 1.0  # factor of the normal random numbers that are freqs, or radians a position
    x_view: str = "contiguous"
    out_view: str = "contiguous"
    angle_view: str = "contiguous"  # or "strided": rows and entries apart; or "transposed"
    cu_seqlens: tuple[int, ...] | None = None
    padding: float | None = None  # the value of x in tokens of no sequence; None: random as elsewhere
    seed: int = 0
    key_view: str = "contiguous"  # or "packed": q, k and v are heads of one tensor, of which x and key are views
    key_out_view: str = "contiguous"
    starts: tuple[int, ...] | int = 0  # one number ("shifted", "offset"), or one a sequence ("starts")
    ids: tuple[tuple[int, ...], ...] | None = None  # [seq][batch]; or [seq][1], shared by the batch
    index_dtype: str = "int32"
    cp_size: int = 1
    cp_rank: int = 0
    scaling: float = 1.0

    def positions(self) -> list[list[int | None]]:
        """The position of each token, [seq][batch]; None for a token that no sequence holds."""
        ids = None
        if self.ids is not None:
            ids = np.broadcast_to(np.array(self.ids, dtype=np.int64), (self.seq, self.batch))
        return oracle.call_positions(
            self.seq,
            self.batch,
            cu_seqlens=self.cu_seqlens,
            starts=self.starts,
            ids=ids,
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
        )

    def held(self) -> np.ndarray:
        """[seq]: whether a sequence holds the token."""
        return np.array([row[0] is not None for row in self.positions()], dtype=bool)

    def turned(self) -> list[tuple[int, int]]:
        """The two features of each pair that rotates."""
        return oracle.features(self.spec.head_dim, self.spec.rotary_dim, self.spec.style, self.spec.rotated)


def _view(shape: tuple[int, ...], dtype: torch.dtype, how: str, heads_axis: int) -> tuple[Any, torch.Tensor]:
    """A tensor of ``shape`` that lies in memory as ``how`` says, and the guarded contiguous tensor that it is a view of."""
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
    if how in (
        "offset",
        "thirds",
    ):  # no alignment: rows that are wider by three, from the second element on; or every third element
        wider = axes[-1] + 3 if how == "offset" else 3 * axes[-1]
        base = guarded((*axes[:-1], wider), dtype, DEVICE)
        return base[..., 1 : 1 + shape[-1]] if how == "offset" else base[..., 1::3], base
    if how == "expanded":  # one element for all, as the gradient of sum() is
        base = guarded((1,), dtype, DEVICE)
        return base.expand(shape), base
    if how == "contiguous":
        base = guarded(shape, dtype, DEVICE)
        return base, base
    raise ValueError(f"a view is one of {VIEWS}, got {how!r}")


def shape_of(case: RopeCase, heads: int) -> tuple[int, ...]:
    """The shape of a tensor with ``heads`` heads in the layout of the call."""
    spec = case.spec
    tokens = {"bshd": (case.batch, case.seq), "sbhd": (case.seq, case.batch), "thd": (case.seq,)}[spec.layout]
    return (*tokens, heads, spec.head_dim)


def canonical(tensor: Any, layout: str) -> Any:
    """The same elements seen as [seq, batch, heads, head_dim]."""
    return {"sbhd": lambda: tensor, "bshd": lambda: tensor.transpose(0, 1), "thd": lambda: tensor[:, None]}[layout]()


def _strides(tensor: Any, layout: str) -> tuple[int, int, int, int]:
    seq, batch, heads, dim = canonical(tensor, layout).stride()
    return seq, 0 if layout == "thd" else batch, heads, dim


@dataclasses.dataclass
class Built:
    """The tensors of a case, the call that takes them, and their values before the call."""

    case: RopeCase
    call: RopeCall
    bases: dict[str, torch.Tensor]  # name -> the guarded contiguous tensor that a tensor is a view of
    before: dict[str, torch.Tensor]  # clones of the bases
    x_before: np.ndarray  # canonical, float64
    key_before: np.ndarray | None
    cos: np.ndarray  # [seq, batch, entries], float64, scaled and turned back as the call says
    sin: np.ndarray

    def run(self, variant: RopeVariant) -> None:
        """All launches of the variant."""
        run(launches(self.case.spec, variant, self.call))

    def outs(self) -> dict[str, tuple[Any, Any, np.ndarray]]:
        """For x and the key: name -> the tensor read, the tensor written, and the values read, as they were before the call."""
        call = self.call
        found = {"x": (call.x, call.out, self.x_before)}
        if self.key_before is not None:
            found["key"] = (call.key, call.key_out, self.key_before)
        return found


def _guarded_view(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> tuple[Any, torch.Tensor]:
    """A tensor of angles or positions, strided or transposed as ``how`` says, and the guarded tensor that it is a view of."""
    if how == "strided":
        base = guarded((*shape[:-2], 2 * shape[-2] + 1, 3 * shape[-1]), dtype, DEVICE)
        return base[..., 1 : 1 + 2 * shape[-2] : 2, ::3], base
    if how == "transposed":
        base = guarded((*shape[:-2], shape[-1], shape[-2]), dtype, DEVICE)
        return base.mT, base
    base = guarded(shape, dtype, DEVICE)
    return base, base


def _angles(case: RopeCase, rows: int, draw: torch.Generator) -> tuple[list[Any], list[torch.Tensor]]:
    spec = case.spec
    width = spec.rotary_dim if spec.angle_entries == "feature" else spec.rotary_dim // 2
    shape = (case.batch, rows, width) if spec.angles_per_batch else (rows, width)
    radians = torch.randn(shape, generator=draw, dtype=torch.float64) * case.angle_scale
    values = [radians] if spec.computes_sincos else [radians.cos(), radians.sin()]
    dtype = getattr(torch, spec.angle_dtype)
    if case.angle_view == "halves":  # cosines and sines are the halves of one cache
        base = guarded((rows, 2 * width), dtype, DEVICE)
        views, bases = [base[:, :width], base[:, width:]], [base]
    else:
        made = [_guarded_view(shape, dtype, case.angle_view) for _ in values]
        views, bases = [view for view, _ in made], [base for _, base in made]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    return views, bases


def _index(case: RopeCase) -> tuple[Any, tuple[int, int]]:
    """The tensor of positions of the call, and its strides in seq and batch."""
    dtype, mode = getattr(torch, case.index_dtype), case.spec.positions
    if mode in ("order", "shifted"):
        return None, (0, 0)
    if mode == "offset":
        return torch.tensor(case.starts, dtype=dtype, device=DEVICE), (0, 0)
    if mode == "starts":  # stride 2: the elements between must not be read
        return torch.tensor(case.starts, dtype=dtype, device=DEVICE).repeat_interleave(2)[::2], (0, 2)
    ids = torch.tensor(case.ids, dtype=dtype, device=DEVICE).t().contiguous()  # [batch or 1, seq]
    if len(ids) == 1:
        return ids[0], (1, 0)
    return ids.t() if case.spec.layout == "sbhd" else ids, (1, ids.stride(0))


def _turns(case: RopeCase, taken: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each token, [seq, batch, entries], from the angles as the kernel reads them (``taken``)."""
    spec, positions = case.spec, case.positions()
    if spec.angles == "inv_freq":
        radians = oracle.radians_at(taken[0][0], positions)
        cos, sin = np.cos(radians), np.sin(radians)
    else:
        tables = (np.cos(taken[0]), np.sin(taken[0])) if spec.computes_sincos else taken
        cos, sin = (oracle.rows_at(table, positions) for table in tables)
    return cos * case.scaling, sin * case.scaling * (-1 if spec.conjugate else 1)


def _rotated(
    case: RopeCase, heads: int, views: tuple[str, str], draw: torch.Generator
) -> tuple[list[Any], list[torch.Tensor]]:
    """A random tensor to rotate and the tensor for its result; and the guarded tensors that they are views of."""
    spec, shape = case.spec, shape_of(case, heads)
    dtype, heads_axis = getattr(torch, spec.dtype), 1 if spec.layout == "thd" else 2
    x, base = _view(shape, dtype, views[0], heads_axis)
    if views[0] == "expanded":
        base.copy_(torch.randn(1, generator=draw))
    else:
        x.copy_(torch.randn(shape, generator=draw))
    if spec.inplace:
        return [x, x], [base, base]
    out, out_base = _view(shape, dtype, views[1], heads_axis)
    return [x, out], [base, out_base]


def _query_and_key(case: RopeCase, draw: torch.Generator) -> tuple[dict[str, list[Any]], dict[str, list[torch.Tensor]]]:
    """Name -> the tensors read and written; and name -> the guarded tensors that these are views of."""
    spec, axis = case.spec, 1 if case.spec.layout == "thd" else 2
    if case.key_view != "packed":
        found = {"x": _rotated(case, spec.heads, (case.x_view, case.out_view), draw)}
        if spec.key_heads:
            found["key"] = _rotated(case, spec.key_heads, (case.key_view, case.key_out_view), draw)
        return {n: tensors for n, (tensors, _) in found.items()}, {n: bases for n, (_, bases) in found.items()}
    whole, bases = _rotated(case, spec.heads + 2 * spec.key_heads, (case.x_view, case.out_view), draw)
    x, key = ([t.narrow(axis, *at) for t in whole] for at in ((0, spec.heads), (spec.heads, spec.key_heads)))
    return {"x": x, "key": key}, {"x": bases}


def build(case: RopeCase) -> Built:
    """The tensors of a case: random values where the call may read, NaN and canaries everywhere else."""
    spec, draw = case.spec, torch.Generator().manual_seed(case.seed)
    tensors, found = _query_and_key(case, draw)
    if case.padding is not None:
        for x, _ in tensors.values():
            x[~torch.from_numpy(case.held())] = case.padding
    rows = case.seq * case.cp_size if case.angle_rows is None else case.angle_rows
    rows = 1 if spec.angles == "inv_freq" else rows
    views, angle_bases = _angles(case, rows, draw)
    cos, sin = _turns(case, [to_numpy(view) for view in views])
    bounds = None
    if case.cu_seqlens is not None:
        bounds = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=DEVICE)
    index, index_strides = _index(case)
    (x, out), (key, key_out) = tensors["x"], tensors.get("key", [None, None])
    none = (0, 0, 0, 0)
    call = RopeCall(
        x=x,
        out=out,
        cos=views[0],
        sin=None if spec.computes_sincos else views[1],
        seq=case.seq,
        batch=1 if spec.layout == "thd" else case.batch,
        angle_rows=rows,
        x_strides=_strides(x, spec.layout),
        out_strides=_strides(out, spec.layout),
        angle_strides=views[0].stride()[-2:],
        cu_seqlens=bounds,
        sequences=len(case.cu_seqlens) - 1 if case.cu_seqlens is not None else 0,
        key=key,
        key_out=key_out,
        key_strides=none if key is None else _strides(key, spec.layout),
        key_out_strides=none if key is None else _strides(key_out, spec.layout),
        angle_stride_b=views[0].stride(0) if spec.angles_per_batch else 0,
        positions=index,
        position_strides=index_strides,
        offset=case.starts if spec.positions == "shifted" else 0,
        cp_size=case.cp_size,
        cp_rank=case.cp_rank,
        scaling=case.scaling,
    )
    bases = {f"angles {number}": base for number, base in enumerate(angle_bases)}
    for name, (read, written) in found.items():
        bases |= {name: read} if spec.inplace else {name: read, f"{name} out": written}
    before = {name: base.clone() for name, base in bases.items()}
    return Built(
        case=case,
        call=call,
        bases=bases,
        before=before,
        x_before=to_numpy(canonical(x, spec.layout)),
        key_before=None if key is None else to_numpy(canonical(key, spec.layout)),
        cos=cos,
        sin=sin,
    )


def wanted(built: Built, before: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The right result for x, or for the values ``before`` of the key, and the error allowed; both canonical."""
    case, spec, held = built.case, built.case.spec, built.case.held()
    x = built.x_before if before is None else before
    out = oracle.rope(
        x,
        built.cos,
        built.sin,
        turned=case.turned(),
        style=spec.style,
        entries=spec.angle_entries,
        transposed=spec.direction == "backward",
        held=held,
    )
    bound = oracle.rope_tolerance(
        x, out, spec.dtype, turned=case.turned(), scaling=case.scaling, truncates=truncates(spec.dtype)
    )
    bound[~held] = 0  # these tokens are copied, or not touched in place
    if spec.copied_heads and before is None:
        first = spec.heads - spec.copied_heads
        out[:, :, first:], bound[:, :, first:] = x[:, :, first:], 0
    return out, bound


def assert_close(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    """Every element is within its bound, and NaN only where NaN is right; a bound of 0 means equal, also for infinities."""
    with np.errstate(invalid="ignore"):
        right = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= bound)
    if not right.all():
        worst = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{int((~right).sum())} of {right.size} elements are wrong, first [seq, batch, head, feature] = "
            f"{list(worst)}: got {got[worst]}, want {want[worst]} to within {bound[worst]:.3g}"
        )


def assert_right(case: RopeCase, variant: RopeVariant) -> None:
    """Run a case and check its result against the oracle, and all memory: canaries, inputs, gaps, every address touched."""
    built = build(case)
    if INTERPRETED:
        with watched() as traffic:
            built.run(variant)
        assert_traffic_right(built, traffic, variant)
    else:
        built.run(variant)
    assert_memory_right(built)
    for _, out, before in built.outs().values():
        of_key = None if before is built.x_before else before
        assert_close(to_numpy(canonical(out, case.spec.layout)), *wanted(built, of_key))


def assert_memory_right(built: Built) -> None:
    """Canaries are intact, inputs are unchanged, and the memory between the elements of the output was not written."""
    written = built.outs()
    for name, base in built.bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        now, before = base.clone(), built.before[name].clone()
        for _, out, _ in written.values():
            if out.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
                for copy in (now, before):
                    copy.as_strided(out.shape, out.stride(), out.storage_offset() - base.storage_offset()).zero_()
        assert torch.equal(now.nan_to_num(nan=7.5), before.nan_to_num(nan=7.5)), (
            f"{name} was changed where it must not be"
        )


def _moved(built: Built) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Addresses of the elements of x and the key that may be read, that must be read, and that must be written."""
    case, spec = built.case, built.case.spec
    may, must, written = [], [], []
    for x, out, _ in built.outs().values():
        of_x, of_out = (addresses(canonical(t, spec.layout)) for t in (x, out))
        if spec.inplace:
            turning = [feature for pair in case.turned() for feature in pair]
            of_x, of_out = of_x[..., turning], of_out[..., turning][case.held()]
        may.append(of_x.ravel())
        must.append((of_out if spec.inplace else of_x).ravel())
        written.append(of_out.ravel())
    return np.concatenate(may), np.concatenate(must), np.concatenate(written)


def assert_traffic_right(built: Built, traffic: Traffic, variant: RopeVariant) -> None:
    """No address outside the tensors, each element that moves read once and written once, and no race in place.

    A variant of whole rows reads each feature that rotates twice, in the program that writes it: for the feature itself, and
    for the other feature of its pair.
    """
    case, spec, call = built.case, built.case.spec, built.call
    loaded, stored = traffic.loaded(), traffic.stored()
    x, needed, out = _moved(built)
    outside = int((~among(stored[:, 0], out)).sum())
    assert not outside, f"{outside} stores outside the output"
    assert np.array_equal(np.sort(stored[:, 0]), np.sort(out)), "not every element of the output is written once"
    others = (call.cos, call.sin, call.cu_seqlens, call.positions)
    allowed = [x, *(addresses(a).ravel() for a in others if a is not None)]
    wild = ~among(loaded[:, 0], np.concatenate(allowed))
    assert not wild.any(), f"{int(wild.sum())} loads outside what the call may read"
    from_x = loaded[among(loaded[:, 0], x)]
    if case.x_view != "expanded":
        read_at, times = np.unique(from_x[:, 0], return_counts=True)
        assert times.max(initial=1) == 1 or variant.whole_rows, "an element of x is read twice"
        turning = [feature for pair in case.turned() for feature in pair]
        turned = [addresses(canonical(t, spec.layout))[..., turning].ravel() for t, _, _ in built.outs().values()]
        often = np.where(among(read_at, np.concatenate(turned)), 2, 1)
        assert (times <= often).all(), "an element of x is read more often than it is used"
        assert among(needed, from_x[:, 0]).all(), "an element of x is not read"
    if spec.inplace:
        assert len({(address, program) for address, program, _ in from_x.tolist()}) == len(np.unique(from_x[:, 0])), (
            "two programs read it"
        )
        reader = {address: (program, order) for address, program, order in sorted(from_x.tolist(), key=lambda a: a[2])}
        for address, program, order in stored.tolist():
            reading_program, read = reader[address]
            assert reading_program == program, "a program writes what another reads"
            assert read < order, "a program writes a feature before it reads it"
