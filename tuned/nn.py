"""GRU modules that run on tuned's kernels, and ways to make an existing model's GRUs do so.

Use a module, patch torch inside a block, or change a model in place::

    gru = tuned.nn.GRU(256, 512, num_layers=2)   # the constructor, state_dict, shapes and numerics of torch.nn.GRU
    with tuned.nn.patched():                     # the model is not changed
        output = model(x)
    tuned.nn.replace(model)                      # changes its modules in place; tuned.nn.restore(model) undoes it

GRUs train with kernels too, where a row of this GPU says that these are faster. PyTorch's operators run on a CPU, for
single steps that need a gradient, and for calls that no kernel serves: ``tuned.explain(module, x)`` tells which, and
why. If our checks refuse the arguments of a call, PyTorch's module or function gets the call, and raises its own error
or serves it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch.nn.utils.rnn import PackedSequence

from tuned import dispatch
from tuned.calls.gru import plan as gru_plan
from tuned.calls.gru import training as gru_training
from tuned.calls.gru_cell import run as gru_cell_run
from tuned.calls.products import autocast_dtype
from tuned.calls.refusal import check_dense, check_flag, refuses, was_refused
from tuned.launching.plan import modes, tracing
from tuned.launching.zeros import zeros
from tuned.lookup.gpu import why_eager

_ARGUMENTS = (TypeError, ValueError)


def _twin(module: torch.nn.Module, kind: type[torch.nn.Module]) -> torch.nn.Module:
    """A module of another class that shares the parameters, hooks and settings of this one."""
    twin = kind.__new__(kind)
    twin.__dict__ = module.__dict__
    return twin


def _scripted(module: torch.nn.Module, kind: type[torch.nn.Module]) -> torch.nn.Module:
    """The module of torch.nn that torch.jit.script compiles in place of ours, and leaves in the model.

    For a subclass with a forward of its own this is the module itself, which torch.jit.script compiles or refuses.
    """
    return _twin(module, kind) if _has_ours(type(module)) else module


class GRU(torch.nn.RNNBase):
    """torch.nn.GRU: the same arguments, parameters, inputs, outputs and random numbers.

    ``recompute``, which torch.nn.GRU lacks, is for training: the backward multiplies the input by its weights a second
    time, so that the forward keeps 3 * D * H values fewer for each layer and each step of each sequence (D directions,
    H units).

    It is not a subclass of torch.nn.GRU, since torch.compile does not trace any instance of that class. Traced, this
    module is a single operator, or one per layer if dropout is active or a gradient is needed. A PackedSequence is a
    graph break for torch.compile. Weights are read in place, whether they lie in one chunk of memory or not.
    """

    def __init__(  # noqa: PLR0913 - the arguments of torch.nn.GRU
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002
        batch_first: bool = False,  # noqa: FBT001, FBT002
        dropout: float = 0.0,
        bidirectional: bool = False,  # noqa: FBT001, FBT002
        device: Any = None,
        dtype: Any = None,
        *,
        recompute: bool = False,
        **others: Any,
    ) -> None:
        check_flag("recompute", recompute)
        if others:  # torch.nn.GRU raises the error for unknown arguments
            torch.nn.GRU(input_size, hidden_size, device="meta", **others)
        super().__init__(
            "GRU",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )
        self.recompute = recompute

    __prepare_scriptable__ = functools.partialmethod(_scripted, torch.nn.GRU)

    def forward(
        self,
        input: Any,  # noqa: A002
        hx: torch.Tensor | None = None,
        *,
        resets: Any = None,
    ) -> tuple[Any, torch.Tensor]:
        """The whole sequence.

        Args:
            input: ``[T, B, I]``, ``[B, T, I]`` batch_first, ``[T, I]`` unbatched, or a PackedSequence.
            hx: the first hidden states, ``[L * D, B, H]``, ``[L * D, H]`` unbatched; zero if not given.
            resets: bool, with the axes of input except the last, or a PackedSequence packed as input is: the state is 0
                before the steps that are marked. torch.nn.GRU has no such argument. ``tuned.dispatch.gru`` says more.

        Returns:
            output, shaped like input except for its last axis, which is D * H; and h_n, shaped like hx.

        Raises:
            RuntimeError, ValueError: a shape or dtype does not fit. The error is torch.nn.GRU's; with resets, and while
                torch.compile traces, it is ours.
        """
        if not torch.compiler.is_dynamo_compiling():
            found: Any = None
            if type(input) is not PackedSequence:
                found = _gru_at_once(self, input, hx, resets)
            elif resets is None:
                found = _packed_at_once(self, input, hx)
            if found is None:
                found = _leaf_of(self, input, hx, resets)
            if found is not None:
                return found  # type: ignore[no-any-return]
        try:
            given, named, packed = gru_arguments(self, input, hx, resets)
            output, h_n = dispatch.gru(*given, **named)
        except _ARGUMENTS as error:
            if resets is not None or not was_refused(error):
                raise
            return _by_pytorch(self, input, hx)
        if packed is not None:
            _, batch_sizes, sorted_indices, unsorted_indices = packed
            rows = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
            return rows, self.permute_hidden(h_n, unsorted_indices)
        if input.dim() == 2:  # noqa: PLR2004
            return output.squeeze(0 if self.batch_first else 1), h_n.squeeze(1)
        return output, h_n

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, as torch.nn.GRU prints them."""
        return super().extra_repr() + (", recompute=True" if getattr(self, "recompute", False) else "")

    def _get_name(self) -> str:
        return _printed(self)


