"""A GRU over sequences with tensors of any strides: build a call, run it in windows of steps, check it against the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.measuring.check import guarded, intact
from generator.measuring.mended import mended_interpreter
from tests.support import oracle
from tests.support.rope_case import assert_close
from tests.support.run import DEVICE, INTERPRETED, addresses, among, run, to_numpy, truncates, watched
from tuned.families.gru.launches import Recurrence, counters_needed, sequence
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import alone
from tuned.families.launch import Fill
from tuned.launching.launcher import run_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.run import Traffic
    from tuned.families.gru.variant import GruVariant

VIEWS = ("steps", "rows", "apart")  # how tokens lie in memory; "rows": batch first; "apart": see GAP
MARKED = 0.35  # the share of tokens that are marked as resets
GAP = 8  # elements between rows that are apart: 16 bytes of the narrowest type, which alignment depends on


SHAPES = {"layer": (1, 1), "both": (2, 1), "stack": (1, 2), "tall": (1, 3)}  # directions, layers
NUMBERS = {  # dtype, precision
    "half": ("float16", "tf32"),
    "brain": ("bfloat16", "tf32"),
    "ieee": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
}


@dataclasses.dataclass(frozen=True)
class Sequences:
    """What a recurrence is given besides its spec."""

    spec: GruSpec
    lengths: tuple[int, ...]  # steps of each row; all alike in a dense call, falling in a packed one
    view: str = "steps"
    seed: int = 0
    slack: int = 0  # by how many steps the call overstates its longest sequence

    @property
    def seq(self) -> int:
        """Steps of the call."""
        return max(self.lengths) + self.slack


@dataclasses.dataclass
class Built:
    """The call of a case, and the guarded tensors that its tensors are views of."""

    case: Sequences
    call: Recurrence
    bases: dict[str, torch.Tensor]

    def written(self) -> dict[str, torch.Tensor]:
        """The tensors that launches write."""
        found = {"out": self.call.out, "h_n": self.call.h_n, "between": self.call.between}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def spec_of(
    numbers: str, hidden: int, shape: str = "layer", layout: str = "dense", *, bias: bool = True, resets: bool = False
) -> GruSpec:
    directions, layers = SHAPES[shape]
    dtype, precision = NUMBERS[numbers]
    return GruSpec(dtype, hidden, layout, directions, layers, bias, precision, resets)


def lengths_of(layout: str, rows: int, seq: int) -> tuple[int, ...]:
    """Dense: all alike. Packed: falling to 1. "thd" (cu_seqlens): unsorted, and every third sequence is empty."""
    if layout == "dense":
        return (seq,) * rows
    falling = [max(1, seq - row) for row in range(rows)]
    if layout == "packed":
        return tuple(falling)
    return tuple(0 if row % 3 == 1 else length for row, length in enumerate([seq, *falling[:0:-1]]))


def build(case: Sequences, device: str = DEVICE) -> Built:
    """The tensors of a case: normal numbers in what is read, NaN in what is written, canaries around all."""
    spec, dtype = case.spec, getattr(torch, case.spec.dtype)
    draw = torch.Generator().manual_seed(case.seed)
    hidden, sets, batch = spec.hidden, spec.layers * spec.directions, len(case.lengths)
    bases: dict[str, torch.Tensor] = {}

    def plain(name: str, shape: tuple[int, ...], scale: float) -> Any:
        gap = GAP if case.view == "apart" and name in {"h_0", "h_n"} else 0
        bases[name] = guarded((*shape[:-1], shape[-1] + gap), dtype, device)
        view: Any = bases[name][..., : shape[-1]]
        return view.copy_(torch.randn(shape, generator=draw) * scale) if scale else view

    def tokens(name: str, before: tuple[int, ...], width: int, scale: float) -> Any:
        rows = (case.seq, batch) if spec.layout == "dense" else (sum(case.lengths),)
        gap = GAP if case.view == "apart" else 0
        turned = case.view == "rows" and spec.layout == "dense"
        bases[name] = guarded((*before, *(rows[::-1] if turned else rows), width + gap), dtype, device)
        view: Any = bases[name][..., :width]
        view = view.transpose(-3, -2) if turned else view
        return view.copy_(torch.randn(view.shape, generator=draw) * scale) if scale else view

    small = hidden**-0.5
    dense = spec.layout == "dense"
    call = Recurrence(
        gates=tokens("gates", (spec.directions,), 3 * hidden, 1.0),
        weight_hh=plain("weight_hh", (sets, 3 * hidden, hidden), small),
        h_0=plain("h_0", (sets, batch, hidden), 1.0),
        out=tokens("out", (), spec.directions * hidden, 0.0),
        h_n=plain("h_n", (sets, batch, hidden), 0.0),
        batch=batch,
        seq=case.seq,
        weight_ih=plain("weight_ih", (spec.layers - 1, 3 * hidden, hidden), small) if spec.stacked else None,
        between=tokens("between", (spec.layers - 1,), hidden, 0.0) if spec.stacked else None,
        bias_ih=plain("bias_ih", (sets, 3 * hidden), 1.0) if spec.bias else None,
        bias_hh=plain("bias_hh", (sets, 3 * hidden), 1.0) if spec.bias else None,
        states=torch.full((sets, batch, hidden), torch.nan, dtype=torch.float32, device=device),
        counters=torch.zeros(counters_needed(spec, batch), dtype=torch.int32, device=device),
        starts=None if dense else torch.tensor(starts_of(spec, case.lengths), device=device, dtype=_starts_type(spec)),
        lengths=None if dense else torch.tensor(case.lengths, device=device, dtype=torch.int32),
        resets=resets_of(case, device),
    )
    return Built(case, call, bases)


def resets_of(case: Sequences, device: str) -> torch.Tensor | None:
    """A reset mark for about a third of the tokens, strided as the case is; or None. The bytes between the marks are all set."""
    if not case.spec.resets:
        return None
    rows = (case.seq, len(case.lengths)) if case.spec.dense else (sum(case.lengths),)
    turned = case.view == "rows" and case.spec.dense
    base = torch.ones((*(rows[::-1] if turned else rows), 1 + 2 * (case.view == "apart")), dtype=torch.bool)
    marks = base[..., 0].transpose(-2, -1) if turned else base[..., 0]
    marks.copy_(torch.rand(rows, generator=torch.Generator().manual_seed(case.seed + 1)) < MARKED)
    base = base.to(device)
    return base[..., 0].transpose(-2, -1) if turned else base[..., 0]


def starts_of(spec: GruSpec, lengths: tuple[int, ...]) -> list[int]:
    """Packed: first row of each step; "thd": first token of each sequence, and the end."""
    if spec.layout == "thd":
        return list(itertools.accumulate(lengths, initial=0))
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return list(itertools.accumulate(sizes[:-1], initial=0))


def _starts_type(spec: GruSpec) -> torch.dtype:
    return torch.int64 if spec.layout == "packed" else torch.int32


def run_windows(built: Built, variant: GruVariant, windows: Iterable[tuple[int, int]] | None = None) -> None:
    """Launch the steps from ``begin`` to before ``end`` of each window; by default one step a launch, or all for form "row".

    Before each launch the window's results are filled with the value that readers wait to see replaced, or counters are
    set to 0.
    """
    spec, call = built.case.spec, built.call
    waits = {"counter": [Fill(call.counters, 0)]}.get(variant.exchange, [])
    for begin, end in windows or ([(0, call.seq)] if variant.by_row else single_steps(call.seq)):
        for fill in waits:
            run_step(fill)
        if variant.exchange != "counter" and not alone(spec, variant):
            _fill_tokens(built, begin, end)
        with mended_interpreter():
            run([sequence(spec, variant, call, begin, end)])


def single_steps(seq: int) -> list[tuple[int, int]]:
    """A window for each step, so that the end of a launch is the barrier."""
    return [(step, step + 1) for step in range(seq)]


def _fill_tokens(built: Built, begin: int, end: int) -> None:
    """Set all bits in the results of some steps, as a launch of all steps finds them."""
    spec = built.case.spec
    for name, tensor in built.written().items():
        if name == "h_n":
            continue
        bits = tensor.view(torch.int16 if spec.item == 2 else torch.int32)
        width = spec.hidden
        for direction, row in itertools.product(range(spec.directions), range(len(built.case.lengths))):
            for token in tokens_of(built, row, direction)[begin:end]:
                index: tuple[Any, ...] = (..., *token, slice(direction * width, (direction + 1) * width))
                bits[index] = -1


def tokens_of(built: Built, row: int, direction: int) -> list[tuple[int, ...]]:
    """Where each step of a row stands in a tensor of tokens, in the order that a direction takes them."""
    case = built.case
    steps = range(case.lengths[row])
    order = steps[::-1] if direction else steps
    if case.spec.layout == "dense":
        return [(t, row) for t in order]
    starts = built.call.starts.tolist()
    return [(starts[t] + row,) if case.spec.layout == "packed" else (starts[row] + t,) for t in order]


def cuts(resets: torch.Tensor | None, tokens: list[tuple[int, ...]], *, against: bool) -> list[bool]:
    """Whether the state is reset before each token of a row, in the order given, and behind the last one.

    A mark cuts between its token and the one before it in the row. ``against``: ``tokens`` are in the reverse of the row's
    order.
    """
    if resets is None:
        return [False] * (len(tokens) + 1)
    marks = [bool(resets[token]) for token in tokens]
    return [False, *marks] if against else [*marks, False]


def _cells(built: Built) -> Iterator[tuple[int, Any, Any, list[Any], list[Any]]]:
    """Every layer and direction: its index, its gates or input, its output, and two lists of places.

    The first list is the place of each token in both tensors. The second is the place of the state before that token:
    None for h_0, "cut" if a reset makes it 0.
    """
    spec, call = built.case.spec, built.call
    for layer, direction in itertools.product(range(spec.layers), range(spec.directions)):
        last = layer == spec.layers - 1
        out = (call.out if last else call.between[layer])[..., direction * spec.hidden : (direction + 1) * spec.hidden]
        given = call.gates[direction] if layer == 0 else call.between[layer - 1]
        now, before = [], []
        for row in range(len(built.case.lengths)):
            found = tokens_of(built, row, direction)
            now += found
            cut = cuts(call.resets, found, against=direction == 1)
            left = [None, *found]
            before += ["cut" if cut[step] else left[step] for step in range(len(found))]
        yield layer * spec.directions + direction, given, out, now, before


def operand_error(spec: GruSpec) -> float:
    """Relative error of a product: that of a float32 sum over ``hidden`` terms, and in TF32 the rounding of both operands."""
    return 2.0**-24 * (2 * spec.hidden + 16) + (2 * 2.0**-11 if _tf32(spec) else 0.0)


def _tf32(spec: GruSpec) -> bool:
    return spec.dtype == "float32" and spec.precision == "tf32"


def assert_steps_right(built: Built, *, rounds_products: bool = False, keeps_state: bool = False) -> None:
    """Every stored state is one step of the oracle from the stored state before it; h_n is the last state of each row.

    Each step starts from the stored state, since errors of earlier steps would else have to be bounded through all later
    ones. A launch of several steps keeps its own state unrounded, which allows half a unit in the last place more.
    ``rounds_products``: the products of the state are rounded too, as the library stores them. ``keeps_state``: the state
    is also multiplied unrounded.
    """
    spec, call, case = built.case.spec, built.call, built.case
    hidden = spec.hidden
    for cell, given, out, now, before in _cells(built):
        rows = [row for row, length in enumerate(case.lengths) for _ in range(length)]
        x_of, out_of, h_0 = to_numpy(given), to_numpy(out), to_numpy(call.h_0[cell])
        places = tuple(np.array(axis, dtype=int) for axis in zip(*now, strict=True)) if now else ((np.array([], int),))
        h = np.array(
            [
                np.zeros(hidden) if place == "cut" else h_0[row] if place is None else out_of[place]
                for row, place in zip(rows, before, strict=True)
            ]
        ).reshape(len(rows), hidden)
        x, got = x_of[places], out_of[places]
        w_hh, none = to_numpy(call.weight_hh[cell]), np.zeros(3 * hidden)
        b_ih, b_hh = (to_numpy(call.bias_ih[cell]), to_numpy(call.bias_hh[cell])) if spec.bias else (none, none)
        relative = operand_error(spec)
        gates_h = h @ w_hh.T
        kept = (1.0 if truncates(spec.dtype) else 0.5) * oracle.ulp(h, spec.dtype)  # of the state a program keeps
        error = (relative * np.abs(h) + (kept if keeps_state else 0)) @ np.abs(w_hh).T
        if rounds_products:
            error += 0.5 * oracle.ulp(gates_h, spec.dtype)
        if cell >= spec.directions:
            w_ih = to_numpy(call.weight_ih[cell - 1])
            error += relative * (np.abs(x) @ np.abs(w_ih).T)
            x = x @ w_ih.T
        want, arithmetic = oracle.gru_gates(x, gates_h, h, b_ih, b_hh)
        error_r, error_z = (np.minimum(0.25 * error[:, i * hidden : (i + 1) * hidden], 1) for i in range(2))
        g_n = gates_h[:, 2 * hidden :] + b_hh[2 * hidden :]
        error_n = np.minimum(error[:, 2 * hidden :] + error_r * np.abs(g_n), 2)
        bound = oracle.gru_tolerance(
            want, arithmetic + error_n + error_z * (np.abs(h) + 1) + kept, spec.dtype, truncates=truncates(spec.dtype)
        )
        assert_close(got[:, None, None], want[:, None, None], bound[:, None, None])
        last = h_0.copy()
        for row, place in zip(rows, now, strict=True):
            last[row] = out_of[place]
        assert np.array_equal(to_numpy(call.h_n[cell]), last, equal_nan=True), "h_n is not the last state of every row"


def assert_memory_right(built: Built, before: dict[str, torch.Tensor]) -> None:
    """Canaries are intact, inputs are unchanged, and nothing but results was written."""
    outside = {name: base.clone() for name, base in built.bases.items()}
    for name, view in built.written().items():
        base = built.bases[name]
        outside[name].as_strided(view.shape, view.stride(), 0).fill_(7.5)
        before[name].as_strided(view.shape, view.stride(), 0).fill_(7.5)
    for name, base in built.bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        same = torch.equal(outside[name].nan_to_num(nan=3.25), before[name].nan_to_num(nan=3.25))
        assert same, f"{name} was changed where no result belongs"


def assert_traffic_right(built: Built, traffic: Traffic) -> None:
    """No load outside the call's tensors, every result written once, and no program reads a state that another keeps."""
    call = built.call
    read = [t for t in vars(call).values() if isinstance(t, torch.Tensor) and t is not call.counters]
    allowed = np.concatenate([addresses(t).ravel() for t in read])
    loaded, stored = traffic.loaded()[:, 0], traffic.stored()[:, 0]
    strays = loaded[~among(loaded, allowed)]
    assert not len(strays), f"{len(strays)} loads outside every tensor of the call"
    kept = addresses(call.states).ravel()
    results = np.concatenate([addresses(t).ravel() for t in built.written().values()])
    stored = stored[~among(stored, kept)]
    assert np.array_equal(np.sort(stored), np.sort(results)), "not every result is written, or one is written twice"
    own, loads = (np.unique(t[among(t[:, 0], kept), :2], axis=0) for t in (traffic.stored(), traffic.loaded()))
    assert len(own) == len(np.unique(own[:, 0])), "a state that turns keep is written by two programs"
    others = {tuple(row) for row in loads} - {tuple(row) for row in own}
    assert not others, "a program reads a state that another keeps"


@contextlib.contextmanager
def _watched() -> Iterator[Traffic]:
    """As tests.support.run.watched, also for integer masks: the interpreter makes them of a block and a scalar mask together."""
    with watched() as traffic:
        note = traffic.note
        traffic.note = lambda kind, pointers, mask, program: note(kind, pointers, mask.astype(bool), program)  # type: ignore[method-assign]
        yield traffic


def assert_right(
    case: Sequences, variant: GruVariant, windows: Iterable[tuple[int, int]] | None = None, *, watch: bool = True
) -> Built:
    """Run a case in windows and check its results against the oracle, and all that it read and wrote."""
    built = build(case)
    before = {name: base.clone() for name, base in built.bases.items()}
    if INTERPRETED and watch:
        with _watched() as traffic:
            run_windows(built, variant, windows)
        assert_traffic_right(built, traffic)
    else:
        run_windows(built, variant, windows)
    assert_steps_right(built, keeps_state=variant.by_row)
    assert_memory_right(built, before)
    return built
