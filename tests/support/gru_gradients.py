"""The gradient of a GRU over sequences: build a call, run it in windows of steps, check it against the formula."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from generator.families.gru_backward.reference import UNITS, gradients, reference
from generator.measuring.check import guarded, intact
from generator.measuring.mended import mended_interpreter
from tests.support import oracle
from tests.support.gru_sequences import GAP, Sequences, cuts, operand_error, resets_of, starts_of
from tests.support.run import DEVICE, INTERPRETED, addresses, among, run, to_numpy, truncates, watched
from tuned.families.gru_backward.launches import PARTS, RecurrenceGradient, before, counters_needed, sequence
from tuned.launching.launcher import run_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.run import Traffic
    from tuned.families.gru.variant import GruVariant

WRITTEN = ("out", "grad_h_0")
ARITHMETIC = (
    2.0**-19
)  # the error of float32 in factors up to 1 that take some dozens of operations, exponentials among them


@dataclasses.dataclass
class Built:
    """The call of a case, and the guarded tensors that its tensors are views of."""

    case: Sequences
    call: RecurrenceGradient
    bases: dict[str, torch.Tensor]

    def written(self) -> dict[str, torch.Tensor]:
        """The tensors that launches write for the caller."""
        return {name: getattr(self.call, name) for name in WRITTEN}


def build(case: Sequences, device: str = DEVICE) -> Built:
    """The tensors of a case: normal numbers in what is read, NaN in what is written, canaries around all.

    The view "apart" puts a gap between rows wherever a call allows it, and lays the gradient of a dense output batch first,
    unlike the other tensors.
    """
    spec, dtype = case.spec, getattr(torch, case.spec.dtype)
    draw = torch.Generator().manual_seed(case.seed)
    hidden, sets, batch = spec.hidden, spec.directions, len(case.lengths)
    dense, apart = spec.layout == "dense", case.view == "apart"
    bases: dict[str, torch.Tensor] = {}

    def filled(name: str, base_shape: tuple[int, ...], width: int, scale: float, *, turned: bool = False) -> Any:
        bases[name] = guarded(base_shape, dtype, device)
        view: Any = bases[name][..., :width]
        view = view.transpose(-3, -2) if turned else view
        return view.copy_(torch.randn(view.shape, generator=draw) * scale) if scale else view

    def plain(name: str, shape: tuple[int, ...], scale: float) -> Any:
        gap = GAP if apart and name.startswith("grad_h") else 0
        return filled(name, (*shape[:-1], shape[-1] + gap), shape[-1], scale)

    def tokens(name: str, sets: tuple[int, ...], width: int, scale: float) -> Any:
        turned = dense and (case.view == "rows" or (apart and name == "grad_out"))
        rows = (case.seq, batch) if dense else (sum(case.lengths),)
        gap = GAP if apart and name == "grad_out" else 0
        return filled(name, (*sets, *(rows[::-1] if turned else rows), width + gap), width, scale, turned=turned)

    starts_type = torch.int64 if spec.layout == "packed" else torch.int32
    small = hidden**-0.5
    call = RecurrenceGradient(
        gates=tokens("gates", (sets,), 3 * hidden, 0.7),
        hidden=tokens("hidden", (sets,), 3 * hidden, 0.7),
        before=tokens("before", (sets,), hidden, 0.5),
        weight_hh=plain("weight_hh", (sets, 3 * hidden, hidden), small),
        grad_out=tokens("grad_out", (), sets * hidden, 1.0),
        grad_h_n=plain("grad_h_n", (sets, batch, hidden), 1.0),
        out=tokens("out", (sets,), PARTS * hidden, 0.0),
        grad_h_0=plain("grad_h_0", (sets, batch, hidden), 0.0),
        batch=batch,
        seq=case.seq,
        bias_ih=plain("bias_ih", (sets, 3 * hidden), 1.0) if spec.bias else None,
        bias_hh=plain("bias_hh", (sets, 3 * hidden), 1.0) if spec.bias else None,
        states=torch.full((sets, batch, hidden), torch.nan, dtype=torch.float32, device=device),
        counters=torch.zeros(counters_needed(spec, batch), dtype=torch.int32, device=device),
        starts=None if dense else torch.tensor(starts_of(spec, case.lengths), device=device, dtype=starts_type),
        lengths=None if dense else torch.tensor(case.lengths, device=device, dtype=torch.int32),
        resets=resets_of(case, device),
    )
    return Built(case, call, bases)


def single_steps(seq: int) -> list[tuple[int, int]]:
    """A window for each step, so that the end of a launch is the barrier. There is one step more than the longest row has."""
    return [(step, step + 1) for step in range(seq + 1)]


def run_windows(built: Built, variant: GruVariant, windows: Iterable[tuple[int, int]] | None = None) -> None:
    """Launch the steps from ``begin`` to before ``end`` of each window; by default one step a launch.

    Before each launch the window's results are filled with the value that readers wait to see replaced, or counters are
    set to 0.
    """
    spec, call = built.case.spec, built.call
    for begin, end in windows or single_steps(call.seq):
        if variant.exchange == "counter":
            for fill in before(variant, call):
                run_step(fill)
        else:
            _fill_tokens(built, begin, end)
        with mended_interpreter():
            run([sequence(spec, variant, call, begin, end)])


def _fill_tokens(built: Built, begin: int, end: int) -> None:
    """Set all bits in the results of some steps, as a launch of all steps finds them."""
    bits = built.call.out.view(torch.int16 if built.case.spec.item == 2 else torch.int32)
    for direction, row in itertools.product(range(built.case.spec.directions), range(len(built.case.lengths))):
        for token in tokens_of(built, row, direction)[begin:end]:
            bits[(direction, *token)] = -1


def tokens_of(built: Built, row: int, direction: int) -> list[tuple[int, ...]]:
    """Where each step of a row stands in a tensor of tokens, in the order that a gradient takes them: the last one first."""
    case = built.case
    steps = range(case.lengths[row])
    order = steps if direction else steps[::-1]
    if case.spec.layout == "dense":
        return [(t, row) for t in order]
    starts = built.call.starts.tolist()
    return [(starts[t] + row,) if case.spec.layout == "packed" else (starts[row] + t,) for t in order]


def assert_gradients_right(built: Built) -> None:
    """Every step's gradients are those of the formula, applied to the stored message of the step after it.

    Each step starts from the stored message, since errors of later steps would else have to be bounded through all earlier
    ones. The gradient that a program keeps for its own units is not rounded and gets smaller at each step, so its error is
    bounded by the sum over the steps so far.
    """
    spec, call, case = built.case.spec, built.call, built.case
    hidden, cut = spec.hidden, truncates(spec.dtype)
    relative = operand_error(dataclasses.replace(spec, hidden=3 * hidden))
    lengths = np.array(case.lengths)
    for direction in range(spec.directions):
        out, x, h, state = (to_numpy(t[direction]) for t in (call.out, call.gates, call.hidden, call.before))
        grad_out = to_numpy(call.grad_out)[..., direction * hidden : (direction + 1) * hidden]
        weight, first = to_numpy(call.weight_hh[direction]), to_numpy(call.grad_h_0[direction])
        if spec.bias:
            x, h = x + to_numpy(call.bias_ih[direction]), h + to_numpy(call.bias_hh[direction])
        order = [tokens_of(built, row, direction) for row in range(len(lengths))]
        # `own` is the gradient that goes from one token to the next in this order, and at last to h_0.
        stops = [cuts(call.resets, tokens, against=direction == 0) for tokens in order]
        own, error = to_numpy(call.grad_h_n[direction]), np.zeros((len(lengths), hidden))
        for step in range(case.seq):
            rows = np.flatnonzero(lengths > step)
            if not len(rows):
                continue
            at = tuple(np.array(axis) for axis in zip(*(order[row][step] for row in rows), strict=True))
            (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x[at], 3, -1), np.split(h[at], 3, -1)
            r, z = 1 / (1 + np.exp(-x_r - h_r)), 1 / (1 + np.exp(-x_z - h_z))
            n = np.tanh(x_n + r * h_n)
            d = own[rows] + grad_out[at]
            d_n = d * (1 - z) * (1 - n * n)
            wanted = (d_n * r, d_n * h_n * r * (1 - r), d * (state[at] - n) * z * (1 - z), d_n)
            reach = (1.0, np.abs(h_n) / 4, (np.abs(state[at]) + 1) / 4, 1.0)  # the largest factors of d
            terms = sum(np.abs(term) for term in (x_r, x_z, x_n, h_r, h_z, h_n))
            noise = (
                ARITHMETIC * (1 + terms) * (np.abs(d) + error[rows])
            )  # the rounding errors of the terms are in proportion to their sizes
            for part, (want, most) in enumerate(zip(wanted, reach, strict=True)):
                got = out[at][:, part * hidden : (part + 1) * hidden]
                bound = oracle.gru_tolerance(want, most * (error[rows] + noise), spec.dtype, truncates=cut)
                worst = np.abs(got - want) / bound
                assert (worst <= 1).all(), f"direction {direction}, step {step}, part {part}: {np.nanmax(worst)} times"
            message = out[at][:, : 3 * hidden]
            by_gate = np.concatenate((weight[2 * hidden :], weight[: 2 * hidden]))  # in a message's order: n, r, z
            own[rows] = d * z + message @ by_gate
            error[rows] = error[rows] + noise + relative * (np.abs(message) @ np.abs(by_gate))
            reset = [row for row in rows if stops[row][step + 1]]
            own[reset], error[reset] = 0, 0
        bound = oracle.gru_tolerance(own, error, spec.dtype, truncates=cut)
        assert (np.abs(first - own) <= bound).all(), f"direction {direction}: the gradient of h_0"
        assert np.array_equal(first[lengths == 0], own[lengths == 0]), "of a sequence without a token it is that of h_n"


def assert_memory_right(built: Built, before: dict[str, torch.Tensor]) -> None:
    """Canaries are intact, inputs are unchanged, and nothing but results was written."""
    outside = {name: base.clone() for name, base in built.bases.items()}
    for name, view in built.written().items():
        for base in (outside[name], before[name]):
            base.as_strided(view.shape, view.stride(), 0).fill_(7.5)
    for name, base in built.bases.items():
        assert bool(intact(base)), f"a canary beside {name} was overwritten"
        same = torch.equal(outside[name].nan_to_num(nan=3.25), before[name].nan_to_num(nan=3.25))
        assert same, f"{name} was changed where no result belongs"


def assert_traffic_right(built: Built, traffic: Traffic) -> None:
    """No load outside the call's tensors, every result written once, and no program reads a gradient that another keeps."""
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
    assert len(own) == len(np.unique(own[:, 0])), "a gradient that is kept is written by two programs"
    others = {tuple(row) for row in loads} - {tuple(row) for row in own}
    assert not others, "a program reads a gradient that another keeps"


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
    """Run a case in windows and check its results and all that it read and wrote against the formula."""
    built = build(case)
    before = {name: base.clone() for name, base in built.bases.items()}
    if INTERPRETED and watch:
        with _watched() as traffic:
            run_windows(built, variant, windows)
        assert_traffic_right(built, traffic)
    else:
        run_windows(built, variant, windows)
    assert_gradients_right(built)
    if case.spec.hidden > 1:  # the reference's bound is relative to the largest of several elements of a row
        assert_as_the_reference(built)
    assert_memory_right(built, before)
    return built


def assert_as_the_reference(built: Built) -> None:
    """Both results are within the bound that tuning demands of the reference, or within twice the bound where stores truncate."""
    spec, call = built.case.spec, built.call
    wanted, bound = reference(spec, call)
    _, first = gradients(spec, call)
    largest = first.abs().amax(-1, keepdim=True)
    unit = (bound / (wanted.abs() + UNITS * wanted.abs().amax(-1, keepdim=True))).nan_to_num(0).max()
    for found, want, most in (
        (call.out, wanted, bound),
        (call.grad_h_0, first, unit * (first.abs() + UNITS * largest)),
    ):
        assert bool(((found.double() - want).abs() <= most * (2 if truncates(spec.dtype) else 1)).all())
