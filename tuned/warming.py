"""Compile ahead the kernels that calls will launch, so that no first call stalls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tuned.families.launch import Launch
from tuned.launching.launcher import kernel, probe_launch, will_probe
from tuned.launching.rehearsal import Heard, listen
from tuned.lookup.gpu import gpu_of, has_triton, why_not_plain
from tuned.lookup.misses import problem_of, recorded
from tuned.lookup.place import expanded


@dataclasses.dataclass(frozen=True)
class Warmed:
    """What ``tuned.warm`` did; ``str()`` gives it as text. A kernel is listed once for each of its specialisations."""

    compiled: tuple[str, ...] = ()  # kernels that Triton's cache lacked
    found: tuple[str, ...] = ()  # kernels that were in Triton's cache
    ready: tuple[str, ...] = ()  # kernels that this process had compiled before
    left: tuple[str, ...] = ()  # calls that PyTorch's operators serve, with the reason
    undone: tuple[str, ...] = ()  # what could not be warmed, with the reason
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line for what was compiled, then one for each call that needs no kernel, then one for each thing not done."""
        counts = f"{len(self.compiled)} kernels compiled, {len(self.found)} found in Triton's cache"
        ready = f", {len(self.ready)} compiled before" if self.ready else ""
        lines = [f"{counts}{ready}, in {self.seconds:.2f} s"]
        lines += [f"PyTorch's own serves {call}" for call in self.left]
        return "\n".join([*lines, *(f"not done: {what}" for what in self.undone)])


def warm(model: Any = None, /, *example_inputs: Any, processes: int | None = None, **example_kwargs: Any) -> Warmed:
    """Compile the kernels that later calls will launch, side by side, so that no first call waits for a compiler.

    ``tuned.warm(model, *example_inputs)`` runs the model twice under torch.no_grad. In the first run PyTorch's
    operators serve our calls, and the launches that our kernels would need are noted. Their kernels are compiled into
    Triton's cache and this process. The second run launches them, so that later calls find their plans; it is left out
    if nothing was noted. Call ``warm`` under the modes of the real call: autocast, ``tuned.nn.patched()``,
    torch.inference_mode. The kernels of gradients are compiled too if gradients are enabled and the module is in
    training, or an input of a function requires one.

    Afterwards the model's buffers, training mode and gradients, the tensors among the inputs and the random generators
    are as before. State that a model keeps in other objects, such as lists, caches or attributes, is not restored, nor
    are sparse and nested tensors.
    Parameters are not copied: a model that overwrites one is refused afterwards, except that a write through ``.data``
    is neither noticed nor undone. The runs need the memory that PyTorch's operators need in place of ours, and a copy of
    the buffers and inputs.

    ``tuned.warm(problems)`` compiles for the current GPU the kernels that recorded problems launch with contiguous
    tensors, and runs nothing. Give a path to a file that TUNED_RECORD named, or the parsed lines of one.
    ``tuned.warm()`` takes the file that TUNED_RECORD names now. That file has only calls without a row: warm the others
    by passing a model.

    Args:
        model: a module or any other function; or problems.
        example_inputs: arguments of the call; their sizes matter as far as they decide which kernel serves.
        processes: how many processes compile beside this one at most; by default one for each other core, 32 at most. 0: none.
        example_kwargs: keyword arguments of the call.

    Returns:
        The kernels that were compiled and those found in Triton's cache; the calls that PyTorch's operators serve, and
        why. For tensors on a CPU nothing is compiled, and CUDA is not initialised.

    Raises:
        TypeError, ValueError: an argument is not allowed.
        RuntimeError: a CUDA graph is being captured; or the model overwrote one of its parameters.
        Exception: any exception that the model raises.
    """
    if processes is not None and (type(processes) is not int or processes < 0):
        raise ValueError(f"processes must be an int of at least 0, or None for one a core, got {processes!r}")
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise TypeError(
            f"model must be a module or function, got the class {model.__qualname__}: make one, and pass that"
        )
    started = time.perf_counter()
    if callable(model):
        done = _of_model(model, example_inputs, example_kwargs, processes)
    elif example_inputs or example_kwargs:
        raise TypeError(
            f"example inputs are for a model or function that can be called, got {type(model).__name__}: "
            "give problems alone, as tuned.warm(problems)"
        )
    else:
        done = _of_problems(model, processes)
    return dataclasses.replace(done, seconds=time.perf_counter() - started)