class GRUCell(torch.nn.GRUCell):
    """torch.nn.GRUCell; its input may also be a tuple of segments, taken as if concatenated in the last axis."""

    __prepare_scriptable__ = functools.partialmethod(_scripted, torch.nn.GRUCell)

    def forward(  # type: ignore[override]
        self,
        input: torch.Tensor | tuple[torch.Tensor, ...],  # noqa: A002
        hx: torch.Tensor | None = None,
        *,
        resets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step.

        Args:
            input: ``[B, I]`` or ``[I]``; or segments ``[B, k_i]`` or ``[k_i]`` whose k_i add up to I.
            hx: the hidden state, ``[B, H]`` or ``[H]``; zero if not given.
            resets: bool ``[B]`` or ``[]``: the rows whose state is taken as 0. torch.nn.GRUCell has no such argument.

        Returns:
            The next hidden state, ``[B, H]`` or ``[H]``.

        Raises:
            RuntimeError, ValueError: a shape or dtype does not fit; the error is torch.nn.GRUCell's, or ours for segments.
        """
        if not torch.compiler.is_dynamo_compiling():
            known = _cell_at_once(self, input, hx) if resets is None else None
            if known is None:
                known = _leaf_of(self, input, hx, resets)
            if known is not None:
                return known  # type: ignore[no-any-return]
        try:
            given, batched = cell_arguments(self, input, hx)
            out = dispatch.gru_cell(*given, resets=cell_marks(resets, batched))
        except _ARGUMENTS as error:
            if resets is not None or isinstance(input, tuple) or not was_refused(error):
                raise
            if isinstance(input, torch.Tensor) and input.dim() == 1 and _of_one_unit(hx, 2):
                raise
            return torch.nn.GRUCell.forward(self, input, hx)
        return out if batched else out.squeeze(0)

    def _get_name(self) -> str:
        return _printed(self)


def _printed(module: torch.nn.Module) -> str:
    """The name of a module in a printed model."""
    return f"tuned.nn.{type(module).__name__}"


def _leaf_of(module: torch.nn.Module, input: Any, hx: Any, resets: Any) -> Any:  # noqa: A002
    """The call that torch.fx records for a module, as for all modules of torch.nn; None if torch.fx does not trace."""
    given = (input, *(() if hx is None and resets is None else (hx,)))
    # Segments, and a PackedSequence, are tuples.
    parts = [t for part in (*given, resets) for t in (part if isinstance(part, tuple) else (part,))]
    tracer = next((t.tracer for t in parts if isinstance(t, torch.fx.Proxy)), None)
    if tracer is None:
        return None
    named = {} if resets is None else {"resets": resets}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), given, named)  # type: ignore[attr-defined]


def _parameters(module: torch.nn.Module, names: Sequence[str]) -> list[Any] | None:
    """The parameters of these names; None if one is no parameter, as with weight norm."""
    try:
        return [module._parameters[name] for name in names]  # noqa: SLF001
    except KeyError:
        return None


def _gru_at_once(module: GRU, x: Any, hx: Any, resets: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(output, h_n) of a repeated call, without checks: by PyTorch's operator or by a cached plan; None for any other call.

    It takes only calls that every check would accept: a plain dense input, weights that are parameters, one dtype.
    """
    weights = _parameters(module, module._flat_weights_names)  # noqa: SLF001
    if weights is None or any(t is not None and type(t) is not torch.Tensor for t in (hx, resets)):
        return None
    if type(x) is not torch.Tensor or x.dim() != 3 or x.dtype != weights[0].dtype or x.is_nested:  # noqa: PLR2004
        return None  # a nested tensor may have no sizes
    layers, bidirectional, batch_first = module.num_layers, module.bidirectional, module.batch_first
    expected = (layers * (2 if bidirectional else 1), x.shape[0 if batch_first else 1], module.hidden_size)
    settings = (module.bias, layers, bidirectional, batch_first)
    dropout = module.dropout if module.training and layers > 1 else 0.0
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*weights, x, hx))
    if hx is None:
        hx = zeros(expected, x)
    left: Any
    if resets is not None:  # PyTorch's operator takes no resets
        left = False
    elif needed and not x.is_cuda:
        accepted = x.numel() and x.shape[2] == module.input_size and hx.shape == expected and hx.dtype == x.dtype
        left = accepted and (mode := modes(x.get_device())) is not None and not mode[0]
    elif needed:
        left = gru_plan.is_left(x, hx, weights, settings, gradient=True)
    else:
        left = not dropout and gru_plan.is_left(x, hx, weights, settings)
    if not left:
        if needed and not dropout:
            return gru_training.known(x, hx, weights, settings, resets, recompute=getattr(module, "recompute", False))
        return None if dropout else gru_plan.known(x, hx, weights, settings, resets)
    if not all(t.is_contiguous() for t in (hx, *weights)):  # tuned.calls.gru.eager says why
        return None
    train = dropout > 0 or needed
    return torch.gru(x, hx, weights, module.bias, layers, dropout, train, bidirectional, batch_first)


