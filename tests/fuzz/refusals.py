"""Where a drop-in refuses other calls than its original: one table, with a reason for each. The fuzz draws such calls.

The original's kind of error is that of its source (of 2025): an assert is AssertionError. The rule everywhere is that
what an original asserts is a ValueError or TypeError here, raised before anything is written, because asserts disappear
under ``python -O``. Where an original refuses nothing and accesses foreign memory, an error is right.
"""

from __future__ import annotations

import dataclasses

ASSERTED = "what is asserted there is a ValueError or TypeError here"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A wrong call."""

    function: str
    what: str
    theirs: type[BaseException] | None  # None: no error, but foreign memory or wrong numbers
    ours: tuple[type[BaseException], ...]
    why: str = ASSERTED


_REFUSED = (TypeError, ValueError)
TABLE = (
    Refusal("apply_rotary_pos_emb", "fewer rows than tokens", AssertionError, _REFUSED),
    Refusal("apply_rotary_pos_emb", "thd without cu_seqlens", AssertionError, _REFUSED),
    Refusal("apply_rotary_pos_emb", "unknown format", ValueError, _REFUSED, "the same"),
    Refusal(
        "apply_rotary_pos_emb", "angles wider than a head", RuntimeError, _REFUSED, "shapes that do not broadcast there"
    ),
    Refusal("apply_rotary_pos_emb", "odd width", RuntimeError, _REFUSED, "halves that do not broadcast there"),
    Refusal("apply_rotary_pos_emb", "no freqs", AttributeError, (AttributeError, TypeError, ValueError), "the same"),
    Refusal("apply_rotary_emb", "fewer rows than tokens", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb", "angles wider than a head", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb", "sin unlike cos", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb", "offsets of another batch", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb", "offset past the table", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb", "offset below 0", None, _REFUSED, "theirs reads memory before the table"),
    Refusal("apply_rotary_emb", "float offsets", AssertionError, _REFUSED),
    Refusal(
        "apply_rotary_emb", "three axes and no cu_seqlens", ValueError, _REFUSED, "the same: too few values to unpack"
    ),
    Refusal(
        "apply_rotary_emb",
        "an expanded x in place",
        None,
        (ValueError,),
        "elements that share memory: each is turned several times there",
    ),
    Refusal("apply_rotary_emb_qkv_", "four axes and no num_heads_q", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb_qkv_", "odd heads left", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb_qkv_", "an axis of 4", AssertionError, _REFUSED),
    Refusal("apply_rotary_emb_qkv_", "cos_k unlike cos", AssertionError, _REFUSED, "refused before q is written"),
    Refusal("apply_rotary_emb_kv_", "an axis of 3", AssertionError, _REFUSED),
    Refusal("liger_rotary_pos_emb", "unsqueeze_dim of 2", None, (ValueError,), "theirs ignores it and rotates wrongly"),
    Refusal("liger_rotary_pos_emb", "narrower cos", None, (ValueError,), "theirs reads past a row"),
    Refusal("liger_rotary_pos_emb", "fewer rows than tokens", None, _REFUSED, "theirs reads past the table"),
    Refusal("rotary_embedding", "heads that do not fit", RuntimeError, (ValueError,), "TORCH_CHECK there"),
    Refusal("rotary_embedding", "rotation past the head", None, (ValueError,), "theirs writes into the next head"),
    Refusal("rotary_embedding", "positions of another number", RuntimeError, (ValueError,), "TORCH_CHECK there"),
    Refusal("rotary_embedding", "float positions", RuntimeError, (TypeError,), "data_ptr of another type there"),
)

# Calls that PyTorch's modules refuse and tuned.nn takes, by a part of PyTorch's message.
TAKEN = {
    "rnn: hx is not contiguous": "cuDNN wants the state in one piece; kernels read it as it lies",
    "cudnn RNN backward can only be called in training mode": "a gradient in eval mode, which ours gives",
    "view size is not compatible with input tensor's size and stride": "of weights that cuDNN's wrapper cannot view flat",
}


def of(function: str) -> tuple[Refusal, ...]:
    """The refusals of one drop-in."""
    return tuple(r for r in TABLE if r.function == function)