def _of_model(model: Callable[..., Any], inputs: Any, kwargs: Any, processes: int | None) -> Warmed:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuned.warm cannot compile while a CUDA graph is captured: call it before the capture")
    function = model.func if isinstance(model, functools.partial) else model
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    module = owner if isinstance(owner, torch.nn.Module) else None
    leaves = pytree.tree_leaves((inputs, kwargs))
    # A frozen module of torch.jit has no ``training``.
    learns = (
        getattr(module, "training", False)
        if module is not None
        else any(getattr(t, "requires_grad", False) for t in leaves)
    )
    heard = Heard(gradients=torch.is_grad_enabled() and learns)
    with torch.no_grad(), _kept(module, leaves) as give_back:
        with listen(heard):
            model(*inputs, **kwargs)
        give_back()
        done = _compiled(heard, processes)
        if heard.launches:
            model(*inputs, **kwargs)
    return done


def _compiled(heard: Heard, processes: int | None) -> Warmed:
    left = tuple(call if count == 1 else f"{count} calls: {call}" for call, count in heard.left.items())
    if not heard.launches:
        return Warmed(left=left)
    from tuned.launching.ahead import compile_ahead  # noqa: PLC0415 - only GPUs need it

    for device in sorted({one.device for one in heard.launches}):
        if will_probe(device):  # the first call with a plan tries the direct launcher
            probe = probe_launch("meta")
            heard.note(kernel(probe.kernel), probe, device)
    return Warmed(*compile_ahead(heard.launches, processes), left=left)


def _of_problems(problems: Any, processes: int | None) -> Warmed:
    found = list(_read(problems))
    if not found:
        return Warmed()
    why = "torch sees no GPU" if not torch.cuda.is_available() else "" if has_triton() else "Triton is not installed"
    if why:
        return Warmed(undone=(f"{len(found)} problems: {why}, and kernels are compiled for the GPU that runs them",))
    device = torch.cuda.current_device()
    heard, gpu = Heard(), gpu_of(torch.device("cuda", device))
    for family, spec, size in found:
        choice, steps = importlib.import_module(f"tuned.calls.{family}.ahead").steps(spec, size, gpu)
        if choice.variant is None:
            heard.left[f"{family} of {spec} with {size}: {choice.why}"] += 1
        for step in steps:
            if isinstance(step, Launch):
                heard.note(kernel(step.kernel), step, device)
    return _compiled(heard, processes)


def _read(problems: Any) -> Iterator[tuple[str, Any, Any]]:
    """(family, spec, size) of each problem.

    Raises:
        TypeError: problems are no path and no list.
        ValueError: there are no problems to read, or one is malformed.
    """
    if problems is None:
        name = os.environ.get("TUNED_RECORD")
        if not name:
            raise ValueError(
                "tuned.warm() takes the file that the environment variable TUNED_RECORD names, which is not set: set it, or "
                "give a model with example inputs, a path or a list of problems"
            )
        if not expanded(name).exists():  # the file is written when a call without a row is made
            return
        problems = name
    if isinstance(problems, str | os.PathLike):
        path = expanded(problems)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): a model run with TUNED_RECORD={path} writes it"
            ) from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield recorded(line, f"{path.name} line {number}")
        return
    if isinstance(problems, Mapping):
        raise TypeError("problems must be a list, got one problem: put it in a list, as tuned.warm([problem])")
    if not isinstance(problems, Iterable):
        raise TypeError(
            f"give a model or function, a path, or a list of problems, got {type(problems).__name__} {problems!r}"
        )
    for number, one in enumerate(problems):
        # Either a parsed line, or a Problem, whose fields are checked in the same way.
        values = one
        if all(hasattr(one, name) for name in ("family", "spec", "size")):
            values = {
                "family": one.family,
                **{name: dataclasses.asdict(getattr(one, name)) for name in ("spec", "size")},
            }
        yield problem_of(values, f"problems[{number}]")


