"""Default problems of the linear over segments, most common first."""

from __future__ import annotations

from collections.abc import Iterator

from tuned.families.linear_cat.spec import LinearCatSize, LinearCatSpec

from ...problem import Problem


def problems() -> Iterator[Problem]:
    """The default problems: a seq2seq decoder's output layer, over hidden state, context and embedding; a GRU's projection.

    The latter is float32 where torch's settings allow a GRU TF32 and GEMMs not, as they do by default.
    """
    spec = LinearCatSpec("bfloat16", (512, 512, 256), 10_000)
    for rows in (1, 128):
        yield Problem(f"linear_cat_decoder_{rows}", "linear_cat", spec, LinearCatSize(rows))
    projection = LinearCatSpec("float32", (512,), 1536, bias=False, precision="tf32")
    yield Problem("gru_projection_tf32_8192", "linear_cat", projection, LinearCatSize(8192))