def _packed_at_once(  # noqa: PLR0911 - one return per way
    module: GRU, packed: PackedSequence, hx: Any
) -> tuple[PackedSequence, torch.Tensor] | None:
    """``_gru_at_once`` for packed sequences."""
    if tracing() is not None:  # PyTorch's module leaves the number of sequences open
        return _by_pytorch(module, packed, hx)
    weights = _parameters(module, module._flat_weights_names)  # noqa: SLF001
    x, batch_sizes, sorted_indices, unsorted_indices = packed
    layers, bidirectional = module.num_layers, module.bidirectional
    if type(x) is not torch.Tensor or (hx is not None and type(hx) is not torch.Tensor):
        return None
    settings = (module.bias, layers, bidirectional, False)
    dropout = module.training and module.dropout and layers > 1
    if weights is None or not batch_sizes.numel():
        return None
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, hx, *weights))
    left = gru_plan.is_left(x, None, weights, settings, batch_sizes.numel(), gradient=train)
    if dropout or (not left and (train or x.dtype != weights[0].dtype)):
        return None
    expected = (layers * (2 if bidirectional else 1), int(batch_sizes[0]), module.hidden_size)
    if hx is None:
        hx = zeros(expected, x)
    elif hx.shape != expected:
        return None
    else:
        hx = module.permute_hidden(hx, sorted_indices)
    if not left:
        made = gru_plan.known(x, hx, weights, settings, None, batch_sizes)
        if made is None:
            return None
        output, h_n = made
    elif all(t.is_contiguous() for t in (hx, batch_sizes, *weights)):  # tuned.calls.gru.eager says why
        output, h_n = torch.gru(x, batch_sizes, hx, weights, module.bias, layers, 0.0, train, bidirectional)
    else:
        return None
    rows = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
    return rows, module.permute_hidden(h_n, unsorted_indices)


def _by_pytorch(module: GRU, input: Any, hx: Any) -> Any:  # noqa: A002
    """What the forward of torch.nn.GRU returns, or its error."""
    if isinstance(input, PackedSequence):  # torch.gru reads the memory of batch_sizes one value after the other
        input = input._replace(batch_sizes=input.batch_sizes.contiguous())  # noqa: A001
    return torch.nn.GRU.forward(module, input, hx)  # type: ignore[call-overload]


