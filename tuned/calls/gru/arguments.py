"""Check the arguments of a GRU over sequences. No tensor is written here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from tuned.calls.products import autocast_dtype
from tuned.calls.refusal import check_dense, check_flag, is_number, refuses

STARTS = "pass where sequences start, and the end of the last: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))"


@dataclasses.dataclass(frozen=True)
class GruCall:
    """A checked call. D is 2 if bidirectional, else 1; L is num_layers."""

    input: torch.Tensor  # [T, B, I], [B, T, I] batch_first, or [rows, I] packed
    hx: torch.Tensor  # [L * D, B, H]
    weights: tuple[torch.Tensor, ...]  # for each layer and direction: w_ih, w_hh and, with biases, b_ih, b_hh
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    batch_sizes: torch.Tensor | None = None  # [T] int64 on the CPU, of a PackedSequence
    cu_seqlens: torch.Tensor | None = None  # [B + 1] int32 on the device of input
    max_seqlen: int | None = None  # with cu_seqlens
    dropout: float = 0.0  # between layers; 0.0 when not training
    recompute: bool = False  # the backward multiplies the input by its weights again: the forward does not keep that
    resets: torch.Tensor | None = None  # bool, the axes of input but the last: the state is 0 before these steps
    width: int | None = None  # the hidden size to pad to; None: the call stays as it is. See tuned.calls.gru.wide
    left: bool = False  # with a width: torch.gru serves it, whatever kernels there are
    units: int | None = None  # of a call that was padded: how many units it had

    @property
    def hidden(self) -> int:
        """The hidden size that kernels compute."""
        return self.hx.shape[2] if self.width is None else self.width

    @property
    def as_given(self) -> GruCall:
        """The call without a width."""
        return self if self.width is None else dataclasses.replace(self, width=None, left=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that may need a gradient: input, hx, weights."""
        return (self.input, self.hx, *self.weights)


@refuses
def gru_call(  # noqa: PLR0913 - the arguments of the public call
    input: Any,  # noqa: A002
    hx: Any,
    weights: Any,
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
    batch_sizes: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    recompute: bool = False,
    resets: Any = None,
) -> GruCall:
    """Check the arguments of tuned.dispatch.gru; see there."""
    if not isinstance(weights, (tuple, list)) and (
        isinstance(weights, torch.Tensor) or not isinstance(weights, Iterable)
    ):
        raise TypeError(
            f"weights must be the tensors of each layer and direction, in order, got {type(weights).__name__}: pass "
            "tuple(module.parameters()) of a torch.nn.GRU, or call tuned.nn.GRU"
        )
    flags = {"bias": bias, "training": training, "bidirectional": bidirectional, "batch_first": batch_first}
    for name, flag in (flags | {"recompute": recompute}).items():
        check_flag(name, flag)
    bias, bidirectional, batch_first = bool(bias), bool(bidirectional), bool(batch_first)
    call = GruCall(
        input=input,
        hx=hx,
        weights=tuple(weights),
        has_biases=bias,
        num_layers=num_layers,
        bidirectional=bidirectional,
        batch_first=batch_first,
        dropout=dropout,
        batch_sizes=batch_sizes,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        recompute=recompute,
        resets=resets,
    )
    check_gru(call)
    return call if dropout == 0 or (training and num_layers > 1) else dataclasses.replace(call, dropout=0.0)


