"""Call a kernel family of your own as a function: ``family(__name__)`` at the end of its module.

docs/own-kernel.md builds one, from ``Problem``, ``Size``, ``Variant``, ``family``, ``launch`` and ``one_of``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tuned.families.choices import one_of
from tuned.families.family import Family, Problem
from tuned.families.launch import Launch
from tuned.families.outside import FamilyError, Outside, Size, Variant, described, family_name
from tuned.launching.launcher import launch_public, run_step
from tuned.launching.overwrite import bump_versions
from tuned.launching.plan import NO_KEY, DirectLaunch, bypassed, direct_launch, listeners, modes, remember, traits
from tuned.launching.rehearsal import listen, listening, note_left
from tuned.lookup.gpu import gpu_of, why_eager
from tuned.lookup.lookup import Choice, choose
from tuned.lookup.place import PROGRAM
from tuned.lookup.table import digests_of

__all__ = [
    "FamilyError",
    "Launch",
    "Outside",
    "Own",
    "Problem",
    "Size",
    "Variant",
    "family",
    "launch",
    "one_of",
    "rounding",
]


def family(module: str) -> Own:
    """The function of the family that a module describes; give ``__name__``. The first call reports what is missing."""
    return Own(module)


def launch(programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], **options: int) -> Launch:
    """A launch of the kernel that TEXT chooses.

    Args:
        programs: size of the one-dimensional grid.
        arguments: tensors, then numbers, in the order of the kernel's signature.
        constants: every tl.constexpr, by name and in the order of the signature.
        options: num_warps, num_stages and Triton's other compile options; give ``launch_pdl`` only where it is on.
    """
    return Launch("", programs, arguments, constants, options)


def rounding(dtype: str, wanted: torch.Tensor) -> torch.Tensor:
    """What one rounding to a type may change: part of the error that a ``reference`` allows. ``wanted`` is float64."""
    facts = torch.finfo(getattr(torch, dtype))
    return wanted.abs() * (facts.eps / 2) + facts.smallest_normal * facts.eps


class _Known(NamedTuple):
    """A plan: how to launch calls like one that was served. It holds no tensors."""

    made: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]  # the result, then scratch tensors
    # Each launch has the sources of its pointers: i is argument i of the call, -1 the result, -2 and below scratch tensors.
    launches: tuple[tuple[DirectLaunch, tuple[int, ...]], ...]


# What no call can change. The hash of another object may be its identity, which says nothing of what it holds now.
FIXED = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
LEFT = "it was left to the family's eager"  # stored in place of a _Known if a row says that no kernel is faster
GRADIENT = "a gradient is needed, and the family has no gradient of its own"


def _needs_gradient(values: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _value(a: Any) -> Any:
    """What tells an argument that is no tensor from others; None if it may change."""
    kind = type(a)
    if kind is tuple:  # also for its parts: (1,) equals (True,)
        parts = tuple([_value(part) for part in a])
        return None if None in parts else parts
    if kind not in FIXED:
        return None
    return kind, str(a) if kind is float and not a else a  # 0.0 equals -0.0


class Own:
    """A family from outside as a function: it takes the arguments of the family's ``call``, and returns the call's ``out``.

    A kernel serves tensors on a GPU where the family's folder has one for them. It is chosen as in ``tuned.dispatch``:
    the row of this GPU, else the nearest row, else the default variant. ``eager`` serves all other calls: on a CPU,
    under torch.compile and torch.func, under autocast, with subclasses of tensors, and where a gradient is needed and
    the family has no ``gradient``.
    """

    def __init__(self, module: str) -> None:
        self.module: Any = sys.modules.get(module) or importlib.import_module(module)
        self.__name__ = self.__qualname__ = family_name(Path(str(self.module.__file__)))
        self.__module__ = module
        self._plans: dict[Any, Any] = {}  # ``_key`` of a call -> _Known or LEFT

    def __repr__(self) -> str:
        return f"<kernel family {self.__name__} of {self.module.__file__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return family, (self.__module__,)

    @functools.cached_property
    def family(self) -> Family:
        """The family.

        Raises:
            FamilyError: the module describes no family.
        """
        return described(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of a call.

        Raises:
            TypeError: no kernel can serve the call, and the family has no ``eager``.
        """
        if torch.compiler.is_compiling():
            return self._eager(args, kwargs, "torch.compile traces it")
        if kwargs:  # so that a tensor passed by name is found like any other
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        try:
            key = self._key(args, kwargs)
            known = None if key is None else self._plans.get(key)
        except (*NO_KEY, IndexError):  # the first argument is no tensor, or an argument has no hash
            key = known = None
        if known is LEFT:
            if listening() is None:  # otherwise go on below, which notes why no kernel serves
                return self._eager(args, kwargs, LEFT)
        elif known is not None and not (known.launches[0][0].enter.calls or known.launches[0][0].leave.calls):
            return _launched(known, args)
        differentiable = hasattr(self.module, "gradient") and not kwargs and _needs_gradient(args)
        if differentiable and self.why_not(args) is None:
            return _Differentiable.apply(self, *args)  # type: ignore[no-any-return, no-untyped-call]
        return self._served(args, kwargs, key)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.module.call)

    def why_not(self, values: Iterable[Any]) -> str | None:
        """Why no kernel may take the tensors among ``values``, or None."""
        reason = "a dispatch mode is active" if listeners() else bypassed()
        if reason is not None or torch.is_autocast_enabled("cuda"):
            return reason or "autocast is on"
        for t in (value for value in values if isinstance(value, torch.Tensor)):
            if (reason := why_eager(t, supported_dtype=True)) is not None:
                return reason
            if t.is_neg() or t.is_conj():
                return "a tensor is a lazy negation or conjugate"
            if not t.numel():
                return "a tensor is empty"
        return None

    def chosen(self, *args: Any, **kwargs: Any) -> tuple[Choice, Any, Any]:
        """(choice, spec, call): what serves a call, and why, without running it."""
        reason = self.why_not((*args, *kwargs.values()))
        spec, size, call = self.module.call(*args, **kwargs)
        if reason is None:  # tensors inside of a list or another argument are found in the call only
            made = vars(call).values()
            reason = GRADIENT if _needs_gradient(made) else self.why_not(made)
        if reason is None and not digests_of(self.family):
            reason = f"no kernel of {self.__name__} was rendered yet: {PROGRAM} --family {shlex.quote(str(self.module.__file__))} --render"
        if reason is not None:
            return Choice("eager", reason, None), spec, call
        return choose(self.family, spec, size, gpu_of(call.out.device)), spec, call

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All that the launch of a call depends on; None if the call needs all checks."""
        now = modes(args[0].get_device())
        if now is None or now[0]:
            return None
        needs = torch.is_grad_enabled()
        tensors = []
        for a in args:
            if isinstance(a, torch.Tensor):
                if (needs and a.requires_grad) or a.is_neg() or a.is_conj():
                    return None
                tensors.append(traits(a))
            elif (value := _value(a)) is None:
                return None
            else:
                tensors.append(value)
        for name, a in kwargs.items():
            if (value := _value(a)) is None:
                return None
            tensors.append((name, value))
        return (now[1], *tensors)

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> torch.Tensor:
        choice, spec, call = self.chosen(*args, **kwargs)
        if choice.variant is None:
            note_left(self.__name__, call.out, choice.why)
            if key is not None and choice.row is not None:  # a table's row says so; other reasons may change
                remember(self._plans, key, LEFT)
            return self._eager(args, kwargs, choice.why, (spec, call))
        steps = self.family.launches(spec, choice.variant, call)
        if (heard := listening()) is not None and hasattr(self.module, "eager"):
            for step in steps:
                if isinstance(step, Launch):
                    heard.note(self._kernel(step.kernel), step)
            return self._eager(args, kwargs, "its launches were noted", (spec, call))
        done = []
        with torch.cuda.device(call.out.device), listen(None):
            for step in steps:
                if isinstance(step, Launch):
                    done.append((step, launch_public(self._kernel(step.kernel), step)))
                else:
                    run_step(step)
            # Direct launches run on the current device, so keep a plan only if that is the call's device.
            here = key is not None and key[0] == call.out.get_device()
            if here and len(done) == len(steps) and not any(map(torch.is_tensor, kwargs.values())):
                self._learn(key, args, call, done)
        bump_versions(call.out)  # of a call in place, this is an argument or a view of an argument
        return call.out  # type: ignore[no-any-return]

    def _kernel(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.family.home}.kernels.{name}"), name)

    def _learn(self, key: Any, args: tuple[Any, ...], call: Any, done: list[tuple[Launch, Any]]) -> None:
        """Remember the launches of a call, if each pointer is exactly one argument, the result or scratch memory."""
        made = [call.out, *(getattr(call, name) for name in getattr(call, "SCRATCH", ()))]
        given = {i: a.data_ptr() for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        given |= {-1 - i: t.data_ptr() for i, t in enumerate(made)}
        of = {address: index for index, address in given.items()}
        if len(of) < len(given) or torch.cuda.is_current_stream_capturing():
            return  # in place, or two arguments share an address, which another call of the same key need not do
        known = []
        for launch, compiled in done:
            tensors = [isinstance(value, torch.Tensor) for value in launch.arguments]
            where = tuple(of.get(value.data_ptr()) for value in launch.arguments if isinstance(value, torch.Tensor))
            direct = direct_launch(launch, compiled, call.out.get_device())
            if None in where or tensors != sorted(tensors, reverse=True) or direct is None:
                return
            known.append((direct, where))
        remember(self._plans, key, _Known(tuple((t.shape, t.stride(), t.dtype) for t in made), tuple(known)))  # type: ignore[arg-type]

    def _eager(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str, made: tuple[Any, Any] | None = None
    ) -> torch.Tensor:
        if not hasattr(self.module, "eager"):
            raise TypeError(f"no kernel of {self.__name__} can serve this call, {why}, and the family has no eager")
        if made is None:
            spec, _, call = self.module.call(*args, **kwargs)
            made = spec, call
        return self.module.eager(*made)()  # type: ignore[no-any-return]


def _launched(known: _Known, args: tuple[Any, ...]) -> torch.Tensor:
    """Launch a plan on the current stream, into new memory."""
    device = args[0].device
    made = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in known.made]
    for launch, where in known.launches:
        pointers = [args[i].data_ptr() if i >= 0 else made[-1 - i].data_ptr() for i in where]
        stream = launch.stream_of(device.index)
        launch.run(launch.programs, 1, 1, stream, launch.function, *launch.head, *pointers, *launch.rest)
    return made[0]


class _Differentiable(torch.autograd.Function):
    """A call whose gradient the family computes."""

    @staticmethod
    def forward(ctx: Any, own: Own, *args: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.own = own
        ctx.saves = [isinstance(a, torch.Tensor) for a in args]  # flags, since None may be an argument too
        ctx.others = [None if saves else a for a, saves in zip(args, ctx.saves, strict=True)]
        ctx.save_for_backward(*(a for a, saves in zip(args, ctx.saves, strict=True) if saves))
        return own(*args)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if saves else other for saves, other in zip(ctx.saves, ctx.others, strict=True)]
        return None, *ctx.own.module.gradient(gradient, *args)