@refuses
def gru_arguments(
    module: torch.nn.RNNBase,
    input: Any,  # noqa: A002
    hx: torch.Tensor | None = None,
    resets: Any = None,
) -> tuple[tuple[Any, ...], dict[str, Any], PackedSequence | None]:
    """(arguments, keyword arguments) that a GRU module passes to tuned.dispatch.gru, and its PackedSequence or None.

    Raises:
        TypeError, ValueError: torch.nn.GRU would refuse the arguments, or would treat them differently.
    """
    packed = input if isinstance(input, PackedSequence) else None
    batch_sizes = None if packed is None else packed.batch_sizes
    x: Any = input if packed is None else packed.data
    if not isinstance(x, torch.Tensor) or not (hx is None or isinstance(hx, torch.Tensor)):
        raise TypeError(
            f"input and hx must be tensors, got {type(x).__name__} and {type(hx).__name__}: convert them with torch.as_tensor(...)"
        )
    check_dense({"input": x, "hx": hx})
    if packed is None:
        x, hx = _batched(module, x, hx)
    elif hx is not None:
        hx = module.permute_hidden(hx, packed.sorted_indices)
    if x.shape[-1] != module.input_size:
        raise ValueError(
            f"input must have input_size={module.input_size} features, got {x.shape[-1]}: they are its last axis"
        )
    # Not module._flat_weights: torch.func.functional_call and parametrizations do not update it.
    weights = tuple(getattr(module, name) for name in module._flat_weights_names)  # noqa: SLF001
    expected = module.get_expected_hidden_size(x, batch_sizes)
    if hx is None:
        hx = torch.zeros(expected, dtype=x.dtype, device=x.device)
    elif tuple(hx.shape) != expected:
        raise ValueError(
            f"hx must be [num_layers * directions, batch, hidden] = {list(expected)}, got {list(hx.shape)}: leave it out for zeros; it "
            "has no batch_first"
        )
    if resets is not None:
        resets = _marks(module, input, resets)
    if x.dtype != weights[0].dtype and autocast_dtype(x.device.type) is None:
        raise ValueError(
            f"input is {x.dtype} and the weights are {weights[0].dtype}: convert one with .to(), or use torch.autocast"
        )
    named = {
        "bias": module.bias,
        "num_layers": module.num_layers,
        "dropout": module.dropout,
        "training": module.training,
        "bidirectional": module.bidirectional,
        "batch_first": module.batch_first and packed is None,
        "batch_sizes": batch_sizes,
        "recompute": getattr(module, "recompute", False),  # a module that was replaced lacks it
        "resets": resets,
    }
    return (x, hx, weights), named, packed


def _marks(module: torch.nn.RNNBase, input: Any, resets: Any) -> Any:  # noqa: A002
    """The resets of a call as tuned.dispatch.gru takes them."""
    if isinstance(input, PackedSequence) != isinstance(resets, PackedSequence):
        raise TypeError(
            "resets of a PackedSequence must be one too, packed with the same lengths, and of a tensor a tensor; got "
            f"{type(input).__name__} and {type(resets).__name__}: pack both, or neither"
        )
    if not isinstance(resets, (torch.Tensor, PackedSequence)):
        raise TypeError(
            f"resets must be a bool tensor, got {type(resets).__name__}: convert it with torch.as_tensor(...)"
        )
    if not isinstance(resets, PackedSequence):
        if input.dim() != 2:  # noqa: PLR2004
            return resets
        if resets.shape != input.shape[:1]:
            raise ValueError(
                f"resets of input without a batch axis must be [{input.shape[0]}], a mark for each step, got {list(resets.shape)}: "
                "give both a batch axis, or neither"
            )
        return resets.unsqueeze(0 if module.batch_first else 1)
    ours, theirs = resets.sorted_indices, input.sorted_indices
    same = (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))
    if not same or not torch.equal(resets.batch_sizes, input.batch_sizes):
        raise ValueError(
            f"resets must be packed with the lengths, and in the order, of input, got batch_sizes {resets.batch_sizes[:8].tolist()} for "
            f"{input.batch_sizes[:8].tolist()}: pack both with the same lengths and the same enforce_sorted"
        )
    return resets.data


