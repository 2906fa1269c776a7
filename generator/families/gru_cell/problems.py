"""Default problems of the GRU step, most common first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec

from ...problem import Problem


def problems() -> Iterator[Problem]:
    """The default problems: steps that models take one at a time, most common first."""

    def problem(name: str, spec: GruCellSpec, batch: int) -> Problem:
        return Problem(f"gru_cell_{name}_{batch}", "gru_cell", spec, GruCellSize(batch))

    def square(hidden: int, dtype: str = "bfloat16", **rest: Any) -> GruCellSpec:
        return GruCellSpec(dtype, hidden, (hidden,), **rest)

    for hidden, batch in ((512, 1), (1024, 1), (1024, 16), (1024, 64), (1024, 256), (2048, 1), (2048, 64), (512, 1024)):
        yield problem(str(hidden), square(hidden), batch)
    yield problem("512", square(512), 64)
    yield problem("1024_inplace", square(1024, inplace=True), 64)
    for batch in (1, 128):  # of embedding and context: the seq2seq decoder of examples/
        yield problem("decoder", GruCellSpec("bfloat16", 512, (256, 512)), batch)
    # github.com/bentrevett/pytorch-seq2seq, notebook 3: embedding 256, context of both directions 2 * 512
    yield problem("bahdanau", GruCellSpec("bfloat16", 512, (256, 1024)), 128)
    for hidden, batch in ((128, 256), (128, 4096), (256, 256), (256, 4096)):  # PPO's policies, acting
        yield problem(f"ppo_{hidden}", square(hidden), batch)
    for hidden, batch in ((200, 16), (200, 1024), (600, 16), (600, 1024)):  # Dreamer: a step, and its imagination
        yield problem(f"dreamer_{hidden}", square(hidden), batch)
    for hidden, batch in ((512, 11), (896, 1), (896, 11)):  # WaveRNN, generating; github.com/fatchord/WaveRNN has 512
        yield problem(f"wavernn_{hidden}", square(hidden), batch)
    for batch in (1, 64):
        yield problem("512_tf32", square(512, "float32", precision="tf32"), batch)
    yield problem("1024_fp16", square(1024, "float16"), 64)
