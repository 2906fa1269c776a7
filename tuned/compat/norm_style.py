"""Find what a norm module computes, by calling it, and whether ``tuned.dispatch.qk_norm_rope`` may replace it.

transformers has about a hundred RMSNorm classes. They differ in the name of eps, in whether the weight is added to one,
and in where they round. A module named q_norm may also be a LayerNorm, or have no weight at all.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as of_modules

_FLIPPED = 0.02  # fraction of values that may be rounded the other way, because squares are summed in another order
_OTHER_EPS = 0.75  # a second value, to find which attribute is the eps
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class NormStyle:
    """How a module computes its RMSNorm. The values of weight and eps are not kept: each call looks them up."""

    kind: type  # class of the module
    forward: Callable[..., Any]  # the forward of that class when the style was found
    weight: str  # name of the parameter
    size: int  # numbers in the weight
    eps: str  # name of the attribute
    zero_centered: bool  # multiplies by 1 + weight
    rounding: str  # as for qk_norm_rope

    def alike(self, other: NormStyle) -> bool:
        """Whether one call can compute both norms, if their eps are equal."""
        return (self.zero_centered, self.rounding) == (other.zero_centered, other.rounding)


def style_of(norm: torch.nn.Module) -> NormStyle | str:
    """The style of a module, or why it is no norm that ``qk_norm_rope`` can compute."""
    reason = _unusable(norm)
    if reason is not None:
        return reason
    (weight,) = norm._parameters  # noqa: SLF001 - by name, as it is registered
    size = norm._parameters[weight].numel()  # type: ignore[union-attr] # noqa: SLF001
    kind = type(norm)
    try:
        for eps, zero_centered in itertools.product(_numbers(norm), (False, True)):
            style = NormStyle(kind, kind.forward, weight, size, eps, zero_centered, "once")
            if _agree(norm, style):
                return _rounded(norm, style)
    except Exception as error:  # noqa: BLE001 - an unknown module may raise anything
        return f"a call with random numbers raised {type(error).__name__}"
    return "its results are not those of an RMSNorm of the last axis with an eps among its attributes"


def ready(norm: Any, style: NormStyle) -> bool:
    """Whether a module is still as it was when its style was found, and no hook waits for its call."""
    kind = type(norm)
    if kind is not style.kind or kind.forward is not style.forward or "forward" in norm.__dict__:
        return False
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:  # noqa: SLF001
        return False
    if of_modules._has_any_global_hook():  # noqa: SLF001 # type: ignore[no-untyped-call]
        return False
    weight = norm._parameters.get(style.weight)  # noqa: SLF001
    return type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.shape == (style.size,)


def _unusable(norm: torch.nn.Module) -> str | None:
    """Why a module cannot be replaced, whatever it computes; or None."""
    parameters = list(norm._parameters.values())  # noqa: SLF001
    one = parameters[0] if len(parameters) == 1 else None
    if one is None or one.dim() != 1 or not one.is_floating_point() or not one.numel():
        return "it must have one parameter, of one axis"
    reasons = {
        "it has buffers or modules inside": norm._buffers or norm._modules,  # noqa: SLF001
        f"its parameter is a {type(one).__name__}": type(one) not in (torch.nn.Parameter, torch.Tensor),
        "its forward was replaced": "forward" in vars(norm),
        "it has hooks": any(getattr(norm, name) for name in _HOOKS),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _numbers(norm: torch.nn.Module) -> list[str]:
    return [name for name, value in vars(norm).items() if type(value) is float]


def _with(norm: torch.nn.Module, style: NormStyle, weight: torch.Tensor, eps: float | None = None) -> torch.nn.Module:
    """The module with another weight, and another eps if one is given; the given module does not change."""
    clone = copy.copy(norm)
    vars(clone).update({"_parameters": {style.weight: torch.nn.Parameter(weight, requires_grad=False)}})
    if eps is not None:
        vars(clone)[style.eps] = eps
    return clone


def _formula(style: NormStyle, x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: str) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "each":
        normed = normed.to(x.dtype).float()
    return normed * (1.0 + weight.float() if style.zero_centered else weight.float())


@torch.no_grad()
def _agree(norm: torch.nn.Module, style: NormStyle) -> bool:
    """Whether a style gives a module's results in float32: with its own eps and another one, in training and not."""
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's random state does not change
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        weight = torch.randn(style.size, generator=generator, dtype=torch.float32)
        x = torch.randn(2, 3, 4, style.size, generator=generator, dtype=torch.float32)
        x = x * torch.tensor([1e-3, 1.0, 30.0], dtype=torch.float32).view(1, 3, 1, 1)
        for eps, training in itertools.product((None, _OTHER_EPS), (False, True)):
            module = _with(norm, style, weight, eps)
            module.training = training  # not train(): that would reach modules inside, which belong to the caller
            found = module.forward(x.clone())
            if type(found) is not torch.Tensor or found.shape != x.shape or found.dtype != x.dtype:
                return False
            wanted = _formula(style, x, weight, float(vars(norm)[style.eps]) if eps is None else eps, "once")
            if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-6):
                return False
    return True


@torch.no_grad()
def _rounded(norm: torch.nn.Module, style: NormStyle) -> NormStyle | str:
    """The style with the rounding that gives the module's bits in bfloat16."""
    generator = torch.Generator("cpu").manual_seed(1)
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        weight = torch.randn(style.size, generator=generator, dtype=torch.float32).bfloat16()
        x = torch.randn(-(-2048 // style.size), style.size, generator=generator, dtype=torch.float32).bfloat16()
        found = _with(norm, style, weight).forward(x.clone())
        if found.dtype != x.dtype:
            return f"it makes {found.dtype} of bfloat16"
        eps = float(vars(norm)[style.eps])
        for rounding in ("each", "product"):
            wanted = _formula(style, x, weight, eps, rounding).to(x.dtype)
            if (found != wanted).float().mean() < _FLIPPED:
                fields = {**vars(style), "rounding": rounding}
                return NormStyle(**fields)
    return "it rounds in a place of its own in bfloat16"