def _cell_at_once(module: GRUCell, x: Any, hx: Any) -> torch.Tensor | None:  # noqa: PLR0911 - one return per way
    """The next state of a repeated step, without checks, as in ``_gru_at_once``; None for any other step."""
    segments = x if type(x) is tuple else (x,)
    if any(type(t) is not torch.Tensor for t in segments) or (hx is not None and type(hx) is not torch.Tensor):
        return None
    parameters = module._parameters  # noqa: SLF001
    try:
        w_ih, w_hh, b_ih, b_hh = (
            parameters["weight_ih"],
            parameters["weight_hh"],
            parameters["bias_ih"],
            parameters["bias_hh"],
        )
    except KeyError:  # as with weight norm
        return None
    if type(x) is tuple:
        if hx is None or hx.dim() != 2 or not x or any(t.dim() != 2 for t in x):  # noqa: PLR2004
            return None
        return gru_cell_run.known(x, hx, w_ih, w_hh, b_ih, b_hh, False)  # type: ignore[no-any-return] # noqa: FBT003
    if x.is_nested:  # it may have no sizes, at which ``is_left`` would end the process
        return None
    if hx is None:
        hx = torch.zeros(*x.shape[:-1], module.hidden_size, dtype=x.dtype, device=x.device)
    if gru_cell_run.is_left(x, hx, w_ih, w_hh, b_ih, b_hh):
        return torch.gru_cell(x, hx, w_ih, w_hh, b_ih, b_hh)  # type: ignore[arg-type]
    if x.dim() != 2 or hx.dim() != 2:  # noqa: PLR2004
        return None
    weights = w_ih, w_hh, b_ih, b_hh
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*weights, x, hx))
    if not needed and why_eager(x, supported_dtype=True) is None:
        return gru_cell_run.known(x, hx, w_ih, w_hh, b_ih, b_hh, False)  # type: ignore[no-any-return] # noqa: FBT003
    return None if modes(x.get_device()) is None else torch.gru_cell(x, hx, *weights)  # type: ignore[arg-type]


def _batched(module: torch.nn.RNNBase, x: torch.Tensor, hx: torch.Tensor | None) -> tuple[Any, Any]:
    """Input and state with a batch axis."""
    if x.dim() not in (2, 3):
        raise ValueError(
            f"input must be 3-D, or 2-D for one sequence without a batch axis, got {x.dim()}-D: reshape it"
        )
    if hx is not None and hx.dim() != x.dim():
        raise ValueError(
            f"for {x.dim()}-D input hx must be {x.dim()}-D too, got {hx.dim()}-D: give both a batch axis, or neither"
        )
    if x.dim() == 3:  # noqa: PLR2004
        return x, hx
    return x.unsqueeze(0 if module.batch_first else 1), None if hx is None else hx.unsqueeze(1)


@refuses
def cell_arguments(
    module: torch.nn.GRUCell,
    input: torch.Tensor | tuple[torch.Tensor, ...],  # noqa: A002
    hx: torch.Tensor | None = None,
) -> tuple[tuple[Any, ...], bool]:
    """(the arguments that a GRUCell module passes to tuned.dispatch.gru_cell, whether input has a batch axis).

    Raises:
        TypeError, ValueError: torch.nn.GRUCell would refuse the arguments.
    """
    segments = input if isinstance(input, tuple) else (input,)
    for t in (*segments, *(() if hx is None else (hx,))):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"input and hx must be tensors, got {type(t).__name__}: segments are a tuple of tensors")
    if not segments:
        raise ValueError(
            "input must have at least one segment, got an empty tuple: pass a tensor, or a tuple of tensors"
        )
    check_dense({f"input[{index}]": t for index, t in enumerate(segments) if t.is_nested})
    axes = {t.dim() for t in segments}
    if len(axes) > 1 or not axes <= {1, 2}:
        raise ValueError(
            f"input must be 1-D or 2-D, all segments alike, got {[t.dim() for t in segments]}: give all a batch axis, or none"
        )
    batched = axes == {2}
    if hx is not None and hx.dim() != (2 if batched else 1):
        raise ValueError(
            f"hx must have as many axes as input, {2 if batched else 1}, got {hx.dim()}: give both a batch axis, or neither"
        )
    if not batched:
        segments = tuple(t.unsqueeze(0) for t in segments)
    first = segments[0]
    if hx is None:
        dtype = first.dtype  # if dtypes differ, under autocast: the dtype that concatenation gives
        for t in segments[1:]:
            dtype = torch.promote_types(dtype, t.dtype)
        hx = torch.zeros(first.shape[0], module.hidden_size, dtype=dtype, device=first.device)
    elif not batched:
        hx = hx.unsqueeze(0)
    x = segments if isinstance(input, tuple) else first
    return (x, hx, module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh), batched


