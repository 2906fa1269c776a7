"""The fastest known kernel for each call.

Which kernel a call gets:

1. The winner measured on this device for this spec and size, if its kernel is still the one that was measured.
2. The winner of the nearest size of this spec; then that of the closest spec, which may differ in heads, dims and dtype
   only, by the distance documented in ``tuned.rope.variant.distance``.
   (2b) The same from the table of the most similar GPU.
3. The default variant of the spec.
4. Eager PyTorch: tensors on a CPU, dtypes that no kernel takes, no Triton, angles that need a gradient.

``tuned.explain`` tells which of these a call gets, and why. Environment: ``TUNED_TABLES=DIR`` puts the records in a
folder in front of the shipped tables; ``TUNED_DISPATCH=safe`` launches through Triton's public call only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tuned.gru_cell.arguments import check_cell
from tuned.gru_cell.run import cell_call, cell_spec, choice_of_cell, run_cell
from tuned.rope.arguments import prepare
from tuned.rope.plan import choice_of, plan_of, run_eager, run_public

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuned.lookup import Choice

MAX_PLANS = 4096  # properties remembered; a decode loop needs a handful, a new length each call one more each
_PLANS: dict[Any, Any] = {}
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # noqa: SLF001 - 0.05 us, the public one 0.2


def rope(  # noqa: PLR0913 - the arguments of its peers
    x: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    inplace: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotary position embedding: rotate the first features of each head by angles that depend on the position.

    Args:
        x: ``[b, s, h, d]`` (bshd), ``[s, b, h, d]`` (sbhd) or ``[t, h, d]`` (thd), any strides, float32, float16 or
            bfloat16 on a GPU; anything floating point on a CPU.
        freqs: angles in radians, float32, ``[s2, entries]`` or ``[s2, 1, 1, entries]`` with s2 >= s. Or give:
        cos: cosines of the angles, any float dtype, shaped like freqs, and
        sin: sines of the angles.
        tensor_format: the axes of x: "bshd", "sbhd" or "thd".
        interleaved: pairs are features (2 j, 2 j + 1), GPT-J; otherwise (j, j + rotary_dim / 2), NeoX, rotate_half.
        inplace: overwrite x and return it; features past rotary_dim are not touched.
        rotary_dim: how many leading features rotate; checked against the angles when given.
        angle_entries: "feature": one entry a rotated feature, and the two of a pair may differ (TransformerEngine);
            "pair": one entry a pair (flash-attention), half the bytes. By default "feature" for freqs, "pair" for cos
            and sin. Never guessed from the width.
        cu_seqlens: int32 ``[sequences + 1]`` on the device of x, where packed sequences start; thd only. Positions past
            the angles give NaN; tokens that no sequence holds are copied.
        max_seqlen: if given, checked against the angles, without asking the device; thd only.

    Returns:
        A tensor like x, or x itself in place. Differentiable in x by a kernel; in the angles through eager PyTorch.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: x cannot be overwritten without losing a gradient; nothing has been written.
    """
    return _rope(  # type: ignore[no-any-return]
        x, freqs, cos, sin, tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen, "forward"
    )


