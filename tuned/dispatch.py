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
4. Eager PyTorch: tensors on a CPU, dtypes that no kernel takes, no Triton, angles or a GRU that need a gradient.

torch.compile traces RoPE as its formula, which it fuses itself, and a GRU, its step and ``linear_cat`` as operators
(``tuned.gru.ops``), inside of which the order above holds.

``tuned.explain`` tells which of these a call gets, and why. On a GPU of a model that nothing was measured on, the first
call says so (``tuned.TunedWarning``). Environment: ``TUNED_TABLES=DIR`` puts the records in a folder in front of the
shipped tables; ``TUNED_RECORD=FILE`` appends the problems that no row was measured for, for ``tune.py --problems FILE``;
``TUNED_DISPATCH=safe`` launches through Triton's public call only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tuned.gru import plan as gru_plan
from tuned.gru import serve
from tuned.gru.arguments import check_linear_cat, checked_cell, gru_call
from tuned.gru_cell import run as gru_cell_run
from tuned.linear_cat import run as linear_cat_run
from tuned.overwrite import bump_version, refuse_overwrite
from tuned.rope import call as rope_call
from tuned.rope.call import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    x: torch.Tensor | tuple[torch.Tensor, ...],
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
        x: input, ``[batch, input_size]``; or a tuple of segments ``[batch, k_i]``, taken as if concatenated.
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
    if not torch.compiler.is_dynamo_compiling():
        known = gru_cell_run.known(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
        if known is not None:
            return known  # type: ignore[no-any-return]
    segments, given = checked_cell(x, h, weight_ih, weight_hh, bias_ih, bias_hh, inplace)
    if inplace:
        refuse_overwrite(h)
        if torch.is_grad_enabled() and any(t.requires_grad for t in serve.present(*segments, *given)):
            raise RuntimeError("h is overwritten, and its old value is needed for a gradient; use inplace=False")
    if torch.compiler.is_dynamo_compiling():
        from tuned.gru import traced  # noqa: PLC0415 - making operators takes 10 ms, which only this needs

        out: torch.Tensor = traced.gru_cell(segments, *given)
        return h.copy_(out) if inplace else out
    out = serve.gru_cell(segments, *given, inplace=inplace)
    if inplace:
        bump_version(h)
    return out


def gru(  # noqa: PLR0913 - the arguments of torch.gru
    input: torch.Tensor,  # noqa: A002 - its name there
    hx: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
    batch_sizes: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GRU over whole sequences, as torch.nn.GRU computes it (gates r, z, n; reset after the product).

    With D = 2 if bidirectional else 1, L layers, hidden size H:

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` batch_first, any strides; or packed, ``[rows, I]``, with one of
            batch_sizes and cu_seqlens.
        hx: the first hidden states, ``[L * D, B, H]``; with batch_sizes in the order that the sequences are packed in.
        weights: for each layer, for each direction: w_ih ``[3 * H, I]`` (``[3 * H, D * H]`` above the first layer), w_hh
            ``[3 * H, H]`` and, with bias, b_ih and b_hh ``[3 * H]``; the order of torch.nn.GRU's parameters.
        bias: whether weights has biases.
        num_layers: L.
        dropout: probability that an element between two layers is zeroed, in training.
        training: whether to drop.
        bidirectional: run each layer backwards too; outputs of the two directions stand side by side.
        batch_first: the axes of input and output; not for packed input.
        batch_sizes: how many sequences have each step, int64 ``[T]`` on the CPU, as torch's PackedSequence has it.
        cu_seqlens: where the sequences start in rows, int32 ``[B + 1]`` on the device of input: the first 0, the last the
            number of rows. Sequences may be empty and in any order. Values on a GPU are not checked.
        max_seqlen: at least the longest length; with cu_seqlens.

    Returns:
        output, ``[T, B, D * H]``, ``[B, T, D * H]`` or ``[rows, D * H]``, and h_n ``[L * D, B, H]``, in the dtype of
        input; under autocast as PyTorch's. Where a gradient is needed, by eager PyTorch.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if (
        batch_sizes is None
        and cu_seqlens is None
        and not (dropout and training)
        and not torch.compiler.is_dynamo_compiling()
    ):
        known = gru_plan.known(input, hx, weights, (bias, num_layers, bidirectional, batch_first))
        if known is not None:
            return known
    call = gru_call(
        input,
        hx,
        weights,
        bias=bias,
        num_layers=num_layers,
        dropout=dropout,
        training=training,
        bidirectional=bidirectional,
        batch_first=batch_first,
        batch_sizes=batch_sizes,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )
    if torch.compiler.is_dynamo_compiling():
        from tuned.gru import traced  # noqa: PLC0415

        return traced.gru(call)
    return serve.gru(call)


def linear_cat(
    inputs: tuple[torch.Tensor, ...], weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """torch.nn.functional.linear of several inputs, taken as if concatenated in their last axis.

    Args:
        inputs: segments ``[..., k_i]``, alike but for k_i.
        weight: ``[n, sum of k_i]``.
        bias: ``[n]`` or None.

    Returns:
        ``[..., n]``. Where no kernel serves the call, eager PyTorch concatenates.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if not torch.compiler.is_dynamo_compiling():
        known = linear_cat_run.known(inputs, weight, bias)
        if known is not None:
            return known  # type: ignore[no-any-return]
    check_linear_cat(inputs, weight, bias)
    if torch.compiler.is_dynamo_compiling():
        from tuned.gru import traced  # noqa: PLC0415

        return traced.linear_cat(inputs, weight, bias)
    return serve.linear_cat(inputs, weight, bias)


def explain_rope(*args: Any, direction: str = "forward", **kwargs: Any) -> tuple[Choice, Any]:
    """The choice for a call of ``rope`` with these arguments, and its spec; nothing runs."""
    given = dict(zip(("x", "freqs", "cos", "sin"), args, strict=False)) | kwargs
    given = {"tensor_format": "bshd", "interleaved": False, "inplace": False, **given, "direction": direction}
    fields: dict[str, Any] = {name: given.get(name) for name in Settings._fields}
    settings = Settings(**fields)
    x, freqs, cos, sin, cu_seqlens = (given.get(name) for name in ("x", "freqs", "cos", "sin", "cu_seqlens"))
    return rope_call.explain(x, freqs, cos, sin, cu_seqlens, settings)
