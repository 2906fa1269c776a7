"""The GRU rows to measure, as data: sequences, single steps and output layers; rows that a bar judges come first."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from benchmarks.record import Row
from tuned.calls.products import name_of as dtype_name

MATRIX_FLOPS = {  # a second, dense, on an H200: 790e12 was measured in bfloat16; TF32 runs at half the rate
    torch.bfloat16: 790e12,
    torch.float16: 790e12,
    torch.float32: 395e12,
}
Operation = Literal["cell", "step", "linear_cat"]


@dataclasses.dataclass(frozen=True)
class SequenceCall:
    """A forward pass of a GRU with biases over a sequence, from a hidden state of zeros.

    ``lengths``, if given, are those of ``batch`` packed sequences, longest first; the longest has ``steps`` steps.
    """

    steps: int
    batch: int
    input_size: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = ()

    @property
    def directions(self) -> int:
        """1, or 2 if bidirectional."""
        return 2 if self.bidirectional else 1

    @property
    def tokens(self) -> int:
        """Steps of all sequences together."""
        return sum(self.lengths) or self.steps * self.batch

    @property
    def problem(self) -> str:
        """The sizes as text: steps, batch, input size, hidden size, layers, and bi for both directions."""
        layers = f" l{self.layers}" if self.layers > 1 else ""
        return f"t{self.steps} b{self.batch} i{self.input_size} h{self.hidden}{layers}{' bi' * self.bidirectional}"

    @property
    def layout(self) -> str:
        """How the sequences lie in memory."""
        return "packed" if self.lengths else "seq first"

    @property
    def words(self) -> tuple[str, ...]:
        """Words that tell this call from any other."""
        return (self.problem, self.layout, dtype_name(self.dtype), "forward")

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of this call in a record."""
        return {
            "problem": self.problem,
            "layout": self.layout,
            "dtype": dtype_name(self.dtype),
            "direction": "forward",
            "sizes": {
                "steps": self.steps,
                "batch": self.batch,
                "input": self.input_size,
                "hidden": self.hidden,
                "layers": self.layers,
                "directions": self.directions,
                "tokens": self.tokens,
            },
        }

    @property
    def weights(self) -> int:
        """Elements of all weight matrices; the biases are left out, as in the floor."""
        inner = (self.layers - 1) * (self.directions * self.hidden + self.hidden)
        return 3 * self.hidden * self.directions * (self.input_size + self.hidden + inner)

    @property
    def moved_bytes(self) -> int:
        """Bytes that must move: input and weights read once, the last layer's output written once."""
        return (self.tokens * (self.input_size + self.directions * self.hidden) + self.weights) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, with the input projection."""
        return 2 * self.tokens * self.weights


@dataclasses.dataclass(frozen=True)
class StepCall:
    """One call with cold weights: a GRU cell, a decoder's step of several inputs, or its output layer."""

    operation: Operation
    batch: int
    segments: tuple[int, ...]  # widths of the inputs, taken as if concatenated
    outputs: int  # hidden size, or for linear_cat the vocabulary
    dtype: torch.dtype = torch.bfloat16

    @property
    def problem(self) -> str:
        """Operation and sizes as text: batch, widths of the inputs, outputs."""
        return f"{self.operation} b{self.batch} i{'+'.join(map(str, self.segments))} h{self.outputs}"

    @property
    def words(self) -> tuple[str, ...]:
        """Words that tell this call from any other."""
        return (self.problem, dtype_name(self.dtype), "forward")

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of this call in a record."""
        return {
            "problem": self.problem,
            "layout": "rows",
            "dtype": dtype_name(self.dtype),
            "direction": "forward",
            "operation": self.operation,
            "sizes": {"batch": self.batch, "segments": list(self.segments), "outputs": self.outputs},
        }

    @property
    def weights(self) -> int:
        """Elements of the weight matrices."""
        width = sum(self.segments)
        return self.outputs * width if self.operation == "linear_cat" else 3 * self.outputs * (width + self.outputs)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight matrices, which any implementation must read."""
        return self.weights * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products."""
        return 2 * self.batch * self.weights


# steps, batch, hidden and input size; the bar
SEQUENCES = (
    (512, 16, 512, "small, H 512, B 16 to 64"),
    (512, 32, 512, "small, H 512, B 16 to 64"),
    (512, 1, 512, "small, H to 512"),
    (512, 10, 256, "small, H to 512"),
    (512, 128, 128, "small, H to 512"),
    (512, 1, 1024, "small, H 1024"),
    (512, 16, 1024, "small, H 1024"),
    (512, 128, 256, "medium"),
    (256, 128, 512, "medium"),
    (512, 64, 1024, "large"),
    (128, 8, 2048, "large"),
    (128, 1024, 256, "wide"),
    (512, 64, 512, "H 512, B 64"),
)
KERNELBENCH = SequenceCall(512, 10, 128, 256, layers=6, dtype=torch.float32)
UNEVEN = tuple(range(512, 0, -4))  # 128 lengths
OTHERS = (
    ("KernelBench 41 and 42", dataclasses.replace(KERNELBENCH, bidirectional=True)),
    ("", SequenceCall(512, 16, 512, 512, bidirectional=True)),
    ("", SequenceCall(UNEVEN[0], len(UNEVEN), 512, 512, lengths=UNEVEN)),
    ("", SequenceCall(512, 32, 512, 512, dtype=torch.float16)),
    ("", SequenceCall(512, 16, 512, 512, dtype=torch.float32)),
    ("seq2seq encoder", SequenceCall(30, 128, 256, 512, bidirectional=True)),
    ("seq2seq tutorial", SequenceCall(10, 32, 128, 128)),
    ("WaveRNN", SequenceCall(1375, 32, 512, 512)),
    ("LPCNet, first GRU", SequenceCall(2400, 128, 512, 384)),
    ("LPCNet, second GRU", SequenceCall(2400, 128, 512, 16)),
    ("like DeepSpeech 2", SequenceCall(500, 16, 1312, 800, layers=5, bidirectional=True)),
    ("like PPO", SequenceCall(128, 128, 256, 256)),
    ("like Dreamer", SequenceCall(64, 16, 512, 512)),
)
CELLS = ((1, 512), (1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 2048), (64, 2048), (1024, 512))
HUGE_HIDDEN = 2048  # cells from this size on have a lower bar: reading the weights takes half of nn.GRUCell's time
DECODER_BATCHES = (1, 128)
EMBEDDING, CONTEXT, DECODER_HIDDEN, VOCABULARY = 256, 512, 512, 10_000


def sequences() -> list[Row[SequenceCall]]:
    """The suite "gru"."""
    rows = [Row("gru", SequenceCall(t, b, h, h), bar, kind="call") for t, b, h, bar in SEQUENCES]
    rows.insert(1, Row("gru", KERNELBENCH, "KernelBench 39", name="KernelBench 39 and 40", kind="call"))
    return rows + [Row("gru", call, None, name=name, kind="call") for name, call in OTHERS]


def steps() -> list[Row[StepCall]]:
    """The suite "gru_cell": cells, the decoder's step and its output layer."""
    rows = [
        Row("gru_cell", StepCall("cell", b, (h,), h), "cell, H 2048" if h >= HUGE_HIDDEN else "cell") for b, h in CELLS
    ]
    for batch in DECODER_BATCHES:
        step = StepCall("step", batch, (EMBEDDING, CONTEXT), DECODER_HIDDEN)
        output = StepCall("linear_cat", batch, (DECODER_HIDDEN, CONTEXT, EMBEDDING), VOCABULARY)
        rows += [Row("gru_cell", call, "segments", name="seq2seq decoder") for call in (step, output)]
    return rows
