"""One call: its tensors, how it runs, and whether its results are right. The printed scripts are made of this."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch

import tuned
from tests.fuzz import formula, originals, refusals
from tests.fuzz.formula import Rope
from tests.fuzz.views import Built, View, bits, build, overlaps, places, refill, seed_of
from tuned import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Given", "Integer", "Part", "Rope", "View", "Wrong"]
MODES = ("plain", "no_grad", "inference", "grad", "autocast", "stream", "graph")
WORSE = 1.5  # an error may be this many times that of PyTorch's operators, plus FLOOR roundings
FLOOR, HARD = 2.0, 8.0  # roundings of the result: always right up to FLOOR; for each step and layer, wrong above HARD
STORED = 4.0  # roundings that are allowed for a gradient's largest element
MOST_STEPS = 16  # steps of a recurrence over which errors add up: its gates forget
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TF32_UNIT = 2.0**-11
U32 = UNIT[torch.float32]
EXPLAINED = (dispatch.gru, dispatch.gru_cell, dispatch.linear_cat)


class Integer(int):
    """An int of another class, as a configuration may have."""

    def __repr__(self) -> str:
        return f"Integer({int(self)})"


class Wrong(AssertionError):  # noqa: N818 - what it is
    """Something that a call did and should not have done."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Rotated heads of a tensor: ``see`` selects them, by an expression over the axes of the layout."""

    tensor: str
    see: str
    rope: Rope
    angles: dict[str, str]  # name in the formula -> expression

    def __repr__(self) -> str:
        return f"Part({self.tensor!r}, {self.see!r}, {brief(self.rope)}, {self.angles!r})"


def brief(value: Any) -> str:
    """A dataclass, with only those fields that are not at their defaults."""
    fields = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != f.default or f.default is dataclasses.MISSING
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


@functools.lru_cache(maxsize=4096)
def _expression(text: str) -> Any:
    return compile(text, text, "eval")


def _evaluated(text: str, names: dict[str, Any]) -> Any:
    return eval(_expression(text), {"__builtins__": {}}, names)


CELL = re.compile(r"_(\d+_\d+)$")  # the layer and direction in a weight's name


def largest_of(name: str, grads: Mapping[str, torch.Tensor | None]) -> Any:
    """The largest element that determines how a gradient is rounded.

    Gradients of a cell's weights are sums of the same gradients of gates, which are rounded and may cancel in one weight.
    """
    cell = CELL.search(name)
    mates = [grad for other, grad in grads.items() if other == name or (cell and other.endswith(cell[0]))]
    largest = [grad.abs().amax() for grad in mates if grad is not None and grad.numel()]
    return torch.stack(largest).amax() if largest else 0.0


