"""Every text of a kernel of the GRU over sequences: the product of the text axes; and how a winner is shown."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator

from tuned.families.choices import choices
from tuned.families.copying import KERNEL as COPY
from tuned.families.gru.launches import ALIGNED, kernel_name
from tuned.families.gru.spec import LAYOUTS, GruSize, GruSpec
from tuned.families.gru.variant import PTX_EXCHANGES, SPIN_CAPABILITY, STAGED_WARPS, GruVariant, alone, row_variant
from tuned.families.launch import ceil_div
from tuned.lookup.record import Winner

from ..text import Shown, Text, chosen_lines, head, refusal

ROW_HIDDEN, STAGED_HIDDEN = 64, 1280


def gru_texts() -> Iterator[tuple[GruSpec, GruVariant]]:
    """One spec and variant for each text of a recurrence: layout, layers, form, turns, resets; a stack has only layouts."""
    forms = choices(GruVariant)["form"]
    for resets, layout, layers, form, turns in itertools.product((False, True), LAYOUTS, (1, 2), forms, (1, 2)):
        if ((layers > 1 or turns > 1) and form != GruVariant.form) or (layers > 1 and (turns > 1 or resets)):
            continue
        if form in ("row", "staged") and resets and layout != "dense":  # a rule of the family rejects this
            continue
        spec = GruSpec("bfloat16", 512, layout=layout, layers=layers, resets=resets)
        row = row_variant(ROW_HIDDEN) if form == "row" else None
        if row is not None:
            yield dataclasses.replace(spec, hidden=ROW_HIDDEN), row
        elif form == "staged":
            yield (
                dataclasses.replace(spec, hidden=STAGED_HIDDEN),
                GruVariant("persistent", form, num_warps=STAGED_WARPS),
            )
        else:
            yield spec, GruVariant("persistent", form, turns=turns)


def template(spec: GruSpec, variant: GruVariant) -> str:
    """The template of a recurrence."""
    if variant.by_row:
        return "gru_row"
    if variant.staged:
        return "gru_staged"
    return "gru_stack" if spec.stacked else "gru_turns" if variant.in_turn else "gru_layer"


def texts() -> Iterator[Text]:
    """One for each of gru_texts (an untuned call gets the first form), and the kernel that pads, fills and cuts tensors."""
    for spec, variant in gru_texts():
        # The model offers form "row" for every layout. Rows of a table serve calls with resets too, and those of "tile" are of one length.
        always = variant.form != "tile" or (spec.resets and spec.dense)
        yield template(spec, variant), kernel_name(spec, variant), spec, variant, always
    yield COPY, COPY, *next(gru_texts()), True


# How a winner is shown: the caller's arguments and the launches, as Python text.

LENGTHS = {
    "dense": "    seq, batch = gates.shape[1:3]\n",
    "packed": """\
    seq, batch = len(batch_sizes), int(batch_sizes[0])
    starts = (batch_sizes.cumsum(0) - batch_sizes).to(gates.device)
    lengths = (batch_sizes[:, None] > torch.arange(batch)).sum(0, dtype=torch.int32).to(gates.device)
""",
    "thd": """\
    batch = cu_seqlens.numel() - 1
    starts, lengths = cu_seqlens, cu_seqlens.diff()