@refuses
def cell_marks(resets: Any, batched: bool) -> Any:  # noqa: FBT001
    """The resets of a step as tuned.dispatch.gru_cell takes them.

    Raises:
        ValueError: input has no batch axis, and resets is not a single mark.
    """
    if batched or not isinstance(resets, torch.Tensor):
        return resets
    if resets.dim():
        raise ValueError(
            f"resets of input without a batch axis must be [], one mark, got {list(resets.shape)}: give both a batch axis, or neither"
        )
    return resets.unsqueeze(0)


def _patched_gru(*args: Any, **kwargs: Any) -> Any:
    """torch._VF.gru while patched: (input, hx, weights, ...) or, packed, (data, batch_sizes, hx, weights, ...)."""
    if kwargs or len(args) != 9:  # noqa: PLR2004 - not how torch's modules call it
        return torch.gru(*args, **kwargs)
    packed = isinstance(args[2], torch.Tensor)
    input, *others = args  # noqa: A001
    batch_sizes = others.pop(0) if packed else None
    hx, weights, bias, num_layers, dropout, training, bidirectional, *batch_first = others
    try:
        return dispatch.gru(
            input,
            hx,
            weights,
            bias=bias,
            num_layers=num_layers,
            dropout=dropout,
            training=training,
            bidirectional=bidirectional,
            batch_first=bool(batch_first and batch_first[0]),
            batch_sizes=batch_sizes,
        )
    except _ARGUMENTS as error:
        if not was_refused(error):
            raise
        if isinstance(batch_sizes, torch.Tensor):  # torch.gru reads its memory one value after the other
            args = (input, batch_sizes.contiguous(), *args[2:])
        return torch.gru(*args)


def _patched_gru_cell(*args: Any, **kwargs: Any) -> Any:
    """torch._VF.gru_cell while patched."""
    if kwargs:
        return torch.gru_cell(*args, **kwargs)
    try:
        return dispatch.gru_cell(*args)
    except _ARGUMENTS as error:
        if not was_refused(error) or _of_one_unit(args[1], 3):
            raise
        return torch.gru_cell(*args)


def _of_one_unit(hx: Any, axes: int) -> bool:
    """Whether a state with one axis too many would pass the checks of torch.nn.GRUCell, which then ends the process."""
    return isinstance(hx, torch.Tensor) and hx.dim() == axes and hx.numel() == 1


_PATCHES = {"gru": _patched_gru, "gru_cell": _patched_gru_cell}


def _scriptable() -> None:
    """Register the patched functions with torch.jit.script as PyTorch's operators, like the functions of torch._VF.

    Otherwise torch.jit.script would try to compile them, which fails, and it never retries a class that failed.
    """
    from torch.jit import _builtins  # noqa: PLC0415

    for name, function in _PATCHES.items():
        _builtins._register_builtin(function, f"aten::{name}")  # noqa: SLF001 - no public way