class Given:
    """The tensors of one call, and the call's results."""

    def __init__(
        self,
        seed: int = 0,
        *,
        device: str = "cpu",
        mode: str = "plain",
        autocast: torch.dtype | None = None,
        tf32: tuple[bool, bool] = (False, True),  # for GEMMs, for cuDNN
        written: tuple[str, ...] = (),
        truncates: bool = False,  # whether a store to bfloat16 truncates, as in Triton's interpreter
    ) -> None:
        self.seed, self.device, self.mode = seed, device, mode if device == "cuda" else OFF_GPU.get(mode, mode)
        self.autocast, self.tf32, self.written, self.truncates = autocast, tf32, written, truncates
        self.built: dict[str, Built] = {}
        self.out: Any = None
        self.error: Exception | None = None
        self.refusal: Exception | None = None  # PyTorch's error for a call that we served
        self.grads: dict[str, torch.Tensor | None] = {}
        self.grad_outputs: dict[int, torch.Tensor] = {}  # by the result's place; drawn unless given
        self.flags: list[tuple[str, torch.Tensor | bool, Callable[[], str] | None]] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], offset: int, size: int,
        **rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor of the call, inside a storage of ``size`` elements whose other elements are NaN."""
        return self.view(name, View(shape, dtype, strides, offset, size, **rest))

    def view(self, name: str, view: View) -> torch.Tensor:
        self.built[name] = build(name, view, self.seed, self.device)
        return self.built[name].tensor

    # How a call is run ----------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call it in the mode and keep what it returns or raises; compute gradients if the mode has them."""
        self.arguments = arguments
        with self._settings():
            try:
                if self.mode == "graph":
                    self._captured(function, arguments)
                elif self.mode == "stream":
                    self._on_stream(function, arguments)
                else:
                    self.out = function(**arguments)
                    if self.mode == "grad":
                        self._backward()
            except Wrong:
                raise
            except Exception as error:
                if "CUDA error" in str(error):
                    raise  # the context is lost
                self.error = error.with_traceback(None)
        return self.out

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        matmul, rnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, rnn.allow_tf32
        matmul.allow_tf32, rnn.allow_tf32 = self.tf32
        mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "graph": torch.no_grad}.get(self.mode)
        casts = self.mode == "autocast"
        try:
            with (
                warnings.catch_warnings(),
                mode() if mode else contextlib.nullcontext(),
                torch.autocast(self.device, dtype=self.autocast) if casts else contextlib.nullcontext(),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            matmul.allow_tf32, rnn.allow_tf32 = before

    def _on_stream(self, function: Any, arguments: dict[str, Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.out = function(**arguments)
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, function: Any, arguments: dict[str, Any]) -> None:
        """Warm up and capture with other values, replay with a third set, then with the call's values."""
        if function in EXPLAINED and tuned.explain(function, **arguments).rule == "eager":
            self.out = function(**arguments)  # it may wait for the device, as PyTorch's operators do
            return
        self._refill(self.seed + 1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # memory that is freed during a capture may end the capture
        try:
            # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
            with torch.cuda.stream(stream):
                graph.capture_begin()
                try:
                    self.out = function(**arguments)
                finally:
                    graph.capture_end()
        finally:
            gc.enable()
        torch.cuda.synchronize()
        for seed in (self.seed + 2, self.seed):
            self._refill(seed)
            graph.replay()
        torch.cuda.synchronize()
        self.graph = graph  # the graph owns the memory of the results

    def _refill(self, seed: int) -> None:
        for name, built in self.built.items():
            refill(built, name, seed, self.device)

    def _backward(self) -> None:
        outs = {place: t for place, t in enumerate(flat(self.out)) if t.requires_grad}
        leaves = {name: b.leaf for name, b in self.built.items() if b.leaf is not None}
        if not leaves:
            return
        if not outs:
            self.grads = dict.fromkeys(leaves)
            return
        for place, t in outs.items():
            if place not in self.grad_outputs:
                self.grad_outputs[place] = drawn_gradient(t, seed_of(self.seed, f"grad {place}"), self.seed + place)
        over = [self.grad_outputs[place].to(t.device, t.dtype) for place, t in outs.items()]
        kept = [grad.clone() for grad in over]
        found = torch.autograd.grad(list(outs.values()), list(leaves.values()), over, allow_unused=True)
        self.grads = dict(zip(leaves, found, strict=True))
        for given, before in zip(over, kept, strict=True):
            self._flag("a gradient that it was given was overwritten", ~same(given, before))

    # What is right ---------------------------------------------------------------------------------------------------

    def _flag(self, text: str, bad: torch.Tensor | bool, numbers: Callable[[], str] | None = None) -> None:
        """Note that something is wrong if ``bad`` has a true element; the device is asked once, at the end.

        ``numbers`` describes the size of the error, if there is one. Tensors on "meta" have no elements to ask.
        """
        if isinstance(bad, torch.Tensor) and bad.device.type == "meta":
            return
        self.flags.append((text, bad if isinstance(bad, bool) else bad.any(), numbers))

    def _settle(self) -> None:
        if not self.flags:
            return
        asked = [flag for _, flag, _ in self.flags if isinstance(flag, torch.Tensor)]
        answers = iter(torch.stack(asked).tolist() if asked else ())
        found = []
        for text, flag, numbers in self.flags:
            if next(answers) if isinstance(flag, torch.Tensor) else flag:
                found.append(text + (f" ({numbers()})" if numbers else ""))
        if found:
            raise Wrong("; ".join(found))

    def untouched(self, allowed: dict[str, list[torch.Tensor]] | None = None) -> None:
        """Inputs and all memory around views are unchanged, except places that may be overwritten."""
        for name, built in self.built.items():
            if built.storage.device.type == "meta":
                continue
            now, before = bits(built.storage), built.before
            if name in self.written and allowed and name in allowed:
                now, before = now.clone(), before.clone()
                for where in allowed[name]:
                    now[where.flatten()] = before[where.flatten()] = 0
            self._flag(f"{name}, or the memory around it, was changed", (now != before).to(self.device))

    def check_refused(self, *types: type[BaseException], text: str = "") -> None:
        """The call raised one of these errors and wrote nothing."""
        if self.error is None:
            raise Wrong(f"{text or 'a call that is wrong'} was served: {names(types)} is right")
        if not isinstance(self.error, types):
            raise Wrong(f"raised {type(self.error).__name__}: {self.error}; {names(types)} is right")
        self.untouched()
        self._settle()

    def _served(self) -> None:
        if self.error is not None:
            raise Wrong(f"raised {type(self.error).__name__}: {self.error}") from self.error

    def check_rope(self, *parts: Part, results: tuple[str, ...] = (), contiguous: bool = False) -> None:
        """The results are these tensors with their parts rotated, right to a rounding of float64; the gradients too."""
        self._served()
        with torch.no_grad():
            values = {name: b.value() for name, b in self.built.items() if b.storage.device.type != "meta"}
            wanted = self._rotated(parts, values, values)
            outs = [t for t in (self.out if isinstance(self.out, tuple) else (self.out,)) if t is not None]
            if not results:  # nothing is returned
                self._flag("something was returned", bool(outs))
                results = self.written
                outs = [self.built[name].tensor for name in results]
            elif len(outs) != len(results) or (
                isinstance(self.out, tuple) != (len(results) > 1) and None not in flat_(self.out)
            ):
                raise Wrong(f"returned {describe(self.out)} where {len(results)} tensors are right")
            tensors = {name: b.tensor for name, b in self.built.items()}
            for see, out in zip(results, outs, strict=True):
                self._like(see, _evaluated(see, tensors), out, contiguous=contiguous)
                want, bound = (_evaluated(see, {n: pair[i] for n, pair in wanted.items()}) for i in (0, 1))
                self._beyond(see, out.detach(), want, bound)
            allowed = {
                name: [
                    _evaluated(p.see, {name: places(self.built[name].view, self.device)})
                    for p in parts
                    if p.tensor == name
                ]
                for name in self.written
            }
            self.untouched(allowed)
            if self.grad_outputs:
                self._gradients_rope(parts, values, results)
        self._settle()

    def _rotated(
        self, parts: tuple[Part, ...], values: dict[str, Any], of: dict[str, Any], *, transposed: bool = False
    ) -> dict[str, Any]:
        """name -> (want, bound) of the tensors in ``of``, with angles from ``values``."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys(p.tensor for p in parts):
            want = of[name].to(torch.float64, memory_format=torch.contiguous_format, copy=True)
            bound = torch.zeros_like(want)
            for part in (p for p in parts if p.tensor == name):
                angles = {key: _evaluated(text, values) for key, text in part.angles.items()}
                call = dataclasses.replace(part.rope, transposed=part.rope.transposed != transposed)
                new, right = formula.rope(
                    call, _evaluated(part.see, {name: of[name]}), angles, truncates=self.truncates
                )
                _evaluated(part.see, {name: want}).copy_(new)
                _evaluated(part.see, {name: bound}).copy_(right)
            found[name] = want, bound
        return found

    def _like(self, name: str, given: torch.Tensor, out: Any, *, contiguous: bool) -> None:
        if not isinstance(out, torch.Tensor):
            raise Wrong(f"returned {describe(out)} for {name}")
        if (out.shape, out.dtype, out.device.type) != (given.shape, given.dtype, given.device.type):
            raise Wrong(f"returned {describe(out)} for {name}, {describe(given)}")
        if self.written:
            mine = [*self.arguments.values(), *(b.tensor for b in self.built.values())]
            self._flag(f"{name} is overwritten, and another tensor returned", all(out is not a for a in mine))
        elif out.numel():
            memory = {b.storage.untyped_storage().data_ptr() for b in self.built.values()}
            self._flag(f"the result for {name} lies in an input's memory", out.untyped_storage().data_ptr() in memory)
        if contiguous:
            self._flag(f"the result for {name} is not contiguous", not out.is_contiguous())

    def _gradients_rope(self, parts: tuple[Part, ...], values: dict[str, Any], results: tuple[str, ...]) -> None:
        tables = [
            n
            for n in ("freqs", "cos", "sin", "cos_sin_cache", "inv_freq")
            if n in self.built and self.built[n].leaf is not None
        ]
        required = [name for name in results if tables or self.built[name].leaf is not None]
        if len(self.grad_outputs) != len(required):
            raise Wrong(f"{len(self.grad_outputs)} results require a gradient, {len(required)} should")
        given = dict(zip(required, self.grad_outputs.values(), strict=True))
        found = self._rotated(tuple(p for p in parts if p.tensor in given), values, given, transposed=True)
        for name, (want, bound) in found.items():
            if self.built[name].leaf is not None:
                self._gradient(name, want, bound)
        for name in tables:
            self._gradient_table(name, parts, values, given)

    def _gradient_table(
        self, name: str, parts: tuple[Part, ...], values: dict[str, Any], given: dict[str, torch.Tensor]
    ) -> None:
        """The gradient of angles; each element is a sum over at most all tokens and heads."""
        if not values[name].numel():
            return  # no result depends on it
        table = values[name].double().requires_grad_()
        with torch.enable_grad():
            outs = []
            for part in parts:
                angles = {key: _evaluated(text, values | {name: table}) for key, text in part.angles.items()}
                outs.append(formula.rope(part.rope, _evaluated(part.see, values).double(), angles)[0])
            grads = [_evaluated(part.see, {part.tensor: given[part.tensor]}).double() for part in parts]
            (want,) = torch.autograd.grad(outs, table, grads)
        count = sum(out[..., 0].numel() for out in outs)
        turned = [_evaluated(part.see, values).double() for part in parts]
        largest = [max((t.abs().amax() for t in ts if t.numel()), default=torch.zeros(())) for ts in (turned, grads)]
        slack = 8 * U32 * (count + 16) * largest[0] * largest[1] * max(abs(p.rope.scaling) for p in parts)
        if name == "inv_freq":  # each term is multiplied by its position
            slack = slack * max(_furthest(p, out, values) for p, out in zip(parts, outs, strict=True))
        grad = self.grads[name]
        if grad is None:
            raise Wrong(f"{name} has no gradient")
        if (grad.shape, grad.dtype) != (want.shape, self.built[name].view.dtype):
            raise Wrong(f"the gradient of {name} is {describe(grad)}")
        # The last rounding; for numbers too small to be normal it is not a fraction of their size.
        stored = torch.maximum(UNIT[grad.dtype] * want.abs(), formula.ulp(want, grad.dtype) / 2)
        self._beyond(f"the gradient of {name}", grad, want, slack + stored + 1e-30)

    def _gradient(self, name: str, want: torch.Tensor, bound: torch.Tensor) -> None:
        """The gradient of a tensor; for a view made of a leaf, the gradient of the leaf's storage."""
        grad, built = self.grads[name], self.built[name]
        if grad is None:
            raise Wrong(f"{name} has no gradient")
        if built.view.grad == "made":
            where = places(built.view, self.device).flatten()
            many = built.view.numel
            whole = [torch.zeros(built.view.size, dtype=torch.float64, device=self.device) for _ in range(3)]
            whole[0].index_add_(0, where, want.flatten())
            whole[1].index_add_(0, where, bound.flatten())
            whole[2].index_add_(0, where, want.abs().flatten())
            want, bound = whole[0], whole[1]
            if built.view.negative:
                want = -want
            # Gradients of elements that share memory are added in the dtype.
            unit = UNIT[built.view.dtype]
            counts = torch.zeros_like(want).index_add_(
                0, where, torch.ones(many, dtype=torch.float64, device=self.device)
            )
            bound = bound + torch.where(counts > 1, counts * unit * whole[2], 0.0)
        if grad.shape != want.shape or grad.dtype != built.view.dtype:
            raise Wrong(f"the gradient of {name} is {describe(grad)}")
        self._beyond(f"the gradient of {name}", grad, want, bound)

    def _beyond(self, name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
        bad = formula.wrong(got, want, bound)

        def numbers() -> str:
            where = tuple(int(i) for i in bad.nonzero()[0])
            first = f"{float(got[where]):.6g} at {list(where)}, {float(want[where]):.6g} is right to {float(bound[where]):.2g}"
            return f"{int(bad.sum())} of {bad.numel()}: {first}"

        self._flag(f"{name} is wrong", bad, numbers)

    # Against PyTorch ---------------------------------------------------------------------------------------------------

    def check_pytorch(
        self, original: str, *, text: bool = False, must: bool = False, parts: dict[str, str] | None = None
    ) -> None:
        """The call must be as exact as PyTorch's operators, and refused where they refuse.

        ``must``: what PyTorch refuses must be refused; else we may take more. ``text``: with the same words.
        ``parts``: expressions that select the overwritten part of a tensor, where that is not all of it.
        """
        theirs, wanted = self._original(original, doubled=False), self._original(original, doubled=True)
        taken = any(text in str(theirs.error) for text in refusals.TAKEN)
        must = must and not taken
        if taken and self.error is not None and str(self.error).strip() != str(theirs.error).strip():
            # PyTorch names only one reason for a refusal: ask again with contiguous tensors.
            theirs = self._original(original, doubled=False, contiguous=True)
        if wanted.error is not None and self.device != "cpu":  # cuDNN does not take everything that a CPU takes
            wanted = self._original(original, doubled=True, device="cpu")
        if theirs.error is not None and (must or self.error is not None):
            error = theirs.error
            if self.error is None:
                raise Wrong(f"served what PyTorch refuses with {type(error).__name__}: {error}")
            told = str(self.error).strip() == str(error).strip() or not text
            if type(self.error) is not type(error) or not told:
                raise Wrong(
                    f"raised {type(self.error).__name__}: {self.error}\nPyTorch {type(error).__name__}: {error}"
                )
            self.untouched()
            self._settle()
            return
        self._served()
        if wanted.error is not None:
            raise Wrong(f"the reference raised {type(wanted.error).__name__}: {wanted.error}") from wanted.error
        with torch.no_grad():
            self._compare(theirs, wanted, sequences=original in ("gru", "original_nn_gru"))
            where = {name: places(self.built[name].view, self.device) for name in self.written}
            allowed = {
                name: [_evaluated((parts or {}).get(name, name), {name: all_of})] for name, all_of in where.items()
            }
            self.untouched(allowed)
        self._settle()

    def _original(self, original: str, *, doubled: bool, device: str = "", contiguous: bool = False) -> Given:
        """PyTorch's operators on the call's tensors as they were before the call."""
        mode = {"graph": "no_grad", "stream": "no_grad"}.get(self.mode, self.mode)
        if doubled and mode == "autocast":
            mode = "no_grad"
        again = Given(self.seed, device=self.device, mode=mode, autocast=self.autocast, tf32=self.tf32)
        made: dict[int, torch.Tensor] = {}
        for name, built in self.built.items():
            new = again.view(name, built.view)
            if doubled and built.view.device != "meta" and new.is_floating_point():
                value = built.value().double()
                leaf = None
                if built.view.grad:
                    value.requires_grad_()
                    leaf = value
                again.built[name] = dataclasses.replace(again.built[name], tensor=value, leaf=leaf)
                new = value
            elif doubled and new.is_floating_point():  # on "meta" too it needs the dtype of the others
                new = new.double()
            if device:
                value = new.detach().to(device)
                again.built[name] = dataclasses.replace(
                    again.built[name], tensor=value, leaf=value.requires_grad_() if built.view.grad else None
                )
                new = value
            made[id(built.tensor)] = new.contiguous() if contiguous else new
        again.grad_outputs = dict(self.grad_outputs)  # rounded as in our call
        again.run(getattr(originals, original), **originals.swapped(self.arguments, made, doubled=doubled))
        return again

    def _compare(self, theirs: Given, wanted: Given, *, sequences: bool) -> None:
        """``sequences``: cuDNN's TF32 setting determines the precision of products; else the setting of GEMMs does."""
        ours, reference, exact = (flat(g.out) for g in (self, theirs, wanted))
        self.refusal = theirs.error
        if theirs.error is not None:
            reference = [None] * len(exact)  # type: ignore[list-item]
        if len(ours) != len(exact):
            raise Wrong(f"returned {describe(self.out)}, PyTorch {describe(theirs.out)}")
        size, steps, terms = originals.size(self.arguments)
        dtype = self.autocast if self.mode == "autocast" and self.autocast else self._dtype()
        unit = UNIT[dtype] * (2 if self.truncates and dtype == torch.bfloat16 else 1)
        # Interpreted kernels round the factors of a product to TF32 as a GPU's kernels do; PyTorch on a CPU does not.
        kernels = self.device == "cuda" or self.truncates
        if dtype == torch.float32 and kernels and self.tf32[sequences]:
            unit = TF32_UNIT
        summed = U32 * terms**0.5 / 2  # a float32 sum errs by a unit for each term, in any direction
        for index, (a, b, c) in enumerate(zip(ours, reference, exact, strict=True)):
            if b is not None and a.requires_grad != b.requires_grad:
                raise Wrong(f"result {index} requires {'a' if a.requires_grad else 'no'} gradient, unlike PyTorch's")
            if index < len(self.written) and b is not None:
                b = b.to(a.dtype)  # noqa: PLW2901 - in place the dtype is that of what is overwritten
            self._as_good(f"result {index}", a, b, c.to(a.device), size * (unit + summed), steps)
            if index < len(self.written):
                overwritten = self.built[self.written[index]].tensor
                self._flag("another tensor than the one overwritten is returned", a is not overwritten)
        for name, grad in self.grads.items():
            theirs_grad = theirs.grads.get(name)
            if (grad is None) != (theirs_grad is None) and theirs.error is None:
                raise Wrong(f"the gradient of {name} is {describe(grad)}, PyTorch's {describe(theirs_grad)}")
            want = wanted.grads.get(name)
            if grad is not None and want is not None:
                want = want.to(grad.device)
                largest = largest_of(name, wanted.grads)
                if self.built[name].view.grad == "made":
                    where = places(self.built[name].view, self.device).flatten()
                    whole = torch.zeros(self.built[name].view.size, dtype=torch.float64, device=self.device)
                    want = whole.index_add_(0, where, want.flatten())
                    want = -want if self.built[name].view.negative else want
                many = overlaps(self.built[name].view) if self.built[name].view.grad == "made" else 1
                # Stored values in between are rounded to the dtype; sums are not, but their terms may be larger.
                slack = many * (STORED * unit * largest + 32 * size * (U32 + summed) * (1 + largest))
                self._as_good(f"the gradient of {name}", grad, theirs_grad, want, slack, steps)

    def _dtype(self) -> torch.dtype:
        return next(t.dtype for t in flat(self.out))

    def _as_good(self, name: str, a: Any, b: Any, c: Any, unit: Any, steps: int) -> None:
        """No further from float64 than PyTorch's result, up to a factor and a floor; and never far from it."""
        if b is not None and self.mode == "autocast" and a.dtype == self.autocast and b.dtype == torch.float16:
            b = b.to(a.dtype)  # torch 2.11's cuDNN returns float16 whatever dtype autocast asks for
        if b is not None and (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            raise Wrong(f"{name} is {describe(a)}, PyTorch's {describe(b)}")
        if a.shape != c.shape:
            raise Wrong(f"{name} is {describe(a)}, float64's {describe(c)}")
        if not a.numel():
            return
        error = (a.detach().double() - c.detach()).abs().amax()
        hard = HARD * unit * min(steps, MOST_STEPS)
        allowed = None if b is None else (b.detach().double() - c.detach()).abs().amax()

        def numbers() -> str:
            other = f", PyTorch raised {self.refusal!r}" if allowed is None else f", PyTorch's by {float(allowed):.3g}"
            return f"off by {float(error):.3g}{other}; roundings are {float(unit):.2g}"

        # PyTorch's result may be further off than its settings say: cuDNN's was, once in 100,000 calls. If our result has
        # the same bits, it is not our error.
        wrong = ~(error <= hard)
        if b is not None:
            wrong = wrong & ~same(a.detach(), b.detach()).all()
        self._flag(f"{name} is wrong", wrong, numbers)
        if allowed is not None:
            self._flag(f"{name} errs more than PyTorch's", ~(error <= WORSE * allowed + FLOOR * unit), numbers)


def _furthest(part: Part, out: torch.Tensor, values: dict[str, Any]) -> int:
    """A bound on the distance of all tokens' positions from 0."""
    given = [_evaluated(part.angles[n], values) for n in ("positions", "starts") if n in part.angles]
    largest = max((int(t.abs().max()) for t in given if t.numel()), default=0)
    return largest + abs(part.rope.offset) + max(out.shape[:-2]) * part.rope.cp_size


OFF_GPU = {"stream": "no_grad", "graph": "no_grad"}


def flat_(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def flat(out: Any) -> list[torch.Tensor]:
    """The floating point tensors in what a call returned."""
    if isinstance(out, torch.Tensor):
        return [out] if out.is_floating_point() else []
    return [t for one in out for t in flat(one)] if isinstance(out, (tuple, list)) else []


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def drawn_gradient(t: torch.Tensor, seed: int, which: int) -> torch.Tensor:
    """A gradient for t: contiguous, with axes in another order, or one number expanded, as sum() gives."""
    draw = torch.Generator(t.device).manual_seed(seed)
    shape = t.shape[::-1] if which % 3 == 1 else () if which % 3 == 2 else t.shape
    made = torch.randn(shape, generator=draw, device=t.device).to(t.dtype)
    return made.permute(*range(t.ndim)[::-1]) if which % 3 == 1 else made.expand(t.shape)


def names(types: tuple[type[BaseException], ...]) -> str:
    return " or ".join(t.__name__ for t in types)


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    return type(value).__name__
