"""Put the norms of an attention's queries and keys into the launch of their rotation, and take them out again.

A class's ``forward`` is replaced by the one that ``tuned.compat.attention`` derives. It fuses only for modules that are
marked here, and only while their norms are as they were found. Weights are looked up at each call, and a norm with a
hook is called.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tuned.compat import norm_style
from tuned.compat.attention import Derived, derive
from tuned.compat.norm_style import NormStyle
from tuned.compat.rotary_style import Found, Norm, Style, rotate

MARK = "_tuned_norms"  # attribute of an attention module; a copy of the module has it too


@dataclass(frozen=True)
class Norms:
    """The norms of an attention module."""

    names: tuple[str, str]  # attributes of the module: the query's norm, the key's norm
    q: NormStyle
    k: NormStyle

    def __deepcopy__(self, memo: dict[int, Any]) -> Norms:
        """A copy of the module is fused too."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A pickled module holds nothing of ours, and can be read where tuned is not installed."""
        return type(None), ()


@dataclass(eq=False)
class FusedForward:
    """A class's forward, and the derived one that computes norms and rotation together."""

    owner: type  # the class that defines the forward
    original: Any
    ours: Any
    derived: Derived
    users: int = 0  # patches that are not undone yet
    marked: list[weakref.ref[torch.nn.Module]] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The full name of the forward."""
        return f"{self.owner.__module__}.{self.owner.__qualname__}.forward"

    @property
    def current(self) -> Any:
        """The forward that the class has now."""
        return vars(self.owner).get("forward")

    def install(self, modules: dict[torch.nn.Module, Norms]) -> None:
        """Put our forward into the class and mark some modules to be fused, for one more patch."""
        self.users += 1
        self.owner.forward = self.ours  # type: ignore[attr-defined]
        for module, norms in modules.items():
            setattr(module, MARK, norms)
            self.marked.append(weakref.ref(module))

    def uninstall(self) -> bool:
        """Undo one patch; with the last one, restore the original. Returns whether it was the last."""
        self.users -= 1
        if self.users:
            return False
        self.owner.forward = self.original  # type: ignore[attr-defined]
        for module in (one() for one in self.marked):
            if module is not None:
                vars(module).pop(MARK, None)
        self.marked.clear()
        return True


def forward_of(owner: type, rotary: str, found: Found) -> FusedForward | str:
    """The derived forward of a class, not installed yet, or why there is none.

    Args:
        owner: a class with a forward that calls the rotation.
        rotary: the rotation's name in that forward.
        found: what the rotation does.
    """
    original = vars(owner)["forward"]
    derived = derive(original, rotary)
    if isinstance(derived, str):
        return derived
    if found.takes[:4] not in (("q", "k", "cos", "sin"), ("q", "k=None", "cos=None", "sin=None")):
        return "its rotation takes one tensor"
    ours = derived.make(_ready(derived, found), _fused(found, by_position="position_ids=None" in found.takes))
    return FusedForward(owner, original, ours, derived)


def norms_of(module: torch.nn.Module, fused: FusedForward) -> Norms | str:
    """The norms of an attention module, or why they cannot be computed with the rotation."""
    if "forward" in vars(module):
        return "its own forward was replaced"
    names = (fused.derived.q_norm, fused.derived.k_norm)
    styles: list[NormStyle] = []
    for name in names:
        style = _style_in(module, name, turned=fused.derived.turned)
        if isinstance(style, str):
            return f"what it rotates is what {name} gives, and {style}"
        styles.append(style)
    if not styles[0].alike(styles[1]):
        return f"{names[0]} and {names[1]} compute different norms"
    return Norms(names, *styles)


def _style_in(module: torch.nn.Module, name: str, *, turned: bool) -> NormStyle | str:
    norm, head_dim = getattr(module, name, None), getattr(module, "head_dim", None)
    if not isinstance(norm, torch.nn.Module):
        return "it is no module here"
    style = norm_style.style_of(norm)
    if isinstance(style, str):
        return style
    if type(head_dim) is not int or style.size % head_dim:
        return f"it has {style.size} weights, which are not those of heads of {head_dim}"
    if style.size != head_dim and not turned:
        return "it is of all heads, and it cannot be seen where these go"
    return style


def rotating_forwards(kind: type, rotary_names: Callable[[Any], list[str]]) -> tuple[type, str] | None:
    """(class that defines the forward of a kind of module, the rotation that it calls); None unless it calls just one."""
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        forward = vars(base).get("forward")
        function = inspect.unwrap(forward) if inspect.isfunction(forward) else None
        names = rotary_names(function) if inspect.isfunction(function) else []
        if names:
            return (base, names[0]) if len(names) == 1 else None
    return None


def _ready(derived: Derived, found: Found) -> Callable[..., Norms | None]:
    """The ``ready`` that a derived forward calls at its start: it gives the norms to fuse in this call, or None."""
    names, ours = (derived.q_norm, derived.k_norm), found.ours

    def ready(module: Any, rotation: Any) -> Norms | None:
        norms: Norms | None = getattr(module, MARK, None)
        if norms is None or rotation is not ours or norms.names != names:
            return None
        q_norm, k_norm = module._modules.get(names[0]), module._modules.get(names[1])  # noqa: SLF001
        if not (norm_style.ready(q_norm, norms.q) and norm_style.ready(k_norm, norms.k)):
            return None
        return norms if getattr(q_norm, norms.q.eps) == getattr(k_norm, norms.k.eps) else None

    return ready


def _fused(found: Found, *, by_position: bool) -> Callable[..., Any]:
    """The ``fused`` that a derived forward calls in place of its rotation, with q and k before their norms."""
    style = found.style

    def fused(  # noqa: PLR0913 - the arguments of the rotation, and the module
        norms: Norms, module: Any, rotation: Any, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1
    ) -> Any:
        out = _together(style, norms, module, q, k, (cos, sin), unsqueeze_dim)
        return out or rotation(*_apart(norms, module, q, k, unsqueeze_dim), cos, sin, unsqueeze_dim=unsqueeze_dim)

    def fused_by_position(  # noqa: PLR0913
        norms: Norms,
        module: Any,
        rotation: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        position_ids: Any = None,
        unsqueeze_dim: int = 1,
    ) -> Any:
        if position_ids is None:
            return fused(norms, module, rotation, q, k, cos, sin, unsqueeze_dim)
        return rotation(*_apart(norms, module, q, k, unsqueeze_dim), cos, sin, position_ids, unsqueeze_dim)

    return fused_by_position if by_position else fused


def _together(  # noqa: PLR0913
    style: Style, norms: Norms, module: Any, q: Any, k: Any, angles: tuple[Any, Any], unsqueeze_dim: int
) -> Any:
    """Both norms and the rotation in one launch; None if the kernels do not take the shapes or dtypes."""
    four = 4
    if unsqueeze_dim not in (1, 2) or q.dim() != four or k.dim() != four or q.dtype != k.dtype:
        return None
    q_norm, k_norm = (module._modules[name] for name in norms.names)  # noqa: SLF001
    weights = q_norm._parameters[norms.q.weight], k_norm._parameters[norms.k.weight]  # noqa: SLF001
    sizes, dim = (norms.q.size, norms.k.size), q.shape[3]
    if sizes == (dim, dim):
        together = "head"
    elif sizes == (q.shape[unsqueeze_dim] * dim, k.shape[unsqueeze_dim] * dim):
        together = "all"
    else:
        return None
    rounding = norms.q.rounding
    if rounding == "each" and any(torch.promote_types(q.dtype, weight.dtype) != q.dtype for weight in weights):
        # The model's norm gives the wider dtype; only autocast makes it narrow again.
        if not torch.is_autocast_enabled(q.device.type):
            return None
        rounding = "once"
    eps = getattr(q_norm, norms.q.eps)
    return rotate(style, q, k, angles, unsqueeze_dim, Norm(weights, eps, together, norms.q.zero_centered, rounding))


def _apart(norms: Norms, module: Any, q: Any, k: Any, unsqueeze_dim: int) -> tuple[Any, Any]:
    """The results of the norms, computed by their modules: for calls that cannot be fused after all."""
    q_norm, k_norm = (getattr(module, name) for name in norms.names)
    return _by_module(q_norm, norms.q.size, q, unsqueeze_dim), _by_module(k_norm, norms.k.size, k, unsqueeze_dim)


def _by_module(norm: Any, size: int, x: Any, unsqueeze_dim: int) -> Any:
    if x.shape[-1] == size:
        return norm(x)
    heads_first = unsqueeze_dim == 1
    tokens = x.transpose(1, 2) if heads_first else x  # [b, s, h, d]
    if tokens[0, 0].numel() != size:
        raise RuntimeError(
            f"{type(norm).__name__} must normalise heads or all heads of what is rotated, got {size} weights for a tensor of "
            f"{tuple(x.shape)}; undo the patch of use_tuned_rope and report this model"
        )
    normed = norm(tokens.flatten(2)).view(tokens.shape)
    return normed.transpose(1, 2) if heads_first else normed