@contextlib.contextmanager
def _kept(model: torch.nn.Module | None, inputs: list[Any]) -> Iterator[Callable[[], None]]:
    """Give a function that restores what runs of the model changed; it is called at the end too.

    Raises:
        ValueError: the model has lazy parameters, which are not made yet.
        RuntimeError: at the end, if a parameter was overwritten.
    """
    modules = [] if model is None else list(model.modules())
    parameters = {} if model is None else dict(model.named_parameters())
    buffers = [] if model is None else list(model.buffers())
    if any(torch.nn.parameter.is_lazy(t) for t in (*parameters.values(), *buffers)):
        raise ValueError("the model has lazy parameters, which its first call makes: call it once before tuned.warm")
    versions = {name: p._version for name, p in parameters.items() if not p.is_inference()}  # noqa: SLF001
    held: Any = [h for m in modules for h in (m._parameters, m._buffers) if isinstance(h, dict)]  # noqa: SLF001 - not of a scripted module
    holders: list[tuple[Any, Any]] = [(h, dict(h)) for h in held]
    settings = [(m, m.training) for m in modules if hasattr(m, "training")]  # a frozen module of torch.jit has none
    gradients = [(p, p.grad) for p in parameters.values()]
    written = [t for t in (*buffers, *inputs, *(gradient for _, gradient in gradients)) if _has_memory(t)]
    places = [(t, t.detach()) for t in written]  # ``t.data = ...`` and ``t.unsqueeze_()`` leave the alias as it is
    memory = _memory(written)
    generators = _generators()

    def give_back() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for holder, before in holders:
            if len(holder) != len(before) or any(holder.get(name) is not t for name, t in before.items()):
                holder.clear()
                holder.update(before)
        for module, training in settings:
            module.training = training
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for t, alias in places:
            if _place(t) != _place(alias):
                t.data = alias
        for now, copy in memory:
            # Compared first: memory that cannot be written, such as a mapped file, has not changed, and is not copied to.
            if not torch.equal(now, copy):
                now.copy_(copy)
        for put, state in generators:
            put(state)

    try:
        yield give_back
    finally:
        give_back()
    if changed := [name for name, version in versions.items() if parameters[name]._version != version]:  # noqa: SLF001
        raise RuntimeError(
            f"a model must not overwrite its parameters while it is warmed, since they are not copied, and it overwrote "
            f"{', '.join(changed)}: warm a copy, as tuned.warm(copy.deepcopy(model), ...)"
        )


def _has_memory(t: Any) -> bool:
    """Whether a value is a tensor whose elements lie in memory that can be read and written."""
    strided = isinstance(t, torch.Tensor) and why_not_plain(t) is None and t.layout is torch.strided
    return strided and not t.is_meta and not t.is_nested


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.device, t.dtype, t.shape, t.stride()


def _memory(tensors: Iterable[torch.Tensor]) -> list[tuple[Any, Any]]:
    """(bytes, copy) for each tensor: its memory from the first element to the last; equal memory is listed once."""
    found = {}
    for t in tensors:
        if t.numel() and (at := t.data_ptr()):
            size = t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)))
            if (at, size) not in found:
                place = t.storage_offset() * t.element_size()
                now = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), place, (size,), (1,))
                found[at, size] = now, now.clone()
    return list(found.values())


def _generators() -> list[tuple[Callable[[Any], Any], Any]]:
    """(setter, state) of each random generator that a model may draw from."""
    found: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        found.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found