""",
}
EXTRA = {"dense": [], "packed": ["batch_sizes"], "thd": ["cu_seqlens", "seq"]}
TAKES = {
    "dense": "",
    "packed": "batch_sizes: int64 [seq] on the CPU, of a PackedSequence.",
    "thd": "cu_seqlens: int32 [batch + 1] on the device of gates; seq: the longest length.",
}
# A letter for each dimension: direction, layer, time, batch; of weights, row and column. Packed tokens have one dimension for time and batch.
DIMS = {"gates": "dtb", "out": "tb", "between": "ltb", "h_0": "lb", "h_n": "lb", "weight_hh": "lrk", "resets": "tb"}
PACKED_DIMS = {**DIMS, "gates": "dt", "out": "t", "between": "lt", "resets": "t"}


def extra(spec: GruSpec) -> list[str]:
    """The last parameters of a shown function: how long sequences are, and marks of resets."""
    return [*EXTRA[spec.layout], *(["resets"] if spec.resets else [])]


def resets_taken(spec: GruSpec) -> str:
    """What the docstring of a shown function says of resets."""
    tokens = "seq, batch" if spec.dense else "tokens"
    return f"resets: bool [{tokens}], whether the state is 0 before a token's step." if spec.resets else ""


def wrapper(winner: Winner, shown: Shown) -> str:
    """The function ``gru`` of a winner, whose kernels stand above it."""
    spec, variant = winner.spec, winner.variant
    body = _library(spec, shown) if variant.strategy == "library" else _recurrence(spec, variant, shown)
    return _head(spec) + body + "    return out, h_n\n"


def _head(spec: GruSpec) -> str:
    tokens, sets = ("seq, batch" if spec.layout == "dense" else "tokens"), spec.layers * spec.directions
    three, hidden = 3 * spec.hidden, spec.hidden
    bias = ["bias_ih", "bias_hh"] if spec.bias else []
    upper = ["weight_ih"] if spec.stacked else []
    takes = [
        f"gates: {spec.dtype} [{spec.directions}, {tokens}, {three}], x @ weight_ih.T of the lowest layer for each direction.",
        f"h_0: [{sets}, batch, {hidden}]; weight_hh: [{sets}, {three}, {hidden}], both of every layer.",
        f"weight_ih: [{spec.layers - 1}, {three}, {hidden}], of the layers above the lowest." if upper else "",
        f"bias_ih, bias_hh: [{sets}, {three}]." if bias else "",
        TAKES[spec.layout],
        resets_taken(spec),
        "Gates in the order r, z, n; last strides 1, matrices contiguous.",
    ]
    wrapped = [line for text in takes for line in textwrap.wrap(text, 110)]
    parameters = ["gates", "h_0", "weight_hh", *upper, *bias, *extra(spec)]
    lines = [
        *head("gru", parameters, "Output and last states of torch.nn.GRU, given the projection of its input.", wrapped),
        *refusal(
            f"gates.dtype != torch.{spec.dtype} or gates.shape[0] != {spec.directions} or gates.shape[-1] != {three}",
            f"gates must be {spec.dtype} [{spec.directions}, {tokens}, {three}]",
            "gates",
        ),
        f"{LENGTHS[spec.layout]}    out = gates.new_empty((*gates.shape[1:-1], {spec.directions * hidden}))",
        "    h_n = torch.empty_like(h_0)\n",
    ]
    return "\n".join(lines)


def _recurrence(spec: GruSpec, variant: GruVariant, shown: Shown) -> str:
    """All steps in one launch, after the tensors that its programs wait on are initialised; or a launch for each step."""
    waits = variant.strategy == "persistent" and not alone(spec, variant)
    counts = waits and variant.exchange == "counter"
    given = {} if spec.bias else {"bias_ih": "h_0", "bias_hh": "h_0", "bias_ih_stride": "0", "bias_hh_stride": "0"}
    # Some templates name the tensors of all programs so, to keep the short names for the parts that one program takes.
    given |= {f"all_{name}": name for name in ("gates", "weight_hh", "h_0", "out", "h_n")}
    given |= {f"all_{name}": "h_0" if spec.dense else name for name in ("starts", "lengths")}
    lines = []
    if spec.stacked:
        lines.append(f"    between = gates.new_empty(({spec.layers - 1}, *gates.shape[1:-1], {spec.hidden}))")
    rows = f"triton.cdiv(batch, {variant.block_batch})"
    sets = spec.layers * spec.directions
    if variant.in_turn:
        lines.append("    states = torch.empty(h_0.shape, dtype=torch.float32, device=gates.device)")
        lines.append(f"    sets = triton.cdiv({rows}, {variant.turns})")
    if counts:
        lines.append(f"    counters = torch.zeros({32 * sets} * {rows}, dtype=torch.int32, device=gates.device)")
    else:
        given |= {"counters": "h_0"}
    if waits and not counts:  # readers wait until these values are overwritten
        word = "int16" if spec.item == 2 else "int32"  # noqa: PLR2004
        lines += [f"    {t}.view(torch.{word}).fill_(-1)" for t in ("out", *(["between"] if spec.stacked else []))]
    exchange, pack = exchange_lines(spec, variant), _pack_lines(spec, shown)
    lines += [*exchange, *pack]
    lines.append("    with torch.cuda.device_of(gates):")
    each = variant.strategy == "steps"
    if each:
        lines.append("        for step in range(seq):")
    given |= {"t_begin": "step", "t_end": "step + 1"} if each else {"t_begin": "0", "t_end": "seq"}
    cells = ceil_div(spec.hidden, variant.block_hidden) * (spec.layers if variant.staged else sets)
    grid = f"{cells} * {'sets' if variant.in_turn else rows}"
    dims = DIMS if spec.layout == "dense" else PACKED_DIMS
    options = "EXCHANGE=exchange" if exchange else "PACK=pack" if pack else ""
    return "\n".join(lines) + "\n" + shown.text(grid, dims, given, indent=12 if each else 8, options=options)


def exchange_lines(spec: GruSpec, variant: GruVariant) -> list[str]:
    """Lines that choose how programs wait, if the winner's exchange needs instructions that not every GPU has; else none."""
    if variant.strategy != "persistent" or variant.exchange not in PTX_EXCHANGES:
        return []
    return chosen_lines(
        "exchange", "gates", divmod(SPIN_CAPABILITY[spec.item], 10), (f'"{variant.exchange}"', '"poll"')
    )


def _pack_lines(spec: GruSpec, shown: Shown) -> list[str]:
    """Lines that choose how many weights form "row" loads at a time: several only where their addresses are multiples, as in a launch."""
    several = shown.launch.constants.get("PACK", 1)
    if several == 1:
        return []
    aligned = f"weight_hh.data_ptr() % {ALIGNED} == 0"
    if spec.directions > 1:
        aligned += f" and weight_hh.stride(0) % {ALIGNED} == 0"
    return [f"    pack = {several} if {aligned} else 1"]


def _library(spec: GruSpec, shown: Shown) -> str:
    """For each direction and step a GEMM, then the kernel of the gates."""
    given = {"gates_x": "gates[direction, t]", "gates_h": "products", "h": "state", "out": "after"}
    given |= {name: f"{name}[direction]" for name in ("bias_ih", "bias_hh")}
    block, hidden = shown.launch.constants["BLOCK_BATCH"], spec.hidden
    grid = f"triton.cdiv(batch, {block}) * {ceil_div(hidden, shown.launch.constants['BLOCK_HIDDEN'])}"
    return f"""\
    products = gates.new_empty((batch, {3 * hidden}))
    with torch.cuda.device_of(gates):
        for direction in range({spec.directions}):
            state = h_0[direction]
            for step in range(seq):
                t = seq - 1 - step if direction else step
                after = out[t, :, direction * {hidden} : (direction + 1) * {hidden}]
                torch.mm(state, weight_hh[direction].t(), out=products)
{shown.text(grid, {"h": "bd", "out": "bd"}, given, indent=16)}                state = after
            h_n[direction] = state
"""


def shown_size(size: GruSize) -> GruSize:
    """At least two steps: in a single step no program waits for another, but the file must serve any number of steps."""
    return dataclasses.replace(size, seq=max(2, size.seq))