def rope_backward(  # noqa: PLR0913 - the arguments of rope
    grad_output: torch.Tensor,
    freqs: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    tensor_format: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    angle_entries: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """The transpose of ``rope`` as a map of x, with the same arguments: grad_output to the gradient of x.

    Always out of place. Where the entries of a pair are equal it is the rotation by minus the angle.
    """
    return _rope(  # type: ignore[no-any-return]
        grad_output, freqs, cos, sin, tensor_format, interleaved, False, rotary_dim, angle_entries, cu_seqlens, max_seqlen,
        "backward",
    )  # fmt: skip


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    *,
    interleaved: bool = False,
    fused: bool = True,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """TransformerEngine's call: freqs float32 ``[s2, 1, 1, d2]``, one entry a feature; see ``rope``.

    ``fused`` is accepted and changes nothing: there is one implementation, and it takes all layouts.
    """
    del fused
    return rope(
        t, freqs, tensor_format=tensor_format, interleaved=interleaved, angle_entries="feature", cu_seqlens=cu_seqlens
    )


def _traits(t: torch.Tensor) -> tuple[Any, ...]:
    """All that a compiled kernel may depend on, of one tensor."""
    return t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.get_device(), t.requires_grad, type(t)


def _rope(  # noqa: PLR0913
    x: Any,
    freqs: Any,
    cos: Any,
    sin: Any,
    tensor_format: str,
    interleaved: bool,  # noqa: FBT001
    inplace: bool,  # noqa: FBT001
    rotary_dim: int | None,
    angle_entries: str | None,
    cu_seqlens: Any,
    max_seqlen: int | None,
    direction: str,
) -> Any:
    if torch.compiler.is_compiling():
        return _outside_the_graph(
            x, freqs, cos, sin, tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen, direction
        )
    angles = cos if freqs is None else freqs
    try:
        key = (
            _traits(x), _traits(angles), freqs is None, sin is not None and _traits(sin),
            cu_seqlens is not None and _traits(cu_seqlens), tensor_format, interleaved, inplace, rotary_dim, angle_entries,
            max_seqlen, direction, torch.is_grad_enabled(), _current_device(), freqs is not None and cos is not None,
        )  # fmt: skip
        plan = _PLANS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # not a plain tensor: the checks below say what is wrong, or eager
        key = plan = None
    if plan is not None:
        return plan(x, angles, sin, cu_seqlens)
    return _first_call(
        key, x, freqs, cos, sin, tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen, direction
    )


def _outside_the_graph(*args: Any) -> Any:
    """The call from a traced function: a break in its graph."""
    return _rope(*args)


# What torch.compiler.disable would set; that function imports the whole of Dynamo, a second at import.
_outside_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001


def _first_call(key: Any, x: Any, freqs: Any, cos: Any, sin: Any, *rest: Any) -> Any:
    """Check everything, choose, run; keep what was decided under ``key``."""
    tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen, direction = rest
    spec, size, call, eager_spec = prepare(
        x, freqs, cos, sin, tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen,
        direction, torch.empty_like,
    )  # fmt: skip
    wants_grad = torch.is_grad_enabled() and x.requires_grad
    if inplace:
        refuse_overwrite(x)
    angles_want_grad = torch.is_grad_enabled() and (call.cos.requires_grad or (sin is not None and sin.requires_grad))
    choice = choice_of(spec, size, call)
    if choice.rule == "eager" or spec is None or angles_want_grad:
        return run_eager(eager_spec, call)
    if wants_grad:
        # Angles go in by position, so that autograd sees them; the rest is one tuple.
        settings = (freqs is not None, *rest)
        plan = _autograd_plan(settings)
        _keep(key, plan)
        return plan(x, call.cos if freqs is None else freqs, sin, cu_seqlens)
    if x.numel() == 0:
        return call.out
    compiled = run_public(spec, choice.variant, call)
    angles = cos if freqs is None else freqs
    _keep(key, _counted(plan_of(spec, choice.variant, call, compiled, (angles, sin)), inplace))
    if inplace:
        _bump(x)
    return call.out


def _keep(key: Any, plan: Any) -> None:
    if key is None or plan is None:
        return
    if len(_PLANS) >= MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan


def _counted(plan: Any, inplace: bool) -> Any:  # noqa: FBT001
    """A plan that also tells autograd that x has changed."""
    if plan is None or not inplace:
        return plan

    def counted(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        result = plan(x, angles, sin, cu_seqlens)
        _bump(x)
        return result

    return counted


def _bump(x: torch.Tensor) -> None:
    if not x.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(x)


def refuse_overwrite(x: torch.Tensor) -> None:
    """Raise RuntimeError, before any write, if overwriting x would lose or falsify a gradient."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return
    base = x._base if x._is_view() else x  # noqa: SLF001 - no public way to ask
    if base is not None and base.is_leaf:
        raise RuntimeError(
            "x is a leaf that requires grad, or a view of one: overwriting it would lose the value its gradient belongs "
            "to; use inplace=False, or overwrite a clone"
        )
    creation = torch._C._autograd  # noqa: SLF001
    if x._is_view() and creation._get_creation_meta(x) != creation.CreationMeta.DEFAULT:  # noqa: SLF001
        raise RuntimeError(
            "x is one of several views made together (unbind, split, chunk) or was made under no_grad, and autograd "
            "cannot follow a write to it; use inplace=False, or slice instead of splitting"
        )


class _Rope(torch.autograd.Function):
    """The kernel as a node of the graph. Its backward is the transposed kernel, and so differentiable again."""

    @staticmethod
    def forward(ctx: Any, x: Any, angles: Any, sin: Any, cu_seqlens: Any, settings: tuple[Any, ...]) -> Any:
        """Rotate; keep the angles, not x."""
        ctx.save_for_backward(angles, sin, cu_seqlens)
        ctx.settings = settings
        out = _with_settings(x, angles, sin, cu_seqlens, settings)
        if settings[3]:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Apply the transpose to the gradient, out of place: it may be shared."""
        angles, sin, cu_seqlens = ctx.saved_tensors
        takes_freqs, tensor_format, interleaved, _, *rest, direction = ctx.settings
        turned = "backward" if direction == "forward" else "forward"
        settings = (takes_freqs, tensor_format, interleaved, False, *rest, turned)
        return _with_settings(grads[0], angles, sin, cu_seqlens, settings), None, None, None, None


def _with_settings(x: Any, angles: Any, sin: Any, cu_seqlens: Any, settings: tuple[Any, ...]) -> Any:
    takes_freqs, tensor_format, interleaved, inplace, rotary_dim, angle_entries, _, max_seqlen, direction = settings
    freqs, cos = (angles, None) if takes_freqs else (None, angles)
    return _rope(
        x, freqs, cos, sin, tensor_format, interleaved, inplace, rotary_dim, angle_entries, cu_seqlens, max_seqlen, direction
    )


def _autograd_plan(settings: tuple[Any, ...]) -> Any:
    takes_freqs, tensor_format, interleaved, inplace, rotary_dim, angle_entries, _, max_seqlen, direction = settings
    # cu_seqlens goes in as a tensor; a settings tuple that held it would keep the caller's alive.
    kept = (takes_freqs, tensor_format, interleaved, inplace, rotary_dim, angle_entries, None, max_seqlen, direction)

    def plan(x: Any, angles: Any, sin: Any, cu_seqlens: Any) -> Any:
        if inplace:
            refuse_overwrite(x)
        return _Rope.apply(x, angles, sin, cu_seqlens, kept)

    return plan


def gru_cell(  # noqa: PLR0913 - the arguments of torch.gru_cell
    x: torch.Tensor,
    h: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
    *,
    inplace: bool = False,
) -> torch.Tensor:
    """One step of a GRU, as torch.nn.GRUCell computes it: two library GEMMs and one kernel for the gates.

    Args:
        x: input, ``[batch, input_size]``.
        h: hidden state, ``[batch, hidden]``.
        weight_ih: ``[3 * hidden, input_size]``, gates in the order r, z, n.
        weight_hh: ``[3 * hidden, hidden]``.
        bias_ih: ``[3 * hidden]``, or None together with
        bias_hh: ``[3 * hidden]``.
        inplace: overwrite h and return it; safe because both products have read it before the gates start.

    Returns:
        The next hidden state ``[batch, hidden]``, or h itself in place. Where a gradient is needed, eager PyTorch.

    Raises:
        TypeError, ValueError: an argument is not allowed; nothing has been written.
        RuntimeError: h cannot be overwritten without losing a gradient; nothing has been written.
    """
    check_cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
    tensors = [t for t in (x, h, weight_ih, weight_hh, bias_ih, bias_hh) if t is not None]
    if inplace:
        refuse_overwrite(h)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError("h is overwritten, and its old value is needed for a gradient; use inplace=False")
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return torch.gru_cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh)
    spec, size, call = cell_call(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
    out = run_cell(spec, size, call)
    if inplace and out is h:
        _bump(h)
    return out


def explain_gru_cell(*args: Any, **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of ``gru_cell`` with these arguments, and its spec; nothing runs on the GPU but the shapes."""
    names = ("x", "h", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "inplace")
    given = dict(zip(names, args, strict=False)) | kwargs
    check_cell(*(given.get(n) for n in names[:6]), given.get("inplace", False))
    spec, size = cell_spec(given["h"], given.get("bias_ih"), given.get("inplace", False))
    choice = choice_of_cell(spec, size, given["h"])
    wants = [given.get(n) for n in names[:6]]
    if choice.rule != "eager" and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wants):
        choice = dataclasses.replace(choice, rule="eager", why="a gradient is needed", variant=None, row=None)
    return choice, spec


def explain_rope(*args: Any, direction: str = "forward", **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of ``rope`` with these arguments, and its spec; nothing runs."""
    names = ("x", "freqs", "cos", "sin")
    given = dict(zip(names, args, strict=False)) | kwargs
    ordered = [given.get(n) for n in names]
    spec, size, call, _ = prepare(
        *ordered,
        given.get("tensor_format", "bshd"),
        given.get("interleaved", False),
        given.get("inplace", False),
        given.get("rotary_dim"),
        given.get("angle_entries"),
        given.get("cu_seqlens"),
        given.get("max_seqlen"),
        direction,
        lambda x: x,
    )
    choice = choice_of(spec, size, call)
    wants = [t for t in (call.cos, call.sin) if t is not None and t.requires_grad]
    if choice.rule != "eager" and torch.is_grad_enabled() and wants:
        choice = dataclasses.replace(choice, rule="eager", why="the angles need a gradient", variant=None, row=None)
    return choice, spec
