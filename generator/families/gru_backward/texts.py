"""Every text of a kernel of the gradient of a GRU: the product of the text axes; and how a winner is shown."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator

from tuned.families.gru.spec import LAYOUTS, GruSpec
from tuned.families.gru.variant import GruVariant
from tuned.families.gru_backward.launches import PARTS, exchange, kernel_name
from tuned.families.launch import ceil_div
from tuned.lookup.record import Winner

from ..gru.texts import LENGTHS, TAKES, exchange_lines, extra, resets_taken, shown_size
from ..text import Shown, Text, head, refusal

__all__ = ["shown_size", "texts", "wrapper"]


def texts() -> Iterator[Text]:
    """One for each layout, without and with resets."""
    for resets, layout in itertools.product((False, True), LAYOUTS):
        spec, variant = GruSpec("bfloat16", 512, layout=layout, resets=resets), GruVariant("persistent")
        yield "gru_backward", kernel_name(spec, variant), spec, variant, True


# A letter for each dimension: direction, time, batch. Packed tokens have one dimension instead of time and batch.
DIMS = {"grad_out": "tb", "grad_h_n": "lb", "grad_h_0": "lb", "resets": "tb"}
PACKED_DIMS = {**DIMS, "grad_out": "t", "resets": "t"}


def wrapper(winner: Winner, shown: Shown) -> str:
    """The function ``gru_backward`` of a winner, whose kernel stands above it."""
    spec, variant = winner.spec, winner.variant
    tokens, hidden, sets = ("seq, batch" if spec.dense else "tokens"), spec.hidden, spec.directions
    bias = ["bias_ih", "bias_hh"] if spec.bias else []
    inner = f"gates: {spec.dtype} [{sets}, {tokens}, {3 * hidden}], x @ weight_ih.T for each direction"
    also = f"before: [{sets}, {tokens}, {hidden}], that state. grad_out: [{tokens}, {sets * hidden}]"
    takes = [
        f"{inner}; hidden: the same of before and weight_hh; gates in the order r, z, n.",
        f"{also}. grad_h_n: [{sets}, batch, {hidden}].",
        f"weight_hh: [{sets}, {3 * hidden}, {hidden}].",
        f"bias_ih, bias_hh: [{sets}, {3 * hidden}]." if spec.bias else "",
        TAKES[spec.layout],
        resets_taken(spec),
        f"Returns gradients of h_n, r, z and i_n before their activations, [{sets}, {tokens}, {PARTS * hidden}], and of h_0.",
        "Contiguous tensors.",
    ]
    parameters = ["gates", "hidden", "before", "grad_out", "grad_h_n", "weight_hh", *bias, *extra(spec)]
    wrapped = [line for text in takes for line in textwrap.wrap(text, 110)]
    counts = variant.exchange == "counter"
    rows = f"triton.cdiv(batch, {variant.block_batch})"
    lines = [
        *head("gru_backward", parameters, "The gradient of the recurrence of torch.nn.GRU.", wrapped),
        *refusal(
            f"gates.dtype != torch.{spec.dtype} or gates.shape[0] != {sets} or gates.shape[-1] != {3 * hidden}",
            f"gates must be {spec.dtype} [{sets}, {tokens}, {3 * hidden}]",
            "gates",
        ),
        LENGTHS[spec.layout].rstrip("\n"),
        f"    tokens = gates[0].numel() // {3 * hidden}",
        f"    grads, grad_h_0 = gates.new_empty((*gates.shape[:-1], {PARTS * hidden})), torch.empty_like(grad_h_n)",
        f"    sets = triton.cdiv({rows}, {variant.turns})",
    ]
    given = (
        {}
        if spec.bias
        else {"bias_ih": "grad_h_n", "bias_hh": "grad_h_n", "bias_ih_stride": "0", "bias_hh_stride": "0"}
    )
    if variant.in_turn:
        lines.append("    states = torch.empty(grad_h_n.shape, dtype=torch.float32, device=gates.device)")
    else:
        given |= {"states": "grad_h_n"}
    if counts:
        lines.append(f"    counters = torch.zeros({32 * sets} * {rows}, dtype=torch.int32, device=gates.device)")
    else:  # readers wait until these values are overwritten
        given |= {"counters": "grad_h_n"}
        lines.append(f"    grads.view(torch.int{8 * spec.item}).fill_(-1)")
    if spec.dense:
        given |= {"all_starts": "grad_h_n", "all_lengths": "grad_h_n", "token_stride_t": "batch", "token_stride_b": "1"}
    else:
        given |= {"all_starts": "starts", "all_lengths": "lengths", "token_stride_t": "1", "token_stride_b": "0"}
    given |= {"t_begin": "0", "t_end": "seq + 1"}
    grid = f"{ceil_div(hidden, variant.block_hidden) * sets} * sets"
    # As launches chooses it: rows of a PackedSequence never spin.
    chosen = exchange_lines(spec, dataclasses.replace(variant, exchange=exchange(spec, variant)))
    lines += [*chosen, "    with torch.cuda.device_of(gates):"]
    options = "EXCHANGE=exchange" if chosen else ""
    dims = DIMS if spec.dense else PACKED_DIMS
    return "\n".join(lines) + "\n" + shown.text(grid, dims, given, options=options) + "    return grads, grad_h_0\n"
