"""Tell which kernel a call gets, from which row, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch

from tuned import dispatch, nn
from tuned.calls.recurrent import serve
from tuned.calls.refusal import no_tensor
from tuned.compat.transformer_engine import apply_rotary_pos_emb, heads_first, radians
from tuned.families.registry import FAMILIES
from tuned.launching.uncompiled import said_of
from tuned.lookup.asked import asking, gpu_named
from tuned.lookup.lookup import Choice
from tuned.lookup.table import Table, tables, tables_of
from tuned.own import Own

# The functions themselves, not their names in dispatch: if a user wraps one there, the original still works here.
ROPE = tuple(function for name, function in dispatch.DEFINED.items() if "rope" in name)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call, and why; ``str()`` gives it as text."""

    rule: str  # "winner", "nearest size", "closest spec", "similar GPU", "portfolio", "model", "default" or "eager"
    why: str
    kernels: tuple[str, ...]  # modules of tuned.kernels, in order; none for eager
    variant: Any
    median_us: float | None  # of the chosen row, as measured; not of this call
    gpu: str | None = None  # the GPU that was asked about; None: the GPU of the tensors
    hint: str | None = (
        None  # on a machine without a GPU, how to see a kernel chosen; or that a chosen kernel did not compile
    )

    def __str__(self) -> str:
        """Rule, reason, kernels and numbers, one line each; then the hint."""
        where = f"on {self.gpu}, " if self.gpu else ""
        lines = [f"{where}{self.rule}: {self.why}"]
        if self.kernels:
            lines += [f"kernels: {', '.join(self.kernels)}", f"variant: {self.variant}"]
        if self.median_us is not None:
            lines.append(f"that row was measured at {self.median_us:g} us")
        if self.hint is not None:
            lines.append(self.hint)
        return "\n".join(lines)


def explain(function: Any, *args: Any, gpu: str | None = None, **kwargs: Any) -> Explanation:
    """Which kernel ``function(*args, **kwargs)`` gets, without running it.

    With ``gpu``, it tells which kernel the call would get on a machine with that GPU, by the tables and models at
    hand. The tensors may then be on a CPU or on "meta", and no GPU is needed::

        print(tuned.explain(rope, x, freqs, gpu="nvidia_h200"))

    Args:
        function: rope, rope_qk, rope_qkv, rope_backward, qk_norm_rope, ``qkv_norm_rope_``, mla_kv_rope, ``rope_append_``,
            gru_cell, gru or linear_cat of tuned.dispatch; TransformerEngine's apply_rotary_pos_emb of tuned.compat; a family of
            your own (tuned.own); or a GRU or GRUCell module, of tuned.nn or of torch.nn.
        args: its arguments.
        gpu: the name of a GPU that has a table; the files in tuned/tables and the records in TUNED_TABLES have these
            names. None is the GPU of the tensors.
        kwargs: its keyword arguments.

    Raises:
        TypeError: ``function`` is none of these, or the call itself would raise a TypeError.
        ValueError: no table is of this GPU, or the call itself would raise a ValueError.
    """
    if gpu is None:
        found = _explained(function, *args, **kwargs)
        if found.kernels:
            return dataclasses.replace(found, hint=_of_the_compiler(found.kernels))
        if _there_is_a_gpu():
            return found
        return dataclasses.replace(found, hint=_hint(function, *args, **kwargs))
    with asking(gpu_named(gpu, _known_gpus(function))):
        return dataclasses.replace(_explained(function, *args, **kwargs), gpu=gpu)


def _of_the_compiler(kernels: tuple[str, ...]) -> str | None:
    """A sentence if one of these kernels did not compile for some call of this process, or None."""
    said = said_of(kernels)
    return (
        None
        if said is None
        else f"in this process {said.replace('this call', 'a call', 1)}: PyTorch's own operators serve that call"
    )


