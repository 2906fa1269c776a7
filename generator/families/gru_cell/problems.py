"""Default problems of the GRU step, most common first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec

from ...problem import Problem


def _square(hidden: int, dtype: str = "bfloat16", **rest: Any) -> GruCellSpec:
    return GruCellSpec(dtype, hidden, (hidden,), **rest)


# Name, spec and batches: steps that models take one at a time, most common first.
PROBLEMS: tuple[tuple[str, GruCellSpec, tuple[int, ...]], ...] = (
    ("512", _square(512), (1,)),
    ("1024", _square(1024), (1, 16, 64, 256)),
    ("2048", _square(2048), (1, 64)),
    ("512", _square(512), (1024, 64)),
    ("1024_inplace", _square(1024, inplace=True), (64,)),
    ("decoder", GruCellSpec("bfloat16", 512, (256, 512)), (1, 128)),  # embedding and context: the decoder of examples/
    # github.com/bentrevett/pytorch-seq2seq, notebook 3: embedding 256, context of both directions 2 * 512
    ("bahdanau", GruCellSpec("bfloat16", 512, (256, 1024)), (128,)),
    ("ppo_128", _square(128), (256, 4096)),  # PPO's policies, acting
    ("ppo_256", _square(256), (256, 4096)),
    ("dreamer_200", _square(200), (16, 1024)),  # Dreamer: a step, and its imagination
    ("dreamer_600", _square(600), (16, 1024)),
    ("wavernn_512", _square(512), (11,)),  # WaveRNN, generating; github.com/fatchord/WaveRNN has 512
    ("wavernn_896", _square(896), (1, 11)),
    ("512_tf32", _square(512, "float32", precision="tf32"), (1, 64)),
    ("1024_fp16", _square(1024, "float16"), (64,)),
)


# A grid: between these sizes and batches the nearest row serves. It is in bfloat16, and in float32 at the default
# precision.
GRID_HIDDEN = (48, 96, 192, 384, 768)
GRID_BATCH = (1, 6, 40, 200, 800)
# Of rows that are no multiple of 16 bytes, which nearest rows of the other grid say nothing of.
UNALIGNED_HIDDEN = (75, 225, 675)
UNALIGNED_BATCH = (5, 30, 180)
UNALIGNED_LARGE, LARGE_BATCH = 2025, (5, 30)  # larger steps are PyTorch's in float32
# In bfloat16, which form "padded" is for: (hidden, batch), and (input, hidden, batches) of different widths.
PADDED = ((75, 700), (225, 700), (675, 700), (2025, 180), (2025, 700))
SKEWED = ((75, 675, (30, 180, 700)),)


def problems() -> Iterator[Problem]:
    """The default problems: those of models in the order of the list, then the grid."""
    for name, spec, batches in PROBLEMS:
        for batch in batches:
            yield Problem(f"gru_cell_{name}_{batch}", "gru_cell", spec, GruCellSize(batch))
    grids = (
        ("grid", GRID_HIDDEN, GRID_BATCH),
        ("unaligned", UNALIGNED_HIDDEN, UNALIGNED_BATCH),
        ("unaligned", (UNALIGNED_LARGE,), LARGE_BATCH),
    )
    for grid, hiddens, batches in grids:
        for hidden, batch in itertools.product(hiddens, batches):
            for short, spec in (("bf16", _square(hidden)), ("fp32", _square(hidden, "float32", precision="ieee"))):
                yield Problem(f"gru_cell_{grid}_{short}_{batch}x{hidden}", "gru_cell", spec, GruCellSize(batch))
    for hidden, batch in PADDED:
        yield Problem(f"gru_cell_unaligned_bf16_{batch}x{hidden}", "gru_cell", _square(hidden), GruCellSize(batch))
    for width, hidden, batches in SKEWED:
        for batch in batches:
            name = f"gru_cell_unaligned_bf16_{batch}x{width}x{hidden}"
            yield Problem(name, "gru_cell", GruCellSpec("bfloat16", hidden, (width,)), GruCellSize(batch))
