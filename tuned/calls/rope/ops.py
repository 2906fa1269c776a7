"""Operators of torch.library for RoPE: ``tuned::rope`` and ``tuned::rope_qk``, and both in place.

torch.compile, tracers and dispatch modes see these operators; other calls do not use them. The backward of each is the
functional operator with the transposed map, and so differentiable again. ``tuned::rope_`` and ``tuned::rope_qk_``
overwrite their arguments: torch.compile makes one launch of them, and no copy. They are defined without
torch.library.custom_op, which gives no gradient to an operator that overwrites. Angles get no gradient here: calls whose
angles need one run as PyTorch's own operators.
"""

from __future__ import annotations

from typing import Any

import torch

from tuned.calls.rope import call as eager
from tuned.calls.rope.arguments import Given, Settings
from tuned.launching.overwrite import bump_versions

_TENSORS = (
    "Tensor? freqs, Tensor? cos, Tensor? sin, Tensor? cos_sin_cache, Tensor? inv_freq, Tensor? cu_seqlens, "
    "Tensor? positions, Tensor? starts, SymInt offset"
)
_SETTINGS = (
    "str tensor_format, bool interleaved, SymInt? rotary_dim, str? angle_entries, SymInt? max_seqlen, "
    "float attention_scaling, int cp_size, int cp_rank, str rotated, bool conjugate, int? kv_heads, str direction"
)
_COUNT = 9  # arguments in _TENSORS


def call(given: Given, settings: Settings) -> Any:
    """Run the call as an operator."""
    starts = given.offset if isinstance(given.offset, torch.Tensor) else None
    named = settings._asdict()
    inplace = named.pop("inplace")
    offset = 0 if starts is not None else given.offset
    others = (*given[2:9], starts, offset, *named.values())
    if not inplace:
        return rope(given.x, *others) if given.key is None else rope_qk(given.x, given.key, *others)
    if given.key is None:
        rope_(given.x, *others)
        return given.x
    rope_qk_(given.x, given.key, *others)
    return given.x, given.key


def _arguments(x: Any, key: Any, others: tuple[Any, ...], *, inplace: bool = False) -> tuple[Given, Settings]:
    *tensors, starts, offset = others[:_COUNT]
    first, interleaved, *rest = others[_COUNT:]
    given = Given(x, key, *tensors)._replace(offset=offset if starts is None else starts)
    return given, Settings(first, interleaved, inplace, *rest)


def _like(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result with the strides that the fake implementation returns."""
    wanted = torch.empty_like(x)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)


def _rope(x: Any, *others: Any) -> torch.Tensor:
    with torch.no_grad():
        given, settings = _arguments(x, None, others)
        return _like(eager.call(*given, tuple(settings)), x)


def _rope_qk(q: Any, k: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        given, settings = _arguments(q, k, others)
        outs = eager.call(*given, tuple(settings))
        return _like(outs[0], q), _like(outs[1], k)


def _rope_(x: Any, *others: Any) -> None:
    with torch.no_grad():
        given, settings = _arguments(x, None, others, inplace=True)
        eager.call(*given, tuple(settings))


def _rope_qk_(q: Any, k: Any, *others: Any) -> None:
    with torch.no_grad():
        given, settings = _arguments(q, k, others, inplace=True)
        eager.call(*given, tuple(settings))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the angles and the positions, not what was rotated."""
    rotated = len(output) if isinstance(output, tuple) else 1
    tensors = inputs[rotated : rotated + _COUNT - 1]
    ctx.rotated, ctx.present = rotated, [t is not None for t in tensors]
    ctx.save_for_backward(*(t for t in tensors if t is not None))
    ctx.rest = inputs[rotated + _COUNT - 1 :]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    tensors = [next(saved) if present else None for present in ctx.present]
    *rest, direction = ctx.rest
    others = (*tensors, *rest, "backward" if direction == "forward" else "forward")
    nothing = (None,) * len(others)
    given = [grad for grad in grads if grad is not None]
    if len(given) == 2:  # noqa: PLR2004 - of q and k
        return *rope_qk(*given, *others), *nothing
    return *(grad if grad is None else rope(grad, *others) for grad in grads), *nothing


class _Overwrite(torch.autograd.Function):
    """The autograd node of the first ``count`` tensors that an operator overwrites."""

    @staticmethod
    def forward(ctx: Any, launch: Any, count: int, *arguments: Any) -> Any:
        """Launch, if another node has not done so; save what the backward needs."""
        rotated = arguments[:count]
        _setup(ctx, arguments, rotated)
        ctx.mark_dirty(*rotated)
        if launch is not None:
            launch()
        return rotated if count > 1 else rotated[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradients, out of place, since autograd may share them."""
        return None, None, *_backward(ctx, *grads)


def _overwriting(name: str, schema: str, count: int, function: Any) -> Any:
    _LIBRARY.define(name + schema)
    operator = getattr(torch.ops.tuned, name)

    def autograd(*arguments: Any) -> None:
        rotated = arguments[:count]

        def launch() -> None:
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library's own operators do
                operator(*arguments)

        needing = [t for t in rotated if torch.is_grad_enabled() and t.requires_grad]
        if len(needing) < count:
            bump_versions(*rotated)
        if not needing:
            launch()
        elif len(needing) == count and not any(t._is_view() for t in rotated):  # noqa: SLF001
            _Overwrite.apply(launch, count, *arguments)
        else:  # a node may not overwrite two views, and makes all that it overwrites require grad: the first launches
            for t in needing:
                _Overwrite.apply(launch if t is needing[0] else None, 1, t, *arguments[count:])

    _LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")  # type: ignore[attr-defined]  # noqa: SLF001
    _LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"tuned::{name}", lambda *_: None, lib=_LIBRARY)
    return operator


def _operator(name: str, schema: str, function: Any, fake: Any) -> Any:
    made = torch.library.custom_op(f"tuned::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.register_autograd(_backward, setup_context=_setup)
    return made


rope = _operator("rope", f"(Tensor x, {_TENSORS}, {_SETTINGS}) -> Tensor", _rope, lambda x, *_: torch.empty_like(x))
rope_qk = _operator(
    "rope_qk",
    f"(Tensor q, Tensor k, {_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)",
    _rope_qk,
    lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
)
_LIBRARY = torch.library.Library("tuned", "FRAGMENT")
rope_ = _overwriting("rope_", f"(Tensor(a!) x, {_TENSORS}, {_SETTINGS}) -> ()", 1, _rope_)
rope_qk_ = _overwriting("rope_qk_", f"(Tensor(a!) q, Tensor(b!) k, {_TENSORS}, {_SETTINGS}) -> ()", 2, _rope_qk_)
