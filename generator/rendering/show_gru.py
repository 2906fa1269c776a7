"""The function of a shown GRU: what a caller gives, and the launches of the variant, as Python text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tuned.families.gru.variant import alone
from tuned.families.launch import Launch, ceil_div

if TYPE_CHECKING:
    from tuned.families.gru.spec import GruSpec
    from tuned.families.gru.variant import GruVariant
    from tuned.families.launch import Step
    from tuned.lookup.record import Winner

WIDTH = 100  # characters of a line of arguments
LENGTHS = {
    "dense": "",
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


def wrapper(winner: Winner, steps: tuple[Step, ...]) -> str:
    """The function ``gru`` of a winner, whose kernels stand above it."""
    spec, variant = winner.spec, winner.variant
    launch = next(step for step in steps if isinstance(step, Launch))
    body = _library(spec, launch) if variant.strategy == "library" else _recurrence(spec, variant, launch)
    return _head(spec) + body + "    return out, h_n\n"


def _head(spec: GruSpec) -> str:
    tokens, sets = ("seq, batch" if spec.layout == "dense" else "tokens"), spec.layers * spec.directions
    three, hidden = 3 * spec.hidden, spec.hidden
    bias = ["bias_ih", "bias_hh"] if spec.bias else []
    upper = ["weight_ih"] if spec.stacked else []
    takes = [
        f"gates: {spec.dtype} [{spec.directions}, {tokens}, {three}], x @ weight_ih.T of the lowest layer for each direction.",
        f"h_0: [{sets}, batch, {hidden}]; weight_hh: [{sets}, {three}, {hidden}], both of every layer.",
        *([f"weight_ih: [{spec.layers - 1}, {three}, {hidden}], of the layers above the lowest."] if upper else []),
        *([f"bias_ih, bias_hh: [{sets}, {three}]."] if bias else []),
        *([TAKES[spec.layout]] if TAKES[spec.layout] else []),
    ]
    wanted = f"gates must be {spec.dtype} [{spec.directions}, {tokens}, {three}]"
    parameters = ", ".join(["gates", "h_0", "weight_hh", *upper, *bias, *EXTRA[spec.layout]])
    lines = [
        f"def gru({parameters}):",
        '    """Output and last states of torch.nn.GRU, given the projection of its input. No autograd.',
        "",
        *(f"    {line}" for text in takes for line in textwrap.wrap(text, 110)),
        "    Gates in the order r, z, n; last strides 1, matrices contiguous.",
        '    """',
        f"    if gates.dtype != torch.{spec.dtype} or gates.shape[0] != {spec.directions} or gates.shape[-1] != {three}:",
        f'        raise ValueError(f"{wanted}, got {{gates.dtype}} {{tuple(gates.shape)}}")',
        *(["    seq, batch = gates.shape[1:3]"] if spec.layout == "dense" else []),
    ]
    made = [
        f"    out = gates.new_empty((*gates.shape[1:-1], {spec.directions * hidden}))",
        "    h_n = torch.empty_like(h_0)",
    ]
    return "\n".join(lines) + "\n" + LENGTHS[spec.layout] + "\n".join(made) + "\n"


def _recurrence(spec: GruSpec, variant: GruVariant, launch: Launch) -> str:
    """All steps in one launch, after what its programs wait for is put into place; or a launch for each step."""
    waits = variant.strategy == "persistent" and not alone(spec, variant)
    counts = waits and variant.exchange == "counter"
    lines = []
    if spec.stacked:
        lines.append(f"    between = gates.new_empty(({spec.layers - 1}, *gates.shape[1:-1], {spec.hidden}))")
    rows = f"triton.cdiv(batch, {variant.block_batch})"
    sets = spec.layers * spec.directions
    if counts:
        lines.append(f"    counters = torch.zeros({32 * sets} * {rows}, dtype=torch.int32, device=gates.device)")
    elif waits:  # what readers wait to see go away
        word = "int16" if spec.item == 2 else "int32"  # noqa: PLR2004
        lines += [f"    {t}.view(torch.{word}).fill_(-1)" for t in ("out", *(["between"] if spec.stacked else []))]
    begin, end = ("0", "seq") if variant.strategy == "persistent" else ("step", "step + 1")
    indent = " " * (8 if variant.strategy == "persistent" else 12)
    lines.append("    with torch.cuda.device_of(gates):")
    if variant.strategy == "steps":
        lines.append("        for step in range(seq):")
    arguments = _arguments(spec, begin, end, "counters" if counts else "h_0")
    grid = f"{ceil_div(spec.hidden, variant.block_hidden) * sets} * {rows}"
    return "\n".join(lines) + "\n" + _call(launch, grid, arguments, indent)


def _arguments(spec: GruSpec, begin: str, end: str, counters: str) -> list[str]:
    """In the order of the kernel's signature, as tuned.families.gru.launches.sequence gives them."""
    dense = spec.layout == "dense"

    def strides(tensor: str, first: int) -> list[str]:
        return [f"{tensor}.stride({first})", f"{tensor}.stride({first + 1})" if dense else "0"]

    upper, between = (["weight_ih"], ["between"]) if spec.stacked else ([], [])
    bias = ["bias_ih", "bias_hh"] if spec.bias else ["h_0", "h_0"]
    bias_strides = ["bias_ih.stride(0)", "bias_hh.stride(0)"] if spec.bias else ["0", "0"]
    return [
        *("gates", *upper, "weight_hh", *bias, "h_0", "out", *between, "h_n", counters),
        *([] if dense else ["starts", "lengths"]),
        *("batch", "seq", begin, end, "gates.stride(0)", *strides("gates", 1)),
        *(f"{t}.stride(0)" for t in (*upper, "weight_hh")),
        *bias_strides,
        *("h_0.stride(0)", "h_0.stride(1)", *strides("out", 0)),
        *(["between.stride(0)", *strides("between", 1)] if spec.stacked else []),
        *("h_n.stride(0)", "h_n.stride(1)"),
    ]


def _library(spec: GruSpec, launch: Launch) -> str:
    """For each direction and step a GEMM, then the kernel of the gates."""
    bias = ["bias_ih[direction]", "bias_hh[direction]"] if spec.bias else []
    arguments = ["gates[direction, t]", "products", *bias, "state", "after", "batch"]
    arguments += [f"{t}.stride(0)" for t in ("gates[direction, t]", "products")]
    arguments += ["state.stride(0)", "state.stride(1)", "after.stride(0)", "after.stride(1)"]
    block, hidden = launch.constants["BLOCK_BATCH"], spec.hidden
    grid = f"triton.cdiv(batch, {block}) * {ceil_div(hidden, launch.constants['BLOCK_HIDDEN'])}"
    return f"""\
    products = gates.new_empty((batch, {3 * hidden}))
    with torch.cuda.device_of(gates):
        for direction in range({spec.directions}):
            state = h_0[direction]
            for step in range(seq):
                t = seq - 1 - step if direction else step
                after = out[t, :, direction * {hidden} : (direction + 1) * {hidden}]
                torch.mm(state, weight_hh[direction].t(), out=products)
{_call(launch, grid, arguments, " " * 16)}                state = after
            h_n[direction] = state
"""


def _call(launch: Launch, grid: str, arguments: list[str], indent: str) -> str:
    words = [*arguments, *(f"{name}={value!r}" for name, value in launch.options.items())]
    inner = "".join(f"{indent}    {line}\n" for line in textwrap.wrap(", ".join(words), WIDTH - len(indent)))
    return f"{indent}{launch.kernel}[({grid},)](\n{inner.rstrip()},\n{indent})\n"
