"""Hugging Face transformers on tuned's RoPE kernels: for a loaded model, or as a layer for the kernels package.

For a model, for a block, or for everything in a process::

    patch = use_tuned_rope(model)        # the model's own apply_rotary_pos_emb becomes tuned.dispatch.rope_qk
    ...
    patch.undo()
    with use_tuned_rope(model):          # the same for a block
        model.generate(...)

    register_kernel_layer()              # or, where transformers runs with the kernels package: the layer "rotary_pos_emb"
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cuda")

It replaces ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`` in the modeling files
(transformers/models/*/modeling_*.py), where attention looks it up at each call. A call on a few random numbers shows
how each function rotates (``tuned.compat.rotary_style``); a function that does something else is left alone.

Some attention computes an RMSNorm of queries and keys before it rotates them (Qwen 3, Gemma 3, OLMo 2, ...). It does
both with ``tuned.dispatch.qk_norm_rope``, in one launch: its class gets a ``forward`` that is derived from the original
(``tuned.compat.attention``). Calls of the norms show what they compute (``tuned.compat.norm_style``).

The arithmetic is float32 with one rounding to q's dtype; a low-precision model itself rounds every product.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tuned.compat.fusing import FusedForward, Norms, forward_of, norms_of, rotating_forwards
from tuned.compat.rotary_style import Found, Style, find, rotate

_lock = threading.Lock()
_replaced: dict[tuple[int, str], _Replaced] = {}  # by identity of the namespace, and name
_fused: dict[type, FusedForward] = {}  # by the class that defines the forward


def use_tuned_rope(model: torch.nn.Module) -> RopePatch:
    """Make a loaded model rotate q and k with ``tuned.dispatch.rope_qk``: in one launch, out of place.

    It patches the modeling files, so it serves all models of these files in the process, until every patch is undone;
    compiled models are served after a recompilation. Calls with shapes that the kernels do not take (cos without a
    batch axis, q and k of different lengths) go to the model's own function.

    The norms of this model's queries and keys are computed in the same launch if they are RMSNorms of heads, or of all
    heads together, and the text of the attention's forward shows that only the rotation reads their results. The norm
    modules are then not called; their weights and eps are looked up at each call. A norm that has a hook, or that is no
    longer the module that was found, is called. Norms of other models of the same files are called too.

    Args:
        model: any module with attention from transformers inside; on any device, in any mode.

    Returns:
        The patch: ``undo()``, or leaving a ``with`` block, undoes it. ``functions`` are the full names of the replaced
        functions; ``kept`` maps the others to the reason. ``fused`` are the names, in the model, of the attention
        modules whose norms are computed with the rotation; ``unfused`` maps others that have norms to the reason.

    Raises:
        TypeError: model is not a torch.nn.Module.
        ValueError: no attention of this model can be served; the message names the model's class and the reason.
            Nothing changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    with _lock:
        found: dict[tuple[int, str], _Replaced] = {}
        kept: dict[str, str] = {}
        for kind in {type(module) for module in model.modules()}:
            tried = [_tried(model, *call) for call in _rotary_calls(kind)]
            reasons = {one.where: one.ours for one in tried if isinstance(one.ours, str)}
            kept |= reasons
            if not reasons:  # attention that calls two functions needs both
                found |= {(id(one.namespace), one.name): one for one in tried}
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in sorted(kept.items()))
            raise ValueError(
                f"{type(model).__name__} must have attention whose apply_rotary_pos_emb is a rotation that tuned knows, "
                f"got {why or 'no module that calls such a function'}; call tuned.dispatch.rope_qk in its code instead"
            )
        norms, unfused = _norms_to_fuse(model, found)
        for key, one in found.items():
            one.users += 1
            _replaced[key] = one
            one.namespace[one.name] = one.ours
        for forward, modules in norms.items():
            forward.install({module: one for module, (_, one) in modules.items()})
            _fused[forward.owner] = forward
    names = sorted(name for modules in norms.values() for name, _ in modules.values())
    return RopePatch(tuple(found.values()), kept, tuple(norms), tuple(names), unfused)


def kernel_mapping(*device_types: str) -> dict[str, dict[str, Any]]:
    """``RotaryPosEmb`` as ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping`` take it.

    Args:
        device_types: the device types that it serves, as the kernels package names them; "cuda" if none is given.
    """
    return {"rotary_pos_emb": dict.fromkeys(device_types or ("cuda",), _Repository())}


def register_kernel_layer(*device_types: str) -> None:
    """Make ``kernels.kernelize`` put ``RotaryPosEmb`` in place of "rotary_pos_emb", in training and inference.

    It calls kernels.register_kernel_mapping. ``model.set_use_kernels(True)`` of transformers registers its own mapping
    over this one, so call ``kernels.kernelize`` instead.

    Args:
        device_types: as for ``kernel_mapping``.

    Raises:
        ImportError: the kernels package is not installed.
    """
    try:
        from kernels import register_kernel_mapping  # noqa: PLC0415 - not a dependency
    except ImportError as error:
        raise ImportError(
            "register_kernel_layer needs the kernels package: pip install kernels; use_tuned_rope(model) does without"
        ) from error
    register_kernel_mapping(kernel_mapping(*device_types))


def _rotary_calls(kind: type) -> Iterator[tuple[dict[str, Any], str]]:
    """(namespace, name) of each function that the methods of a class look up to apply rotary embeddings."""
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        for method in vars(base).values():
            function = inspect.unwrap(method) if inspect.isfunction(method) else None
            if inspect.isfunction(function):
                yield from ((function.__globals__, name) for name in _rotary_names(function))


