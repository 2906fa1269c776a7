"""Find how a function ``apply_rotary_pos_emb`` rotates, by calling it, and do the same with ``tuned.dispatch.rope_qk``.

transformers has about two hundred functions of that name, and remote code of models has more. They differ in the pairs
(halves of the features, or adjacent features), in what cos and sin hold, in whether head_dim may exceed the width of
cos and sin, and in the sign of the angle.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tuned import dispatch

PROBE_DIM = 8  # features that a probe rotates: enough for halves, pairs and quarters to differ


@dataclass(frozen=True)
class Style:
    """How a function rotates."""

    interleaved: bool  # pairs are features (2 j, 2 j + 1); otherwise (j, j + half the width)
    entries: (
        str  # of cos and sin: "feature", each used; "half", the first half used, one per pair; "pair", one per pair
    )
    conjugate: bool = False  # rotate by the negative angle
    rotated: str | None = None  # "first" or "last" features if head_dim exceeds the angles; None: it may not


@dataclass(frozen=True)
class Norm:
    """The RMSNorm of a query and a key before their rotation, as ``qk_norm_rope`` takes it."""

    weights: tuple[torch.Tensor, torch.Tensor]
    eps: float
    norm: str
    zero_centered: bool
    rounding: str


@dataclass(frozen=True)
class Found:
    """How a function of a modeling file rotates, and our function that does the same."""

    style: Style
    takes: tuple[str, ...]  # parameters of the original
    ours: Callable[..., Any]


def replacement(model: torch.nn.Module, namespace: dict[str, Any], name: str) -> Callable[..., Any] | str:
    """A function that does with ``rope_qk`` what the one of this name in a modeling file does, or why there is none.

    Calls with shapes that ``rope_qk`` does not take go to the original.
    """
    found = find(model, namespace, name)
    return found if isinstance(found, str) else found.ours


def find(model: torch.nn.Module, namespace: dict[str, Any], name: str) -> Found | str:
    """How the function of this name in a modeling file rotates, with its replacement, or why it has no replacement."""
    original = namespace[name]
    # The kernels package turns a decorated function into a module, which may run a kernel; its class holds the function.
    plain = functools.partial(type(original).forward, original) if isinstance(original, torch.nn.Module) else original
    parameters = inspect.signature(plain).parameters.values()
    takes = tuple(
        p.name if p.default is p.empty or p.name == "unsqueeze_dim" else f"{p.name}={p.default}" for p in parameters
    )
    make = _MAKERS.get(takes)
    if make is None:
        return f"it takes ({', '.join(takes)}), not (q, k, cos, sin, unsqueeze_dim) or (x, cos, sin, unsqueeze_dim)"
    style = _style_of(plain, make)
    if style is None:
        return "its results are those of rotating neither halves nor adjacent pairs by (cos, sin)"
    if style.entries == "feature" and not style.interleaved and _halves_are_equal(model, namespace):
        style = replace(style, entries="half")  # half the bytes of cos and sin
    return Found(style, takes, make(style, original))


def rotate(  # noqa: PLR0913 - the arguments of the rotation, and the norm before it
    style: Style,
    q: torch.Tensor,
    k: torch.Tensor | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    unsqueeze_dim: int,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The rotated tensors, out of place; None if the shapes are not those below.

    Args:
        style: how to rotate.
        q: queries ``[b, h, s, d]``, or ``[b, s, h, d]`` with unsqueeze_dim 2; any strides.
        k: keys, like q except for the number of heads, or None.
        angles: cos and sin, ``[b or 1, s, width]``.
        unsqueeze_dim: the axis of heads, 1 or 2.
        norm: the norms of q and k, computed before the rotation in the same launch.
    """
    cos, sin = angles
    if unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:  # noqa: PLR2004
        return None
    batch, tokens, width = cos.shape
    of_q = q.shape
    rotary_dim = 2 * width if style.entries == "pair" else width
    fits = rotary_dim == of_q[3] or (rotary_dim < of_q[3] and style.rotated is not None)
    if tokens != of_q[3 - unsqueeze_dim] or batch not in (1, of_q[0]) or not fits:
        return None
    if k is not None:
        of_k = k.shape
        if len(of_k) != 4 or of_k[0] != of_q[0] or of_k[3 - unsqueeze_dim] != tokens or of_k[3] != of_q[3]:  # noqa: PLR2004
            return None
    if style.entries == "half":
        cos, sin = cos.narrow(2, 0, width // 2), sin.narrow(2, 0, width // 2)
    if batch == 1:
        cos, sin = cos[0], sin[0]
    heads_first = unsqueeze_dim == 1
    q = q.transpose(1, 2) if heads_first else q
    k = k.transpose(1, 2) if heads_first and k is not None else k
    how: dict[str, Any] = {
        "cos": cos,
        "sin": sin,
        "interleaved": style.interleaved,
        "angle_entries": "feature" if style.entries == "feature" else "pair",
        "rotated": style.rotated or "first",
        "conjugate": style.conjugate,
    }
    if norm is None:
        q_out, k_out = dispatch.rope_qk(q, k, **how)
    else:
        of_norm: dict[str, Any] = {
            "eps": norm.eps,
            "norm": norm.norm,
            "zero_centered": norm.zero_centered,
            "rounding": norm.rounding,
        }
        q_weight, k_weight = norm.weights
        q_out, k_out = dispatch.qk_norm_rope(q, k, q_weight, k_weight, **of_norm, **how)
    if not heads_first:
        return q_out, k_out
    return q_out.transpose(1, 2), None if k_out is None else k_out.transpose(1, 2)


def _style_of(original: Callable[..., Any], make: Callable[..., Any]) -> Style | None:
    """The style that gives the function's results on cos and sin with all entries different, or None."""
    for fields in itertools.product((False, True), ("feature", "half", "pair"), (False, True)):
        style = Style(*fields)
        if _agree(original, make, style, PROBE_DIM):
            wider = (replace(style, rotated=rotated) for rotated in ("first", "last"))
            return next((one for one in wider if _agree(original, make, one, PROBE_DIM + 4)), style)
    return None


@torch.no_grad()
def _agree(original: Callable[..., Any], make: Callable[..., Any], style: Style, head_dim: int) -> bool:
    """Whether a style gives a function's results, for q ``[2, 3, 5, head_dim]``, k ``[2, 1, 5, head_dim]``, and transposed."""
    ours = make(style, original)
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's random state does not change
    width = PROBE_DIM // 2 if style.entries == "pair" else PROBE_DIM

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    one = "x" in inspect.signature(ours).parameters
    tensors = [random(2, 3, 5, head_dim), random(2, 1, 5, head_dim)][: 1 if one else 2]
    angles = {"cos": random(2, 5, width), "sin": random(2, 5, width)}
    for unsqueeze_dim in (1, 2):
        given = [t if unsqueeze_dim == 1 else t.transpose(1, 2) for t in tensors]
        try:
            wanted = original(*given, **angles, unsqueeze_dim=unsqueeze_dim)
        except Exception:  # noqa: BLE001 - an unknown function may raise anything at an unexpected shape
            return False
        found = ours(*given, **angles, unsqueeze_dim=unsqueeze_dim)
        found, wanted = ((found,), (wanted,)) if one else (found, wanted)
        alike = [t.shape for t in found] == [t.shape for t in wanted]
        if not (alike and all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, wanted, strict=True))):
            return False
    return True