def check_gru(call: GruCall) -> None:
    """Check that the parts of a call fit each other. Lengths on a GPU are not read.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: a shape, device or combination is not allowed.
    """
    for name, tensor in (("input", call.input), ("hx", call.hx), *_named(call)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}: {_tensor_hint(name, tensor)}")
    check_dense({"input": call.input, "hx": call.hx, **dict(_named(call)), "resets": call.resets})
    if isinstance(call.num_layers, (bool, torch.Tensor)) or not hasattr(type(call.num_layers), "__index__"):
        raise TypeError(f"num_layers must be an int, got {call.num_layers!r}: convert it with int(...)")
    if call.num_layers < 1:
        raise ValueError(
            f"num_layers must be at least 1, got {call.num_layers}: pass the number of layers that weights has"
        )
    if not is_number(call.dropout):
        raise TypeError(
            f"dropout must be a number, got {call.dropout!r}: convert it with float(...), or leave it out for 0"
        )
    if not 0 <= call.dropout <= 1:
        raise ValueError(f"dropout must be a probability in [0, 1], got {call.dropout}: leave it out for 0")
    batch = _batch(call)
    directions = 2 if call.bidirectional else 1
    stacked = call.num_layers * directions
    if call.hx.ndim != 3 or call.hx.shape[0] != stacked or call.hx.shape[1] != batch:  # noqa: PLR2004
        raise ValueError(
            f"hx must be [num_layers * directions, batch, hidden] = [{stacked}, {batch}, hidden], got {list(call.hx.shape)}: "
            + _state_hint(call, stacked, batch)
        )
    _check_weights(call, stacked, directions)
    _check_alike(call)
    if call.resets is not None:
        _check_resets(call, call.resets)


def _check_resets(call: GruCall, resets: Any) -> None:
    if not isinstance(resets, torch.Tensor) or resets.dtype != torch.bool:
        what = resets.dtype if isinstance(resets, torch.Tensor) else type(resets).__name__
        raise TypeError(f"resets must be a bool tensor, got {what}: convert with .bool()")
    if resets.device != call.input.device:
        raise ValueError(
            f"resets must be on the device of input, {call.input.device}, got {resets.device}: move it with .to()"
        )
    if resets.shape != call.input.shape[:-1]:
        raise ValueError(
            f"resets must have a mark for each step of input, {list(call.input.shape[:-1])}, got {list(resets.shape)}: "
            + (
                "transpose it"
                if resets.shape == call.input.shape[:-1][::-1]
                else "expand marks of sequences to their steps"
            )
        )


def _tensor_hint(name: str, given: Any) -> str:
    """The hint for an argument that is no tensor."""
    if hasattr(given, "batch_sizes"):
        return "pass the data of a PackedSequence, with batch_sizes=packed.batch_sizes"
    if name == "hx":
        return "pass torch.zeros(num_layers * directions, batch, hidden) for a state that is none"
    return "convert it with torch.as_tensor(...)" if name == "input" else "without biases pass bias=False"


def _state_hint(call: GruCall, stacked: int, batch: int) -> str:
    """The hint for an hx of a wrong shape."""
    hx = call.hx
    if hx.ndim == 2 and hx.shape[0] == batch and stacked == 1:  # noqa: PLR2004
        return "pass hx[None], with the axis of layers"
    dense = call.batch_sizes is None and call.cu_seqlens is None
    if hx.ndim == 3 and dense and hx.shape[1] == call.input.shape[1 if call.batch_first else 0]:  # noqa: PLR2004
        return f"if input is {'[seq, batch' if call.batch_first else '[batch, seq'}, features], pass batch_first={not call.batch_first}"
    return "give each layer, direction and sequence its state; hx has no batch_first"


def _named(call: GruCall) -> list[tuple[str, Any]]:
    return [(f"weights[{index}]", weight) for index, weight in enumerate(call.weights)]


def _batch(call: GruCall) -> int:
    """The number of sequences of a call: dense, packed or thd."""
    if call.batch_sizes is not None and call.cu_seqlens is not None:
        raise ValueError("give batch_sizes (of a PackedSequence) or cu_seqlens, not both, got both: leave one out")
    if call.max_seqlen is not None and call.cu_seqlens is None:
        raise ValueError(
            f"max_seqlen is for cu_seqlens, which is not given, got {call.max_seqlen}: leave it out, or pass cu_seqlens"
        )
    if call.batch_sizes is None and call.cu_seqlens is None:
        if call.input.ndim != 3:  # noqa: PLR2004
            raise ValueError(
                f"input must be {'[batch, seq' if call.batch_first else '[seq, batch'}, features], got "
                f"{list(call.input.shape)}; for one sequence add a batch of 1, for packed ones give batch_sizes or cu_seqlens"
            )
        seq, batch = call.input.shape[:2] if not call.batch_first else (call.input.shape[1], call.input.shape[0])
        if seq < 1:
            raise ValueError(
                f"a sequence must have at least 1 step, got input of {list(call.input.shape)}: skip the call where there is none"
            )
        return batch
    if call.input.ndim != 2:  # noqa: PLR2004
        raise ValueError(f"packed input must be [rows, features], got {list(call.input.shape)}")
    if call.batch_first:
        raise ValueError(
            f"packed input has no batch axis: batch_first must be False, got {call.batch_first}: leave it out"
        )
    return _packed_batch(call) if call.cu_seqlens is None else _thd_batch(call)