def _rotary_names(function: Any) -> list[str]:
    return [
        name
        for name in function.__code__.co_names
        if name.startswith("apply_") and "rotary" in name and callable(function.__globals__.get(name))
    ]


def _tried(model: torch.nn.Module, namespace: dict[str, Any], name: str) -> _Replaced:
    """The existing replacement of a function, or a new one that is not installed yet."""
    known = _replaced.get((id(namespace), name))
    return known or _Replaced(namespace, name, namespace[name], find(model, namespace, name))


_Fusable = dict[FusedForward, dict[torch.nn.Module, tuple[str, Norms]]]


def _norms_to_fuse(model: torch.nn.Module, found: dict[tuple[int, str], _Replaced]) -> tuple[_Fusable, dict[str, str]]:
    """(forward -> attention modules whose norms can be fused with their rotation, name of any other -> the reason)."""
    fusable: _Fusable = {}
    unfused: dict[str, str] = {}
    forwards: dict[type, FusedForward | str] = dict(_fused)
    for name, module in model.named_modules():
        at = rotating_forwards(type(module), _rotary_names)
        if at is None or not any("norm" in child for child in module._modules):  # noqa: SLF001
            continue
        owner, rotary = at
        rotation = found.get((id(inspect.unwrap(vars(owner)["forward"]).__globals__), rotary))
        if rotation is None or isinstance(rotation.found, str):
            continue  # patch.kept has the reason
        if owner not in forwards:
            forwards[owner] = forward_of(owner, rotary, rotation.found)
        forward = forwards[owner]
        norms = forward if isinstance(forward, str) else norms_of(module, forward)
        if isinstance(forward, FusedForward) and isinstance(norms, Norms):
            fusable.setdefault(forward, {})[module] = name, norms
        else:
            unfused[name] = str(norms)
    return fusable, unfused


@dataclass
class _Replaced:
    """A function of a modeling file and its replacement."""

    namespace: dict[str, Any]  # the file's globals
    name: str
    original: Any
    found: Found | str  # how the original rotates, with the replacement, or why it has none
    users: int = 0  # patches that are not undone yet

    @property
    def ours(self) -> Callable[..., Any] | str:
        return self.found if isinstance(self.found, str) else self.found.ours

    @property
    def where(self) -> str:
        return f"{self.namespace['__name__']}.{self.name}"


class RopePatch(contextlib.AbstractContextManager["RopePatch"]):
    """What ``use_tuned_rope`` replaced, and how to undo it."""

    def __init__(
        self,
        replaced: tuple[_Replaced, ...],
        kept: dict[str, str],
        forwards: tuple[FusedForward, ...],
        fused: tuple[str, ...],
        unfused: dict[str, str],
    ) -> None:
        self.functions = tuple(sorted(one.where for one in replaced))  # full names
        self.kept = dict(sorted(kept.items()))  # full name of each function that was left as it is -> the reason
        self.fused = fused  # names, in the model, of the attention modules whose norms are computed with the rotation
        self.unfused = unfused  # name of each attention module whose norms are still called -> the reason
        self._replaced, self._forwards = replaced, forwards

    def undo(self) -> None:
        """Put the model's own functions back, unless another patch still needs ours. A second call does nothing.

        Raises:
            RuntimeError: something else has replaced a function since; nothing changed.
        """
        with _lock:
            now = [(one.where, one.namespace[one.name], one.ours) for one in self._replaced]
            now += [(one.where, one.current, one.ours) for one in self._forwards]
            for where, current, ours in now:
                if current is not ours:
                    raise RuntimeError(
                        f"{where} must still be what use_tuned_rope put there, got {current!r}; "
                        "undo patches in the reverse order of making them"
                    )
            for one in self._replaced:
                one.users -= 1
                if one.users == 0:
                    one.namespace[one.name] = one.original
                    del _replaced[id(one.namespace), one.name]
            for forward in self._forwards:
                if forward.uninstall():
                    del _fused[forward.owner]
            self._replaced, self._forwards = (), ()

    def __exit__(self, *exception: object) -> None:
        self.undo()


class RotaryPosEmb(torch.nn.Module):
    """The layer "rotary_pos_emb" of transformers, for the kernels package.

    It rotates the halves of q and k by cos and sin as wide as the head, as all layers of that name in transformers do
    except three. For those three use ``use_tuned_rope``: calls from gpt-oss and the privacy filter, whose cos is half
    as wide, are refused; nanochat rotates by the negative angle, which a layer without state cannot know. The class has
    no method but forward, as kernels.kernelize requires.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated q and k, out of place.

        Args:
            q: queries ``[b, h, s, d]``, or ``[b, s, h, d]`` with unsqueeze_dim 2; any strides.
            k: keys, like q but for the number of heads.
            cos: cosines ``[b or 1, s, d]``.
            sin: sines, like cos.
            unsqueeze_dim: the axis of heads, 1 or 2.

        Raises:
            ValueError: the shapes differ from those above.
        """
        out = rotate(Style(interleaved=False, entries="feature"), q, k, (cos, sin), unsqueeze_dim)
        if out is None:
            raise ValueError(
                "q and k must be [b, h, s, d] and cos and sin [b or 1, s, d], got "
                f"{[tuple(t.shape) for t in (q, k, cos, sin)]} with unsqueeze_dim {unsqueeze_dim}; "
                "use_tuned_rope(model) serves the functions of other models"
            )
        return out  # type: ignore[return-value]


class _Repository:
    """A layer repository for the kernels package, which calls its ``load``."""

    def load(self) -> type[torch.nn.Module]:
        return RotaryPosEmb

    def __str__(self) -> str:
        return f"`{RotaryPosEmb.__module__}.{RotaryPosEmb.__name__}`"
