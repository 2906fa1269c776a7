"""The fastest known kernel for each call.

Which kernel a call gets:

1. The winner measured on this device for this spec and size, if it still counts: the same text of its kernel, the same
   model with as many multiprocessors, timed as times are taken now (``tuned.mismatch``). Else it is a neighbour.
2. The row that is least unlike the call: octaves between the numbers of tokens, plus ``distance`` between the specs
   (``tuned.rope.variant``), with its tile rescaled to the width of the call's rows. The rule was chosen by leave-one-out
   regret: ``python tune.py regret``; its figures stand in each table.
   (2b) The same from the table of the most similar GPU, without what this one lacks.
   (2c) The same from the portfolio of the architecture: ``tuned/tables/_portfolio.py``.
3. The default variant of the spec.
4. Eager PyTorch: tensors on a CPU, dtypes that no kernel takes, no Triton, angles that need a gradient; and, for now,
   what torch.compile traces: it fuses the formula itself.

``tuned.explain`` tells which of these a call gets, and why. On a GPU of a model that nothing was measured on, the first
call says so (``tuned.TunedWarning``). Environment: ``TUNED_TABLES=DIR`` puts the records in a folder in front of the
shipped tables; ``TUNED_RECORD=FILE`` appends the problems that no row was measured for, for ``tune.py --problems FILE``;
``TUNED_DISPATCH=safe`` launches through Triton's public call only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tuned.gru_cell.arguments import check_cell
from tuned.gru_cell.run import cell_call, cell_spec, choice_of_cell, run_cell
from tuned.overwrite import bump_version, refuse_overwrite
from tuned.rope import call as rope_call
from tuned.rope.call import Settings

if TYPE_CHECKING:
    from tuned.lookup import Choice


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
    settings = (tensor_format, interleaved, inplace, rotary_dim, angle_entries, max_seqlen, "forward")
    return rope_call.call(x, freqs, cos, sin, cu_seqlens, settings)  # type: ignore[no-any-return]


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
    settings = (tensor_format, interleaved, False, rotary_dim, angle_entries, max_seqlen, "backward")
    return rope_call.call(grad_output, freqs, cos, sin, cu_seqlens, settings)  # type: ignore[no-any-return]


def apply_rotary_pos_emb(  # noqa: PLR0913 - the arguments of its peer
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
        bump_version(h)
    return out


def explain_gru_cell(*args: Any, **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of ``gru_cell`` with these arguments, and its spec; nothing runs on the GPU but the shapes."""
    names = ("x", "h", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "inplace")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors: list[Any] = [given.get(n) for n in names[:6]]
    x, h, weight_ih, weight_hh, bias_ih, bias_hh = tensors
    check_cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh, given.get("inplace", False))
    spec, size = cell_spec(h, bias_ih, given.get("inplace", False))
    choice = choice_of_cell(spec, size, h)
    wants = any(t is not None and t.requires_grad for t in tensors)
    if choice.rule != "eager" and torch.is_grad_enabled() and wants:
        choice = dataclasses.replace(choice, rule="eager", why="a gradient is needed", variant=None, row=None)
    return choice, spec


def explain_rope(*args: Any, direction: str = "forward", **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of ``rope`` with these arguments, and its spec; nothing runs."""
    given = dict(zip(("x", "freqs", "cos", "sin"), args, strict=False)) | kwargs
    given = {"tensor_format": "bshd", "interleaved": False, "inplace": False, **given, "direction": direction}
    fields: dict[str, Any] = {name: given.get(name) for name in Settings._fields}
    settings = Settings(**fields)
    x, freqs, cos, sin, cu_seqlens = (given.get(name) for name in ("x", "freqs", "cos", "sin", "cu_seqlens"))
    return rope_call.explain(x, freqs, cos, sin, cu_seqlens, settings)
