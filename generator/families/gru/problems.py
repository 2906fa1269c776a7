"""Default problems of the GRU over sequences, most common first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuned.families.gru.spec import GruSize, GruSpec

from ...problem import Problem


def problems() -> Iterator[Problem]:
    """The default problems: the shapes that the benchmark measures, then those of models, by their public configurations."""

    def problem(name: str, spec: GruSpec, seq: int, batch: int) -> Problem:
        return Problem(name, "gru", spec, GruSize(batch, seq))

    def bf16(hidden: int, **rest: Any) -> GruSpec:
        return GruSpec("bfloat16", hidden, **rest)

    for seq, batch, hidden in (
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
        (128, 8, 2048),
    ):
        yield problem(f"gru_{seq}x{batch}x{hidden}", bf16(hidden), seq, batch)
    # KernelBench, level 3: 39 is six layers, 41 and 42 six of both directions, which run one by one.
    yield problem("kernelbench_39", GruSpec("float32", 256, layers=6), 512, 10)
    yield problem("kernelbench_39_layer", GruSpec("float32", 256), 512, 10)
    yield problem("kernelbench_41_layer", GruSpec("float32", 256, directions=2), 512, 10)
    yield problem("seq2seq_encoder", bf16(512, directions=2), 32, 128)
    yield problem("seq2seq_tutorial_encoder", bf16(128), 10, 32)
    yield problem("wavernn_training", bf16(512), 1375, 32)
    yield problem("lpcnet_training", bf16(384), 2400, 128)
    yield problem("lpcnet_synthesis", bf16(384), 1600, 1)
    yield problem("deepspeech_800_packed", bf16(800, directions=2, layout="packed"), 512, 32)
    yield problem("deepspeech_1024_packed", bf16(1024, directions=2, layout="packed"), 512, 32)
    yield problem("ppo_learner", bf16(256), 128, 128)
    yield problem("dreamer", bf16(600), 64, 16)
    yield problem("gru_fp16_512x32x512", GruSpec("float16", 512), 512, 32)
    yield problem("gru_fp32_512x16x512", GruSpec("float32", 512), 512, 16)
    yield problem("gru_fp32_ieee_512x16x256", GruSpec("float32", 256, precision="ieee"), 512, 16)
    yield problem("gru_two_layers_512x16x512", bf16(512, layers=2), 512, 16)