def _halves_are_equal(model: torch.nn.Module, namespace: dict[str, Any]) -> bool:
    """Whether all rotary embeddings of a modeling file are in the model and return cos and sin with two equal halves."""
    kinds = {kind for name, kind in namespace.items() if isinstance(kind, type) and name.endswith("RotaryEmbedding")}
    embeddings = [module for module in model.modules() if type(module) in kinds]
    found = {type(module) for module in embeddings}
    return bool(found) and found == kinds and all(_gives_equal_halves(embedding) for embedding in embeddings)


@torch.no_grad()
def _gives_equal_halves(embedding: torch.nn.Module) -> bool:
    try:
        embedding = copy.deepcopy(embedding).to("cpu")  # a call may adjust its frequencies to the length
        x, positions = torch.zeros(1, 1, device="cpu"), torch.tensor([[0, 1, 7]], device="cpu")
        by_type = "layer_type" in inspect.signature(embedding.forward).parameters  # Gemma 3
        kinds: Any = getattr(embedding, "layer_types", ())
        types: list[dict[str, str]] = [{"layer_type": kind} for kind in kinds] if by_type else [{}]
        angles = [t.chunk(2, dim=-1) for more in types for t in embedding(x, positions, **more)]
        return bool(angles) and all(torch.equal(first, second) for first, second in angles)
    except Exception:  # noqa: BLE001 - an embedding of another kind: all entries will be read
        return False


def _for_pair(style: Style, original: Any) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        out = rotate(style, q, k, (cos, sin), unsqueeze_dim)
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim) if out is None else out

    return apply_rotary_pos_emb


def _for_key_or_none(style: Style, original: Any) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Any, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
        out = rotate(style, q, k, (cos, sin), unsqueeze_dim)
        if out is None:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return out[0] if k is None else out

    return apply_rotary_pos_emb


def _for_positions(style: Style, original: Any) -> Callable[..., Any]:
    def apply_rotary_pos_emb(  # noqa: PLR0913 - the arguments of its peer
        q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> Any:
        out = None if position_ids is not None else rotate(style, q, k, (cos, sin), unsqueeze_dim)
        return original(q, k, cos, sin, position_ids, unsqueeze_dim) if out is None else out

    return apply_rotary_pos_emb


def _for_one(style: Style, original: Any) -> Callable[..., Any]:
    def apply_rotary_pos_emb(x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        out = rotate(style, x, None, (cos, sin), unsqueeze_dim)
        return original(x, cos, sin, unsqueeze_dim=unsqueeze_dim) if out is None else out[0]

    return apply_rotary_pos_emb


_MAKERS = {
    ("q", "k", "cos", "sin", "unsqueeze_dim"): _for_pair,
    ("q", "k=None", "cos=None", "sin=None", "unsqueeze_dim"): _for_key_or_none,  # Qwen 4
    (
        "q",
        "k",
        "cos",
        "sin",
        "position_ids=None",
        "unsqueeze_dim",
    ): _for_positions,  # transformers 4, which ignores position_ids
    ("x", "cos", "sin", "unsqueeze_dim"): _for_one,  # Gemma 3n, Gemma 4
}