def _packed_batch(call: GruCall) -> int:
    sizes = call.batch_sizes
    if not isinstance(sizes, torch.Tensor) or sizes.dtype != torch.int64 or sizes.device.type != "cpu":
        what = f"{sizes.dtype} on {sizes.device}" if isinstance(sizes, torch.Tensor) else type(sizes).__name__
        raise TypeError(
            f"batch_sizes must be an int64 tensor on the CPU, as PackedSequence has it, got {what}: pass packed.batch_sizes"
        )
    if sizes.ndim != 1 or sizes.numel() < 1:
        raise ValueError(
            f"batch_sizes must be [steps] with at least 1 step, got {list(sizes.shape)}: pass packed.batch_sizes"
        )
    if not _has_values(sizes):
        return call.hx.shape[1] if call.hx.ndim > 1 else -1  # the operator checks the values when it runs
    rows: list[int] = sizes.tolist()
    if rows[-1] < 1 or rows != sorted(rows, reverse=True):
        raise ValueError(
            f"batch_sizes must not increase and be at least 1, got {rows[:8]}: pack with torch.nn.utils.rnn, or give lengths by "
            "cu_seqlens"
        )
    if sum(rows) != call.input.shape[0]:
        raise ValueError(
            f"batch_sizes add up to {sum(rows)} rows, but input has {call.input.shape[0]}: pass data and batch_sizes of one PackedSequence"
        )
    return rows[0]


def _thd_batch(call: GruCall) -> int:
    bounds = call.cu_seqlens
    if not isinstance(bounds, torch.Tensor) or bounds.dtype != torch.int32:
        what = bounds.dtype if isinstance(bounds, torch.Tensor) else type(bounds).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor, got {what}: convert with .to(torch.int32)")
    if bounds.device != call.input.device:
        raise ValueError(
            f"cu_seqlens must be on the device of input, {call.input.device}, got {bounds.device}: move it with .to()"
        )
    if bounds.ndim != 1 or bounds.numel() < 1:
        raise ValueError(f"cu_seqlens must be [sequences + 1], got {list(bounds.shape)}: {STARTS}")
    if isinstance(call.max_seqlen, torch.Tensor):
        raise TypeError(
            "max_seqlen must be an int, got a tensor: pass max_seqlen.item(), which synchronizes with the GPU, or keep an int"
        )
    if call.max_seqlen is not None and (
        isinstance(call.max_seqlen, bool) or not hasattr(type(call.max_seqlen), "__index__")
    ):
        raise TypeError(f"max_seqlen must be an int, got {call.max_seqlen!r}: convert it with int(...)")
    if call.max_seqlen is None or call.max_seqlen < 0:
        raise ValueError(
            f"cu_seqlens needs max_seqlen, the longest length, got {call.max_seqlen}: reading it from a GPU would synchronize, so pass it as "
            "an int, or any bound that is as long"
        )
    if bounds.device.type == "cpu" and _has_values(bounds):
        check_lengths(bounds.tolist(), call.input.shape[0], call.max_seqlen)
    return bounds.numel() - 1


def _has_values(lengths: torch.Tensor) -> bool:
    """Whether there are values to check: a tracer's tensor has none."""
    return not torch.compiler.is_dynamo_compiling() and type(lengths) is torch.Tensor