def _there_is_a_gpu() -> bool:
    """Whether torch is built for a GPU and a GPU driver is installed. Asking torch for more would initialise CUDA."""
    drivers = ("/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows Subsystem for Linux
    return any(map(os.path.exists, drivers)) and (torch.version.cuda or torch.version.hip) is not None


def _known_gpus(function: Any) -> dict[str, Table]:
    """The tables whose GPUs can be asked about, with the tables of a family from outside if ``function`` is one."""
    return {**tables(), **(tables_of(function.family) if isinstance(function, Own) else {})}


def _hint(function: Any, *args: Any, **kwargs: Any) -> str | None:
    """On a machine without a GPU, how to see a kernel chosen; None if no GPU would get a kernel either."""
    known = _known_gpus(function)
    for name in sorted(known):
        with contextlib.suppress(ValueError), asking(gpu_named(name, known)):
            if _explained(function, *args, **kwargs).kernels:
                return f'there is no GPU here: tuned.explain(..., gpu="{name}") tells which kernel this call gets on that one'
    return None


def _explained(function: Any, *args: Any, **kwargs: Any) -> Explanation:
    if isinstance(function, (nn.GRU, nn.GRUCell, torch.nn.GRU, torch.nn.GRUCell)):
        return _of_module(function, *args, **kwargs)
    if any(function is dispatch.DEFINED[name] for name in ("gru", "gru_cell", "linear_cat")):
        inspect.signature(function).bind(*args, **kwargs)  # its error names the arguments of this function
    if function is dispatch.DEFINED["gru"]:
        return _explanation(*serve.explain_gru(*args, **kwargs))
    if isinstance(function, Own):
        choice, spec, _ = function.chosen(*args, **kwargs)
        return _explanation(
            choice, () if choice.variant is None else function.family.kernel_names(spec, choice.variant)
        )
    for known, family, chosen in _KNOWN:
        if function is known:
            choice, spec = chosen(*args, **kwargs)
            kernels = () if choice.variant is None else FAMILIES[family].kernel_names(spec, choice.variant)
            return _explanation(choice, kernels)
    names = "rope, rope_qk, rope_qkv, rope_backward, qk_norm_rope, qkv_norm_rope_, mla_kv_rope, rope_append_, apply_rotary_pos_emb, gru_cell, gru, linear_cat, families of tuned.own and modules GRU and GRUCell"
    called = isinstance(function, (torch.Tensor, tuple))
    got = f"what a call returned, a {type(function).__name__}" if called else repr(function)
    way = "as tuned.explain(rope, x, freqs)" if called else "or a module of a model that calls them"
    raise TypeError(f"explain knows {names}, got {got}: give one of these and then its arguments, {way}")


def _of_transformer_engine(*args: Any, **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of TransformerEngine's ``apply_rotary_pos_emb``, and its spec."""
    bound = inspect.signature(apply_rotary_pos_emb).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    del given["fused"]
    starts, freqs = given.pop("start_positions"), given.pop("freqs")
    if not isinstance(freqs, torch.Tensor):
        raise no_tensor(freqs=freqs)
    if given["tensor_format"] == "bhsd":
        raise heads_first()
    if given["tensor_format"] != "thd":
        given["cu_seqlens"] = None
    offset = 0 if starts is None else starts
    return dispatch.explain_rope(
        dispatch.rope, given.pop("t"), radians(freqs), offset=offset, angle_entries="feature", **given
    )


# (function, its family, a function that gives the choice for a call, and the call's spec).
_KNOWN: tuple[tuple[Any, str, Any], ...] = (
    *((function, "rope", functools.partial(dispatch.explain_rope, function)) for function in ROPE),
    (apply_rotary_pos_emb, "rope", _of_transformer_engine),
    (dispatch.DEFINED["gru_cell"], "gru_cell", serve.explain_gru_cell),
    (dispatch.DEFINED["linear_cat"], "linear_cat", serve.explain_linear_cat),
)


def _explanation(choice: Choice, kernels: tuple[str, ...]) -> Explanation:
    return Explanation(choice.rule, choice.why, kernels, choice.variant, choice.row.median_us if choice.row else None)


def _of_module(module: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What serves the call of a module: whatever serves the function that the module calls."""
    if nn.has_own_forward(module):
        this = "this " if "forward" in vars(module) else ""  # others of its class may have none
        why = (
            f"{this}{type(module).__qualname__} has a forward of its own, which may do anything: what that passes on to tuned.nn's is told of "
            "the module of tuned.nn itself, or of tuned.dispatch's function"
        )
        return _explanation(Choice("eager", why, None), ())
    if not nn.runs_ours(module) and not nn.is_patched():
        why = "torch.nn's module calls PyTorch's own: use tuned.nn.patched(), tuned.nn.replace() or the module of tuned.nn"
        return _explanation(Choice("eager", why, None), ())
    called = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    own = {name: called[name] for name in ("input", "hx") if name in called}
    with _still(module):
        if isinstance(module, (nn.GRU, torch.nn.GRU)):
            given, named, _ = nn.gru_arguments(module, **own, resets=called.get("resets"))
            return _explained(dispatch.DEFINED["gru"], *given, **named)
        given, batched = nn.cell_arguments(module, **own)
        return _explained(dispatch.DEFINED["gru_cell"], *given, resets=nn.cell_marks(called.get("resets"), batched))


@contextlib.contextmanager
def _still(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the parametrizations of a module keep their state; spectral norm would change its own in training mode."""
    parts = getattr(module, "parametrizations", torch.nn.ModuleDict()).modules()
    training = [part for part in parts if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
