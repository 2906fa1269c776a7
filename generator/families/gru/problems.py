"""Default problems of the GRU over sequences, most common first."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

from tuned.families.gru.spec import GruSize, GruSpec

from ...problem import Problem


def _bf16(hidden: int, **rest: Any) -> GruSpec:
    return GruSpec("bfloat16", hidden, **rest)


# Steps, batch and hidden size: the shapes that the benchmark measures.
MEASURED = (
    (512, 16, 512),
    (512, 32, 512),
    (512, 64, 512),
    (512, 1, 512),
    (512, 1, 1024),
    (512, 10, 256),
    (512, 128, 128),
    (512, 128, 256),
    (512, 16, 1024),
    (512, 64, 1024),
    (256, 128, 512),
    (128, 1024, 256),
    (64, 1024, 512),
    (128, 8, 2048),
)
# Name, spec, steps and batch of models, by their public configurations.
MODELS = (
    # KernelBench, level 3: problem 39 has six layers; 41 and 42 have six of both directions, which run one by one.
    ("kernelbench_39", GruSpec("float32", 256, layers=6), 512, 10),
    ("kernelbench_39_layer", GruSpec("float32", 256), 512, 10),
    ("kernelbench_41_layer", GruSpec("float32", 256, directions=2), 512, 10),
    ("seq2seq_encoder", _bf16(512, directions=2), 32, 128),
    ("seq2seq_tutorial_encoder", _bf16(128), 10, 32),
    ("wavernn_training", _bf16(512), 1375, 32),
    ("lpcnet_training", _bf16(384), 2400, 128),
    ("lpcnet_synthesis", _bf16(384), 1600, 1),
    ("deepspeech_800_packed", _bf16(800, directions=2, layout="packed"), 512, 32),
    ("deepspeech_1024_packed", _bf16(1024, directions=2, layout="packed"), 512, 32),
    ("ppo_learner", _bf16(256), 128, 128),
    ("dreamer", _bf16(600), 64, 16),
    ("gru_fp16_512x32x512", GruSpec("float16", 512), 512, 32),
    ("gru_fp32_512x16x512", GruSpec("float32", 512), 512, 16),
    ("gru_fp32_ieee_512x16x256", GruSpec("float32", 256, precision="ieee"), 512, 16),
    ("gru_two_layers_512x16x512", _bf16(512, layers=2), 512, 16),
)

# No GRU of these hidden sizes and batches is further from one of the grid than a factor of 1.5 and 2.
GRID_HIDDEN = (96, 208, 448, 960, 2048)
GRID_BATCH = (2, 8, 32, 128, 512)
# Hidden sizes whose rows are no multiples of 16 bytes, and pairs of hidden size and batch that need several turns.
ODD = ((100, 4), (100, 64), (330, 4), (330, 64), (1001, 4), (1001, 64), (640, 24), (768, 100), (1280, 48))
GRID_STEPS = 64  # a row serves every length: the time of a step does not depend on the length


def problems() -> Iterator[Problem]:
    """The default problems: those that the benchmark measures, then those of models, then a grid."""
    measured = ((f"gru_{seq}x{batch}x{hidden}", _bf16(hidden), seq, batch) for seq, batch, hidden in MEASURED)
    for name, spec, seq, batch in (*measured, *MODELS):
        yield Problem(name, "gru", spec, GruSize(batch, seq))
    grid = [(hidden, batch) for hidden in GRID_HIDDEN for batch in GRID_BATCH]
    for (hidden, batch), dtype in itertools.product((*grid, *ODD), ("bfloat16", "float32")):
        name = f"gru_grid_{'bf16' if dtype == 'bfloat16' else 'fp32'}_{batch}x{hidden}"
        yield Problem(name, "gru", GruSpec(dtype, hidden), GruSize(batch, GRID_STEPS))


DRAWN_HIDDEN, DRAWN_BATCH, DRAWN_STEPS = (32, 2048), (1, 512), (16, 48, 128)


def drawn(draw: random.Random) -> Problem:
    """Dense layers of any shape, two in five a stack: hidden size and batch log-uniform, not rounded."""

    def between(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    dtype, hidden = draw.choice(("bfloat16", "float32")), between(*DRAWN_HIDDEN)
    directions, layers = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2), (1, 3)))
    spec = GruSpec(dtype, hidden, directions=directions, layers=layers)
    return Problem("drawn", "gru", spec, GruSize(between(*DRAWN_BATCH), draw.choice(DRAWN_STEPS)))