def check_lengths(bounds: list[int], rows: int, max_seqlen: int) -> None:
    """Raise ValueError if the values of cu_seqlens do not fit the rows of the input and max_seqlen."""
    if bounds[0] != 0 or bounds[-1] != rows:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at the {rows} rows of input, got {bounds[0]} and {bounds[-1]}: if these are lengths, {STARTS}"
        )
    lengths = [after - before for before, after in itertools.pairwise(bounds)]
    if min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens must not decrease, but one length is {min(lengths)}: if these are lengths, {STARTS}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen={max_seqlen} is less than the longest length, {max(lengths)}: pass at least that")


def _check_weights(call: GruCall, stacked: int, directions: int) -> None:
    hidden, a_set = call.hx.shape[2], 4 if call.has_biases else 2
    if len(call.weights) != stacked * a_set:
        raise ValueError(
            f"weights must be {a_set} tensors for each of {stacked} layers and directions "
            f"({'w_ih, w_hh, b_ih, b_hh' if call.has_biases else 'w_ih, w_hh'}), got {len(call.weights)}: "
            + _count_hint(call, stacked)
        )
    for index, weight in enumerate(call.weights):
        part, layer = index % a_set, index // a_set // directions
        features = call.input.shape[-1] if layer == 0 else directions * hidden
        wanted = ((3 * hidden, features), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,))[part]
        if weight.shape != wanted:
            _check_beside_weights(call, hidden)
            raise ValueError(
                f"weights[{index}], {('w_ih', 'w_hh', 'b_ih', 'b_hh')[part]} of layer {layer}, must be {list(wanted)} for "
                f"input of {list(call.input.shape)} and hx of {list(call.hx.shape)}, got {list(weight.shape)}"
            )


def _count_hint(call: GruCall, stacked: int) -> str:
    """The hint for a wrong number of weights."""
    count, without = len(call.weights), "without" if call.has_biases else "with"
    if count == stacked * (2 if call.has_biases else 4):
        return f"for weights {without} biases pass bias={not call.has_biases}"
    return "pass tuple(module.parameters()) of a torch.nn.GRU, with its num_layers, bias and bidirectional"


def _check_beside_weights(call: GruCall, hidden: int) -> None:
    """Raise ValueError for hx or input where the first layer's weights fit each other, and not these."""
    w_ih, w_hh = call.weights[:2]
    if w_ih.ndim != 2 or w_hh.ndim != 2 or w_ih.shape[0] != w_hh.shape[0] or w_hh.shape[0] != 3 * w_hh.shape[1]:  # noqa: PLR2004
        return
    if hidden != w_hh.shape[1]:
        raise ValueError(
            f"hx must have hidden = {w_hh.shape[1]}, as w_hh of {list(w_hh.shape)} has, got {list(call.hx.shape)}: give the state of "
            "these weights"
        )
    if call.input.shape[-1] != w_ih.shape[1]:
        raise ValueError(
            f"input must have {w_ih.shape[1]} features, as weights[0], w_ih of layer 0, of {list(w_ih.shape)} takes, got "
            f"{list(call.input.shape)}: features are the last axis of input"
        )


def _check_alike(call: GruCall) -> None:
    """Check that all tensors have one device and one floating point dtype; under autocast dtypes may differ."""
    device, dtype = call.input.device, call.input.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"input must be floating point, got {dtype}: convert with .to(hx.dtype)")
    casts = autocast_dtype(device.type) is not None
    if call.input.element_size() < 2 and not casts:  # noqa: PLR2004 - PyTorch has no arithmetic in 8 bits
        raise TypeError(
            f"input must be floating point of at least 16 bits, got {dtype}: convert all with .to(torch.bfloat16)"
        )
    for name, tensor in (("hx", call.hx), *_named(call)):
        if tensor.device != device:
            raise ValueError(
                f"all tensors must be on the device of input, {device}; {name} is on {tensor.device}: move it with .to()"
            )
        if tensor.dtype != dtype and not (casts and tensor.dtype.is_floating_point):
            raise TypeError(
                f"all tensors must have the dtype of input, {dtype}; {name} is {tensor.dtype}: convert one with .to(), or use torch.autocast"
            )
