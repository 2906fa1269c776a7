"""Default problems of the gradient of a GRU over sequences, most common first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuned.families.gru.spec import GruSize, GruSpec

from ...problem import Problem

STEPS = 128  # a row serves every length: the time of a step does not depend on the length


def _bf16(hidden: int, **rest: Any) -> GruSpec:
    return GruSpec("bfloat16", hidden, **rest)


def _fp32(hidden: int, **rest: Any) -> GruSpec:
    return GruSpec("float32", hidden, **rest)


# Batch and hidden size.
MEASURED = (
    (32, 512),
    (64, 512),
    (16, 512),
    (1, 512),
    (1, 1024),
    (16, 1024),
    (64, 1024),
    (10, 256),
    (128, 256),
    (1024, 256),
    (128, 512),
    (1024, 512),
    (128, 128),
    (1024, 128),
    (8, 2048),
)
# Name, spec and batch of models, by their public configurations.
MODELS = (
    ("kernelbench_39_layer_backward", _fp32(256), 10),
    ("kernelbench_41_layer_backward", _fp32(256, directions=2), 10),
    ("seq2seq_encoder_backward", _bf16(512, directions=2), 128),
    ("brain_to_text_backward", _bf16(768), 64),
    ("lpcnet_training_backward", _bf16(384), 128),
    ("deepspeech_800_packed_backward", _bf16(800, directions=2, layout="packed"), 32),
    ("dreamer_backward", _bf16(600), 16),
    ("gru_odd_backward_64x330", _bf16(330), 64),
    ("ppo_thd_backward", _bf16(256, layout="thd"), 128),
    ("gru_fp16_backward_32x512", GruSpec("float16", 512), 32),
    ("gru_fp32_backward_32x512", _fp32(512), 32),
    ("gru_fp32_backward_1x512", _fp32(512), 1),
    ("gru_fp32_backward_128x128", _fp32(128), 128),
    ("gru_fp32_backward_128x512", _fp32(512), 128),
    ("gru_fp32_backward_64x1024", _fp32(1024), 64),
    ("gru_fp32_ieee_backward_16x256", _fp32(256, precision="ieee"), 16),
)
# A grid for shapes of no model: hidden sizes whose rows are multiples of 16 bytes in float32, and odd sizes, each with
# the batches that a kernel has room for: 1,625 units spill. A row serves shapes up to 3 octaves away, which covers all
# between.
GRID_STEPS = 64
FEW, GRID_BATCH = (3, 24), (3, 24, 190)
GRID = (
    *(("bfloat16", hidden, GRID_BATCH) for hidden in (51, 101, 203, 407, 813)),
    *(("float32", hidden, GRID_BATCH) for hidden in (51, 64, 101, 128, 203, 256, 407, 512)),
    *(("float32", hidden, FEW) for hidden in (813, 1024)),
)


def problems() -> Iterator[Problem]:
    """The default problems: those that the benchmark measures, then those of models, then a grid."""
    measured = ((f"gru_backward_{batch}x{hidden}", _bf16(hidden), batch) for batch, hidden in MEASURED)
    for name, spec, batch in (*measured, *MODELS):
        yield Problem(name, "gru_backward", spec, GruSize(batch, STEPS))
    for dtype, hidden, batches in GRID:
        for batch in batches:
            name = f"gru_grid_backward_{'bf16' if dtype == 'bfloat16' else 'fp32'}_{batch}x{hidden}"
            yield Problem(name, "gru_backward", GruSpec(dtype, hidden), GruSize(batch, GRID_STEPS))
