"""Calls of known properties that PyTorch's operators serve: checks that depend on no value are made once.

On a CPU the checks of a small call take longer than its rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tuned.calls.overlap import refuse_overlap
from tuned.calls.rope.arguments import Given, Prepared, Settings, Sources, offset_limits, packed_heads
from tuned.calls.rope.mistakes import half_of_the_head, heads_may_come_first
from tuned.families.rope.in_order import rotation
from tuned.launching.overwrite import apart, overwrite, refuse_inference
from tuned.launching.plan import tracing, transforms_active
from tuned.launching.rehearsal import listening
from tuned.lookup.gpu import why_not_plain

_autocast = torch.is_autocast_enabled


def eager_run(
    prepared: Prepared, given: Given, settings: Settings, sources: Sources, checked: Callable[..., Any]
) -> Callable[..., Any]:
    """``Plan.run`` of calls with the properties of a checked call, by PyTorch's operators.

    If checks read values or warn, or if a tensor needs a gradient, it is ``checked``, which checks each call and notes
    it for a thread that listens.
    """
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    kind, spec, call = given.x.device.type, prepared.eager_spec, prepared.call
    if (
        kind == "meta"
        or forward_ad._current_level >= 0  # noqa: SLF001 - a part of a call's properties
        or sources.positions is not None
        or sources.angles == "cos_sin_cache"  # the values of a cache are checked
        or (settings.kv_heads is not None and settings.inplace)
        or any(why_not_plain(t) is not None for t in tensors)
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        # Each call warns.
        or heads_may_come_first(call.x, given, settings, call.angle_rows, spec.positions)
        or half_of_the_head(given, settings, spec.rotary_dim, spec.head_dim)
    ):
        return checked
    inplace, packed = settings.inplace, settings.kv_heads is not None
    seen = call.x if packed else given.x
    rotate = rotation(spec, call, settings.tensor_format, seen, given.key, getattr(given, sources.angles))
    if rotate is None:
        return checked
    low, high = offset_limits(spec, settings, call.angle_rows, call.seq)

    def run(  # noqa: PLR0913 - the arguments of Plan.run
        x: Any, key: Any, angles: Any, sin: Any, cu_seqlens: Any, positions: Any, offset: Any, *rest: Any
    ) -> Any:
        # A call's properties do not tell these things, not even "meta": its device number is -1, as a CPU's is.
        meta = x.is_meta or angles.is_meta or (key is not None and key.is_meta) or (sin is not None and sin.is_meta)
        other = meta or not low <= offset <= high or transforms_active() or tracing() is not None or _autocast(kind)
        if other or listening() is not None:
            return checked(x, key, angles, sin, cu_seqlens, positions, offset, *rest)
        if inplace and key is not None:
            refuse_overlap(x, key)
        out, key_out = rotate(packed_heads(x, settings)[0] if packed else x, key, angles, sin, offset)
        if inplace:
            refuse_inference(x, key)
            overwrite(x, out)
            if key_out is None:
                return x
            overwrite(key, key_out)
            return x, key
        if out.shape != x.shape:  # a packed qkv with an axis of 3
            out = apart(out.view(x.shape))
        return out if key is None else (out, key_out)

    return run