_lock = threading.Lock()
_depth = 0  # patched() blocks that are active
_before: dict[
    str, Any
] = {}  # attributes of these names in torch._VF itself; usually none, since torch._VF looks them up elsewhere


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Inside, torch.nn.GRU, torch.nn.GRUCell and other callers of torch._VF.gru and gru_cell run on tuned's kernels.

    The patch holds for the whole process, other threads included, until the last block is left. Blocks may be nested.
    Every torch.nn.GRU is a graph break for torch.compile, patched or not; if that matters, use ``replace``.
    torch.jit.script and torch.jit.trace keep PyTorch's operators.
    """
    global _depth  # noqa: PLW0603 - the patch is one for the process
    functions = vars(torch._VF)  # noqa: SLF001
    with _lock:
        _depth += 1
        if _depth == 1:
            _scriptable()
            _before.update({name: functions[name] for name in _PATCHES if name in functions})
            functions.update(_PATCHES)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name in _PATCHES:
                    del functions[name]
                functions.update(_before)
                _before.clear()


def is_patched() -> bool:
    """Whether a ``patched`` block is active."""
    return _depth > 0


_SWAPS: dict[type, type] = {torch.nn.GRU: GRU, torch.nn.GRUCell: GRUCell}
_BACK = {ours: theirs for theirs, ours in _SWAPS.items()}
# Methods that the forward of torch.nn.GRU or GRUCell calls, and that forward itself.
_ASKED = (
    "forward",
    "check_forward_args",
    "check_input",
    "check_hidden_size",
    "get_expected_hidden_size",
    "permute_hidden",
)
_OURS, _THEIRS = (
    "_tuned_nn_ours",
    "_tuned_nn_theirs",
)  # attributes: of a subclass, its class with our forward; of that class, the subclass


def replace(model: torch.nn.Module) -> torch.nn.Module:
    """Turn every torch.nn.GRU and torch.nn.GRUCell in a model, itself included, into tuned's, in place; returns the model.

    Parameters, buffers, hooks and parametrizations stay as they are. A subclass that overrides neither forward nor the
    methods that forward calls stays a subclass, and gets our forward. A subclass that overrides any of them is left
    alone, with a warning that names it, and so is a module that has one of them as an attribute. A model that has no
    GRU or GRUCell is left alone with a warning too. Code that looks for torch.nn.GRU afterwards, such as dynamic
    quantisation, finds none. torch.jit.script compiles torch.nn's modules in place of ours, and leaves them in the
    model: call ``replace`` again after it.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _refuse_no_module("replace", model)
    left, found = [], 0
    for name, module in model.named_modules():
        kind = type(module)
        if _has_ours(kind) or isinstance(module, (GRU, GRUCell)):
            found += 1
        elif isinstance(module, (torch.nn.GRU, torch.nn.GRUCell)):
            if not vars(module).keys().isdisjoint(_ASKED) or (ours := _ours(kind)) is None:
                left.append(f"{name or 'the model'} ({kind.__qualname__})")
            else:
                module.__class__ = ours
                found += 1
    if left:
        warnings.warn(
            f"tuned.nn.replace left {', '.join(left)} as it is: a class or module with a forward, checks or __slots__ of its own may do anything there. Call "
            "tuned.nn.GRU in that forward, or run it inside tuned.nn.patched()",
            stacklevel=2,
        )
    elif not found:
        warnings.warn(
            f"tuned.nn.replace found no torch.nn.GRU or GRUCell in {type(model).__qualname__}: what calls torch.gru itself has to call "
            "tuned.dispatch.gru",
            stacklevel=2,
        )
    return model


def _refuse_no_module(name: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__qualname__}" if isinstance(model, type) else type(model).__qualname__
        raise TypeError(
            f"tuned.nn.{name} takes a torch.nn.Module, whose GRUs it changes in place, got {what}: pass the model itself; a function that "
            "calls torch.gru has to call tuned.dispatch.gru"
        )


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``replace``: turn every tuned.nn.GRU and GRUCell into torch.nn's; returns the model.

    A subclass of ours that ``replace`` did not make, such as a user's class or the class that FSDP makes, stays, with a
    warning.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _refuse_no_module("restore", model)
    left = []
    for name, module in model.named_modules():
        kind = type(module)
        theirs = _theirs(kind)
        if theirs is not kind:  # any assignment takes the forward of a module that torch.jit.trace made
            module.__class__ = theirs
        if isinstance(module, (GRU, GRUCell)) or _has_ours(theirs):
            left.append(f"{name or 'the model'} ({type(module).__qualname__})")
    if left:
        warnings.warn(
            f"tuned.nn.restore left {', '.join(left)} as it is: a subclass of tuned.nn's that tuned.nn.replace did not make. Derive it from "
            "torch.nn's; where FSDP made it, restore the model before it is sharded",
            stacklevel=2,
        )
    return model


def runs_ours(module: torch.nn.Module) -> bool:
    """Whether a module runs our forward: it was made by tuned.nn or replaced, and may have been parametrised since."""
    return _has_ours(type(module)) and "forward" not in vars(module)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the forward of a GRU or GRUCell is neither ours nor torch.nn's; also if only this module has it, as with hooks."""
    known = (torch.nn.GRU.forward, torch.nn.GRUCell.forward)
    return "forward" in vars(module) or not (_has_ours(type(module)) or type(module).forward in known)


def _has_ours(kind: Any) -> bool:
    """Whether a class has our forward."""
    return getattr(kind, "forward", None) in (GRU.forward, GRUCell.forward)


def _theirs(kind: Any) -> Any:
    """The class that ``restore`` gives to a module of this class; the class itself if it is not one of ours."""
    if not _parametrised(kind):
        return vars(kind).get(_THEIRS, _BACK.get(kind, kind))
    base = _theirs(kind.__bases__[0])
    if base is kind.__bases__[0]:
        return kind
    known = vars(kind).get(_THEIRS)
    if known is not None and _properties(known) == _properties(kind):
        return known
    return _class_like(kind, base, _copied(kind))  # parametrizations have come or gone since it was replaced


def _parametrised(kind: Any) -> bool:
    """Whether torch.nn.utils.parametrize made a class. It makes one for each module, and goes back to its first base."""
    return bool(vars(kind).get("__module__") == torch.nn.utils.parametrize.__name__)


def _properties(kind: Any) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, property)}


def _copied(kind: Any) -> dict[str, Any]:
    left = ("__dict__", "__weakref__", _OURS, _THEIRS)
    return {name: value for name, value in vars(kind).items() if name not in left}


def _class_like(kind: Any, base: Any, own: dict[str, Any]) -> Any:
    """A class named like ``kind`` on ``base``. No metaclass or ``__init_subclass__`` of a user runs."""
    lowest = (
        torch.nn.GRU
        if issubclass(base, torch.nn.GRU)
        else torch.nn.GRUCell
        if issubclass(base, torch.nn.GRUCell)
        else torch.nn.RNNBase
    )
    made: Any = type.__new__(type(kind), kind.__name__, (lowest,), {**own, "__qualname__": kind.__qualname__})
    made.__bases__ = (base,)
    return made


def _reduced(module: torch.nn.Module, protocol: Any) -> Any:
    """Pickle or copy a module of a replaced subclass: as a module of that subclass, which is replaced again when made."""
    made: Any = _twin(module, vars(type(module))[_THEIRS]).__reduce_ex__(protocol)
    return made if isinstance(made, str) else (_replaced, made[:2], *made[2:])


def _replaced(make: Any, arguments: tuple[Any, ...]) -> Any:
    module = make(*arguments)
    module.__class__ = _ours(type(module))
    return module


def _ours(kind: Any) -> type | None:
    """The class that ``replace`` gives to a module of this class, or None if the class has a forward of its own."""
    theirs: Any = torch.nn.GRU if issubclass(kind, torch.nn.GRU) else torch.nn.GRUCell
    if kind is theirs:
        return _SWAPS[theirs]
    if any(getattr(kind, name, None) is not getattr(theirs, name, None) for name in _ASKED):
        return None
    if _OURS not in vars(kind):
        try:
            made = _made_ours(kind, theirs)
        except TypeError:  # the class has __slots__, and so another memory layout
            return None
        setattr(made, _THEIRS, kind)
        setattr(kind, _OURS, made)
    return vars(kind)[_OURS]  # type: ignore[no-any-return]


def _made_ours(kind: Any, theirs: Any) -> Any:
    """``_ours`` for a subclass that was not replaced before."""
    if _parametrised(kind):
        return _class_like(kind, _ours(kind.__bases__[0]), _copied(kind))
    ours = vars(_SWAPS[theirs])
    own = {"forward": ours["forward"], "__module__": kind.__module__, "__reduce_ex__": _reduced}
    if kind._get_name is torch.nn.Module._get_name:  # noqa: SLF001
        own["_get_name"] = ours["_get_name"]
    own["__prepare_scriptable__"] = functools.partialmethod(_scripted, kind)
    return _class_like(kind, kind, own)
